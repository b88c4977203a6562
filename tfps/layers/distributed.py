"""`tfps.layers.DistributedEmbedding`: the layer of that name of keras_rs, with its tables on pservers.

All features of a table are looked up together: a step asks for each row of it once, however many features share it.

Tested in tests/layers/test_distributed.py and tests/models/test_keras_rs.py.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfps.embeddings.variable import update_spec
from tfps.errors import UnsupportedError
from tfps.graph.ops import HOST
from tfps.keras_hooks.keras_private import with_exclusions
from tfps.layers.distributed_configs import FeatureConfig, TableConfig, own_configs
from tfps.layers.embedding import Embedding
from tfps.strategy.patches import install_all
from tfps.types import Argument, Optimizer, Options, Structure, Value

_PREPROCESSED, _PLACEMENT = "preprocessed_inputs_per_placement", "default_device"  # as keras_rs has them


@keras.saving.register_keras_serializable(package="tfps")
class DistributedEmbedding(keras.layers.Layer):
    """Looks up features in tables on pservers, and makes one row of the ids of each example.

    Takes the place of `keras_rs.layers.DistributedEmbedding`: the same arguments, among them the configs of keras_rs
    (`tfps.layers.FeatureConfig` and `TableConfig` have their fields, and need no keras_rs), calls and results. Rows
    live where those of `tfps.layers.Embedding` do, whose docstring says how they are made and updated. Features that
    share a table are looked up together: each row is asked for once in a step.

    As keras_rs has it on TPUs, and not elsewhere, each table is trained by the optimizer of its own config, which is
    `"adam"` unless it says otherwise; None: by the model's. So `model.compile` decides about all other variables only.
    The layer trains with a copy of an optimizer that it is given: several tables may have the same, with a learning
    rate or a schedule of Keras.

    Args:
        feature_configs: `FeatureConfig`s, alone or in any nested structure; inputs and outputs have the same.
        table_stacking: `"auto"`, None, names of tables, or lists of these. Stacking changes how a TPU lays tables out,
            never a result: here it changes nothing.
        update_stats: must be False: it counts what SparseCore's buffers need.

    Input: for each feature integer ids of its `input_shape`: dense with one dimension (one id for an example) or
    more, `tf.RaggedTensor` or `tf.SparseTensor` with two. `weights`, if any, in the same structure (None: a feature
    has none; not with Keras 3.8), each of the kind and shape of its ids; ragged and sparse ones also have their row
    lengths and indices. The batch dimension may differ from that of `input_shape`: a replica has its part of the
    global batch. Ids beyond the width of `input_shape` are refused where the width is known, and never cut off.

    Output: for each feature [batch, embedding_dim] in the layer's compute dtype; of examples without ids 0.

    Attributes:
        tables: `tfps.layers.Embedding` by the table's name: for rows of their own, to read, load and export.

    Raises:
        ValueError: configs, shapes or weights do not fit together; or ids are no integers.
        UnsupportedError: a table has placement `"sparsecore"`, or an optimizer or initializer without a rule by row.
        tf.errors.InvalidArgumentError: an id is out of range, or weights have other row lengths or indices.
    """

    def __init__(
        self,
        feature_configs: Structure,
        *,
        table_stacking: Argument = "auto",
        update_stats: bool = False,
        **options: Argument,
    ) -> None:
        super().__init__(**options)
        install_all()
        if update_stats:
            raise ValueError(
                f"update_stats must be False, got {update_stats!r}: it counts for buffers of SparseCores, which are "
                "on TPUs with JAX only"
            )
        self.autocast = False  # of weights
        self.supports_jit = False
        self._features = _Features(feature_configs, table_stacking)
        self.tables = {
            each.name: _shared_table(each, trainable=self.trainable, dtype=self.dtype_policy)
            for each in self._features.tables
        }

    def build(self, input_shapes: Structure = None) -> None:
        if input_shapes is not None:
            self.compute_output_shape(input_shapes)
        for name, table in self.tables.items():
            with _about(f"table {name!r}"):
                table.build()
        self.built = True

    def preprocess(self, inputs: Structure, weights: Structure = None, training: bool = False) -> Structure:
        """`inputs` and `weights` as one structure, which the layer takes as its inputs.

        There is nothing else to prepare: programs that call it, for the sake of other hardware, may.

        Raises:
            ValueError: they are not structured as `feature_configs`.
        """
        given = {"inputs": inputs} if weights is None else {"inputs": inputs, "weights": weights}
        return {_PREPROCESSED: {_PLACEMENT: {name: self._features.by_name(name, each) for name, each in given.items()}}}

    def call(self, inputs: Structure, weights: Structure = None, training: bool = False) -> Structure:
        given = self._features.given(inputs, weights)
        outputs: list[Value] = [None] * len(given)
        for name, table in self.tables.items():
            own = [place for place, each in enumerate(given) if each.config.table.name == name]
            for place, rows in zip(own, table.look_up([given[each] for each in own]), strict=True):
                outputs[place] = rows
        return self._features.packed(outputs)

    def get_embedding_tables(self) -> dict[str, tf.Tensor]:
        """All rows of each table, float32 [vocabulary_size, embedding_dim], by the table's name.

        They are copies, as of now, also in graphs, where they are read when these run. It takes a request for all
        rows. Ranks may call it one by one.

        Raises:
            ValueError: a table has `vocabulary_size=None`, so there is no last row.
        """
        return {name: tf.convert_to_tensor(table.embeddings) for name, table in self.tables.items()}

    def compute_output_shape(self, input_shapes: Structure) -> Structure:
        if _is_preprocessed(input_shapes):
            input_shapes = self._features.of_names(input_shapes[_PREPROCESSED][_PLACEMENT]["inputs"])
        shapes = self._features.shapes(input_shapes)
        return self._features.packed([config.reduced(config.check(shape, exactly=False)) for config, shape in shapes])

    def compute_output_spec(self, inputs: Structure, weights: Structure = None, training: bool = False) -> Structure:
        specs: list[Value] = []
        for config, ids, _ in self._features.given(inputs, weights):
            dense = not any(getattr(ids, kind, False) for kind in ("ragged", "sparse"))
            shape = config.check(ids.shape, exactly=dense)
            specs.append(keras.KerasTensor(config.reduced(shape), dtype=self.compute_dtype))
        return self._features.packed(specs)

    def get_config(self) -> Options:
        places = {each: place for place, each in enumerate(self._features.tables)}
        own = {
            "feature_configs": keras.tree.map_structure(
                lambda each: {**each.get_config(), "table": places[each.table]}, self._features.structure
            ),
            "tables": [each.get_config() for each in self._features.tables],
            "table_stacking": self._features.stacking,
        }
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: Options) -> DistributedEmbedding:
        """Also of what keras_rs' layer has for `get_config`."""
        config = dict(config)
        tables = [TableConfig.from_config(each) for each in config.pop("tables")]

        def made(given: Structure) -> FeatureConfig | None:
            if not isinstance(given, dict) or not isinstance(given.get("table"), int):
                return None  # what it has within may be one
            return FeatureConfig(**{**given, "table": tables[given["table"]]})

        config["feature_configs"] = keras.tree.traverse(made, config["feature_configs"])
        return cls(**config)


