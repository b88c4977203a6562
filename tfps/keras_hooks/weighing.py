"""Weighs Keras' losses, metrics and gradients by rows when a batch does not divide evenly between replicas.

Keras divides a replica's mean by the number of replicas, and gradients are summed. In Keras' own steps (`fit`,
`train_on_batch`, `evaluate`) nothing is divided here: whatever such a step computes is that of its own rows, as in one
process, and an optimizer's gradients are weighted by the replica's share of the batch where they are exchanged. Means
over something else, and sums, get a factor that turns their mean over rows into the right one.

In replica functions of `strategy.run` gradients are summed, as programs for tf.distribute expect, so losses of Keras
are multiplied by the share there, the same number as Keras' if the batch divides evenly.

Tested in tests/integration/test_rows.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfps.errors import TfpsError, outlined
from tfps.graph.shares import Share, current_share, in_keras_step, keras_step, reducing_gradients, say_once, with_values
from tfps.graph.tf_private import is_differentiated
from tfps.keras_hooks.keras_private import Stepper, loss_module, trainer_module
from tfps.types import Function, Model, Optimizer, Structure, Value, Variable

_WHOLE = "_tfps_whole"  # marks a loss that is the replica's mean, while its gradient is weighed by the share


@functools.cache
def weigh_by_rows(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras weigh replicas, in replica functions of tfps strategies; done once per process."""
    _mark_steps(strategy_class)
    _weigh_losses(strategy_class)
    _weigh_average_losses()
    _track_whole_losses()
    _weigh_tracked_scalars()
    _weigh_gradients()
    _weigh_results(strategy_class)
    _say_what_is_no_mean()


def _mark_steps(strategy_class: type[tf.distribute.Strategy]) -> None:
    def marking(original: Function, made: str, trains: bool) -> Function:
        @functools.wraps(original)
        def make(self: Model, force: bool = False) -> object:
            before = getattr(self, made)
            result = original(self, force=force)
            function = getattr(self, made)
            if function in (None, before) or not isinstance(self.distribute_strategy, strategy_class):
                return result

            @functools.wraps(function)
            def step(*arguments: object) -> object:
                try:
                    with keras_step(trains=trains):
                        return function(*arguments)
                except TfpsError as error:
                    if not tf.debugging.is_traceback_filtering_enabled():
                        raise
                    raise outlined(error)  # noqa: B904  # the same error

            setattr(self, made, step)
            return result

        return make

    Stepper.make_train_function = marking(Stepper.make_train_function, "train_function", True)
    Stepper.make_test_function = marking(Stepper.make_test_function, "test_function", False)


def _weigh_losses(strategy_class: type[tf.distribute.Strategy]) -> None:
    scale, unscale = loss_module.scale_loss_for_distribution, loss_module.unscale_loss_for_distribution
    reduce_values = loss_module.reduce_weighted_values

    def is_whole() -> bool:
        """Whether a loss is that of what it is computed from: in steps of Keras, and outside of replica functions."""
        if in_keras_step():
            return True
        return tf.distribute.in_cross_replica_context() and isinstance(tf.distribute.get_strategy(), strategy_class)

    @functools.wraps(scale)
    def scale_loss(value: Value) -> Value:
        if is_whole():
            return value
        share = current_share()
        if share is None:
            return scale(value)
        return share.only_if_rows(value) * share.weight(_even(share, value.dtype))

    @functools.wraps(unscale)
    def unscale_loss(value: Value) -> Value:
        if is_whole() or hasattr(value, _WHOLE):
            return value
        share = current_share()
        return unscale(value) if share is None else _unscaled(share, value)

    @functools.wraps(reduce_values)
    def reduce_weighted_values(
        values: Structure,
        sample_weight: Value = None,
        mask: Value = None,
        reduction: str = "sum_over_batch_size",
        dtype: str | None = None,
    ) -> Value:
        share = current_share()

        def reduced() -> Value:
            loss = reduce_values(values, sample_weight, mask, reduction, dtype)
            if share is None or in_keras_step() or reduction in (None, "none", "sum") or _rank(values) != 0:
                return loss
            return scale_loss(loss)  # Keras does not divide what is a number already

        weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
        masks = mask is not None and reduction not in (None, "none", "sum")
        sums = reduction == "sum" and _rank(values) != 0
        if share is None or not (weighs or masks or sums):
            return reduced()
        trains = share.trains if in_keras_step() else is_differentiated()
        if not trains:
            say_once(
                "outside of training, each replica computes masked, sample-weighted or summed losses locally, and "
                "these count by rows: if batches do not divide evenly, the result is not exactly that of one process"
            )
        if sums:  # in replica functions of programs, gradients are summed
            loss = reduced()
            return loss * share.of_whole_sum(loss.dtype) if in_keras_step() else loss
        if not trains:
            return reduced()
        amount = _amount(sample_weight if weighs else None, mask, dtype or keras.config.floatx(), reduction)
        if in_keras_step():
            loss = reduced()
            return loss * share.of_amount(amount, loss.dtype)
        with share.counting(amount, _even(share, tf.float64)):
            return reduced()

    loss_module.scale_loss_for_distribution = scale_loss
    loss_module.unscale_loss_for_distribution = unscale_loss
    loss_module.reduce_weighted_values = reduce_weighted_values


