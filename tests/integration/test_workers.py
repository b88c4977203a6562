"""Several worker processes: equal to each other bitwise, and to one process on the global batch within rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import processes
import pytest

QUICK = ["adam", "embedding"]
PROGRAMS = [*QUICK, "adafactor"]
SMALL = {"TFPS_SLICE_BYTES": "4096", "TFPS_WINDOW_BYTES": "8192"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], dict[str, np.ndarray]]:
    """The weights that one process without a strategy ends with."""

    @functools.cache
    def weights(*programs: str) -> dict[str, np.ndarray]:
        out = tmp_path_factory.mktemp("alone") / "weights.npz"
        processes.outputs([processes.start("train.py", str(out), *programs, environment={})])
        return dict(np.load(out))

    return lambda programs: weights(*programs)


@pytest.fixture
def servers(workers: int) -> Iterator[list[str]]:
    with processes.pservers(2, workers) as addresses:
        yield addresses


def train(
    addresses: list[str], workers: int, where: Path, programs: Sequence[str], **environment: str
) -> list[dict[str, np.ndarray]]:
    files = [where / f"{rank}.npz" for rank in range(workers)]
    arguments = [[str(file), *programs] for file in files]
    with processes.started("train.py", addresses, workers, arguments, **environment) as running:
        processes.outputs(running)
    return [dict(np.load(file)) for file in files]


@pytest.mark.parametrize(
    ("workers", "devices", "programs"),
    [
        pytest.param(2, 2, QUICK, id="2-2"),
        *(
            pytest.param(*each, PROGRAMS, id="-".join(map(str, each)), marks=pytest.mark.long)
            for each in ((2, 1), (3, 1))
        ),
    ],
)
def test_workers_end_bitwise_equal_and_close_to_one_process_on_the_global_batch(
    workers: int,
    devices: int,
    programs: list[str],
    servers: list[str],
    alone: Callable[[Sequence[str]], dict[str, np.ndarray]],
    tmp_path: Path,
) -> None:
    first, *others = train(servers, workers, tmp_path, programs, **SMALL, DEVICES=str(devices))
    plain = alone(programs)
    assert [path.name for path in tmp_path.glob("*.logs")] == ["0.npz.logs"]  # rank 0 alone writes metrics
    for other in others:
        assert first.keys() == other.keys()
        for name in first:
            assert first[name].tobytes() == other[name].tobytes(), name
    assert first.keys() == plain.keys()
    for name, expected in plain.items():
        difference = np.abs(first[name] - expected).max() / np.abs(expected).max()
        # Adafactor divides by sums of squares of the gradients, which amplifies a different order of addition.
        assert difference < (1e-3 if name.startswith("adafactor") else 1e-5), f"{name}: {difference}"


TCP = {"TFPS_SHARED_MEMORY": "0", "TFPS_TRANSPORT": "tcp"}
GRPC = {"TFPS_SHARED_MEMORY": "0", "TFPS_TRANSPORT": "grpc"}


@pytest.mark.long
@pytest.mark.parametrize(("workers", "other"), [(2, TCP), (3, TCP), (2, GRPC)], ids=["2-tcp", "3-tcp", "2-grpc"])
def test_two_deterministic_runs_are_bitwise_equal(
    workers: int, other: dict[str, str], servers: list[str], tmp_path: Path
) -> None:
    runs = []
    for number, path in enumerate(({"TFPS_SHARED_MEMORY": "1"}, other)):  # whatever slices pass through
        where = tmp_path / str(number)
        where.mkdir()
        determined = {"TFPS_DETERMINISTIC": "1", **({"OP_DETERMINISM": "1"} if workers == 3 else {})}
        runs.append(train(servers, workers, where, ["embedding"], **path, **determined)[0])
    for name in runs[0]:
        assert runs[0][name].tobytes() == runs[1][name].tobytes(), name
