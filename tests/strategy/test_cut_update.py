"""Updates in parts: bitwise as whole ones, and begun before the last slice has come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
from jobs import DEADLINE_S

import tfps
from tfps.exchange.interface import Reply
from tfps.pserver.server import ParameterServer
from tfps.runtime import transfers
from tfps.runtime.transfers import DeferredUpdate, UpdatedRows
from tfps.strategy import emitter
from tfps.strategy.cut_update import rows_at_once
from tfps.types import Array, Value
from tfps.wire.frames import Header
from tfps.worker.bucket import Push, PushedBucket

# 24 rows of 80 bytes: 4 rows are a multiple of 64 bytes, and slices of 512 bytes end within rows.
INPUTS, UNITS = 24, 20
CONFIG = tfps.Config(slice_bytes=512, window_bytes=1024, step_timeout_s=60)
Make = Callable[[], keras.optimizers.Optimizer]
ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AMSGrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Lion": lambda: keras.optimizers.Lion(0.01),
}
QUICK = ("momentum", "AMSGrad")
WHOLE: dict[str, Make] = {
    "Lamb": lambda: keras.optimizers.Lamb(0.01),  # norms
    "Muon": lambda: keras.optimizers.Muon(0.01, exclude_layers=["last"]),  # products of matrices
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),  # powers, whose last bit depends on the vector width
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small variables are updated in parts, too, and however fast slices come back."""
    monkeypatch.setattr(transfers, "PART_BYTES", 1)
    monkeypatch.setattr(transfers, "_WORTH", 0.0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows up to which parts have been updated."""
    rows: list[int] = []
    take = DeferredUpdate.take_part

    def noted(self: DeferredUpdate, updated: UpdatedRows, buffer: Array, nbytes: int) -> bool:
        before = updated.count
        took = take(self, updated, buffer, nbytes)
        assert took is (updated.count > before)
        if took:
            rows.append(updated.count)
        return took

    monkeypatch.setattr(DeferredUpdate, "take_part", noted)
    return rows


@pytest.fixture
def remote() -> Iterator[Callable[[], tfps.Strategy]]:
    servers = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(2)]
    made: list[tfps.Strategy] = []

    def strategy() -> tfps.Strategy:
        made.append(tfps.Strategy([server.address for server in servers], config=CONFIG))
        return made[-1]

    yield strategy
    for each in made:
        each.close()
    for server in servers:
        server.stop()


def trained(strategy: tfps.Strategy, make: Make, units: int = UNITS) -> list[Array]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(units, name="large"), keras.layers.Dense(2, name="last")]
        model = keras.Sequential([keras.layers.Input((INPUTS,)), *layers])
        model.compile(make(), "mse", jit_compile=False)
    data = np.random.default_rng(0).standard_normal((32, INPUTS), np.float32)
    model.fit(data, data[:, :2], batch_size=8, epochs=2, verbose=0, shuffle=False)
    values = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    strategy.close()
    return values


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ELEMENTWISE]
)
def test_parts_give_the_same_bits_as_the_whole(
    name: str, remote: Callable[[], tfps.Strategy], taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = trained(remote(), ELEMENTWISE[name])
    assert taken, "no part came before the last slice"
    assert all(0 < rows < INPUTS and rows % 4 == 0 for rows in taken)
    monkeypatch.setattr(emitter, "_CUT_SLICES", 10**9)
    taken.clear()
    whole = trained(remote(), ELEMENTWISE[name])
    assert not taken
    for one, other in zip(cut, whole, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Lamb" else pytest.mark.long) for name in WHOLE]
)
def test_a_rule_that_is_not_elementwise_stays_whole(
    name: str, remote: Callable[[], tfps.Strategy], taken: list[int]
) -> None:
    trained(remote(), WHOLE[name])
    assert not taken


def test_rows_are_updated_before_the_last_slice_has_come_back(
    remote: Callable[[], tfps.Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    updated, seen = threading.Event(), list[bool]()
    receive, take_part = PushedBucket.take, DeferredUpdate.take_part

    def held(self: PushedBucket, pserver: int, push: Push, header: Header, *rest: Value) -> Reply | None:
        if "large/kernel" in self.spec.name and header.index == len(self.cutting.slices) - 1:
            seen.append(updated.wait(DEADLINE_S))
        return receive(self, pserver, push, header, *rest)

    def noted(self: DeferredUpdate, *arguments: Value) -> bool:
        took = take_part(self, *arguments)
        if took:
            updated.set()
        return took

    monkeypatch.setattr(PushedBucket, "take", held)
    monkeypatch.setattr(DeferredUpdate, "take_part", noted)
    trained(remote(), ELEMENTWISE["Adam"])
    assert seen == [True] * 8


def test_where_slices_come_back_faster_than_they_are_used_the_update_stays_whole(
    remote: Callable[[], tfps.Strategy], taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_WORTH", 1e6)
    trained(remote(), ELEMENTWISE["momentum"])
    assert not taken


def test_small_variables_are_updated_as_a_whole(
    remote: Callable[[], tfps.Strategy], taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PART_BYTES", 8 * 2**20)
    trained(remote(), ELEMENTWISE["momentum"])
    assert not taken


def test_a_large_vector_is_updated_as_a_whole(
    remote: Callable[[], tfps.Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = trained(remote(), ELEMENTWISE["momentum"], units=300)  # a bias of 1200 bytes: three slices
    monkeypatch.setattr(emitter, "_CUT_SLICES", 10**9)
    for one, other in zip(cut, trained(remote(), ELEMENTWISE["momentum"], units=300), strict=True):
        assert one.tobytes() == other.tobytes()


def test_variables_that_are_not_worth_it_are_not_cut() -> None:
    assert rows_at_once([1000], 4) == 0
    assert rows_at_once([2**21, 64], 4) == 0
    assert rows_at_once([1000, 16], 4) == 1
    assert rows_at_once([1000, 20], 4) == 4
    assert rows_at_once([1000, 3, 3, 7], 2) == 32
    assert rows_at_once([1000, 1], 8) == 8
