"""Programs of two workers in mode "diloco": what has to be the same on all ranks is, and the rest is their own."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import jobs
import numpy as np
import processes
import pytest
from test_failures import read_until

from tfps.pserver.server import ParameterServer
from tfps.types import Value

pytestmark = pytest.mark.timeout(600)
DILOCO = {"TFPS_MODE": "diloco", "TFPS_INNER_STEPS": "4", "TFPS_SLICE_BYTES": "4096"}
QUICK = ["evaluated_and_saved", "custom_loop", "refused"]
LONG = ["loss_scaling", "no_backup_yet", "saved_by_one_rank", "backup", "traced", "epoch_without_batches"]
COMPRESSED = {"TFPS_COMPRESSION": "int8", "TFPS_DETERMINISTIC": "1", "TFPS_STEP_TIMEOUT_S": "60"}
Results = list[dict[str, dict[str, Value]]]  # of each rank: what each program ends with


def run(names: list[str], folder: Path, more: Mapping[str, str]) -> Results:
    return processes.ran(folder, [f"programs_local.{name}" for name in names], {**DILOCO, **more})


def check(name: str, results: Results) -> list[dict[str, Value]]:
    """What all ranks must have alike is bitwise equal."""
    ends = [result[name] for result in results]
    for rank, end in enumerate(ends):
        assert "error" not in end, f"rank {rank}:\n{end['error']}"
    assert ends[0].keys() == ends[1].keys()
    for key in (key for key in ends[0] if not key.startswith("own")):
        mine, other = (np.asarray(end[key]) for end in ends)
        assert mine.tobytes() == other.tobytes(), f"{key}: {mine} and {other}"
    return ends


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(QUICK, tmp_path_factory.mktemp("quick"), {})


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(LONG, tmp_path_factory.mktemp("long"), {})


@pytest.mark.parametrize("name", QUICK)
def test_ranks_agree_where_they_must(name: str, quick: Results) -> None:
    check(name, quick)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_ranks_agree_where_they_must_in_more_programs(name: str, long: Results) -> None:
    check(name, long)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["diloco", "local"])
def test_one_rank_saves_alone_what_compression_holds_back_which_travels_only_then(mode: str, tmp_path: Path) -> None:
    names = ["saved_by_one_rank_after_fit", "saved_by_one_rank_in_fit"]
    found = run(names, tmp_path, {**COMPRESSED, "TFPS_MODE": mode})
    for name in names:
        check(name, found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("codec", "names", "more"),
    [
        ("int8", ["backup", "no_backup_yet", "epoch_without_batches"], {}),
        ("onebit", ["custom_loop", "saved_by_one_rank_after_fit"], {"TFPS_OVERLAP_STEPS": "1", "TFPS_FRAGMENTS": "2"}),
    ],
)
def test_programs_with_compression_agree_where_they_must(
    codec: str, names: list[str], more: dict[str, str], tmp_path: Path
) -> None:
    found = run(names, tmp_path, {**COMPRESSED, **more, "TFPS_COMPRESSION": codec})
    for name in names:
        check(name, found)


def test_workers_have_parameters_of_their_own_until_the_next_exchange(quick: Results) -> None:
    one, other = check("evaluated_and_saved", quick)
    assert not np.array_equal(one["own before 0/0"], other["own before 0/0"])  # after 6 steps, 2 since an exchange
    assert not np.array_equal(one["own before 0/0"], one["saved 0/0"])
    for end in one, other:  # after 12
        np.testing.assert_array_equal(end["own before 1/0"], end["saved 1/0"])


@pytest.mark.long
def test_a_step_that_one_rank_skips_moves_no_exchange(long: Results) -> None:
    assert [end["own iterations"] for end in check("loss_scaling", long)] == [12, 10]


@pytest.mark.long
def test_slots_are_each_ranks_own_where_there_is_no_backup_to_restore(long: Results) -> None:
    one, other = check("no_backup_yet", long)
    assert not np.array_equal(one["own slots"], other["own slots"])


def test_saving_within_an_epoch_is_refused(quick: Results) -> None:
    checkpoint, backup = check("refused", quick)[0]["refused"]
    assert "ModelCheckpoint(save_freq=2) with mode='diloco': within an epoch" in checkpoint
    assert "BackupAndRestore(save_freq=2) with mode='diloco'" in backup


@pytest.mark.long
def test_an_epoch_may_have_no_batch_for_a_rank(long: Results) -> None:
    assert check("epoch_without_batches", long)[1]["own batches"][1] == 0


@pytest.mark.long
def test_a_report_is_about_rounds(long: Results) -> None:
    for end in check("traced", long):
        assert re.match(r"round of 4 steps [\d.]+ m?s: ", end["own report"]), end["own report"]
    assert "run.trace.json.gz" in long[0]["traced"]["own files"]


@pytest.mark.long
def test_a_rank_that_synchronizes_alone_is_told_that_all_must(tmp_path: Path) -> None:
    found = run(["one_rank_meets"], tmp_path, {})
    assert re.search(
        r"workers meet at the end of each epoch of fit, .* which every rank must call\. rank 1 \(.*\) left before",
        found[0]["one_rank_meets"]["own error"],
    ), found[0]["one_rank_meets"]


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    running = ParameterServer("127.0.0.1", 0, workers=2)
    yield running
    running.stop()


@pytest.mark.long
def test_a_killed_worker_ends_the_others_with_an_error_that_names_its_rank(server: ParameterServer) -> None:
    settings = {"TFPS_MODE": "local", "TFPS_INNER_STEPS": "5"}
    with processes.started("endless.py", [server.address], 2, [[], ["stays"]], **settings) as running:
        for process in running:
            read_until(process, "training")
        # Its second exchange: with the first one rank 1 may only be late, and between two exchanges weights are whole.
        jobs.poll(lambda: server.status().members[0].step == 1)
        running[1].send_signal(signal.SIGKILL)
        ((code, output),) = processes.finish(running[:1])
    assert code == 1
    assert re.search(r"fit raised WorkerLostError .*rank 1 \(\S+\) died at step \d+: ", output)
    assert "get_weights raised WorkerLostError" in output


@pytest.mark.long
def test_a_worker_that_ends_earlier_is_named_to_the_others(server: ParameterServer) -> None:
    settings = {"TFPS_MODE": "local", "TFPS_INNER_STEPS": "5"}
    with processes.started("endless.py", [server.address], 2, [[], ["8"]], **settings) as running:
        (code, output), (early, _) = processes.finish(running)
    assert (early, code) == (0, 1)
    assert re.search(r"rank 1 \(.*\) left before step \d+ of", output), output
