"""Weighs losses, metrics, gradients and a program's own reductions by rows where a batch does not divide evenly.

How and why: docs/design.md, "Who weights what".

Tested in tests/integration/test_rows.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfps.errors import outlined
from tfps.graph.patches import BaseStrategy, strategy_of
from tfps.graph.shares import (
    Share,
    counted,
    current_share,
    in_keras_step,
    is_reducing_gradients,
    keras_step,
    may_be_of_rows,
    reducing_gradients,
    say_once,
)
from tfps.graph.tf_private import is_differentiated
from tfps.keras_hooks.alone import say_if_alone
from tfps.keras_hooks.differentiated import say_if_no_mean
from tfps.keras_hooks.hooks import replaces
from tfps.keras_hooks.keras_private import Stepper, loss_module, trainer_module
from tfps.keras_hooks.xla import in_parts, made_without_xla
from tfps.types import Function, Model, Optimizer, Structure, Value, Variable

_WHOLE = "_tfps_whole"  # marks a loss that is the replica's mean, while its gradient is weighed by the share


_ROWS = "tests/integration/test_rows.py"


def _mark_steps(made: str, trains: bool, original: Function, model: Model, force: bool = False) -> object:
    """Marks Keras' steps, the attribute `made` of a model, where it makes them."""
    before = getattr(model, made)
    with made_without_xla(model) as asked:
        result = original(model, force=force)
    function = getattr(model, made)
    if strategy_of(model) is None and trains:
        say_if_alone(model)
    if function in (None, before) or strategy_of(model) is None:
        return result

    @functools.wraps(function)
    def step(*args: object) -> object:
        try:
            with keras_step(trains=trains), in_parts(asked):
                return function(*args)
        except Exception as error:
            raise outlined(error)  # noqa: B904  # the same error

    setattr(model, made, step)
    return result


_MARKS = "marks Keras' steps, whose losses are of their own rows and whose gradients are weighed"
replaces(Stepper, "make_train_function", _ROWS, _MARKS)(functools.partial(_mark_steps, "train_function", True))
replaces(Stepper, "make_test_function", _ROWS, _MARKS)(functools.partial(_mark_steps, "test_function", False))


def _is_whole() -> bool:
    """Whether a loss is that of what it is computed from: in steps of Keras, and outside of replica functions."""
    if in_keras_step():
        return True
    return tf.distribute.in_cross_replica_context() and isinstance(tf.distribute.get_strategy(), BaseStrategy)


@replaces(loss_module, "scale_loss_for_distribution", _ROWS)
def _scale(original: Function, value: Value) -> Value:
    """A loss is a mean over rows where batches do not divide evenly between replicas."""
    if _is_whole():
        return value
    if (share := current_share()) is None:
        return original(value)
    return share.only_if_rows(value) * share.weight(_even(share, value.dtype))


@replaces(loss_module, "unscale_loss_for_distribution", _ROWS)
def _unscale(original: Function, value: Value) -> Value:
    """The whole loss again."""
    if _is_whole() or hasattr(value, _WHOLE):
        return value
    share = current_share()
    return original(value) if share is None else _unscaled(share, value)


@replaces(loss_module, "reduce_weighted_values", _ROWS)
def _reduce(
    original: Function,
    values: Structure,
    sample_weight: Value = None,
    mask: Value = None,
    reduction: str = "sum_over_batch_size",
    dtype: str | None = None,
) -> Value:
    """Counts masks, sample weights and sums over the global batch."""
    share = current_share()
    loss = _reduced(original, share, values, sample_weight, mask, reduction, dtype)
    if share is not None and share.step == "training" and reduction not in (None, "none") and not _is_scalar(values):
        terms = [("a loss", values), ("what a loss gets as sample weights", sample_weight)]
        for what, each in terms:
            say_if_no_mean(share, what, each, averaged=reduction != "sum")
        share.note_mean(loss)
    return loss


