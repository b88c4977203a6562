"""Weighs Keras' losses, metrics and gradients by rows when a batch does not divide evenly between replicas.

Keras divides a replica's mean by the number of replicas; their sum is the mean of means. Here each is multiplied by
the replica's share of the batch instead, the same number if the batch divides evenly. A mean over unmasked positions or
sample weights is weighed by those, which all replicas sum during training.

Tested in tests/integration/test_rows.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfps.graph.shares import Share, current_share, reducing_gradients, say_once
from tfps.graph.tf_private import is_differentiated
from tfps.keras_hooks.keras_private import loss_module, trainer_module
from tfps.types import Model, Optimizer, Structure, Value, Variable

_WHOLE = "_tfps_whole"  # marks a loss that is the replica's mean, while its gradient is weighed by the share


@functools.cache
def weigh_by_rows(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras weigh replicas, in replica functions of tfps strategies; done once per process."""
    _weigh_losses()
    _track_whole_losses()
    _weigh_tracked_scalars()
    _leave_out_empty_replicas()
    _weigh_results(strategy_class)


def _weigh_losses() -> None:
    scale, unscale = loss_module.scale_loss_for_distribution, loss_module.unscale_loss_for_distribution
    reduce_values = loss_module.reduce_weighted_values

    @functools.wraps(scale)
    def scale_loss(value: Value) -> Value:
        share = current_share()
        if share is None:
            return scale(value)
        return share.only_if_rows(value) * share.weight(_even(share, value.dtype))

    @functools.wraps(unscale)
    def unscale_loss(value: Value) -> Value:
        if hasattr(value, _WHOLE):
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
            if share is None or loss.shape != (0,) or reduction in (None, "none"):
                return loss
            # Keras returns a loss known to be empty as it is; but other replicas wait for its weight.
            loss = tf.reduce_sum(loss)
            return loss if reduction == "sum" else scale_loss(loss)

        weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
        masks = mask is not None and reduction not in (None, "none", "sum")
        if share is None or not (weighs or masks or reduction == "sum"):
            return reduced()
        if not is_differentiated():
            say_once(
                "outside of training, each replica computes masked, sample-weighted or summed losses locally, and "
                "these count by rows: if batches do not divide evenly, the result is not exactly that of one process"
            )
            return reduced()
        if reduction == "sum":  # over replicas the gradients are summed
            return reduced()
        amount = _amount(sample_weight if weighs else None, mask, dtype or keras.config.floatx(), reduction)
        with share.counting(amount, _even(share, tf.float64)):
            return reduced()

    loss_module.scale_loss_for_distribution = scale_loss
    loss_module.unscale_loss_for_distribution = unscale_loss
    loss_module.reduce_weighted_values = reduce_weighted_values


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
        if share is None or loss is None or type(self).compute_loss is not compute_loss:
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


def _leave_out_empty_replicas() -> None:
    original = keras.optimizers.Optimizer._backend_apply_gradients

    @functools.wraps(original)
    def apply_gradients(self: Optimizer, grads: Structure, trainable_variables: Sequence[Variable]) -> object:
        share = current_share()
        if share is not None and self.gradient_accumulation_steps:
            # Accumulated gradients may come from steps in which this replica had rows.
            return original(self, [share.only_if_rows(each) for each in grads], trainable_variables)
        with reducing_gradients():
            return original(self, grads, trainable_variables)

    keras.optimizers.Optimizer._backend_apply_gradients = apply_gradients


def _weigh_results(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes results of replicas' steps count by rows, too."""
    original = trainer_module.reduce_per_replica

    @functools.wraps(original)
    def reduce_per_replica(values: Structure, strategy: tf.distribute.Strategy, reduction: str) -> Structure:
        if not isinstance(strategy, strategy_class) or reduction != "auto" or strategy.extended.last_batch is None:
            return original(values, strategy, reduction)
        return keras.tree.map_structure(functools.partial(mean, strategy.extended.last_batch.given()), values)

    trainer_module.reduce_per_replica = reduce_per_replica


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
