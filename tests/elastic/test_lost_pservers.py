"""Training goes on when pservers are lost, bitwise as if none had been (Config.min_workers, deterministic)."""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import processes
import pytest
from _pytest.mark import ParameterSet
from local_training import Settings
from losing_pservers import KILL, STOP, TIMEOUT_S, pserver, same, trained

from tfps.types import Argument, Json

SERVER = {"TFPS_UPDATE": "server", "TFPS_SNAPSHOT_STEPS": "3"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Sequence[Json]]:
    """The weights without a fault, where pservers update or workers do."""

    @functools.cache
    def weights(on_server: bool) -> Sequence[Json]:
        folder, more = tmp_path_factory.mktemp("undisturbed"), {"TFPS_UPDATE": "server"} if on_server else {}
        found: Sequence[Json] = trained(folder, "arrays adam" if on_server else "arrays", {}, more)[0]["weights"]
        return found

    return weights


APART = {
    "diloco": Settings(),
    "diloco, in fragments": Settings(fragments=2, overlap_steps=1),
    "local": Settings("local", optimizer="adam"),
}


def saved(
    folder: Path, script: str, arguments: Sequence[str], fault: list[Argument], more: dict[str, str]
) -> list[Json]:
    """What three workers save, each at the path that it gets first; `fault`, [rank, step, point], ends a pserver."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(pserver("--port=0")) for _ in range(2)]
        environment = {"TFPS_MIN_WORKERS": "1", **more}
        environment["FAULT"] = json.dumps([*fault, KILL, [servers[0][0].pid]] if fault else [-1])
        tasks = [[f"{folder}/{rank}", *arguments] for rank in range(3)]
        with processes.started(script, [address for _, address in servers], 3, tasks, **environment) as started:
            ended = processes.finish(started, TIMEOUT_S)
    text = "\n".join(output for _, output in ended)
    assert [code for code, _ in ended] == [0, 0, 0], text
    assert text.count("the workers meet, to go on with the pservers") == (3 if fault else 0), text
    return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(3)]


@pytest.mark.long
@pytest.mark.parametrize("case", APART)
@pytest.mark.parametrize("point", ["before a push", "after the last push"])
def test_so_do_workers_that_train_apart(tmp_path: Path, case: str, point: str) -> None:
    arguments, more = ["14,14,14", json.dumps(vars(APART[case]))], {"TFPS_SNAPSHOT_STEPS": "1"}
    expected, found = (saved(tmp_path, "local.py", arguments, fault, more) for fault in ([], [1, 1, point]))
    for (mine, *_), (its, *_) in zip(found, expected, strict=True):
        for one, other in zip([*mine["own"], mine["end"]], [*its["own"], its["end"]], strict=True):
            assert [w.tobytes() for w in one] == [w.tobytes() for w in other]


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "table"), [("SGD", False), ("Adam", False), ("Adam", True)])
def test_so_do_workers_that_are_not_in_step_and_each_batch_is_used_once(
    tmp_path: Path, optimizer: str, table: bool
) -> None:
    """The first pserver counts the batches that have been handed out."""
    epochs, more = 3, {"TFPS_SNAPSHOT_STEPS": "3", "TFPS_MODE": "async", "TFPS_UPDATE": "server"}
    # With a bound all have made some steps by then, and so have what they need.
    more |= {"TFPS_STALENESS": "4", "OPTIMIZER": optimizer}
    more |= {"TFPS_SNAPSHOT_FOLDER": str(tmp_path / "snapshots"), "TABLE": ""} if table else {}
    found = saved(tmp_path, "handed_out.py", [str(epochs)], [1, 8, "before a push"], more)
    for epoch in range(epochs):
        weights, steps, _ = zip(*(each[epoch] for each in found), strict=True)
        assert len({b"".join(array.tobytes() for array in each) for each in weights}) == len(set(steps)) == 1
        assert sum(each[epoch][2] for each in found) == 60
        assert steps[0] == 20 * (epoch + 1)  # the mean of theirs


CASES: dict[str, tuple[str, dict[int, list[Argument]], dict[str, str]]] = {
    "the coordinator, between two slices": ("arrays", {1: [3, "between slices", KILL, [0]]}, {}),
    "before a push": ("arrays", {0: [4, "before a push", KILL, [1]]}, {}),
    "after the last push": ("dataset", {2: [3, "after the last push", KILL, [2]]}, {}),
    "in an update": ("generator", {1: [5, "in an update", KILL, [0]]}, {}),
    "in an announcement": ("arrays", {0: [4, "in an announcement", KILL, [0]]}, {}),
    "in a declaration": ("arrays", {1: [1, "in a declaration", KILL, [1]]}, {}),
    "in a later declaration": ("arrays", {0: [2, "in a declaration", KILL, [0]]}, {}),
    "in the exchange of initial values": ("arrays", {0: [0, "in the exchange of initial values", KILL, [2]]}, {}),
    "in a validation": ("arrays validation", {0: [1, "in an evaluation", KILL, [0]]}, {}),
    "in a save": ("arrays save", {0: [0, "in a save", KILL, [1]]}, {}),
    "two at once": ("arrays", {0: [3, "between slices", KILL, [0, 2]]}, {}),
    "one after the other": (
        "arrays",
        {0: [3, "between slices", KILL, [0]], 1: [7, "after the last push", KILL, [1]]},
        {},
    ),
    "stopped": ("arrays", {1: [3, "before a push", STOP, [1]]}, {}),
    "over TCP": ("arrays", {1: [3, "between slices", KILL, [1]]}, {"TFPS_SHARED_MEMORY": "0"}),
    "over gRPC": (
        "arrays",
        {1: [3, "between slices", KILL, [0]]},
        {"TFPS_SHARED_MEMORY": "0", "TFPS_TRANSPORT": "grpc"},
    ),
    "compressed": ("arrays", {1: [3, "between slices", KILL, [0]]}, {"TFPS_COMPRESSION": "onebit"}),
    "eagerly": ("eagerly", {1: [4, "in an announcement", KILL, [1]]}, {}),
    "in a custom loop": ("loop", {1: [3, "between slices", KILL, [0]]}, {}),
    "another one joins": ("arrays", {1: [3, "between slices", KILL, [1]]}, {"--join": "", "EPOCHS": "2"}),
    "update on the server, between two slices": ("arrays adam", {1: [5, "between slices", KILL, [1]]}, SERVER),
    "update on the server, the coordinator": ("arrays adam", {1: [7, "after the last push", KILL, [0]]}, SERVER),
    "update on the server, in the first step": ("arrays adam", {2: [0, "between slices", KILL, [0]]}, SERVER),
    "update on the server, in a validation": (
        "arrays adam validation",
        {0: [1, "in an evaluation", KILL, [2]]},
        SERVER,
    ),
    "update on the server, in a save": ("arrays adam save", {0: [0, "in a save", KILL, [1]]}, SERVER),
    "update on the server, stopped": ("arrays adam", {1: [3, "before a push", STOP, [1]]}, SERVER),
    "update on the server, two at once": ("arrays adam", {0: [4, "before a push", KILL, [0, 2]]}, SERVER),
    "update on the server, another one joins": (
        "arrays adam",
        {1: [3, "between slices", KILL, [1]]},
        {**SERVER, "--join": ""},
    ),
    "the only one comes back": (
        "arrays",
        {1: [3, "between slices", KILL, [0]]},
        {"at its address": "", "PSERVERS": "1"},
    ),
}
SOME = ("the only one comes back",)  # in the quick suite


def _case(name: str) -> ParameterSet:
    return pytest.param(name, marks=() if name in SOME else pytest.mark.long)


@pytest.mark.parametrize("case", list(map(_case, CASES)))
def test_a_pserver_is_lost(tmp_path: Path, undisturbed: Callable[[bool], Sequence[Json]], case: str) -> None:
    kind, faults_of, more = CASES[case]
    found = trained(tmp_path, kind, faults_of, more)
    assert same(found, undisturbed("TFPS_UPDATE" in more)) or "TFPS_COMPRESSION" in more or kind in ("eagerly", "loop")
