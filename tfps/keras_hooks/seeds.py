"""Gives each replica different random numbers: with equal ones, n replicas would draw one n-th of the noise.

Stored state stays equal everywhere: seed generators have rank 0's state, which is checkpointed and restored. Only the
drawn seed has the replica id mixed in. Replica 0 draws what a single process would.

Tested in tests/integration/test_semantics.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfps.types import Value

_APART = 0x9E3779B1  # odd, so that no two ranks get the same seed
_SEEDS = 2**31 - 1  # number of seeds that TensorFlow distinguishes


@functools.cache
def draw_apart(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras mix the replica id into its seeds, in replicas of a `strategy_class`; done once per process."""
    draw = keras.random.SeedGenerator.next

    @functools.wraps(draw)
    def draw_in_replica(self: keras.random.SeedGenerator, *arguments: object, **options: object) -> Value:
        seed = draw(self, *arguments, **options)
        context = tf.distribute.get_replica_context()
        if context is None or not isinstance(context.strategy, strategy_class) or not tf.is_tensor(seed):
            return seed
        replica = context.strategy.extended.draws_as(context)
        if replica == 0:
            return seed
        return tf.random.experimental.stateless_fold_in(seed, tf.constant(replica, seed.dtype))

    keras.random.SeedGenerator.next = draw_in_replica


@contextlib.contextmanager
def stateful_apart(graph: tf.Graph, rank: int) -> Iterator[None]:
    """In the block, `tf.random.normal` and the like, traced in `graph`, draw different numbers on each rank.

    Replicas of one worker have separate ops, whose seeds TensorFlow makes different. Without `tf.random.set_seed`
    processes differ anyway.
    """
    before = graph.seed
    if before is not None:
        graph.seed = (before + rank * _APART) % _SEEDS if rank else before
    try:
        yield
    finally:
        graph.seed = before
