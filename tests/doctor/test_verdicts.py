"""What answers mean: times, clocks and versions; who answers in place of a pserver."""

from __future__ import annotations

import pytest

from tfps.doctor.verdicts import clock, distance, of_version, stranger, unreached
from tfps.wire.clocks import Compared
from tfps.wire.control import PROTOCOL_VERSION
from tfps.wire.reach import Answers, Unreached


def test_another_protocol_version_fails_and_names_both() -> None:
    check = of_version(PROTOCOL_VERSION + 1, "9.0")
    assert (check.status, check.problem) == ("failed", "version")
    assert f"the pserver speaks protocol version {PROTOCOL_VERSION + 1}, the worker version {PROTOCOL_VERSION}; " in (
        check.advice
    )
    assert of_version(PROTOCOL_VERSION, "9.0").status == "ok"
    assert of_version(PROTOCOL_VERSION, "").problem == "old"


def test_a_long_way_is_a_warning() -> None:
    assert distance(0.1, 0.001).status == "ok"  # the call waited for a busy host
    check = distance(0.1, 0.05)
    assert (check.status, check.problem) == ("warning", "far")
    assert check.advice.startswith("a round trip takes 50 ms")
    assert distance(0.1, None).problem == "far"


@pytest.mark.parametrize(
    ("wall_offset_ns", "status"), [(None, "ok"), (10**9, "ok"), (-(10**9), "ok"), (2 * 10**9, "warning")]
)
def test_times_of_day_that_differ_are_a_warning(wall_offset_ns: int | None, status: str) -> None:
    check = clock(Compared(-5 * 10**9, 10**6, 2 * 10**6, wall_offset_ns))
    assert check.status == status
    assert check.values["offset_s"] == -5.0
    assert check.values["error_s"] == 0.001


@pytest.mark.parametrize(
    ("who", "problem"),
    [
        ("http", "http"),
        ("data_port", "data_port"),
        ("other", "stranger"),
        ("closes", "closes"),
        ("silent", "silent"),
        ("grpc", "lost"),
    ],
)
def test_each_stranger_has_its_word(who: Answers, problem: str) -> None:
    check = stranger(who, "said", "error")
    assert (check.status, check.problem) == ("failed", problem)


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("refused", "is tfps_pserver running, with --port 7? Without --token-file or TLS it listens on its own host"),
        ("timeout", "a firewall drops what goes to port 7 (open it between hosts), or there is no such host"),
        ("unreachable", "look at the address, the route and firewalls"),
        ("blocked", "look at the address, the route and firewalls"),
    ],
)
def test_each_reason_not_to_be_reached_has_its_advice(problem: str, says: str) -> None:
    check = unreached(Unreached(problem, "text"), 7)
    assert (check.status, check.problem) == ("failed", problem)
    assert says in check.advice
