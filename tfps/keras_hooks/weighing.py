"""Weighs losses, metrics, gradients and a program's own reductions by rows where a batch does not divide evenly.

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
from tfps.graph.patches import BaseStrategy, Patch, strategy_of
from tfps.graph.shares import (
    Share,
    current_share,
    in_keras_step,
    is_reducing_gradients,
    keras_step,
    reducing_gradients,
    say_once,
    with_values,
)
from tfps.graph.tf_private import is_differentiated
from tfps.keras_hooks.keras_private import Stepper, loss_module, trainer_module
from tfps.types import Function, Model, Optimizer, Structure, Value, Variable

_SUM, _MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
_WHOLE = "_tfps_whole"  # marks a loss that is the replica's mean, while its gradient is weighed by the share


def _mark_steps(made: str, trains: bool, original: Function) -> Function:
    """Wraps what makes Keras' steps, the attribute `made` of a model."""

    def make(self: Model, force: bool = False) -> object:
        before = getattr(self, made)
        result = original(self, force=force)
        function = getattr(self, made)
        if function in (None, before) or strategy_of(self) is None:
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


# Losses.


def _is_whole() -> bool:
    """Whether a loss is that of what it is computed from: in steps of Keras, and outside of replica functions."""
    if in_keras_step():
        return True
    return tf.distribute.in_cross_replica_context() and isinstance(tf.distribute.get_strategy(), BaseStrategy)


def _scale(original: Function) -> Function:
    def scale_loss(value: Value) -> Value:
        if _is_whole():
            return value
        share = current_share()
        if share is None:
            return original(value)
        return share.only_if_rows(value) * share.weight(_even(share, value.dtype))

    return scale_loss


def _unscale(original: Function) -> Function:
    def unscale_loss(value: Value) -> Value:
        if _is_whole() or hasattr(value, _WHOLE):
            return value
        share = current_share()
        return original(value) if share is None else _unscaled(share, value)

    return unscale_loss


def _reduce(original: Function) -> Function:
    def reduce_weighted_values(
        values: Structure,
        sample_weight: Value = None,
        mask: Value = None,
        reduction: str = "sum_over_batch_size",
        dtype: str | None = None,
    ) -> Value:
        share = current_share()

        def reduced() -> Value:
            loss = original(values, sample_weight, mask, reduction, dtype)
            if share is None or in_keras_step() or reduction in (None, "none", "sum") or not _is_scalar(values):
                return loss
            return loss_module.scale_loss_for_distribution(loss)  # Keras does not divide what is a number already

        weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
        masks = mask is not None and reduction not in (None, "none", "sum")
        sums = reduction == "sum" and not _is_scalar(values)
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

    return reduce_weighted_values


def _average_loss(original: Function) -> Function:
    """Counts whole, in steps of Keras, what programs for tf.distribute divide by the rows of the whole job."""

    def compute_average_loss(
        per_example_loss: Value, sample_weight: Value = None, global_batch_size: Value = None
    ) -> Value:
        share = current_share()
        if not in_keras_step() or share is None:
            return original(per_example_loss, sample_weight, global_batch_size)
        if global_batch_size is None:
            return original(per_example_loss, sample_weight, tf.shape(per_example_loss)[0])
        loss = original(per_example_loss, sample_weight, global_batch_size)
        return loss * share.of_whole_sum(loss.dtype)

    return compute_average_loss


def _regularization_loss(original: Function) -> Function:
    def scale_regularization_loss(regularization_loss: Value) -> Value:
        return tf.reduce_sum(regularization_loss) if in_keras_step() else original(regularization_loss)

    return scale_regularization_loss


def _say_that_it_is_no_mean(kind: type, original: Function) -> Function:
    """Logs once that a loss couples the rows of a batch: the mean over replicas is then not that over the batch."""

    def call(self: keras.losses.Loss, *arguments: Value, **options: Value) -> Value:
        if current_share() is not None and getattr(self, "axis", None) is None:
            say_once(
                f"keras.losses.{kind.__name__} is no mean over rows: each replica computes it for its own rows, so "
                "the result is not that of one process"
            )
        return original(self, *arguments, **options)

    return call


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


def _whole_loss(original: Function) -> Function:
    """Returns the whole loss, for a `train_step` that tracks it; the gradient is of the share."""

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

    return compute_loss


def _tracked_scalar(original: Function) -> Function:
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

    return update_state


def _is_scalar(value: Value) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(value, (int, float)) or (shape is not None and tf.TensorShape(shape).rank == 0)


# Gradients and results of steps.


def _weigh_gradients(original: Function) -> Function:
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

    return apply_gradients


def _weigh_results(original: Function) -> Function:
    """Lets results of replicas' steps count by rows, too."""

    def reduce_per_replica(values: Structure, strategy: tf.distribute.Strategy, reduction: str) -> Structure:
        if not isinstance(strategy, BaseStrategy) or reduction != "auto" or strategy.extended.last_batch is None:
            return original(values, strategy, reduction)
        last = strategy.extended.last_batch
        _note_fixed(last.fixed, values)
        return keras.tree.map_structure(functools.partial(_joined, last.given()), values)

    return reduce_per_replica


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


# What a program itself reduces in a replica function. A replica without rows adds nothing, and a mean is one over rows.
# In steps of Keras gradients are weighted only where they are exchanged: between two replicas they pass as parts of the
# weighted whole, so that what reaches another one, and is weighted there again, is right.


