"""Which ops XLA can compile, asked of TensorFlow: its kernels, and what it knows of the shapes that ops make.

Tested in tests/graph/test_parts.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfps.graph.tf_private import is_stateful, registered_kernels, renamed
from tfps.types import Array, Value

_HELD = (tf.resource, tf.variant, tf.string)  # what a compiled function cannot take or return
_ANY_SIZE = 3  # in place of a size that is not known
_OF_LOOPS = ("StatelessWhile", "TensorListStack", "TensorListGetItem")
_FEW = 64  # values: more are no sizes
_ROWS = 2**16  # bytes: larger constants are not made again in each part


@functools.cache
def _wake(device: str) -> None:
    """Has TensorFlow register XLA's kernels: it does so when it compiles something for the first time."""
    with tf.init_scope(), tf.device(device):
        function = tf.function(lambda: tf.constant(1.0) + 1.0, autograph=False, jit_compile=True)
        renamed(function.get_concrete_function(), "tfps_wake")()


@functools.cache
def _kernels(op_type: str, kind: str) -> tuple[dict[str, frozenset[int]], ...]:
    """Per kernel of a `kind` of device, which types the attributes of an op may have."""
    return tuple(
        {rule.name: frozenset(rule.allowed_values.list.type) for rule in kernel.constraint}
        for kernel in registered_kernels(op_type)
        if kernel.device_type == kind
    )


class Compilable:
    """Tells which ops of a graph XLA can compile for a device."""

    def __init__(self, device: str) -> None:
        _wake(device)
        self._device = tf.DeviceSpec.from_string(device)
        self._kind = f"XLA_{self._device.device_type or 'CPU'}_JIT"
        self._is_here = functools.cache(self._is_on_it)

    def __call__(self, op: tf.Operation, node: tf.compat.v1.NodeDef) -> bool:
        """Whether `op`, which `node` describes, has a kernel there and neither state, nor control flow, nor calls."""
        if is_stateful(op.type) or op.type == "Placeholder" or op._control_flow_context is not None:
            return False
        if any(each.dtype in _HELD for each in (*op.inputs, *op.outputs)):
            return False
        if not self._is_here(op.device):
            return False
        attributes = node.attr
        if any(each.HasField("func") or each.list.func for each in attributes.values()):
            return False
        if op.type == "Const" and attributes["value"].ByteSize() > _ROWS:
            return False
        return any(
            all(_types_of(attributes[name]) <= allowed for name, allowed in rules.items() if name in attributes)
            for rules in _kernels(op.type, self._kind)
        )

    def _is_on_it(self, device: str) -> bool:
        """Whether an op with this `device` is on this one: a program, and tfps, may put some on the host."""
        wanted = tf.DeviceSpec.from_string(device)
        kinds = wanted.device_type in (None, self._device.device_type)
        return kinds and wanted.device_index in (None, self._device.device_index)


def _types_of(attribute: Value) -> frozenset[int]:
    return frozenset([attribute.type] if attribute.HasField("type") else attribute.list.type)


_found: dict[Hashable, bool] = {}


def is_sized_by_values(op: tf.Operation, node: tf.compat.v1.NodeDef) -> bool:
    """Whether the values of `op`'s inputs decide about the sizes of its outputs, as in tf.where and tf.unique.

    TensorFlow's own rule for its shapes says so: with inputs of known sizes it does not know those of the outputs. An
    op whose inputs do not fit together then counts as none.
    """
    if all(each.shape.is_fully_defined() for each in op.outputs):
        return False
    if not op.inputs or any(each.shape.rank is None for each in op.inputs):
        return False
    if op.type in _OF_LOOPS:  # sizes are those of what a loop takes; how many elements a list has may be known
        return op.type == "TensorListStack" and node.attr["num_elements"].i < 0
    inputs = [_like(each) for each in op.inputs]
    attributes = {name: value for name, value in node.attr.items() if not name.startswith("_")}
    said = sorted((name, value.SerializeToString(deterministic=True)) for name, value in attributes.items())
    key = op.type, tuple(said), tuple(each.key for each in inputs)  # all that the rule gets
    if key not in _found:
        _found[key] = _is_sized_by_values(op, attributes, inputs)
    return _found[key]


def _is_sized_by_values(op: tf.Operation, attributes: Mapping[str, Value], inputs: Sequence[_Like]) -> bool:
    with tf.Graph().as_default() as graph, tf.device(None):
        given = [each.make() for each in inputs]
        try:
            result = graph.create_op(op.type, given, [each.dtype for each in op.outputs], attrs=attributes)
        except (ValueError, TypeError, tf.errors.OpError):
            return False
    return not all(each.shape.is_fully_defined() for each in result.outputs)


@dataclass(frozen=True)
class _Like:
    """A tensor of known size that stands for one of a graph."""

    dtype: tf.DType
    shape: Sequence[int]
    value: Array | None  # if it is known

    @property
    def key(self) -> Hashable:
        return self.dtype, self.shape, None if self.value is None else self.value.tobytes()

    def make(self) -> tf.Tensor:
        if self.value is not None:
            return tf.constant(self.value, self.dtype)
        return tf.compat.v1.placeholder(self.dtype, self.shape)


def _like(tensor: tf.Tensor) -> _Like:
    """What stands for `tensor`. Few numbers may be sizes: they have their value; unknown whole ones are 1."""
    shape = tuple(_ANY_SIZE if size is None else size for size in tensor.shape)
    if tensor.dtype in _HELD or len(shape) > 2 or math.prod(shape) > _FEW:
        return _Like(tensor.dtype, shape, None)
    value = tf.get_static_value(tensor)
    if value is None and tensor.dtype.is_integer and len(shape) <= 1:
        value = np.ones(shape, tensor.dtype.as_numpy_dtype)
    return _Like(tensor.dtype, shape, None if value is None else np.asarray(value))
