"""Mode "async": each push is applied as it comes, and brings the latest parameters to its rank alone."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import jobs
import numpy as np
import pytest
from jobs import Cluster, job, poll, summed, together

from tfps.config import Config
from tfps.errors import MismatchError, ProtocolError, WaitTimeoutError, WorkerLostError
from tfps.exchange.codecs import Floats, codec_of
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.protos import tfps_pb2 as pb
from tfps.wire import frames
from tfps.wire.frames import EMPTY, Header, Kind
from tfps.worker.worker import Worker

ITEMS = 3000
ASSIGNED = 2**32
CONFIG = Config(
    slice_bytes=1024, window_bytes=4096, update="server", mode="async", connect_timeout_s=60, step_timeout_s=60
)
START = np.arange(ITEMS, dtype=np.float32)
GRADIENT = np.linspace(-1, 1, ITEMS, dtype=np.float32)


def sgd(momentum: float = 0.5, name: str = "w") -> BucketSpec:
    slots = (("momentum", 0.0),) if momentum else ()
    update = UpdateSpec("sgd", (("momentum", momentum), ("nesterov", 0.0)), slots, (ITEMS,), (False,))
    return BucketSpec((name,), "sum", 4 * ITEMS, "float32", 0, update=update)


def adam() -> BucketSpec:
    constants = (("beta_1", 0.9), ("beta_2", 0.999), ("epsilon", 1e-7))
    update = UpdateSpec("adam", constants, (("momentum", 0.0), ("velocity", 0.0)), (ITEMS,), (False,))
    return BucketSpec(("w",), "sum", 4 * ITEMS, "float32", 0, update=update)


class Rank:
    """A rank that counts its steps as a program does, in several buckets."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.steps: Counter[int] = Counter()

    def push(
        self, gradient: np.ndarray | None, *more: float, bucket: int = 0, rate: float = 0.25, mark: int = 0
    ) -> jobs.Pending:
        """Pushes the gradient of the next step; before the first one it has assigned values, as every program has."""
        pending, steps = jobs.Pending(), self.steps[bucket]
        mark = mark or (0 if steps else ASSIGNED)
        numbers = StepScalars(mark, (float(steps), rate, *more), wrote=bool(mark) and self.worker.rank == 0)
        self.steps[bucket] += 1
        self.worker.push(bucket, gradient, pending, step_scalars=numbers.pack())
        return pending

    def step(self, gradient: np.ndarray | None, *more: float) -> np.ndarray:
        return summed(self.push(gradient, *more).wait()).copy()

    def read(self, bucket: int = 0) -> np.ndarray:
        pending = jobs.Pending()
        self.worker.push(bucket, None, pending)
        return summed(pending.wait()).copy()

    def is_held(self, pending: jobs.Pending) -> bool:
        """Whether there is no reply; one that had been sent would have come before that of another bucket."""
        self.read(bucket=1)
        return not pending.replied


def begun(cluster: Cluster, workers: int, *specs: BucketSpec, config: Config = CONFIG, pservers: int = 2) -> list[Rank]:
    """Ranks that have taken a first step, without a gradient: all have the parameters that rank 0 has put."""
    members = job(cluster, workers, *specs, pservers=pservers, config=config)
    ranks = [Rank(each) for each in members]
    for bucket, spec in enumerate(specs):
        members[0].state.write(bucket, 0, 0, START)
        alpha = (0.001,) if spec.update is not None and spec.update.rule == "adam" else ()
        for each in [rank.push(None, *alpha, bucket=bucket) for rank in ranks]:
            np.testing.assert_array_equal(summed(each.wait()), START)
    return ranks


@pytest.mark.parametrize("cluster", ["tcp", "grpc", "shared memory", "both"], indirect=True)
def test_every_push_is_applied_as_it_comes_and_its_rank_gets_the_latest(cluster: Cluster) -> None:
    ranks = begun(cluster, 3, sgd())
    w, m = START.copy(), np.zeros_like(START)
    for number in (0, 2, 2, 1, 0, 2, 1, 1, 1):
        gradient = GRADIENT * np.float32(number + 1)
        m = m * np.float32(0.5) - gradient * np.float32(0.25)
        w = w + m
        np.testing.assert_array_equal(ranks[number].step(gradient), w)
    np.testing.assert_array_equal(ranks[1].worker.state.read(0, 1, 0, 4 * ITEMS).view(np.float32), m)


