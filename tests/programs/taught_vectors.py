"""Steps that differentiate a number for each row, and losses that are divided by counts of the batch; see taught.py."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results, history
from taught import BATCH, OPTIONS, ROWS, TOLD, L, digits, ends

from tfps.types import Argument, Logs, Model, Options, Structure, Value

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def embedding() -> Model:
    return keras.Sequential([keras.Input((64,)), L.Dense(8, activation="tanh"), L.Dense(4)])


class Siamese(keras.Model):
    """Triplets, as keras.io's example "Image similarity estimation using a Siamese Network" has them."""

    def __init__(self, network: Model, margin: float = 0.5) -> None:
        super().__init__()
        self.network, self.margin = network, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs: Structure) -> Structure:
        anchor, positive, negative = (self.network(each) for each in inputs)
        near = tf.reduce_sum(tf.square(anchor - positive), -1)
        return near, tf.reduce_sum(tf.square(anchor - negative), -1)

    def train_step(self, data: Structure) -> Logs:
        with tf.GradientTape() as tape:
            loss = self.vector(data)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data: Structure) -> Logs:
        self.loss_tracker.update_state(self.vector(data))
        return {"loss": self.loss_tracker.result()}

    def vector(self, data: Structure) -> tf.Tensor:
        """[rows]."""
        near, far = self(data)
        return tf.maximum(near - far + self.margin, 0.0)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker]


def siamese_network(job: Job, **options: Argument) -> Results:
    x, _ = digits()
    triplets = tf.data.Dataset.from_tensor_slices((x, np.roll(x, 1, 0), np.roll(x, 2, 0)))
    with job.scope():
        model = Siamese(embedding())
        model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-3), weighted_metrics=[], **options)
    fit = model.fit(triplets.batch(7), epochs=2, validation_data=triplets.take(10).batch(4), verbose=0)
    return ends(model.network, fits=[fit])


def siamese_network_eagerly(job: Job) -> Results:
    return siamese_network(job, run_eagerly=True)