def _rank(values: Structure) -> int | None:
    rank: int | None = tf.TensorShape(getattr(values, "shape", ())).rank
    return rank


def _weigh_average_losses() -> None:
    """Makes what programs for tf.distribute divide by the rows of the whole job count whole in steps of Keras."""
    average, regularization = tf.nn.compute_average_loss, tf.nn.scale_regularization_loss

    @functools.wraps(average)
    def compute_average_loss(
        per_example_loss: Value, sample_weight: Value = None, global_batch_size: Value = None
    ) -> Value:
        share = current_share()
        if not in_keras_step() or share is None:
            return average(per_example_loss, sample_weight, global_batch_size)
        if global_batch_size is None:
            return average(per_example_loss, sample_weight, tf.shape(per_example_loss)[0])
        loss = average(per_example_loss, sample_weight, global_batch_size)
        return loss * share.of_whole_sum(loss.dtype)

    @functools.wraps(regularization)
    def scale_regularization_loss(regularization_loss: Value) -> Value:
        return tf.reduce_sum(regularization_loss) if in_keras_step() else regularization(regularization_loss)

    tf.nn.compute_average_loss, tf.nn.scale_regularization_loss = compute_average_loss, scale_regularization_loss


def _say_what_is_no_mean() -> None:
    """Logs once that a loss couples the rows of a batch: the mean over replicas is then not that over the batch."""

    def watch(kind: type) -> None:
        original = kind.call  # type: ignore[attr-defined]

        @functools.wraps(original)
        def call(self: keras.losses.Loss, *arguments: Value, **options: Value) -> Value:
            if current_share() is not None and getattr(self, "axis", None) is None:
                say_once(
                    f"keras.losses.{kind.__name__} is no mean over rows: each replica computes it for its own rows, so "
                    "the result is not that of one process"
                )
            return original(self, *arguments, **options)

        kind.call = call  # type: ignore[attr-defined]

    for kind in (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle):
        watch(kind)


def _even(share: Share, dtype: str) -> Value:
    """Returns the factor that Keras multiplies a replica's loss by, bit for bit."""
    return keras.ops.cast(1.0 / share.replicas, dtype)


def _unscaled(share: Share, value: Value) -> Value:
    """Returns the replica's mean, of which `value` is the share."""
    count = keras.ops.cast(share.replicas, value.dtype)
    return tf.math.divide_no_nan(value * count, share.relative(value.dtype))


def _amount(sample_weight: Value, mask: Value, dtype: str, reduction: str) -> Value:
    """Returns the divisor of a mean: the sum of sample weights, or the number of unmasked positions."""
    if sample_weight is None:
        return tf.reduce_sum(tf.cast(mask, dtype))
    weights = tf.convert_to_tensor(sample_weight)
    mask = None if mask is None else tf.convert_to_tensor(mask)
    return tf.reduce_sum(loss_module.apply_mask(weights, mask, dtype=dtype, reduction=reduction))


