"""Programs whose fourth batch has components with other first dimensions; see program.py.

Each returns how it ended, and how many batches it had trained on by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results

from tfps.types import Batches, Logs, Model, Structure, Value

NODES = 12
SPEC = ({"nodes": tf.TensorSpec((None, 6)), "edges": tf.TensorSpec((None, 2))}, tf.TensorSpec((None, 1)))


def batches(*edges: int) -> list[Structure]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(random.normal(size=shape), "float32")

    return [({"nodes": normal(NODES, 6), "edges": normal(each, 2)}, normal(NODES, 1)) for each in edges]


GOOD, LATE = batches(*[NODES] * 6), batches(NODES, NODES, NODES, 30, NODES)


class Graph(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Structure) -> Value:
        return self.dense(inputs["nodes"]) + keras.ops.mean(inputs["edges"])


class Read(keras.utils.PyDataset):
    def __len__(self) -> int:
        return len(LATE)

    def __getitem__(self, index: int) -> Structure:
        return LATE[index]


class Counting(keras.callbacks.Callback):
    batches = 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.batches += 1


def dataset(items: list[Structure]) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter(items), output_signature=SPEC)


def stream() -> Iterator[Structure]:
    while True:
        yield from LATE


def ended(job: Job, run: Callable[[Model, Counting], object]) -> Results:
    model, counting = job.compiled("sgd", build=Graph, loss="mse", metrics=[]), Counting()
    try:
        run(model, counting)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "batches": counting.batches}
    return {"error": "none", "batches": counting.batches}


def fitted(job: Job, read: Callable[[], Batches], **options: object) -> Results:
    return ended(
        job, lambda model, counting: model.fit(read(), callbacks=[counting], shuffle=False, verbose=0, **options)
    )


fit = functools.partial(fitted, read=lambda: dataset(LATE))
py_dataset = functools.partial(fitted, read=Read)
generator = functools.partial(fitted, read=stream, steps_per_epoch=5)


def validation(job: Job) -> Results:
    return fitted(job, lambda: dataset(GOOD), validation_data=dataset(LATE))


def evaluate(job: Job) -> Results:
    return ended(job, lambda model, _: model.evaluate(dataset(LATE), verbose=0))


def loop(job: Job) -> Results:
    def train(model: Model, counting: Counting) -> None:
        assert job.strategy is not None

        def replica(x: Structure, y: Value) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)

        step = tf.function(lambda batch: job.strategy.run(replica, batch))
        for batch in job.strategy.experimental_distribute_dataset(dataset(LATE)):
            step(batch)
            counting.batches += 1

    return ended(job, train)


def predict(job: Job) -> Results:
    """Each rank predicts its input as one process: nothing is cut."""

    def predicts(model: Model, _: Counting) -> None:
        inputs = dataset(LATE).map(lambda x, y: x)
        np.testing.assert_allclose(
            model.predict(inputs, verbose=0), np.concatenate([model(x) for x, _ in LATE]), atol=1e-6
        )

    return ended(job, predicts)
