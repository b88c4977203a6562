"""Rows of tables beside a model's file, and in folders of their own.

A `.keras` or `.weights.h5` file says of each table which folder has its rows: `FILE.tables/ID/NAME-...`. The pservers
write that folder first, then Keras writes the file, then folders that the file does not name any more go. So whatever
is interrupted, the file that is there names a folder that is complete.

Tested in tests/layers/test_saving.py and tests/integration/test_tables.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tfps.embeddings.variable import TableVariable, all_tables, tables_of
from tfps.errors import ConfigError, UnsupportedError
from tfps.graph.patches import BaseStrategy
from tfps.keras_hooks.checkpoint import (
    StrPath,
    before_exporting,
    before_restoring,
    loaded_beside,
    restores_alone,
    saved_beside,
)
from tfps.tables.files import new_file, saved_update
from tfps.types import Argument, Json, Model, Optimizer

_RUN = uuid.uuid4().hex[:16]  # of this process, where no job has one
_INDEX = "tables.json"
_REFERENCE, _SEED = "rows", "seed"  # in what Keras stores of a layer
_NO_ROWS = "no rows, seed "  # in place of a reference of a table that had none
_references: contextvars.ContextVar[dict[int, str] | None] = contextvars.ContextVar("references", default=None)


# Files of Keras


def save_reference(table: TableVariable, store: Argument) -> None:
    """Notes in what Keras stores of a layer where its rows are.

    Raises:
        UnsupportedError: what saves the model cannot have rows beside it.
    """
    if (references := _references.get()) is None:
        raise UnsupportedError(
            f"the rows of table {table.path!r} are saved beside a file only: use model.save('name.keras') or "
            "model.save_weights('name.weights.h5'), not pickle, copies or an open file, or strategy.save_tables(path)"
        )
    store[_REFERENCE] = np.frombuffer(references[id(table)].encode(), np.uint8)
    store[_SEED] = np.frombuffer(str(table.seed).encode(), np.uint8)


def load_reference(table: TableVariable, store: Argument) -> None:
    """Takes what `save_reference` has noted: the rows follow, before any of them is read."""
    try:
        reference, seed = (bytes(np.asarray(store[name], np.uint8)).decode() for name in (_REFERENCE, _SEED))
    except KeyError as error:
        raise ConfigError(
            f"the file does not say where the rows of table {table.path!r} are: it has the weights of another layer, "
            "such as keras.layers.Embedding; load them into that one, and give its rows to load_rows(ids, rows)"
        ) from error
    if table.table.spec is None:
        table.seed = int(seed)
    table.table.awaits = reference or ("" if table.table.spec is None else f"{_NO_ROWS}{seed}")


@contextlib.contextmanager
def _saved(model: Model, filepath: StrPath) -> Iterator[None]:
    """Writes the rows of a model's tables before, and removes those of earlier files after the block."""
    tables = tables_of(model)
    if not tables:
        yield
        return
    path = _local(filepath)
    if path.suffix in (".h5", ".hdf5") and not path.name.endswith(".weights.h5"):
        raise UnsupportedError(
            f"Keras' old format cannot say where the rows of tables are, got {str(path)!r}; use a path that ends "
            "in '.keras', or model.save_weights with '.weights.h5'"
        )
    names, identity = _names(tables), _identity(tables)
    folder = path.with_name(f"{path.name}.tables") / identity
    references = {
        id(table): f"{identity}/{names[id(table)]}" if table.table.spec is not None else "" for table in tables
    }
    first = all(each.strategy is None or each.strategy.rank == 0 for each in tables)
    for table in tables if first else ():
        if table.table.spec is not None:
            table.table.save(str(folder.absolute()), names[id(table)])
    token = _references.set(references)
    try:
        yield
    finally:
        _references.reset(token)
    for other in folder.parent.iterdir() if first and folder.parent.is_dir() else ():
        if other.name != identity:
            shutil.rmtree(other, ignore_errors=True)


def _loaded(model: Model, filepath: StrPath) -> None:
    for table in tables_of(model):
        if reference := table.table.awaits:
            if reference.startswith(_NO_ROWS):
                seed = reference.removeprefix(_NO_ROWS)
                table.table.load([], "", reference, alone=restores_alone.get(), seed=seed)
                continue
            path = _local(filepath)
            identity, _, name = reference.partition("/")
            folder = path.with_name(f"{path.name}.tables") / identity
            if not folder.is_dir() and table.table.runtime.alone:  # pservers may know where else it is
                raise ConfigError(
                    f"{path} has a model whose rows of table {table.path!r} are in {folder}, which is missing: move "
                    f"the folder {folder.parent.name} together with the file"
                )
            _restore(table, [folder], name, reference, getattr(model, "optimizer", None))


