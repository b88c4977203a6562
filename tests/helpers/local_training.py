"""Modes "local" and "diloco" by hand: plain Keras models, one per worker, and the outer optimizer in NumPy.

With a codec each kernel is a bucket of its own and compressed, and biases, which are small, travel as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf
import training

import tfps
from tfps.exchange.codecs import codec_of
from tfps.pserver.server import ParameterServer
from tfps.types import Argument, Array, Model, Options

Weights = list[Array]
Start = Callable[..., tfps.Strategy]
ROWS = 8  # of a worker's batch
SLICE_BYTES = 4096


@dataclass(frozen=True)
class Settings:
    """Of `tfps.Config`, and the inner optimizer."""

    mode: str = "diloco"
    inner_steps: int = 4
    fragments: int = 1
    overlap_steps: int = 0
    own_share: float = 0.5
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    optimizer: str = "sgd"
    compression: str = "none"

    def config(self) -> Options:
        """What differs from a default of `tfps.Config` in a way that the mode allows."""
        names = ["mode", "inner_steps", "fragments", "overlap_steps", "own_share", "compression"]
        names += ["outer_learning_rate", "outer_momentum"] if self.mode == "diloco" else []
        return {name: getattr(self, name) for name in names}


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "plain": lambda: keras.optimizers.SGD(0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.001),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.02),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "clipped scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, clipvalue=0.001)),
    "clipped accumulated": lambda: keras.optimizers.SGD(0.1, clipnorm=0.02, gradient_accumulation_steps=2),
    "clipped decayed": lambda: keras.optimizers.Adam(0.01, clipnorm=0.02, weight_decay=0.01),
}


def model() -> keras.Model:
    """Six trained variables, in three layers of about equal size."""
    layers = [keras.layers.Dense(64, activation="tanh") for _ in range(2)]
    return keras.Sequential([keras.layers.Input((64,)), *layers, keras.layers.Dense(64)])


def fragments(count: int) -> list[list[int]]:
    """Places of the variables of each fragment of `model`: layers in turn."""
    return [[2 * layer + each for layer in range(part, 3, count) for each in range(2)] for part in range(count)]


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def rows(rank: int, steps: int) -> tuple[Array, Array]:
    """All rows that a worker trains with."""
    x, y = training.digits(1000)
    begin = rank * 300
    return x[begin : begin + steps * ROWS], y[begin : begin + steps * ROWS]


class Worker:
    """One worker: trains a plain Keras model."""

    def __init__(self, weights: Weights, settings: Settings, rank: int, steps: int) -> None:
        self.model = model()
        self.model.set_weights(weights)
        self.model.compile(OPTIMIZERS[settings.optimizer](), loss(), jit_compile=False)
        self._x, self._y = rows(rank, steps)
        self._step = 0

    @property
    def done(self) -> bool:
        return self._step * ROWS >= len(self._x)

    @property
    def weights(self) -> Weights:
        return [np.asarray(each) for each in self.model.get_weights()]

    def step(self) -> None:
        part = slice(self._step * ROWS, (self._step + 1) * ROWS)
        self.model.train_on_batch(self._x[part], self._y[part])
        self._step += 1

    def set(self, place: int, value: Array) -> None:
        self.model.trainable_variables[place].assign(value)


class Simulation:
    """All workers of a job, step by step; some are `lost`: by rank, before which exchange of each fragment, from 0.

    Attributes:
        trajectory: each worker's own weights after each of its steps and the exchanges that are due then.
        shared: the global parameters, as workers have them.
        exact: the global parameters, as pservers have them.
        held: the residual of each variable on each worker.
    """

    def __init__(
        self, weights: Weights, settings: Settings, steps: Sequence[int], lost: Mapping[int, int] | None = None
    ) -> None:
        self._settings, self._parts = settings, fragments(settings.fragments)
        self._lost, self._exchanges = lost or {}, [0] * settings.fragments
        self.workers = [Worker(weights, settings, rank, count) for rank, count in enumerate(steps)]
        self.shared = [each.copy() for each in weights]
        self.exact = [each.copy() for each in weights]
        self.held = [[np.zeros_like(each) for each in weights] for _ in steps]
        self._momentum = [np.zeros_like(each) for each in weights]
        self._pending: dict[int, int] = {}  # by fragment: at which step it is mixed in
        self.trajectory: list[list[Weights]] = [[] for _ in steps]

    def run(self) -> None:
        """Trains until the end of all workers' data, and ends the round."""
        settings, step = self._settings, 0
        while not all(worker.done for worker in self.workers):
            step += 1
            training = [rank for rank, worker in enumerate(self.workers) if not worker.done]
            for rank in training:
                self.workers[rank].step()
            for part in range(settings.fragments):
                if self._pending.get(part) == step:
                    self._mix(part)
                if (step + part * settings.inner_steps // settings.fragments) % settings.inner_steps == 0:
                    self._exchange(part)
                    self._pending[part] = step + settings.overlap_steps
                    if not settings.overlap_steps:
                        self._take(part)
            for rank in training:
                self.trajectory[rank].append(self.workers[rank].weights)
        for part in range(settings.fragments):
            if self._pending.get(part, 0) > step:
                self._mix(part)
            exchanged = (step + part * settings.inner_steps // settings.fragments) % settings.inner_steps == 0
            if settings.overlap_steps or not exchanged:
                self._exchange(part)
            self._take(part)
        self._collect()

    def _exchange(self, part: int) -> None:
        settings, f = self._settings, np.float32
        local = settings.mode == "local"
        rate, momentum = f(1.0 if local else settings.outer_learning_rate), f(settings.outer_momentum)
        here = [rank for rank in range(len(self.workers)) if self._exchanges[part] < self._lost.get(rank, 2**31)]
        self._exchanges[part] += 1
        for place in self._parts[part]:
            exact = self.exact[place]
            total = np.zeros_like(exact)
            for rank in here:
                change = (self.shared[place] - self.workers[rank].weights[place]) / f(len(here))
                total += self._travelled(change, self.held[rank][place])
            if local:
                exact -= rate * total
            else:
                moved = self._momentum[place]
                moved *= momentum
                moved -= total * rate
                exact += moved * momentum - total * rate
            if self._compresses(exact):
                self.shared[place] += self._travelled(exact - self.shared[place], None)
            else:
                self.shared[place] = exact.copy()

    def _compresses(self, values: Array) -> bool:
        return self._settings.compression != "none" and values.ndim > 1

    def _travelled(self, values: Array, held: Array | None) -> Array:
        """What arrives of `values`, encoded slice by slice; the sender adds its residual."""
        codec = codec_of(self._settings.compression)
        if codec is None or not self._compresses(values):
            return values
        arrives = np.empty_like(values)
        for begin in range(0, values.size, SLICE_BYTES // 4):
            where = slice(begin, begin + SLICE_BYTES // 4)
            numbers = values.reshape(-1)[where]
            wanted = numbers if held is None or not codec.feeds_back else numbers + held.reshape(-1)[where]
            codec.decode(codec.encode(wanted), arrives.reshape(-1)[where])
            if held is not None and codec.feeds_back:
                held.reshape(-1)[where] = wanted - arrives.reshape(-1)[where]
        return arrives

    def _collect(self) -> None:
        """As at the end of `fit`: rank 0 has the residuals of all workers."""
        for place in range(len(self.shared)):
            whole = np.stack([held[place] for held in self.held]).sum(axis=0)
            for rank, held in enumerate(self.held):
                held[place] = whole if rank == 0 else np.zeros_like(whole)

    def _mix(self, part: int) -> None:
        share = np.float32(self._settings.own_share)
        for worker in self.workers:
            for place in self._parts[part]:
                worker.set(place, share * worker.weights[place] + (1 - share) * self.shared[place])

    def _take(self, part: int) -> None:
        for worker in self.workers:
            for place in self._parts[part]:
                worker.set(place, self.shared[place])


def difference(one: Weights, other: Weights) -> float:
    """Largest difference, relative to the largest weight of its variable; 0.0 means bitwise equal."""
    if all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)):
        return 0.0
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(one, other, strict=True))


def dataset(rank: int, steps: int, workers: int) -> tf.data.Dataset:
    """The rows of one worker, which no other worker gets; TensorFlow cuts each batch into `workers`."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    whole = tf.data.Dataset.from_tensor_slices(rows(rank, steps)).filter(lambda x, y: True)  # of unknown size: see fit
    return whole.batch(ROWS * workers).with_options(options)


@contextlib.contextmanager
def starting() -> Iterator[Start]:
    """What makes strategies of one worker, with some `pservers`, else embedded; they end with the block."""
    strategies: list[tfps.Strategy] = []
    servers: list[ParameterServer] = []

    def started(settings: Settings, pservers: int = 0, **options: Argument) -> tfps.Strategy:
        own = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(pservers)]
        servers.extend(own)
        config = tfps.Config(slice_bytes=SLICE_BYTES, **settings.config())
        strategies.append(tfps.Strategy([each.address for each in own] or None, config=config, **options))
        return strategies[-1]

    yield started
    for strategy in strategies:
        strategy.close()
    for server in servers:
        server.stop()


def compiled(strategy: tfps.Strategy, optimizer: Argument = "sgd", **options: Argument) -> Model:
    """The model, with an optimizer or one of `OPTIMIZERS` by its name."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        made = model()
        chosen = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer
        made.compile(chosen, loss(), jit_compile=False, **options)
    return made
