"""Tuning: the choice of sizes, and the change to them in the middle of a job."""

from __future__ import annotations

import functools
import threading
import types
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from jobs import DEADLINE_S, Cluster, poll, push, summed, together, use
from recorded import sends

from tfps.config import FIRST_WINDOW_BYTES, Config, Transport
from tfps.errors import ProtocolError, TfpsError
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketSpec, FailureState
from tfps.exchange.layout import (
    MAX_TUNED_BYTES,
    MAX_TUNED_GRPC_BYTES,
    MIN_TUNED_BYTES,
    Cutting,
    Layout,
    Measured,
    choose,
    cut_anew,
)
from tfps.protos import tfps_pb2 as pb
from tfps.trace.recorder import Recorder
from tfps.types import Argument
from tfps.wire.send_queue import SendQueue, Throughput
from tfps.wire.shared_memory import Sharing
from tfps.worker.bucket import PushedBucket
from tfps.worker.client import PserverClient
from tfps.worker.tuner import Tuner, measure, message_s, ratio
from tfps.worker.worker import Worker

CONFIG = Config(slice_bytes=1024, window_bytes=4096, step_timeout_s=DEADLINE_S, connect_timeout_s=DEADLINE_S)
SPECS = [
    BucketSpec(("large",), "sum", 20_000, "float32", 1),
    BucketSpec(("small",), "sum", 400, "float32", 0),
    BucketSpec(("gathered",), "gather", 0, "uint8", 2),
]


def job(cluster: Cluster, workers: int, pservers: int, **options: Argument) -> list[Worker]:
    members = cluster.workers(cluster.pservers(pservers, workers), workers, **{"config": CONFIG, **options})
    together(*(functools.partial(worker.declare, SPECS) for worker in members))
    return members


def train(worker: Worker, steps: range) -> None:
    """One step after the other, as a training loop does; every sum and every gather must be right."""
    for step in steps:
        values = np.arange(5000, dtype=np.float32) + step + worker.rank
        pending = [push(worker, 0, values), push(worker, 1, values[:100]), push(worker, 2, bytes([worker.rank] * 3000))]
        ranks = np.arange(worker.view.workers, dtype=np.float32)
        expected = worker.view.workers * (np.arange(5000, dtype=np.float32) + step) + ranks.sum()
        np.testing.assert_array_equal(summed(pending[0].wait()), expected)
        np.testing.assert_array_equal(summed(pending[1].wait()), expected[:100])
        assert pending[2].wait().parts == {rank: bytes([rank] * 3000) for rank in range(worker.view.workers)}


@pytest.mark.parametrize(("workers", "pservers"), [(1, 1), (3, 2), (2, 3)])
def test_sums_stay_right_while_sizes_change_under_way(cluster: Cluster, workers: int, pservers: int) -> None:
    members = job(cluster, workers, pservers)
    threads = [threading.Thread(target=train, args=(worker, range(40)), daemon=True) for worker in members]
    for thread in threads:
        thread.start()
    for slice_bytes, window_bytes in ((256, 300), (8192, 20_000), (100, 1), (4000, 4000)):
        before = members[0]._buckets[0].steps
        members[0].tune(slice_bytes, window_bytes)
        while members[0]._buckets[0].steps < min(before + 4, 40):
            threads[0].join(0.01)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [thread.is_alive() for thread in threads] == [False] * workers
    assert all(worker.failure is None and worker._buckets[0].steps == 40 for worker in members)


def test_all_ranks_change_at_the_same_step(cluster: Cluster) -> None:
    recorders = [Recorder(), Recorder()]
    addresses = cluster.pservers(2, 2)
    members = together(
        *(
            functools.partial(cluster.worker, addresses, rank, config=CONFIG, recorder=recorders[rank])
            for rank in range(2)
        )
    )
    together(*(functools.partial(worker.declare, SPECS) for worker in members))
    together(*(functools.partial(train, worker, range(3)) for worker in members))
    for recorder in recorders:
        recorder.start()
    members[0].tune(5000, 4096)
    together(*(functools.partial(train, worker, range(4)) for worker in members))
    sizes = []
    for recorder in recorders:
        of_first = [each for each in sends(recorder) if each.bucket == 0]
        sizes.append({step: max(each.nbytes for each in of_first if each.step == step) for step in range(3, 7)})
    assert sizes[0] == sizes[1] == {3: 1024, 4: 1024, 5: 5000, 6: 5000}


