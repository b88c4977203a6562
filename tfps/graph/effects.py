"""Checks behavior of private TensorFlow names that would otherwise fail silently.

Importing tf_private.py checks that the names exist; this module checks that they still do what tfps needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.tf_private import SUPPORTED, made_by_generator, set_read_only_inputs


def orders_what_is_not_only_read() -> bool:
    """Whether a later use of a variable waits for a call that takes it and declares no read-only inputs."""
    return _second_waits(lambda resource: None, only_read=[])


def leaves_unordered_what_is_only_read() -> bool:
    """Whether calls that enqueue to one queue run in any order if they declare it read-only."""
    return not _second_waits(lambda queue: tf.raw_ops.QueueEnqueueV2(handle=queue, components=[0]), only_read=[0])


def finds_generators() -> bool:
    """Whether batches made by a Python generator are told apart from batches that TensorFlow makes of its rows."""
    made = tf.data.Dataset.from_generator(lambda: iter([[0]]), output_signature=tf.TensorSpec([None], tf.int64))
    return made_by_generator(made.prefetch(1)) and not made_by_generator(made.batch(1))


@functools.cache
def check_effects() -> None:
    """Runs these checks when a process creates its first strategy; takes 0.1 s.

    Raises:
        UnsupportedError: one fails; the message says which versions are supported.
    """
    with tf.init_scope():
        for effect, without in {
            orders_what_is_not_only_read: "variables could be read before their update",
            leaves_unordered_what_is_only_read: "gradients would wait for each other",
            finds_generators: "workers would get whole batches of a generator in turn, not their rows of each",
        }.items():
            if not effect():
                raise UnsupportedError(
                    f"tfps supports {SUPPORTED}; TensorFlow {tf.__version__} does not fit: {without} "
                    f"({effect.__name__} is False)"
                )


def _second_waits(uses: Callable[[tf.Tensor], object], only_read: list[int]) -> bool:
    """Whether TensorFlow makes the second of two calls of `uses`, with read-only inputs `only_read`, wait."""
    resource = tf.TensorSpec([], tf.resource)

    @tf.function(autograph=False, input_signature=[resource])
    def tfps_use(resource: tf.Tensor) -> tf.Tensor:
        uses(resource)
        return tf.constant(True)

    calls: list[tf.Operation] = []

    @tf.function(autograph=False, input_signature=[resource])
    def tfps_two_uses(resource: tf.Tensor) -> None:
        for _ in range(2):
            call = tfps_use.get_concrete_function()(resource)
            set_read_only_inputs(call, only_read)
            calls.append(call.op)

    tfps_two_uses.get_concrete_function()
    first, second = calls
    return first in second.control_inputs
