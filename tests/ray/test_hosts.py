"""A Ray cluster on hosts with networks of their own: pservers are reached at their hosts' addresses, with the token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jobs
import on_ray
import pytest

from tools.netlab import Host, Netlab, unavailable

pytest.importorskip("ray", reason=on_ray.NEEDS_RAY)
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
PROGRAM = """
import json
import jobs, on_ray, ray, tfps.ray

def exchange():
    worker = on_ray.join()
    worker.declare([on_ray.SUM])
    summed = jobs.summed(jobs.push(worker, 0, bytes.fromhex("0000803f") * 100).wait())
    links = {link.pserver: link.shared_memory for link in worker.info.links()}
    own = ray.util.get_node_ip_address()
    return {"rank": worker.rank, "sum": set(summed.tolist()).pop(), "links": links, "on": own}

ray.init(log_to_driver=False)
jobs.poll(lambda: ray.cluster_resources().get("CPU") == 2)
print(json.dumps(tfps.ray.run(exchange, workers=2)))
"""


def on(host: Host, *command: str, **variables: str) -> str:
    """What a command prints, which must succeed."""
    folders: Sequence[Path] = (jobs.ROOT, jobs.ROOT / "tests" / "helpers")
    process = host.popen(
        command,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "RAY_USAGE_STATS_ENABLED": "0",
            **on_ray.WITHOUT_AUTH,
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def test_each_host_has_a_pserver_which_its_worker_shares_memory_with_and_the_other_reaches() -> None:
    start = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1", f"--object-store-memory={80 * 2**20}"]
    with Netlab(hosts=2, rate_mbit=1000) as lab:
        head, other = lab.hosts
        on(head, *start, "--head", f"--node-ip-address={head.address}", "--port=6379", "--include-dashboard=false")
        on(other, *start, f"--node-ip-address={other.address}", f"--address={head.address}:6379")
        ranks = json.loads(on(head, sys.executable, "-c", PROGRAM, RAY_ADDRESS=f"{head.address}:6379"))
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert [rank["sum"] for rank in ranks] == [2.0, 2.0]
    assert {rank["on"] for rank in ranks} == {head.address, other.address}
    for rank in ranks:
        reached = {address.rpartition(":")[0]: shared for address, shared in rank["links"].items()}
        assert reached == {host.address: host.address == rank["on"] for host in (head, other)}
