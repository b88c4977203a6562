"""Files that ranks with different content write to one path: it is rank 0's in the end, and nobody waits.

Ranks may share the folder or not, and any of them may be the only one that saves. So each brings a file of its own, but
a rank other than 0 leaves what another rank has brought since all ranks last met. A mark in the file says who brought
it and when: the comment of an archive (.keras), an attribute of an HDF5 file.

Tested in tests/keras_hooks/test_shared_files.py and tests/integration/test_shared_files.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zipfile
from pathlib import Path

import h5py

_ATTRIBUTE = "tfps_brought"


def bring(part: Path, path: Path, rank: int, workers: int, moment: str) -> None:
    """Replaces the file `path` by `part`, unless that would replace another rank's file of the same moment.

    Rank 0 replaces what is there at least once after the last look that another rank took before it saw rank 0's file:
    who has looked loses its claim between the two times.

    Args:
        part: a whole file beside `path`, which may remain.
        moment: tells where in the program ranks are, without spaces; the same on all ranks between two meetings.
    """
    claims = [path.with_name(f".claim{each}.{path.name}") for each in range(workers)]
    _mark(part, f"{moment} {rank}")
    try:
        if rank == 0:
            _link(part, claims[0])
            part.replace(path)
            for claim in claims[1:]:
                claim.unlink(missing_ok=True)
            claims[0].replace(path)
        else:
            part.replace(claims[rank])
            when, _, who = _mark_of(path).rpartition(" ")
            if when != moment or who == str(rank):
                with contextlib.suppress(FileNotFoundError):  # rank 0 was faster: its file is there
                    claims[rank].replace(path)
    finally:
        claims[rank].unlink(missing_ok=True)


def _link(file: Path, name: Path) -> None:
    """Makes `name` another name of `file`, or a copy where a file has one name only."""
    name.unlink(missing_ok=True)
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)


def _mark(file: Path, text: str) -> None:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = text.encode()
    else:
        with h5py.File(file, "r+") as opened:
            opened.attrs[_ATTRIBUTE] = text


def _mark_of(file: Path) -> str:
    """The mark of `file`; empty if it has none, is none, or is no file of Keras."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                return archive.comment.decode(errors="replace")
        with h5py.File(file) as opened:
            return str(opened.attrs.get(_ATTRIBUTE, ""))
    except (OSError, zipfile.BadZipFile):
        return ""
