"""Bandwidth: real measurements over both paths, patience with other clients, and what is made of the figures."""

from __future__ import annotations

import socket
import threading

import jobs
import pytest
from guarded import data
from jobs import Cluster
from measured import enough

from tfps.doctor.bandwidth import Bandwidth, compared, failed, mbit, measure, of_job
from tfps.doctor.report import Check
from tfps.errors import PserverLostError
from tfps.pserver.server import ParameterServer
from tfps.wire.connection import introduce
from tfps.wire.control import Pserver
from tfps.wire.job_token import JobToken
from tfps.wire.measuring import Measured, purpose
from tfps.wire.status import MemberStatus

SHORT_S = 0.1


def client(cluster: Cluster, server: ParameterServer) -> Pserver:
    pserver = Pserver(server.address)
    cluster.callback(pserver.close)
    return pserver


@pytest.mark.parametrize("path", ["tcp", "grpc"])
def test_both_directions_are_measured(path: str, cluster: Cluster) -> None:
    server = cluster.pserver(1)
    port = data(server).port if path == "tcp" else 0
    pserver = client(cluster, server)

    def attempt(seconds: float) -> float:
        found = measure(pserver, port, jobs.DEADLINE_S, seconds)
        assert isinstance(found, Bandwidth)
        assert found.path == path
        return found.least

    assert enough(attempt) > 1e5


def test_while_another_client_measures_this_one_waits(cluster: Cluster) -> None:
    server = cluster.pserver(1)
    pserver, port = client(cluster, server), data(server).port
    other = introduce(server.address, port, JobToken(), purpose("push"), 0, jobs.DEADLINE_S)
    ends = threading.Timer(0.3, other.close)
    ends.start()
    assert isinstance(measure(pserver, port, jobs.DEADLINE_S, SHORT_S), Bandwidth)
    ends.join()


@pytest.mark.parametrize("path", ["tcp", "grpc"])
def test_it_does_not_wait_for_ever(path: str, cluster: Cluster) -> None:
    server = cluster.pserver(1)
    cluster.raw(server.address)
    port = data(server).port if path == "tcp" else 0
    found = measure(client(cluster, server), port, 0.2, SHORT_S)
    assert isinstance(found, Check)
    assert found.status == "skipped"
    assert found.text == "not measured: the pserver has a job, which a measurement would slow"


def test_where_bulk_data_does_not_arrive_the_mtu_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    server = cluster.pserver(1)

    def lose(connected: socket.socket, _: float) -> Measured:
        connected.settimeout(jobs.DEADLINE_S)
        connected.recv(1)
        return Measured(0, 0.0)

    monkeypatch.setattr(server._measuring, "_receive", lose)
    found = measure(client(cluster, server), data(server).port, jobs.DEADLINE_S, jobs.DEADLINE_S)
    assert isinstance(found, Check)
    assert (found.status, found.problem) == ("failed", "stalls")
    assert "MTU" in found.advice


@pytest.mark.parametrize(
    ("rate", "text"), [(12.5e6, "100 Mbit/s"), (1.25e8, "1 Gbit/s"), (3.1e9, "24.8 Gbit/s"), (0.0, "0 Mbit/s")]
)
def test_rates_are_in_bits(rate: float, text: str) -> None:
    assert mbit(rate) == text


def test_a_pserver_with_less_than_half_of_the_median_is_a_warning() -> None:
    rates = {"a": 1e8, "b": 1e8, "c": 3e7, "d": 6e7}
    found = compared({name: Bandwidth(rate, 9e9, "tcp") for name, rate in rates.items()})
    assert [found[name].status for name in "abcd"] == ["ok", "ok", "warning", "ok"]
    assert found["c"].problem == "slow"
    assert found["c"].advice.startswith(
        "slow: 240 Mbit/s, while half of the pservers reach 800 Mbit/s: every step waits"
    )
    assert found["a"].values == {"push_bytes_per_s": 1e8, "pull_bytes_per_s": 9e9, "path": "tcp"}
    assert compared({}) == {}


def test_too_little_to_say_is_a_warning() -> None:
    assert compared({"a": Bandwidth(0.0, 1e8, "grpc")})["a"].problem == "unknown"


def member(rank: int, busy_bytes: int, busy_s: float, shared: bool = False) -> MemberStatus:
    return MemberStatus(rank, "h", 1, "streaming", 1, 1, 1, 1, 1, 0, 0, 0, 0.0, 0, shared, busy_bytes, busy_s)


def test_of_a_running_job_its_slowest_rank_is_told() -> None:
    check = of_job([member(0, 10**8, 1.0), member(1, 10**8, 2.0), member(2, 1, 1.0, True), member(3, 1, 0.01)])
    assert check.status == "skipped"
    assert check.text == "not measured: there is a job; its replies reach rank 1, the slowest, at 400 Mbit/s"
    assert check.values == {"job_bytes_per_s": 5e7, "rank": 1}
    assert of_job([]).text == "not measured: there is a job"


def test_a_measurement_that_breaks_is_a_warning() -> None:
    assert failed(PserverLostError("gone")).advice == "the measurement broke: gone; see the pserver's log"
