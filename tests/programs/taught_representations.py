"""Models that learn representations: from masks, from pairs, from each other; see taught.py."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results
from taught import BATCH, OPTIONS, ROWS, TOLD, L, digits, ends, noise, roughly

from tfps.types import Logs, Model, Structure, Value

K = keras.ops


class MaskedAutoencoder(keras.Model):
    """Rebuilds hidden patches; the loss comes from `compute_loss`, metrics from `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.attend = L.Dense(8), L.MultiHeadAttention(2, 4)
        self.normalize, self.out = L.LayerNormalization(), L.Dense(8)

    def build(self, shape: Structure) -> None:
        self.token = self.add_weight(shape=(1, 1, 8), initializer="random_normal", name="token")
        self.position = self.add_weight(shape=(1, 8, 8), initializer="random_normal", name="position")
        self.project.build((None, 8, 8))
        self.attend.build((None, 8, 8), (None, 8, 8))
        self.normalize.build((None, 8, 8))
        self.out.build((None, 8, 8))
        self.built = True

    def rebuilt(self, patches: Value, hidden: Value) -> Value:
        h = K.where(hidden[:, :, None], self.token, self.project(patches)) + self.position
        h = self.normalize(h + self.attend(h, h))
        return self.out(h)

    def losses_of(self, batch: Structure) -> tuple[Value, Value, Value]:
        patches, hidden = batch
        rebuilt = self.rebuilt(patches, hidden)
        shape = (-1, 4, 8)  # half of the patches of each row are hidden
        targets, outputs = tf.reshape(patches[hidden], shape), tf.reshape(rebuilt[hidden], shape)
        return self.compute_loss(y=targets, y_pred=outputs), targets, outputs

    def train_step(self, batch: Structure) -> Logs:
        with tf.GradientTape() as tape:
            loss, targets, outputs = self.losses_of(batch)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.updated(loss, targets, outputs)
        return self.get_metrics_result()

    def test_step(self, batch: Structure) -> Logs:
        self.updated(*self.losses_of(batch))
        return self.get_metrics_result()

    def updated(self, loss: Value, targets: Value, outputs: Value) -> None:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(targets, outputs)


def masked_autoencoder(job: Job) -> Results:
    random = np.random.default_rng(0)
    hidden = np.array([random.permutation(8) < 4 for _ in range(ROWS)])
    with job.scope():
        model = MaskedAutoencoder()
        model.build((None, 8, 8))
        model.compile(
            keras.optimizers.AdamW(0.005, weight_decay=0.01), keras.losses.MeanSquaredError(), metrics=["mae"]
        )
    data = tf.data.Dataset.from_tensor_slices((digits()[0].reshape(-1, 8, 8), hidden)).batch(BATCH)
    return ends(model, fits=[model.fit(data, epochs=2, verbose=0)])


def encoder(width: int = 8) -> Model:
    return keras.Sequential([keras.Input((64,)), L.Dense(16, activation="relu"), L.Dense(width)])


class Contrastive(keras.Model):
    """Two views of each row against all other rows of the batch; a probe with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = encoder(), keras.Sequential([keras.Input((8,)), L.Dense(6)])
        self.probe = keras.Sequential([keras.Input((8,)), L.Dense(10)])

    def compile(self, contrastive_optimizer: Value, probe_optimizer: Value, **options: Value) -> None:
        super().compile(**options)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.tracker, self.accuracy = keras.metrics.Mean(name="c_loss"), keras.metrics.SparseCategoricalAccuracy()
        self.probe_tracker = keras.metrics.Mean(name="p_loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker, self.probe_tracker, self.accuracy]

    def pairs(self, one: Value, two: Value) -> Value:
        one, two = K.normalize(one, axis=1), K.normalize(two, axis=1)
        alike = K.matmul(one, K.transpose(two)) / 0.5
        same = K.arange(K.shape(one)[0])
        losses = [
            keras.losses.sparse_categorical_crossentropy(same, each, from_logits=True)
            for each in (alike, K.transpose(alike))
        ]
        return (losses[0] + losses[1]) / 2

    def train_step(self, batch: Structure) -> Logs:
        x, other, y = batch
        with tf.GradientTape() as tape:
            one, two = (self.head(self.encoder(view, training=True)) for view in (x, other))
            loss = K.mean(self.pairs(one, two))
        variables = self.encoder.trainable_weights + self.head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracker.update_state(loss)
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(x, training=False))
            loss = self.probe_loss(y, logits)
        variables = self.probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.probe_tracker.update_state(loss)
        self.accuracy.update_state(y, logits)
        return {m.name: m.result() for m in self.metrics}


def contrastive(job: Job) -> Results:
    """Pairs over a replica's rows: not what one process does."""
    x, y = digits()
    with job.scope():
        model = Contrastive()
        model.compile(keras.optimizers.Adam(0.005), keras.optimizers.Adam(0.01))
    data = tf.data.Dataset.from_tensor_slices((x, x + 0.1 * noise(ROWS, 64), y)).batch(BATCH)
    return roughly(ends(model.encoder, model.head, model.probe, fits=[model.fit(data, epochs=2, verbose=0)]))


class Barlow(keras.losses.Loss):
    """Of the correlations of a batch's columns: a number for all rows."""

    def call(self, one: Value, two: Value) -> Value:
        one, two = ((v - K.mean(v, 0)) / (K.std(v, 0) + 1.0) for v in (one, two))
        rows = K.cast(K.shape(one)[0], "float32")
        wrong = (K.matmul(K.transpose(one), two) / rows - K.eye(8)) ** 2
        return K.mean(K.where(K.eye(8) > 0, wrong, 0.1 * wrong))


class Twins(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.tracker = encoder(), keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def train_step(self, batch: Structure) -> Logs:
        with tf.GradientTape() as tape:
            loss = self.loss(*(self.encoder(view, training=True) for view in batch))
        variables = self.encoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def barlow_twins(job: Job) -> Results:
    x = digits()[0]
    with job.scope():
        model = Twins()
        model.compile(keras.optimizers.Adam(0.005), loss=Barlow())
    data = tf.data.Dataset.from_tensor_slices((x, x + 0.1 * noise(ROWS, 64))).batch(BATCH)
    return roughly(ends(model.encoder, fits=[model.fit(data, epochs=2, verbose=0)]))


class Bootstrapped(keras.Model):
    """Predicts what a network makes of the other view that follows the trained one as a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = encoder(), encoder()
        self.predictor = keras.Sequential([keras.Input((8,)), L.Dense(6, activation="relu"), L.Dense(8)])
        self.target.set_weights(self.online.get_weights())
        self.target.trainable = False
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def train_step(self, batch: Structure) -> Logs:
        one, two = batch
        with tf.GradientTape() as tape:
            loss = 0.0
            for left, right in ((one, two), (two, one)):
                aim = tf.stop_gradient(self.target(right, training=False))
                loss += tf.reduce_mean(keras.losses.cosine_similarity(aim, self.predictor(self.online(left))))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for slow, quick in zip(self.target.weights, self.online.weights, strict=True):
            slow.assign(0.95 * slow + 0.05 * quick)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def bootstrapped(job: Job) -> Results:
    x = digits()[0]
    with job.scope():
        model = Bootstrapped()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    data = tf.data.Dataset.from_tensor_slices((x, x + 0.1 * noise(ROWS, 64))).batch(BATCH)
    return ends(model.online, model.predictor, model.target, fits=[model.fit(data, epochs=2, verbose=0)])


class Distiller(keras.Model):
    """Its loss, in an overridden `compute_loss`, takes a teacher's word beside the labels."""

    def __init__(self, student: Model, teacher: Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, distillation_loss: Value, **options: Value) -> None:
        super().compile(**options)
        self.distillation_loss = distillation_loss

    def compute_loss(
        self, x: Value = None, y: Value = None, y_pred: Value = None, sample_weight: Value = None, **_: Value
    ) -> Value:
        taught = K.softmax(self.teacher(x, training=False) / 3.0, axis=1)
        distilled = self.distillation_loss(taught, K.softmax(y_pred / 3.0, axis=1)) * 9.0
        return 0.3 * super().compute_loss(x, y, y_pred, sample_weight) + 0.7 * distilled

    def call(self, x: Value) -> Value:
        return self.student(x)


def distillation(job: Job) -> Results:
    x, y = digits()
    with job.scope():
        teacher, student = encoder(10), keras.Sequential([keras.Input((64,)), L.Dense(10)])
        teacher.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    taught = teacher.fit(x, y, epochs=2, **OPTIONS)
    with job.scope():
        model = Distiller(student, teacher)
        model.compile(
            keras.losses.KLDivergence(),
            optimizer=keras.optimizers.SGD(0.1),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    teacher.trainable = False
    fit = model.fit(x, y, epochs=2, validation_data=(x[:10], y[:10]), **OPTIONS)
    return ends(teacher, student, fits=[taught, fit], evaluated=model.evaluate(x, y, batch_size=BATCH, verbose=0))


class Triplets(keras.Model):
    """A Siamese network: its loss is a mean over rows of what a layer returns, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        base = encoder()
        inputs = [keras.Input((64,)) for _ in range(3)]
        anchor, near, far = (base(each) for each in inputs)
        distances = [K.sum(K.square(anchor - other), -1) for other in (near, far)]
        self.network, self.tracker = keras.Model(inputs, distances), keras.metrics.Mean(name="loss")

    def call(self, inputs: Structure) -> Structure:
        return self.network(inputs)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def loss_of(self, batch: Structure) -> Value:
        near, far = self.network(batch)
        return tf.maximum(near - far + 0.5, 0.0)

    def train_step(self, batch: Structure) -> Logs:
        with tf.GradientTape() as tape:
            loss = self.loss_of(batch)
            mean = tf.reduce_mean(loss)
        variables = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(mean, variables), variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, batch: Structure) -> Logs:
        self.tracker.update_state(self.loss_of(batch))
        return {"loss": self.tracker.result()}


def triplets(job: Job) -> Results:
    x = digits(3 * ROWS)[0]
    with job.scope():
        model = Triplets()
        model.compile(optimizer=keras.optimizers.Adam(0.003, epsilon=0.01), weighted_metrics=[])
    parts = tuple(x[part::3] for part in range(3))
    data = tf.data.Dataset.from_tensor_slices(parts).batch(BATCH)
    fit = model.fit(
        data.map(lambda *parts: (parts,)),
        epochs=2,
        verbose=0,
        validation_data=data.take(2).map(lambda *parts: (parts,)),
    )
    return ends(model.network, fits=[fit])


def siamese(job: Job) -> Results:
    """Compiled with a function that returns the mean over the batch, as guides write it."""

    def contrast(y: Value, distance: Value) -> Value:
        near, far = K.square(distance), K.square(K.maximum(1.0 - distance, 0))
        return K.mean((1 - y) * near + y * far)

    with job.scope():
        base, inputs = encoder(4), [keras.Input((64,)) for _ in range(2)]
        one, two = (base(each) for each in inputs)
        distance = L.Lambda(lambda pair: K.sqrt(K.maximum(K.sum(K.square(pair[0] - pair[1]), 1, keepdims=True), 1e-3)))
        model = keras.Model(inputs, L.Dense(1, activation="sigmoid")(distance([one, two])))
        model.compile(loss=contrast, optimizer=keras.optimizers.RMSprop(0.003, epsilon=0.01), metrics=["accuracy"])
    x, labels = digits(2 * ROWS)
    left, right = x[::2], x[1::2]
    y = (labels[::2] != labels[1::2]).astype("float32")[:, None]
    fit = model.fit([left, right], y, epochs=2, validation_data=([left[:10], right[:10]], y[:10]), **OPTIONS)
    return ends(model, fits=[fit], evaluated=model.evaluate([left, right], y, batch_size=BATCH, verbose=0))


def supervised_contrastive(job: Job) -> Results:
    """First the encoder by pairs, then a classifier on it, frozen: that one is what it is in one process."""

    class Pairs(keras.losses.Loss):
        def call(self, labels: Value, features: Value) -> Value:
            features = K.normalize(features, axis=1)
            logits = K.matmul(features, K.transpose(features)) / 0.5
            same = K.cast(labels[:, None] == labels[None], "float32")
            return keras.losses.categorical_crossentropy(same / K.sum(same, 1, keepdims=True), logits, from_logits=True)

    x, y = digits()
    with job.scope():
        base = encoder()
        base.compile("adam", loss=Pairs())
    first = base.fit(x, y, epochs=2, **OPTIONS)
    base.trainable = False
    with job.scope():
        inputs = keras.Input((64,))
        model = keras.Model(inputs, L.Dense(10)(base(inputs, training=False)))
        model.compile("adam", TOLD, metrics=["accuracy"])
    return roughly(ends(model, fits=[first, model.fit(x, y, epochs=2, **OPTIONS)]))
