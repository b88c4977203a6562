"""Compares what layers have adapted to (vocabularies, terms' weights, boundaries, means) between ranks.

None of it is a variable that ranks share. Rank 0's initial values go to all ranks, but a lookup table or the constants
of Normalization stay each rank's own. If ranks have adapted them to different data, the same row means something else
on each.

Tested in tests/integration/test_programs.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfps.errors import MismatchError
from tfps.keras_hooks.agreed_logs import said_by_all
from tfps.keras_hooks.keras_private import layers_of
from tfps.types import Layer, Model

Digest = tuple[str, int, str]  # name of the layer, how many terms or numbers, a hash of them


_within: weakref.WeakSet[Model] = weakref.WeakSet()  # models that fit or are evaluated now


@contextlib.contextmanager
def compared_tables(strategy: tf.distribute.Strategy, model: Model) -> Iterator[None]:
    """Compares before the block, in which `model` is trained or evaluated; within another such block it does not.

    Raises:
        MismatchError: the layers of `model` have adapted to different data.
    """
    outermost = model not in _within
    if outermost and _compares(strategy):
        _compare(strategy, list(map(_digest, _adapted(model))))
    _within.add(model)
    try:
        yield
    finally:
        if outermost:
            _within.discard(model)


def _compares(strategy: tf.distribute.Strategy) -> bool:
    return bool(strategy.num_workers > 1 and strategy.config.check_every and strategy.extended.policy.together)


def _adapted(model: Model) -> Iterable[Layer]:
    kinds = keras.layers.Normalization, keras.layers.Discretization
    within: set[int] = set()  # of others that adapt, which have the same terms
    for layer in layers_of(model):
        if isinstance(layer, kinds) or (hasattr(layer, "get_vocabulary") and hasattr(layer, "adapt")):
            within.update(map(id, layers_of(layer)))
            if id(layer) not in within:
                yield layer


def _digest(layer: Layer) -> Digest:
    """Returns the digest of what `layer` has adapted to."""
    if isinstance(layer, keras.layers.Normalization):
        numbers = [np.asarray(each, np.float64) for each in (layer.mean, layer.variance) if each is not None]
        return layer.name, sum(each.size for each in numbers), _hash(each.tobytes() for each in numbers)
    if isinstance(layer, keras.layers.Discretization):
        boundaries = np.asarray(layer.bin_boundaries or [], np.float64)
        return layer.name, boundaries.size, _hash([boundaries.tobytes()])
    terms = layer.get_vocabulary(include_special_tokens=True)
    weights = [each.idf_weights_const for each in (layer, *layers_of(layer)) if hasattr(each, "idf_weights_const")]
    parts = [*(str(term).encode() + b"\n" for term in terms), *(np.asarray(each).tobytes() for each in weights)]
    return layer.name, len(terms), _hash(parts)


def _hash(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def _compare(strategy: tf.distribute.Strategy, own: list[Digest]) -> None:
    """Compares the digests of all ranks, which must all call this.

    Raises:
        MismatchError: they differ.
    """
    if not own:
        return
    first, *others = said_by_all(strategy, own)
    for rank, theirs in enumerate(others, 1):
        for (name, size, content), (_, their_size, their_content) in zip(first, theirs, strict=False):
            if (size, content) == (their_size, their_content):
                continue
            what = f"{size} terms or numbers on rank 0, {their_size} on rank {rank}"
            raise MismatchError(
                f"layer {name!r} has adapted to different data on the ranks: "
                f"{what if size != their_size else f'others on rank 0 than on rank {rank}'}; adapt it to the same data "
                "on all ranks, or pass what one rank has found (vocabulary, idf_weights, bin_boundaries, mean and "
                "variance)"
            )