def test_adam_goes_by_the_numbers_of_the_rank_that_pushes(cluster: Cluster) -> None:
    ranks = begun(cluster, 2, adam())
    f = np.float32
    w: np.ndarray = START
    m, v = np.zeros(ITEMS, np.float32), np.zeros(ITEMS, np.float32)
    for number in (1, 1, 0, 1):
        alpha = 0.01 * (number + 1)
        m = m + (GRADIENT - m) * f(1 - 0.9)
        v = v + (np.square(GRADIENT) - v) * f(1 - 0.999)
        w = w - m * f(alpha) / (np.sqrt(v) + f(1e-7))
        np.testing.assert_array_equal(ranks[number].step(GRADIENT, alpha), w)


def test_first_pushes_wait_for_all_ranks_and_are_applied_in_their_order(cluster: Cluster) -> None:
    members = job(cluster, 3, sgd(), pservers=2, config=CONFIG)
    ranks = [Rank(each) for each in members]
    late = [ranks[2].push(GRADIENT * 3), ranks[1].push(GRADIENT * 2)]
    members[0].state.write(0, 0, 0, START)
    replies = [summed(each.wait()) for each in (ranks[0].push(GRADIENT), *reversed(late))]
    w, m = START, np.zeros(ITEMS, np.float32)
    for number in range(3):
        m = m * np.float32(0.5) - GRADIENT * np.float32(number + 1) * np.float32(0.25)
        w = w + m
    for reply in replies:
        np.testing.assert_array_equal(reply, w)


def test_what_all_ranks_assign_later_counts_where_they_meet(cluster: Cluster) -> None:
    """Gradients that come before are applied to the old values; bytes that were not assigned keep them."""
    ranks = begun(cluster, 2, sgd(momentum=0.0), sgd(momentum=0.0, name="other"))
    ranks[0].worker.state.write(0, 0, 400, np.full(100, 7, np.float32))
    waits = ranks[0].push(GRADIENT, mark=ASSIGNED + 5)
    w = START - GRADIENT * np.float32(0.25)
    np.testing.assert_array_equal(ranks[1].step(GRADIENT), w)
    assert ranks[0].is_held(waits)
    reply = summed(ranks[1].push(GRADIENT, mark=ASSIGNED + 5).wait())
    w[100:200] = 7
    for _ in range(2):
        w = w - GRADIENT * np.float32(0.25)
    np.testing.assert_array_equal(reply, w)
    np.testing.assert_array_equal(summed(waits.wait()), w)


def test_ranks_that_assign_different_values_fail_by_name(cluster: Cluster) -> None:
    ranks = begun(cluster, 2, sgd())
    pending = [rank.push(GRADIENT, mark=ASSIGNED + number) for number, rank in enumerate(ranks)]
    for each in pending:
        error = each.error(MismatchError)
        assert re.search("ranks . and . have assigned different values to variables of bucket 'w'", str(error)), error


def test_a_rank_that_meets_others_elsewhere_while_they_wait_for_it_fails_the_job_by_name(cluster: Cluster) -> None:
    ranks = begun(cluster, 2, sgd(), sgd(name="other"))
    waits = ranks[0].push(GRADIENT, mark=ASSIGNED + 5)
    assert ranks[0].is_held(waits)  # so it has come
    with pytest.raises(MismatchError, match=r"rank 1 .*while others wait for its first step, or for it to assign"):
        ranks[1].worker.peers.quiesce()
    assert "rank 1" in str(waits.error())


def test_a_rank_that_assigns_while_another_is_elsewhere_fails_the_job_with_the_name_of_the_other(
    cluster: Cluster,
) -> None:
    ranks = begun(cluster, 2, sgd(), sgd(name="other"))
    for pending in [rank.push(GRADIENT) for rank in ranks]:
        pending.wait()
    ranks[1].worker.peers.quiesce()
    waits = ranks[0].push(GRADIENT, mark=ASSIGNED + 5)
    assert re.search("rank 1 .*while others wait for its first step, or for it to assign", str(waits.error()))


