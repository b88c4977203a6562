"""Saves tables to files and restores them onto any number of pservers, bit for bit. The only I/O of this folder.

A **save** is a folder. Each pserver writes its **shard** of each table: parts, and a manifest that is written last.
Parts are uncompressed `.npz` files (numpy.load reads them), whose zip has a CRC of every array:

    NAME-PLACE-of-COUNT.json        the manifest
    NAME-PLACE-of-COUNT.0.npz ...   `ids`, `steps`, `rows` and `slot.<name>` of at most 65,536 rows
    NAME-PLACE-of-COUNT.gone.0.npz  `ids` whose rows have gone since the save before (incremental only)

A **full** shard has all rows; an **incremental** one what has changed since the step of a save before. To restore needs
the last full save and all incremental ones after it, which are given or named by each other. What `admit_after` has
counted is not saved: ids that have no row are counted anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tfps.errors import ConfigError
from tfps.exchange.requests import Load, Save, SavedRows
from tfps.exchange.update_spec import UpdateSpec
from tfps.tables.kept import Piece
from tfps.tables.spec import TableSpec
from tfps.tables.table import Chunk, Table
from tfps.types import Array, Json

FORMAT = 1
_MOST_ROWS, _MOST_BYTES = 2**16, 2**25  # of a part
_MOST_SAVES = 10_000  # that follow each other
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.json")


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard as its manifest has it."""

    path: Path
    place: int
    count: int
    step: int  # the latest when it was written
    since: int | None  # None: full
    before: str  # the folder of the save before, seen from that of this one; empty: it is not known here
    spec: TableSpec
    parts: tuple[tuple[int, int], ...]  # rows and bytes of each
    gone: tuple[tuple[int, int], ...]

    def part(self, number: int, kind: str = "") -> Path:
        return self.path.with_suffix(f"{kind}.{number}.npz")

    def files(self) -> Iterator[tuple[Path, int]]:
        """Each file and its bytes."""
        for kind, parts in (("", self.parts), (".gone", self.gone)):
            yield from ((self.part(number, kind), nbytes) for number, (_, nbytes) in enumerate(parts))


