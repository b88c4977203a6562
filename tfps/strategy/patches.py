"""Every attribute of Keras and TensorFlow that is replaced. docs/keras_patches.md shows this table.

Each is replaced once; what must happen in an order at one place stands in its replacement. The one exception is no
function: `tf_private` tells AutoGraph at import to leave tfps alone.

Tested in tests/strategy/test_patches.py.
"""

from __future__ import annotations

import functools

from tfps.embeddings import counting  # noqa: F401  # hooks
from tfps.graph import patches, tf_private
from tfps.graph.patches import Patch
from tfps.input import caches  # noqa: F401  # hooks
from tfps.keras_hooks import (  # noqa: F401  # hooks
    agreed_logs,
    batch_numbers,
    captured,
    checkpoint,
    differentiated,
    generators,
    hooks,
    joining,
    layers,
    loops,
    python_data,
    random_numbers,
    weighing,
    xla,
)
from tfps.policies import remote_optimizers
from tfps.strategy import optimizers  # noqa: F401  # hooks
from tfps.updates import reductions

_PATCHES = (*tf_private.PATCHES, *reductions.PATCHES, *remote_optimizers.PATCHES, *hooks.PATCHES)
TABLE: tuple[Patch, ...] = tuple(sorted(_PATCHES, key=lambda patch: patch.place))


@functools.cache
def install_all() -> None:
    """Replaces them, once per process."""
    patches.install(TABLE)
