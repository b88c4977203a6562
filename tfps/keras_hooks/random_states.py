"""Lets all ranks draw the same random numbers where a program, the same on all, prepares its data without a seed.

Every rank shuffles the whole data and takes its part of each batch: with different orders, parts would overlap and rows
be missing. So at the start all ranks get rank 0's state of NumPy's and Python's global generators and of Keras', which
changes nothing where the program has seeded them alike. Datasets that shuffle without a seed, and arrays in `fit`, get
seeds from one more generator. TensorFlow's global seed stays unset: with it each eager random op would be kept.

What replicas draw in a step stays different on each of them, see seeds.py.

Tested in tests/integration/test_unseeded.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import secrets
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfps.collectives.collectives import Broadcast
from tfps.graph.ops import HOST
from tfps.graph.tf_private import ResourceVariable, data_seeds, is_seeded
from tfps.keras_hooks.keras_private import ArrayDataAdapter, forget_global_seeds, global_seeds, set_global_seeds
from tfps.runtime.runtime import Runtime
from tfps.types import Batches, Value


class _Shared:
    """Where seeds of datasets come from; None: from TensorFlow. Used by the main thread."""

    seeds: random.Random | None = None


def share_random_states(runtime: Runtime) -> None:
    """Gives this rank rank 0's random states; every rank must call it.

    Raises:
        TfpsError: another rank did not call it in time.
    """
    exchange = runtime.exchange
    if exchange.workers == 1:
        return
    _seed_datasets()
    (said,) = Broadcast(runtime, "random states")(json.dumps(_states()).encode())
    first = json.loads(said)
    if exchange.rank:
        _take(first)
    _Shared.seeds = random.Random(first["datasets"])


def _states() -> dict[str, object]:
    numpy_ = np.random.get_state(legacy=False)
    numpy_["state"] = {key: np.asarray(value).tolist() for key, value in numpy_["state"].items()}
    return {
        "numpy": numpy_,
        "python": random.getstate(),
        "keras": global_seeds(),
        "datasets": secrets.randbits(64),
    }


def _take(first: dict[str, Value]) -> None:
    if first["keras"] is None:
        forget_global_seeds()  # they come from Python's generator
    else:
        set_global_seeds(first["keras"])
    own_kind = np.random.get_state(legacy=False)["bit_generator"]
    if first["numpy"]["bit_generator"] == own_kind == "MT19937":  # else the program has chosen another
        key = np.array(first["numpy"]["state"]["key"], np.uint32)
        np.random.set_state({**first["numpy"], "state": {**first["numpy"]["state"], "key": key}})
    version, state, gauss = first["python"]
    random.setstate((version, tuple(state), gauss))


@functools.cache
def _seed_datasets() -> None:
    """Makes datasets without a seed, and arrays that `fit` shuffles, take shared seeds; done once per process."""
    get_seed, get_dataset = data_seeds.get_seed, ArrayDataAdapter.get_tf_dataset

    @functools.wraps(get_seed)
    def get_shared_seed(seed: Value) -> tuple[tf.Tensor, tf.Tensor]:
        if seed is None and _Shared.seeds is not None and not is_seeded():
            seed = _Shared.seeds.randrange(1, 2**31)
        return get_seed(seed)

    @functools.wraps(get_dataset)
    def get_tf_dataset(self: Batches) -> tf.data.Dataset:
        if _Shared.seeds is None or is_seeded():
            return get_dataset(self)
        with _shuffled_alike(_Shared.seeds.randrange(2**31)):
            return get_dataset(self)

    data_seeds.get_seed = get_shared_seed
    ArrayDataAdapter.get_tf_dataset = get_tf_dataset


@contextlib.contextmanager
def _shuffled_alike(seed: int) -> Iterator[None]:
    """In the block, `tf.random.shuffle` in a dataset's function gives the same orders on all ranks, each time another.

    An op with a seed would begin anew in every epoch.
    """
    shuffle = tf.random.shuffle
    with tf.init_scope(), tf.device(HOST):
        count = ResourceVariable(0, dtype=tf.int64, trainable=False, name="tfps_shuffles")

    def shuffle_alike(value: Value, **_: object) -> tf.Tensor:
        number = count.assign_add(1, read_value=True)
        return tf.random.experimental.stateless_shuffle(value, tf.stack([tf.constant(seed, tf.int64), number]))

    tf.random.shuffle = shuffle_alike
    try:
        yield
    finally:
        tf.random.shuffle = shuffle


@contextlib.contextmanager
def of_its_own() -> Iterator[None]:
    """In the block, datasets without a seed differ between ranks: each makes its own data."""
    shared, _Shared.seeds = _Shared.seeds, None
    try:
        yield
    finally:
        _Shared.seeds = shared
