"""What the checks of api.py have in common: where a replica is, and what a result has to be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tfps
from tfps.types import Value

MEAN = tf.distribute.ReduceOp.MEAN
Check = Callable[[tfps.Strategy], None]


class Checks(list[Check]):
    """Of a module, in the order in which they are defined."""

    def add(self, function: Check) -> Check:
        """A decorator."""
        self.append(function)
        return function


def context() -> Value:
    return tf.distribute.get_replica_context()


def replica_id() -> tf.Tensor:
    return tf.cast(context().replica_id_in_sync_group, tf.float32)


def own_ids(strategy: tfps.Strategy) -> list[int]:
    """Ids of this worker's replicas."""
    local = strategy.num_replicas_in_sync // strategy.num_workers
    return list(range(strategy.rank * local, (strategy.rank + 1) * local))


def both(function: Callable[[], Value]) -> list[Value]:
    """What `function` returns eagerly, in a graph, and when that graph runs again."""
    graph = tf.function(function, autograph=False)
    return [function(), graph(), graph()]


def equal(actual: Value, expected: Value) -> None:
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def local(strategy: tfps.Strategy, value: Value) -> list[np.ndarray]:
    return [np.asarray(each) for each in strategy.experimental_local_results(value)]


def raises(kinds: type[Exception] | tuple[type[Exception], ...], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kinds as error:
        assert text in str(error), f"{text!r} is not in {error}"
    else:
        raise AssertionError(f"expected an error with {text!r}")
