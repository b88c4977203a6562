"""A file that several ranks bring is rank 0's in the end, whoever comes when; each rank reads one of that moment."""

from __future__ import annotations

import itertools
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from tfps.keras_hooks import checkpoint
from tfps.keras_hooks.checkpoint import bring

WORKERS = 3


def archive(path: Path, text: str) -> None:
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("text", text)


def hdf5(path: Path, text: str) -> None:
    with h5py.File(path, "w") as opened:
        opened["text"] = text


def text_of(path: Path) -> str:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as opened:
            return opened.read("text").decode()
    with h5py.File(path) as opened:
        return str(opened["text"][()].decode())


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def brings(folder: Path, rank: int, text: str, moment: str, write: Callable[[Path, str], None] = hdf5) -> str:
    """What the rank then reads."""
    part = folder / f".rank{rank}.file"
    write(part, text)
    bring(part, folder / "file", rank, WORKERS, moment)
    part.unlink(missing_ok=True)
    return text_of(folder / "file")


@pytest.mark.parametrize("write", [archive, hdf5])
@pytest.mark.parametrize("order", list(itertools.permutations(range(WORKERS))))
def test_a_shared_file_is_rank_0s_whoever_comes_last(
    write: Callable[[Path, str], None], order: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path / "file", "of plain Keras")
    for moment in ("run/1", "run/2", "other/2"):
        for rank in order:
            assert brings(tmp_path, rank, f"{moment} rank {rank}", moment, write).startswith(moment)
        assert text_of(tmp_path / "file") == f"{moment} rank 0"
    assert names(tmp_path) == ["file"]


def test_a_rank_alone_replaces_what_it_and_what_others_have_brought_before(tmp_path: Path) -> None:
    brings(tmp_path, 0, "first", "run/1")
    for text, moment in (("a", "run/2"), ("b", "run/2"), ("c", "run/3")):
        assert brings(tmp_path, 1, text, moment) == text
    (tmp_path / "file").write_bytes(b"something else")
    assert brings(tmp_path, 2, "d", "run/3") == "d"


@pytest.mark.parametrize("when", ["before", "after"])
def test_rank_0_wins_though_it_comes_while_another_rank_looks(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brings(tmp_path, 0, "old", "run/1")
    look = checkpoint._mark_of

    def meanwhile(path: Path) -> str:
        monkeypatch.setattr(checkpoint, "_mark_of", look)
        found = look(path) if when == "before" else ""
        brings(tmp_path, 0, "rank 0", "run/2")
        return found or look(path)

    monkeypatch.setattr(checkpoint, "_mark_of", meanwhile)
    assert brings(tmp_path, 1, "rank 1", "run/2") == "rank 0"
    assert names(tmp_path) == ["file"]


def test_what_another_rank_that_had_looked_moves_there_while_rank_0_comes_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def meanwhile(path: Path, missing_ok: bool = False) -> None:
        if path.name == ".claim1.file":  # rank 0 has moved its file to its place once
            hdf5(tmp_path / "other", "rank 1")
            (tmp_path / "other").replace(tmp_path / "file")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", meanwhile)
    assert brings(tmp_path, 0, "rank 0", "run/1") == "rank 0"


def test_files_have_rank_0s_content_where_a_file_can_have_one_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links")

    monkeypatch.setattr(os, "link", refuse)
    brings(tmp_path, 1, "rank 1", "run/1")
    assert brings(tmp_path, 0, "rank 0", "run/1") == brings(tmp_path, 2, "rank 2", "run/1") == "rank 0"
    assert names(tmp_path) == ["file"]
