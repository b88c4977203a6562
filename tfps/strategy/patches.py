"""Every attribute of Keras and TensorFlow that is replaced. docs/keras_patches.md shows this table.

Each is replaced once, so the order here is only that of the page; what must happen in an order at one place stands in
its replacement. The one exception is no function: `tf_private` tells AutoGraph at import to leave tfps alone.

Tested in tests/strategy/test_patches.py.
"""

from __future__ import annotations

import functools

from tfps.graph import patches, tf_private
from tfps.graph.patches import Patch
from tfps.keras_hooks import agreed_logs, checkpoint, layers, loops, random_numbers, weighing
from tfps.policies import remote_optimizers
from tfps.strategy import optimizers
from tfps.updates import reductions

_MODULES = [tf_private, reductions, random_numbers, layers, optimizers, remote_optimizers, weighing, loops]
_MODULES += [agreed_logs, checkpoint]
TABLE: tuple[Patch, ...] = tuple(patch for module in _MODULES for patch in module.PATCHES)


@functools.cache
def install_all() -> None:
    """Replaces them, once per process."""
    patches.install(TABLE)
