"""What Keras decides by is the same on all ranks: logs, whether gradients are finite, what layers have adapted to.

Tested in tests/keras_hooks/test_agreed_logs.py and tests/integration/test_programs.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from tfps.errors import MismatchError
from tfps.graph.patches import BaseStrategy, replica_context
from tfps.graph.rows import UNKNOWN
from tfps.graph.shares import current_share
from tfps.keras_hooks.hooks import for_callbacks, for_models, replaces
from tfps.keras_hooks.weighing import mean
from tfps.types import Array, Callback, Function, Json, Layer, Logs, Model, Optimizer, Structure

_PROGRAMS = "tests/integration/test_programs.py"


@replaces(keras.Model, "_get_metrics_result_or_logs", _PROGRAMS)
@for_models
def _end_epoch(original: Function, strategy: BaseStrategy, model: Model, logs: Logs) -> Logs:
    """When an epoch ends, ranks meet, agree on logs, compare what must be alike, let one save; in this order."""
    extended = strategy.extended
    extended.policy.end_epoch(model)  # first: it brings the ranks together
    results = original(model, logs)
    if strategy.num_replicas_in_sync > 1:
        results = _agreed(strategy, model, logs, results is not logs)
        if extended.states is not None:
            extended.states.compare("when an epoch or evaluate() ended")
    extended.policy.let_one_save()
    return results


@replaces(keras.callbacks.TerminateOnNaN, "on_batch_end", _PROGRAMS)
@for_callbacks
def _stop_together(
    original: Function, strategy: BaseStrategy, callback: Callback, batch: int, logs: Logs | None = None
) -> None:
    """All ranks stop at the same batch."""
    several = strategy.num_replicas_in_sync > 1
    if several and not strategy.extended.policy.together:
        return  # the others do not take their batches together with this one: see _stop_at_epoch_end
    if several and logs and logs.get("loss") is not None:
        # If one rank's loss is not finite, all stop at this batch; else the others would wait for that rank.
        loss = tf.cast(logs["loss"], tf.float64)
        logs = {**logs, "loss": strategy.reduce(tf.distribute.ReduceOp.MEAN, loss, axis=None).numpy()}
    original(callback, batch, logs)


@replaces(keras.callbacks.TerminateOnNaN, "on_epoch_end", "tests/integration/test_async.py")
@for_callbacks
def _stop_at_epoch_end(
    original: Function, strategy: BaseStrategy, callback: Callback, epoch: int, logs: Logs | None = None
) -> None:
    """All ranks stop at the end of an epoch if they do not step together."""
    original(callback, epoch, logs)
    if strategy.num_replicas_in_sync > 1 and not strategy.extended.policy.together:
        # Keras' own, by logs which all ranks have alike.
        keras.callbacks.TerminateOnNaN.on_batch_end.__wrapped__(callback, epoch, logs)


@replaces(keras.optimizers.LossScaleOptimizer, "check_finite", _PROGRAMS)
def _check_finite_everywhere(original: Function, optimizer: Optimizer, grads: Structure) -> tf.Tensor:
    """A gradient that is not finite on one rank skips the step on all.

    Keras decides by one worker's gradients. If ranks decided differently, some would wait for gradients that others
    never send, and the loss scales would diverge. A rank without rows has no say.
    """
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in grads]  # Keras makes them dense
    finite, context = original(optimizer, values), replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return finite
    if (share := current_share()) is not None:
        finite = share.only_if_rows(finite, True)
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, bad), 0.0)


def agreed_logs(model: Model, logs: Logs) -> Logs:
    """Returns logs that all ranks agree on, within an epoch; all must call it at the same batch."""
    return {name: np.asarray(value)[()] for name, value in model._get_metrics_result_or_logs(logs).items()}


@dataclass(frozen=True)
class Value:
    """One leaf of the logs. `content` is a number's bytes in hex; for other values a text, with `dtype` empty."""

    dtype: str
    shape: list[int]
    content: str

    @classmethod
    def of(cls, leaf: object) -> Value:
        try:
            tensor = tf.convert_to_tensor(leaf)
        except (TypeError, ValueError):
            return cls("", [], repr(leaf))
        if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
            return cls("", [], repr(np.asarray(tensor.numpy()).tolist()))
        return cls(tensor.dtype.name, tensor.shape.as_list(), tensor.numpy().tobytes().hex())

    def number(self) -> Array:
        dtype = tf.as_dtype(self.dtype).as_numpy_dtype
        return np.frombuffer(bytes.fromhex(self.content), dtype).reshape(self.shape).astype(np.float64)

    def __str__(self) -> str:
        return str(self.number()) if self.dtype else self.content


