"""Digests of each iterator's first batch, which ranks compare: with different data, their parts of a batch overlap.

Tested in tests/integration/test_unseeded.py.
"""

from __future__ import annotations

import functools
import logging
import threading
import zlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfps.errors import MismatchError
from tfps.graph.tf_private import reads_files
from tfps.input.whole_batches import Predicate
from tfps.types import Array, Batches, Structure, Value

logger = logging.getLogger("tfps")
NOTHING = 0  # instead of a digest
_BITS, _PARTS = 21, 3  # of a digest: the first tensor, the last one, those between
AutoShardPolicy = tf.data.experimental.AutoShardPolicy
DIVIDED = (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)  # by the strategy; else by the program or by files
_SEED = 20_250, 11  # any


def shard_policy(dataset: Batches) -> tf.data.experimental.AutoShardPolicy | None:
    """Returns how `dataset` is divided between workers; None if it is none of TensorFlow."""
    return dataset.options().experimental_distribute.auto_shard_policy if isinstance(dataset, tf.data.Dataset) else None


def is_same_on_all(dataset: Batches) -> bool:
    """Whether each rank makes the whole batches of `dataset` and takes its rows."""
    policy = shard_policy(dataset)
    return policy in DIVIDED and (policy == AutoShardPolicy.DATA or not reads_files(dataset))


class FirstBatches:
    """Takes the digest of the first batch that each iterator over one dataset makes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._readers = 0  # that wait for their first batch
        self._several = False  # so that it is not known whose a digest is
        self._found = NOTHING

    def look(self) -> Predicate:
        """Returns what looks at each batch of a dataset."""

        def note(*tensors: Array) -> bool:
            found = digest(tensors)
            with self._lock:
                self._found = found if self._readers else self._found
            return True

        def look(*batch: Structure) -> tf.Tensor:
            tensors = [each for each in tf.nest.flatten(batch, expand_composites=True) if _has_bytes(each)]
            # The state of a random op belongs to the iterator.
            return tf.cond(
                tf.equal(_drawn(tf.constant(0, tf.int64)), first),
                lambda: tf.ensure_shape(tf.numpy_function(note, tensors, tf.bool), []),
                lambda: tf.constant(True),
            )

        with tf.init_scope():
            first = int(next(iter(tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).map(_drawn))))
        return look

    def begin(self) -> None:
        """Notes that an iterator is about to read its first batch."""
        with self._lock:
            self._readers += 1
            self._several = self._several or self._readers > 1

    def end(self) -> int:
        """Notes that it has; returns the digest of its batch, NOTHING if not known."""
        with self._lock:
            self._readers -= 1
            found = NOTHING if self._several else self._found
            if not self._readers:
                self._several, self._found = False, NOTHING
            return found


def of_own(group: Sequence[Structure]) -> int:
    """Returns the digest of a batch that this rank has made for itself, given one part for each local replica."""
    tensors = [each for each in tf.nest.flatten(list(group), expand_composites=True) if _has_bytes(each)]
    return -1 - digest([each.numpy() for each in tensors])


def of_whole(batch: Structure) -> int:
    """Returns the digest of a batch that all ranks make."""
    flat = tf.nest.flatten(batch, expand_composites=True)
    return digest([each.numpy() for each in flat if _has_bytes(each)])


def digest(tensors: Sequence[Array]) -> int:
    """Returns a number of `_PARTS` times `_BITS` bits, the lowest of which says whether a part can tell an order."""
    parts = [tensors[:1], tensors[-1:] if len(tensors) > 1 else [], tensors[1:-1]]
    return sum(_digest(part) << (_BITS * index) for index, part in enumerate(parts))


def _digest(tensors: Sequence[Array]) -> int:
    checksum, tells = 0, False
    for each in map(np.asarray, tensors):
        data = repr(each.tolist()).encode() if each.dtype == object else np.ascontiguousarray(each).reshape(-1)
        checksum = zlib.crc32(data if isinstance(data, bytes) else data.view(np.uint8).data, checksum)
        tells = tells or (each.ndim > 0 and len(each) > 1 and any(bool(np.any(row != each[0])) for row in each[1:]))
    return (checksum >> (33 - _BITS) << 1) + tells if tensors else 0


def check(digests: Array, ranks: Sequence[int] = (), position: int = 0) -> None:
    """Compares the ranks' digests of what should be one batch, or of their own ones, which should differ.

    Raises:
        MismatchError: ranks have made different batches.
    """
    if (digests == NOTHING).any() or ((digests < 0) != (digests[0] < 0)).any():
        return
    own = digests[0] < 0
    whole = [-1 - int(each) if own else int(each) for each in digests]
    parts = [[each >> (_BITS * index) & (2**_BITS - 1) for each in whole] for index in range(_PARTS)]
    same = [len(set(part)) == 1 for part in parts]
    if own:
        if all(same) and any(part[0] & 1 for part in parts):
            _warn_once()
    elif not all(same) and not any(equal and part[0] & 1 for equal, part in zip(same, parts, strict=True)):
        ranks = ranks or range(len(digests))
        first, other = ranks[0], ranks[int(np.flatnonzero(digests != digests[0])[0])]
        if position:  # only the first batch of one who has joined is compared there
            raise MismatchError(
                f"a worker that joins must make the batches that the others make, but in batch {position} rank {other} "
                f"has other data than rank {first}. A PyDataset must give the same batch for the same number, and a "
                "generator yield the same batches when it begins anew: let them draw from random generators of their "
                "own with a seed, not from numpy's or Python's"
            )
        raise MismatchError(
            f"the first batch of an epoch must have the same data on all ranks, but rank {other} has other data than "
            f"rank {first}: each rank makes the whole batch and trains on its own rows of it, so rows would be missing "
            "and others used twice. Shuffle alike on all ranks: create datasets after tfps.Strategy, or call "
            "keras.utils.set_random_seed(1) first; give generators of your own a seed. For data that is meant to "
            "differ between ranks use AutoShardPolicy.FILE or OFF, or strategy.distribute_datasets_from_function. "
            "Config(check_every=0) or TFPS_CHECK_EVERY=0 turns this check off"
        )


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "tfps: all ranks have made the same first batch, each for itself (AutoShardPolicy.OFF, or "
        "distribute_datasets_from_function): they train on the same rows. Give each rank its own data "
        "(dataset.shard, InputContext), or its own seed (shuffle(n, seed=strategy.rank)). This is logged once"
    )


def _has_bytes(value: Value) -> bool:
    return tf.is_tensor(value) and value.dtype not in (tf.resource, tf.variant)


def _drawn(least: tf.Tensor) -> tf.Tensor:
    """Draws a number; the first one that an op with this seed draws is the same in each iterator."""
    most, shape = tf.constant(2**62, tf.int64), tf.constant([], tf.int32)
    return tf.raw_ops.RandomUniformInt(shape=shape, minval=least, maxval=most, seed=_SEED[0], seed2=_SEED[1])
