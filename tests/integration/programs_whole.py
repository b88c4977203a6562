"""Steps of Keras' `fit` that are written as for one process, where batches do not divide; see program.py.

The last batch has fewer rows than replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results, data, history, weights

from tfps.types import Argument, Library, Model, Structure, Value, Variable

L: Library = keras.layers
K: Library = keras.ops
SGD = keras.optimizers.SGD
ROWS, BATCH = 29, 7
OPTIONS: dict[str, Argument] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def ended(job: Job, build: Callable[[], Model], x: Structure, y: Structure, **options: Argument) -> Results:
    """What `fit`, `evaluate` and `predict` give."""
    options.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options.setdefault("metrics", [])
    model = job.compiled(lambda: SGD(0.1, momentum=0.5), build=build, **options)
    fit = model.fit(x, y, epochs=2, validation_data=(x, y), **OPTIONS)
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    return {**weights(model), **history(fit), **{f"evaluated/{k}": v for k, v in evaluated.items()}, "own": predicted}


def pixels() -> tuple[np.ndarray, np.ndarray]:
    x, y = data(ROWS)
    return x.reshape(-1, 8, 8, 1), y


def convolutional(job: Job) -> Results:
    """oneDNN's Conv2D returns the shape of its input for batches of no rows; SeparableConv2D raises an error."""

    def build() -> Model:
        convolutions = [L.Conv2D(4, 3, strides=2, activation="relu"), L.SeparableConv2D(4, 3, padding="same")]
        return keras.Sequential([L.Input((8, 8, 1)), *convolutions, L.GlobalAveragePooling2D(), L.Dense(10)])

    return ended(job, build, *pixels(), metrics=["accuracy"])


class Heads(L.Layer):
    """Reshapes as many models do: -1 of no rows is not what they mean."""

    def call(self, inputs: Value) -> Value:
        batch = keras.ops.shape(inputs)[0]
        return keras.ops.max(keras.ops.reshape(inputs, (batch, -1, 4, 4)), axis=1)


def attentive(job: Job) -> Results:
    def build() -> Model:
        inputs = L.Input((8, 8))
        attended = L.MultiHeadAttention(2, 4, use_bias=False)(inputs, inputs)  # a bias of keys has no gradient
        return keras.Model(inputs, L.Dense(10)(L.Flatten()(Heads()(L.Add()([inputs, attended])))))

    x, y = pixels()
    return ended(job, build, x[..., 0], y)


def recurrent_eagerly(job: Job) -> Results:
    x, y = pixels()
    build = lambda: keras.Sequential([L.Input((8, 8)), L.LSTM(4), L.Dense(10)])  # noqa: E731
    return ended(job, build, x[:15, :, :, 0], y[:15], run_eagerly=True)


def synchronized(job: Job, rows: int = ROWS, **options: Argument) -> Results:
    """Synchronized batch normalization sees all rows of all replicas, as in one process."""

    def build() -> Model:
        return keras.Sequential(
            [
                L.Input((64,)),
                L.Dense(8, use_bias=False),
                L.BatchNormalization(synchronized=True, momentum=0.8),
                L.Dense(10),
            ]
        )

    x, y = data(rows)
    return ended(job, build, x, y, **options)


def synchronized_eagerly(job: Job) -> Results:
    return synchronized(job, 15, run_eagerly=True)


def two_outputs() -> Model:
    inputs = L.Input((64,))
    hidden = L.Dense(8, activation="tanh")(inputs)
    return keras.Model(inputs, {"a": L.Dense(10, name="a")(hidden), "b": L.Dense(1, name="b")(hidden)})


class Scalar(keras.losses.Loss):
    """Returns the mean itself."""

    def call(self, y_true: Value, y_pred: Value) -> Value:
        return keras.ops.mean((keras.ops.cast(keras.ops.reshape(y_true, (-1, 1)), y_pred.dtype) - y_pred) ** 2)