class SharedTable(Embedding):
    """One table, which looks up several features at once."""

    def look_up(self, features: Sequence[_Given]) -> list[Value]:
        """The reduced rows of each feature, [batch, output_dim] in the compute dtype."""
        given: list[_Given] = []
        for config, ids, weights in features:
            with _about(f"feature {config.name!r}"):
                given.append(_Given(config, _ranked(self._checked(ids), config), weights))
                _check(*given[-1])
        flat = [_flat(each.ids) for each in given]
        rows = self._look_up(tf.concat(flat, 0))
        parts = tf.split(rows, [tf.size(each) for each in flat]) if len(flat) > 1 else [rows]
        return [
            tf.cast(self._reduced(ids, part, weights), self.compute_dtype)
            for (_, ids, weights), part in zip(given, parts, strict=True)
        ]

    def _reduced(self, ids: Value, rows: tf.Tensor, weights: Value) -> tf.Tensor:
        """Of flat rows, float32 [n, output_dim]."""
        if isinstance(ids, tf.RaggedTensor):
            segments, count = ids.value_rowids(), ids.nrows()
        elif isinstance(ids, tf.SparseTensor):
            segments, count = ids.indices[:, 0], ids.dense_shape[0]
        else:
            rows = tf.reshape(rows, tf.concat([tf.shape(ids), [self.output_dim]], 0))
            rows.set_shape([*ids.shape, self.output_dim])
            return self._of_dense(ids, rows, weights)
        flat = _flat(ids)
        counts = self._weights(flat, None if weights is None else _same_places(ids, weights))
        found = self._combined(rows, counts, segments, count)
        found.set_shape([None if ids.shape.rank is None else ids.shape[0], self.output_dim])
        return found


