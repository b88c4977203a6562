"""Two workers exchange and wait for each other while the wall clock of all processes is set to other times.

wall_clock.py ADDRESS      of a pserver for two workers; CLOCK_OFFSET_FILE is what tests/helpers/jumping_clock.c reads
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import threading
import time
from pathlib import Path

import jobs

from tfps.config import Config
from tfps.errors import WaitTimeoutError
from tfps.worker.worker import Worker

FORWARD_S, BACK_S = 2 * 3600, -3 * 3600


def jump(by_s: int) -> None:
    """Sets the clock, in place: it is mapped."""
    before_s = time.time() - time.monotonic()
    path = Path(os.environ["CLOCK_OFFSET_FILE"])
    offset_s = struct.unpack("l", path.read_bytes())[0] + by_s
    with path.open("r+b") as file:
        file.write(struct.pack("l", offset_s))
    assert round(time.time() - time.monotonic() - before_s) == by_s


def main(address: str) -> None:
    config = Config.from_environment(slice_bytes=1024, connect_timeout_s=jobs.DEADLINE_S, step_timeout_s=2.0)
    workers = jobs.together(*(functools.partial(Worker, [address], rank=rank, config=config) for rank in range(2)))
    jobs.declare(workers, jobs.bucket(40_000))
    for by_s in (0, FORWARD_S, BACK_S, 0):
        jump(by_s)
        for _ in range(50):
            for pending in [jobs.push(worker, 0, bytes(40_000)) for worker in workers]:
                pending.wait()
    for by_s in (FORWARD_S, BACK_S):  # nor does a wait for another rank end early or never
        jump(by_s)
        later = threading.Timer(0.5, jump, (by_s,))
        later.start()
        jobs.declare(workers, jobs.bucket(8))
        later.join()
    late = threading.Timer(0.5, jump, (BACK_S,))
    late.start()
    try:
        workers[0].declare([jobs.bucket(8)])
    except WaitTimeoutError as error:
        print(error)
    late.join()
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
