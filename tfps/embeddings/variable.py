"""What stands for a table among a model's trainable variables, and how an optimizer updates the table's rows.

Keras asks a tape for the gradient of each trainable variable and gives both to an optimizer. So a table has a variable
without content: its gradient is `tf.IndexedSlices` of rows, with ids as indices, and an optimizer that gets it sends it
to the owners of the rows with the scalars of its rule (`strategy/optimizers.py`).

Tested in tests/layers/test_embedding.py and tests/layers/test_optimizers.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import uuid
import weakref
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfps.config import Config
from tfps.embeddings.host import HostTable
from tfps.errors import TfpsError, UnsupportedError
from tfps.exchange.update_spec import SLOTS, UpdateSpec
from tfps.graph.patches import BaseStrategy
from tfps.graph.shares import counted, current_share, in_keras_step, reducing_gradients
from tfps.graph.tf_private import identities, in_xla, ops
from tfps.keras_hooks.kept_rows import KeptRows
from tfps.keras_hooks.keras_private import decays
from tfps.policies.remote_optimizers import READINGS, constants_of, reading_of, step_scalars
from tfps.runtime.runtime import Runtime
from tfps.tables.initial import Initial
from tfps.tables.spec import TableSpec
from tfps.trace.recorder import Recorder
from tfps.types import Argument, Array, Model, Optimizer, Options, Structure, Value, Variable
from tfps.updates.itself import UpdatesItself
from tfps.updates.names import unnumbered
from tfps.worker.embedded import EmbeddedExchange

_INITIAL = "initial"  # the name of what rows are before any of them is trained
_OWN = "give the layer an optimizer of its own, such as optimizer=keras.optimizers.Adagrad(0.05)"
_RULES = {kind: reading for kind, reading in READINGS.items() if kind is not keras.optimizers.Nadam}
_LIMITS = ("clipnorm", "global_clipnorm", "clipvalue")
# By rule: slots that it has beside its own, with the options of the optimizer that ask for them.
_MORE_SLOTS = {
    "sgd": {"momentum": "momentum"},
    "adam": {"velocity_hat": "amsgrad"},
    "rmsprop": {"momentum": "momentum", "average_gradient": "centered"},
}


@functools.cache
def _local_runtime() -> Runtime:
    """The runtime of all tables of this process that belong to no strategy of tfps: it owns their rows."""
    runtime = Runtime(EmbeddedExchange(), Recorder(), Config().step_timeout_s)
    atexit.register(runtime.close)
    return runtime


class TableVariable(keras.Variable, UpdatesItself):
    """Stands for a table; float32 [1, dim], always 0. Its gradient is `tf.IndexedSlices` of rows, float32 [n, dim].

    Its shape is that of a table of one row: so TensorFlow makes the gradients of branches that look nothing up.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        rows: int | None,
        initial: Initial,
        seed: int,
        optimizer: Optimizer | None,
        settings: Options,  # of admission: fields of TableSpec
        **options: Argument,
    ) -> None:
        super().__init__(initializer="zeros", shape=(1, dim), dtype="float32", name=name, **options)
        self.overwrite_with_gradient = True  # so that optimizers keep no slots for it
        self._strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
        self.strategy = self._strategy if isinstance(self._strategy, BaseStrategy) else None  # of tfps
        self.dim, self.rows, self.optimizer = dim, rows, optimizer
        self._initial, self._settings = initial, settings
        self.undecided = True  # whether it has not been declared for the optimizer that is to update it
        if self.strategy is not None:
            extended = self.strategy.extended
            runtime, replicas = extended.runtime, len(extended.worker_devices)
        else:
            runtime, replicas = _local_runtime(), _replicas(self._strategy)
        self.table = HostTable(runtime, self.path, unnumbered(self.path), dim, initial, seed, replicas)
        self._seed: Variable | None = None  # rank 0's, when initial values are agreed
        if self.strategy is not None:
            self._seed = tf.Variable(seed, trainable=False, dtype=tf.int64, name=f"{self.path}/seed")
            self.table.changed = tf.Variable(0, trainable=False, dtype=tf.int64, name=f"{self.path}/changes")
            self.table.codec = self.strategy.extended.compressing.codec_of_table(self.path)
        with _lock:
            _all[self.table.number] = self
        if optimizer is not None:
            update_spec(optimizer, dim)  # which may refuse

    @property
    def name(self) -> str:
        """That of the variable in Keras' layer: optimizers exclude variables by it (`exclude_from_weight_decay`)."""
        return "embeddings"

    @property
    def _replica(self) -> int:
        context = tf.distribute.get_replica_context()
        return int(context._replica_id) if context is not None and context.strategy is self._strategy else 0

    def lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows of `ids`, int64 [n], each once: float32 [n, dim], differentiable with respect to this variable."""
        if not tf.executing_eagerly() and in_xla(ops.get_default_graph()):
            raise UnsupportedError(
                f"rows of table {self.path!r} are looked up in a function compiled by XLA (jit_compile=True), which "
                "cannot ask for them; use jit_compile=False"
            )
        self._take_seed()
        rows = self.table.lookup(ids, self._replica)
        if not self.trainable:
            return rows

        read = tf.convert_to_tensor(self.value)
        if not tf.executing_eagerly():
            return identities(_ROWS, [rows, read, ids], _of_rows)[0]

        @tf.custom_gradient
        def attached(rows: tf.Tensor, read: tf.Tensor) -> Value:
            return tf.identity(rows), lambda upstream: _of_rows([rows, read, ids], upstream)[:2]

        return attached(rows, read)

    @property
    def seed(self) -> int:
        """Of the initial values."""
        self._take_seed()
        return self.table.seed if self.table.spec is None else self.table.spec.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self.table.seed = seed
        if self._seed is not None:
            self._seed.assign(seed)

    def _take_seed(self) -> None:
        if self._seed is not None:
            with tf.init_scope():
                self.table.seed = int(self._seed.values[0].numpy())

    @property
    def parameters(self) -> int:
        """Floats of all its rows: of a table for any id those that there are now."""
        return self.dim * (self.table.count() if self.rows is None else self.rows)

    def spec(self, update: UpdateSpec) -> TableSpec:
        self._take_seed()
        return TableSpec(self.dim, self.rows, self.table.seed, self._initial, update, **self._settings)

    def declare(self, optimizer: Optimizer) -> None:
        self.table.declare(self.spec(self.update_by(optimizer)))
        self.undecided = False

    def declare_for_now(self, update: UpdateSpec) -> None:
        """Declares it while its optimizer may not be known; `declare`, or what restores slots, does so again."""
        self.table.declare(self.spec(update))
        self.undecided = self.optimizer is None

    def update_by(self, optimizer: Optimizer) -> UpdateSpec:
        """How its rows are updated: by its own optimizer, if it has one; see `update_spec`."""
        return update_spec(self.optimizer or optimizer, self.dim, self)

    def load(self, ids: Array, rows: Array) -> None:
        """Replaces rows [n, dim] of `ids`, each once."""
        if self.table.spec is None:
            plain = UpdateSpec("sgd", (("momentum", 0.0), ("nesterov", 0.0)), (), (self.dim,), (False,))
            self.declare_for_now(plain if self.optimizer is None else self.update_by(self.optimizer))
        self.table.assign(ids, rows)

    def numpy(self) -> KeptRows:
        """What `get_weights` has of it: while that lives, owners keep what the rows are now, as far as they change."""
        values = np.zeros(self.shape, np.float32)
        self.table.check_restored()
        about = {"table": self.table.number, "name": _INITIAL, "seed": ""}
        if self.table.spec is None:  # its seed may not be that of all ranks yet
            own = self.strategy is None or self.strategy.num_workers == 1
            return KeptRows.of(values, {**about, "seed": str(self.seed) if own else ""})
        policy = None if self.strategy is None else self.strategy.extended.policy
        barrier = None if policy is None or policy.together else policy.state
        held = self.table.keep(str(self.table.step) if barrier is None else f"at {barrier}")
        return KeptRows.of(values, None if held is None else {**about, "name": held.name}, held)

    def assign(self, value: Value) -> None:
        """Goes back to what `numpy` has returned, as `set_weights` does; on every rank.

        Raises:
            UnsupportedError: it is something else.
        """
        said = value.said if isinstance(value, KeptRows) else None
        if said is None or said["table"] != self.table.number:
            raise UnsupportedError(
                f"the rows of table {self.path!r} are on pservers, and what is assigned has none of them: set_weights "
                "takes what get_weights of the same model has returned in this run, unchanged; other models and runs "
                "get them by save_weights() and load_weights(), other values by load_rows(ids, rows) of the layer"
            )
        seed = said["seed"] or str(self.seed)
        if self.table.spec is None:
            self.seed = int(seed)
        else:
            self.table.go_back(said["name"], seed if said["name"] == _INITIAL else "")

    def __tf_tensor__(self, dtype: Argument = None, name: str | None = None) -> tf.Tensor:
        raise self._without_content

    def __array__(self, dtype: Argument = None) -> Array:
        raise self._without_content

    @property
    def _without_content(self) -> UnsupportedError:
        """For whoever reads a variable of each layer, as TensorBoard does for its histograms."""
        return UnsupportedError(
            f"the rows of table {self.path!r} are on pservers, and the variable that stands for them has no content: "
            "read rows by embeddings (all) or read_rows(ids) of the layer, leave the variable out of losses, and give "
            "TensorBoard histogram_freq=0"
        )

    def _export_to_saved_model_graph(self, *_: object, **__: object) -> list[tf.Tensor]:
        raise self.not_in("a SavedModel")

    def not_in(self, what: str) -> UnsupportedError:
        """For what keeps a model without the files beside it that rows need."""
        return UnsupportedError(
            f"the rows of table {self.path!r} are on pservers and cannot be in {what}: save it by model.save, or "
            "build the model that serves with layer.to_embedding() in the place of the layer, or write rows by "
            "layer.export_rows(path)"
        )

    def _serialize_to_tensors(self) -> Structure:
        raise self._not_in_checkpoints

    def _restore_from_tensors(self, restored_tensors: Structure) -> Structure:
        raise self._not_in_checkpoints

    @property
    def _not_in_checkpoints(self) -> UnsupportedError:
        return UnsupportedError(
            f"the rows of table {self.path!r} are on pservers and cannot be in a tf.train.Checkpoint: save the "
            "compiled model by model.save('name.keras'), which has its optimizer, too, or by model.save_weights"
        )

    def apply(self, gradient: Value, optimizer: Optimizer) -> None:
        """Sends it to the owners of the rows."""
        optimizer = self.optimizer or optimizer
        if not isinstance(gradient, tf.IndexedSlices):
            raise UnsupportedError(
                f"the gradient of table {self.path!r} must be tf.IndexedSlices, got {gradient!r}: look rows up before "
                "tf.while_loop, tf.map_fn, tf.scan, keras.layers.RNN and tf.recompute_grad, not within, and leave "
                "the variable of the table out of losses"
            )
        ids, values = _by_id(gradient)
        if self.strategy is not None:
            ids, values = self._counted(self.strategy, ids, values)
        reading = _RULES[type(optimizer)]
        scalars = tf.concat([step_scalars(optimizer, reading, optimizer.learning_rate)], 0)
        self.table.push(ids, values, scalars, self._replica)

    def _counted(self, strategy: BaseStrategy, ids: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """What this replica adds to the sum over all: weighed, and nothing if it has no rows of the batch."""
        share, extended = current_share(), strategy.extended
        if not in_keras_step() and share is None:
            return ids, values
        with reducing_gradients(extended._num_replicas_in_sync):
            count = counted()
        values = count.weighted(values)
        if extended._reductions.estimates:
            (values,) = extended._reductions.estimated([values])
        if count.has_rows is not None:  # else the row that stands in for none would be one that is trained
            some = tf.where(count.has_rows, tf.size(ids), 0)
            ids, values = ids[:some], values[:some]
        return ids, values


_lock = threading.RLock()  # guards it; reentrant: the garbage collector may run a finalizer anywhere
_all: weakref.WeakValueDictionary[int, TableVariable] = weakref.WeakValueDictionary()  # by number


def _every() -> list[TableVariable]:
    with _lock:
        return list(_all.values())


def all_tables(strategy: tf.distribute.Strategy | None) -> list[TableVariable]:
    """The tables of a strategy of tfps, or those of none, in the order in which they were created."""
    return sorted((each for each in _every() if each.strategy is strategy), key=lambda table: table.table.number)


def tables_of(model: Model) -> list[TableVariable]:
    """The tables of a model, in the order of its layers."""
    known = {id(each): each for each in _every()}
    return [known[id(each)] for each in model.variables if id(each) in known]


def prefetch(strategy: weakref.ref[tf.distribute.Strategy], batches: Sequence[Structure]) -> None:
    """Prefetches the rows of a batch that has just been staged. Called by a thread that stages."""
    if (own := strategy()) is not None:
        for variable in all_tables(own):
            with contextlib.suppress(TfpsError):  # which the next step raises
                variable.table.forget()
            variable.table.prefetch(batches)


def update_spec(optimizer: Optimizer, dim: int, variable: Variable = None) -> UpdateSpec:
    """How rows of `dim` floats are updated by `optimizer`, which may exclude their `variable` from its weight decay.

    Raises:
        UnsupportedError: it has no rule by row.
    """
    reading = reading_of(optimizer, _RULES, "rows of tables know", _OWN)
    for name in (*_LIMITS, "use_ema", "gradient_accumulation_steps"):
        if getattr(optimizer, name):
            raise UnsupportedError(
                f"an optimizer of tables must have no {name}, which needs all rows or several steps, got "
                f"{name}={getattr(optimizer, name)!r} of {type(optimizer).__name__}; {_OWN}"
            )
    decayed = bool(optimizer.weight_decay) and (variable is None or decays(optimizer, variable))
    constants, slots = constants_of(optimizer, reading, decays=decayed), _slots(reading.rule, optimizer)
    return UpdateSpec(reading.rule, constants, tuple(slots.items()), (dim,), (decayed,))


def _slots(rule: str, optimizer: Optimizer) -> dict[str, float]:
    """The slots of a row and their initial values."""
    more = [name for name, option in _MORE_SLOTS.get(rule, {}).items() if getattr(optimizer, option)]
    slots = dict.fromkeys((*SLOTS.get(rule, ()), *more), 0.0)
    if "accumulator" in slots:
        slots["accumulator"] = float(optimizer.initial_accumulator_value)
    return slots


# The sign of ids is flipped in gradients: then index 0 is an id that nobody has, but for those of a tf.cond that has
# looked nothing up: TensorFlow makes one row of zeros of index 0.
_SIGN = -(2**63)

_ROWS = f"TfpsRowsOfTable{uuid.uuid4().hex}"  # TensorFlow takes each name once, but this module may be imported again


def _of_rows(inputs: Sequence[tf.Tensor], upstream: Value, *_: Value) -> list[Value]:
    """Gradients of rows, of the variable that stands for their table, and of their ids."""
    _, read, ids = inputs
    if isinstance(upstream, tf.IndexedSlices):
        upstream = tf.math.unsorted_segment_sum(upstream.values, upstream.indices, tf.size(ids))
    return [None, tf.IndexedSlices(upstream, _flipped(ids), tf.constant(read.shape.as_list())), None]


tf.RegisterGradient(_ROWS)(lambda op, *outputs: _of_rows(op.inputs, *outputs))


def _flipped(ids: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(ids, tf.constant(_SIGN, tf.int64))


def _by_id(gradient: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """Ids, each once, and the sum of their gradients, float32 [n, dim]; several lookups may have the same."""
    values = tf.cast(gradient.values, tf.float32)
    with tf.device("/device:CPU:0"):
        ids, places = tf.unique(_flipped(tf.cast(gradient.indices, tf.int64)), out_idx=tf.int64)
        nobody = tf.equal(ids, _SIGN)
    summed = tf.math.unsorted_segment_sum(values, places, tf.size(ids))

    def without() -> tuple[tf.Tensor, tf.Tensor]:
        kept = tf.logical_not(nobody) | tf.reduce_any(tf.not_equal(summed, 0.0), 1)
        return tf.boolean_mask(ids, kept), tf.boolean_mask(summed, kept)

    found: tuple[tf.Tensor, tf.Tensor] = tf.cond(tf.reduce_any(nobody), without, lambda: (ids, summed))
    return found


def _replicas(strategy: tf.distribute.Strategy | None) -> int:
    """How many replicas a strategy of TensorFlow has, in this process.

    Raises:
        UnsupportedError: it has several workers, which would each have their own rows.
    """
    if strategy is None:
        return 1
    if not isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)) or isinstance(
        strategy, tf.distribute.MultiWorkerMirroredStrategy
    ):
        raise UnsupportedError(
            f"a table works under tfps.Strategy, tf.distribute.MirroredStrategy and without a strategy, got "
            f"{type(strategy).__name__}, whose workers would each have rows of their own"
        )
    return int(strategy.num_replicas_in_sync)
