"""Shrinks a case that fails: puts back one choice after the other to the simplest, the largest first.

Hypothesis shrinks by hundreds of attempts. Here each trains models in several processes, and what a case consists of is
known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

from tfps.types import Function
from tools.fuzzing.cases import Action, Case, Fit, Network, Optimizer, Place

_SIMPLE = {"metrics": (), "weighted_metrics": (), "loss": "default loss", "step": "Keras' train_step"}


def simplified(case: Case, fails: Callable[[Case], bool], is_over: Callable[[], bool]) -> Case:
    """The simplest case found that `fails`, until the time `is_over`."""
    tried = {case}
    while True:
        for candidate in _simpler(case):
            if is_over():
                return case
            if candidate in tried:
                continue
            tried.add(candidate)
            if fails(candidate):
                case = candidate
                break
        else:
            return case


def _simpler(case: Case) -> Iterator[Case]:
    """Simpler cases, some of which are no valid programs; the largest steps first."""
    change: Callable[..., Case] = lambda **fields: dataclasses.replace(case, **fields)  # noqa: E731
    if len(case.actions) > 1:
        yield from (change(actions=(action,)) for action in case.actions)
        yield from (change(actions=case.actions[:n] + case.actions[n + 1 :]) for n in range(len(case.actions)))
    yield change(network=Network(), **_SIMPLE)
    yield change(optimizer=Optimizer())
    yield change(**_SIMPLE, reduction="sum_over_batch_size")
    place = case.place
    for workers, pservers in ((1, 0), (2, 1)):
        if (workers, pservers) < (place.workers, place.pservers):
            yield change(place=Place(workers=workers, devices=place.devices, pservers=pservers))
    yield change(place=Place(workers=place.workers, devices=1, pservers=place.pservers))
    yield from (change(place=each) for each in _with_defaults(place) if each.pservers or each.workers == 1)
    yield from (change(actions=_replaced(case.actions, n, each)) for n, each in _simpler_actions(case))
    others = "reduction", "steps_per_execution", "eager", "jit_compile", "reordered", "start", "op_determinism"
    for name in (*_SIMPLE, *others):
        yield from _with_default(case, name)
    yield from (change(optimizer=each) for each in _with_defaults(case.optimizer))
    yield from (change(network=each) for each in _with_defaults(case.network))
    yield from _sizes(case)
    yield from _with_default(case, "seed")


def _sizes(case: Case) -> Iterator[Case]:
    n = case.replicas
    for batch, rows in ((n, n), (n, 2 * n), (n, 3 * n), (n, 4 * n), (2 * n, 4 * n), (case.batch, case.batch)):
        if (batch, rows) < (case.batch, case.rows):
            yield dataclasses.replace(case, batch=batch, rows=rows, validation_rows=rows)
    if case.validation_rows != case.batch:
        yield dataclasses.replace(case, validation_rows=case.batch)


def _simpler_actions(case: Case) -> Iterator[tuple[int, Action]]:
    for number, action in enumerate(case.actions):
        if isinstance(action, Fit) and action != Fit():
            yield number, Fit(epochs=action.epochs)
        yield from ((number, each) for each in _with_defaults(action))


def _replaced(values: tuple[Action, ...], number: int, value: Action) -> tuple[Action, ...]:
    return (*values[:number], value, *values[number + 1 :])


_T = TypeVar("_T", Case, Action, Place, Optimizer, Network)


def _with_defaults(value: _T) -> Iterator[_T]:
    """`value` with one of its fields as simple as it can be."""
    for field in dataclasses.fields(value):
        yield from _with_default(value, field.name)


def _with_default(value: _T, name: str) -> Iterator[_T]:
    default = next(field.default for field in dataclasses.fields(value) if field.name == name)
    chosen = getattr(value, name)
    if chosen == default:
        return
    replace: Function = dataclasses.replace
    yield replace(value, **{name: default})
    if isinstance(chosen, tuple) and len(chosen) > 1:
        for number in range(len(chosen)):
            yield replace(value, **{name: chosen[:number] + chosen[number + 1 :]})