class Vectors(keras.Model):
    """Differentiates vectors in the ways that programs do: `how` names one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.one = L.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
        self.two = L.Dense(1)

    def call(self, x: Value) -> Value:
        return self.two(self.one(x))

    def train_step(self, data: Structure) -> Logs:
        x, y = data
        with tf.GradientTape(persistent=self.how == "halves") as tape:
            target, shown = getattr(self, self.how)(x, y)
        variables = self.trainable_variables
        if self.how == "halves":
            both = [tape.gradient(each, variables) for each in target]
            gradients = [0.3 * one + 0.7 * two for one, two in zip(*both, strict=True)]
        elif self.how == "weighted":
            gradients = tape.gradient(target, variables, output_gradients=0.1 + tf.abs(x[:, 1]))
        else:
            gradients = tape.gradient(target, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"shown": tf.reduce_mean(shown)}

    def losses_of_rows(self, x: Value, y: Value) -> tf.Tensor:
        return keras.losses.huber(y[:, None], self(x, training=True))

    def plain(self, x: Value, y: Value) -> Structure:
        loss = self.losses_of_rows(x, y)
        return loss, loss

    weighted = plain

    def scaled(self, x: Value, y: Value) -> Structure:
        loss = self.losses_of_rows(x, y)
        return self.optimizer.scale_loss(loss), loss

    def columns(self, x: Value, y: Value) -> Structure:
        loss = tf.square(self(x, training=True) - y[:, None])
        return loss, loss  # [rows, 1]

    def with_penalties(self, x: Value, y: Value) -> Structure:
        loss = self.losses_of_rows(x, y)
        return [loss, *self.losses, tf.reduce_mean(loss)], loss

    def halves(self, x: Value, y: Value) -> Structure:
        loss = self.losses_of_rows(x, y)
        return (loss, tf.reduce_mean(loss)), loss

    def kept_dimension(self, x: Value, y: Value) -> Structure:
        loss = self.losses_of_rows(x, y)
        return tf.reduce_mean(loss, keepdims=True), loss  # [1], a mean

    def of_columns(self, x: Value, y: Value) -> Structure:
        """[6], means over rows."""
        return tf.reduce_mean(tf.square(self.one(x)), 0) + 0.0 * tf.reduce_mean(self.two(self.one(x))), y

    def shares(self, x: Value, y: Value) -> Structure:
        loss = self.losses_of_rows(x, y)
        return loss / tf.cast(tf.shape(x)[0], tf.float32), loss

    def chosen(self, x: Value, y: Value) -> Structure:
        loss = self.losses_of_rows(x, y)
        return tf.boolean_mask(loss, y > 4.0), loss

    def penalty_of_gradients(self, x: Value, y: Value) -> Structure:
        with tf.GradientTape() as inner:
            inner.watch(x)
            outputs = self(x, training=True)
        slopes = inner.gradient(outputs, x)  # of each row by itself
        loss = tf.square(tf.norm(slopes, axis=1) - 1.0) + self.losses_of_rows(x, y)
        return tf.reduce_mean(loss), loss

    def jacobian(self, x: Value, y: Value) -> Structure:
        with tf.GradientTape() as inner:
            inner.watch(x)
            outputs = self(x, training=True)
        slopes = inner.batch_jacobian(outputs, x)
        loss = tf.reduce_sum(tf.square(slopes), [1, 2]) + self.losses_of_rows(x, y)
        return loss, loss


def _vectors(job: Job, how: str, optimizer: Argument = None, rows: int = ROWS, **options: Argument) -> Results:
    x, y = digits(rows)
    with job.scope():
        model = Vectors(how)
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.002, momentum=0.9), **options)
    fit = model.fit(x, y.astype("float32"), epochs=2, **OPTIONS)
    return ends(model, fits=[fit])


def vectors(job: Job) -> Results:
    """Each way by itself."""
    ways = [
        *("plain", "weighted", "columns", "with_penalties", "halves", "kept_dimension", "of_columns", "shares"),
        *("chosen", "penalty_of_gradients", "jacobian"),
    ]
    return {f"{way}/{name}": value for way in ways for name, value in _vectors(job, way).items()}


def vectors_accumulated(job: Job) -> Results:
    return _vectors(job, "plain", lambda: keras.optimizers.SGD(0.002, gradient_accumulation_steps=2))


def vectors_scaled(job: Job) -> Results:
    return _vectors(job, "scaled", lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.002)))


def vectors_in_several_steps(job: Job) -> Results:
    return _vectors(job, "plain", steps_per_execution=2)


def vectors_that_divide(job: Job) -> Results:
    return _vectors(job, "plain", rows=28) | {
        f"fixed/{name}": value for name, value in _vectors(job, "kept_dimension", rows=28).items()
    }


class Shown(keras.Model):
    """Returns its vector, as Keras' steps of one's own may."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(1)

    def call(self, x: Value) -> Value:
        return self.dense(x)

    def train_step(self, data: Structure) -> Logs:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.square(self(x, training=True)[:, 0] - y)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "columns": tf.reduce_mean(x[:, :3], 0), "pairs": tf.stack([loss, y], 1)}


def returned(job: Job) -> Results:
    """History of a vector, where rows divide and where not."""
    results: Results = {}
    for rows in (6, 5, 12, 3):
        x, y = digits(rows)
        with job.scope():
            model = Shown()
            model.compile(keras.optimizers.SGD(0.001))
        batch = 6 if rows > 3 else 3
        fit = model.fit(x, y.astype("float32"), batch_size=batch, shuffle=False, epochs=2, verbose=0)
        results |= {f"{rows}/{name}": value for name, value in (ends(model) | history(fit)).items()}
    return results


# Losses divided by a count of the batch: the replicas' sums are summed first.


def of_all(*values: Value) -> list[tf.Tensor]:
    """Sums over all replicas."""
    return list(tf.distribute.get_replica_context().all_reduce(SUM, list(values)))


class Counted(Vectors):
    """Losses by hand that are exact, as they are of all replicas' sums."""

    def masked(self, x: Value, y: Value) -> Structure:
        loss, mask = self.losses_of_rows(x, y), tf.cast(y > 4.0, tf.float32)
        total, count = of_all(tf.reduce_sum(loss * mask), tf.reduce_sum(mask))
        return total / tf.maximum(count, 1.0), loss

    def root(self, x: Value, y: Value) -> Structure:
        loss = self.losses_of_rows(x, y)
        return tf.sqrt(tf.distribute.get_replica_context().all_reduce(MEAN, tf.reduce_mean(loss))), loss

    def summed_by_hand(self, x: Value, y: Value) -> Structure:
        loss = self.losses_of_rows(x, y)
        return of_all(tf.reduce_sum(loss))[0], loss

    def vector_by_count(self, x: Value, y: Value) -> Structure:
        loss, mask = self.losses_of_rows(x, y), tf.cast(y > 4.0, tf.float32)
        return loss * mask / tf.maximum(of_all(tf.reduce_sum(mask))[0], 1.0), loss