def _share_of(context: tf.distribute.ReplicaContext) -> Share | None:
    return None if not isinstance(context.strategy, BaseStrategy) or is_reducing_gradients() else current_share()


def _all_reduce(original: Function) -> Function:
    def all_reduce(
        self: tf.distribute.ReplicaContext,
        reduce_op: tf.distribute.ReduceOp | str,
        value: Structure,
        options: object = None,
    ) -> Structure:
        share = _share_of(self)
        if share is None:
            return original(self, reduce_op, value, options)
        reduce_op = tf.distribute.ReduceOp(reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
        flat = tf.nest.flatten(value)
        flat = [each if isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in flat]
        if reduce_op == _MEAN:
            if not all(isinstance(each, tf.Tensor) and each.dtype.is_floating for each in flat):
                return original(self, reduce_op, value, options)
            even = tf.constant(1 / share.replicas, tf.float64)
            weight = share.weight(even, exchange=True)
            flat = [each * tf.cast(weight, each.dtype) for each in flat]
        own = [_leaving(share, share.only_if_rows(each)) if share.depends_on_rows(each) else each for each in flat]
        return tf.nest.pack_sequence_as(value, [_arrived(share, each) for each in original(self, _SUM, own, options)])

    return all_reduce


def _all_gather(original: Function) -> Function:
    def all_gather(self: tf.distribute.ReplicaContext, value: Structure, axis: Value, options: object = None) -> Value:
        share = _share_of(self)
        if share is None or tf.get_static_value(axis) != 0:
            return original(self, value, axis, options)

        def own(each: Value) -> Value:
            each = tf.convert_to_tensor(each)
            if not each.shape.rank or not share.depends_on_rows(each):
                return each
            if share.may_be_empty:
                each = each[: tf.where(share.has_rows, tf.shape(each)[0], 0)]
            return _leaving(share, each)

        gathered = original(self, tf.nest.map_structure(own, value), axis, options)
        return tf.nest.map_structure(functools.partial(_arrived, share), gathered)

    return all_gather


def _leaving(share: Share, value: Value) -> Value:
    """Returns `value`, whose gradient comes from the whole job: this replica's weight is taken from it."""
    return _with_gradient(share, value, tf.math.divide_no_nan)


def _arrived(share: Share, value: Value) -> Value:
    """Returns `value`, the same on all replicas, whose gradient goes to the whole job, by this replica's weight."""
    return share.alike(_with_gradient(share, value, tf.multiply))


def _with_gradient(share: Share, value: Value, change: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Value:
    if not in_keras_step() or not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    relative = share.relative(value.dtype)

    @tf.custom_gradient
    def weighted(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(value), lambda gradient: change(gradient, relative)

    return weighted(value)


_ROWS = "tests/integration/test_rows.py"
_MEAN_OF_ROWS = "a loss is a mean over rows where batches do not divide evenly between replicas"
_LOSSES_THAT_COUPLE_ROWS = (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle)
PATCHES = (
    Patch(
        Stepper,
        "make_train_function",
        functools.partial(_mark_steps, "train_function", True),
        "marks Keras' steps, whose losses are of their own rows and whose gradients are weighed",
        _ROWS,
    ),
    Patch(
        Stepper,
        "make_test_function",
        functools.partial(_mark_steps, "test_function", False),
        "marks Keras' steps, as for training",
        _ROWS,
    ),
    Patch(loss_module, "scale_loss_for_distribution", _scale, _MEAN_OF_ROWS, _ROWS),
    Patch(loss_module, "unscale_loss_for_distribution", _unscale, "the whole loss again", _ROWS),
    Patch(
        loss_module,
        "reduce_weighted_values",
        _reduce,
        "counts masks, sample weights and sums over the whole batch",
        _ROWS,
    ),
    Patch(
        tf.nn,
        "compute_average_loss",
        _average_loss,
        "what programs divide by the rows of the job counts whole in steps of Keras",
        _ROWS,
    ),
    Patch(
        tf.nn,
        "scale_regularization_loss",
        _regularization_loss,
        "what programs divide by the replicas counts whole in steps of Keras",
        _ROWS,
    ),
    *(
        Patch(
            kind,
            "call",
            functools.partial(_say_that_it_is_no_mean, kind),
            "says once that this loss couples rows, so that a mean over replicas is another number",
            _ROWS,
        )
        for kind in _LOSSES_THAT_COUPLE_ROWS
    ),
    Patch(keras.Model, "compute_loss", _whole_loss, "a `train_step` may track the loss it returns", _ROWS),
    Patch(keras.metrics.Mean, "update_state", _tracked_scalar, "a scalar counts by the replica's rows", _ROWS),
    Patch(
        keras.optimizers.Optimizer,
        "_backend_apply_gradients",
        _weigh_gradients,
        "gradients count by the replica's rows",
        _ROWS,
    ),
    Patch(trainer_module, "reduce_per_replica", _weigh_results, "results of replicas' steps count by rows", _ROWS),
    Patch(
        tf.distribute.ReplicaContext,
        "all_reduce",
        _all_reduce,
        "what a program sums or averages itself counts by rows",
        _ROWS,
    ),
    Patch(tf.distribute.ReplicaContext, "all_gather", _all_gather, "a replica without rows adds none", _ROWS),
)
