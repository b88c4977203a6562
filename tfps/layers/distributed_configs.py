"""What `tfps.layers.DistributedEmbedding` is told: features, and the tables that their ids are looked up in.

`TableConfig` and `FeatureConfig` have the fields of those of keras_rs, which needs not be installed. Those of keras_rs,
or any objects with these attributes, are taken as well: `own_configs` makes them into these.

Tested in tests/layers/test_distributed.py.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar, get_args

import keras

from tfps.errors import UnsupportedError
from tfps.layers.embedding import Combiner, positive, positive_or_none
from tfps.types import Argument, Options, Structure

Shape = tuple[int | None, ...]
_PLACEMENTS = ("auto", "default_device")
_SERIALIZED = ("initializer", "optimizer")


@dataclass(frozen=True, eq=False)
class TableConfig:
    """One table. Features that share it have the same object; equal ones are tables of their own.

    Args:
        name: no other table of the layer has it; without `/`.
        vocabulary_size: number of rows: ids are from 0 on and below it; or None: any int64 is an id.
        embedding_dim: floats of a row.
        initializer: one of Keras' that make each row by itself.
        optimizer: of this table: a name, or one of Keras' elementwise ones but Nadam, of which the layer makes a copy;
            None: the model's.
        combiner: how ids of one example become one row: `"mean"`, `"sum"`, or `"sqrtn"`.
        placement: `"auto"` or `"default_device"`, which say the same: tfps knows no SparseCore.
        max_ids_per_partition: of SparseCore's buffers; changes nothing here.
        max_unique_ids_per_partition: the same.
        admit_after: as of `tfps.layers.Embedding`, for `vocabulary_size=None`.
        expire_after: the same.
        max_rows: the same.

    Raises:
        ValueError: a field is out of range.
        UnsupportedError: the placement is `"sparsecore"`.
    """

    name: str
    vocabulary_size: int | None
    embedding_dim: int
    initializer: Argument = field(default_factory=lambda: keras.initializers.VarianceScaling(mode="fan_out"))
    optimizer: Argument = "adam"
    combiner: Combiner = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    admit_after: int = 1
    expire_after: int | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise ValueError(f"the name of a table must be a text without '/', got {self.name!r}")
        for name, check in (("vocabulary_size", positive_or_none), ("embedding_dim", positive)):
            object.__setattr__(self, name, check(f"{name} of table {self.name!r}", getattr(self, name)))
        if self.combiner not in get_args(Combiner):
            known = ", ".join(map(repr, get_args(Combiner)))
            raise ValueError(f"combiner of table {self.name!r} must be one of {known}, got {self.combiner!r}")
        if self.placement == "sparsecore":
            raise UnsupportedError(
                f"placement of table {self.name!r} must be 'auto' or 'default_device', got 'sparsecore': rows are kept "
                "by pservers, or without any by this process, not by SparseCores of TPUs"
            )
        if self.placement not in _PLACEMENTS:
            known = ", ".join(map(repr, _PLACEMENTS))
            raise ValueError(f"placement of table {self.name!r} must be one of {known}, got {self.placement!r}")

    def get_config(self) -> Options:
        """What `from_config` makes an equal one of, of types that JSON knows."""
        serialized = {name: keras.saving.serialize_keras_object(getattr(self, name)) for name in _SERIALIZED}
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, **serialized}

    @classmethod
    def from_config(cls, config: Options) -> TableConfig:
        made = {name: keras.saving.deserialize_keras_object(config[name]) for name in _SERIALIZED}
        return cls(**{**config, **made})


@dataclass(frozen=True, eq=False)
class FeatureConfig:
    """One feature: ids, and the table that they are looked up in.

    Args:
        name: what errors call it.
        table: where its ids are looked up.
        input_shape: of its ids: the batch dimension, which is not compared, and as many as an example has; None: any
            number. Ragged and sparse ids have at most so many.
        output_shape: `input_shape` with `embedding_dim` instead of its second dimension.

    Raises:
        ValueError: a shape is none, or they do not fit together.
    """

    name: str
    table: TableConfig
    input_shape: Shape
    output_shape: Shape

    def __post_init__(self) -> None:
        for name in ("input_shape", "output_shape"):
            object.__setattr__(self, name, shape_of(f"{name} of feature {self.name!r}", getattr(self, name)))
        expected = self.reduced(self.input_shape)
        if len(self.output_shape) != len(expected) or not _alike(self.output_shape[1:], expected[1:]):
            raise ValueError(
                f"output_shape of feature {self.name!r} must be {expected}, for input_shape {self.input_shape} and "
                f"embedding_dim {self.table.embedding_dim} of table {self.table.name!r}, got {self.output_shape}"
            )

    def reduced(self, ids: Shape) -> Shape:
        """The shape of what ids of such a shape become."""
        return (*(ids[:-1] if len(ids) > 1 else ids), self.table.embedding_dim)

    def check(self, shape: Argument, *, exactly: bool) -> Shape:
        """The shape of ids, which must fit; `exactly`: dense ones. ValueError: they do not."""
        own = shape_of(f"input shape of feature {self.name!r}", shape)
        fits = len(own) == len(self.input_shape) and (
            _alike(own[1:], self.input_shape[1:]) if exactly else _at_most(own[1:], self.input_shape[1:])
        )
        if not fits:
            raise ValueError(
                f"ids of feature {self.name!r} must have the input_shape of its config, {self.input_shape}, in all "
                f"dimensions but the first, got {own}"
            )
        return own

    def get_config(self) -> Options:
        """What `from_config` makes an equal one of, with a table of its own."""
        shapes = {"input_shape": self.input_shape, "output_shape": self.output_shape}
        return {"name": self.name, "table": self.table.get_config(), **shapes}

    @classmethod
    def from_config(cls, config: Options) -> FeatureConfig:
        return cls(**{**config, "table": TableConfig.from_config(config["table"])})


_C = TypeVar("_C", TableConfig, FeatureConfig)


def own_configs(given: Structure) -> Structure:
    """`given`, features of tfps, of keras_rs or alike, as features of tfps; those that share a table still do.

    Raises:
        ValueError: there is none, one lacks a field, a field is out of range, or two tables have one name.
    """
    tables: dict[int, TableConfig] = {}  # by the identity of those given, which `given` keeps

    def own(feature: Argument) -> FeatureConfig:
        table = getattr(feature, "table", None)
        if id(table) not in tables:
            made = _as(TableConfig, table, f"the table of feature {getattr(feature, 'name', None)!r}")
            if made.name in {each.name for each in tables.values()}:
                raise ValueError(
                    f"tables must have different names, got two of name {made.name!r}; features that share a table "
                    "must have one TableConfig object"
                )
            tables[id(table)] = replace(made, initializer=_seeded(made.initializer))
        return _as(FeatureConfig, feature, "a feature", table=tables[id(table)])

    if not keras.tree.flatten(given):
        raise ValueError(f"feature_configs must have a FeatureConfig, got {given!r}")
    return keras.tree.map_structure(own, given)


def _as(cls: type[_C], given: Argument, what: str, **known: Argument) -> _C:
    """An object of `cls` with the attributes of `given`, but for those that are `known`."""
    values: Options = {}
    for each in fields(cls):
        if each.name in known or hasattr(given, each.name):
            values[each.name] = known[each.name] if each.name in known else getattr(given, each.name)
        elif each.name in ("name", "vocabulary_size", "embedding_dim", "input_shape", "output_shape"):
            raise ValueError(f"{what} must be a {cls.__name__}, got {given!r}, which has no {each.name}")
    return cls(**values)


def _seeded(given: Argument) -> Argument:
    """An initializer of its own: with a seed of its own if it has none, which a saved layer must know.

    One object without a seed may be that of many tables, as the default of keras_rs is, and would make them alike.
    """
    found = keras.initializers.get(given)
    if not isinstance(found, keras.initializers.Initializer):
        return found
    config = found.get_config()
    copy = type(found).from_config(dict(config))
    if "seed" in config and isinstance(copy.seed, int):
        copy = type(found).from_config({**config, "seed": copy.seed})
    return copy


def shape_of(what: str, shape: Argument) -> Shape:
    """`shape` as a tuple. ValueError: it is none, or has no dimension."""
    try:
        dims = tuple(None if each is None else operator.index(each) for each in shape)
    except TypeError:
        dims = ()
    if not dims or any(each is not None and each < 0 for each in dims):
        raise ValueError(
            f"{what} must be whole numbers or None, one for each dimension, the batch dimension first, got {shape!r}"
        )
    return dims


def _alike(one: Shape, other: Shape) -> bool:
    return all(None in (a, b) or a == b for a, b in zip(one, other, strict=True))


def _at_most(one: Shape, other: Shape) -> bool:
    return all(a is None or b is None or a <= b for a, b in zip(one, other, strict=True))
