"""Input of several workers, whose data differ in length, and of several local devices."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import processes
import pytest

from tfps.types import Json

# The first job belongs to the quick suite, the second is long.
QUICK = ["fit", "in function", "without any", "failing"]
LONG = ["several steps", "not counted", "loop", "accumulation", "eager", "empty", "unstaged", "unstaged loop"]
EACH = pytest.mark.parametrize(
    "program",
    [*(name for name in QUICK if name != "failing"), *(pytest.param(name, marks=pytest.mark.long) for name in LONG)],
)
Found = Callable[[str], list[dict[str, Json]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a program of uneven.py has found on each of two workers: rank 0 has 5 batches, rank 1 has 3."""

    @functools.cache
    def results(long: bool) -> list[dict[str, Json]]:
        files = [tmp_path_factory.mktemp("uneven") / f"{rank}.json" for rank in range(2)]
        arguments = [[str(file), *(LONG if long else QUICK)] for file in files]
        with (
            processes.pservers(2, 2) as addresses,
            processes.started("uneven.py", addresses, 2, arguments) as running,
        ):
            processes.outputs(running)
        return [json.loads(Path(file).read_text()) for file in files]

    def of(program: str) -> list[dict[str, Json]]:
        each = results(program in LONG)
        if program not in each[0]:
            pytest.skip("this Keras does not take distribute_datasets_from_function in fit")
        return [result[program] for result in each]

    return of


@EACH
def test_all_workers_end_each_epoch_at_the_same_step_with_equal_weights(found: Found, program: str) -> None:
    expected = {"several steps": [1, 1, 1], "eager": [3, 3], "empty": [0, 0], "loop": [2, 2], "without any": [0, 0, 0]}
    expected |= {"in function": [3] * 8, "unstaged loop": [2, 2]}
    one, two = found(program)
    assert one["trained"] == two["trained"] == expected.get(program, [3, 3, 3])
    assert one["weights"] == two["weights"]
    if "iterations" in one:  # the step that found the end has not counted itself
        steps = 6 if program == "eager" else 9
        assert one["iterations"] == two["iterations"] == (4 if program == "accumulation" else steps)


@EACH
def test_one_warning_names_the_rank_whose_data_ended_and_what_is_dropped(found: Found, program: str) -> None:
    ended = {"loop": "rank 0 ended after 2", "unstaged loop": "rank 0 ended after 2"}.get(
        program, f"rank 1 ended after {0 if program in ('empty', 'without any') else 3}"
    )
    dropped = {"loop": "rank 1 2", "unstaged loop": "rank 1 2"}
    dropped |= dict.fromkeys(["empty", "not counted", "without any", "in function"], "rank 0 at least 1")
    for result in found(program):
        warnings = _of_the_data(result)
        assert len(warnings) <= 1
        for warning in warnings:
            assert ended in warning
            assert f"batches dropped: {dropped.get(program, 'rank 0 2')}." in warning
    # A worker that counts its batches does not ask for one after its last, and has nothing to say.
    assert any(_of_the_data(result) for result in found(program))


def _of_the_data(result: dict[str, Json]) -> list[str]:
    """Returns the warnings without those that say whom a worker waits for, as it may on a busy machine."""
    return [line for line in result["warnings"] if not line.startswith("tfps: waits for")]


def test_evaluation_uses_all_batches_of_each_worker(found: Found) -> None:
    assert [result["seen"] for result in found("without any")] == [80, 48]
    assert [result["seen"] for result in found("in function")] == [80, 48]
    assert [result["evaluated"] for result in found("fit")] == [[5, 5, 5], [3, 3, 3]]


@pytest.mark.long
def test_prediction_uses_all_batches_of_each_worker(found: Found) -> None:
    assert [result["predicted"] for result in found("not counted")] == [80, 48]


def test_an_error_of_one_workers_pipeline_ends_all_at_that_step(found: Found) -> None:
    one, two = found("failing")
    assert one["trained"] == two["trained"] == [2]
    assert "the input pipeline of rank 1 failed at batch 2" in one["error"]
    assert "ArithmeticError: the disk is on fire" in two["error"]


@pytest.mark.long
def test_batches_lie_on_the_device_that_uses_them() -> None:
    (output,) = processes.outputs([processes.start("staged_devices.py", environment={})])
    assert "staged" in output
