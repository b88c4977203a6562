"""`tfps.layers.Embedding`: a Keras layer whose rows live on pservers, or where there are none in this process.

Tested in tests/layers/test_embedding.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from tfps.embeddings.all_rows import AllRows
from tfps.embeddings.exporting import export_rows, to_embedding
from tfps.embeddings.initializers import initial_of
from tfps.embeddings.saving import load_reference, save_reference
from tfps.embeddings.variable import TableVariable, update_spec
from tfps.errors import UnsupportedError
from tfps.graph.ops import HOST
from tfps.strategy.optimizers import adopt
from tfps.strategy.patches import install_all
from tfps.types import Argument, Array, Layer, Optimizer, Options, Value

Combiner = Literal["sum", "mean", "sqrtn"]
_SETTINGS = ("admit_after", "expire_after", "max_rows")
_EXACT = {tf.float16: 2**11, tf.bfloat16: 2**8, tf.float32: 2**24, tf.float64: 2**53}  # whole numbers that each has
_OF_KERAS = {  # arguments of `keras.layers.Embedding`
    "embeddings_regularizer": "add one to the loss in your model, for the rows of a batch, or give the table an "
    "optimizer with weight_decay",
    "embeddings_constraint": "a step would apply it to all rows",
    "weights": "call load_rows() of the built layer",
    "input_length": "just leave it out",
    "lora_rank": "train the rows",
}


@keras.saving.register_keras_serializable(package="tfps")
class Embedding(keras.layers.Layer):
    """Turns ids into rows of a table that need not fit into a worker's memory.

    Called like `keras.layers.Embedding`, with ids of any shape, also `tf.RaggedTensor`, and with a combiner
    `tf.SparseTensor`. A call of the same layer for several features shares its table. Rows live on the pservers of the
    `tfps.Strategy` in whose scope the layer is built, each beside its optimizer's slots; a step moves the rows of its
    batch only. Without a strategy, or under `tf.distribute.MirroredStrategy`, they live in this process, with the same
    results. docs/recommenders.md says more.

    A row is made when it is first updated; until then its id reads as its initial value, which depends on the
    initializer's seed and the id alone. So `evaluate` and `predict` make none. Rows that are not in a batch stay as
    they are: with optimizers whose rule would move them (momentum, Adam), these are lazy rules, as in LazyAdam.

    Args:
        input_dim: number of rows: ids are from 0 on and below it; or None: any int64 is an id.
        output_dim: floats of a row.
        optimizer: of this table, one of Keras' elementwise ones but Nadam; None: the model's.
        combiner: reduces the last dimension of ids: `"sum"`, `"mean"` (of those that there are), or `"sqrtn"` (their
            sum by the root of the sum of squared weights); None: each id keeps its row.
        mask_zero: whether id 0 is padding: masked for later layers, and left out by a combiner.
        admit_after: an id gets its row with its update of this number; before that it stays at its initial value, and
            its gradients are dropped. For `input_dim=None`, as are the next two.
        expire_after: rows that have not been updated for so many steps go; None: they stay.
        max_rows: of the table; the least recently updated go; None: any number.
        embeddings_initializer: as of `keras.layers.Embedding`; one that makes each row by itself.

    Input: integer tensor of any shape; with a combiner also weights of the same shape as the second argument.
    Output: the input's shape, without its last dimension if there is a combiner and another one, and `output_dim`;
    in the layer's compute dtype.

    Raises:
        ValueError: an argument is out of range, or ids are no integers.
        UnsupportedError: the optimizer has no rule by row, or the initializer makes all rows at once.
        tf.errors.InvalidArgumentError: an id is out of range; the message has the layer's name and the id.
    """

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int,
        *,
        optimizer: Optimizer | str | None = None,
        combiner: Combiner | None = None,
        mask_zero: bool = False,
        admit_after: int = 1,
        expire_after: int | None = None,
        max_rows: int | None = None,
        embeddings_initializer: Argument = "uniform",
        **options: Argument,
    ) -> None:
        if alien := sorted(set(options) & _OF_KERAS.keys()):
            raise UnsupportedError(f"tfps.layers.Embedding has no {alien[0]}: {_OF_KERAS[alien[0]]}")
        super().__init__(**options)
        self.built: bool = False
        install_all()
        self.input_dim = positive_or_none("input_dim", input_dim)
        self.output_dim = positive("output_dim", output_dim)
        if combiner not in (None, *get_args(Combiner)):
            known = ", ".join(map(repr, get_args(Combiner)))
            raise ValueError(f"combiner must be one of {known}, or None, got {combiner!r}")
        self.optimizer = None if optimizer is None else keras.optimizers.get(optimizer)
        if self.optimizer is not None:
            update_spec(self.optimizer, self.output_dim)  # here, as Sequential hides what `build` refuses
        self.combiner, self.mask_zero = combiner, mask_zero
        self.supports_masking = mask_zero
        self.admit_after = positive("admit_after", admit_after)
        self.expire_after = positive_or_none("expire_after", expire_after)
        self.max_rows = positive_or_none("max_rows", max_rows)
        given = {name: getattr(self, name) for name in _SETTINGS}
        if self.input_dim is not None and given != {"admit_after": 1, "expire_after": None, "max_rows": None}:
            raise ValueError(f"{', '.join(_SETTINGS)} are for input_dim=None, got input_dim={input_dim} and {given}")
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self._initial, self._seed = initial_of(self.embeddings_initializer, self.input_dim, self.output_dim)
        self.autocast = self.supports_jit = False

    def build(self, input_shape: Argument = None) -> None:
        if self.built:
            return
        settings = {name: getattr(self, name) for name in _SETTINGS}
        with keras.name_scope(self.name, caller=self):
            self._rows = TableVariable(
                "rows", self.output_dim, self.input_dim, self._initial, self._seed, self.optimizer, settings
            )
        self._rows.trainable = self.trainable  # which may change
        if self.optimizer is not None and tf.distribute.has_strategy():
            adopt(self.optimizer, tf.distribute.get_strategy())
        self.built = True

    def call(self, inputs: Value, weights: Value = None) -> Value:
        ids = self._checked(inputs)
        if weights is not None and self.combiner is None:
            raise ValueError(f"layer {self.name!r}: weights need a combiner, such as combiner='sum'")
        if isinstance(ids, tf.SparseTensor):
            if self.combiner is None:
                raise ValueError(f"layer {self.name!r}: sparse ids need a combiner, such as combiner='sum'")
            given = None if weights is None else weights.values
            rows, segments, shape = self._look_up(ids.values), *_segments(ids)
            counted = self._combined(rows, self._weights(ids.values, given), segments, tf.reduce_prod(shape))
            found = tf.reshape(counted, tf.concat([shape, [self.output_dim]], 0))
            found.set_shape([*ids.shape[:-1], self.output_dim])
        elif isinstance(ids, tf.RaggedTensor):
            found = self._of_ragged(ids, weights)
        else:
            found = tf.reshape(self._look_up(tf.reshape(ids, [-1])), tf.concat([tf.shape(ids), [self.output_dim]], 0))
            found.set_shape([*ids.shape, self.output_dim])
            if self.combiner is not None:
                found = self._of_dense(ids, found, weights)
        return tf.cast(found, self.compute_dtype)

    def _look_up(self, flat: tf.Tensor) -> tf.Tensor:
        """Rows of flat ids, float32 [n, output_dim]."""
        with tf.device(HOST):
            ids, places = tf.unique(flat)
            if self.input_dim is not None:
                ids = self._in_range(ids, self.input_dim)
        return tf.gather(self._rows.lookup(ids), places)

    def _checked(self, ids: Value) -> Value:
        ids = ids if isinstance(ids, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(ids)
        self._check_dtype(ids.dtype)
        return tf.cast(ids, tf.int64)

    def _check_dtype(self, dtype: tf.DType) -> None:
        if self.input_dim is not None and self.input_dim <= _EXACT.get(dtype, 0):
            return  # Keras makes float32 of what a Sequential model without an Input is given
        if not dtype.is_integer or dtype == tf.uint64:
            raise ValueError(
                f"layer {self.name!r}: ids must be integers of at most 64 bits with a sign, got {dtype.name}; give "
                "keras.Input(dtype='int64'), and make ids of strings by keras.layers.Hashing or StringLookup"
            )

    def _in_range(self, ids: tf.Tensor, rows: int) -> tf.Tensor:
        outside = (ids < 0) | (ids >= rows)
        text = f"layer {self.name!r}: an id must be from 0 to {rows - 1}, got"
        first = tf.boolean_mask(ids, outside)[:1]
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(tf.reduce_any(outside)), [text, first])]):
            return tf.identity(ids)

    # Combiners

    def _weights(self, ids: tf.Tensor, given: Value) -> tf.Tensor:
        """Of flat ids, float32 [n]."""
        counts = tf.ones_like(ids, tf.float32) if given is None else tf.cast(given, tf.float32)
        return tf.where(tf.equal(ids, 0), 0.0, counts) if self.mask_zero else counts

    def _scaled(self, total: tf.Tensor, weights: tf.Tensor, squares: tf.Tensor) -> tf.Tensor:
        if self.combiner == "sum":
            return total
        return tf.math.divide_no_nan(total, (weights if self.combiner == "mean" else tf.sqrt(squares))[..., None])

    def _combined(self, rows: tf.Tensor, weights: tf.Tensor, segments: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        def add(values: tf.Tensor) -> tf.Tensor:
            return tf.math.unsorted_segment_sum(values, segments, count)

        return self._scaled(add(rows * weights[:, None]), add(weights), add(tf.square(weights)))

    def _of_dense(self, ids: tf.Tensor, rows: tf.Tensor, given: Value) -> tf.Tensor:
        weights = self._weights(ids, given)
        if ids.shape.rank == 1:  # one id in each row: there is nothing to reduce
            return rows if self.combiner != "sum" else rows * weights[:, None]
        total = tf.reduce_sum(rows * weights[..., None], -2)
        return self._scaled(total, tf.reduce_sum(weights, -1), tf.reduce_sum(tf.square(weights), -1))

    def _of_ragged(self, ids: tf.RaggedTensor, given: Value) -> Value:
        if isinstance(ids.values, tf.RaggedTensor):
            return ids.with_values(self._of_ragged(ids.values, None if given is None else given.values))
        flat = ids.values
        if flat.shape.rank != 1:
            raise ValueError(
                f"layer {self.name!r}: the last dimension of ragged ids must be ragged, got {ids.shape}; use a dense "
                "tensor"
            )
        rows = self._look_up(flat)
        if self.combiner is None:
            return ids.with_values(rows)
        weights = self._weights(flat, None if given is None else given.values)
        combined = self._combined(rows, weights, ids.value_rowids(), ids.nrows())
        combined.set_shape([ids.shape[0], self.output_dim])
        return combined

    # What Keras asks

    def compute_mask(self, inputs: Value, mask: Value = None) -> Value:
        if not self.mask_zero or self.combiner is not None or isinstance(inputs, tf.RaggedTensor):
            return None
        return keras.ops.not_equal(inputs, 0)

    def compute_output_shape(self, input_shape: Sequence[int | None], *_: Argument) -> tuple[int | None, ...]:
        reduces = self.combiner is not None and len(input_shape) > 1
        return (*(input_shape[:-1] if reduces else input_shape), self.output_dim)

    def compute_output_spec(self, inputs: keras.KerasTensor, weights: Argument = None) -> keras.KerasTensor:
        self._check_dtype(tf.as_dtype(inputs.dtype))
        shape = self.compute_output_shape(inputs.shape)
        ragged = getattr(inputs, "ragged", False) and self.combiner is None
        return keras.KerasTensor(shape, dtype=self.compute_dtype, **({"ragged": True} if ragged else {}))

    # Rows

    @property
    def _table(self) -> TableVariable:
        """Built if need be."""
        if not self.built:
            self.build()
        return self._rows

    @property
    def embeddings(self) -> AllRows:
        """What reads as a tensor of all rows, where Keras' layer has a variable. ValueError: `input_dim=None`."""
        return AllRows(self.name, self._table)

    def read_rows(self, ids: Argument) -> Array:
        """The rows of `ids`, integers [n], float32 [n, output_dim]. Other ranks need not take part."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        self._check_array(ids)
        return self._table.table.read_rows(ids)

    def set_weights(self, weights: Sequence[Value]) -> None:
        """As Keras', of what `get_weights` has returned in this run; other rows come by `load_rows`.

        Raises:
            UnsupportedError: it is something else, as a matrix of rows.
        """
        if len(weights) == len(self.weights) == 1:
            self.weights[0].assign(weights[0])  # Keras would look at shapes first, and say nothing of rows
        else:
            super().set_weights(weights)

    def load_rows(self, ids: Argument, rows: Argument) -> None:
        """Replaces rows: `rows` float32 [n, output_dim] of `ids`, integers [n], each once. Every rank must call it.

        Raises:
            ValueError: shapes do not fit, or an id comes twice or is out of range.
        """
        ids = np.ascontiguousarray(ids, np.int64).reshape(-1)
        values = np.ascontiguousarray(rows, np.float32)
        self._check_array(ids)
        if values.shape != (len(ids), self.output_dim) or len(np.unique(ids)) != len(ids):
            raise ValueError(
                f"layer {self.name!r}: rows must have the shape ({len(ids)}, {self.output_dim}) of {len(ids)} ids that "
                f"all differ, got {values.shape} and {len(np.unique(ids))} different ids"
            )
        self._table.load(ids, values)

    def _check_array(self, ids: Array) -> None:
        if self.input_dim is not None and len(ids) and not 0 <= ids.min() <= ids.max() < self.input_dim:
            wrong = ids[(ids < 0) | (ids >= self.input_dim)][0]
            raise ValueError(f"layer {self.name!r}: an id must be from 0 to {self.input_dim - 1}, got {wrong}")

    def export_rows(self, path: str | os.PathLike[str]) -> None:
        """Writes all rows to one file, `.npz` or `.safetensors`, in a folder that all pservers can reach.

        It has `rows`, float32 [n, output_dim], and with `input_dim=None` the `ids` beside them, int64 [n], ascending.
        Other ranks need not take part.

        Raises:
            ConfigError: the path ends otherwise, or there are no rows yet.
        """
        export_rows(self._table, Path(path))

    def to_embedding(self) -> Layer:
        """A `keras.layers.Embedding` with all rows, which must fit into memory, for a model that serves.

        Raises:
            ConfigError: `input_dim` is None.
        """
        return to_embedding(self._table, self.name, mask_zero=self.mask_zero)

    def save_own_variables(self, store: Argument) -> None:
        if self.built:
            save_reference(self._rows, store)

    def load_own_variables(self, store: Argument) -> None:
        load_reference(self._table, store)

    def get_config(self) -> Options:
        own = {
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "optimizer": self.optimizer and keras.optimizers.serialize(self.optimizer),
            "combiner": self.combiner,
            "mask_zero": self.mask_zero,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
        }
        return {**super().get_config(), **own, **{name: getattr(self, name) for name in _SETTINGS}}


def _segments(ids: tf.SparseTensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Of each value the place in what is left without the last dimension, flat; and the shape of that."""
    shape = ids.dense_shape[:-1]
    strides = tf.math.cumprod(shape, exclusive=True, reverse=True)
    return tf.reduce_sum(ids.indices[:, :-1] * strides, -1), shape


def positive(name: str, value: int, or_none: str = "") -> int:
    if isinstance(value, np.integer):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer{or_none}, got {value!r}")
    return value


def positive_or_none(name: str, value: int | None) -> int | None:
    return None if value is None else positive(name, value, ", or None")