def test_rank_0_holds_the_step_before_the_change_until_all_pservers_know(cluster: Cluster) -> None:
    members = job(cluster, 2, 1)
    together(*(functools.partial(train, worker, range(2)) for worker in members))
    asked, answer = threading.Event(), threading.Event()
    pserver = members[0]._pservers[0]
    call = pserver.call

    def slow(name: str, *arguments: Argument) -> Message:
        asked.set()
        assert answer.wait(DEADLINE_S)
        return call(name, *arguments)

    setattr(pserver, "call", slow)  # noqa: B010
    tuning = threading.Thread(target=members[0].tune, args=(512, 4096), daemon=True)
    tuning.start()
    assert asked.wait(DEADLINE_S)
    values = np.ones(5000, np.float32)
    for _ in range(3):
        replies = [push(worker, 0, values) for worker in members]
    assert members[0]._buckets[0].hold_at == 3
    while members[0]._buckets[0].current is not None:
        tuning.join(0.01)  # until step 2 is over
    assert members[0]._buckets[0].steps == 3
    assert not replies[0].replied
    answer.set()
    for reply in replies:
        np.testing.assert_array_equal(summed(reply.wait()), 2 * values)
    tuning.join(DEADLINE_S)


def test_a_job_with_auto_sizes_tunes_itself_once_the_network_was_busy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use("grpc", monkeypatch)  # where windows limit what is in flight
    monkeypatch.setattr("tfps.worker.tuner._BUSY_S", 0.001)
    config = Config(window_bytes=1024, step_timeout_s=DEADLINE_S)  # so small that slices wait on any network
    members = cluster.workers(cluster.pservers(2, 2), 2, config=config)
    specs = [BucketSpec((f"b{number}",), "sum", 200_000, "float32", number) for number in range(12)]
    ids = together(*(functools.partial(worker.declare, specs) for worker in members))[0]
    tuned = threading.Event()
    tune = members[0]._tuner._tune

    def tune_and_tell(*sizes: int) -> None:
        tune(*sizes)
        tuned.set()

    members[0]._tuner._tune = tune_and_tell
    values = np.ones(50_000, np.float32)
    for _ in range(5000):
        for pending in [push(worker, bucket, values) for bucket in ids for worker in members]:
            assert summed(pending.wait())[0] == 2
        if members[0]._tuner.done:
            break
    assert members[0]._tuner.done
    assert tuned.is_set()
    for _ in range(4):
        for pending in [push(worker, bucket, values) for bucket in ids for worker in members]:
            assert summed(pending.wait())[0] == 2
    counts = {len(worker._buckets[0].cutting.slices) for worker in members}
    assert len(counts) == 1
    assert all(worker.config.window_bytes == 1024 and not worker._buckets[0].next for worker in members)


def test_buckets_of_a_second_model_get_the_sizes_that_were_found_with_the_first(cluster: Cluster) -> None:
    members = job(cluster, 2, 1)
    together(*(functools.partial(train, worker, range(3)) for worker in members))
    members[0]._tuner._sizes = sizes = 5000, 4096
    members[0].tune(*sizes)
    second = BucketSpec(("second",), "sum", 20_000, "float32", 0)
    (number,) = together(*(functools.partial(worker.declare, [second]) for worker in members))[0]
    values = np.ones(5000, np.float32)

    def is_cut_anew() -> bool:
        for pending in [push(worker, number, values) for worker in members]:
            np.testing.assert_array_equal(summed(pending.wait()), 2 * values)
        return all(len(worker._buckets[number].cutting.slices) == 4 for worker in members)

    assert len(members[0]._buckets[number].cutting.slices) == 20
    poll(is_cut_anew)


