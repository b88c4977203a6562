"""Storage for staged batches: areas that hold their tensors.

Tested in tests/input/test_staging.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfps.graph.ops import HOST
from tfps.types import Argument, Structure

_HOST_ONLY = (tf.string, tf.variant, tf.resource)  # no device but the CPU can hold them


class Area:
    """Lists of tensors of fixed dtypes by key, in the memory of one device."""

    def __init__(self, device: str, dtypes: Sequence[tf.DType], name: str) -> None:
        self.device, self._indices = device, list(range(len(dtypes)))
        self._attributes: dict[str, Argument] = {
            "dtypes": list(dtypes),
            "capacity": 0,
            "memory_limit": 0,
            "container": "",
            "shared_name": name,
        }

    def put(self, key: tf.Tensor, tensors: list[tf.Tensor]) -> None:
        with tf.device(self.device):
            tf.raw_ops.MapStage(key=key, indices=self._indices, values=tensors, **self._attributes)

    def take(self, key: tf.Tensor) -> list[tf.Tensor]:
        """Removes and returns the tensors of `key`, which must exist. Works eagerly and in graphs."""
        with tf.device(self.device):
            return list(tf.raw_ops.MapUnstage(key=key, indices=self._indices, **self._attributes))

    def size(self) -> int:
        with tf.init_scope(), tf.device(self.device):
            return int(tf.raw_ops.MapSize(**self._attributes))

    def clear(self) -> None:
        with tf.init_scope(), tf.device(self.device):
            tf.raw_ops.MapClear(**self._attributes)


class Stage:
    """Stores batches of one structure, one per local replica, as flat tensors in areas.

    Args:
        element_spec: of one replica's batch.
        areas: returns the area for (replica, dtypes, on the host).
    """

    def __init__(
        self, element_spec: Structure, replicas: int, areas: Callable[[int, tuple[tf.DType, ...], bool], Area]
    ) -> None:
        self._spec = element_spec
        self._leaves = tf.nest.flatten(element_spec)
        self._parts = [tf.nest.flatten(leaf, expand_composites=True) for leaf in self._leaves]
        flat = [spec for parts in self._parts for spec in parts]
        self._shapes = [spec.shape for spec in flat]
        self._areas: list[list[tuple[Area, list[int]]]] = [[] for _ in range(replicas)]
        for on_host in (False, True):
            indices = [index for index, spec in enumerate(flat) if (spec.dtype in _HOST_ONLY) == on_host]
            for replica in range(replicas if indices else 0):
                area = areas(replica, tuple(flat[index].dtype for index in indices), on_host)
                self._areas[replica].append((area, indices))

    @property
    def replicas(self) -> int:
        return len(self._areas)

    def put(self, key: int, batches: Sequence[Structure]) -> None:
        """Stages `batches`, one per replica, eagerly."""
        with tf.device(HOST):
            number = tf.constant(key, tf.int64)
        for batch, areas in zip(batches, self._areas, strict=True):
            flat: list[tf.Tensor] = []
            for value, parts in zip(tf.nest.flatten(batch), self._parts, strict=True):
                flat += tf.nest.flatten(value, expand_composites=True) if parts else []  # no parts: None
            for area, indices in areas:
                area.put(number, [flat[index] for index in indices])

    def take(self, key: tf.Tensor) -> list[tf.Tensor]:
        """Returns the batches of `key`, one per replica. Works eagerly and in graphs."""
        batches = []
        for areas in self._areas:
            flat: list[tf.Tensor] = [None] * len(self._shapes)
            for area, indices in areas:
                for index, tensor in zip(indices, area.take(key), strict=True):
                    tensor.set_shape(self._shapes[index])
                    flat[index] = tensor
            parts = iter(flat)
            values = [
                _packed(leaf, [next(parts) for _ in of]) for leaf, of in zip(self._leaves, self._parts, strict=True)
            ]
            batches.append(tf.nest.pack_sequence_as(self._spec, values))
        return batches


def _packed(spec: Structure, parts: list[tf.Tensor]) -> Structure:
    if isinstance(spec, tf.TensorSpec):
        return parts[0]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True) if parts else None
