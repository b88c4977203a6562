"""Cache files: one for each worker, or that of one process for all. Jobs: tests/integration/test_programs.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

from tfps.input.caches import advice, cache_apart, reads_whole
from tfps.membership.view import View
from tfps.strategy.patches import install_all


@pytest.fixture(autouse=True)
def _worker_1_of_2() -> Iterator[None]:
    install_all()
    cache_apart(1, View.first(2), changes=False)
    yield
    cache_apart(0, View.first(1), changes=False)


def test_a_worker_writes_a_file_of_its_own_and_reads_it_again(tmp_path: Path) -> None:
    for data in (5, 7):  # the second time it is read from the file
        cached = tf.data.Dataset.range(data).cache(str(tmp_path / "file"))
        assert list(cached.as_numpy_iterator()) == [0, 1, 2, 3, 4]
        assert not reads_whole(cached.batch(2))
    assert {each.name for each in tmp_path.iterdir()} == {"file.1of2.index", "file.1of2.data-00000-of-00001"}


def test_a_file_that_one_process_has_filled_is_read_but_not_one_that_it_is_filling(tmp_path: Path) -> None:
    cache_apart(0, View.first(1), changes=False)
    alone = tf.data.Dataset.range(5).cache(str(tmp_path / "file"))
    fills = iter(alone)
    next(fills)
    cache_apart(1, View.first(2), changes=False)
    assert not reads_whole(tf.data.Dataset.range(7).cache(str(tmp_path / "file")))
    list(fills)
    cached = tf.data.Dataset.range(7).cache(str(tmp_path / "file")).shuffle(9).batch(2)
    assert sorted(cached.unbatch().as_numpy_iterator()) == [0, 1, 2, 3, 4]
    assert reads_whole(tf.data.Dataset.zip(tf.data.Dataset.range(5), cached))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cache_in_memory_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    list(tf.data.Dataset.range(5).cache())
    list(tf.data.Dataset.range(5).cache(""))
    assert not list(tmp_path.iterdir())


def test_where_the_number_of_workers_changes_the_file_does_not_depend_on_it(tmp_path: Path) -> None:
    cache_apart(1, View.first(2), changes=True)
    list(tf.data.Dataset.range(5).cache(str(tmp_path / "file")))
    assert (tmp_path / "file.1.index").exists()


def test_an_error_about_a_locked_file_says_what_to_do(tmp_path: Path) -> None:
    open_ = iter(tf.data.Dataset.range(5).cache(str(tmp_path / "file")))
    next(open_)
    with pytest.raises(tf.errors.AlreadyExistsError) as error:
        list(tf.data.Dataset.range(5).cache(str(tmp_path / "file")))
    assert "delete the lock file" in advice(str(error.value))
    assert not advice("another error")
