"""What the others do without a lost worker, and what its pushes count for (Config.min_workers)."""

from __future__ import annotations

import dataclasses
import functools
import socket
import struct
from pathlib import Path

import jobs
import numpy as np
import pytest
from jobs import Cluster, Failed, RawWorker, attempt, bucket, poll, push, summed

from tfps.config import Config
from tfps.errors import OF_JOB, TfpsError, WorkerLostError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.trace.capture import CapturedView
from tfps.trace.capture_file import read, write_chrome
from tfps.types import Array
from tfps.wire import control, frames
from tfps.wire.frames import Header, Kind
from tfps.worker.losses import Lacking, Loss, Losses
from tfps.worker.worker import Worker

GOES_ON = dataclasses.replace(jobs.CONFIG, min_workers=1)
GRADIENT, TOTAL, WORDS = 0, 1, 2
SPECS = [
    bucket(2048, name="a gradient of two slices"),
    dataclasses.replace(bucket(2048, name="a total of two slices"), occasional=True),
    BucketSpec(("words",), "gather", 0, "uint8", 0),
]
ONES, NOTHING = np.ones(512, np.float32), np.zeros(512, np.float32)


class Job:
    """Two workers and a third, of rank `doomed`, that speaks by hand and dies without a word."""

    def __init__(self, cluster: Cluster, doomed: int = 1, config: Config = GOES_ON) -> None:
        self.server, self._doomed, self._config, self._cluster = cluster.pserver(3), doomed, config, cluster
        made = attempt(*(functools.partial(self._member, rank) for rank in range(3)))
        self.workers = [each for each in made if isinstance(each, Worker)]
        (self.doomed,) = (each for each in made if isinstance(each, RawWorker))

    def _member(self, rank: int) -> Worker | RawWorker:
        if rank != self._doomed:
            worker = self._cluster.worker([self.server.address], rank, config=self._config)
            worker.declare(SPECS)
            return worker
        raw = self._cluster.raw(self.server.address, rank, config=self._config).open().declare()
        return raw.declare(*map(control.bucket_message, SPECS), number=1)

    def send(self, bucket: int, index: int, payload: bytes, flags: int = 0, step: int = 0) -> None:
        """Pushes by hand."""
        self.doomed.send(frames.encode(Header(Kind.PUSH, flags, bucket, index, 0, step), payload))

    def end_connections(self) -> None:
        if (data := getattr(self.doomed, "data", None)) is not None:
            data.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            data.close()
        else:
            self.doomed.pulling.cancel()

    def die(self, after: int = 0) -> None:
        """Ends the doomed one, `after` so many of its pushes have arrived."""
        if after:
            poll(lambda: self.server.status().members[self._doomed].received_slices == after)
        self.end_connections()
        poll(lambda: len(self.server.status().present) == 2)

    def sums(self, bucket: int, *payloads: Array) -> list[list[float]]:
        """What a push by each of the others brings, as the first number of each slice."""
        pending = [push(worker, bucket, payload) for worker, payload in zip(self.workers, payloads, strict=True)]
        replies = [summed(each.wait()) for each in pending]
        assert replies[0].tobytes() == replies[1].tobytes()
        return [[float(replies[0][0]), float(replies[0][512 - 1])]]


@pytest.fixture
def lost(cluster: Cluster) -> Job:
    return Job(cluster)


@jobs.OVER_ALL
@pytest.mark.parametrize("doomed", [0, 1, 2])
def test_slices_that_had_come_whole_count_and_the_others_count_as_zero(cluster: Cluster, doomed: int) -> None:
    lost = Job(cluster, doomed)
    pending = [push(worker, GRADIENT, ONES) for worker in lost.workers]
    lost.send(GRADIENT, 0, np.full(256, 10, np.float32).tobytes())
    lost.die(after=1)
    for each in pending:
        assert summed(each.wait()).tolist() == [12.0] * 256 + [2.0] * 256
    assert lost.sums(GRADIENT, ONES, ONES) == [[2.0, 2.0]]


