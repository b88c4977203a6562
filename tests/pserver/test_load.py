"""Many clients for a while, and few for many steps: a pserver takes no more at the end than near the beginning."""

from __future__ import annotations

import functools
import selectors
import time
from dataclasses import dataclass, field
from pathlib import Path

import jobs
import numpy as np
import pytest
from jobs import Cluster, RawWorker
from watching import MIB, Training, Watched, use_of, watching

from tfps.config import Config
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.protos import tfps_pb2 as pb
from tfps.wire import frames
from tfps.wire.control import bucket_message
from tfps.wire.frames import PART_BYTES, Header, Kind, decode_part

PUSHING, IDLE = 64, 200  # clients
LOAD_S = 600.0
ITEMS = 1024
SOAK_STEPS = 10_000
# The pserver serves clients as their frames come, and each pushes again as soon as it has its reply. A client that had
# to stand back for others would fall behind without end, so after minutes half is far from what chance does.
FAIR = 0.5
# Memory: what malloc and the interpreter keep. At thousands of pushes per second 8 MiB are less than 50 bytes of each.
FLAT = 8 * MIB
SLOW_TO_START = 0.1  # of the time or the steps, before anything is measured: pools, caches and arenas fill
pytestmark = [
    pytest.mark.busy,
    pytest.mark.long,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux"),
]
SGD = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (ITEMS,), (False,))
BUCKET = BucketSpec(("b",), "sum", 4 * ITEMS, "float32", 0, update=SGD)
ASYNC = Config(slice_bytes=4 * ITEMS, update="server", mode="async", connect_timeout_s=jobs.DEADLINE_S)
GRADIENT = np.ones(ITEMS, np.float32).tobytes()


@dataclass
class Client:
    """A member that pushes again when it has its reply."""

    raw: RawWorker
    step: int = 0
    received: bytearray = field(default_factory=bytearray)

    def push(self) -> None:
        mark = int(self.step == 0)  # the parameters count once all have pushed a first step
        scalars = StepScalars(mark, (float(self.step), 2.0**-20), wrote=True).pack()
        header = Header(Kind.SCALARS, bucket=0, step=self.step, generation=1)
        message = jobs._as_part(frames.encode(header, scalars))
        message += jobs._as_part(frames.encode(Header(Kind.PUSH, 0, 0, 0, 0, self.step, 0, 1), GRADIENT))
        self.raw.data.sendall(message)

    def read(self) -> bool:
        """Takes what has come; whether the reply is complete."""
        self.received += self.raw.data.recv(2**16)
        while len(self.received) >= PART_BYTES:
            part = decode_part(self.received)
            end = PART_BYTES + part.nbytes
            if len(self.received) < end:
                return False
            del self.received[:end]
            assert part.header.kind in (Kind.REPLY, Kind.ACK), part
            if part.header.kind == Kind.REPLY and part.offset + part.nbytes == part.total:
                assert part.header.step == self.step
                self.step += 1
                return True
        return False


def push_for(clients: list[Client], seconds: float) -> None:
    """Lets them push for so long, then waits for all replies."""
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.raw.data, selectors.EVENT_READ, client)
            client.push()
        waiting, end_s = len(clients), time.monotonic() + seconds
        while waiting:
            ready = selector.select(jobs.DEADLINE_S)
            assert ready, "no client gets a reply"
            for key, _ in ready:
                client = key.data
                if client.read():
                    if time.monotonic() < end_s:
                        client.push()
                    else:
                        waiting -= 1


def members(cluster: Cluster, watched: Watched) -> list[Client]:
    found = []
    for rank in range(PUSHING + IDLE):
        raw = cluster.raw(watched.address, rank, config=ASYNC)
        raw.over_tcp = True
        found.append(Client(raw.open()))
    for number, buckets in enumerate(([], [bucket_message(BUCKET)])):
        jobs.together(*(functools.partial(client.raw.declare, *buckets, number=number) for client in found))
    put = pb.PutRequest(incarnation=found[0].raw.incarnation, values=bytes(4 * ITEMS))
    found[0].raw.pserver.call("Put", put, jobs.DEADLINE_S)
    push_for(found, 0.0)  # the first step, of all
    return found


@pytest.mark.timeout(LOAD_S + 300)
def test_64_pushing_and_200_idle_clients_get_fair_shares_of_a_pserver_that_does_not_grow() -> None:
    with watching(f"--workers={PUSHING + IDLE}") as watched, Cluster() as cluster:
        clients = members(cluster, watched)
        pushing, idle = clients[:PUSHING], clients[PUSHING:]
        push_for(pushing, SLOW_TO_START * LOAD_S)
        before, steps = watched.use(), [client.step for client in pushing]
        push_for(pushing, (1 - SLOW_TO_START) * LOAD_S)
        now = watched.use()
        pushes = [client.step - then for client, then in zip(pushing, steps, strict=True)]
        print(f"{sum(pushes)} pushes, {min(pushes)} to {max(pushes)} per client; {before}, then {now}")
        assert min(pushes) >= FAIR * max(pushes)
        assert now.resident - before.resident < FLAT
        assert (now.threads, now.descriptors) == (before.threads, before.descriptors)
        push_for(idle, 0.0)  # they are still served
        watched.check()
        for client in clients:
            client.raw.leave()


@pytest.mark.timeout(900)
def test_10_000_steps_take_no_more_at_the_end_than_at_the_beginning() -> None:
    with watching("--workers=2") as watched, Cluster() as cluster:
        training = Training(cluster, watched.address, 2)
        training.reaches(int(SLOW_TO_START * SOAK_STEPS))
        before, own_before = watched.use(), use_of("self")
        training.reaches(SOAK_STEPS)
        now, own = watched.use(), use_of("self")
        print(f"pserver: {before}, then {now}; workers: {own_before}, then {own}")
        for then, later in ((before, now), (own_before, own)):
            assert later.resident - then.resident < FLAT
            assert (later.threads, later.descriptors) == (then.threads, then.descriptors)
        training.stop()
        watched.check()
