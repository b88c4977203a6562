"""Ctrl-C in `fit`, then `fit` again, with several workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import processes
import pytest

from tfps.pserver.server import ParameterServer


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    running = [ParameterServer("127.0.0.1", 0, workers=2) for _ in range(2)]
    yield [server.address for server in running]
    for server in running:
        server.stop()


def run(addresses: list[str], where: Path, *when: list[str]) -> list[tuple[int, str]]:
    arguments = [[str(where / f"{rank}.npz"), *when[rank]] for rank in range(2)]
    with processes.started("interrupted.py", addresses, 2, arguments) as running:
        return processes.finish(running)


def check(where: Path, results: list[tuple[int, str]], *when: str) -> None:
    """Ranks bitwise equal, and as plain Keras within rounding, interrupted `when`."""
    for code, output in results:
        assert code == 0, output
    processes.outputs([processes.start("interrupted.py", str(where / "plain.npz"), *when, environment={})])
    plain, first, second = (dict(np.load(where / f"{name}.npz")) for name in ("plain", "0", "1"))
    for name, expected in plain.items():
        assert first[name].tobytes() == second[name].tobytes()
        np.testing.assert_allclose(first[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_fit_after_an_interruption_at_the_same_step_of_all_ranks_does_what_plain_keras_does(
    addresses: list[str], tmp_path: Path
) -> None:
    check(tmp_path, run(addresses, tmp_path, ["3"], ["3"]), "3")


def test_fit_may_be_called_again_where_it_was_interrupted_before_the_other_ranks_had_come(
    addresses: list[str], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    arguments = [[str(tmp_path / f"{rank}.npz"), "declare", str(go)] for rank in range(2)]
    with processes.started("interrupted.py", addresses, 2, arguments) as running:
        for line in running[0].stdout or ():
            if line.strip() == "fit was interrupted":
                break
        go.touch()
        results = processes.finish(running)
    check(tmp_path, results, "declare")


@pytest.mark.long
def test_fit_after_an_interruption_at_different_steps_is_an_error_by_name_on_all_ranks(
    addresses: list[str], tmp_path: Path
) -> None:
    for code, output in run(addresses, tmp_path, ["3"], ["4"]):
        assert code == 1
        assert "fit was interrupted" in output
        assert "the workers must take batches in the same order" in output
        assert "Ctrl-C" in output