def write_shard(
    table: Table,
    directory: str | Path,
    name: str,
    *,
    since: int | None,
    before: str = "",
    lock: AbstractContextManager[object] | None = None,
) -> dict[str, Json]:
    """Writes this pserver's shard of a table, in place of one that is there; others write theirs meanwhile.

    The manifest comes last, so a shard that was not finished is missing, not wrong. Everything is on the disk then.

    Args:
        directory: of this save; made if need be.
        name: of the table: letters, digits, `_`, `-` and `.`.
        since: the `"step"` of the save before, for an incremental one; None: full. If it is no more known which rows
            have gone since, the shard is full, and `"full_because"` says so.
        before: the folder of that save, absolute or seen from `directory`, so that it is found when this one is read;
            empty: who reads must give it.
        lock: what guards the table, held while rows are copied, not while they are written; None: the caller holds it.
            All rows are as of one step if no update comes meanwhile (`Table.chunks`).

    Returns:
        What the manifest has: among others `"step"`, `"since"`, `"rows"`, `"gone_rows"` and `"nbytes"`.

    Raises:
        ConfigError: `name` cannot be used in file names.
        OSError: a file cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name of a table that is saved must be letters, digits, '_', '-' and '.', at most 200 and not beginning "
            f"with '-' or '.', got {name!r}"
        )
    held = contextlib.nullcontext() if lock is None else lock
    folder, spec = Path(directory), table.spec
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{table.place}-of-{table.count}.json"
    path.unlink(missing_ok=True)  # what is written now must not be read with it
    # What other numbers of pservers have written there is of an attempt before, which has failed.
    own = re.escape(path.stem) + r"(\.gone)?\.\d+\.npz(\.partial)?"
    others = re.escape(name) + rf"-\d+-of-(?!{table.count}\b)\d+(\.json|(\.gone)?\.\d+\.npz)(\.partial)?"
    stale = re.compile(f"{own}|{others}")
    for old in [each for each in folder.iterdir() if stale.fullmatch(each.name)]:
        old.unlink(missing_ok=True)  # another pserver removes them, too
    because = None
    with held:
        step, gone = table.step, None if since is None else table.gone(since)
    if gone is None and since is not None:
        because = f"what has changed since step {since} is no more known: too many rows have gone, or all were replaced"
        since = None
    gone = np.empty(0, np.int64) if gone is None else gone
    sizes: dict[str, list[tuple[int, int]]] = {"": [], ".gone": []}

    def write(kind: str, arrays: dict[str, Array]) -> None:
        part = path.with_suffix(f"{kind}.{len(sizes[kind])}.npz")
        with new_file(part) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # it takes any name
        sizes[kind].append((arrays["ids"].size, part.stat().st_size))

    most = max(min(_MOST_ROWS, _MOST_BYTES // spec.row_bytes), 1)
    chunks = table.chunks(since, most)
    names = ["rows", *(f"slot.{slot}" for slot, _ in spec.update.slots)]
    while True:
        with held:
            chunk = next(chunks, None)
        if chunk is None:
            break
        write("", {"ids": chunk.ids, "steps": chunk.steps, **dict(zip(names, chunk.arrays, strict=True))})
    each = _MOST_BYTES // 8
    for begin in range(0, gone.size, each):
        write(".gone", {"ids": gone[begin : begin + each]})
    manifest: dict[str, Json] = {
        "format": FORMAT,
        "place": table.place,
        "count": table.count,
        "step": step,
        "since": since,
        "before": before,
        "full_because": because,
        "rows": sum(rows for rows, _ in sizes[""]),
        "gone_rows": sum(rows for rows, _ in sizes[".gone"]),
        "nbytes": sum(nbytes for parts in sizes.values() for _, nbytes in parts),
        "parts": sizes[""],
        "gone": sizes[".gone"],
        "spec": json.loads(spec.text()),
    }
    with new_file(path) as file:
        file.write(json.dumps({"crc32": _crc(manifest), **manifest}, indent=1).encode())
    _sync_folder(folder)
    return manifest


def read_table(table: Table, directories: str | Path | Sequence[str | Path], name: str) -> dict[str, int]:
    """Fills a table with this pserver's rows of a save, whatever number of pservers has written it.

    All else that was in the table goes. Manifests, files and their sizes are looked at before anything changes; if a
    file turns out to be damaged later, the table is left empty.

    Args:
        directories: the folder of a full save, and of each incremental one after it, in order; the first ones may be
            left out where those after them name them.

    Returns:
        `"step"`, the latest of the last save, `"rows"`, how many are in the table now, `"nbytes"` that were read, and
        `"slots"`: whether these were of the table's rule; else they begin anew.

    Raises:
        ConfigError: the save is of a table with another dim or number of rows; a shard or a file is missing or damaged;
            or the folders are no full save and the incremental ones after it. The message names the file.
    """
    folders = [Path(each) for each in ([directories] if isinstance(directories, (str, Path)) else directories)]
    if not folders:
        raise ConfigError(f"at least one folder of a save of {name} must be given, got none")
    saves = [_shards(folder, name) for folder in folders]
    while before := next((shard.before for shard in saves[0] if shard.since is not None), ""):
        folders = [folders[0] / before, *folders]
        if len(folders) > _MOST_SAVES:
            raise ConfigError(f"{folders[-1]} names more than {_MOST_SAVES} saves before it: they must not be a circle")
        saves = [_shards(folders[0], name), *saves]
    _check_saves(table, saves)
    begin = max(
        (number for number, shards in enumerate(saves) if all(shard.since is None for shard in shards)), default=None
    )
    if begin is None:
        first = next(shard for shard in saves[0] if shard.since is not None)
        raise ConfigError(
            f"{first.path} has what has changed since step {first.since} only: the folders of a full save and of the "
            f"incremental ones after it must be given, in order, got {', '.join(map(str, folders))}"
        )
    saves = saves[begin:]
    slots = all(_rule(shard.spec) == _rule(table.spec) for shards in saves for shard in shards)
    table.clear()
    latest = saves[-1][0].spec  # ids without a row go on reading as they did
    table.begin_as(latest.seed, latest.initial)
    nbytes = 0
    try:
        for number, shards in enumerate(saves):
            for shard in shards:
                if table.spec.overlap(table.place, table.count, shard.place, shard.count):
                    nbytes += _read_shard(table, shard, slots=slots, first=number == 0)
    except BaseException:
        table.clear()
        raise
    step = max(shard.step for shard in saves[-1])
    table.restored(step)
    return {"step": step, "rows": table.stats().rows, "nbytes": nbytes, "slots": int(slots)}


def save(table: Table, request: Save, lock: AbstractContextManager[object], rank: int = 0) -> SavedRows:
    """Writes this owner's shard, and removes what nobody needs any more; see `write_shard`. Without a folder rows are
    kept in memory; see `Table.keep`.
    """
    if not request.folder:
        with lock:
            table.moments.forget(request.remove, rank)
            if request.name:
                table.moments.keep(request.name, rank, table.spec, table.step)
            return SavedRows(table.step, table.stats().rows, 0)
    folder, since, before = request.folder, request.since, request.before
    found = write_shard(table, folder, request.name, since=since, before=before, lock=lock)
    if table.place == 0:
        remove_saves(folder, request.remove)
    return SavedRows(found["step"], found["rows"], found["nbytes"], found["since"] is None)


def load(table: Table, request: Load) -> SavedRows:
    """As `read_table`. Without folders all read as what is kept under a name, or as initial values of a seed, a decimal
    number: with a name slots stay, without one no id has a row.
    """
    if request.folders:
        found = read_table(table, request.folders, request.name)
        return SavedRows(found["step"], found["rows"], found["nbytes"], slots=bool(found["slots"]))
    kept = table.moments.get(request.name)
    if request.seed:
        try:
            spec = dataclasses.replace(table.spec, seed=int(request.seed))
        except ValueError as error:
            raise ConfigError(f"a table without rows must have a seed, got {request.seed!r}") from error
        if not request.name:
            table.clear()
            table.begin_as(spec.seed, spec.initial)
            return SavedRows(0, 0, 0)
        table.go_back(spec, lambda: _as_initial(table, spec))
    elif kept is not None:
        table.go_back(kept.spec, kept.pieces)
    else:
        raise ConfigError(
            f"the rows of {table.label} that get_weights() has kept are gone: the pservers that had them have been "
            "lost, or others have joined; save what must outlive that to files, by save_weights()"
        )
    return SavedRows(table.step, table.stats().rows, 0)


def _as_initial(table: Table, spec: TableSpec) -> Iterator[Piece]:
    """The initial values of all that have rows."""
    for ids, *_ in table.chunks():
        yield Piece(ids, spec.initial.values(spec.seed, ids, spec.dim), np.zeros(ids.size, np.bool_))


def remove_saves(folder: str | Path, names: Iterable[str]) -> None:
    """Removes saves beside that in `folder`, given the names of their folders; what else is in these stays."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"a save that is removed must be a folder beside {folder}, got {name!r}")
        old = Path(folder).parent / name
        for path in sorted(old.glob("*-of-*")) if old.is_dir() else ():
            if re.search(r"-\d+-of-\d+(\.json|(\.gone)?\.\d+\.npz)(\.partial)?$", path.name):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            old.rmdir()