@dataclass(frozen=True)
class Said:
    """One rank's logs, as sent to the others."""

    weight: int  # of this rank in a mean: the rows of its replicas; -1 if unknown
    are_metrics: bool  # the logs are the model's metrics, so Keras uses those
    names: list[str]  # of the leaves
    values: list[Value]  # of the leaves; empty if `are_metrics`
    same: list[list[int]]  # for each leaf, indices of the model's metrics whose local result is equal
    of_rows: list[bool]  # for each leaf, whether it has one value for each row of this rank's last batch
    has_numbers: bool  # whether metrics got one number for a batch

    @classmethod
    def parse(cls, said: Json) -> Said:
        """Reverses `dataclasses.asdict`."""
        return cls(**{**said, "values": [Value(**each) for each in said["values"]]})


def conclude(ranks: Sequence[Said], metrics: Sequence[str]) -> list[int | Array | None]:
    """Decides for each leaf: a metric's result (its index), a mean over ranks, or None if all ranks have the same.

    What has a value for each row is joined, in rank order; else a rank without rows counts only if it has a value.
    `ranks` have the same names; `metrics` are the model's.
    """
    found: list[int | Array | None] = []
    for leaf, name in enumerate(ranks[0].names):
        common = set.intersection(*(set(said.same[leaf]) for said in ranks))
        values = [said.values[leaf] for said in ranks]
        if common:
            found.append(min(common, key=lambda metric: (metrics[metric] != name.rpartition("/")[2], metric)))
        elif all(said.of_rows[leaf] for said in ranks):
            found.append(np.concatenate([value.number() for value in values]))
        else:
            counted = {rank: each for rank, each in enumerate(values) if ranks[rank].weight or each.shape != [0]}
            found.append(_common(name, counted or dict(enumerate(values)), ranks))
    return found


def _common(name: str, values: Mapping[int, Value], ranks: Sequence[Said]) -> Array | None:
    """Returns the mean of `values`, by rank; None if every rank has the same."""
    first, *_ = values.values()
    if len(set(map(str, map(dataclasses.astuple, values.values())))) == 1:
        return None if len(values) == len(ranks) else first.number()
    if all(value.dtype for value in values.values()) and len({str(value.shape) for value in values.values()}) == 1:
        return _average([value.number() for value in values.values()], [ranks[rank].weight for rank in values])
    shown = ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
    raise MismatchError(
        f"logs[{name!r}] of a train_step or test_step must be numbers of one shape, or the same on all ranks, "
        f"because callbacks decide by it; got {shown}"
    )


def _average(values: Sequence[Array], weights: Sequence[int]) -> Array:
    """Returns the mean of `values` by `weights` (equal weights if one is unknown); weight 0 excludes a NaN."""
    if min(weights) < 0 or not any(weights):
        weights = [1] * len(values)
    used = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    return np.asarray(np.average([value for value, _ in used], axis=0, weights=[weight for _, weight in used]))


