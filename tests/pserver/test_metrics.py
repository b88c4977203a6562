"""What a pserver says of itself: the Status call, Prometheus' view of it, and its health."""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

import jobs
import numpy as np
import pytest
from jobs import Cluster
from prometheus_client.parser import text_string_to_metric_families

from tfps.config import Config
from tfps.errors import ConfigError, ConnectError, ProtocolError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.metrics import MetricsServer
from tfps.pserver.server import ParameterServer
from tfps.pserver.slices import RoundSlice
from tfps.wire import frames
from tfps.wire.control import Pserver
from tfps.wire.frames import LAST, Header, Kind

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "metrics.md"
NUMBERS = np.arange(1000, dtype=np.float32)  # 4 slices of 1024 bytes, the last one shorter
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def serve(cluster: Cluster, server: ParameterServer) -> MetricsServer:
    metrics = MetricsServer(server, "127.0.0.1", 0)
    cluster.callback(metrics.stop)
    return metrics


def get(metrics: MetricsServer, path: str) -> tuple[int, str]:
    """Status code and body."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}{path}", timeout=jobs.DEADLINE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape(metrics: MetricsServer) -> Samples:
    """Samples by name and labels, read as Prometheus reads them."""
    code, text = get(metrics, "/metrics")
    assert code == 200
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def details(server: ParameterServer) -> pb.StatusReply:
    """The status as it comes over the wire."""
    pserver = Pserver(server.address)
    try:
        return pserver.call("Status", pb.StatusRequest(details=True), jobs.DEADLINE_S)
    finally:
        pserver.close()


def of_rank(name: str, rank: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, (("rank", str(rank)),)


def test_a_job_of_two_workers_shows_in_every_metric(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    metrics = serve(cluster, server)
    workers = cluster.workers([server.address], 2)
    spec = BucketSpec(("dense",), "sum", NUMBERS.nbytes, "float32", 0)
    jobs.together(*(lambda worker=worker: worker.declare([spec]) for worker in workers))
    waiting = jobs.push(workers[0], 0, NUMBERS)
    jobs.poll(lambda: server.status().open_slices == 4)  # a slice that has been received need not be in its round

    found = scrape(metrics)
    assert found["tfps_open_slices", ()] == 4
    assert [found[of_rank("tfps_awaited_slices", rank)] for rank in range(2)] == [0, 4]
    assert [found[of_rank("tfps_received_bytes_total", rank)] for rank in range(2)] == [4000, 0]

    jobs.push(workers[1], 0, NUMBERS).wait()
    waiting.wait()
    found = scrape(metrics)
    assert found["tfps_info", (("version", server.status().version),)] == 1
    assert found["tfps_members", (("state", "streaming"),)] == found["tfps_workers", ()] == 2
    assert (found["tfps_buckets", ()], found["tfps_slices", ()], found["tfps_shard_bytes", ()]) == (1, 4, 4000)
    assert (found["tfps_jobs_total", ()], found["tfps_open_slices", ()]) == (1, 0)
    for rank in range(2):
        for direction in ("received", "sent"):
            assert found[of_rank(f"tfps_{direction}_bytes_total", rank)] == 4000
            assert found[of_rank(f"tfps_{direction}_slices_total", rank)] == 4
        for name, value in {"step": 0, "queued_slices": 0, "awaited_slices": 0, "window_bytes": 4096}.items():
            assert found[of_rank(f"tfps_{name}", rank)] == value
        assert found[of_rank("tfps_aggregate_wait_seconds_total", rank)] == 0  # each built its graph
    assert found["process_resident_memory_bytes", ()] > 1e6

    waiting = jobs.push(workers[0], 0, NUMBERS)
    jobs.poll(lambda: server.status().open_slices == 4)
    jobs.push(workers[1], 0, NUMBERS).wait()
    waiting.wait()
    found = scrape(metrics)
    assert found[of_rank("tfps_aggregate_wait_seconds_total", 0)] == 0
    assert found[of_rank("tfps_aggregate_wait_seconds_total", 1)] > 0


def test_the_late_rank_has_the_wait_and_a_gather_counts_it_once(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    members = [cluster.raw(server.address, rank).open() for rank in range(2)]
    jobs.together(*(member.declare for member in members))
    gather = pb.Bucket(names=["words"], kind="gather", nbytes=0, dtype="uint8", priority=1)
    jobs.together(*(lambda member=member: member.declare(gather, number=1) for member in members))
    for member in members:
        member.send(frames.encode(Header(Kind.PUSH, LAST, 0, 0, 1), bytes(3)))
    assert members[0].read()[0].kind == Kind.REPLY
    late_s = 1000.0
    members[1].send(frames.encode(Header(Kind.PUSH, LAST, 0, 0, 1, 1), bytes(10)))
    jobs.poll(lambda: server.status().open_slices == 1)
    slice_ = server._job._state.shard.buckets[0].slices[0]
    with slice_.lock:  # rank 1 may still be about to read it
        assert isinstance(slice_, RoundSlice)
        slice_._first_ns -= int(late_s * 1e9)  # as if it had come so much earlier
    members[0].send(frames.encode(Header(Kind.PUSH, 0, 0, 0, 1, 1), bytes(1024)))
    members[0].send(frames.encode(Header(Kind.PUSH, LAST, 0, 1, 1, 1), bytes(3)))
    assert members[0].read()[0].kind == Kind.REPLY
    waits = {member.rank: member.wait_s for member in server.status().members}
    assert waits[1] == 0
    assert late_s <= waits[0] < 1.5 * late_s


def test_errors_are_counted_by_call_and_by_class(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    metrics = serve(cluster, server)
    member = cluster.raw(server.address).open().declare()
    with pytest.raises(ConnectError):
        cluster.raw(server.address)  # the only rank is taken
    with pytest.raises(ProtocolError):
        member.declare(number=5)
    assert [type(error) for error in member.second_streams(None, "0")] == [ConnectError] * 2
    member.send(b"nonsense")
    assert isinstance(member.read_error(), ProtocolError)
    found = scrape(metrics)
    assert found["tfps_rpc_errors_total", (("error", "ConnectError"), ("rpc", "Join"))] == 1
    assert found["tfps_rpc_errors_total", (("error", "ProtocolError"), ("rpc", "Declare"))] == 1
    for stream in ("Push", "Pull"):
        assert found["tfps_rpc_errors_total", (("error", "ConnectError"), ("rpc", stream))] == 1
    assert found["tfps_job_failures_total", (("error", "ProtocolError"),)] == 1
    status = details(server)
    assert (status.state, status.reason[:8]) == ("failed", "rank 0: ")


def test_tuning_a_job_counts_as_no_error(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    worker = cluster.worker([server.address], config=Config(connect_timeout_s=jobs.DEADLINE_S))
    worker.declare([BucketSpec(("dense",), "sum", 4000, "float32", 0)])  # rank 0 measures round trips here
    assert not server.status().errors


def test_the_state_of_a_job_follows_its_members(cluster: Cluster) -> None:
    server = cluster.pserver(2)
    assert details(server).state == "idle"
    members = [cluster.raw(server.address, 0, job="digits").open()]
    assert (details(server).state, details(server).job) == ("joining", "digits")
    members.append(cluster.raw(server.address, 1, job="digits").open())
    jobs.poll(lambda: details(server).state == "running")
    members[0].leave()
    assert details(server).state == "ending"
    members[1].leave()
    assert (details(server).state, details(server).jobs) == ("idle", 1)


def test_without_details_only_the_cpu_time_is_told(cluster: Cluster) -> None:
    pserver = Pserver(cluster.pserver(1).address)
    cluster.callback(pserver.close)
    reply = pserver.call("Status", pb.StatusRequest(), jobs.DEADLINE_S)
    assert [field.name for field, _ in reply.ListFields()] == ["cpu_s"]


def test_health_is_ok_until_the_pserver_stops_and_other_paths_are_not_found() -> None:
    server = ParameterServer("127.0.0.1", 0, workers=1)
    metrics = MetricsServer(server, "127.0.0.1", 0)
    try:
        assert get(metrics, "/healthz") == (200, "ok\n")
        assert get(metrics, "/elsewhere")[0] == 404
        server.stop()
        assert get(metrics, "/healthz") == (503, "stopping\n")
    finally:
        server.stop()
        metrics.stop()


def test_a_pserver_is_busy_until_it_has_had_no_job_for_a_while(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    patient, other = (MetricsServer(server, "127.0.0.1", 0, idle_s=idle_s) for idle_s in (600.0, 0.0))
    for each in (patient, other):
        cluster.callback(each.stop)
    assert [get(each, "/busy") for each in (patient, other)] == [(200, "ok\n"), (503, "idle\n")]
    worker = cluster.raw(server.address).open()
    assert get(other, "/busy") == (200, "ok\n")
    worker.leave()
    jobs.poll(lambda: get(other, "/busy") == (503, "idle\n"))
    assert get(patient, "/busy") == (200, "ok\n")


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "tfps.pserver.metrics")
    with pytest.raises(ConfigError, match=r"pip install 'tfps\[metrics\]'"):
        import tfps.pserver.metrics  # noqa: F401


def test_the_documentation_lists_every_metric_and_no_other(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    metrics = serve(cluster, server)
    cluster.raw(server.address)
    families = text_string_to_metric_families(get(metrics, "/metrics")[1])
    exported = {
        family.name + ("_total" if family.type == "counter" else "_info" if family.type == "info" else "")
        for family in families
    }
    exported = {name.replace("_info_info", "_info") for name in exported if name.startswith("tfps")}
    listed = set(re.findall(r"^\| `(tfps_\w+)", DOCS.read_text(), re.M))
    assert listed == exported
