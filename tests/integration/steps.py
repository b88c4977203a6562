"""Worker: takes steps until somebody writes a line, and says how long the longest one took, and who takes part.

steps.py NAME    the step after the line is the last one; a name for its output
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time

import numpy as np

from tfps.config import Config
from tfps.errors import TfpsError
from tfps.exchange.interface import BucketSpec, Reply
from tfps.recovery.exchange import ElasticExchange
from tfps.trace.recorder import Recorder

NBYTES = 4 * 50_000
PAUSE_S = 0.03  # between steps, so that a test that waits leaves the processor to others


def main() -> int:
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    addresses, rank = os.environ["TFPS_PSERVERS"].split(","), int(os.environ["TFPS_RANK"])
    config = Config(slice_bytes=16 * 1024, min_workers=1)
    worker = ElasticExchange(addresses, rank=rank, config=config, recorder=Recorder())
    (bucket,) = worker.declare([BucketSpec(("gradient",), "sum", NBYTES, "float32", 0)])
    told = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        told.set()

    threading.Thread(target=listen, daemon=True).start()
    payload, longest_s, steps = np.ones(NBYTES // 4, np.float32), 0.0, 0
    views = [worker.view]
    replies = queue.SimpleQueue[Reply]()
    try:
        while not told.is_set():
            began_s, views = time.monotonic(), [*views[-1:], worker.view]
            worker.push(bucket, payload, replies.put)
            reply = replies.get()
            if reply.error is not None:
                raise reply.error
            counted = {float(len(reply.ranks))}
            if {worker.view, *views} != {worker.view}:  # slices of one step may count different workers then
                counted = set(map(float, range(1, worker.view.workers + 1)))
            assert counted.issuperset(np.frombuffer(reply.sum, np.float32)), counted
            longest_s, steps = max(longest_s, time.monotonic() - began_s), steps + 1
            if steps == 20:
                print("under way", flush=True)
            told.wait(PAUSE_S)
        pservers = [link.pserver for link in worker.info.links()]
    except TfpsError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        worker.close()
        return 1
    found = {"longest_s": longest_s, "steps": steps, "ranks": worker.view.ranks, "pservers": pservers}
    print(json.dumps(found), flush=True)
    worker.close("its work")  # the others go on
    return 0


if __name__ == "__main__":
    sys.exit(main())
