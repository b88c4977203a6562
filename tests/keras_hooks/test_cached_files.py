"""Datasets that are cached in files: one for each rank of a job."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from tfps.keras_hooks.cached_files import begin_caches
from tfps.strategy.patches import install_all
from tfps.types import Value


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    install_all()
    yield
    begin_caches(0, 1)


def cached(name: Value) -> list[int]:
    return [int(each) for each in tf.data.Dataset.range(3).cache(name)]


@pytest.mark.parametrize("kind", [str, Path, tf.constant], ids=["str", "Path", "tensor"])
def test_each_rank_has_a_file_of_its_own(kind: Callable[[str], Value], tmp_path: Path) -> None:
    for rank, workers in [(0, 2), (1, 2), (1, 3)]:
        begin_caches(rank, workers)
        for _ in range(2):  # written, and read
            assert cached(kind(str(tmp_path / "cache"))) == [0, 1, 2]
    names = {file.name for file in tmp_path.glob("*.index")}
    assert names == {f"cache.rank{ranks}.index" for ranks in ("0of2", "1of2", "1of3")}


def test_one_worker_has_the_file_that_the_program_names(tmp_path: Path) -> None:
    assert cached(str(tmp_path / "cache")) == [0, 1, 2]
    assert (tmp_path / "cache.index").exists()


def test_caches_in_memory_stay_so() -> None:
    begin_caches(1, 2)
    assert cached("") == [0, 1, 2]
    assert [int(each) for each in tf.data.Dataset.range(3).cache()] == [0, 1, 2]
