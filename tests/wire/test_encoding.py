"""Slices that are encoded when they are sent."""

from __future__ import annotations

import numpy as np
import pytest
from jobs import together

from tfps.exchange.codecs import known
from tfps.trace.recorder import Recorder
from tfps.wire.encoding import Encoding
from tfps.wire.frames import Header, Kind
from tfps.wire.send_queue import Outgoing, SendQueue

INT8 = known("int8")


def encoding(count: int = 1000) -> tuple[Encoding, np.ndarray]:
    held = np.zeros(count, np.float32)
    return Encoding(INT8, np.linspace(-1, 1, count, dtype=np.float32), held), held


def test_whoever_asks_gets_the_same_bytes_and_what_is_held_back_counts_once() -> None:
    one, held = encoding()
    first, *others = together(*[one.data] * 4)
    once, expected = encoding()
    assert bytes(first) == bytes(once.data())
    assert held.tobytes() == expected.tobytes()
    assert np.abs(held).max() > 0
    assert all(other.obj is first.obj for other in others)


def test_nothing_is_encoded_before_it_is_sent() -> None:
    queue = SendQueue(2**20, "priority", piggyback=True, recorder=Recorder(), pserver=0)
    queue.use_connection()
    made = [encoding()[0] for _ in range(4)]
    items = [
        Outgoing(Header(Kind.PUSH, bucket=number, priority=9 - number), each.nbytes, encoding=each)
        for number, each in enumerate(made)
    ]
    queue.put(items)
    assert not any(each.made for each in made)
    queue.prepare()  # while the socket is full
    assert [each.made for each in made] == [False, False, False, True]  # the most urgent
    taken = queue.take_parts(100)
    assert taken is not None
    ((item, _, begin, end),) = taken
    assert isinstance(item, Outgoing)
    assert (item.encoding, begin, end) == (made[3], 0, 100)
    queue.prepare()
    queue.prepare()
    assert [each.made for each in made] == [False, False, True, True]  # one ahead


def test_an_error_is_reported_once_and_raised_to_everybody() -> None:
    reported: list[Exception] = []

    def failed(error: Exception) -> Exception:
        reported.append(error)
        return ValueError(f"it failed: {error}")

    broken = Encoding(INT8, np.zeros(8, np.float32), np.zeros(7, np.float32), failed)  # sizes that do not fit
    for _ in range(2):
        with pytest.raises(ValueError, match="it failed: "):
            broken.data()
    assert len(reported) == 1