def remove_all_saves(folder: Path) -> None:
    """Removes all saves in a folder, and the folder if it is empty then; others may do so, too. OSError: it cannot."""
    if folder.is_dir():
        remove_saves(folder / "any", [path.name for path in folder.iterdir() if path.is_dir()])
        with contextlib.suppress(OSError):
            folder.rmdir()


def saved_update(folder: str | Path, name: str) -> UpdateSpec:
    """By which rule the rows of a saved table were updated. ConfigError: there is no such save."""
    return _shards(Path(folder), name)[0].spec.update


def rows_of_save(folder: str | Path, name: str) -> Iterator[tuple[Array, Array]]:
    """Ids and rows of a full save, a part at a time. ConfigError: there is none, or a file is damaged."""
    for shard in _shards(Path(folder), name):
        for number, (rows, _) in enumerate(shard.parts):
            wanted = {"ids": ("int64", (rows,)), "rows": ("float32", (rows, shard.spec.dim))}
            ids, values = _arrays(shard.part(number), wanted)
            yield ids, values


def _read_shard(table: Table, shard: _Shard, *, slots: bool, first: bool) -> int:
    if shard.since is None and not first:
        table.remove_owned(shard.place, shard.count)
    for number, (rows, _) in enumerate(shard.gone):
        path = shard.part(number, ".gone")
        (ids,) = _arrays(path, {"ids": ("int64", (rows,))})
        table.remove(ids)
    dim, ours = table.spec.dim, table.spec.update.slots
    for number, (rows, _) in enumerate(shard.parts):
        wanted = {"ids": ("int64", (rows,)), "steps": ("int32", (rows,)), "rows": ("float32", (rows, dim))}
        if slots:
            wanted |= {f"slot.{slot}": ("float32", (rows, dim)) for slot, _ in ours}
        ids, steps, *arrays = _arrays(shard.part(number), wanted)
        if not slots:
            arrays += [np.full((rows, dim), value, np.float32) for _, value in ours]
        table.restore(Chunk(ids, steps, arrays))
    return sum(nbytes for _, nbytes in shard.files())