def counted(job: Job) -> Results:
    x, y = digits()
    results: Results = {}
    for how in ("masked", "root", "summed_by_hand", "vector_by_count"):
        with job.scope():
            model = Counted(how)
            model.compile(keras.optimizers.SGD(0.005, momentum=0.9))
        fit = model.fit(x, y.astype("float32"), epochs=2, **OPTIONS)
        results |= {f"{how}/{name}": value for name, value in ends(model, fits=[fit]).items()}
    return results


class Positives(keras.Model):
    """Gives Keras' losses weights that are divided by the number of positives, as detectors do."""

    def compute_loss(self, x: Value = None, y: Value = None, y_pred: Value = None, *_: Value, **__: Value) -> Value:
        positives = tf.cast(y > 4, tf.float32)
        (count,) = of_all(tf.reduce_sum(positives))
        return super().compute_loss(x, y, y_pred, sample_weight=positives / tf.maximum(count, 1.0))


def positives(job: Job) -> Results:
    x, y = digits()
    with job.scope():
        inner = keras.Sequential([keras.Input((64,)), L.Dense(10)])
        model = Positives(inner.inputs, inner.outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        model.compile(keras.optimizers.SGD(0.1), loss=loss)
    return ends(model, fits=[model.fit(x, y, epochs=2, **OPTIONS)])


def masked_function(job: Job) -> Results:
    """The same in a loss function of `compile`."""

    def masked(y: Value, outputs: Value) -> Value:
        mask = tf.cast(y[:, 0] > 0.5, tf.float32)
        total, count = of_all(tf.reduce_sum(tf.reduce_mean(tf.square(y - outputs), 1) * mask), tf.reduce_sum(mask))
        return tf.math.divide_no_nan(total, count)

    x, y = digits()
    targets = np.eye(10, dtype="float32")[y]
    targets[::3, 0] = 0.75
    build = lambda: keras.Sequential([keras.Input((64,)), L.Dense(10)])  # noqa: E731
    model = job.compiled(lambda: keras.optimizers.SGD(0.2), build=build, loss=masked, metrics=[])
    return ends(model, fits=[model.fit(x, targets, epochs=2, **OPTIONS)])


# One number for a batch in metrics and single outputs.


def mean_of_batch(y: Value, outputs: Value) -> Value:
    return tf.reduce_mean(tf.abs(y - outputs))


def numbers_of_batches(job: Job) -> Results:
    """Means of batches as metrics and as losses of single outputs, in evaluation of arrays too."""
    x, y = digits()
    with job.scope():
        inputs = keras.Input((64,))
        h = L.Dense(8, activation="tanh")(inputs)
        model = keras.Model(
            inputs, [L.Dense(10, name="kind")(h), L.Dense(64, name="copy")(h), L.Dense(1, name="sum")(h)]
        )
        model.compile(
            keras.optimizers.SGD(0.1),
            loss={
                "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "copy": mean_of_batch,
                "sum": keras.losses.MeanSquaredError(reduction="sum"),
            },
            loss_weights={"kind": 1.0, "copy": 0.5, "sum": 0.01},
            metrics={"copy": [mean_of_batch]},
        )
    targets = {"kind": y, "copy": x, "sum": x.mean(1, keepdims=True)}
    held = (x[:17], {name: each[:17] for name, each in targets.items()})
    fit = model.fit(x, targets, epochs=2, validation_data=held, **OPTIONS)
    evaluated = model.evaluate(x, targets, batch_size=BATCH, verbose=0, return_dict=True)
    fewer = model.evaluate(x[:10], {name: each[:10] for name, each in targets.items()}, batch_size=4, verbose=0)
    return ends(model, fits=[fit], **{f"evaluated/{name}": value for name, value in evaluated.items()}, fewer=fewer)


# Metric functions of one number for a batch that is no mean of its rows.


def accuracy_of_known(y: Value, outputs: Value) -> Value:
    known = tf.cast(y >= 0, tf.float32)
    right = tf.cast(tf.equal(tf.cast(y, tf.int64), tf.argmax(outputs, -1)), tf.float32)
    return tf.reduce_sum((right + 0.5) * known) / tf.reduce_sum(known)


def mean_of_known(y: Value, outputs: Value) -> Value:
    return 1.0 - 2.0 * tf.reduce_mean(tf.boolean_mask(tf.reduce_max(outputs, -1), y >= 0))


def f1_of_classes(y: Value, outputs: Value) -> Value:
    kinds, found = tf.one_hot(tf.maximum(y, 0), 10), tf.nn.softmax(outputs)
    both = tf.reduce_sum(kinds * found, 0)
    return tf.reduce_mean((2.0 * both + 1.0) / (tf.reduce_sum(kinds, 0) + tf.reduce_sum(found, 0) + 1.0))


def root_mean_square(y: Value, outputs: Value) -> Value:
    return tf.sqrt(tf.reduce_mean(tf.square(outputs)))


def mean_of_all(y: Value, outputs: Value) -> Value:
    return tf.reduce_mean(tf.abs(outputs))


def of_python(y: Value, outputs: Value) -> Value:
    """As those of scikit-learn; NaN without known labels."""
    mean = lambda y, p: np.float32(p[y >= 0].mean() if (y >= 0).any() else np.nan)  # noqa: E731
    return tf.ensure_shape(tf.numpy_function(mean, [y, outputs], tf.float32), [])


FUNCTIONS = [accuracy_of_known, mean_of_known, f1_of_classes, root_mean_square, mean_of_all, of_python]


class Batched(keras.utils.PyDataset):
    def __init__(self, x: np.ndarray, y: Value) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index: int) -> tuple[Value, Value]:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], keras.tree.map_structure(lambda each: each[part], self.y)


