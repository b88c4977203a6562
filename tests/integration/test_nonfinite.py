"""Two workers, one of which has a NaN in a batch: the job ends as if the batch had not been, or all ranks raise."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np
import processes
import pytest

from tfps.types import Value

pytestmark = pytest.mark.timeout(600)
Results = list[dict[str, Value]]  # of each rank: what a program ends with
SKIP, RAISE = {"TFPS_ON_NONFINITE": "skip"}, {"TFPS_ON_NONFINITE": "raise"}
SMALL = {"TFPS_SLICE_BYTES": "4096", "TFPS_WINDOW_BYTES": "8192", "TFPS_DETERMINISTIC": "1"}
BITWISE = ["fitted", "accumulated", "uneven", "decayed", "eagerly", "several_steps", "sparse", "without_run"]
WHO = {"uneven": "rank 0", "without_run": "rank 0, rank 1"}  # in the last one all ranks read the same
# By their names, settings and programs of a job.
JOBS: dict[str, tuple[dict[str, str], list[str]]] = {
    "skip": ({**SMALL, **SKIP}, ["uneven", "named"]),
    "skip, more": (
        {**SMALL, **SKIP},
        [
            *("fitted", "accumulated", "decayed", "eagerly", "several_steps", "sparse", "without_run"),
            *("too_large", "large_mean", "scaled"),
        ],
    ),
    "two devices": ({**SMALL, **SKIP, "DEVICES": "2"}, ["fitted", "accumulated", "eagerly", "sparse"]),
    "server": ({**SMALL, **SKIP, "TFPS_UPDATE": "server"}, ["eagerly", "accumulated", "fitted"]),
    "int8": ({**SMALL, **SKIP, "TFPS_COMPRESSION": "int8"}, ["fitted"]),
    "topk": ({**SMALL, **SKIP, "TFPS_COMPRESSION": "topk:0.1"}, ["fitted"]),
    "server, onebit": ({**SMALL, **SKIP, "TFPS_UPDATE": "server", "TFPS_COMPRESSION": "onebit"}, ["fitted"]),
    "raise": ({**SMALL, **RAISE}, ["raised"]),
    "raise, more": ({**SMALL, **RAISE}, ["scaled"]),
    "async": ({**SKIP, "TFPS_UPDATE": "server", "TFPS_MODE": "async"}, ["alone"]),
    "diloco": ({**SKIP, "TFPS_MODE": "diloco", "TFPS_INNER_STEPS": "2"}, ["alone"]),
}
QUICK = ("raise",)  # skipping, within a process: tests/updates/test_nonfinite.py
Job = Callable[..., dict[str, Results]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The results of a job's programs; `drop`: without the batch."""

    @functools.cache
    def run(name: str, drop: bool = False) -> dict[str, Results]:
        settings, programs = JOBS[name]
        programs = [each for each in programs if not drop or each in (*BITWISE, "raised")]  # the others: not compared
        more = {**settings, **({"DROP": "1"} if drop else {})}
        modules = [f"programs_nonfinite.{each}" for each in programs]
        ranks = processes.ran(tmp_path_factory.mktemp("job"), modules, more)
        return {program: [rank[program] for rank in ranks] for program in programs}

    return run


def check(results: Results) -> None:
    """No errors, ranks bitwise equal, and nothing but numbers."""
    for rank, result in enumerate(results):
        assert "error" not in result, f"rank {rank}:\n{result['error']}"
    for key in (key for key in results[0] if not key.startswith("own")):
        mine, other = (np.asarray(result[key]) for result in results)
        assert mine.tobytes() == other.tobytes(), f"{key}: {mine} and {other}"
        assert mine.dtype.kind == "U" or np.isfinite(mine).all(), key


def marked(cases: list[tuple[str, str]]) -> list[object]:
    return [
        pytest.param(*case, id=", ".join(case), marks=[] if case[0] in QUICK else [pytest.mark.long]) for case in cases
    ]


@pytest.mark.parametrize(
    ("name", "program"), marked([(name, each) for name, (_, all_) in JOBS.items() for each in all_ if each in BITWISE])
)
def test_a_step_that_is_skipped_leaves_what_training_without_its_batch_leaves(
    name: str, program: str, job: Job
) -> None:
    found, without = job(name)[program], job(name, drop=True)[program]
    check(found)
    for key, value in without[0].items():
        if not key.startswith("own"):
            assert np.asarray(found[0][key]).tobytes() == np.asarray(value).tobytes(), key
    for each, other in zip(found, without, strict=True):
        epochs = 1 if program == "without_run" else 2
        lines = each["own lines"]
        assert len(lines) == epochs
        assert not other["own lines"]
        who = WHO.get(program, "rank 1")
        for count, line in enumerate(lines, 1):
            assert re.match(rf"tfps: a step is skipped: the gradient of \S+ is not finite on {who} \({count} so", line)


@pytest.mark.long
def test_the_first_variable_and_the_ranks_that_have_it_are_named(job: Job) -> None:
    results = job("skip")["named"]
    check(results)
    (line,) = results[0]["ranks lines"]
    assert re.search(r"the gradient of (\S*/)?b is not finite on rank 1 \(", line), line


@pytest.mark.long
def test_a_sum_of_finite_numbers_that_is_infinite_is_skipped_too(job: Job) -> None:
    results = job("skip, more")["too_large"]
    check(results)
    assert results[0]["variable"].tolist() == [-3.0, 0.0]  # 1e-30 times 1e30 on each of two ranks, twice
    (line,) = results[0]["ranks lines"]
    assert "is not finite when it is summed over the ranks (" in line


@pytest.mark.long
def test_a_mean_of_large_numbers_is_applied(job: Job) -> None:
    results = job("skip, more")["large_mean"]
    check(results)
    assert np.allclose(results[0]["weights/0/0"], -3e8)
    assert not results[0]["ranks lines"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["skip, more", "raise, more"])
def test_loss_scaling_skips_steps_by_itself(name: str, job: Job) -> None:
    results = job(name)["scaled"]
    check(results)
    assert (results[0]["counted"], results[0]["scale"]) == (0, 2.0**14)


def test_all_ranks_raise_an_error_that_names_variable_and_rank_and_none_applies_the_step(job: Job) -> None:
    results, without = job("raise")["raised"], job("raise", drop=True)["raised"]
    check(results)
    for result in results:
        message = r"the gradient of \S+/kernel is not finite on rank 1; the step is not applied\. Look for NaN"
        assert re.match(message, result["ranks message"]), result["ranks message"]
    for key, value in without[0].items():
        if key != "ranks message":
            assert np.asarray(results[0][key]).tobytes() == np.asarray(value).tobytes(), key


@pytest.mark.long
@pytest.mark.parametrize("name", ["async", "diloco"])
def test_where_workers_step_alone_the_one_with_the_batch_skips_it(name: str, job: Job) -> None:
    results = job(name)["alone"]
    check(results)
    (line,) = [line for result in results for line in result["own lines"]]
    (rank,) = [rank for rank, result in enumerate(results) if result["own lines"]]
    assert f"is not finite on rank {rank} (" in line