class _Given(NamedTuple):
    """What a call has for one feature."""

    config: FeatureConfig
    ids: Value
    weights: Value


class _Features:
    """The features of a layer in the structure that they came in, flat, and by path.

    An object, as Keras and TensorFlow would put lists and dicts of a layer into containers of theirs. A list and a
    tuple are alike: files of models have lists only.
    """

    def __init__(self, given: Structure, stacking: Argument) -> None:
        self.structure = own_configs(given)
        with_paths = keras.tree.flatten_with_path(self.structure)
        self.configs: list[FeatureConfig] = [config for _, config in with_paths]
        self._paths: list[tuple[str | int, ...]] = [path for path, _ in with_paths]
        self._names = [".".join(map(str, path)) for path in self._paths]
        self.tables = list(dict.fromkeys(each.table for each in self.configs))
        self.stacking = _checked_stacking(stacking, [each.name for each in self.tables])

    def flat(self, what: str, values: Structure) -> list[Value]:
        """One value for each feature. ValueError: `values` have another structure."""
        with_paths = keras.tree.flatten_with_path(values)
        if [path for path, _ in with_paths] != self._paths:
            raise self._other_structure(what, [".".join(map(str, path)) for path, _ in with_paths])
        return [value for _, value in with_paths]

    def shapes(self, values: Structure) -> list[tuple[FeatureConfig, Argument]]:
        """Each feature with its shape, a list or tuple within `values`."""

        def within(path: Sequence[str | int]) -> Argument:
            return functools.reduce(operator.getitem, path, values)

        try:
            return [(config, within(path)) for config, path in zip(self.configs, self._paths, strict=True)]
        except (LookupError, TypeError) as error:
            raise self._other_structure("inputs", values) from error

    def _other_structure(self, what: str, got: object) -> ValueError:
        return ValueError(f"{what} must have the structure of feature_configs, with {self._names}, got {got}")

    def packed(self, values: list[Value]) -> Structure:
        return keras.tree.pack_sequence_as(self.structure, values)

    def by_name(self, what: str, values: Structure) -> dict[str, Value]:
        """As keras_rs preprocesses `values`."""
        return dict(zip(self._names, self.flat(what, values), strict=True))

    def of_names(self, values: dict[str, Value]) -> Structure:
        """The reverse of `by_name`."""
        if set(values) != set(self._names):
            raise ValueError(f"preprocessed inputs must be of features {self._names}, got {list(values)}")
        return self.packed([values[name] for name in self._names])

    def given(self, inputs: Structure, weights: Structure) -> list[_Given]:
        """What a call has, preprocessed or not."""
        if _is_preprocessed(inputs):
            if weights is not None:
                raise ValueError("weights of preprocessed inputs are within these: give them to preprocess()")
            within = inputs[_PREPROCESSED][_PLACEMENT]
            inputs = self.of_names(within["inputs"])
            weights = self.of_names(within["weights"]) if "weights" in within else None
        ids = self.flat("inputs", inputs)
        each_weights = [None] * len(ids) if weights is None else self.flat("weights", weights)
        return list(map(_Given, self.configs, ids, each_weights))