class Overridden(keras.losses.Loss):
    """Does all by itself."""

    def __call__(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> Value:
        return keras.losses.MeanAbsoluteError()(y_true, y_pred)


def scalar_losses(job: Job) -> Results:
    """A loss that is a number already, beside one that Keras makes a mean of."""
    x, y = data(ROWS)
    losses = {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": Scalar()}
    results = ended(job, two_outputs, x, {"a": y, "b": y}, loss=losses, loss_weights={"a": 1.0, "b": 0.3})
    results = {key: value for key, value in results.items() if not _unequal("outputs", key)}
    build = lambda: keras.Sequential([L.Input((64,)), L.Dense(1)])  # noqa: E731
    whole = lambda y_true, y_pred: tf.reduce_mean(tf.abs(tf.cast(y_true, tf.float32) - y_pred))  # noqa: E731
    for name, loss in {
        "function": whole,
        "overridden": Overridden(),
        "sum": keras.losses.MeanSquaredError("sum"),
    }.items():
        more = ended(job, build, x, y.reshape(-1, 1) / 10, loss=loss)
        results.update({f"{name}/{key}": value for key, value in more.items() if not _unequal(name, key)})
    return results


def _unequal(name: str, key: str) -> bool:
    """In evaluation nothing is exchanged, so what sums over rows, or counts batches, is exact only if they divide."""
    return ("val_" in key or "evaluated" in key) and (name == "sum" or key.endswith(("a_loss", "b_loss")))


class Endpoint(L.Layer):
    """Adds a loss object's value, as the guide to functional models does."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, logits: Value, targets: Value) -> Value:
        self.add_loss(self.loss_fn(targets, logits))
        return keras.ops.softmax(logits)


def endpoint(job: Job) -> Results:
    def build() -> Model:
        inputs, targets = L.Input((64,), name="inputs"), L.Input((), name="targets", dtype="int32")
        return keras.Model([inputs, targets], Endpoint()(L.Dense(10)(inputs), targets))

    x, y = data(ROWS)
    model = job.compiled(lambda: SGD(0.1), build=build, loss=None, metrics=[])
    fit = model.fit([x, y], None, epochs=2, **OPTIONS)
    return {**weights(model), **history(fit)}


class Tracking(keras.Model):
    """A step of its own, whose losses are those of a loss object and of nothing but TensorFlow."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.other = L.Dense(8, activation="tanh"), L.Dense(10)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.tracker, self.plain = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="plain")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker, self.plain]

    def both(self, x: Value, y: Value) -> tuple[Value, Value]:
        logits = self.other(self.dense(x))
        return self.loss_fn(y, logits), 0.01 * tf.reduce_mean(logits**2)

    def train_step(self, batch: Structure) -> Structure:
        x, y = batch
        with tf.GradientTape() as tape:
            loss, plain = self.both(x, y)
            whole = loss + plain
        gradients = tape.gradient(whole, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        self.plain.update_state(plain)
        return {"loss": self.tracker.result(), "plain": self.plain.result(), "returned": loss}

    def test_step(self, batch: Structure) -> Structure:
        loss, plain = self.both(*batch)
        self.tracker.update_state(loss, sample_weight=tf.shape(batch[0])[0])
        self.plain.update_state(plain, sample_weight=tf.shape(batch[0])[0])
        return {"loss": self.tracker.result(), "plain": self.plain.result()}


class Nested(Tracking):
    """Its step is a function within the replica's."""

    def train_step(self, batch: Structure) -> Structure:
        return self.nested(batch)

    @tf.function
    def nested(self, batch: Structure) -> Structure:
        return super().train_step(batch)


class Averaging(Tracking):
    """Divides its losses by the rows of all replicas, as programs for tf.distribute do."""

    def both(self, x: Value, y: Value) -> tuple[Value, Value]:
        logits = self.other(self.dense(x))
        each = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        average = tf.nn.compute_average_loss
        return average(each, global_batch_size=BATCH), 0.01 * average(tf.reduce_mean(logits**2, -1))


def own_steps(job: Job, kinds: Sequence[type[Tracking]] = (Tracking, Averaging)) -> Results:
    x, y = data(ROWS)
    results: Results = {}
    for kind in kinds:
        model = job.compiled(lambda: SGD(0.1), build=kind, loss=None, metrics=[])
        fit = model.fit(x, y, epochs=2, validation_data=(x, y), **OPTIONS)
        results.update({f"{kind.__name__}/{key}": value for key, value in {**weights(model), **history(fit)}.items()})
    for each in ("loss", "plain"):  # sums over rows: see _unequal
        results.pop(f"Averaging/history/0/val_{each}", None)
    return results


def nested_step(job: Job) -> Results:
    return own_steps(job, [Nested])


class Contrast(keras.Model):
    """Compares each row with all rows of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(4)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def train_step(self, batch: Structure) -> Structure:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            own = self.dense(batch[0])
            everything, mean = own, tf.reduce_mean(own, 0)
            if context is not None and context.num_replicas_in_sync > 1:
                everything = context.all_gather(own, axis=0)
                mean = context.all_reduce(tf.distribute.ReduceOp.MEAN, mean)
            similar = tf.matmul(own, everything, transpose_b=True)
            loss = tf.reduce_mean(tf.reduce_logsumexp(similar, axis=1)) + tf.reduce_mean((own - mean) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def contrast(job: Job, rows: int = ROWS, **options: Argument) -> Results:
    """What replicas exchange within the step has gradients: those of the global batch."""
    x, y = data(rows)
    model = job.compiled(lambda: SGD(0.01), build=Contrast, loss=None, metrics=[], **options)
    fit = model.fit(x, y, epochs=2, **OPTIONS)
    return {**weights(model), **history(fit)}


def contrast_eagerly(job: Job) -> Results:
    return contrast(job, 15, run_eagerly=True)


def clipped(job: Job) -> Results:
    """Each replica clips the gradient of its own rows: a limit that no gradient reaches changes nothing."""
    x, y = data(ROWS)
    model = job.compiled(lambda: SGD(0.1, global_clipnorm=50.0, gradient_accumulation_steps=2))
    fit = model.fit(x, y, epochs=2, **OPTIONS)
    return {**weights(model), **history(fit)}


def dice(job: Job) -> Results:
    """No mean over rows: only the ranks are equal."""
    x, y = data(ROWS)
    build = lambda: keras.Sequential([L.Input((64,)), L.Dense(10, activation="softmax")])  # noqa: E731
    model = job.compiled(lambda: SGD(0.1), build=build, loss=keras.losses.Dice())
    fit = model.fit(x, keras.utils.to_categorical(y, 10), epochs=1, **OPTIONS)
    return {f"ranks/{key}": value for key, value in {**weights(model), **history(fit)}.items()}


class Annealed(L.Layer):
    """Counts its calls in training by itself, and scales what it gets by that."""

    def build(self, shape: Sequence[int]) -> None:
        self.k = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, inputs: Value, training: bool = False) -> Value:
        if training:
            self.k.assign_add(1.0)
            self.calls.assign_add(1)
        return inputs * (1.0 + 0.1 * self.k)


def annealed(job: Job, rows: int = ROWS, **options: Argument) -> Results:
    """What a layer adds in every step is no statistic of rows: replicas without rows add it, too."""
    build = lambda: keras.Sequential([L.Input((64,)), Annealed(), L.Dense(10)])  # noqa: E731
    return ended(job, build, *data(rows), **options)


def annealed_eagerly(job: Job) -> Results:
    return annealed(job, 15, run_eagerly=True)


class EachRow(Tracking):
    """Returns a value for each row, one for each class, and one for each of as many things as a rank may have rows."""

    def train_step(self, batch: Structure) -> Structure:
        logs = super().train_step(batch)
        logits = self.other(self.dense(batch[0]))
        hits = tf.cast(tf.argmax(logits, 1) == tf.cast(batch[1], tf.int64), tf.int32)
        return {**logs, "hits": hits, "each": tf.reduce_max(logits, 1), "classes": tf.reduce_mean(logits, 0)[:2]}


def each_row(job: Job, **options: Argument) -> Results:
    """Values for each row are those of the whole last batch."""
    x, y = data(25)  # the last batch has 4 rows
    model = job.compiled(lambda: SGD(0.1), build=EachRow, loss=None, metrics=[], **options)
    fit = model.fit(x, y, epochs=2, **OPTIONS)
    return {**weights(model), **history(fit)}


class Lookups(L.Layer):
    """Looks up words of the batch and what does not come from it; the table of words is that of the logits, too."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.length, self.words, self.places, self.kind = (
            length,
            L.Embedding(16, 4),
            L.Embedding(8, 4),
            L.Embedding(3, 4),
        )
        self.dense = L.Dense(4)

    def build(self, shape: Sequence[int]) -> None:
        for each in (self.words, self.places, self.kind):
            each.build()
        self.dense.build((None, None, 4))

    def call(self, inputs: Value) -> Value:
        places = K.arange(self.length or K.shape(inputs)[1])
        kind = self.kind(K.zeros((1,), "int32")) * self.kind(inputs[:, :1] % 3)
        h = self.dense(self.words(inputs) + self.places(places) + kind)
        return K.matmul(K.mean(h, 1), K.transpose(self.words.embeddings))


class NestedGradients(keras.Model):
    """Computes and applies gradients in a function of its own."""

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return []

    def train_step(self, batch: Structure) -> Structure:
        return {"loss": self.nested(*batch)}

    @tf.function
    def nested(self, x: Value, y: Value) -> Value:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return loss


def lookups(job: Job, kind: type[Model] = keras.Model) -> Results:
    """An optimizer that squares slices sees in each lookup the one of one process: Adam."""
    x, _ = data(ROWS)
    words = (x[:, :6] * 100).astype("int32") % 16
    results: Results = {}
    for length in (6, None):
        keras.utils.set_random_seed(1)

        def build(length: int | None = length) -> Model:
            inputs = L.Input((length,), dtype="int32")
            return kind(inputs, Lookups(length)(inputs))

        model = job.compiled(lambda: keras.optimizers.Adam(0.01, epsilon=1e-3), build=build, metrics=[])
        model.fit(words, words[:, 0], epochs=2, **OPTIONS)
        results |= {f"{length} {key}": value for key, value in weights(model).items()}
    return results


def nested_lookups(job: Job) -> Results:
    return lookups(job, NestedGradients)


class UniqueLookups(L.Layer):
    """Looks up each id of the batch once, in ways that Keras and TensorFlow have; a table also plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.sparse = L.Embedding(16, 4), L.Embedding(16, 4)
        self.dense = L.Dense(3)

    def build(self, shape: Sequence[int]) -> None:
        for each in (self.words, self.sparse):
            each.build()
        self.dense.build((None, 16))

    @tf.function
    def nested(self, ids: Value) -> Value:
        once, where = tf.unique(tf.reshape(ids, [-1]))
        return tf.gather(tf.gather(self.words.embeddings.value, once), where)

    def call(self, ids: Value) -> Value:
        table = self.words.embeddings.value
        once, where = tf.unique(tf.reshape(ids, [-1]))
        each = tf.gather(tf.gather(table, tf.boolean_mask(once, once >= 0)), where)
        h = tf.reshape(each + self.nested((ids + 1) % 16), tf.shape(self.words(ids))) + self.words(ids)
        combined = tf.nn.embedding_lookup_sparse(self.sparse.embeddings.value, tf.sparse.from_dense(ids), None)
        dense = self.dense(tf.sparse.from_dense(tf.ensure_shape(tf.one_hot(ids[:, 0], 16), [None, 16])))
        return K.concatenate([tf.reduce_mean(h, 1), combined, dense], 1)


def unique_lookups(job: Job) -> Results:
    """In one process an id that a lookup takes once is one slice for the global batch: Adam squares that."""
    x, _ = data(ROWS)
    words = (x[:, :6] * 100).astype("int32") % 15 + 1
    results: Results = {}
    for make in (lambda: keras.optimizers.Adam(0.01, epsilon=1e-3), lambda: keras.optimizers.Adagrad(0.1)):
        keras.utils.set_random_seed(1)

        def build() -> Model:
            inputs = L.Input((6,), dtype="int32")
            return keras.Model(inputs, L.Dense(16)(UniqueLookups()(inputs)))

        model = job.compiled(make, build=build, metrics=[])
        model.fit(words, words[:, 0], epochs=2, **OPTIONS)
        results |= {f"{model.optimizer.name} {key}": value for key, value in weights(model).items()}
    return results


class Stateful(L.Layer):
    """Has states of all kinds: means over rows, and what is none, computed from the rows of all replicas."""

    def build(self, shape: Sequence[int]) -> None:
        def state(name: str, *shape: int) -> Variable:
            return self.add_weight(shape=shape, initializer="zeros", trainable=False, name=name)

        self.mean, self.top, self.steps = state("mean", shape[-1]), state("top", shape[-1]), state("steps")
        self.queue, self.counts = state("queue", 6, shape[-1]), state("counts", 3)
        self.spread = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="mean")
        self.created: Variable | None = None

    def call(self, x: Value, training: bool = False) -> Value:
        if not training:
            return x
        if self.created is None:  # in the first step
            with tf.init_scope():
                self.created = tf.Variable(0.0, trainable=False, name="created")
        context = tf.distribute.get_replica_context()
        rows = context.all_gather(x, axis=0)
        nearest = tf.one_hot(tf.argmax(x[:, :3], 1), 3)
        (counts,) = context.all_reduce(tf.distribute.ReduceOp.SUM, [tf.reduce_sum(nearest, 0)])
        self.mean.assign(0.9 * self.mean.value + 0.1 * tf.reduce_mean(x, 0))
        self.created.assign_add(tf.cond(self.steps.value < 9.0, lambda: 1.0, lambda: 1.0) * tf.reduce_mean(x**2))
        self.top.assign(tf.maximum(self.top.value, tf.reduce_max(tf.abs(rows), 0)))
        self.queue.assign(tf.concat([rows[:6], self.queue.value], 0)[:6])
        self.counts.assign(0.9 * self.counts.value + counts)
        self.steps.assign_add(1.0)
        self.spread.assign(tf.reduce_max(x))  # another number on each replica: it asks for the mean of those
        return x


def states(job: Job, **options: Argument) -> Results:
    """States that are means over rows, or computed from all rows, are those of one process."""
    build = lambda: keras.Sequential([L.Input((64,)), Stateful(), L.BatchNormalization(), L.Dense(10)])  # noqa: E731
    model = job.compiled(lambda: SGD(0.1), build=build, metrics=[], **options)
    x, y = data(ROWS)
    model.fit(x, y, epochs=2, **OPTIONS)
    names = ("mean", "created", "top", "queue", "counts", "steps")  # not the spread, of which replicas have others
    return {name: np.asarray(getattr(model.layers[0], name)) for name in names}


class Used(L.Layer):
    """Has moving means of rows that the loss depends on: read before and after they are assigned, and in functions."""

    def build(self, shape: Sequence[int]) -> None:
        def state(name: str, **options: Argument) -> Variable:
            return self.add_weight(
                shape=shape[1:], initializer="zeros", trainable=False, name=name, dtype="float32", **options
            )

        self.before, self.after, self.asked = state("before"), state("after"), state("asked", aggregation="mean")
        self.scale, self.nested, self.held = state("scale"), state("nested"), state("held")

    def centred(self, x: Value) -> Value:
        self.nested.assign(0.8 * self.nested.value + 0.2 * tf.reduce_mean(x, 0))
        return x - self.nested.value

    def call(self, x: Value, training: bool = False) -> Value:
        if not training:
            return x - self.before.value
        mean = tf.reduce_mean(x, 0)
        out = x - self.before.value - tf.cond(tf.reduce_all(x < 99.0), lambda: self.asked.value, lambda: 0.0 * mean)
        held = tf.convert_to_tensor(self.held.value)
        self.before.assign(0.8 * self.before.value + 0.2 * mean)
        self.after.assign_add(0.2 * (mean - self.after.value))
        self.asked.assign(0.8 * self.asked.value + 0.2 * mean)
        self.held.assign(0.8 * held + 0.2 * mean)
        # It is not linear in itself.
        self.scale.assign(0.8 * self.scale.value - 0.1 * self.scale.value**2 + 0.2 * mean)
        centred = self.centred if tf.executing_eagerly() else tf.function(self.centred)
        return centred(out) - self.after.value - tf.sqrt(1.0 + held)


def used_states(job: Job, **options: Argument) -> Results:
    """States that are means over rows and that the loss depends on are the same on all replicas in every step."""
    build = lambda: keras.Sequential([L.Input((64,)), Used(), L.Dense(10)])  # noqa: E731
    return ended(job, build, *data(ROWS), **options)


def used_states_eagerly(job: Job) -> Results:
    return used_states(job, run_eagerly=True)


def used_states_in_steps(job: Job) -> Results:
    return used_states(job, steps_per_execution=2)