def _track_whole_losses() -> None:
    """Makes `compute_loss` return the whole loss, for a `train_step` that tracks it; the gradient is of the share."""
    original = keras.Model.compute_loss

    @functools.wraps(original)
    def compute_loss(self: Model, *arguments: object, **options: object) -> Value:
        loss = original(self, *arguments, **options)
        share = current_share()
        # A program's override may add terms to the result.
        if share is None or loss is None or in_keras_step() or type(self).compute_loss is not compute_loss:
            return loss

        @tf.custom_gradient
        def whole(loss: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            return _unscaled(share, loss), lambda gradient: gradient

        result = whole(loss)
        setattr(result, _WHOLE, True)
        return result

    keras.Model.compute_loss = compute_loss


def _weigh_tracked_scalars() -> None:
    original = keras.metrics.Mean.update_state

    @functools.wraps(original)
    def update_state(self: keras.metrics.Mean, values: Structure, sample_weight: Value = None) -> object:
        share = current_share()
        if share is not None and sample_weight is None and _is_scalar(values):
            if not share.trains:
                say_once(
                    "outside of training, a scalar given to keras.metrics.Mean counts once for each replica: if "
                    "batches do not divide evenly, the result is not exactly that of one process"
                )
            values = share.only_if_rows(tf.convert_to_tensor(values))
            sample_weight = share.only_if_rows(share.relative(tf.as_dtype(self.dtype)))
        return original(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_state


def _is_scalar(values: Structure) -> bool:
    shape = getattr(values, "shape", None)
    return isinstance(values, (int, float)) or (shape is not None and tf.TensorShape(shape).rank == 0)


def _weigh_gradients() -> None:
    original = keras.optimizers.Optimizer._backend_apply_gradients

    @functools.wraps(original)
    def apply_gradients(self: Optimizer, grads: Structure, trainable_variables: Sequence[Variable]) -> object:
        share, accumulates = current_share(), bool(self.gradient_accumulation_steps)
        if accumulates and share is not None:
            # Accumulated gradients come from steps in which this replica had other rows.
            grads = [share.only_if_rows(each) for each in grads]
            if in_keras_step():
                grads = [with_values(each, lambda values: values * share.relative(values.dtype)) for each in grads]
        if not in_keras_step() and (share is None or accumulates):
            return original(self, grads, trainable_variables)
        replicas = tf.distribute.get_strategy().extended._num_replicas_in_sync
        with reducing_gradients(replicas, weighted=accumulates):
            return original(self, grads, trainable_variables)

    keras.optimizers.Optimizer._backend_apply_gradients = apply_gradients


def _weigh_results(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes results of replicas' steps count by rows, too."""
    original = trainer_module.reduce_per_replica

    @functools.wraps(original)
    def reduce_per_replica(values: Structure, strategy: tf.distribute.Strategy, reduction: str) -> Structure:
        if not isinstance(strategy, strategy_class) or reduction != "auto" or strategy.extended.last_batch is None:
            return original(values, strategy, reduction)
        last = strategy.extended.last_batch
        _note_fixed(last.fixed, values)
        return keras.tree.map_structure(functools.partial(_joined, last.given()), values)

    trainer_module.reduce_per_replica = reduce_per_replica


def _note_fixed(fixed: set[str], values: Structure) -> None:
    """Notes in a graph which of what a step returns has no size that it may share with the rows, by name."""
    if tf.executing_eagerly():
        return
    for path, value in keras.tree.flatten_with_path(values):
        (fixed.discard if _may_be_of_rows(value) else fixed.add)("/".join(map(str, path)))


def _may_be_of_rows(value: Value) -> bool:
    first = value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value
    return bool(isinstance(first, tf.Tensor) and first.shape.rank and first.shape[0] is None)


def _joined(rows: tf.Tensor, value: Value) -> Value:
    """Returns the mean of the local replicas' `value`; if it has one for each row, all of them."""
    if not isinstance(value, tf.distribute.DistributedValues):
        return value
    sizes = [each.shape[0] if each.shape.rank else None for each in map(tf.convert_to_tensor, value.values)]
    eagerly = tf.executing_eagerly() and sizes == rows.numpy().tolist()
    return tf.concat(value.values, 0) if eagerly or _may_be_of_rows(value) else mean(rows, value)


def mean(rows: tf.Tensor, value: Value) -> Value:
    """Returns the mean of the local replicas' `value`, weighed by their `rows` if these differ."""
    if not isinstance(value, tf.distribute.DistributedValues):
        return value
    each = tf.stack(value.values)
    plain = tf.reduce_mean(each, axis=0)  # as Keras
    if not each.dtype.is_floating:
        return plain
    counts = tf.reshape(rows, [-1, *[1] * (each.shape.rank - 1)])
    weighed = tf.where(counts > 0, each * tf.cast(counts, each.dtype), tf.zeros_like(each))
    uneven = tf.reduce_all(rows >= 0) & tf.reduce_any(rows != rows[0])
    return tf.where(uneven, tf.reduce_sum(weighed, 0) / tf.cast(tf.reduce_sum(rows), each.dtype), plain)
