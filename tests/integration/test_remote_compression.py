"""Update on the server with compression, in several processes: ranks bitwise equal, checkpoints whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_compression

from tfps.types import Value

SERVER = {"TFPS_UPDATE": "server"}
TRAINS = ["trained", "uneven", "accumulated"]
SAVES = ["checkpointed", "saved_by_one_rank", "backed_up"]
LONG = pytest.mark.long
pytestmark = pytest.mark.timeout(1200)


def run(
    folder: Path, names: list[str], compression: str, workers: int = 2, pservers: int = 2, **more: str
) -> list[dict[str, dict[str, Value]]]:
    return test_compression.run(folder, names, compression, workers, pservers, **SERVER, **more)


@pytest.mark.long
def test_adam_with_int8_trains_saves_and_goes_on_bitwise(tmp_path: Path) -> None:
    found = run(tmp_path, ["trained", "checkpointed"], "int8", OPTIMIZER="adam")
    test_compression.check(found)
    loss = found[0]["trained"]["loss"]
    assert loss[-1] < 0.7 * loss[0]


@LONG
@pytest.mark.parametrize(
    ("codec", "optimizer", "workers", "devices"),
    [
        *(("int8", "sgd", 2, 1), ("bfloat16", "adam", 2, 2), ("int8", "adam", 3, 1), ("bfloat16", "sgd", 3, 1)),
        *(("topk:0.05", "sgd", 2, 1), ("onebit", "sgd", 2, 2), ("topk:0.05", "adam", 3, 1), ("onebit", "adam", 2, 1)),
        *(("float16", "adam", 2, 1), ("int8,*/bias=none,dense/kernel=bfloat16", "adam", 2, 1)),
    ],
)
def test_ranks_end_bitwise_equal_and_near_no_compression(
    codec: str, optimizer: str, workers: int, devices: int, tmp_path: Path
) -> None:
    found = run(tmp_path / "codec", TRAINS, codec, workers, OPTIMIZER=optimizer, DEVICES=str(devices))
    test_compression.check(found)
    loss = found[0]["trained"]["loss"]
    assert loss[-1] < 0.7 * loss[0]
    if not codec.startswith(("topk", "onebit")):  # whose weights are some steps late
        plain = run(tmp_path / "plain", ["trained"], "none", workers, OPTIMIZER=optimizer)[0]["trained"]["loss"]
        assert abs(loss[-1] / plain[-1] - 1) < 0.02


@LONG
@pytest.mark.parametrize(
    ("codec", "optimizer", "workers"),
    [("int8", "sgd", 2), ("bfloat16", "adam", 3), ("topk:0.05", "adam", 2), ("onebit", "sgd", 3)],
)
def test_checkpoints_have_what_pservers_have_and_go_on_bitwise(
    codec: str, optimizer: str, workers: int, tmp_path: Path
) -> None:
    found = run(tmp_path, SAVES, codec, workers, OPTIMIZER=optimizer)
    test_compression.check(found)
    assert "tfps_error_feedback.npz" in found[0]["backed_up"]["own files"]


@LONG
@pytest.mark.parametrize(("codec", "workers", "pservers"), [("onebit", 1, 1), ("bfloat16", 3, 1), ("int8", 2, 3)])
def test_a_checkpoint_is_restored_in_a_job_of_another_size(
    codec: str, workers: int, pservers: int, tmp_path: Path
) -> None:
    where = str(tmp_path / "checkpoint")
    one = run(tmp_path / "one", ["written"], codec, CHECKPOINT=where)
    test_compression.check(one)
    other = run(tmp_path / "other", ["read"], codec, workers, pservers, CHECKPOINT=where)
    test_compression.check(other)
    assert other[0]["read"]["ranks held"].tobytes() == one[0]["written"]["ranks held"].tobytes()


@LONG
def test_a_weight_that_one_rank_changes_alone_fails_the_job_by_name(tmp_path: Path) -> None:
    for result in run(tmp_path, ["written_alone"], "int8", TFPS_CHECK_EVERY="2"):
        text = result["written_alone"]["own refused"]
        assert "the weights after the update have checksum" in text, result
