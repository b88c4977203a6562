"""The guard of a pserver: what is refused before it costs anything. Whole attacks are in test_strangers.py."""

from __future__ import annotations

import pytest

from tfps.errors import ProtocolError
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.guard import Rate, parse


def test_a_rate_allows_a_burst_and_then_so_many_in_a_second() -> None:
    now = [100.0]
    rate = Rate(per_s=10, burst=3, clock=lambda: now[0])
    assert [rate.take() for _ in range(3)] == [0.0] * 3
    assert rate.take() == pytest.approx(0.1)
    now[0] += 0.05
    assert rate.take() == pytest.approx(0.05)  # asking costs nothing
    now[0] += 0.06
    assert rate.take() == 0.0
    now[0] += 1000
    assert [rate.take() > 0 for _ in range(4)] == [False, False, False, True]  # what was not used is not saved up


@pytest.mark.parametrize(("name", "limit"), [("Status", 2**16), ("Join", 2**16), ("Declare", 2**24), ("Upload", 2**23)])
def test_a_request_that_is_too_large_is_refused_without_parsing_it(name: str, limit: int) -> None:
    with pytest.raises(ProtocolError, match=f"a request of {name} must have at most {limit} bytes, got {limit + 1}"):
        parse(name, b"\xff" * (limit + 1))


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a request of Join must be a message of tfps, got 4 other bytes"):
        parse("Join", b"\xff" * 4)


def test_a_message_is_parsed() -> None:
    request = pb.StatusRequest(details=True)
    assert parse("Status", request.SerializeToString()) == request
