"""Training of tables goes on when pservers are lost, bitwise as if none had been (Config.snapshot_folder)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from losing_pservers import KILL, STOP, same, trained

from tfps.types import Argument, Json

SERVER = {"TFPS_UPDATE": "server"}
CASES: dict[str, tuple[str, dict[int, list[Argument]], dict[str, str]]] = {
    "between two slices": ("arrays table", {1: [5, "between slices", KILL, [1]]}, {}),
    "the coordinator": ("dataset table", {0: [4, "after the last push", KILL, [0]]}, {}),
    "in the first step": ("arrays table", {2: [0, "between slices", KILL, [0]]}, {}),
    "in a validation": ("arrays table validation", {0: [1, "in an evaluation", KILL, [0]]}, {}),
    "in a save": ("arrays table save", {0: [0, "in a save", KILL, [1]]}, {}),
    "in a declaration": ("arrays table", {1: [1, "in a declaration", KILL, [1]]}, {}),
    "two at once": ("arrays table", {0: [3, "between slices", KILL, [0, 2]]}, {}),
    "one after the other": (
        "arrays table",
        {0: [3, "between slices", KILL, [0]], 1: [7, "after the last push", KILL, [1]]},
        {},
    ),
    "stopped": ("arrays table", {1: [3, "before a push", STOP, [1]]}, {}),
    "eagerly": ("arrays table eagerly", {1: [4, "in an announcement", KILL, [1]]}, {}),
    "another one joins": ("arrays table", {1: [3, "between slices", KILL, [1]]}, {"--join": ""}),
    "the only one comes back": (
        "arrays table",
        {1: [5, "between slices", KILL, [0]]},
        {"at its address": "", "PSERVERS": "1"},
    ),
    "several devices": ("arrays table", {1: [4, "before a push", KILL, [0]]}, {"DEVICES": "2"}),
    "update on the server": ("arrays table adam", {1: [5, "between slices", KILL, [1]]}, SERVER),
    "update on the server, in a validation": (
        "arrays table adam validation",
        {0: [1, "in an evaluation", KILL, [2]]},
        SERVER,
    ),
    "update on the server, the only one comes back": (
        "arrays table adam",
        {1: [7, "after the last push", KILL, [0]]},
        {**SERVER, "at its address": "", "PSERVERS": "1"},
    ),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Sequence[Json]]:
    """The weights without a fault."""

    @functools.cache
    def weights(kind: str, devices: str) -> Sequence[Json]:
        more = {**(SERVER if "adam" in kind else {}), "DEVICES": devices}
        found: Sequence[Json] = trained(tmp_path_factory.mktemp("undisturbed"), kind, {}, more)[0]["weights"]
        return found

    return weights


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_rows_outlive_their_pserver(
    tmp_path: Path, undisturbed: Callable[[str, str], Sequence[Json]], case: str
) -> None:
    kind, faults_of, more = CASES[case]
    snapshots = tmp_path / "snapshots"
    more = {**more, "TFPS_SNAPSHOT_STEPS": "3", "TFPS_SNAPSHOT_FOLDER": str(snapshots)}
    found = trained(tmp_path, kind, faults_of, more)
    assert not list(snapshots.glob("*"))  # they go when the job ends
    plain = "arrays table" + (" eagerly" if "eagerly" in kind else "") + (" adam" if "adam" in kind else "")
    assert same(found, undisturbed(plain, more.get("DEVICES", "1")))
