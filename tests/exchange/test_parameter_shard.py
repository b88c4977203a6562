"""What a slice keeps: parameters that have to be put, slots that begin by themselves, and their update."""

from __future__ import annotations

import numpy as np
import pytest

from tfps.errors import ProtocolError
from tfps.exchange.codecs import known
from tfps.exchange.parameter_shard import Delta, ParameterShard
from tfps.exchange.rules import flushed
from tfps.exchange.update_spec import StepScalars, UpdateSpec

SGD = UpdateSpec(
    "sgd",
    (("momentum", 0.5), ("nesterov", 0.0), ("weight_decay", 0.5)),
    (("momentum", 0.25),),
    (2, 3, 4),
    (True, False, True),
)
NUMBERS = StepScalars(0, (0.0, 0.5))


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def updated(kept: ParameterShard, gradient: bytes) -> memoryview:
    kept.take_put()
    return kept.update(gradient, NUMBERS)


def test_the_first_update_needs_all_parameters() -> None:
    kept = ParameterShard("slice 3", SGD, 0, 36)
    kept.put(0, 0, bytes(20))
    with pytest.raises(ProtocolError, match=r"the parameters of slice 3 must be put .* 16 bytes are missing"):
        updated(kept, bytes(36))
    kept.put(0, 20, bytes(16))
    assert len(updated(kept, bytes(36))) == 36


def test_what_is_put_again_and_again_takes_the_memory_of_once() -> None:
    kept = ParameterShard("slice 3", SGD, 0, 36, viewed=True)
    for number in range(100):
        for array in (0, 1, 2, 0):
            kept.put(array, 0, floats(*[number + array] * 4))
            kept.put(array, 16, floats(*[number + array] * 5))
    assert len(kept._put) == 6
    kept.take_put()
    assert [kept.get(array, 0, 36) for array in range(3)] == [floats(*[value] * 9) for value in (99, 100, 99)]


def test_parts_that_overlap_and_wait_for_a_step_are_bounded() -> None:
    kept = ParameterShard("slice 3", SGD, 0, 36)
    with pytest.raises(ProtocolError, match=r"what is put into slice 3 .* at most 65536 parts and 144 bytes"):
        for begin in range(17):
            kept.put(0, begin, bytes(20))


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
    kept = ParameterShard("slice 3", SGD, 0, 36)
    for begin, nbytes in parts:
        kept.put(0, begin, bytes(nbytes))
    with pytest.raises(ProtocolError, match=f"must be put .* {missing} bytes are missing"):
        updated(kept, bytes(36))
    kept.put(0, 0, bytes(36))
    assert len(updated(kept, bytes(36))) == 36


def test_a_part_of_a_bucket_decays_where_its_variables_do() -> None:
    kept = ParameterShard("slice", SGD, 4, 24)  # one item of the first variable, all of the second, two of the third
    kept.put(0, 0, floats(*[8.0] * 6))
    kept.put(1, 0, floats(*[0.0] * 6))
    new = np.frombuffer(updated(kept, floats(*[2.0] * 6)), np.float32)
    assert new.tolist() == [5.0, 7.0, 7.0, 7.0, 5.0, 5.0]  # 8 - 8 * 0.5 * 0.5 - 2 * 0.5
    assert kept.get(1, 0, 24) == floats(*[-1.0] * 6)


def test_slots_begin_with_their_initial_values() -> None:
    kept = ParameterShard("slice", SGD, 0, 36)
    assert kept.get(1, 4, 8) == floats(0.25, 0.25)


def test_what_is_put_leaves_a_reply_on_its_way_alone() -> None:
    kept = ParameterShard("slice", SGD, 0, 36)
    kept.put(0, 0, floats(*[1.0] * 9))
    reply = updated(kept, bytes(36))
    sent = bytes(reply)
    kept.put(0, 0, floats(*[100.0] * 9))
    assert bytes(reply) == sent


@pytest.mark.parametrize(("number", "begin", "nbytes"), [(2, 0, 4), (0, 33, 4), (0, -4, 4), (1, 0, 40)])
def test_parts_that_it_does_not_have_are_refused(number: int, begin: int, nbytes: int) -> None:
    kept = ParameterShard("slice 1", SGD, 0, 36)
    with pytest.raises(ProtocolError, match="slice 1 has 2 arrays of 36 bytes, got array"):
        kept.get(number, begin, nbytes)
    with pytest.raises(ProtocolError, match="slice 1 has 2 arrays of 36 bytes, got array"):
        kept.put(number, begin, bytes(nbytes))


# Changes since the workers' view

NAMES = ["bfloat16", "float16", "int8", "topk:0.05", "onebit"]
ITEMS = 2500  # does not divide: blocks of 256 and of 1024


def random(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=ITEMS).astype(np.float32)


class Worker:
    """Adds changes as TensorFlow does: all items, denormals flushed."""

    def __init__(self, codec: str, start: np.ndarray) -> None:
        self.codec, self.variable = known(codec), start.copy()

    def take(self, data: np.ndarray) -> None:
        change = np.empty_like(self.variable)
        self.codec.decode(data, change)
        with flushed(), np.errstate(all="ignore"):
            self.variable = self.variable + change


@pytest.mark.parametrize("codec", NAMES)
def test_the_view_is_bitwise_what_workers_have(codec: str) -> None:
    parameters, worker = random(0), Worker(codec, random(0))
    parameters[:10] = worker.variable[:10] = -0.0
    parameters[10:20] = worker.variable[10:20] = 1e-40  # denormal: TensorFlow's threads make 0 of it
    view = parameters.copy()
    change = Delta(known(codec), view)
    for step in range(1, 9):
        parameters[20:] += random(step)[20:] * np.float32(0.01)
        data = change.encode(parameters)
        assert data.size == change.wire_bytes(ITEMS)
        worker.take(data)
        assert view.tobytes() == worker.variable.tobytes()


@pytest.mark.parametrize("codec", NAMES)
def test_what_a_change_could_not_express_is_in_those_after_it(codec: str) -> None:
    parameters, view = random(0) + random(1) * np.float32(0.01), random(0)
    change = Delta(known(codec), view)
    change.encode(parameters)
    first = np.abs(view - parameters).mean()
    for _ in range(60):
        change.encode(parameters)
    assert np.abs(view - parameters).mean() <= max(0.1 * first, 1e-7)


def test_changes_too_small_for_float16_add_up() -> None:
    parameters, view = np.zeros(8, np.float32), np.zeros(8, np.float32)
    change = Delta(known("float16"), view)
    for _ in range(1000):
        parameters += np.float32(1e-9)  # float16 has nothing between 0 and 6e-8
        change.encode(parameters)
    np.testing.assert_allclose(view, parameters, atol=3e-8)
    assert view[0] > 9e-7


@pytest.mark.parametrize("codec", NAMES)
def test_what_is_not_finite_reaches_the_view(codec: str) -> None:
    parameters, worker = random(0), Worker(codec, random(0))
    view = parameters.copy()
    parameters[7] = np.inf
    worker.take(Delta(known(codec), view).encode(parameters))
    assert not np.isfinite(view[7])
    np.testing.assert_array_equal(view, worker.variable)