def test_a_capture_says_who_was_lost_meanwhile_and_what_counted(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = Job(cluster)
    lost.workers[0].captures.start()
    pending = [push(worker, GRADIENT, ONES) for worker in lost.workers]
    lost.send(GRADIENT, 0, np.full(256, 10, np.float32).tobytes())
    lost.die(after=1)
    for each in pending:
        each.wait()
    assert lost.sums(GRADIENT, ONES, ONES) == [[2.0, 2.0]]
    write_chrome(lost.workers[0].captures.stop([], "run", (), {}), tmp_path / "capture.gz")
    capture = read(tmp_path / "capture.gz")
    ((span, view),) = capture.changes
    assert capture.views[0] == CapturedView(1, (0, 1, 2))
    assert (view.generation, view.ranks) == (2, (0, 2))
    assert view.reason.startswith("rank 1 (rawhost:")
    assert view.reason.endswith("died at step 0: its connection ended without a leave")
    assert view.reason in caplog.text
    assert view.note == "step 0 is the first that lacks pushes of rank 1; what it had pushed of it counted for 50 %"
    assert view.lacking == {"a gradient of two slices": (1,)}
    assert (span.process, span.step, span.rank) == (0, 0, 1)
    queued = {step: [s.begin_ns for s in capture.spans if (s.kind, s.step) == ("queued", step)] for step in (0, 1)}
    assert min(queued[0]) < span.begin_ns < min(queued[1])
    # What pservers know of the lost worker is there, too.
    assert [process.name for process in capture.processes] == ["worker 0", "worker 1", "worker 2", "pserver 0"]
    assert "the capture lacks the records of rank 1" in caplog.text


def test_what_a_lost_rank_said_that_it_does_is_not_said_of_who_comes_in_its_place(cluster: Cluster, lost: Job) -> None:
    roster = lost.server._job._state.roster
    for what, said in ((1, "compiles"), (99, ""), (1, "compiles")):  # 99: of a later version
        request = pb.BusyRequest(incarnation=lost.doomed.incarnation, rank=1, what=what)
        lost.doomed.pserver.call("Busy", request, jobs.DEADLINE_S)
        assert roster.members[1].busy == said
    lost.die()
    assert 1 not in roster.members
    cluster.raw(lost.server.address, 1, config=GOES_ON)
    assert roster.members[1].busy == ""


def test_a_rank_that_is_lost_again_lacks_something_else() -> None:
    found = [Loss(1, "a", 3, (1,), 4, 8), Loss(1, "b", 4, (0, 1), 8, 8), Loss(1, "a", 7, (0, 1), 8, 8)]
    losses = Losses(found)
    first, second = losses.lacking(1, 0), losses.lacking(1, 2)
    assert (first, second) == (Lacking(1, 3, {"a": (1,)}, 0.75), Lacking(1, 7, {"a": (0, 1)}, 0.0))
    assert losses.lacking(1, 3) is losses.lacking(2, 0) is None


@pytest.mark.parametrize("cluster", ["tcp"], indirect=True)  # a message over gRPC has no parts
def test_a_frame_of_which_a_part_had_come_does_not_count(lost: Job) -> None:
    lost.doomed.data.sendall(frames.encode_part(Header(Kind.PUSH), 1024, 0, 512) + bytes(b"\x41" * 512))
    lost.die()
    assert lost.sums(GRADIENT, ONES, ONES) == [[2.0, 2.0]]


def test_what_is_no_gradient_has_a_lost_rank_in_all_of_it_or_in_nothing(lost: Job) -> None:
    pending = [push(worker, TOTAL, ONES) for worker in lost.workers]
    lost.send(TOTAL, 1, np.full(256, 10, np.float32).tobytes())
    lost.die(after=1)
    for each in pending:
        reply = each.wait()
        assert summed(reply).tolist() == [2.0] * 512
        assert sorted(reply.ranks) == [worker.rank for worker in lost.workers]
    assert lost.sums(TOTAL, ONES, NOTHING) == [[1.0, 1.0]]


def test_the_others_know_who_is_left_and_declare_without_the_lost_rank(lost: Job) -> None:
    declaring = [functools.partial(worker.declare, [bucket(8, name="later")]) for worker in lost.workers]
    assert isinstance(lost.doomed.rank, int)
    lost.die()
    assert attempt(*declaring) == [[3], [3]]
    for worker in lost.workers:
        poll(functools.partial(lambda each: each.view.ranks == tuple(w.rank for w in lost.workers), worker))
    status = lost.server.status()
    assert (status.state, status.generation, list(status.present)) == ("running", 2, [w.rank for w in lost.workers])
    assert f"view 2: rank {lost.doomed.rank} (rawhost:" in status.changes[0]
    assert (status.lost_workers, status.joined_workers) == (1, 0)
    assert status.changes[0].endswith("died at step 0: its connection ended without a leave")


def test_down_to_one(lost: Job) -> None:
    first, second = lost.workers
    lost.die()
    leaving = push(second, GRADIENT, ONES)
    poll(lambda: lost.server.status().members[1].received_slices == 2)
    second.close("SIGTERM")
    assert summed(push(first, GRADIENT, ONES).wait()).tolist() == [2.0] * 512
    assert leaving.error() is not None
    assert summed(push(first, GRADIENT, ONES).wait()).tolist() == [1.0] * 512


def test_too_few_end_the_job_by_name(cluster: Cluster) -> None:
    lost = Job(cluster, config=dataclasses.replace(GOES_ON, min_workers=3, rejoin_timeout_s=0.1))
    failed = [Failed(worker) for worker in lost.workers]
    lost.end_connections()
    for each in failed:
        error = each.wait(
            WorkerLostError, "2 of 3 workers are left, fewer than min_workers=3, and no other has joined within 0.1 s"
        )
        assert "rank 1 (rawhost:" in str(error)


@pytest.mark.parametrize("kind", OF_JOB)
def test_what_every_worker_would_meet_ends_the_job_for_all(cluster: Cluster, kind: type[TfpsError]) -> None:
    lost = Job(cluster)
    failed = Failed(lost.workers[0])
    lost.workers[1].fail(kind("the snapshot's disk is full"))
    error = failed.wait(kind, "failed: the snapshot's disk is full")
    assert str(error).count("failed: ") == 1


def test_a_worker_that_fails_leaves_the_others_to_go_on(cluster: Cluster) -> None:
    lost = Job(cluster)
    lost.die()
    lost.workers[1].fail(TfpsError("the disk is full"))
    assert summed(push(lost.workers[0], GRADIENT, ONES).wait()).tolist() == [1.0] * 512
    assert lost.server.status().changes[1].count("failed: ") == 1
    assert "the disk is full" in lost.server.status().changes[1]


def test_a_silent_worker_is_lost_and_learns_it_when_it_wakes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.pserver.elastic.SILENT_S", 1.5)  # else the test takes longer
    lost = Job(cluster)  # who speaks by hand sends no heartbeats
    pending = [push(worker, GRADIENT, ONES) for worker in lost.workers]
    for each in pending:
        assert summed(each.wait()).tolist() == [2.0] * 512
    assert "has been silent for" in lost.server.status().changes[0]
    lost.doomed.read_error(WorkerLostError, "the other workers went on without this one: rank 1")
    with pytest.raises(WorkerLostError, match="went on without this one"):
        lost.doomed.declare(number=2)


def test_a_pserver_that_is_silent_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfps.worker.worker.SILENT_S", 1.5)
    monkeypatch.setattr("tfps.pserver.job.Heartbeat", lambda name, beat: None)
    lost = Job(cluster)
    error = Failed(lost.workers[0]).wait()
    assert f"pserver {lost.server.address} has been silent for" in str(error)
