"""Steps with a gradient that is not finite: all ranks skip them, or raise (`Config.on_nonfinite`).

The replicas agree before anything is updated: they add up, for each variable, bounds of the numbers that each of them
would add to the sum of gradients, NaN if one is not finite. Beside these, each replica says which of its own is the
first. So the sum is known to be finite without it, and a call of an optimizer's `apply` is a branch that runs or not.

Tested in tests/updates/test_nonfinite.py and tests/integration/test_nonfinite.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfps.errors import NonFiniteError, from_text, to_text
from tfps.exchange.interface import BucketSpec
from tfps.graph import ops as graph_ops
from tfps.graph.ops import HOST
from tfps.graph.shares import counted, reducing_gradients
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import UNDECLARED, Transfer
from tfps.types import Value, Variable
from tfps.updates.names import own_name

logger = logging.getLogger("tfps")
_NOTHING = BucketSpec(("skipped steps",), "gather", 0, "uint8", 0)
_LOGGED, _EVERY = 10, 100  # the first steps that are logged, then one in so many
_HALVES = {each.name: each for each in (tf.float16, tf.bfloat16)}  # by name of the codec that makes them infinite


class Guard(Transfer):
    """Lets updates run if their gradients are finite. Its messages say which were not, one per skipped step."""

    exchanges = False

    def __init__(self, runtime: Runtime, devices: int, factor: int, codec: Callable[[Variable], str], action: str):
        super().__init__(UNDECLARED, _NOTHING)
        self._runtime, self._raises, self._codec = runtime, action == "raise", codec
        self._devices, self._workers = devices, runtime.exchange.view.workers
        self._factor = factor  # by which a sum over workers is too large where they do not step together
        runtime.adopt(self, None)

    def run(
        self, update: Callable[[], object], gradients: Sequence[tuple[Value, Value]], variables: Sequence[Variable]
    ) -> None:
        """Calls `update` if the sums of `gradients` will be finite, on all replicas or on none; each must call it.

        `gradients` of `variables`, of TensorFlow: as the program gives them, and as they will be summed.
        """
        context = tf.distribute.get_replica_context() if self._devices * self._workers > 1 else None
        replica = 0 if context is None else context._replica_id
        finite, first, flagged = self._agreed(context, gradients, variables)

        def otherwise() -> None:
            with tf.device(HOST):
                text = self._text(list(map(own_name, variables)), first, flagged)
                if tf.executing_eagerly():
                    self._end(text.numpy().decode(), first=replica == 0)
                elif self._raises:
                    tf.debugging.Assert(finite, [text])
                elif replica == 0:
                    number = tf.constant(0, tf.int64)
                    graph_ops.send(self._runtime.queue, self.id, number, tf.io.decode_raw(text, tf.uint8))

        def branch(does: Callable[[], object]) -> tf.Tensor:
            does()
            return tf.constant(True)

        if tf.executing_eagerly():
            (update if finite else otherwise)()
        else:
            tf.cond(finite, lambda: branch(update), lambda: branch(otherwise))

    def _agreed(
        self,
        context: tf.distribute.ReplicaContext | None,
        gradients: Sequence[tuple[Value, Value]],
        variables: Sequence[Variable],
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns whether all sums will be finite, the first variable of which it is not so, and on which ranks."""
        limits = tf.constant(list(map(self._limit, gradients, variables)), tf.float64)
        peaks = tf.stack([_peak(given, sent) for given, sent in gradients])
        replicas = self._devices * self._workers
        with reducing_gradients(replicas):
            peaks = counted().part(peaks)  # as what is sent
        first = _first_above(peaks, limits)
        slots = tf.cast(first[None], tf.float64)  # of each replica: the number of its first variable, from 1; 0: none
        if context is not None:
            slots *= tf.one_hot(context.replica_id_in_sync_group, replicas, dtype=tf.float64)
            summed = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.concat([slots, peaks], 0))
            slots, peaks = summed[:replicas] / self._factor, summed[replicas:]
            first = _first_above(peaks, limits)
        own = tf.reshape(tf.equal(slots, tf.cast(first, tf.float64)), [self._workers, self._devices])
        return tf.equal(first, 0), first - 1, tf.reduce_any(own, 1)

    def _limit(self, gradient: tuple[Value, Value], variable: Variable) -> float:
        """The largest number that the sum of `gradient` can have; with a codec of half precision, on the wire."""
        dense = not isinstance(gradient[1], tf.IndexedSlices)
        return float(_HALVES.get(self._codec(variable) if dense else "", gradient[1].dtype).max)

    def _text(self, names: list[str], first: tf.Tensor, flagged: tf.Tensor) -> tf.Tensor:
        """Returns what to say: an error as text, or a line of the log."""
        known = tf.boolean_mask(tf.constant([f"rank {rank}" for rank in range(self._workers)]), flagged)
        found = tf.strings.join(["on ", tf.strings.reduce_join(known, separator=", ")])
        where = tf.where(tf.reduce_any(flagged), found, "when it is summed over the ranks")
        text = to_text(_error("{}", "{}")) if self._raises else _SKIPPED
        before, between, after = text.split("{}")
        return tf.strings.join([before, tf.gather(tf.constant(names), first), between, where, after])

    def _end(self, text: str, *, first: bool) -> None:
        """Ends an eager step that is not applied; `first`: on the first replica."""
        if self._raises:
            raise from_text(text) or NonFiniteError(text)
        if first:
            self._count(text)

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor, /) -> None:
        self._count(data.numpy().tobytes().decode())

    def _count(self, text: str) -> None:
        self._runtime.skipped_steps += 1
        if (count := self._runtime.skipped_steps) <= _LOGGED or count % _EVERY == 0:
            logger.warning('tfps: %s (%d so far; docs/contract.md, "Gradients that are not finite")', text, count)


_SKIPPED = "a step is skipped: the gradient of {} is not finite {}"


def _error(name: str, where: str) -> NonFiniteError:
    return NonFiniteError(
        f"the gradient of {name} is not finite {where}; the step is not applied. Look for NaN and infinity in the "
        "data, for logarithms of 0 and divisions by 0 in the loss, and for a learning rate that is too large; "
        "Config(on_nonfinite='skip') leaves such steps out"
    )


def _peak(given: Value, sent: Value) -> tf.Tensor:
    """Returns a bound of the numbers that `sent` adds to a sum, float64; NaN if one of these or of `given` is not
    finite.
    """
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(_numbers(each))) for each in (given, sent)])
    sizes = tf.abs(_numbers(sent))
    if isinstance(sent, tf.IndexedSlices):  # a row may come several times
        sizes = tf.reduce_sum(tf.cast(sizes, graph_ops.wire_dtype(sizes.dtype)), 0)
    peak = tf.cast(tf.reduce_max(sizes), tf.float64)
    return tf.where(finite, tf.maximum(peak, 0.0), float("nan"))


def _numbers(value: Value) -> tf.Tensor:
    return value.values if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def _first_above(peaks: tf.Tensor, limits: tf.Tensor) -> tf.Tensor:
    """Returns the number of the first of `peaks` that is not below its limit, from 1; 0 if all are."""
    # Not "not (peak <= limit)": TensorFlow makes that "peak > limit", which does not hold for NaN either.
    below = peaks <= limits
    return tf.where(tf.reduce_all(below), 0, tf.argmin(tf.cast(below, tf.int32), output_type=tf.int32) + 1)
