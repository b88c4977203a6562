"""Requests about tables: embeddings whose rows, each with the slots of its update, live with their owners only.

A request is made once, where a graph or a program asks, and handed on as it is to whoever sends it. All ids are int64
[n]; those of one request differ.

Tested in tests/worker/test_tables.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tfps.exchange.codecs import Floats

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Request:
    """About rows of `table`, a bucket, as all steps before `step` have left them: a rank counts its updates."""

    table: int
    step: int


R = TypeVar("R", bound=Request)


def later(request: R, steps: int) -> R:
    """The same request to owners that count so many steps more."""
    return dataclasses.replace(request, step=request.step + steps) if steps else request


@dataclass(frozen=True, eq=False, slots=True)
class Lookup(Request):
    """Asks for rows. What has no row yet reads as its initial value, and gets none by that."""

    ids: Ids
    trains: bool = False  # whether gradients of these rows may come in this step
    # The last time in this step: only rows that were asked for get gradients. In mode "sync" others need not wait.
    complete: bool = False
    attempt: int = 0  # how often all ranks have taken the step before without an update, as it was not finite


@dataclass(frozen=True, eq=False, slots=True)
class RowUpdate(Request):
    """Gradients [n, dim] of a step, maybe of no rows, with the packed scalars of the step (`StepScalars.pack`).

    In mode "sync" all ranks have one in each step, and their sum is applied by row; else each by itself.
    """

    ids: Ids
    gradients: Floats
    scalars: bytes


@dataclass(frozen=True, eq=False, slots=True)
class Save(Request):
    """Writes all rows, or what has changed `since` the step of a save before, to files `name` in a new `folder`."""

    folder: str  # empty: owners keep the rows in memory
    name: str  # empty, without a folder: they keep nothing
    since: int | None = None
    before: str = ""  # the folder of the save before, for whoever reads this one; empty: the reader gives it
    remove: Sequence[str] = ()  # names of saves beside it, or of what this rank has had kept, that it needs no more


@dataclass(frozen=True, eq=False, slots=True)
class Load(Request):
    """Replaces all rows by those of a full save and those after it, once, when all ranks ask for it."""

    folders: Sequence[str]  # none: what is kept under `name`
    name: str  # of the files
    identity: str  # names what is loaded; each rank says the same
    alone: bool = False  # other ranks need not ask: they read nothing meanwhile
    # Without folders: all read as its initial values. With a name slots stay, without one no id has a row.
    seed: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Assign(Request):
    """Replaces some rows [n, dim], once, when all ranks ask for it with the same `identity`."""

    ids: Ids
    rows: Floats
    identity: str


class SavedRows(NamedTuple):
    """What files have, on all owners together."""

    step: int  # of the rows, as the owners count
    rows: int
    nbytes: int
    full: bool = True  # not only what has changed; without a folder, whether the rows are kept
    slots: bool = True  # of the same rule; else they are not used