def _reduced(
    original: Function,
    share: Share | None,
    values: Structure,
    sample_weight: Value,
    mask: Value,
    reduction: str,
    dtype: str | None,
) -> Value:
    averages = reduction not in (None, "none", "sum")

    def reduced() -> Value:
        loss = original(values, sample_weight, mask, reduction, dtype)
        if share is None or in_keras_step() or not averages or not _is_scalar(values):
            return loss
        return loss_module.scale_loss_for_distribution(loss)  # Keras does not divide what is a number already

    weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
    masks = mask is not None and averages
    sums = reduction == "sum" and not _is_scalar(values)
    if share is None or not (weighs or masks or sums):
        return reduced()
    trains = share.trains if in_keras_step() else is_differentiated()
    if not trains:
        say_once(
            "outside of training, each replica computes masked, sample-weighted or summed losses locally, and these "
            "count by rows: if batches do not divide evenly, the result is not exactly that of one process, but for "
            "sums of arrays"
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


@replaces(tf.nn, "compute_average_loss", _ROWS)
def _average_loss(
    original: Function, per_example_loss: Value, sample_weight: Value = None, global_batch_size: Value = None
) -> Value:
    """What programs divide by the rows of the job counts whole in steps of Keras."""
    share = current_share()
    if not in_keras_step() or share is None:
        return original(per_example_loss, sample_weight, global_batch_size)
    if global_batch_size is None:
        return original(per_example_loss, sample_weight, tf.shape(per_example_loss)[0])
    loss = original(per_example_loss, sample_weight, global_batch_size)
    return loss * share.of_whole_sum(loss.dtype)


@replaces(tf.nn, "scale_regularization_loss", _ROWS)
def _regularization_loss(original: Function, regularization_loss: Value) -> Value:
    """What programs divide by the replicas counts whole in steps of Keras."""
    return tf.reduce_sum(regularization_loss) if in_keras_step() else original(regularization_loss)


def _say_that_it_is_no_mean(
    kind: type, original: Function, loss: keras.losses.Loss, *args: Value, **options: Value
) -> Value:
    if current_share() is not None and getattr(loss, "axis", None) is None:
        say_once(
            f"keras.losses.{kind.__name__} is no mean over rows: each replica computes it for its own rows, so the "
            "result is not that of one process"
        )
    return original(loss, *args, **options)


for _kind in (keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle):
    _says = functools.partial(_say_that_it_is_no_mean, _kind)
    _why = "says once that this loss couples rows, so that a mean over replicas is another number"
    replaces(_kind, "call", _ROWS, _why)(_says)


def _even(share: Share, dtype: str) -> Value:
    """Returns the factor that Keras multiplies a replica's loss by, bit for bit."""
    return keras.ops.cast(share.even, dtype)


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


@replaces(keras.Model, "compute_loss", _ROWS)
def _whole_loss(original: Function, model: Model, *args: object, **options: object) -> Value:
    """A `train_step` may track the loss it returns.

    That is the whole loss; its gradient is of the share.
    """
    loss = original(model, *args, **options)
    share = current_share()
    # A program's override may add terms to the result.
    if share is None or loss is None or in_keras_step() or type(model).compute_loss is not keras.Model.compute_loss:
        return loss

    @tf.custom_gradient
    def whole(loss: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return _unscaled(share, loss), lambda gradient: gradient

    result = whole(loss)
    setattr(result, _WHOLE, True)
    return result


@replaces(keras.metrics.Mean, "update_state", _ROWS)
def _tracked_scalar(
    original: Function, metric: keras.metrics.Mean, values: Structure, sample_weight: Value = None
) -> object:
    """A scalar counts by the replica's rows, until ranks join what it is computed from."""
    share = current_share()
    if share is not None and sample_weight is None and _is_scalar(values):
        value, weight = tf.convert_to_tensor(values), share.relative(tf.as_dtype(metric.dtype))
        if share.step is not None:
            value, weight = tf.distribute.get_strategy().extended.numbers.counted(share, metric, value, weight)
        elif not share.trains:
            say_once(
                "in strategy.run, outside of training, a scalar given to keras.metrics.Mean counts once for each "
                "replica: if batches do not divide evenly, the result is not exactly that of one process"
            )
        values, sample_weight = share.only_if_rows(value), share.only_if_rows(weight)
    return original(metric, values, sample_weight)


def _is_scalar(value: Value) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(value, (int, float)) or (shape is not None and tf.TensorShape(shape).rank == 0)


@replaces(keras.optimizers.Optimizer, "_backend_apply_gradients", _ROWS)
def _weigh_gradients(
    original: Function, optimizer: Optimizer, grads: Structure, trainable_variables: Sequence[Variable]
) -> object:
    """Gradients count by the replica's rows."""
    share, accumulates = current_share(), bool(optimizer.gradient_accumulation_steps)
    if not in_keras_step() and (share is None or accumulates):
        if accumulates and share is not None:
            grads = [share.only_if_rows(each) for each in grads]
        return original(optimizer, grads, trainable_variables)
    replicas = tf.distribute.get_strategy().extended._num_replicas_in_sync
    if accumulates and replicas > 1:
        # A replica accumulates its part of the mean over each batch: it has other rows in each, and another number of
        # workers may apply it. Limits of an optimizer are of its own gradient: see `accumulating_replicas`.
        with reducing_gradients(replicas):
            count = counted()
        grads = [None if each is None else count.part(each) for each in grads]
    with reducing_gradients(replicas, weighted=accumulates):
        return original(optimizer, grads, trainable_variables)


def accumulating_replicas(optimizer: Optimizer) -> tf.Tensor | int:
    """By how much a replica's accumulated gradient, in a step of Keras, is smaller than its own; else 1."""
    if not (optimizer.gradient_accumulation_steps and in_keras_step()):
        return 1
    share = current_share()
    return tf.distribute.get_strategy().extended._num_replicas_in_sync if share is None else share.replicas


@replaces(trainer_module, "reduce_per_replica", _ROWS)
def _weigh_results(
    original: Function, values: Structure, strategy: tf.distribute.Strategy, reduction: str
) -> Structure:
    """Results of replicas' steps count by rows."""
    if not isinstance(strategy, BaseStrategy) or reduction != "auto" or strategy.extended.last_batch is None:
        return original(values, strategy, reduction)
    last = strategy.extended.last_batch
    if not tf.executing_eagerly():  # notes, by name, what has no size that it may share with the rows
        for path, value in keras.tree.flatten_with_path(values):
            (last.fixed.discard if _may_be_of_rows(value) else last.fixed.add)("/".join(map(str, path)))
    return keras.tree.map_structure(functools.partial(_joined, last.given()), values)


def _may_be_of_rows(value: Value) -> bool:
    return may_be_of_rows(value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value)


def _joined(rows: tf.Tensor, value: Value) -> Value:
    """Returns the mean of the local replicas' `value`; if it has one for each row, all of them."""
    if not isinstance(value, tf.distribute.DistributedValues):
        return value
    sizes = [each.shape[0] if each.shape.rank else None for each in map(tf.convert_to_tensor, value.values)]
    if not tf.executing_eagerly():
        return tf.concat(value.values, 0) if _may_be_of_rows(value) else mean(rows, value)
    given = rows.numpy().tolist()
    if sizes == given:
        return tf.concat(value.values, 0)
    most = given.index(max(given))
    if sizes[most] != 1:
        return mean(rows, value)
    # One number, as of a metric: `cut` took it for the value of the row in place of none where there are no rows.
    nothing = tf.zeros_like(value.values[most])
    return _mean(rows, [each if tf.size(each) else nothing for each in value.values])


def mean(rows: tf.Tensor, value: Value) -> Value:
    """Returns the mean of the local replicas' `value`, weighed by their `rows` if these differ."""
    return _mean(rows, value.values) if isinstance(value, tf.distribute.DistributedValues) else value


def _mean(rows: tf.Tensor, values: Sequence[Value]) -> tf.Tensor:
    each = tf.stack(values)
    plain = tf.reduce_mean(each, axis=0)  # as Keras
    if not each.dtype.is_floating:
        return plain
    counts = tf.reshape(rows, [-1, *[1] * (each.shape.rank - 1)])
    weighed = tf.where(counts > 0, each * tf.cast(counts, each.dtype), tf.zeros_like(each))
    uneven = tf.reduce_all(rows >= 0) & tf.reduce_any(rows != rows[0])
    return tf.where(uneven, tf.reduce_sum(weighed, 0) / tf.cast(tf.reduce_sum(rows), each.dtype), plain)


# What a program itself reduces in a replica function. A replica without rows adds nothing, and a mean is one over rows.


def _share_of(context: tf.distribute.ReplicaContext) -> Share | None:
    return None if not isinstance(context.strategy, BaseStrategy) or is_reducing_gradients() else current_share()


@replaces(tf.distribute.ReplicaContext, "all_reduce", _ROWS)
def _all_reduce(
    original: Function,
    context: tf.distribute.ReplicaContext,
    reduce_op: tf.distribute.ReduceOp | str,
    value: Structure,
    options: object = None,
) -> Structure:
    """What a program sums or averages itself counts by rows."""
    if (share := _share_of(context)) is None:
        return original(context, reduce_op, value, options)
    reduce_op = tf.distribute.ReduceOp(reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
    flat = tf.nest.flatten(value)
    flat = [each if isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in flat]
    if reduce_op == tf.distribute.ReduceOp.MEAN:
        if not all(isinstance(each, tf.Tensor) and each.dtype.is_floating for each in flat):
            return original(context, reduce_op, value, options)
        weight = share.weight(share.even, exchange=True)
        flat = [each * tf.cast(weight, each.dtype) for each in flat]
    for index, each in enumerate(flat):
        if share.depends_on_rows(each):
            flat[index] = _with_gradient(share, share.only_if_rows(each), tf.math.divide_no_nan)
    summed = original(context, tf.distribute.ReduceOp.SUM, flat, options)
    return tf.nest.pack_sequence_as(value, [_arrived(share, each) for each in summed])


@replaces(tf.distribute.ReplicaContext, "all_gather", _ROWS)
def _all_gather(
    original: Function, context: tf.distribute.ReplicaContext, value: Structure, axis: Value, options: object = None
) -> Value:
    """A replica without rows adds none."""
    share = _share_of(context)
    if share is None or tf.get_static_value(axis) != 0:
        return original(context, value, axis, options)

    def own(each: Value) -> Value:
        each = tf.convert_to_tensor(each)
        if not each.shape.rank or not share.depends_on_rows(each):
            return each
        if share.may_be_empty:
            each = each[: tf.where(share.has_rows, tf.shape(each)[0], 0)]
        return _with_gradient(share, each, tf.math.divide_no_nan)

    gathered = original(context, tf.nest.map_structure(own, value), axis, options)
    return tf.nest.map_structure(functools.partial(_arrived, share), gathered)


def _arrived(share: Share, value: Value) -> Value:
    """Returns `value`, the same on all replicas, whose gradient goes to the whole job, by this replica's weight."""
    return share.alike(_with_gradient(share, value, tf.multiply))


def _with_gradient(share: Share, value: Value, change: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Value:
    """Returns `value`, whose gradient comes from the whole job or goes there: a `change` by this replica's weight."""
    if not in_keras_step() or not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    relative = share.relative(value.dtype)

    @tf.custom_gradient
    def weighted(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(value), lambda gradient: change(gradient, relative)

    return weighted(value)
