"""Measurements of bytes per second: what is counted, and what the client's end makes of a pserver that goes wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import jobs
import pytest

from tfps.errors import ProtocolError
from tfps.wire.measuring import (
    MAX_BYTES,
    SECONDS,
    Direction,
    Meter,
    direction_of,
    drop,
    measure_connection,
    pack_result,
    purpose,
    unpack_result,
)
from tfps.wire.send_queue import Throughput

MS = 1_000_000


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's and the pserver's end of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    other.settimeout(jobs.DEADLINE_S)
    with client, other:
        yield client, other


def test_the_first_quarter_does_not_count() -> None:
    meter = Meter()
    for ms in range(0, 401, 10):
        meter.add(1 if ms < 100 else 1000, ms * MS)
    measured = meter.measured()
    assert measured.nbytes == 30_000
    assert measured.seconds == pytest.approx(0.3)
    assert measured.bytes_per_s == pytest.approx(100_000)


def test_what_is_too_short_has_no_rate() -> None:
    meter = Meter()
    assert meter.measured() == Throughput(0, 0.0)
    for now_ms in (5, 6):
        meter.add(100, now_ms * MS)
        assert meter.measured() == Throughput(100 * (now_ms - 4), 0.0)
    assert meter.measured().bytes_per_s == 0.0


def test_a_measurement_keeps_a_bounded_number_of_points() -> None:
    meter = Meter()
    for microsecond in range(0, 1_000_000, 50):
        meter.add(1, microsecond * 1000)
    assert len(meter._points) <= 501
    assert meter.measured().bytes_per_s == pytest.approx(20_000, rel=0.01)


def test_enough_is_a_time_or_so_many_bytes() -> None:
    meter = Meter()
    meter.add(1, 0)
    assert not meter.over
    meter.add(1, int(SECONDS * 1e9))
    assert meter.over
    meter = Meter()
    meter.add(MAX_BYTES, 0)
    assert meter.over


def test_a_result_crosses_the_wire() -> None:
    measured = Throughput(2**40, 0.75)
    assert unpack_result(pack_result(measured)) == measured
    with pytest.raises(ProtocolError, match="the result of a measurement must have 16 bytes, got 3"):
        unpack_result(b"abc")


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_purpose_says_its_direction_and_no_incarnation_does(direction: Direction) -> None:
    assert direction_of(purpose(direction)) == direction
    assert direction_of("0123456789abcdef0123456789abcdef") is None
    assert direction_of("measure ") is None


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_pserver_that_says_nothing_ends_the_wait_in_time(
    direction: Direction, ends: tuple[socket.socket, socket.socket]
) -> None:
    with pytest.raises(TimeoutError):
        measure_connection(ends[0], direction, 0.05, 0.1)


def test_a_push_without_a_result_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    client, other = ends
    other.close()
    with pytest.raises(ConnectionError):
        measure_connection(client, "push", 1.0, jobs.DEADLINE_S)


def test_a_push_of_which_nothing_arrives_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    client, other = ends

    def answer() -> None:
        other.recv(1)
        other.sendall(pack_result(Throughput(0, 0.0)))

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    with pytest.raises(TimeoutError, match=r"nothing of \d+ bytes has arrived"):
        measure_connection(client, "push", jobs.DEADLINE_S, jobs.DEADLINE_S)
    answering.join(jobs.DEADLINE_S)


def test_a_pull_of_which_nothing_arrives_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    client, other = ends
    drop(other)
    with pytest.raises(TimeoutError, match="as nothing of what it sent has arrived"):
        measure_connection(client, "pull", jobs.DEADLINE_S, jobs.DEADLINE_S)
