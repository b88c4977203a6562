"""`tfps_pserver`: runs one pserver until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence

from tfps.errors import TfpsError
from tfps.memory import tune_malloc
from tfps.server import ParameterServer


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code. Prints one line to stdout, `tfps_pserver ready at HOST:PORT workers=N`."""
    parser = argparse.ArgumentParser(prog="tfps_pserver", description="Parameter server: sums what workers push.")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all interfaces)")
    parser.add_argument("--port", type=int, default=7070, help="port to listen on; 0 picks a free one (default: 7070)")
    parser.add_argument("--workers", type=int, required=True, help="number of workers of a job")
    parser.add_argument("--job", default="", help="serve only jobs of this name (default: any, one at a time)")
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 65536:
        parser.error(f"--port must be from 0 to 65535, got {options.port}")

    tune_malloc(one_arena=True)
    logging.basicConfig(level=logging.INFO, format="tfps_pserver: %(message)s", stream=sys.stderr)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = ParameterServer(options.host, options.port, workers=options.workers, job=options.job)
    except TfpsError as error:
        print(f"tfps_pserver: {error}", file=sys.stderr)
        return 1
    print(f"tfps_pserver ready at {server.address} workers={options.workers}", flush=True)
    stop.wait()
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
