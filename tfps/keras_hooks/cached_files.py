"""Files in which `tf.data` caches a dataset, where several workers run the same program.

TensorFlow lets one process write a cache, and the others fail by its lock. Each rank caches what it reads itself, which
with `AutoShardPolicy.FILE` are other elements on each; so each gets a file of its own, which names rank and workers: a
job of another size caches anew. (`Dataset.save` and `snapshot` write a run of their own in each process.)

Tested in tests/integration/test_input.py and tests/keras_hooks/test_cached_files.py.
"""

from __future__ import annotations

import functools
import logging
import os

import tensorflow as tf

from tfps.keras_hooks.hooks import replaces
from tfps.types import Batches, Function, Value

logger = logging.getLogger("tfps")
_suffix = ""  # of this rank's files; empty: there is one worker


def begin_caches(rank: int, workers: int) -> None:
    """From now on datasets cache in files of `rank`, one of `workers`."""
    global _suffix
    _suffix = f".rank{rank}of{workers}" if workers > 1 else ""


@replaces(tf.data.Dataset, "cache", "tests/keras_hooks/test_cached_files.py")
def _cache(original: Function, dataset: Batches, filename: Value = "", *args: object, **options: object) -> Batches:
    """Gives each of several ranks a file of its own."""
    if _suffix and (tf.is_tensor(filename) or os.fspath(filename)):
        filename = tf.strings.join([filename if tf.is_tensor(filename) else os.fspath(filename), _suffix])
        _say_once()
    return original(dataset, filename, *args, **options)


@functools.cache
def _say_once() -> None:
    logger.info("tfps: each rank caches datasets in a file of its own: dataset.cache(FILE) writes FILE%s here", _suffix)
