"""Digests of first batches: what they are taken of, and what ranks conclude from them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

from tfps.errors import MismatchError
from tfps.input import first_batches
from tfps.input.first_batches import NOTHING, FirstBatches, check, digest, is_same_on_all
from tfps.input.whole_batches import filtered
from tfps.types import Array, Batches

X, Y = np.arange(20, dtype="float32")[:, None], np.arange(20) % 3
ORDER = np.random.default_rng(0).permutation(20)


def first_of(first: FirstBatches, dataset: tf.data.Dataset) -> tuple[Batches, int]:
    """An iterator that has read its first batch, and its digest."""
    iterator = iter(dataset)
    first.begin()
    next(iterator)
    return iterator, first.end()


def test_a_watched_dataset_has_the_same_batches_and_each_iterator_one_digest_also_beside_an_older_one() -> None:
    first = FirstBatches()
    plain = tf.data.Dataset.from_tensor_slices({"x": X, "name": Y.astype(str), "none": [[]] * 20}).batch(8)
    watched = filtered(plain, first.look())
    assert watched.element_spec == plain.element_spec
    assert int(watched.cardinality()) == 3
    assert [each["x"].numpy().tolist() for each in watched] == [each["x"].numpy().tolist() for each in plain]
    older, found = first_of(first, watched)
    assert found != NOTHING
    first.begin()
    next(older)  # its second batch
    assert first.end() == NOTHING
    assert first_of(first, watched)[1] == found
    assert first_of(first, filtered(plain.skip(1), first.look()))[1] not in (NOTHING, found)
    assert int(filtered(plain.repeat(), first.look()).cardinality()) == tf.data.experimental.INFINITE_CARDINALITY


def test_two_iterators_that_read_at_once_have_no_digest() -> None:
    first = FirstBatches()
    watched = filtered(tf.data.Dataset.from_tensor_slices(X).batch(8), first.look())
    first.begin()
    first.begin()
    next(iter(watched))
    assert [first.end(), first.end()] == [NOTHING, NOTHING]
    assert first_of(first, watched)[1] != NOTHING


@pytest.mark.parametrize(
    ("theirs", "fails"),
    [
        pytest.param([X, Y], False, id="the same"),
        pytest.param([X[ORDER], Y[ORDER]], True, id="another order"),
        pytest.param([X + 1, Y], False, id="augmented inputs"),
        pytest.param([X, Y + 1], False, id="augmented targets"),
        pytest.param([X[ORDER], np.zeros(20)], True, id="other targets"),
    ],
)
def test_ranks_have_the_same_data_if_one_part_that_tells_an_order_is_the_same(theirs: list[Array], fails: bool) -> None:
    digests = np.array([digest([X, Y]), digest([X, Y]), digest(theirs)])
    if not fails:
        check(digests)
        return
    with pytest.raises(MismatchError, match="rank 2 has other data than rank 0"):
        check(digests)


def test_parts_that_are_the_same_in_every_order_tell_nothing() -> None:
    weights = np.ones(20)
    with pytest.raises(MismatchError):
        check(np.array([digest([X, Y, weights]), digest([X[ORDER], Y[ORDER], weights])]))
    with pytest.raises(MismatchError):
        check(np.array([digest([X, weights]), digest([X[ORDER], weights])]))


def test_data_of_their_own_may_differ_and_one_warning_says_that_they_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first_batches._warn_once.cache_clear()
    own, other = first_batches.of_own([tf.constant(X)]), first_batches.of_own([tf.constant(X[ORDER])])
    with caplog.at_level(logging.WARNING, "tfps"):
        check(np.array([own, other]))
        check(np.array([own, NOTHING]))
        check(np.array([own, digest([X])]))
        assert not caplog.records
        check(np.array([own, own]))
        check(np.array([own, own]))
    assert len(caplog.records) == 1


def test_files_that_tensorflow_divides_are_not_the_same_on_all(tmp_path: Path) -> None:
    path = str(tmp_path / "lines")
    lines = tf.data.TextLineDataset([path])
    nested = tf.data.Dataset.from_tensor_slices([path]).interleave(lambda each: tf.data.TFRecordDataset(each))
    read = tf.data.Dataset.from_tensor_slices([path]).map(tf.io.read_file).batch(1)
    assert [is_same_on_all(each) for each in (lines.batch(2), nested.map(tf.identity), read)] == [False, False, True]
    policies = tf.data.experimental.AutoShardPolicy
    for policy, same in ((policies.DATA, True), (policies.OFF, False), (policies.FILE, False)):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        assert is_same_on_all(lines.with_options(options)) == same
