"""Training with compression, in several processes: ranks bitwise equal, checkpoints whole, accuracy kept."""

from __future__ import annotations

import re
import statistics
import subprocess
from pathlib import Path

import numpy as np
import processes
import pytest
from launching import ROOT, command, environment

from tfps.types import Value

CODECS = ["bfloat16", "float16", "int8", "topk:0.05", "onebit", "int8,*/bias=none,dense/kernel=bfloat16"]
TIMEOUT_S = 550.0
SMALL = {"TFPS_SLICE_BYTES": "8192", "TFPS_WINDOW_BYTES": "16384", "TFPS_DETERMINISTIC": "1"}
SEEDS = range(1, 6)
pytestmark = pytest.mark.timeout(1200)


def run(
    folder: Path, names: list[str], compression: str, workers: int = 2, pservers: int = 2, **more: str
) -> list[dict[str, dict[str, Value]]]:
    """What each rank's programs end with."""
    settings = {**SMALL, "TFPS_COMPRESSION": compression, **more}
    programs = [f"programs_compression.{name}" for name in names]
    return processes.ran(folder, programs, settings, workers, pservers, TIMEOUT_S)


def check(ranks: list[dict[str, dict[str, Value]]]) -> None:
    """Ranks bitwise equal, no errors."""
    for name, first in ranks[0].items():
        for rank, results in enumerate(ranks):
            assert "error" not in results[name], f"{name}, rank {rank}:\n{results[name]['error']}"
            for key in (key for key in first if not key.startswith("own")):
                mine, other = np.asarray(first[key]), np.asarray(results[name][key])
                assert mine.tobytes() == other.tobytes(), f"{name}: {key} differs on rank {rank}"


@pytest.mark.long  # test_combinations.py and the differential tester draw such programs
@pytest.mark.parametrize("codec", CODECS)
def test_ranks_end_bitwise_equal_and_near_no_compression(codec: str, tmp_path: Path) -> None:
    programs = ["trained", "uneven", "accumulated"]
    found = run(tmp_path / "codec", programs, codec, DEVICES="2" if codec == "onebit" else "1")
    check(found)
    loss = found[0]["trained"]["loss"]
    plain = run(tmp_path / "plain", ["trained"], "none")[0]["trained"]["loss"]
    assert loss[-1] < 0.7 * loss[0]
    assert abs(loss[-1] / plain[-1] - 1) < (0.02 if codec in ("bfloat16", "float16", "int8") else 0.5)


@pytest.mark.long  # the differential tester draws such programs
@pytest.mark.parametrize("codec", ["int8", "topk:0.05", "onebit"])
def test_checkpoints_hold_the_residuals_and_go_on_bitwise(codec: str, tmp_path: Path) -> None:
    found = run(tmp_path, ["checkpointed", "saved_by_one_rank", "backed_up"], codec)
    check(found)
    assert "tfps_error_feedback.npz" in found[0]["backed_up"]["own files"]


@pytest.mark.long
@pytest.mark.parametrize(("workers", "pservers"), [(1, 1), (3, 1), (2, 3)])
def test_a_checkpoint_is_restored_in_a_job_of_another_size(workers: int, pservers: int, tmp_path: Path) -> None:
    """All residuals are there again, on rank 0."""
    where = str(tmp_path / "checkpoint")
    one = run(tmp_path / "one", ["written"], "onebit", CHECKPOINT=where)
    check(one)
    other = run(tmp_path / "other", ["read"], "onebit", workers=workers, pservers=pservers, CHECKPOINT=where)
    check(other)
    assert other[0]["read"]["ranks held"].tobytes() == one[0]["written"]["ranks held"].tobytes()
    assert run(tmp_path / "none", ["read"], "int8", CHECKPOINT=where)[0]["read"].keys() == {"ranks held"}


def accuracy(codec: str, program: Path) -> float:
    """What `program`, one like examples/digits.py, prints with two workers and two pservers, in percent."""
    arguments = command("--workers", 2, "--pservers", 2, program)
    variables = environment(TFPS_COMPRESSION=codec, TFPS_SHARED_MEMORY="1", TF_CPP_MIN_LOG_LEVEL="2")
    found = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    match = re.search(r"test_accuracy=([0-9.]+)", found.stdout)
    assert match, found.stdout + found.stderr
    return 100 * float(match[1])


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_digits_example_stays_as_accurate(tmp_path: Path) -> None:
    """Within 0.1 points for the 16-bit codecs, 0.5 for the others, in the mean over seeds, as far as so many can tell:
    360 images are tested, so one of them is 0.28 points, and two standard errors of the differences are allowed.
    """
    source = (ROOT / "examples" / "digits.py").read_text(encoding="utf-8")
    found: dict[str, list[float]] = {}
    for codec in ("none", "bfloat16", "float16", "int8", "topk:0.01", "onebit"):
        runs = found[codec] = []
        for seed in SEEDS:
            program = tmp_path / f"digits{seed}.py"
            program.write_text(source.replace("set_random_seed(1)", f"set_random_seed({seed})"), encoding="utf-8")
            runs.append(accuracy(codec, program))
        print(f"{codec}: {statistics.fmean(runs):.2f} % ({', '.join(f'{each:.2f}' for each in runs)})", flush=True)
    for codec, runs in found.items():
        lost = [plain - each for plain, each in zip(found["none"], runs, strict=True)]
        error = statistics.stdev(lost) / len(lost) ** 0.5
        allowed = 0.1 if codec.endswith("float16") else 0.5
        assert statistics.fmean(lost) <= allowed + 2 * error, (codec, found)
        assert statistics.fmean(lost) < 1.0, (codec, found)
