"""Keras' losses, metrics and gradients where a batch does not divide evenly: each replica counts by its rows.

Keras divides a replica's mean by the number of replicas; their sum is then the mean of means. Here each is multiplied
by the replica's share of the batch instead, which is the same number where the batch divides evenly. A mean over
something else than rows (unmasked positions, sample weights) counts by that, which all replicas sum while they train.

Tested in tests/integration/test_rows.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfps.graph.shares import Share, current_share, reducing_gradients
from tfps.graph.tf_private import is_differentiated
from tfps.keras_hooks.keras_private import distributed_dataset, loss_module, trainer_module

logger = logging.getLogger("tfps")
_WHOLE = "_tfps_whole"  # marks a loss that is this replica's own mean, although its gradient counts by its share


@functools.cache
def weigh_by_rows(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras weigh replicas, in replica functions of strategies of tfps; done once per process."""
    _weigh_losses()
    _track_whole_losses()
    _weigh_tracked_scalars()
    _leave_out_empty_replicas()
    _build_by_first_replica(strategy_class)
    _weigh_results(strategy_class)


def _weigh_losses() -> None:
    scale, unscale = loss_module.scale_loss_for_distribution, loss_module.unscale_loss_for_distribution
    reduce_values = loss_module.reduce_weighted_values

    @functools.wraps(scale)
    def scale_loss(value: Any) -> Any:
        share = current_share()
        if share is None:
            return scale(value)
        return share.only_if_rows(value) * share.weight(_even(share, value.dtype))

    @functools.wraps(unscale)
    def unscale_loss(value: Any) -> Any:
        if hasattr(value, _WHOLE):
            return value
        share = current_share()
        return unscale(value) if share is None else _unscaled(share, value)

    @functools.wraps(reduce_values)
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        share = current_share()

        def reduced() -> Any:
            loss = reduce_values(values, sample_weight, mask, reduction, dtype)
            if share is None or loss.shape != (0,) or reduction in (None, "none"):
                return loss
            # What it knows to be empty Keras leaves as it is; but other replicas wait for this one to be weighed.
            loss = tf.reduce_sum(loss)
            return loss if reduction == "sum" else scale_loss(loss)

        weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
        masks = mask is not None and reduction not in (None, "none", "sum")
        if share is None or not (weighs or masks or reduction == "sum"):
            return reduced()
        if not is_differentiated():
            _say_once(
                "outside of training, each replica takes a loss over unmasked positions, by sample weights or as a sum "
                "for itself, and these count by rows: where batches do not divide, it is not exactly one process'"
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


def _even(share: Share, dtype: Any) -> Any:
    """What Keras multiplies a replica's loss by, to the bit."""
    return keras.ops.cast(1.0 / share.replicas, dtype)


def _unscaled(share: Share, value: Any) -> Any:
    """The replica's own mean, of which `value` is the share."""
    count = keras.ops.cast(share.replicas, value.dtype)
    return tf.math.divide_no_nan(value * count, share.relative(value.dtype))


def _amount(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
    """What a mean divides by: the sum of sample weights, or how many positions are not masked."""
    if sample_weight is None:
        return tf.reduce_sum(tf.cast(mask, dtype))
    weights = tf.convert_to_tensor(sample_weight)
    mask = None if mask is None else tf.convert_to_tensor(mask)
    return tf.reduce_sum(loss_module.apply_mask(weights, mask, dtype=dtype, reduction=reduction))


def _track_whole_losses() -> None:
    """A `train_step` that tracks what `compute_loss` returns tracks the loss, not the part that its gradient is of."""
    original = keras.Model.compute_loss

    @functools.wraps(original)
    def compute_loss(self: Any, *arguments: Any, **options: Any) -> Any:
        loss = original(self, *arguments, **options)
        share = current_share()
        # A program that overrides it may add terms of its own to what this returns.
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
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        share = current_share()
        if share is not None and sample_weight is None and _is_scalar(values):
            values = share.only_if_rows(tf.convert_to_tensor(values))
            sample_weight = share.only_if_rows(share.relative(tf.as_dtype(self.dtype)))
        return original(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_state


def _is_scalar(values: Any) -> bool:
    shape = getattr(values, "shape", None)
    return isinstance(values, (int, float)) or (shape is not None and tf.TensorShape(shape).rank == 0)


def _leave_out_empty_replicas() -> None:
    original = keras.optimizers.Optimizer._backend_apply_gradients

    @functools.wraps(original)
    def apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        share = current_share()
        if share is not None and self.gradient_accumulation_steps:
            # What has been accumulated comes from steps in which this replica may have had rows.
            return original(self, [share.only_if_rows(each) for each in grads], trainable_variables)
        with reducing_gradients():
            return original(self, grads, trainable_variables)

    keras.optimizers.Optimizer._backend_apply_gradients = apply_gradients


def _build_by_first_replica(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Keras builds a model by the mean of the replicas' first batches, which there is not where their sizes differ.

    What the dataset says of a batch suffices. Taking one would be no harm, but that a shuffled dataset has its second
    order then in the first epoch.
    """
    original = keras.Model._maybe_symbolic_build

    @functools.wraps(original)
    def maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None and isinstance(self.distribute_strategy, strategy_class):
            data_batch = described_batch(iterator)
            if data_batch is None:
                _, _, batches = next(iter(iterator))
                data_batch = keras.tree.map_structure(_example, next(batches))
            iterator = None
        original(self, iterator, data_batch)

    keras.Model._maybe_symbolic_build = maybe_symbolic_build


def _weigh_results(strategy_class: type[tf.distribute.Strategy]) -> None:
    """What the steps of this worker's replicas return counts by rows, too."""
    original = trainer_module.reduce_per_replica

    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if not isinstance(strategy, strategy_class) or reduction != "auto" or strategy.extended.last_batch is None:
            return original(values, strategy, reduction)
        return keras.tree.map_structure(functools.partial(mean, strategy.extended.last_batch.given()), values)

    trainer_module.reduce_per_replica = reduce_per_replica


def mean(rows: tf.Tensor, value: Any) -> Any:
    """What local replicas have, `value`, as one: their mean, by their `rows` where these differ."""
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


def described_batch(epochs: Any) -> Any:
    """Specs of one replica's batch of what `fit` goes through, None where they do not say all sizes but the first."""
    dataset = distributed_dataset(epochs)
    spec = dataset.sources[0].element_spec if hasattr(dataset, "sources") else dataset.element_spec
    for each in tf.nest.flatten(spec):
        if not isinstance(each, tf.TensorSpec) or not each.shape[1:].is_fully_defined():
            return None
    return spec


def _example(value: Any) -> Any:
    """The first replica's part of `value`, with a row at least: Keras takes losses of no rows for vectors."""
    if isinstance(value, tf.distribute.DistributedValues):
        value = value.values[0]
    if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] == 0:
        return tf.zeros([1, *value.shape[1:]], value.dtype)
    return value


@functools.cache
def _say_once(what: str) -> None:
    logger.warning('tfps: %s (docs/semantics.md, "Rows that do not divide evenly")', what)