@pytest.mark.parametrize(
    ("rates", "changes"),
    [
        ((200e6, 400e6), ["larger", "largest"]),  # larger slices are faster: the network was not the limit
        ((200e6, 210e6), ["larger"]),
        ((1e6, 400e6), ["smaller"]),  # nothing more to find out
    ],
)
def test_what_small_slices_could_not_show_is_seen_at_a_second_look(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, float], changes: list[str]
) -> None:
    monkeypatch.setattr("tfps.worker.tuner._MAX_MESSAGE_S", 1e-4)
    monkeypatch.setattr("tfps.worker.tuner._MIN_MESSAGE_S", 1e-4)
    link, sizes = types.SimpleNamespace(throughput=Throughput(), on_connection=False), list[tuple[int, int]]()
    raw = cluster.raw(cluster.pserver(1).address)
    queues = cast(list[SendQueue], [link])
    trained, announced = PushedBucket(SPECS[0], Cutting([], [])), PushedBucket(SPECS[2], Cutting([], []))

    def tune(*chosen: int) -> None:
        sizes.append(cast(tuple[int, int], chosen))
        trained.next[0] = Cutting([], [])

    client = PserverClient([raw.pserver], Config(), [], FailureState(), 0)
    tuner = Tuner(Config(), client, queues, Sharing(wanted=False), tune)
    tuner.probe()
    for steps in range(1, 20):
        trained.steps, trained.started_s = steps, 0.1 * steps
        announced.steps, announced.started_s = 3 * steps, 0.0  # a round that runs ahead says nothing of the step
        rate = rates[0] if not sizes or steps <= tuner._steps_then else rates[1]
        link.throughput = Throughput(link.throughput.nbytes + int(0.1 * rate), link.throughput.seconds + 0.1)
        tuner.look([announced, trained])
    assert tuner.done
    assert tuner._measured is not None
    assert tuner._measured.step_s == pytest.approx(0.1)
    first = Config().first_slice_bytes
    found = ["largest" if s == MAX_TUNED_GRPC_BYTES else "larger" if s > first else "smaller" for s, _ in sizes]
    assert found == changes


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (pb.Layout(slice_bytes=0, window_bytes=1, buckets=[0], steps=[9]), "slices of 1 to 67108864 bytes .* got 0"),
        (pb.Layout(slice_bytes=8, window_bytes=0, buckets=[0], steps=[9]), "and a window, got 8 and 0"),
        (pb.Layout(slice_bytes=8, window_bytes=8, buckets=[5], steps=[9]), "buckets that can be cut, got bucket 5"),
        (pb.Layout(slice_bytes=8, window_bytes=8, buckets=[2], steps=[9]), "buckets that can be cut, got bucket 2"),
        (pb.Layout(slice_bytes=8, window_bytes=8, buckets=[0], steps=[]), "one step per bucket, got 0 for 1 buckets"),
    ],
)
def test_a_malformed_layout_is_refused(cluster: Cluster, layout: pb.Layout, rule: str) -> None:
    (worker,) = job(cluster, 1, 1)
    request = pb.TuneRequest(incarnation=worker.client.membership.incarnation, rank=0, layout=layout)
    with pytest.raises(ProtocolError, match=rule):
        worker._pservers[0].call("Tune", request, DEADLINE_S)
    train(worker, range(2))


def test_a_pserver_that_cannot_be_told_fails_the_job(cluster: Cluster) -> None:
    servers = [cluster.pserver(1) for _ in range(2)]
    worker = cluster.worker([server.address for server in servers], 0, config=CONFIG)
    worker.declare(SPECS)
    servers[1].stop(0)
    with pytest.raises(TfpsError):
        worker.tune(512, 4096)
    assert worker.failure is not None


@given(
    bytes_per_s=st.floats(1, 1e12),
    round_trip_s=st.floats(1e-6, 1.0),
    message_s=st.floats(1e-6, 1.0),
    step_s=st.floats(1e-4, 1e3),
    pservers=st.integers(1, 64),
)
def test_chosen_sizes_are_in_range_and_the_window_holds_two_slices(
    bytes_per_s: float, round_trip_s: float, message_s: float, step_s: float, pservers: int
) -> None:
    slice_bytes, window_bytes = choose(Measured(bytes_per_s, round_trip_s, message_s, step_s, pservers))
    assert MIN_TUNED_BYTES <= slice_bytes <= MAX_TUNED_BYTES
    assert window_bytes >= min(2 * slice_bytes, 64 * 2**20)


def sizes(
    bytes_per_s: float, round_trip_s: float = 1e-3, message_s: float = 2e-4, step_s: float = 0.1
) -> tuple[int, int]:
    return choose(Measured(bytes_per_s, round_trip_s, message_s, step_s, pservers=2))


def test_faster_links_and_dearer_messages_want_larger_slices_and_longer_ones_wider_windows() -> None:
    slow, fast = sizes(20e6), sizes(120e6)
    assert slow[0] < fast[0] < sizes(120e6, message_s=4e-4)[0]
    wide = sizes(120e6, round_trip_s=50e-3)
    assert wide[0] == fast[0]
    assert wide[1] == pytest.approx(2 * (fast[0] + 6e6 / 2), rel=0.01)


def test_long_steps_take_slices_as_large_as_nobody_notices() -> None:
    assert sizes(20e6)[0] < sizes(20e6, step_s=5.0)[0] == pytest.approx(0.04 * 5 * 20e6 / 2, rel=0.02)


def test_streams_that_are_busy_together_add_up() -> None:
    measured = measure([Throughput(30, 2.0), Throughput(10, 1.0)], 3e-3, 1e-3, 0.5)
    assert measured == Measured(20.0, 3e-3, 1e-3, 0.5, 2)


