"""Metrics that get one number for a batch: ranks note what it is computed from, and join that when an epoch ends.

In one process a batch counts once, by its one number. Here each replica has a number of its own rows, so it notes by
which sums over rows it is computed (`RowSums`). When the metrics are read for all ranks, these gather the sums, add
them up batch by batch, and compute each batch's number: no step waits for it, ranks may have different numbers of
batches, and what tells of the rows of global batches is not needed. Where the graph proves no sums, replicas' numbers
count by rows.

Until then a metric has what its replica's number would be by its own rows, as the bar within an epoch shows it.

Tested in tests/programs/taught_vectors.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

from tfps.graph.ops import HOST
from tfps.graph.patches import BaseStrategy, replaced
from tfps.graph.row_kinds import Kind, Of
from tfps.graph.row_sums import RowSums, row_sums
from tfps.graph.shares import Share, current_share, say_once
from tfps.graph.tf_private import ResourceVariable, distribute_lib, ops
from tfps.keras_hooks.differentiated import say_if_metric_is_no_mean
from tfps.keras_hooks.hooks import for_models, replaces
from tfps.types import Array, Function, Model, Structure, Value, Variable

_TEST = "tests/programs/test_taught.py"
# What a replica notes of a batch, float64: the number times its rows that count, these rows, all of its rows, and what
# the metric has got meanwhile: total and count. Then sums.
_NUMBER, _COUNTED, _ROWS, _TOTAL, _COUNT, _SUMS = range(6)


@dataclass
class _Slot:
    """What local replicas have noted for one metric, as it is computed in one way."""

    metric: Callable[[], keras.metrics.Mean | None]  # a weak reference
    form: int  # of its sums; 0 if there are none
    rest: Callable[[tf.Tensor], tf.Tensor] | None  # from float64 [batches, sums] to numbers, float64 [batches]
    queues: list[tf.queue.FIFOQueue]  # one for each local replica, a batch each
    named: bool  # whether it was said that it is no mean


@dataclass
class _Batches:
    """What all ranks have noted for one metric."""

    ranks: list[int] = field(default_factory=list)
    sums: dict[int, Array] = field(default_factory=dict)  # by batch


class BatchNumbers:
    """Of the metrics under one strategy with `replicas` local devices; `together`: ranks train on the same batches."""

    def __init__(self, replicas: int, *, together: bool) -> None:
        self._replicas, self._together = replicas, together
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        with tf.init_scope(), tf.device(HOST):
            self._noting = ResourceVariable(False, dtype=tf.bool, trainable=False, name="tfps_notes_numbers")

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """In the block steps note numbers: someone reads them then. Calls may nest."""
        before = bool(self._noting)
        self._noting.assign(True)
        try:
            yield
        finally:
            self._noting.assign(before)

    def counted(
        self, share: Share, metric: keras.metrics.Mean, value: tf.Tensor, weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Notes this replica's number of a batch; returns what the metric gets meanwhile, and its weight there."""
        in_graph, is_function = share.graph is not None, isinstance(metric, keras.metrics.MeanMetricWrapper)
        kind = share.kinds.of(value) if in_graph else None
        is_mean, adds_up = kind is not None and kind.is_mean, kind is None or kind.adds_up
        trains = share.step == "training"
        notes = not (trains and (is_mean or (in_graph and adds_up and not is_function)))  # those count by rows already
        if in_graph and ops.get_default_graph() is not share.graph:  # in a branch, where some ranks may not come
            notes = False
        notes = notes and (self._together or not trains)
        found = row_sums(share.kinds, value, share.rows, _outputs.now) if notes and in_graph and not is_mean else None
        named = found is None and say_if_metric_is_no_mean(share, metric.name, value, is_function=is_function)
        if not notes and not (named and is_function):
            return value, weight
        if not notes:
            is_nan = tf.math.is_nan(tf.cast(value, tf.float64))
            return tf.where(is_nan, tf.zeros_like(value), value), tf.where(is_nan, tf.zeros_like(weight), weight)
        number, noting, rows = tf.cast(value, tf.float64), self._noting.read_value(), tf.cast(share.rows, tf.float64)
        held_back = noting & ~tf.math.is_finite(number)
        value, weight = (tf.where(held_back, tf.zeros_like(each), each) for each in (value, weight))
        # A replica that has nothing to compute a function of returns NaN.
        leaves_out = tf.math.is_nan(number) & (is_function and not is_mean)
        counted = tf.where(leaves_out, tf.zeros_like(rows), rows)
        got = tf.cast(weight, tf.float64)
        noted = tf.stack(
            [tf.where(leaves_out, rows * 0, number * rows), counted, rows, tf.cast(value, got.dtype) * got, got]
        )
        if found is not None:
            noted = tf.concat([noted, found.sums], 0)
        noted = share.only_if_rows(noted)
        replica = distribute_lib.get_replica_context()._replica_id
        queue = self._slot(metric, found, noted.shape[0], named=named).queues[replica]

        def note() -> None:
            with tf.device(HOST):
                queue.enqueue(noted)

        tf.cond(noting, note, lambda: None)
        return value, weight

    def _slot(self, metric: keras.metrics.Mean, found: RowSums | None, width: int, *, named: bool) -> _Slot:
        form, rest = (0, None) if found is None else (found.form, found.rest)
        with self._lock:
            for each in self._slots:
                if each.metric() is metric and each.form == form:
                    return each
            with tf.init_scope(), tf.device(HOST):
                if rest is not None:
                    batches = tf.TensorSpec([None, width - _SUMS], tf.float64)
                    several = tf.function(
                        functools.partial(tf.map_fn, rest), autograph=False, input_signature=[batches]
                    )
                    rest = several.get_concrete_function()
                queues = [tf.queue.FIFOQueue(2**31 - 1, [tf.float64], [[width]]) for _ in range(self._replicas)]
            self._slots.append(_Slot(weakref.ref(metric), form, rest, queues, named))
            return self._slots[-1]

    def _of(self, model: Model) -> list[tuple[int, keras.metrics.Mean, _Slot]]:
        """Slots of the model's metrics, with places of these that all ranks have alike."""
        places = {id(variable): place for place, variable in enumerate(model.metrics_variables)}
        with self._lock:
            known = [(metric, slot) for slot in self._slots if (metric := slot.metric()) is not None]
            self._slots = [slot for _, slot in known]
        found = [(places.get(id(metric.total)), metric, slot) for metric, slot in known]
        return [(place, metric, slot) for place, metric, slot in found if place is not None]

    def drop(self, model: Model) -> None:
        """Forgets what the model's metrics have got: they begin anew."""
        for *_, slot in self._of(model):
            for queue in slot.queues:
                _taken(queue)

    def has_some(self, model: Model) -> bool:
        return any(int(queue.size()) for *_, slot in self._of(model) for queue in slot.queues)

    def settle(self, strategy: tf.distribute.Strategy, model: Model, *, from_end: bool) -> None:
        """Gives the model's metrics the numbers of global batches; all ranks call it.

        from_end: whether ranks have ended with the same batch, but may have begun later, instead of begun together.
        """
        own = [(*found, [_taken(queue) for queue in found[-1].queues]) for found in self._of(model)]
        said = [np.zeros(0)]
        for place, _, slot, taken in own:
            for noted in taken:
                first = -len(noted) if from_end else 0
                said += [np.array([place, slot.form, strategy.rank, first, *noted.shape], np.float64), noted.ravel()]
        stream = strategy.gather(tf.constant(np.concatenate(said)), axis=0).numpy()
        said_of: dict[tuple[int, int], _Batches] = defaultdict(_Batches)
        while len(stream):
            place, form, rank, first, count, width = (int(each) for each in stream[:6])
            noted, stream = stream[6 : 6 + count * width].reshape(count, width), stream[6 + count * width :]
            batches = said_of[place, form]
            batches.ranks += [rank] * bool(count)
            for number, row in enumerate(noted, first):
                batches.sums[number] = batches.sums[number] + row if number in batches.sums else row
        variables = model.metrics_variables
        changes: dict[int, Array] = defaultdict(lambda: np.zeros([self._replicas, 2]))
        for place, metric, slot, taken in own:
            for replica, noted in enumerate(taken):
                changes[place][replica] -= noted[:, [_TOTAL, _COUNT]].sum(0)
            batches = said_of[place, slot.form]
            if batches.ranks and strategy.rank == min(batches.ranks):
                numbers = _numbers(metric.name, slot, np.stack(list(batches.sums.values())))
                changes[place][0] += [numbers.sum(), len(numbers)]
        for place in sorted({place for place, _ in said_of}):
            _add(strategy, variables[place], variables[place + 1], changes[place])