def test_no_rank_is_further_ahead_than_allowed_until_the_slow_ones_step_rest_or_leave(cluster: Cluster) -> None:
    config = dataclasses.replace(CONFIG, staleness=2)
    ranks = begun(cluster, 3, sgd(), sgd(name="other"), config=config, pservers=1)
    for _ in range(2):
        ranks[0].step(GRADIENT)
    waits = ranks[0].push(GRADIENT)  # three steps ahead of the others
    assert ranks[0].is_held(waits)
    ranks[1].step(GRADIENT)
    assert ranks[0].is_held(waits)
    ranks[2].step(GRADIENT)
    waits.wait()
    waits = ranks[0].push(GRADIENT)
    assert ranks[0].is_held(waits)
    ranks[1].worker.peers.quiesce()
    assert ranks[0].is_held(waits)
    ranks[2].worker.peers.quiesce()
    waits.wait()
    for _ in range(5):  # nobody else steps
        ranks[0].step(GRADIENT)
    ranks[0].worker.peers.quiesce()  # all have met: nobody is ahead any more
    for _ in range(2):
        ranks[1].step(GRADIENT)
    waits = ranks[1].push(GRADIENT)
    assert ranks[1].is_held(waits)
    ranks[0].step(GRADIENT)
    assert ranks[1].is_held(waits)
    ranks[2].worker.close()
    waits.wait()


def test_without_a_limit_a_rank_goes_on_alone_and_others_may_leave(cluster: Cluster) -> None:
    ranks = begun(cluster, 2, sgd(momentum=0.0))
    ranks[1].worker.close()
    w = START
    for _ in range(20):
        w = w - GRADIENT * np.float32(0.25)
        np.testing.assert_array_equal(ranks[0].step(GRADIENT), w)


def test_a_rank_that_leaves_before_its_first_step_fails_the_others(cluster: Cluster) -> None:
    members = job(cluster, 2, sgd(), config=CONFIG)
    members[0].state.write(0, 0, 0, START)
    waits = Rank(members[0]).push(GRADIENT)
    request = pb.WaitingRequest(incarnation=members[0].client.membership.incarnation)
    poll(lambda: bool(members[0]._pservers[0].call("Waiting", request, jobs.DEADLINE_S).missing))
    members[1].close()
    waits.error(WorkerLostError, "rank 1")


def test_a_wait_that_takes_too_long_names_the_ranks_that_are_behind(cluster: Cluster) -> None:
    ranks = begun(cluster, 3, sgd(), config=dataclasses.replace(CONFIG, staleness=0))
    waits = ranks[0].push(GRADIENT)
    ranks[1].push(GRADIENT)
    jobs.overdue(ranks[0].worker, missing=2)
    error = waits.error(WaitTimeoutError)
    assert re.search(r"bucket 'w' step 1: no result within 60 s; pserver \S+ waits for rank 2 \(", str(error)), error
    assert "waits for rank 1" not in str(error)


def test_delay_compensation_adds_what_the_parameters_have_moved_meanwhile(cluster: Cluster) -> None:
    """DC-ASGD: g + lambda g g (w - w as the rank got them)."""
    config = dataclasses.replace(CONFIG, delay_compensation=0.5)
    ranks = begun(cluster, 2, sgd(momentum=0.0), config=config)
    w, has = START, [START, START]
    for number in (0, 0, 1, 0, 1, 1):
        change = w - has[number]
        w = w - (change * GRADIENT * GRADIENT * np.float32(0.5) + GRADIENT) * np.float32(0.25)
        has[number] = w
        np.testing.assert_array_equal(ranks[number].step(GRADIENT), w)


def test_first_gradients_are_compensated_for_those_applied_before_them(cluster: Cluster) -> None:
    members = job(cluster, 2, sgd(momentum=0.0), config=dataclasses.replace(CONFIG, delay_compensation=0.5))
    members[0].state.write(0, 0, 0, START)
    pending = [Rank(each).push(GRADIENT) for each in members]
    w = START - GRADIENT * np.float32(0.25)
    w = w - ((w - START) * GRADIENT * GRADIENT * np.float32(0.5) + GRADIENT) * np.float32(0.25)
    for each in pending:
        np.testing.assert_array_equal(summed(each.wait()), w)