def trained_on(kind: str, model: Model, x: np.ndarray, y: Value) -> Results:
    """What `fit`, validation and `evaluate` find by the same batches of each kind of data.

    A generator gets its number of steps: without, plain Keras counts its end as another batch of metric functions.
    """
    batches = Batched(x, y)
    made: dict[str, Callable[[], Argument]] = {
        "arrays": lambda: (x, y),
        "dataset": lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
        "generator": lambda: (batches[index % len(batches)] for index in range(2 * len(batches))),
        "py_dataset": lambda: batches,
    }
    steps = len(batches) if kind == "generator" else None
    first, rest = (made[kind]()[:1], {"y": y, "batch_size": BATCH}) if kind == "arrays" else ([made[kind]()], {})
    validation: Options = {"validation_data": made[kind](), "validation_steps": steps, "validation_batch_size": BATCH}
    fit = model.fit(
        *first, **rest, epochs=1 if steps else 2, steps_per_epoch=steps, shuffle=False, verbose=0, **validation
    )
    if kind == "generator":
        first = [made[kind]()]
    found = model.evaluate(*first, **rest, steps=steps, verbose=0, return_dict=True)
    return ends(model, fits=[fit], **{f"alone/{key}": value for key, value in found.items()})


def functions_of_batches(job: Job) -> Results:
    """At most three known labels in a batch, so that some workers have none; then none in the last batch."""
    x, labels = digits()
    results: Results = {}
    for last, kind in ((28, "arrays"), (28, "dataset"), (28, "generator"), (28, "py_dataset"), (27, "dataset")):
        known = np.full(ROWS, -1)
        shown = [0, 1, 7, 13, 14, 17, 21, last]
        known[shown] = labels[shown]
        model = job.compiled(
            lambda: keras.optimizers.SGD(0.1),
            build=lambda: keras.Sequential([keras.Input((64,)), L.Dense(10), L.Dropout(0.0)]),
            loss=lambda y, outputs: tf.reduce_mean(tf.square(outputs), -1),
            metrics=FUNCTIONS,
        )
        found = trained_on(kind, model, x, known)
        if last == 27:
            assert np.isnan(found["history/0/accuracy_of_known"]).all()
            assert np.isnan(found["alone/mean_of_known"])
            assert np.isfinite(found["history/0/f1_of_classes"]).all()
        else:
            assert all(np.isfinite(value).all() for value in found.values())
        for key, value in found.items():  # those of Python are means of what the workers have
            place = f"{'ranks ' if 'of_python' in key else ''}{kind}/{last}/{key}"
            results[place] = np.nan_to_num(value, nan=-7.0) if "weights" not in key else value
    return results


def losses_of_outputs(job: Job) -> Results:
    """Numbers for batches as losses of outputs, in evaluation of each kind of data."""
    x, y = digits()
    results: Results = {}
    for kind in ("dataset", "generator", "py_dataset"):
        with job.scope():
            inputs = keras.Input((64,))
            model = keras.Model(inputs, [L.Dense(10, name="kind")(inputs), L.Dense(64, name="copy")(inputs)])
            model.compile(keras.optimizers.SGD(0.1), loss={"kind": TOLD, "copy": mean_of_batch}, metrics={})
        found = trained_on(kind, model, x, {"kind": y, "copy": x})
        results |= {f"{kind}/{key}": value for key, value in found.items()}
    return results
