"""What a slice keeps: parameters that have to be put, slots that begin by themselves, and their update."""

from __future__ import annotations

import numpy as np
import pytest

from tfps.errors import ProtocolError
from tfps.exchange.kept_slice import KeptSlice
from tfps.exchange.update_spec import StepNumbers, UpdateSpec

SGD = UpdateSpec(
    "sgd",
    (("momentum", 0.5), ("nesterov", 0.0), ("weight_decay", 0.5)),
    (("momentum", 0.25),),
    (2, 3, 4),
    (True, False, True),
)
NUMBERS = StepNumbers(0, (0.0, 0.5))


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def test_the_first_update_needs_all_parameters() -> None:
    kept = KeptSlice("slice 3", SGD, 0, 36)
    kept.put(0, 0, bytes(20))
    with pytest.raises(ProtocolError, match=r"the parameters of slice 3 must be put .* 16 bytes are missing"):
        kept.update(bytes(36), NUMBERS)
    kept.put(0, 20, bytes(16))
    assert len(kept.update(bytes(36), NUMBERS)) == 36


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ([(0, 20), (0, 20)], 16),
        ([(8, 8), (12, 8)], 24),
        ([(16, 20), (0, 0)], 16),
        ([(4, 4), (12, 4), (0, 32)], 4),
        ([(20, 16), (8, 12), (0, 4)], 4),
    ],
)
def test_what_is_put_twice_counts_once(parts: list[tuple[int, int]], missing: int) -> None:
    kept = KeptSlice("slice 3", SGD, 0, 36)
    for begin, nbytes in parts:
        kept.put(0, begin, bytes(nbytes))
    with pytest.raises(ProtocolError, match=f"must be put .* {missing} bytes are missing"):
        kept.update(bytes(36), NUMBERS)
    kept.put(0, 0, bytes(36))
    assert len(kept.update(bytes(36), NUMBERS)) == 36


def test_a_part_of_a_bucket_decays_where_its_variables_do() -> None:
    kept = KeptSlice("slice", SGD, 4, 24)  # one item of the first variable, all of the second, two of the third
    kept.put(0, 0, floats(*[8.0] * 6))
    kept.put(1, 0, floats(*[0.0] * 6))
    new = np.frombuffer(kept.update(floats(*[2.0] * 6), NUMBERS), np.float32)
    assert new.tolist() == [5.0, 7.0, 7.0, 7.0, 5.0, 5.0]  # 8 - 8 * 0.5 * 0.5 - 2 * 0.5
    assert kept.get(1, 0, 24) == floats(*[-1.0] * 6)


def test_slots_begin_with_their_initial_values() -> None:
    kept = KeptSlice("slice", SGD, 0, 36)
    assert kept.get(1, 4, 8) == floats(0.25, 0.25)


def test_what_is_put_leaves_a_reply_on_its_way_alone() -> None:
    kept = KeptSlice("slice", SGD, 0, 36)
    kept.put(0, 0, floats(*[1.0] * 9))
    reply = kept.update(bytes(36), NUMBERS)
    sent = bytes(reply)
    kept.put(0, 0, floats(*[100.0] * 9))
    assert bytes(reply) == sent


def test_what_is_put_counts_from_the_next_update_on_so_that_slower_ranks_read_what_was_there() -> None:
    kept = KeptSlice("slice", SGD, 0, 36)
    kept.put(0, 0, floats(*[1.0] * 9))
    kept.update(bytes(36), NUMBERS)
    before = kept.get(1, 0, 36)
    kept.put(1, 0, floats(*[4.0] * 5))
    kept.put(1, 20, floats(*[8.0] * 4))
    assert kept.get(1, 0, 36) == before
    kept.update(bytes(36), NUMBERS)
    assert kept.get(1, 0, 36) == floats(*[2.0] * 5, *[4.0] * 4)  # times the momentum


@pytest.mark.parametrize(("number", "begin", "nbytes"), [(2, 0, 4), (0, 33, 4), (0, -4, 4), (1, 0, 40)])
def test_parts_that_it_does_not_have_are_refused(number: int, begin: int, nbytes: int) -> None:
    kept = KeptSlice("slice 1", SGD, 0, 36)
    with pytest.raises(ProtocolError, match="slice 1 has 2 arrays of 36 bytes, got array"):
        kept.get(number, begin, nbytes)
    with pytest.raises(ProtocolError, match="slice 1 has 2 arrays of 36 bytes, got array"):
        kept.put(number, begin, bytes(nbytes))
