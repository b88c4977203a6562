"""Keras' variables: what is behind them, which of them pservers can keep, and slots that live only there.

Tested in tests/integration/test_remote_updates.py, tests/integration/test_combinations.py and
tests/policies/test_outer.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.runtime.remote import RemoteSlot
from tfps.types import Argument, Array, Function, Value, Variable

ACCUMULATOR = "gradient_accumulator"  # in the name of what belongs to a replica until the next update
MakeSlot = Callable[[str, "tuple[int, ...]", float], RemoteSlot]  # of name, shape and initial value


def of_tensorflow(variable: Variable) -> Variable:
    """The variable of TensorFlow behind `variable`, of Keras or TensorFlow."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def fingerprint(value: Array) -> int:
    """Returns what is compared of `value`: a scalar as it is (floats by their bits), else a checksum."""
    if value.ndim == 0 and value.dtype.kind in "iu":
        return int(value.astype(np.int64))
    if value.ndim == 0 and value.dtype.kind == "f":
        return int(np.float64(value).view(np.int64))
    if value.dtype.kind == "O":  # strings
        return zlib.crc32(repr(value.tolist()).encode())
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def check_variable(variable: Variable, setting: str, verb: str, instead: str, why: str = "") -> None:
    """Checks that pservers can `verb` `variable`, of Keras or TensorFlow; `why` not: what else forbids it."""
    own, name = of_tensorflow(variable), getattr(variable, "path", variable.name)
    if not getattr(own, "gates", ()) or not own.trainable:
        why = "is not a trainable variable of this strategy with a fixed shape"
    elif own.dtype != tf.float32:
        why = f"has dtype {own.dtype.name}, and pservers {verb} float32 (mixed precision keeps variables in float32)"
    elif getattr(variable, "overwrite_with_gradient", False):
        why = "is overwritten with its gradient"
    if why:
        raise UnsupportedError(f"{setting}: variable {name!r} {why}; {instead}")


class RemoteVariable(keras.Variable):
    """A slot. Reading collects it from the pservers; what is assigned goes there with the next push.

    Reading needs no other rank. Every rank must assign the same, as with any variable.
    """

    def __init__(self, make: MakeSlot, **options: Argument) -> None:
        self._make = make
        super().__init__(**options)

    def _initialize_with_initializer(self, initializer: Function) -> None:
        with tf.init_scope():
            initial = float(np.asarray(initializer((), dtype="float32")))
        self._value = None
        self.slot = self._make(self.path, tuple(map(int, self._shape)), initial)

    def _initialize(self, value: Value) -> None:
        raise UnsupportedError(f"slot {self.path} lives on pservers and begins with an initializer's value")

    @property
    def value(self) -> tf.Tensor:
        """The current value, float32 of the variable's shape; a function cannot read it."""
        self._check_eager("read")
        return tf.constant(self.slot.read())

    def numpy(self) -> Array:
        """The current value; see `value`."""
        return self.slot.read()

    def _direct_assign(self, value: Value) -> None:
        self._check_eager("assigned")
        self.slot.assign(np.asarray(value))

    def _check_eager(self, what: str) -> None:
        if not tf.executing_eagerly():
            raise UnsupportedError(
                f"slot {self.path} is {what} within a function, but with update='server' it lives on pservers: do that "
                "eagerly, between steps, or use update='worker' (tfps.Config)"
            )

    @property
    def _shared_name(self) -> str:
        return str(self.path)  # which a checkpoint only notes

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.value}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        self.assign(restored_tensors["VARIABLE_VALUE"])

    def _export_to_saved_model_graph(self, *_: object, **__: object) -> list[tf.Tensor]:
        raise UnsupportedError(
            f"slot {self.path} lives on pservers and cannot be in a SavedModel; export the model without its optimizer "
            "(model.export), or save it with model.save or tf.train.Checkpoint"
        )


def slots_from_first_rank(slots: Sequence[RemoteSlot], strategy: tf.distribute.Strategy) -> None:
    """Gives `slots` what rank 0 has assigned to them and not put yet; every rank must call it."""
    if slots:
        with strategy.scope():
            carrier = tf.Variable(np.zeros(0, np.float32), shape=[None], trainable=False, name="slot")
    for slot in slots:  # one after the other: all together take as much memory as they do on pservers
        slot.from_first_rank()
        if strategy.rank == 0:
            carrier.assign(slot.offered())
        strategy.extended.take_from_first_rank([carrier])
        if strategy.rank:
            slot.take(carrier.numpy())
