"""Workers at their start: they find pservers and each other, and are told who is missing, and what differs."""

from __future__ import annotations

import functools
import socket
import socketserver
import threading
import time
from dataclasses import replace

import jobs
import pytest
from jobs import Cluster, attempt, bucket, job, together
from table_jobs import declared, described

from tfps.errors import ConfigError, ConnectError, MismatchError, WaitTimeoutError, WorkerLostError
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import UpdateSpec
from tfps.types import Options
from tfps.worker.worker import Worker

SHORT = replace(jobs.CONFIG, connect_timeout_s=1.5, step_timeout_s=1.0)
# For whoever has to join, or to declare, in time before the wait that must end: a busy machine takes a while for that.
LONGER = replace(jobs.CONFIG, connect_timeout_s=5.0)  # in which something must have answered

# Joining


def test_pservers_may_start_later_than_workers(cluster: Cluster) -> None:
    port = jobs.unused_ports(1)
    started = threading.Event()

    def join() -> Worker:
        started.set()
        return cluster.worker([f"127.0.0.1:{port}"])

    def serve() -> None:

        assert started.wait(jobs.DEADLINE_S)
        cluster.pserver(1, port)

    worker, _ = together(join, serve)
    assert worker is not None
    assert worker.view.workers == 1


def test_no_pserver_at_an_address_is_named_within_the_timeout(cluster: Cluster) -> None:
    address = f"127.0.0.1:{jobs.unused_ports(1)}"
    start = time.monotonic()
    with pytest.raises(
        ConnectError,
        match=rf"pserver {address}: no answer within 1.5 s \(127\.0\.0\.1: refused: nothing listens there\); is "
        r"tfps_pserver running there, .* TFPS_CONNECT_TIMEOUT_S",
    ):
        cluster.worker([address], config=SHORT)
    assert time.monotonic() - start < jobs.DEADLINE_S


def test_a_name_that_does_not_resolve_is_said_to_be_one(cluster: Cluster) -> None:
    with pytest.raises(ConnectError, match=r"no answer within 1.5 s \(the name 'no\.such\.invalid' does not resolve: "):
        cluster.worker(["no.such.invalid:7070"], config=SHORT)


def test_one_of_two_pservers_unreachable_is_named_and_the_other_is_free_again(cluster: Cluster) -> None:
    good, bad = cluster.pserver(1).address, f"127.0.0.1:{jobs.unused_ports(1)}"
    with pytest.raises(ConnectError, match=f"pserver {bad}: no answer"):
        cluster.worker([good, bad], config=LONGER)
    cluster.worker([good])


def test_something_else_at_the_address_is_no_pserver(cluster: Cluster) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    other = grpc.server(ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    cluster.callback(lambda: other.stop(0).wait())
    with pytest.raises(ConnectError, match="not a tfps pserver"):
        cluster.worker([f"127.0.0.1:{port}"])


@pytest.mark.parametrize(
    ("says", "what"), [(b"SSH-2.0-sshd\r\n", "another server"), (b"HTTP/1.1 400 Bad Request\r\n", "an HTTP server")]
)
def test_a_server_without_grpc_at_the_address_is_named_with_what_it_says(
    cluster: Cluster, says: bytes, what: str
) -> None:
    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(says)

    other = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    cluster.callback(other.server_close)
    cluster.callback(other.shutdown)
    address = f"127.0.0.1:{other.server_address[1]}"
    said = says.decode().strip()
    with pytest.raises(ConnectError, match=rf"{address}: what answers there is not a tfps pserver but {what}.*{said}"):
        cluster.worker([address], config=replace(LONGER, connect_timeout_s=1.0))


def test_a_missing_rank_is_named_within_the_timeout(cluster: Cluster) -> None:
    addresses = cluster.pservers(1, 3)
    results = attempt(*(functools.partial(cluster.worker, addresses, rank, config=LONGER) for rank in (0, 2)))
    for error in results:
        assert isinstance(error, WaitTimeoutError)
        assert "rank 1 (not joined)" in str(error)
        assert "TFPS_CONNECT_TIMEOUT_S" in str(error)


def test_a_pserver_used_by_another_job_names_its_workers(cluster: Cluster) -> None:
    addresses = cluster.pservers(2, 1)
    cluster.worker(addresses[1:], job="mnist")
    with pytest.raises(ConnectError, match=rf"pserver {addresses[1]}: .*used by|lists of pservers differ"):
        cluster.worker(addresses, job="imagenet")
    with pytest.raises(ConnectError, match=r"used by another job 'mnist' \(its workers: rank 0"):
        cluster.worker(addresses[1:], job="imagenet")


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"window_bytes": 9999}, "window_bytes must be the same on all workers: .* 4096, this worker 9999"),
        ({"update": "server"}, "update must be the same on all workers"),
        ({"compression": "int8"}, "compression must be .*: rank 0 .* has 'none', this worker 'int8'"),
    ],
)
def test_settings_that_differ_are_refused(cluster: Cluster, changes: Options, differ: str) -> None:
    addresses = cluster.pservers(1, 2)
    first = cluster.raw(addresses[0], rank=0).open()
    with pytest.raises(MismatchError, match=differ):
        cluster.worker(addresses, 1, config=replace(jobs.CONFIG, **changes))
    first.leave()