def _agreed(strategy: tf.distribute.Strategy, model: Model, logs: Logs, are_metrics: bool) -> Logs:
    """Returns `logs` as agreed by all ranks, which must all call this; `are_metrics`: by their names."""
    leaves = keras.tree.flatten_with_path(logs)
    names = ["/".join(map(str, path)) for path, _ in leaves]
    rows = strategy.extended.last_batch.given()
    weight = -1 if UNKNOWN in rows.numpy() else int(sum(rows.numpy()))
    # Name and local result of each of the model's metrics, as a step returns them.
    with _without_advice(), strategy.extended.last_batch.unchanged():  # they agree again where an epoch ends here
        results = [] if are_metrics else keras.tree.flatten_with_path(strategy.run(_results, args=(model,)))
    own = [(str(path[-1]), mean(rows, result)) for path, result in results]
    said = Said(
        weight=weight,
        are_metrics=are_metrics,
        names=names,
        values=[] if are_metrics else [Value.of(leaf) for _, leaf in leaves],
        same=[
            [
                number
                for number, (_, result) in enumerate(own)
                # One number, cut as if it were that of the row in place of none: it may be any.
                if _equal(leaf, result) or (weight == 0 and np.shape(leaf) == (0,) and np.size(result) == 1)
            ]
            for _, leaf in leaves
        ],
        of_rows=[
            name not in strategy.extended.last_batch.fixed and tuple(np.shape(leaf))[:1] == (weight,)
            for name, (_, leaf) in zip(names, leaves, strict=True)
        ],
        has_numbers=strategy.extended.numbers.has_some(model),
    )
    ranks = list(map(Said.parse, said_by_all(strategy, dataclasses.asdict(said))))
    if any(each.has_numbers for each in ranks):
        with _without_advice():
            strategy.extended.numbers.settle(strategy, model, from_end=not strategy.extended.sharding.evaluates)
    if any(each.are_metrics for each in ranks) and all(each.are_metrics or not each.names for each in ranks):
        return model.get_metrics_result()  # also if a rank has had no batch
    for rank, each in enumerate(ranks):
        if (each.names, each.are_metrics) != (ranks[0].names, ranks[0].are_metrics):
            raise MismatchError(
                "logs of a train_step or test_step must have the same keys on all ranks; rank 0 has "
                f"{ranks[0].names}, rank {rank} {each.names}"
            )
    # A result may be the metric's variable itself, which validation changes before Keras reads what is returned here.
    results_now = keras.tree.flatten(_results(model))
    variables = keras.Variable, tf.Variable
    over_all = [tf.convert_to_tensor(each) if isinstance(each, variables) else each for each in results_now]
    agreed = []
    for (_, leaf), found in zip(leaves, conclude(ranks, [name for name, _ in own]), strict=True):
        if isinstance(found, int):
            result, shape = over_all[found], np.shape(leaf) if np.size(leaf) else (1,)
            agreed.append(result if np.shape(result) == shape else tf.reshape(result, shape))
        elif found is None:
            agreed.append(leaf)
        else:
            dtype = tf.convert_to_tensor(leaf).dtype
            keeps = dtype.is_floating or ranks[0].of_rows[len(agreed)]
            agreed.append(tf.constant(found, dtype if keeps else tf.float32))
    return keras.tree.pack_sequence_as(logs, agreed)


def said_by_all(strategy: tf.distribute.Strategy, own: Json) -> list[Json]:
    """Returns what all ranks say, in rank order; all must call this."""
    line = json.dumps(own) + "\n"
    lines = strategy.gather(tf.constant(np.frombuffer(line.encode(), np.uint8)), axis=0)
    return [json.loads(each) for each in lines.numpy().tobytes().decode().splitlines()]


def _results(model: Model) -> list[Logs]:
    """Returns the results of the model's metrics by name, one dict for each: several may have one name."""
    if type(model).get_metrics_result is not keras.Model.get_metrics_result:
        return [model.get_metrics_result()]  # the program's own
    results = [(metric.name, metric.result()) for metric in model.metrics]
    return [result if isinstance(result, dict) else {name: result} for name, result in results]


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """In the block TensorFlow does not tell the program to wrap `run` in a function: it is not the program's."""

    def tells_more(record: logging.LogRecord) -> bool:
        return "eagerly has significant overhead" not in record.getMessage()

    tf.get_logger().addFilter(tells_more)
    try:
        yield
    finally:
        tf.get_logger().removeFilter(tells_more)


