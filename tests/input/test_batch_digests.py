"""Digests of batches: which are taken, what of, and what ranks conclude from them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

from tfps.errors import MismatchError
from tfps.input import batch_digests
from tfps.input.batch_digests import NOTHING, BatchDigests, check, digest
from tfps.input.global_batches import filtered
from tfps.input.same_data import Same, is_same_on_all, sames
from tfps.types import Array, Batches

X, Y = np.arange(20, dtype="float32")[:, None], np.arange(20) % 3
ORDER = np.random.default_rng(0).permutation(20)
INPUT, TARGET, MADE, RANDOM = Same.INPUT, Same.TARGET, Same.MADE, Same.RANDOM
EVERY = 2


def watched(dataset: tf.data.Dataset) -> tuple[BatchDigests, tf.data.Dataset]:
    digests = BatchDigests(sames(dataset), EVERY)
    return digests, filtered(dataset, digests.look())


def begun(digests: BatchDigests, dataset: tf.data.Dataset) -> tuple[Batches, int]:
    """An iterator that has read its first batch, and its number."""
    iterator = iter(dataset)
    digests.begin()
    next(iterator)
    return iterator, digests.end()


def test_digests_are_taken_of_every_second_batch_of_each_iterator_and_change_nothing() -> None:
    plain = tf.data.Dataset.from_tensor_slices({"x": X, "name": Y.astype(str), "none": [[]] * 20}).batch(4)
    digests, dataset = watched(plain)
    assert dataset.element_spec == plain.element_spec
    assert int(dataset.cardinality()) == 5
    assert [each["x"].numpy().tolist() for each in dataset] == [each["x"].numpy().tolist() for each in plain]
    iterators, numbers = zip(*(begun(digests, dataset) for _ in range(2)), strict=True)
    for iterator in (iterators[1], iterators[0], iterators[1], iterators[0]):  # by turns
        next(iterator)
    taken = [[digests.take(number, batch) for batch in range(3)] for number in numbers]
    first, third = (digests.of_global_batch(each) for at, each in enumerate(plain) if at in (0, 2))
    assert taken == [[first, NOTHING, third]] * 2
    assert NOTHING != first != third
    assert digests.take(numbers[0], 0) == NOTHING, "each is taken once"
    digests.forget(numbers[0])
    collected = [len(list(iterator)) for iterator in iterators]
    assert collected == [2, 2]
    assert [digests.take(number, 4) for number in numbers] == [NOTHING, digests.of_global_batch(list(plain)[4])]
    assert int(filtered(plain.repeat(), digests.look()).cardinality()) == tf.data.experimental.INFINITE_CARDINALITY


def test_an_iterator_that_reads_its_first_batch_beside_another_has_no_digests() -> None:
    digests, dataset = watched(tf.data.Dataset.from_tensor_slices(X).batch(8))
    digests.begin()
    digests.begin()
    next(iter(dataset))
    assert [digests.take(digests.end(), 0) for _ in range(2)] == [NOTHING, NOTHING]
    assert digests.take(begun(digests, dataset)[1], 0) != NOTHING


@pytest.mark.parametrize(
    ("kinds", "theirs", "refused"),
    [
        pytest.param([INPUT, TARGET], [X, Y], "", id="the same"),
        pytest.param([INPUT, TARGET], [X[ORDER], Y[ORDER]], "targets or sample weights", id="another order"),
        pytest.param([INPUT, TARGET], [X, Y + 1], "targets or sample weights", id="other targets"),
        pytest.param([INPUT, TARGET], [X + 1, Y], "inputs", id="other inputs"),
        pytest.param([MADE, TARGET], [X + 1, Y], "", id="inputs that Python has changed"),
        pytest.param([RANDOM, TARGET], [X + 1, Y], "", id="augmented inputs"),
        pytest.param([RANDOM, RANDOM], [X + 1, Y + 1], "", id="mixed rows"),
        pytest.param([MADE], [X + 1], "inputs", id="nothing tells an order"),
    ],
)
def test_ranks_must_have_all_alike_but_what_is_random(kinds: list[Same], theirs: list[Array], refused: str) -> None:
    own = digest([X, Y][: len(kinds)], kinds)
    digests = np.array([own, NOTHING, own, digest(theirs, kinds)])
    if not refused:
        check(digests)
        return
    with pytest.raises(MismatchError, match=f"batch 4 of an epoch .* rank 7 has other {refused} than rank 0"):
        check(digests, [0, 2, 5, 7], 4)


def test_targets_that_are_the_same_in_every_order_tell_nothing() -> None:
    with pytest.raises(MismatchError, match="other inputs"):
        check(np.array([digest(each, [MADE, TARGET]) for each in ([X, np.ones(20)], [X[ORDER], np.ones(20)])]))


def test_hashes_that_differ_are_named_as_a_cause() -> None:
    digests = np.array([digest([X]), digest([X[ORDER]])])
    with pytest.raises(MismatchError, match="PYTHONHASHSEED=0"):
        check(digests, hashes=np.array([1, 2]))
    with pytest.raises(MismatchError) as caught:
        check(digests, hashes=np.array([1, 1]))
    assert "PYTHONHASHSEED" not in str(caught.value)


def test_data_of_their_own_may_differ_and_one_warning_says_that_they_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch_digests._warn_once.cache_clear()
    own, other = batch_digests.of_own([tf.constant(X)]), batch_digests.of_own([tf.constant(X[ORDER])])
    with caplog.at_level(logging.WARNING, "tfps"):
        check(np.array([own, other]))
        check(np.array([own, NOTHING]))
        check(np.array([own, digest([X])]))
        same = batch_digests.of_own([tf.constant(np.ones_like(X))])  # whatever its order
        check(np.array([same, same]))
        check(np.array([own, own, other, same, NOTHING, same - 1]))
        assert not caplog.records
        check(np.array([own, own]))
        check(np.array([own, own]))
        check(np.array([own, other, own, NOTHING]))
    assert [each.getMessage().partition(" have ")[0] for each in caplog.records] == [
        "tfps: all ranks",
        "tfps: ranks 0, 2",
    ]


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
