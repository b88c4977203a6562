"""Arrays in a file beside the weights of BackupAndRestore: state that Keras' files do not have.

Tested in tests/integration/test_compression.py and tests/integration/test_local_programs.py.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfps.types import Argument, Array, Callback

logger = logging.getLogger("tfps")
_ITERATIONS = "iterations"


def packed(arrays: Mapping[str, Array], iterations: int = 0) -> bytes:
    """`arrays` in one file, of that step of the optimizer."""
    content = io.BytesIO()
    named: dict[str, Argument] = {_ITERATIONS: np.array(iterations, np.int64), **arrays}
    np.savez(content, **named)
    return content.getvalue()


def unpacked(content: bytes) -> tuple[dict[str, Array], int]:
    """The reverse of `packed`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files if name != _ITERATIONS}, int(arrays[_ITERATIONS])


def write(callback: Callback, name: str, arrays: Mapping[str, Array]) -> None:
    """Writes the file `name` of a backup that has just been saved."""
    step, path = int(callback.model.optimizer.iterations.numpy()), _path(callback, name)
    with tf.io.gfile.GFile(f"{path}.part", "wb") as file:
        file.write(packed(arrays, step))
    tf.io.gfile.rename(f"{path}.part", path, overwrite=True)


def read(callback: Callback, name: str, what: str) -> dict[str, Array] | None:
    """Reads the file `name` of a backup that has just been restored.

    Returns None if there is none, or if it is of another step than the backup, which is logged as the loss of `what`.
    """
    path = _path(callback, name)
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path, "rb") as file:
        arrays, iterations = unpacked(file.read())
    now = int(callback.model.optimizer.iterations.numpy())
    if iterations != now:
        logger.warning("tfps: %s is dropped: %s is of step %d, the backup of step %d", what, path, iterations, now)
        return None
    return arrays


def _path(callback: Callback, name: str) -> str:
    return str(tf.io.gfile.join(str(callback.backup_dir), name))