@pytest.mark.parametrize("pservers", [[], ["a:1", "a:1"], ["nonsense"]])
def test_malformed_lists_of_pservers_are_refused(pservers: list[str]) -> None:
    with pytest.raises(ConfigError, match="pserver"):
        Worker(pservers)


# Declaring


def test_models_that_differ_are_named_on_every_worker(cluster: Cluster) -> None:
    workers = job(cluster, 3)
    details = [["x", "variable dense/kernel (64, 10) float32"]] * 2 + [["x", "variable dense/kernel (64, 12) float32"]]
    results = attempt(*(functools.partial(w.declare, [], details[w.rank]) for w in workers))
    for error in results:
        assert isinstance(error, MismatchError)
        assert "line 2" in str(error)
        for rank, size in enumerate((10, 10, 12)):
            assert f"rank {rank} ({socket.gethostname()}:" in str(error)
            assert f"has variable dense/kernel (64, {size}) float32" in str(error)


SUM = bucket(4096)
UPDATED = replace(SUM, update=UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (1024,), (False,)))


@pytest.mark.parametrize(
    ("ours", "theirs", "has"),
    [
        ([SUM], [SUM, bucket(8)], ["has nothing", "has bucket 'b' sum 8 bytes float32 priority 0"]),
        ([replace(SUM, codec=codec_of("int8"))], [replace(SUM, codec=codec_of("bfloat16"))], ["int8", "as bfloat16"]),
        ([SUM], [UPDATED], ["has bucket 'b' sum", "updated by"]),
        ([declared("user")], [declared("user", described(rows=10))], ["'user'"]),
    ],
)
def test_buckets_that_differ_are_named(
    cluster: Cluster, ours: list[BucketSpec], theirs: list[BucketSpec], has: list[str]
) -> None:
    first, second = job(cluster, 2)
    for error in attempt(lambda: first.declare(ours), lambda: second.declare(theirs)):
        assert isinstance(error, MismatchError)
        assert not [text for text in has if text not in str(error)], error


def test_a_rank_that_does_not_declare_is_named(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    first, second = cluster.workers([server.address], 2)
    first.config = SHORT  # only now: to join and to declare nothing it had time
    with pytest.raises(
        WaitTimeoutError,
        match=r"after 1.* s not declared .*: rank 1 \(.*every rank must call.*TFPS_STEP_TIMEOUT_S",
    ):
        first.declare([bucket(8)])
    assert isinstance(jobs.Failed(second).wait(), WaitTimeoutError)
    counted = server.status().errors  # a wait in pieces is no error, only its end is
    assert [each.where for each in counted] == ["job"], counted


def test_a_rank_that_leaves_instead_of_declaring_is_named(cluster: Cluster) -> None:
    first, second = job(cluster, 2)
    error, _ = attempt(lambda: first.declare([bucket(8)]), second.close)
    assert isinstance(error, WorkerLostError)
    assert "rank 1" in str(error)
    assert "its script ended; every rank must call fit" in str(error)
