"""Rows of a table as one file that other programs read, or as a Keras layer.

Tested in tests/layers/test_saving.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import keras
import numpy as np

from tfps.embeddings.variable import TableVariable
from tfps.errors import ConfigError
from tfps.tables.files import rows_of_save
from tfps.types import Array, Layer

_PIECE = 2**16  # rows that are in memory at a time
_NAME = "rows"


def export_rows(table: TableVariable, path: Path) -> None:
    """Writes all rows to `path`, which ends in `.npz` or `.safetensors`: `rows`, float32 [n, dim], and of a table for
    any id `ids`, int64 [n], ascending. Only a piece of them is in memory at a time.

    Raises:
        ConfigError: the path ends otherwise, or nothing has been trained or loaded.
    """
    if path.suffix not in (".npz", ".safetensors"):
        raise ConfigError(f"rows are exported to a path that ends in '.npz' or '.safetensors', got {str(path)!r}")
    if table.table.spec is None:
        raise ConfigError(f"table {table.path!r} has no rows to export: it has not been trained or loaded")
    parts = path.with_name(f"{path.name}.parts")
    plain = {name: path.with_name(f"{path.name}.{name}.partial") for name in ("ids", "rows")}
    partial = path.with_name(f"{path.name}.partial")
    try:
        table.table.save(str(parts.absolute()), _NAME)
        ids, rows = _of_any(table, parts, plain) if table.rows is None else _fixed(table, parts, plain["rows"])
        arrays = {"rows": rows} if ids is None else {"ids": ids, "rows": rows}
        (_write_npz if path.suffix == ".npz" else _write_safetensors)(partial, arrays)
        partial.replace(path)
    finally:
        shutil.rmtree(parts, ignore_errors=True)
        for each in (*plain.values(), partial):
            each.unlink(missing_ok=True)


def to_embedding(table: TableVariable, name: str, *, mask_zero: bool) -> Layer:
    """A `keras.layers.Embedding` with all rows of a table that has a fixed number of them.

    Raises:
        ConfigError: any id may have a row.
    """
    if table.rows is None:
        raise ConfigError(f"table {table.path!r} has rows for any id: export them to a file, with their ids")
    rows = np.empty((table.rows, table.dim), np.float32)
    for begin in range(0, table.rows, _PIECE):
        ids = np.arange(begin, min(begin + _PIECE, table.rows))
        rows[begin : begin + _PIECE] = table.table.read_rows(ids)
    return keras.layers.Embedding(table.rows, table.dim, mask_zero=mask_zero, weights=rows, name=name)


def _fixed(table: TableVariable, parts: Path, file: Path) -> tuple[None, Array]:
    rows = np.memmap(file, np.float32, "w+", shape=(int(table.rows or 0), table.dim))
    for begin in range(0, len(rows), _PIECE):
        ids = np.arange(begin, min(begin + _PIECE, len(rows)))
        rows[begin : begin + _PIECE] = table.table.initial_values(ids)
    for ids, some in rows_of_save(parts, _NAME):
        rows[ids] = some
    return None, rows


def _of_any(table: TableVariable, parts: Path, files: dict[str, Path]) -> tuple[Array, Array]:
    """Ids and rows, which are sorted on disk."""
    found = [ids for ids, _ in rows_of_save(parts, _NAME)]
    count = sum(map(len, found))
    ids = np.memmap(files["ids"], np.int64, "w+", shape=(max(count, 1),))[:count]
    np.concatenate([*found, np.empty(0, np.int64)], out=ids)
    ids.sort()
    rows = np.memmap(files["rows"], np.float32, "w+", shape=(max(count, 1), table.dim))[:count]
    for own, some in rows_of_save(parts, _NAME):
        rows[np.searchsorted(ids, own)] = some
    return ids, rows


def _write_npz(path: Path, arrays: dict[str, Array]) -> None:
    with path.open("wb") as file:  # by its name NumPy would append .npz
        np.savez(file, **arrays)  # type: ignore[arg-type]  # it takes any name, and writes piece by piece


def _write_safetensors(path: Path, arrays: dict[str, Array]) -> None:
    """In the format of https://huggingface.co/docs/safetensors, piece by piece, which its library does not."""
    dtypes, about, begin = {"int64": "I64", "float32": "F32"}, {}, 0
    for name, array in arrays.items():
        about[name] = {
            "dtype": dtypes[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [begin, begin + array.nbytes],
        }
        begin += array.nbytes
    header = json.dumps(about).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for array in arrays.values():
            for begin in range(0, len(array), _PIECE):
                file.write(array[begin : begin + _PIECE].tobytes())
