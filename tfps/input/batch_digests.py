"""Digests of batches, which ranks compare: with different data, their parts of a batch overlap.

Compared are the first batch of each iterator and one of each `check_every` after it. What must be equal and what may
differ, `same_data` says.

Tested in tests/input/test_batch_digests.py and tests/integration/test_unseeded.py.
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
from tfps.input.global_batches import Predicate
from tfps.input.same_data import Same
from tfps.types import Array, Structure, Value

logger = logging.getLogger("tfps")
NOTHING = 0  # instead of a digest
_UNWATCHED = -1  # number of an iterator that nobody asks about
_BITS, _PARTS = 21, 3  # of a digest: targets and weights, inputs that must be equal, inputs that need not be
HASH = hash("tfps")  # differs between processes unless PYTHONHASHSEED is set, and so does the order of a set


class BatchDigests:
    """Takes digests of the batches that each iterator over one dataset makes. Thread-safe.

    Args:
        sames: for each tensor with bytes in a batch, composite ones expanded, whether ranks must have it alike.
        every: a digest is taken of the batches number 0, `every`, 2 `every`, ... of each iterator.
    """

    def __init__(self, sames: Sequence[Same], every: int) -> None:
        self._sames, self._every = sames, every
        self._lock = threading.Lock()  # guards all below
        self._waiting = 0  # readers that wait for their first batch
        self._several = False  # so that it is not known whose an iterator is
        self._begun: list[int] = []  # iterators that have made their first batch since a reader waits for it
        self._digests: dict[int, dict[int, int]] = {}  # by iterator, then by batch
        self._iterators = 0  # that have been given a number

    def look(self) -> Predicate:
        """Returns what looks at each batch of a dataset."""

        def note(iterator: Array, batch: Array, *tensors: Array) -> np.int64:
            number = int(iterator) if batch else self._number()
            if number in self._digests:
                found = digest(tensors, self._sames)
                with self._lock:
                    if (own := self._digests.get(number)) is not None:
                        own[int(batch)] = found
            return np.int64(number)

        def look(*batch: Structure) -> tf.Tensor:
            keys, zero = tf.constant([0, 1], tf.int64), tf.constant(0, tf.int64)
            # The kernel of this op, which owns the table, belongs to the iterator.
            table = tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64)
            values = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=keys, default_value=zero)
            count, iterator = tf.unstack(tf.ensure_shape(values, [2]))
            iterator = tf.cond(
                tf.equal(count % self._every, 0),
                lambda: tf.ensure_shape(tf.numpy_function(note, [iterator, count, *_flat(batch)], tf.int64), []),
                lambda: tf.identity(iterator),
            )
            inserted = tf.raw_ops.LookupTableInsertV2(
                table_handle=table, keys=keys, values=tf.stack([count + 1, iterator])
            )
            with tf.control_dependencies([inserted]):
                return tf.constant(True)

        return look

    def begin(self) -> None:
        """Notes that a reader is about to read the first batch of its iterator."""
        with self._lock:
            self._waiting += 1
            self._several = self._several or self._waiting > 1

    def end(self) -> int:
        """Notes that it has; returns the number of its iterator for `take`."""
        with self._lock:
            self._waiting -= 1
            known = len(self._begun) == 1 and not self._several
            iterator = self._begun[0] if known else _UNWATCHED
            if not known:
                for each in self._begun:
                    self._digests.pop(each, None)
            if not self._waiting:
                self._several = False
                self._begun.clear()
            return iterator

    def take(self, iterator: int, batch: int) -> int:
        """Returns the digest of a batch that an iterator has made; NOTHING if none was taken. Forgets it."""
        with self._lock:
            return self._digests.get(iterator, {}).pop(batch, NOTHING)

    def forget(self, iterator: int) -> None:
        """Takes no more digests of an iterator."""
        with self._lock:
            self._digests.pop(iterator, None)

    def of_global_batch(self, batch: Structure) -> int:
        """Returns the digest of a batch that all ranks make."""
        return digest([each.numpy() for each in _flat(batch)], self._sames)

    def _number(self) -> int:
        with self._lock:
            if not self._waiting:
                return _UNWATCHED
            self._iterators += 1
            self._begun.append(self._iterators)
            self._digests[self._iterators] = {}
            return self._iterators


def of_own(group: Sequence[Structure]) -> int:
    """Returns the digest of a batch that this rank has made for itself, given one part for each local replica."""
    return -1 - digest([each.numpy() for each in _flat(list(group))])


def digest(tensors: Sequence[Array], sames: Sequence[Same] = ()) -> int:
    """Returns a number of `_PARTS` times `_BITS` bits, the lowest of which says whether a part can tell an order.

    `sames` says to which part each tensor belongs; without it all must be equal.
    """
    found = 0
    for index, part in enumerate((Same.TARGET, Same.INPUT, Same.MADE)):
        own = [each for at, each in enumerate(tensors) if (sames[at] if sames else Same.INPUT) == part]
        found += _digest(own) << (_BITS * index)
    return found


def _digest(tensors: Sequence[Array]) -> int:
    checksum, tells = 0, False
    for each in map(np.asarray, tensors):
        data = repr(each.tolist()).encode() if each.dtype == object else np.ascontiguousarray(each).reshape(-1)
        checksum = zlib.crc32(data if isinstance(data, bytes) else data.view(np.uint8).data, checksum)
        tells = tells or (each.ndim > 0 and len(each) > 1 and any(bool(np.any(row != each[0])) for row in each[1:]))
    return (checksum >> (33 - _BITS) << 1) + tells if tensors else 0


def check(
    digests: Array, ranks: Sequence[int] = (), batch: int = 0, *, joins: bool = False, hashes: Array | None = None
) -> None:
    """Compares the ranks' digests of what should be one batch, or of their own ones, which should differ.

    Args:
        digests: int64, one for each rank; NOTHING where it is not known.
        ranks: their ranks.
        batch: its number in the iterator.
        joins: a worker joins with this batch.
        hashes: what each rank has as `HASH`.

    Raises:
        MismatchError: ranks have made different batches.
    """
    known = np.flatnonzero(digests != NOTHING)
    if len(known) < 2 or len({bool(digests[at] < 0) for at in known}) > 1:
        return
    names = [int(ranks[int(at)]) if len(ranks) else int(at) for at in known]
    if digests[known[0]] < 0:
        _look_for_copies(digests[known], names)
        return
    whole = [int(digests[at]) for at in known]
    parts = [[each >> (_BITS * index) & (2**_BITS - 1) for each in whole] for index in range(_PARTS)]
    targets, inputs, made = (len(set(part)) == 1 for part in parts)
    told = any(part[0] & 1 for part in parts[:2])  # by what is equal, whether rows are in one order
    if targets and inputs and (made or told):
        return
    what = "targets or sample weights" if not targets else "inputs"
    part = parts[0 if not targets else 1 if not inputs else 2]
    other = next(at for at, each in enumerate(part) if each != part[0])
    if joins:
        raise MismatchError(
            f"a worker that joins must make the batches that the others make, but in batch {batch} rank {names[other]} "
            f"has other {what} than rank {names[0]}. A PyDataset must give the same batch for the same number, and a "
            "generator yield the same batches when it begins anew: let them draw from random generators of their own "
            "with a seed, not from numpy's or Python's"
        )
    hint = (
        "String hashes differ between these processes, so a set of strings has another order in each: set "
        "PYTHONHASHSEED=0 on all ranks, or sort what a program numbers. "
        if hashes is not None and hashes[known[0]] != hashes[known[other]]
        else ""
    )
    raise MismatchError(
        f"{'the first batch' if not batch else f'batch {batch}'} of an epoch must have the same data on all ranks, but "
        f"rank {names[other]} has other {what} than rank {names[0]}: each rank makes the global batch and trains on "
        f"its own rows, so rows would be missing and others used twice. {hint}Make data alike on all ranks: create it "
        "after tfps.Strategy, or call keras.utils.set_random_seed(1) first; give random generators of your own a seed. "
        "For data that is meant to differ between ranks use AutoShardPolicy.FILE or OFF, or "
        "strategy.distribute_datasets_from_function. Config(check_every=0) or TFPS_CHECK_EVERY=0 turns this check off"
    )


def _look_for_copies(digests: Array, ranks: Sequence[int]) -> None:
    """Warns if half of the ranks or more, which made batches of their own, have made the same one.

    Not all: where a batch of all does not divide by the workers, the first of them get one row more.
    """
    values, counts = np.unique(digests, return_counts=True)
    digest, count = -1 - int(values[np.argmax(counts)]), int(counts.max())
    if count > 1 and 2 * count >= len(ranks) and (digest | digest >> _BITS) & 1:
        alike = [rank for rank, each in zip(ranks, digests, strict=True) if each == -1 - digest]
        _warn_once("all ranks" if count == len(ranks) else f"ranks {', '.join(map(str, alike))}")


@functools.cache
def _warn_once(who: str) -> None:
    logger.warning(
        "tfps: %s have made the same first batch, each for itself (AutoShardPolicy.OFF, or "
        "distribute_datasets_from_function): they train on the same rows. Give each rank its own data "
        "(dataset.shard, InputContext), or its own seed (shuffle(n, seed=strategy.rank)). This is logged once",
        who,
    )


def _flat(batch: Structure) -> list[tf.Tensor]:
    """The tensors of a batch that have bytes; of a composite tensor one after the other."""
    return [each for each in tf.nest.flatten(batch, expand_composites=True) if _has_bytes(each)]


def _has_bytes(value: Value) -> bool:
    return tf.is_tensor(value) and value.dtype not in (tf.resource, tf.variant)