def _is_preprocessed(inputs: Structure) -> bool:
    return isinstance(inputs, dict) and _PREPROCESSED in inputs


def _checked_stacking(given: Argument, tables: Sequence[str]) -> Argument:
    if given is None or given == "auto":
        return given
    if isinstance(given, str) or not set(keras.tree.flatten(given)) <= set(tables):
        raise ValueError(f"table_stacking must be 'auto', None, or lists with names among {tables}, got {given!r}")
    return given


def _shared_table(config: TableConfig, **options: Argument) -> SharedTable:
    with _about(f"table {config.name!r}"):
        optimizer = _copied(config.optimizer)
        if optimizer is not None:
            update_spec(optimizer, config.embedding_dim)  # which may refuse
        return SharedTable(
            config.vocabulary_size,
            config.embedding_dim,
            optimizer=optimizer,
            combiner=config.combiner,
            admit_after=config.admit_after,
            expire_after=config.expire_after,
            max_rows=config.max_rows,
            embeddings_initializer=config.initializer,
            name=config.name,
            **options,
        )


def _copied(given: Argument) -> Optimizer | None:
    """One of its own: an optimizer counts the steps of one table, and several configs may have the same."""
    found = keras.optimizers.get(given)
    if found is None or found is not given:
        return found
    return with_exclusions(type(found).from_config(found.get_config()), found)


def _flat(ids: Value) -> tf.Tensor:
    if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        return ids.values
    return tf.reshape(ids, [-1])


def _ranked(ids: Value, config: FeatureConfig) -> Value:
    """`ids` with a known number of dimensions, which iterators over batches of one part may not know."""
    if ids.shape.rank is not None or isinstance(ids, tf.SparseTensor):  # of which only the first two are read
        return ids
    return tf.ensure_shape(ids, [None, *config.input_shape[1:]])


def _check(config: FeatureConfig, ids: Value, weights: Value) -> None:
    """ValueError: ids or weights have a shape or a kind that they must not have."""
    dense = not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
    shape = config.input_shape if ids.shape.rank is None else config.check(ids.shape, exactly=dense)
    if not dense and (len(shape) != 2 or (isinstance(ids, tf.RaggedTensor) and ids.values.shape.rank != 1)):
        raise ValueError(f"ragged and sparse ids must have two dimensions, the second one ragged, got {ids.shape}")
    if weights is None:
        return
    kinds = (tf.RaggedTensor, tf.SparseTensor)
    if [isinstance(ids, each) for each in kinds] != [isinstance(weights, each) for each in kinds]:
        raise ValueError(
            f"weights must be of the kind of their ids, {type(ids).__name__}, got {type(weights).__name__}"
        )
    if not ids.shape.is_compatible_with(weights.shape):
        raise ValueError(f"weights must have the shape of their ids, {ids.shape}, got {weights.shape}")


def _same_places(ids: Value, weights: Value) -> tf.Tensor:
    """Flat weights of ragged or sparse ids, which must be where these are."""
    ragged = isinstance(ids, tf.RaggedTensor)
    own, others = (tf.cast(each.row_splits if ragged else each.indices, tf.int64) for each in (ids, weights))
    text = f"weights must have the {'row lengths' if ragged else 'indices'} of their ids"
    with tf.device(HOST), tf.control_dependencies([tf.debugging.assert_equal(own, others, text)]):
        return tf.identity(weights.values)


@contextlib.contextmanager
def _about(what: str) -> Iterator[None]:
    """Says in errors of the block what they are about."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{what}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
