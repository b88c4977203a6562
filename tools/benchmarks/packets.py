"""How much slower a job is on a network that loses 1 % of its packets.

Two workers with `min_workers` and two pservers, each on a host of its own with a link of 100 Mbit/s (root), exchange 1
MB per step, without TensorFlow: one job where workers' links lose 1 % of the packets of each direction, and one where
they lose none, in turn. Steps per second and the longest step of 200, after 50 others. All packets pass a process that
has to be given a core now and then, so a busy machine makes both jobs slower.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import sys
import time
from contextlib import ExitStack

from tfps.types import Json
from tools import children
from tools.benchmarks.common import Outcome, median
from tools.netlab import Netlab

TRANSPORTS = ("tcp", "grpc")
RATE_MBIT, SHARE, NBYTES = 100, 0.01, 1_000_000
STEPS_BEFORE, STEPS = 50, 200
ANSWER_S = 300.0
_ME = str(pathlib.Path(__file__))


def run(quick: bool) -> Outcome:
    """Medians over pairs of jobs."""
    runs: list[dict[str, Json]] = []
    headline: dict[str, float] = {}
    for transport in TRANSPORTS:
        found = [_pair(transport, number) for number in range(1 if quick else 3)]
        runs += found
        for name in ("ratio", "all_steps_per_s", "lossy_steps_per_s", "all_longest_s", "lossy_longest_s"):
            headline[f"{transport}_{name}"] = median(found, name)
    return Outcome(headline, runs)


def _pair(transport: str, number: int) -> dict[str, Json]:
    """`ratio`: steps per second with loss, to those without."""
    one: dict[str, Json] = {"transport": transport}
    kinds = {"all": 0.0, "lossy": SHARE}
    for kind in kinds if number % 2 else reversed(kinds):
        one |= {f"{kind}_{figure}": value for figure, value in _job(transport, kinds[kind], number).items()}
    one["ratio"] = round(one["lossy_steps_per_s"] / one["all_steps_per_s"], 3)
    print(" ".join(f"{key}={value}" for key, value in one.items()), flush=True)
    return one


def _job(transport: str, share: float, seed: int) -> dict[str, Json]:
    with ExitStack() as stack:
        lab = stack.enter_context(Netlab(4, RATE_MBIT))
        loss = stack.enter_context(lab.lossy(lab.hosts[2:], share, seed=seed))
        addresses = []
        for host in lab.hosts[:2]:
            serve = ["-m", "tfps.pserver.cli", f"--host={host.address}", "--port=0", "--workers=2", "--insecure"]
            server = stack.enter_context(children.python([*serve, "--quiet"], popen=host.popen))
            addresses.append(children.answer(server, ANSWER_S).split()[3])
        place = {"TFPS_PSERVERS": ",".join(addresses), "TFPS_TRANSPORT": transport, "TFPS_SHARED_MEMORY": "0"}
        workers = [
            stack.enter_context(children.python([_ME], {**place, "TFPS_RANK": str(rank)}, host.popen))
            for rank, host in enumerate(lab.hosts[2:])
        ]
        found, _ = (json.loads(children.answer(worker, ANSWER_S)) for worker in workers)
        passed = loss.look()
        return {**found, "packets": passed.frames, "dropped": passed.dropped}


def _work() -> dict[str, Json]:
    import numpy as np

    from tfps.config import Config
    from tfps.exchange.interface import BucketSpec, Reply
    from tfps.recovery.exchange import ElasticExchange
    from tfps.trace.recorder import Recorder

    addresses, rank = os.environ["TFPS_PSERVERS"].split(","), int(os.environ["TFPS_RANK"])
    worker = ElasticExchange(addresses, rank=rank, config=Config.from_environment(min_workers=1), recorder=Recorder())
    (bucket,) = worker.declare([BucketSpec(("gradient",), "sum", NBYTES, "float32", 0)])
    payload, replies = np.ones(NBYTES // 4, np.float32), queue.SimpleQueue[Reply]()
    times: list[float] = []
    for _ in range(STEPS_BEFORE + STEPS):
        began_s = time.monotonic()
        worker.push(bucket, payload, replies.put)
        reply = replies.get()
        if reply.error is not None:
            raise reply.error
        if len(reply.ranks) != 2:
            raise RuntimeError(f"2 workers must take part, got ranks {reply.ranks}")
        times.append(time.monotonic() - began_s)
    worker.close()
    counted = times[STEPS_BEFORE:]
    return {"steps_per_s": round(STEPS / sum(counted), 2), "longest_s": round(max(counted), 3)}


if __name__ == "__main__":
    print(json.dumps(_work()), flush=True)
    sys.stdin.readline()  # stays until it is terminated