def _arrays(path: Path, wanted: dict[str, tuple[str, tuple[int, ...]]]) -> list[Array]:
    """The arrays of a part in the order of `wanted`: name, dtype and shape. All bytes are checked by their CRC."""
    found = list[Array]()
    try:
        with zipfile.ZipFile(path) as archive:
            for name, (dtype, shape) in wanted.items():
                array = np.lib.format.read_array(io.BytesIO(archive.read(f"{name}.npy")), allow_pickle=False)
                if (str(array.dtype), array.shape) != (dtype, shape):
                    raise ConfigError(
                        f"{path} is damaged: {name} must be {dtype} {list(shape)}, got {array.dtype} "
                        f"{list(array.shape)}; take another save"
                    )
                found.append(array)
    except ConfigError:
        raise
    except Exception as error:  # a damaged zip may raise anything
        raise ConfigError(f"{path} is damaged or cannot be read: {error}; take another save") from error
    return found


def _shards(folder: Path, name: str) -> list[_Shard]:
    """All shards of a table in a save, by place; their files are there and have the right sizes."""
    paths = dict[tuple[int, int], Path]()
    for path in folder.glob("*.json") if folder.is_dir() else ():
        if path.name.startswith(name) and (found := _SHARD.fullmatch(path.name, len(name))):
            paths[int(found[2]), int(found[1])] = path
    counts = sorted({count for count, _ in paths})
    if not counts:
        raise ConfigError(f"{folder} must have shards of the table {name} ({name}-0-of-1.json, ...), has none")
    if len(counts) > 1:
        raise ConfigError(
            f"{folder} must have shards of the table {name} of one number of pservers, has those of {counts}: remove "
            "what is not of this save"
        )
    count = counts[0]
    if missing := [place for place in range(count) if (count, place) not in paths]:
        gone = folder / f"{name}-{missing[0]}-of-{count}.json"
        raise ConfigError(f"{gone} is missing: {len(missing)} of {count} shards of this save were not finished")
    shards = [_manifest(paths[count, place], place, count) for place in range(count)]
    for shard in shards:
        for path, nbytes in shard.files():
            try:
                size = path.stat().st_size
            except OSError as error:
                raise ConfigError(f"{path}, which {shard.path.name} names, is missing: {error}") from error
            if size != nbytes:
                raise ConfigError(f"{path} is damaged: must have {nbytes} bytes, got {size}; take another save")
    return shards


def _manifest(path: Path, place: int, count: int) -> _Shard:
    try:
        found = json.loads(path.read_bytes())
        crc = found.pop("crc32")
        if crc != _crc(found):
            raise ValueError("its checksum is another")
        if found["format"] != FORMAT:
            raise ConfigError(
                f"{path} must have format {FORMAT}, as this version of tfps reads it, got {found['format']}"
            )
        if (found["place"], found["count"]) != (place, count):
            raise ValueError(f"it is of place {found['place']} of {found['count']}")
        since = found["since"]
        return _Shard(
            path,
            place,
            count,
            int(found["step"]),
            None if since is None else int(since),
            str(found["before"]),
            TableSpec.parse(json.dumps(found["spec"])),
            tuple((int(rows), int(nbytes)) for rows, nbytes in found["parts"]),
            tuple((int(rows), int(nbytes)) for rows, nbytes in found["gone"]),
        )
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged or cannot be read: {error}; take another save") from error


def _check_saves(table: Table, saves: list[list[_Shard]]) -> None:
    """Raises ConfigError if they are not of such a table, or do not follow each other."""
    ours = _kept(table.spec)
    for shard in (shard for shards in saves for shard in shards):
        for (field, mine), theirs in zip(ours.items(), _kept(shard.spec).values(), strict=True):
            if mine != theirs:
                raise ConfigError(f"{field} of {table.label} must be that of {shard.path}, {theirs}, got {mine}")
    for before, shards in itertools.pairwise(saves):
        latest = max(shard.step for shard in before)
        for shard in shards:
            if shard.since is not None and shard.since > latest:
                raise ConfigError(
                    f"{shard.path} has what has changed since step {shard.since}, but the save before it, "
                    f"{before[0].path.parent}, ends at step {latest}: one between them is missing"
                )


def _kept(spec: TableSpec) -> dict[str, Json]:
    """What must be the same for rows to be of use."""
    return {"dim": spec.dim, "rows": spec.rows}


def _rule(spec: TableSpec) -> tuple[str, list[str]]:
    """What must be the same for slots to be of use."""
    return spec.update.rule, [slot for slot, _ in spec.update.slots]


def _crc(manifest: dict[str, Json]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[io.BufferedWriter]:
    """A file to write to that is at `path` once it is complete and on the disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes the new names of files last, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
