"""Random numbers: the same on all ranks where a program prepares its data, different in each replica of a step.

docs/contract.md ("Random numbers", "The same data on all ranks") says what is equal, docs/design.md why it is so.

Tested in tests/integration/test_unseeded.py and tests/integration/test_semantics.py.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import weakref
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfps.collectives import Broadcast
from tfps.graph.ops import HOST
from tfps.graph.patches import replaced, replica_context
from tfps.graph.tf_private import ResourceVariable, data_seeds, is_seeded
from tfps.keras_hooks.hooks import replaces
from tfps.keras_hooks.keras_private import ArrayDataAdapter, global_seeds, set_global_seeds
from tfps.runtime.runtime import Runtime
from tfps.types import Argument, Batches, Function, Json, Value

_STATES = "random states: "
_APART = 0x9E3779B1  # odd, so that no two ranks get the same seed
_SEEDS = 2**31 - 1  # number of seeds that TensorFlow distinguishes


of_arrays: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()  # whose random ops choose rows, and change none
_UNSEEDED = "tests/integration/test_unseeded.py"


class _Shared:
    """Where seeds of datasets come from, and what shuffles now; None: TensorFlow. Used by the main thread."""

    seeds: random.Random | None = None
    shuffle: Callable[[Value], tf.Tensor] | None = None


def share_random_states(runtime: Runtime, *, for_joiners: bool) -> None:
    """Gives this rank rank 0's random states; every rank must call it. `for_joiners`: others may need them later."""
    if runtime.exchange.view.workers == 1:
        return
    own = {**states(), "keras": global_seeds(), "datasets": secrets.randbits(64)}
    exchange = runtime.exchange
    if exchange.joining.pending:
        said = next(line for line in exchange.joining.lines() if line.startswith(_STATES))
    else:
        said = _STATES + Broadcast(runtime, "random states")(lambda: json.dumps(own).encode()).decode()
        if for_joiners:
            exchange.declare([], [said])
    first = json.loads(said.removeprefix(_STATES))
    _Shared.seeds = random.Random(first["datasets"])
    if exchange.rank == runtime.source and not exchange.joining.pending:
        return
    set_global_seeds(first["keras"])
    set_states(first)


def states() -> dict[str, Json]:
    """The states of numpy's and Python's generators, for `set_states` on another rank."""
    numpy_ = np.random.get_state(legacy=False)
    numpy_["state"] = {key: np.asarray(value).tolist() for key, value in numpy_["state"].items()}
    return {"numpy": numpy_, "python": random.getstate()}


def set_states(said: dict[str, Json]) -> None:
    numpy_, own_kind = said["numpy"], np.random.get_state(legacy=False)["bit_generator"]
    if numpy_["bit_generator"] == own_kind == "MT19937":  # else the program has chosen another
        numpy_["state"]["key"] = np.array(numpy_["state"]["key"], np.uint32)
        np.random.set_state(numpy_)
    random.setstate(python_state(said["python"]))


def python_state(said: Json) -> tuple[Json, ...]:
    """A state of Python's generator that has been JSON."""
    version, state, gauss = said
    return version, tuple(state), gauss


@replaces(data_seeds, "get_seed", _UNSEEDED)
def _seed_dataset(original: Function, seed: Value) -> Value:
    """Datasets that shuffle without a seed get the same one on all ranks."""
    if seed is None and _Shared.seeds is not None and not is_seeded():
        seed = _Shared.seeds.randrange(1, 2**31)
    return original(seed)


@replaces(ArrayDataAdapter, "get_tf_dataset", _UNSEEDED)
def _shuffle_arrays_alike(original: Function, arrays: Batches) -> tf.data.Dataset:
    """Arrays that `fit` shuffles get the same orders on all ranks."""
    dataset = original(arrays) if _Shared.seeds is None or is_seeded() else _shuffled(_Shared.seeds, original, arrays)
    of_arrays.add(dataset)
    return dataset


def _shuffled(seeds: random.Random, original: Function, arrays: Batches) -> tf.data.Dataset:
    seed = seeds.randrange(2**31)
    with tf.init_scope(), tf.device(HOST):  # an op with a seed would begin anew in every epoch
        count = ResourceVariable(0, dtype=tf.int64, trainable=False, name="tfps_shuffles")

    def shuffle_alike(value: Value) -> tf.Tensor:
        number = count.assign_add(1, read_value=True)
        return tf.random.experimental.stateless_shuffle(value, tf.stack([tf.constant(seed, tf.int64), number]))

    arrays.tfps_shuffles = count
    with replaced(_Shared, "shuffle", shuffle_alike):
        return original(arrays)


def shuffles(epochs: Batches) -> int:
    """How many orders the arrays of a training have had so far; 0 if it has none."""
    return int(getattr(epochs.data_adapter, "tfps_shuffles", 0))


def set_shuffles(epochs: Batches, number: int) -> None:
    """Makes the arrays of a training go on as those of another rank that have had so many orders."""
    if (count := getattr(epochs.data_adapter, "tfps_shuffles", None)) is not None:
        count.assign(number)


@replaces(tf.random, "shuffle", _UNSEEDED)
def _shuffle(original: Function, value: Value, *args: Argument, **options: Argument) -> tf.Tensor:
    """Shuffles alike while Keras makes a dataset of arrays; else it does nothing."""
    return original(value, *args, **options) if _Shared.shuffle is None else _Shared.shuffle(value)


def of_its_own() -> contextlib.AbstractContextManager[None]:
    """In the block, datasets without a seed differ between ranks: each makes its own data."""
    return replaced(_Shared, "seeds", None)


@replaces(keras.random.SeedGenerator, "next", "tests/integration/test_semantics.py")
def _draw_apart(original: Function, seeds: keras.random.SeedGenerator, *args: object, **options: object) -> Value:
    """Mixes the replica's id into a seed that is drawn in a replica function."""
    seed, context = original(seeds, *args, **options), replica_context()
    replica = 0 if context is None or not tf.is_tensor(seed) else context.strategy.extended.draws_as(context)
    return tf.random.experimental.stateless_fold_in(seed, tf.constant(replica, seed.dtype)) if replica else seed


def stateful_apart(graph: tf.Graph, rank: int) -> contextlib.AbstractContextManager[None]:
    """In the block, `tf.random.normal` and the like, traced in `graph`, draw different numbers on each rank.

    Replicas of one worker have separate ops, whose seeds TensorFlow makes different. Without `tf.random.set_seed`
    processes differ anyway.
    """
    own = graph.seed if graph.seed is None or not rank else (graph.seed + rank * _APART) % _SEEDS
    return replaced(graph, "seed", own)
