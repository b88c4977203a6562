"""Parts of half a millisecond of the link, or 64 KiB in up to 3 ms, against a socket with a given rate."""

from __future__ import annotations

import pytest

from tfps.wire.pace import CHEAP_BYTES, MAX_BYTES, MIN_BYTES, PART_S, SLOW_PART_S, UNSENT_S, Pace


def paced(rate: float, seconds: float = 1.0) -> Pace:
    """After so long of sending on a link of `rate` bytes per second that is always full."""
    pace, now_s = Pace(), 0.0
    while now_s < seconds:
        now_s += pace.part_bytes / rate
        pace.sent(pace.part_bytes, waited=True, now_s=now_s)
    return pace


@pytest.mark.parametrize("mbit", [1000, 2500, 5000])
def test_a_part_takes_about_half_a_millisecond(mbit: int) -> None:
    pace = paced(mbit * 1e6 / 8)
    assert PART_S / 2 <= pace.part_bytes / (mbit * 1e6 / 8) <= 2 * PART_S
    assert pace.unsent_bytes == pace.part_bytes * UNSENT_S / PART_S


@pytest.mark.parametrize("mbit", [200, 300, 700])
def test_a_part_that_saves_cpu_is_larger(mbit: int) -> None:
    assert paced(mbit * 1e6 / 8).part_bytes == CHEAP_BYTES


@pytest.mark.parametrize("mbit", [50, 100, 150])
def test_no_part_holds_an_urgent_one_up_for_longer_than_four_milliseconds(mbit: int) -> None:
    assert SLOW_PART_S / 2 <= paced(mbit * 1e6 / 8).part_bytes / (mbit * 1e6 / 8) <= 4e-3


def test_slow_and_fast_links_stay_within_bounds() -> None:
    assert paced(1e5).part_bytes == MIN_BYTES
    assert paced(1e11, 0.1).part_bytes == MAX_BYTES


def test_a_socket_that_takes_all_at_once_gets_larger_parts() -> None:
    pace = Pace()
    for _ in range(200):
        pace.sent(pace.part_bytes, waited=False, now_s=0.0)
    assert pace.part_bytes == MAX_BYTES


def test_a_socket_that_takes_what_comes_now_and_then_shows_nothing() -> None:
    pace = Pace()
    before = pace.part_bytes
    for _ in range(200):
        for _ in range(3):
            pace.sent(pace.part_bytes, waited=False, now_s=0.0)
        pace.idle()
    assert pace.part_bytes == before


def test_an_idle_link_says_nothing_of_its_rate() -> None:
    pace = paced(1.25e9)
    before = pace.part_bytes
    for second in range(2, 20):  # one part per second
        pace.idle()
        pace.sent(100, waited=True, now_s=float(second))
    assert pace.part_bytes == before