def test_the_cost_of_a_message_over_grpc_is_what_the_network_does_not_explain() -> None:
    assert message_s(3e-3, 1e-3) == 1e-3
    assert message_s(1e-3, 2e-3) > 0  # a network slower than the call through it


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_messages_over_a_data_connection_cost_what_they_cost_there(
    cluster: Cluster, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfps.worker.tuner._TCP_MESSAGE_S", 7.0)
    config = replace(AUTO, shared_memory=False, transport=transport)
    worker = cluster.worker(cluster.pservers(1, 1), 0, config=config)
    worker.declare(SPECS)
    assert worker._tuner._message_s > 0
    assert (worker._tuner._message_s == 7.0) == (transport == "tcp")
    assert worker._tuner._most == (MAX_TUNED_BYTES if transport == "tcp" else MAX_TUNED_GRPC_BYTES)


def test_a_layout_places_by_balance_over_the_listed_buckets() -> None:
    found = cut_anew(SPECS, Layout(2000, 1, {0: 7}), range(2), "balanced")
    assert list(found) == [0]
    assert found[0].step == 7
    assert [piece.nbytes for piece in found[0].slices] == [2000] * 10
    assert list(found[0].owners) == [0, 1] * 5


# What is measured where slices pass through shared memory

# Windows stay as small as they are at first, so that replies have to wait.
AUTO = Config(window_bytes=FIRST_WINDOW_BYTES, step_timeout_s=DEADLINE_S, connect_timeout_s=DEADLINE_S)


def sharing(cluster: Cluster, *shared: bool, pservers: int = 1) -> list[Worker]:
    """Workers that share their memory or not, which have exchanged more than windows hold, several times."""
    addresses = cluster.pservers(pservers, len(shared))
    configs = [replace(AUTO, shared_memory=each) for each in shared]
    members = together(
        *(functools.partial(cluster.worker, addresses, rank, config=config) for rank, config in enumerate(configs))
    )
    spec = BucketSpec(("large",), "sum", 8_000_000, "float32", 0)
    together(*(functools.partial(worker.declare, [spec]) for worker in members))
    for _ in range(3):
        for pending in [push(worker, 0, bytes(spec.nbytes)) for worker in members]:
            pending.wait()
    return members


def test_rank_0_on_the_host_of_all_pservers_asks_how_fast_others_receive(cluster: Cluster) -> None:
    members = sharing(cluster, True, False, True, pservers=2)
    tuner = members[0]._tuner
    assert (tuner._ask, tuner._most) == (True, MAX_TUNED_GRPC_BYTES)

    def told() -> list[Throughput]:
        seen = members[0].client.members(DEADLINE_S)
        return [Throughput(m.busy_bytes, m.busy_s) for each in seen for m in each if m.rank == 1]

    def measured() -> bool:
        # How fast they are received is measured while replies wait to be sent: rank 1 takes none before all are there.
        own, other = push(members[1], 0, bytes(8_000_000)), push(members[2], 0, bytes(8_000_000))
        poll(lambda: not any(queue.load.queued_slices for queue in members[1]._queues))  # it takes no receipts either
        with members[1]._buckets[0].lock:
            for each in [other, push(members[0], 0, bytes(8_000_000))]:
                each.wait()
        own.wait()
        return all(each.nbytes > 0 and each.seconds > 0 for each in told())

    poll(measured)  # receipts come in time to count, or with the next step
    poll(lambda: tuner._busy() == told())  # the last ones may still come


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_all_ranks_know_alike_whether_anything_travels(cluster: Cluster, wanted: tuple[bool, ...]) -> None:
    assert [worker.info.one_host for worker in sharing(cluster, *wanted, pservers=2)] == [all(wanted)] * 2


def test_where_nothing_travels_slices_are_large_as_soon_as_all_can_change(cluster: Cluster) -> None:
    members = sharing(cluster, True, True, pservers=2)
    many = [worker._buckets[0] for worker in members]
    assert min(len(bucket.cutting.slices) for bucket in many) > 8

    def is_cut_anew() -> bool:
        for pending in [push(worker, 0, bytes(many[0].spec.nbytes)) for worker in members]:
            pending.wait()
        return all(max(each.nbytes for each in bucket.cutting.slices) == MAX_TUNED_GRPC_BYTES for bucket in many)

    poll(is_cut_anew)


def test_slices_are_as_many_times_as_large_as_what_is_sent_of_them() -> None:
    def bucket(codec: str, nbytes: int, occasional: bool = False) -> PushedBucket:
        spec = BucketSpec(("x",), "sum", nbytes, "float32", 0, occasional, codec=codec_of(codec))
        return PushedBucket(spec, Cutting([], []))

    assert ratio([]) == ratio([bucket("none", 2**20)]) == 1
    assert ratio([bucket("bfloat16", 2**20), bucket("none", 2**30, occasional=True)]) == 2
    assert ratio([bucket("bfloat16", 2**20), bucket("none", 2**20)]) == 4 / 3
