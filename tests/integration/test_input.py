"""Input of several workers, whose data differ in length, and of several local devices."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest

from tfps.pserver.server import ParameterServer
from tfps.types import Json


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Json]]:
    """What the programs of uneven.py have found on each of two workers: rank 0 has 5 batches, rank 1 has 3."""
    servers = [ParameterServer("127.0.0.1", 0, workers=2) for _ in range(2)]
    files = [tmp_path_factory.mktemp("uneven") / f"{rank}.json" for rank in range(2)]
    addresses = [server.address for server in servers]
    with processes.started("uneven.py", addresses, 2, [[str(file)] for file in files]) as running:
        processes.outputs(running)
    for server in servers:
        server.stop()
    return [json.loads(Path(file).read_text()) for file in files]


def found(uneven: list[dict[str, Json]], program: str) -> list[dict[str, Json]]:
    """What each worker has found."""
    if program not in uneven[0]:
        pytest.skip("this Keras does not take distribute_datasets_from_function in fit")
    return [results[program] for results in uneven]


PROGRAMS = [
    *("fit", "not counted", "accumulation", "several steps", "eager", "empty", "loop", "without any", "in function"),
    *("unstaged", "unstaged loop"),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_workers_end_each_epoch_at_the_same_step_with_equal_weights(
    uneven: list[dict[str, Json]], program: str
) -> None:
    expected = {"several steps": [1, 1, 1], "eager": [3, 3], "empty": [0, 0], "loop": [2, 2], "without any": [0, 0, 0]}
    expected |= {"in function": [3, 3, 3, 3], "unstaged loop": [2, 2]}
    one, two = found(uneven, program)
    assert one["trained"] == two["trained"] == expected.get(program, [3, 3, 3])
    assert one["weights"] == two["weights"]
    if "iterations" in one:  # the step that found the end has not counted itself
        steps = 6 if program == "eager" else 9
        assert one["iterations"] == two["iterations"] == (4 if program == "accumulation" else steps)


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_warning_names_the_rank_whose_data_ended_and_what_is_dropped(
    uneven: list[dict[str, Json]], program: str
) -> None:
    ended = {"loop": "rank 0 ended after 2", "unstaged loop": "rank 0 ended after 2"}.get(
        program, f"rank 1 ended after {0 if program in ('empty', 'without any') else 3}"
    )
    dropped = {"loop": "rank 1 2", "unstaged loop": "rank 1 2"}
    dropped |= dict.fromkeys(["empty", "not counted", "without any", "in function"], "rank 0 at least 1")
    for result in found(uneven, program):
        warnings = result["warnings"]
        assert len(warnings) <= 1
        for warning in warnings:
            assert ended in warning
            assert f"batches dropped: {dropped.get(program, 'rank 0 2')}." in warning
    # A worker that counts its batches does not ask for one after its last, and has nothing to say.
    assert any(result["warnings"] for result in found(uneven, program))


def test_validation_and_prediction_use_all_batches_of_each_worker(uneven: list[dict[str, Json]]) -> None:
    for program in ("without any", "in function"):
        assert [result["seen"] for result in found(uneven, program)] == [80, 48]
    assert [result["evaluated"] for result in found(uneven, "fit")] == [[5, 5, 5], [3, 3, 3]]
    assert [result["predicted"] for result in found(uneven, "not counted")] == [80, 48]


def test_an_error_of_one_workers_pipeline_ends_all_at_that_step(uneven: list[dict[str, Json]]) -> None:
    one, two = found(uneven, "failing")
    assert one["trained"] == two["trained"] == [2]
    assert "the input pipeline of rank 1 failed at batch 2" in one["error"]
    assert "ArithmeticError: the disk is on fire" in two["error"]


def test_batches_lie_on_the_device_that_uses_them() -> None:
    (output,) = processes.outputs([processes.start("staged_devices.py", environment={})])
    assert "staged" in output