def _exported(model: Model, what: str) -> None:
    if tables := tables_of(model):
        raise tables[0].not_in(what)


def _declared(model: Model) -> None:
    """Declares tables on all ranks, of which one may restore them alone."""
    for table in tables_of(model):
        if table.undecided:
            table.declare(model.optimizer)


def _restore(
    table: TableVariable, folders: Sequence[Path], name: str, identity: str, optimizer: Optimizer | None
) -> None:
    if table.undecided:  # else its slots are those that the optimizer has
        if table.optimizer is not None or optimizer is not None:
            table.declare(optimizer)
        else:
            table.declare_for_now(saved_update(folders[-1], name))
    table.table.load([str(each.absolute()) for each in folders], name, identity, alone=restores_alone.get())


saved_beside.append(_saved)
loaded_beside.append(_loaded)
before_restoring.append(_declared)
before_exporting.append(_exported)


# Folders of their own


def save_tables(path: StrPath, strategy: BaseStrategy | None, *, incremental: bool = False) -> None:
    """See `Strategy.save_tables`; None: the tables of this process that belong to no strategy of tfps."""
    tables = [each for each in all_tables(strategy) if each.table.spec is not None]
    folder, names = _local(path), _names(tables)
    if strategy is not None and strategy.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    index = _index(folder)
    before: list[Json] = index["saves"] if incremental else []
    number = 1 + max((int(save["folder"]) for save in index["saves"]), default=0)
    own, steps = folder / f"{number:06}", dict[str, int]()
    for table in tables:
        name = names[id(table)]
        since = max((save["steps"][name] for save in before if name in save["steps"]), default=None)
        steps[name] = table.table.save(str(own.absolute()), name, since).step
    saves = [*before, {"folder": own.name, "id": uuid.uuid4().hex, "steps": steps}]
    with new_file(folder / _INDEX) as file:
        file.write(json.dumps({"format": 1, "saves": saves}).encode())
    kept = {save["folder"] for save in saves}
    for other in folder.iterdir():
        if other.is_dir() and other.name.isdigit() and other.name not in kept:
            shutil.rmtree(other, ignore_errors=True)


def restore_tables(path: StrPath, strategy: BaseStrategy | None) -> None:
    """See `Strategy.restore_tables`."""
    folder = _local(path)
    index = _index(folder)
    if not index["saves"]:
        raise ConfigError(
            f"{folder / _INDEX} is missing: {folder} has no tables that strategy.save_tables has finished"
        )
    tables = all_tables(strategy)
    for name, table in zip(_names(tables).values(), tables, strict=True):
        saves = [save for save in index["saves"] if name in save["steps"]]
        if not saves:
            known = ", ".join(sorted({name for save in index["saves"] for name in save["steps"]}))
            raise ConfigError(f"{folder} must have the rows of table {table.path!r} ({name}), has those of {known}")
        _restore(table, [folder / save["folder"] for save in saves], name, f"{saves[-1]['id']}/{name}", None)


def _index(folder: Path) -> Json:
    path = folder / _INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != 1:
            raise ConfigError(f"{path} must have format 1, as this version of tfps reads it, got {found['format']}")
    except FileNotFoundError:
        return {"format": 1, "saves": []}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}; take another save") from error
    return found


def _names(tables: Sequence[TableVariable]) -> dict[int, str]:
    """Names for files, by id of the variable: those of the layers, and numbers where these are the same."""
    found, used = dict[int, str](), set[str]()
    for table in tables:
        base = re.sub(r"[^A-Za-z0-9_.]", "_", table.table.alike.removesuffix("/rows"))[:150].lstrip(".") or "table"
        name, number = base, 1
        while name in used:
            number += 1
            name = f"{base}_{number}"
        found[id(table)] = name
        used.add(name)
    return found


def _identity(tables: Sequence[TableVariable]) -> str:
    """Names the state of the rows, alike on all ranks."""
    strategy = next((each.strategy for each in tables if each.strategy is not None), None)
    run = (strategy.extended.exchange.info.run if strategy is not None else "") or _RUN
    state = None if strategy is None else strategy.extended.policy.state
    if state is None:
        state = sum(each.table.step for each in tables)
    changes, numbers = sum(each.table.changes for each in tables), sum(each.table.number for each in tables)
    return f"{run}-{state}-{changes}-{numbers}"


def _local(filepath: StrPath) -> Path:
    if not isinstance(filepath, str | os.PathLike) or "://" in str(filepath):
        raise UnsupportedError(
            f"tables are saved to, and loaded from, a folder that all pservers can reach as a path, got {filepath!r}; "
            "mount it, or save to a local path and copy the file and its folder '.tables'"
        )
    return Path(filepath)