def test_a_push_without_a_gradient_changes_nothing_and_one_without_numbers_only_reads(cluster: Cluster) -> None:
    ranks = begun(cluster, 2, sgd(), config=dataclasses.replace(CONFIG, staleness=1))
    w = ranks[0].step(GRADIENT)
    np.testing.assert_array_equal(ranks[1].step(None), w)
    for _ in range(5):  # reading is no step: it is not ahead
        np.testing.assert_array_equal(ranks[0].read(), w)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (
            [(Header(Kind.PUSH), bytes(16))],
            "step scalars of slice 0 of bucket 'w' must come before a gradient of step 0",
        ),
        ([(Header(Kind.PUSH, step=1), bytes(16))], "step of slice 0 of bucket 'w' must be 0 for rank 0, got 1"),
        ([(Header(Kind.PUSH), bytes(12))], "payload of slice 0 of bucket 'w' must have 16 bytes"),
        ([(Header(Kind.PUSH, EMPTY), b"")], "the parameters of slice 0 of bucket 'w' must be put before"),
        ([(Header(Kind.SCALARS), bytes(25))] * 2, "must come once per step, for one after step 0 of rank 0"),
        ([(Header(Kind.SCALARS), bytes(25)), (Header(Kind.PUSH), bytes(16))], "must be put before its first update"),
    ],
)
def test_frames_that_do_not_fit_are_refused_by_name(
    cluster: Cluster, sent: list[tuple[Header, bytes]], message: str
) -> None:
    rule = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (4,), (False,)).text()
    raw = cluster.raw(cluster.pserver(1).address, config=CONFIG).open().declare()
    raw.declare(pb.Bucket(names=["w"], kind="sum", nbytes=16, dtype="float32", update=rule), number=1)
    for header, payload in sent:
        raw.send(frames.encode(header, payload))
    error = raw.read_error(ProtocolError)
    assert message in str(error)


def test_numbers_are_drawn_once_and_each_rank_begins_with_its_own(cluster: Cluster) -> None:
    members = job(cluster, 3, sgd(), pservers=2, config=CONFIG)
    assert [members[rank].peers.fetch_add("a") for rank in (2, 2, 0, 2, 0, 1, 1)] == [2, 3, 0, 4, 5, 1, 6]
    assert members[1].peers.fetch_add("b") == 1
    with pytest.raises(ProtocolError, match="a counter whose name has at most 256 characters, got rank 1 and 300"):
        members[1].peers.fetch_add("a" * 300)
    drawn = together(*(lambda each=each: [each.peers.fetch_add("c") for _ in range(50)] for each in members))
    assert sorted(number for each in drawn for number in each) == list(range(150))


def test_a_capture_has_a_span_for_each_push_that_is_applied(cluster: Cluster) -> None:
    ranks = begun(cluster, 2, sgd(momentum=0.0), pservers=1)
    ranks[0].worker.captures.start()
    for number in (0, 1, 1):
        ranks[number].step(GRADIENT)
    capture = ranks[0].worker.captures.stop([], "test", [], {})
    spans = [span for span in capture.spans if span.kind == "aggregate"]
    slices = len(ranks[0].worker.info.owners(0))
    assert sorted((span.rank, span.step) for span in spans) == sorted([(0, 1), (1, 1), (1, 2)] * slices)


def encoded(codec: str) -> BucketSpec:
    return dataclasses.replace(sgd(momentum=0.0), codec=codec_of(codec))


def decoded(name: str, gradient: Floats, held: Floats | None) -> Floats:
    """What a pserver sees of `gradient`, slice by slice."""
    codec, step = codec_of(name), CONFIG.first_slice_bytes // 4
    assert codec is not None
    parts = []
    for begin in range(0, ITEMS, step):
        part = gradient[begin : begin + step]
        out = np.empty_like(part)
        codec.decode(codec.encode(part, None if held is None else held[begin : begin + step]), out)
        parts.append(out)
    return np.concatenate(parts)


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "onebit"])
def test_an_encoded_push_is_applied_alone_and_all_of_the_parameters_come_back(cluster: Cluster, codec: str) -> None:
    ranks = begun(cluster, 2, encoded(codec))
    held = [None if codec == "bfloat16" else np.zeros(ITEMS, np.float32) for _ in ranks]
    w = START.copy()
    for number in (0, 1, 1, 0, 1):
        gradient = GRADIENT * np.float32(number + 0.37)
        w = w - decoded(codec, gradient, held[number]) * np.float32(0.25)
        np.testing.assert_array_equal(ranks[number].step(gradient), w)


def test_what_ranks_hold_back_is_collected_though_they_are_at_different_steps(cluster: Cluster) -> None:
    ranks = begun(cluster, 2, encoded("onebit"))
    held = [np.zeros(ITEMS, np.float32) for _ in ranks]
    for number in (0, 1, 1):
        decoded("onebit", GRADIENT, held[number])
        ranks[number].step(GRADIENT)
    replies = [jobs.Pending() for _ in ranks]
    for rank, pending in zip(ranks, replies, strict=True):
        rank.worker.state.collect_residual(0, pending)
    for pending in replies:
        np.testing.assert_array_equal(summed(pending.wait()), held[0] + held[1])
    before = ranks[1].step(GRADIENT * np.float32(0))  # whose rank holds nothing back any more
    np.testing.assert_array_equal(ranks[1].step(GRADIENT * np.float32(0)), before)
