"""What tests of tfps_doctor share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from guarded import OTHER, SECRET
from jobs import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Pservers and workers that end with the test."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round trips are never too long, however busy the machine is."""
    monkeypatch.setattr("tfps.doctor.verdicts._FAR_S", float("inf"))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Token -> path of its file."""
    found = {"": ""}
    for number, text in enumerate((SECRET, OTHER)):
        path = tmp_path / f"token{number}"
        path.touch(0o600)
        path.write_text(text)
        found[text] = str(path)
    return found
