"""Losses that layers add (`add_loss`), where replica functions wait for each other in eager mode: each keeps its own.

Keras keeps them in the layer, which the replicas of a worker share. Eagerly these run one after the other until each
needs a sum over all: the second one's forward pass would replace the first one's losses before this one has read them.

Tested in tests/integration/test_rows.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from tfps.keras_hooks.keras_private import losses_of


class _Layers(threading.local):
    """Those to which this thread has added losses."""

    def __init__(self) -> None:
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()


_thread = _Layers()


@functools.cache
def note_added_losses() -> None:
    """Makes Keras tell this module of layers that add losses; done once per process."""
    original = keras.Layer.add_loss

    @functools.wraps(original)
    def add_loss(self: Any, loss: Any) -> None:
        original(self, loss)
        _thread.layers.add(self)

    keras.Layer.add_loss = add_loss


@contextlib.contextmanager
def own_losses() -> Iterator[None]:
    """While the replica function that runs in this thread waits, others may run."""
    mine = [(layer, list(losses_of(layer))) for layer in _thread.layers]
    yield
    for layer, losses in mine:
        losses_of(layer)[:] = losses
