"""Keeps each replica's `add_loss` losses when replica functions wait for each other in eager mode.

Keras keeps these losses in the layer, which the replicas of a worker share. In eager mode replicas run one after the
other until each needs a sum over all: the second forward pass would overwrite the first replica's losses unread.

Tested in tests/integration/test_rows.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator

import keras

from tfps.keras_hooks.keras_private import losses_of
from tfps.types import Layer, Value


class _Layers(threading.local):
    """Layers to which this thread has added losses."""

    def __init__(self) -> None:
        self.layers: weakref.WeakSet[Layer] = weakref.WeakSet()


_thread = _Layers()


@functools.cache
def note_added_losses() -> None:
    """Makes Keras report layers that add losses to this module; done once per process."""
    original = keras.Layer.add_loss

    @functools.wraps(original)
    def add_loss(self: Layer, loss: Value) -> None:
        original(self, loss)
        _thread.layers.add(self)

    keras.Layer.add_loss = add_loss


@contextlib.contextmanager
def own_losses() -> Iterator[None]:
    """Preserves this thread's added losses while its replica function waits and others run."""
    mine = [(layer, list(losses_of(layer))) for layer in _thread.layers]
    yield
    for layer, losses in mine:
        losses_of(layer)[:] = losses
