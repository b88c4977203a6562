"""Random numbers: the same on all ranks where a program prepares its data, different in each replica of a step.

Every rank shuffles the whole data and takes its part of each batch: with different orders, parts would overlap and rows
be missing. So at the start all ranks get rank 0's state of NumPy's and Python's global generators and of Keras', which
changes nothing where the program has seeded them alike. Datasets that shuffle without a seed, and arrays in `fit`, get
seeds from one more generator. TensorFlow's global seed stays unset: with it each eager random op would be kept.

With equal numbers in a step, n replicas would draw one n-th of the noise. Stored state stays equal everywhere: seed
generators have rank 0's state, which is checkpointed and restored. Only the drawn seed has the replica id mixed in.
Replica 0 draws what a single process would.

Tested in tests/integration/test_unseeded.py and tests/integration/test_semantics.py.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfps.collectives import Broadcast
from tfps.graph.ops import HOST
from tfps.graph.patches import Patch, replaced, replica_context
from tfps.graph.tf_private import ResourceVariable, data_seeds, is_seeded
from tfps.keras_hooks.keras_private import ArrayDataAdapter, forget_global_seeds, global_seeds, set_global_seeds
from tfps.runtime.runtime import Runtime
from tfps.types import Argument, Batches, Function, Value

_APART = 0x9E3779B1  # odd, so that no two ranks get the same seed
_SEEDS = 2**31 - 1  # number of seeds that TensorFlow distinguishes


class _Shared:
    """Where seeds of datasets come from, and what shuffles now; None: TensorFlow. Used by the main thread."""

    seeds: random.Random | None = None
    shuffle: Callable[[Value], tf.Tensor] | None = None


def share_random_states(runtime: Runtime) -> None:
    """Gives this rank rank 0's random states; every rank must call it.

    Raises:
        TfpsError: another rank did not call it in time.
    """
    exchange = runtime.exchange
    if exchange.view.workers == 1:
        return
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


def _seed_dataset(original: Function) -> Function:
    def get_seed(seed: Value) -> tuple[tf.Tensor, tf.Tensor]:
        if seed is None and _Shared.seeds is not None and not is_seeded():
            seed = _Shared.seeds.randrange(1, 2**31)
        return original(seed)

    return get_seed


def _shuffle_arrays_alike(original: Function) -> Function:
    def get_tf_dataset(self: Batches) -> tf.data.Dataset:
        if _Shared.seeds is None or is_seeded():
            return original(self)
        with _shuffled_alike(_Shared.seeds.randrange(2**31)):
            return original(self)

    return get_tf_dataset


@contextlib.contextmanager
def _shuffled_alike(seed: int) -> Iterator[None]:
    """In the block, `tf.random.shuffle` in a dataset's function gives the same orders on all ranks, each time another.

    An op with a seed would begin anew in every epoch.
    """
    with tf.init_scope(), tf.device(HOST):
        count = ResourceVariable(0, dtype=tf.int64, trainable=False, name="tfps_shuffles")

    def shuffle_alike(value: Value) -> tf.Tensor:
        number = count.assign_add(1, read_value=True)
        return tf.random.experimental.stateless_shuffle(value, tf.stack([tf.constant(seed, tf.int64), number]))

    with replaced(_Shared, "shuffle", shuffle_alike):
        yield


def _shuffle(original: Function) -> Function:
    def shuffle(value: Value, *arguments: Argument, **options: Argument) -> tf.Tensor:
        if _Shared.shuffle is not None:
            return _Shared.shuffle(value)
        return original(value, *arguments, **options)

    return shuffle


def of_its_own() -> contextlib.AbstractContextManager[None]:
    """In the block, datasets without a seed differ between ranks: each makes its own data."""
    return replaced(_Shared, "seeds", None)


def _draw_apart(original: Function) -> Function:
    def draw(self: keras.random.SeedGenerator, *arguments: object, **options: object) -> Value:
        seed = original(self, *arguments, **options)
        context = replica_context()
        if context is None or not tf.is_tensor(seed):
            return seed
        replica = context.strategy.extended.draws_as(context)
        if replica == 0:
            return seed
        return tf.random.experimental.stateless_fold_in(seed, tf.constant(replica, seed.dtype))

    return draw


def stateful_apart(graph: tf.Graph, rank: int) -> contextlib.AbstractContextManager[None]:
    """In the block, `tf.random.normal` and the like, traced in `graph`, draw different numbers on each rank.

    Replicas of one worker have separate ops, whose seeds TensorFlow makes different. Without `tf.random.set_seed`
    processes differ anyway.
    """
    own = graph.seed if graph.seed is None or not rank else (graph.seed + rank * _APART) % _SEEDS
    return replaced(graph, "seed", own)


_UNSEEDED = "tests/integration/test_unseeded.py"
PATCHES = (
    Patch(
        data_seeds,
        "get_seed",
        _seed_dataset,
        "datasets that shuffle without a seed get the same one on all ranks",
        _UNSEEDED,
    ),
    Patch(
        ArrayDataAdapter,
        "get_tf_dataset",
        _shuffle_arrays_alike,
        "arrays that `fit` shuffles get the same orders on all ranks",
        _UNSEEDED,
    ),
    Patch(tf.random, "shuffle", _shuffle, "does that while Keras makes a dataset of arrays; else nothing", _UNSEEDED),
    Patch(
        keras.random.SeedGenerator,
        "next",
        _draw_apart,
        "mixes the replica's id into a seed that is drawn in a replica function",
        "tests/integration/test_semantics.py",
    ),
)