def _equal(leaf: object, result: object) -> bool:
    """Whether the values are equal but for their last bits, which differ where a graph computes in another order.

    Keras 3.8 returns a result of one number as a scalar, whatever its shape in a step.
    """
    mine, own = Value.of(leaf), Value.of(result)
    if not mine.dtype or not own.dtype or np.prod(mine.shape) != np.prod(own.shape):
        return False
    dtype = tf.as_dtype(own.dtype)
    within = 8 * float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps) if dtype.is_floating else 0.0
    return np.allclose(mine.number().ravel(), own.number().ravel(), rtol=within, atol=0.0, equal_nan=True)


# What layers have adapted to. Rank 0's initial values go to all ranks, but a lookup table or the constants of
# Normalization stay each rank's own: adapted to different data, the same row would mean something else on each.

Digest = tuple[str, int, str]  # name of the layer, how many terms or numbers, a hash of them
_within: weakref.WeakSet[Model] = weakref.WeakSet()  # models that fit or are evaluated now


@contextlib.contextmanager
def compared_tables(strategy: tf.distribute.Strategy, model: Model) -> Iterator[None]:
    """Compares before the block, in which `model` is trained or evaluated; within another such block it does not."""
    outermost = model not in _within
    compares = strategy.num_workers > 1 and strategy.config.check_every and strategy.extended.policy.together
    if outermost and compares and (own := list(map(_digest, _adapted(model)))):
        _compare(said_by_all(strategy, own))
    _within.add(model)
    try:
        yield
    finally:
        if outermost:
            _within.discard(model)


def _adapted(model: Model) -> Iterable[Layer]:
    kinds = keras.layers.Normalization | keras.layers.Discretization
    within: set[int] = set()  # of others that adapt, which have the same terms
    for layer in _layers_of(model):
        if isinstance(layer, kinds) or (hasattr(layer, "get_vocabulary") and hasattr(layer, "adapt")):
            within.update(map(id, _layers_of(layer)))
            if id(layer) not in within:
                yield layer


def _layers_of(model: Model) -> list[Layer]:
    return [each for each in model._flatten_layers() if each is not model]


def _digest(layer: Layer) -> Digest:
    """Returns the digest of what `layer` has adapted to."""
    if isinstance(layer, keras.layers.Normalization | keras.layers.Discretization):
        found = layer.bin_boundaries or [] if hasattr(layer, "bin_boundaries") else (layer.mean, layer.variance)
        numbers = [np.asarray(each, np.float64) for each in found if each is not None]
        size, parts = sum(each.size for each in numbers), [each.tobytes() for each in numbers]
    else:
        terms = layer.get_vocabulary(include_special_tokens=True)
        weights = [each.idf_weights_const for each in (layer, *_layers_of(layer)) if hasattr(each, "idf_weights_const")]
        size, parts = len(terms), [str(term).encode() + b"\n" for term in terms]
        parts += [np.asarray(each).tobytes() for each in weights]
    return layer.name, size, hashlib.sha256(b"".join(parts)).hexdigest()


def _compare(ranks: Sequence[list[Digest]]) -> None:
    first, *others = ranks
    for rank, theirs in enumerate(others, 1):
        for (name, *mine), (_, *its) in zip(first, theirs, strict=False):
            if mine == its:
                continue
            if mine[0] != its[0]:
                what = f"{mine[0]} terms or numbers on rank 0, {its[0]} on rank {rank}"
            else:
                what = f"others on rank 0 than on rank {rank}"
            raise MismatchError(
                f"layer {name!r} has adapted to different data on the ranks: {what}; adapt it to the same data on all "
                "ranks, or pass what one rank has found (vocabulary, idf_weights, bin_boundaries, mean and variance)"
            )
