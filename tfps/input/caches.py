"""`dataset.cache(FILE)` with several workers: each writes a file of its own, and all may read one that is there.

TensorFlow lets one process write a cache file, and another fails at its lock; and each worker may cache data of its
own (files that are divided, `dataset.shard`). So the name gets the rank and the number of workers. A file that is
complete under the given name is one process's: all read it, as that process would.

Tested in tests/integration/test_programs.py and tests/input/test_caches.py.
"""

from __future__ import annotations

import os
import weakref

import tensorflow as tf

from tfps.graph.tf_private import inputs_of
from tfps.keras_hooks.hooks import replaces
from tfps.membership.view import View
from tfps.types import Argument, Batches, Function, Value

_LOCKED = "cache lockfile already exists"  # TensorFlow's words
ADVICE = (
    "; one process at a time may write a cache file. Create the dataset after tfps.Strategy: then each worker has a "
    "file of its own. If a job was ended while it wrote, delete the lock file"
)


class _Own:
    """What makes file names this worker's own; empty: it is alone. Used by the main thread."""

    ending = ""


_of_one_process: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()  # datasets that read a file with all data


def cache_apart(rank: int, view: View, *, changes: bool) -> None:
    """Gives datasets that are created from now on cache files of this worker's own; `changes`: of a job that may have
    another number of workers later, where each makes global batches.
    """
    _Own.ending = "" if view.workers == 1 and not changes else f".{rank}" if changes else f".{rank}of{view.workers}"


@replaces(tf.data.Dataset, "cache", "tests/integration/test_programs.py")
def _cache(
    original: Function, dataset: tf.data.Dataset, filename: Value = "", *args: Argument, **options: Argument
) -> tf.data.Dataset:
    """Each worker caches in a file of its own, unless a process has filled the given one."""
    if not _Own.ending or not isinstance(filename, str | os.PathLike) or not str(filename):
        return original(dataset, filename, *args, **options)
    found = tf.io.gfile.exists(f"{filename}.index")  # TensorFlow writes it last
    made = original(dataset, str(filename) if found else f"{filename}{_Own.ending}", *args, **options)
    if found:
        _of_one_process.add(made)
    return made


def reads_whole(dataset: Batches) -> bool:
    """Whether `dataset` reads a cache file of one process: then it has all data, and no files are left to divide."""
    return isinstance(dataset, tf.data.Dataset) and (
        dataset in _of_one_process or any(map(reads_whole, inputs_of(dataset)))
    )


def advice(error: str) -> str:
    """What to do about an error of tf.data, if it is about a cache file; else empty."""
    return ADVICE if _LOCKED in error else ""