def _numbers(name: str, slot: _Slot, sums: Array) -> Array:
    """The numbers of batches, [batches], of their sums."""
    if slot.rest is not None:
        return slot.rest(tf.constant(sums[:, _SUMS:])).numpy()
    counted, rows = sums[:, _COUNTED], sums[:, _ROWS]
    if not slot.named and ((counted > 0) & (counted < rows)).any():
        say_once(
            f"metric {name!r} got NaN for a batch on some replicas and numbers on others, and the NaN is "
            "left out: a replica may have no rows to compute it of. Give keras.metrics.Mean a number for each row, "
            "with sample_weight=0 for rows that are not to count"
        )
    with np.errstate(invalid="ignore"):
        return sums[:, _NUMBER] / counted


def _taken(queue: tf.queue.FIFOQueue) -> Array:
    """Takes all that a queue has, float64 [batches, width]."""
    with tf.device(HOST):
        return queue.dequeue_many(queue.size()).numpy()


def _add(strategy: tf.distribute.Strategy, total: Variable, count: Variable, changes: Array) -> None:
    """Adds to what each local replica has: `changes`, [replicas, 2]."""

    def add() -> None:
        for variable, change in zip(
            (total, count), changes[distribute_lib.get_replica_context()._replica_id], strict=True
        ):
            variable.assign_add(tf.cast(change, variable.dtype))

    strategy.run(add)


class _Outputs(threading.local):
    now: Sequence[tf.Tensor] = ()  # what the metric function that runs now is computed from


_outputs = _Outputs()


@replaces(keras.metrics.MeanMetricWrapper, "update_state", _TEST)
def _of_a_function(
    original: Function, metric: keras.metrics.Mean, y_true: Structure, y_pred: Structure, *args: Value, **more: Value
) -> object:
    """What a metric function gets has one value for each row, whatever the model has computed it from."""
    given, share = [each for each in keras.tree.flatten((y_true, y_pred)) if tf.is_tensor(each)], current_share()
    if share is not None and share.graph is not None:
        for each in given:
            if each.shape.rank and share.kinds.of(each).of is Of.UNSURE:
                share.kinds.note(each, Kind(Of.ROWS))
    with replaced(_outputs, "now", given):
        return original(metric, y_true, y_pred, *args, **more)


@replaces(keras.Model, "reset_metrics", _TEST)
@for_models
def _reset(original: Function, strategy: BaseStrategy, model: Model) -> None:
    """What was noted for metrics goes with what they have."""
    if (numbers := strategy.extended.numbers) is not None:
        numbers.drop(model)
    original(model)
