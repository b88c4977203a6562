"""Where Horovod's workers find each other. `horovodrun` starts the same, but wants ssh between hosts.

python -m peer_workers.horovod_rendezvous HOST:SLOTS,...
"""

from __future__ import annotations

import sys
import threading

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts  # type: ignore[import-not-found]
from horovod.runner.http.http_server import RendezvousServer  # type: ignore[import-not-found]

from tools.peer_workers.common import say


def main() -> None:
    hosts = parse_hosts(sys.argv[1])
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
    say({"event": "ready", "port": port})
    threading.Event().wait()  # whoever started it ends it


if __name__ == "__main__":
    main()
