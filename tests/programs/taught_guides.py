"""What guides to Keras teach: loops from scratch, `train_step`, layers and models of one's own, callbacks, `fit`."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results, sharded
from taught import BATCH, OPTIONS, ROWS, TOLD, L, digits, ends

import tfps
from tfps.types import Function, Logs, Model, Options, Structure, Value

K = keras.ops


def mlp(out: int = 10) -> Model:
    layers = [L.Dense(12, activation="relu"), L.Dense(8, activation="tanh")]
    return keras.Sequential([keras.Input((64,)), *layers, L.Dense(out)])


def dataset(*arrays: np.ndarray) -> tf.data.Dataset:
    return sharded(tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH))


def _from_scratch(job: Job, *, in_functions: bool) -> Results:
    """All in the scope, but without `strategy.run`: every rank goes through all batches by itself."""
    keras.utils.set_random_seed(1)  # every rank begins by itself, too
    with job.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(0.01)
        seen, held = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.SparseCategoricalAccuracy()
        wrap: Function = tf.function if in_functions else lambda function: function

        @wrap
        def train_step(x: Value, y: Value) -> Value:
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                value = TOLD(y, logits) + sum(model.losses)
            optimizer.apply(tape.gradient(value, model.trainable_weights), model.trainable_weights)
            seen.update_state(y, logits)
            return value

        @wrap
        def test_step(x: Value, y: Value) -> None:
            held.update_state(y, model(x, training=False))

        x, y = digits()
        losses, accuracies = [], []
        for _ in range(2):
            losses += [float(train_step(*batch)) for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)]
            accuracies.append(float(seen.result()))
            seen.reset_state()
            for batch in tf.data.Dataset.from_tensor_slices((x[:10], y[:10])).batch(BATCH):
                test_step(*batch)
            accuracies.append(float(held.result()))
            held.reset_state()
    return ends(model, losses=losses, accuracies=accuracies)


def or_refused(function: Function) -> Results:
    """Its results; or that tfps or TensorFlow refuses it."""
    try:
        return function()
    except (tfps.UnsupportedError, ValueError) as error:
        return {"own refusal": str(error)}


def loop_from_scratch(job: Job) -> Results:
    return or_refused(lambda: _from_scratch(job, in_functions=True))


def loop_from_scratch_eager(job: Job) -> Results:
    return or_refused(lambda: _from_scratch(job, in_functions=False))


def _distributed_loop(job: Job, average: Function) -> Results:
    """With `strategy.run`, an evaluation, and metrics."""
    strategy = job.tf_strategy
    with job.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(0.01)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=average(None, None))
        seen, held = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()

    def train_step(batch: Structure) -> Value:
        x, y = batch
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            value = average(loss(y, logits), logits)
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        seen.update_state(y, logits)
        return value

    def test_step(batch: Structure) -> None:
        x, y = batch
        held.update_state(keras.losses.sparse_categorical_crossentropy(y, model(x, training=False), from_logits=True))

    @tf.function
    def distributed_train(batch: Structure) -> Value:
        return strategy.run(train_step, args=(batch,))

    @tf.function
    def distributed_test(batch: Structure) -> None:
        strategy.run(test_step, args=(batch,))

    x, y = digits()
    batches = strategy.experimental_distribute_dataset(dataset(x, y))
    others = strategy.experimental_distribute_dataset(dataset(x[:10], y[:10]))
    found = []
    for _ in range(2):
        for batch in batches:
            distributed_train(batch)
        for batch in others:
            distributed_test(batch)
        found += [float(seen.result()), float(held.result())]
        seen.reset_state()
        held.reset_state()
    return ends(model, found=found)


def loop_with_run(job: Job) -> Results:
    """The loss is what a loss of Keras returns."""
    return _distributed_loop(job, lambda value, logits: "sum_over_batch_size" if logits is None else value)


def loop_with_run_divided(job: Job) -> Results:
    """Losses of rows, divided by the rows of the global batch, as tf.distribute teaches."""

    def average(losses: Value, logits: Value) -> Value:
        return "none" if logits is None else tf.nn.compute_average_loss(losses, global_batch_size=BATCH)

    return _distributed_loop(job, average)


def reptile(job: Job) -> Results:
    return or_refused(lambda: _reptile(job))


def _reptile(job: Job) -> Results:
    """Meta-learning: weights are read, trained on few rows, and set between the old and the new ones."""
    keras.utils.set_random_seed(1)
    with job.scope():
        model, optimizer = mlp(), keras.optimizers.SGD(0.05)

    @tf.function
    def inner(x: Value, y: Value) -> Value:
        with tf.GradientTape() as tape:
            value = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        optimizer.apply_gradients(
            zip(tape.gradient(value, model.trainable_weights), model.trainable_weights, strict=True)
        )
        return tf.reduce_mean(value)

    x, y = digits(60)
    losses = []
    for task in range(5):
        old = model.get_weights()
        part = slice(task * 12, task * 12 + 5)
        mini = tf.data.Dataset.from_tensor_slices((x[part], y[part])).batch(3).repeat(2)
        losses += [float(inner(*batch)) for batch in mini]
        step = 0.5 * (1 - task / 5)
        model.set_weights([was + step * (now - was) for was, now in zip(old, model.get_weights(), strict=True)])
        evaluated = model(x[:4], training=False)
    return ends(model, losses=losses, evaluated=np.asarray(evaluated))


class Weighted(keras.Model):
    """`train_step` with sample weights, class weights and metrics that are compiled."""

    def train_step(self, batch: Structure) -> Logs:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs, sample_weight=weights)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, outputs, sample_weight=weights)
        return {m.name: m.result() for m in self.metrics}


def weighted_step(job: Job) -> Results:
    x, y = digits()
    ended = {}
    kinds: dict[str, Options] = {
        "rows": {"sample_weight": np.linspace(0, 2, ROWS)},
        "classes": {"class_weight": {label: 0.5 + label / 5 for label in range(10)}},
        "no": {},
    }
    for name, options in kinds.items():
        inner = job.compiled(build=mlp)
        with job.scope():
            model = Weighted(inner.inputs, inner.outputs)
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        fit = model.fit(x, y, epochs=2, **options, **OPTIONS)
        ended.update({f"{name}/{key}": value for key, value in ends(model, fits=[fit]).items()})
    return ended


class LowLevel(keras.Model):
    """A loss object and trackers of its own, in both steps; nothing is compiled but the optimizer."""

    def __init__(self, *arguments: Value, **options: Value) -> None:
        super().__init__(*arguments, **options)
        self.loss_tracker, self.mae = keras.metrics.Mean(name="loss"), keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_function = keras.losses.MeanSquaredError()

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker, self.mae]

    def train_step(self, batch: Structure) -> Logs:
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.loss_function(y, outputs)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, outputs)
        return {"loss": self.loss_tracker.result(), "mae": self.mae.result(), "last": loss}


def low_level_step(job: Job) -> Results:
    """The tracked loss is that of one process: a Keras loss in a replica is the mean over its rows."""
    x, y = digits()
    inner = job.compiled(build=mlp)
    with job.scope():
        model = LowLevel(inner.inputs, inner.outputs)
        model.compile(optimizer=keras.optimizers.RMSprop(0.003, epsilon=0.01))
    targets = np.eye(10, dtype="float32")[y]
    return ends(model, fits=[model.fit(x, targets, epochs=2, **OPTIONS)])


class Linear(L.Layer):
    """Makes its weights when it first sees inputs; counts calls; adds a loss."""

    def __init__(self, units: int, rate: float = 0.01) -> None:
        super().__init__()
        self.units, self.rate = units, rate

    def build(self, shape: Sequence[int]) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units), initializer="random_normal")
        self.bias = self.add_weight(shape=(self.units,), initializer="random_normal", regularizer="l2")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, inputs: Value, training: bool | None = None) -> Value:
        if training:
            self.calls.assign_add(1)
        outputs = K.matmul(inputs, self.kernel) + self.bias
        self.add_loss(self.rate * K.mean(K.square(outputs)))
        return outputs

    def get_config(self) -> Options:
        return {"units": self.units, "rate": self.rate}


class Blocks(keras.Model):
    """Layers within layers; nothing is built before `fit`; behaves otherwise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Linear(8), Linear(6)]
        self.out = L.Dense(10, kernel_regularizer=keras.regularizers.L2(0.01))

    def call(self, inputs: Value, training: bool | None = None) -> Value:
        h = inputs
        for block in self.blocks:
            h = K.relu(block(h, training=training))
        return self.out(h)


def subclassed(job: Job) -> Results:
    """Trained, saved, loaded in the scope, trained on."""
    x, y = digits()
    model = job.compiled(lambda: keras.optimizers.SGD(0.1, momentum=0.9), build=Blocks)
    fits = [model.fit(x, y, epochs=2, validation_data=(x[:10], y[:10]), **OPTIONS)]
    calls = [int(block.calls.numpy()) for block in model.blocks]
    losses = len(model.losses)
    path = job.own / "blocks.weights.h5"
    model.save_weights(path)
    again = job.compiled(lambda: keras.optimizers.SGD(0.1), build=Blocks)
    with job.scope():
        again(x[:1])
    again.load_weights(path)
    fits.append(again.fit(x, y, epochs=1, **OPTIONS))
    return ends(model, again, fits=fits, calls=calls, losses=losses)


class Followed(L.Layer):
    """Follows the mean of its inputs, which does not change them."""

    def build(self, shape: Sequence[int]) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs: Value, training: bool | None = None) -> Value:
        if training:
            self.mean.assign(0.8 * self.mean + 0.2 * K.mean(inputs, 0))
        return inputs


def moving_mean(job: Job) -> Results:
    """Over several steps of which replicas have other parts."""
    x, y = digits()
    layers = lambda: keras.Sequential([keras.Input((64,)), Followed(), L.Dense(10)])  # noqa: E731
    model = job.compiled(lambda: keras.optimizers.SGD(0.1), build=layers)
    return ends(model, fits=[model.fit(x, y, epochs=2, **OPTIONS)])


class LeastLoss(keras.callbacks.Callback):
    """Stops when the loss no longer falls, and puts the best weights back."""

    def __init__(self) -> None:
        super().__init__()
        self.best, self.stopped = np.inf, -1
        self.weights: list[np.ndarray] = []

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs and logs["loss"] < self.best:
            self.best, self.weights = logs["loss"], self.model.get_weights()
        else:
            self.stopped, self.model.stop_training = epoch, True
            self.model.set_weights(self.weights)


class Schedule(keras.callbacks.Callback):
    """Sets the learning rate, and notes the order of events."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        self.rates = rates
        self.events: list[str] = []

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.model.optimizer.learning_rate = self.rates[min(epoch, len(self.rates) - 1)]
        self.events.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.events.append(f"batch {batch} {sorted(logs or {})}")

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.events.append(f"test {batch}")

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.events.append(f"predicted {batch} {len(logs['outputs']) if logs else 0}")


def callbacks(job: Job) -> Results:
    """Those that one writes, and Keras' own, which decide, save and log."""
    x, y = digits()
    c = keras.callbacks
    least, schedule, given = LeastLoss(), Schedule([0.5, 0.2, 3.0]), []
    model = job.compiled(lambda: keras.optimizers.SGD(0.1), build=mlp)
    held = {"validation_data": (x[:10], y[:10])}
    fits = [model.fit(x, y, epochs=6, callbacks=[least, schedule], **held, **OPTIONS)]
    model.predict(x, batch_size=BATCH, verbose=0, callbacks=[schedule])
    csv = c.CSVLogger(str(job.own / "log.csv"))
    own = [
        c.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
        c.ReduceLROnPlateau("val_loss", patience=0, factor=0.3, min_delta=0.05),
        c.ModelCheckpoint(str(job.shared / "best.keras"), save_best_only=True, monitor="val_accuracy"),
        c.LambdaCallback(on_epoch_end=lambda epoch, logs: given.append([epoch, logs["loss"], logs["val_loss"]])),
        c.TerminateOnNaN(),
        csv,
    ]
    fits.append(model.fit(x, y, epochs=5, callbacks=own, **held, **OPTIONS))
    rate = c.LearningRateScheduler(lambda epoch, rate: rate * 0.8)
    fits.append(model.fit(x, y, epochs=2, callbacks=[rate, c.BackupAndRestore(str(job.own / "backup"))], **OPTIONS))
    best = keras.models.load_model(job.shared / "best.keras")
    logged = (job.own / "log.csv").read_text().splitlines()
    table = np.array([[float(cell) for cell in line.split(",")] for line in logged[1:]])
    return {
        **ends(model, best, fits=fits, given=given, rate=float(model.optimizer.learning_rate.numpy()), logged=table),
        "stopped": least.stopped,
        "events": len(schedule.events),
        "ranks events": "\n".join(schedule.events),
    }


def evaluated_in_callbacks(job: Job) -> Results:
    """A callback evaluates and predicts within an epoch, on every rank; an average of weights takes over at its end."""
    x, y = digits()
    found = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
            if batch == 2:
                found.append(self.model.predict(x[:3], verbose=0).sum())

        def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
            found.extend(self.model.evaluate(x[:10], y[:10], batch_size=BATCH, verbose=0))

    averaged = lambda: keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.8)  # noqa: E731
    model = job.compiled(averaged, build=mlp)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    fit = model.fit(x, y, epochs=2, callbacks=[swap, Looks()], validation_data=(x[:10], y[:10]), **OPTIONS)
    return ends(model, fits=[fit], found=np.array(found))


class Endpoint(L.Layer):
    """Adds the loss and keeps a metric of its own, from targets that are an input."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_function = keras.losses.CategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.CategoricalAccuracy(name="hits")

    def call(self, targets: Value, logits: Value, sample_weight: Value = None) -> Value:
        self.add_loss(self.loss_function(targets, logits, sample_weight))
        self.accuracy.update_state(targets, logits, sample_weight)
        return K.softmax(logits)


def endpoint(job: Job) -> Results:
    x, y = digits()
    with job.scope():
        inputs, targets = keras.Input((64,)), keras.Input((10,))
        model = keras.Model([inputs, targets], Endpoint()(targets, L.Dense(10)(inputs)))
        model.compile(optimizer=keras.optimizers.SGD(0.1))
    data = [x, np.eye(10, dtype="float32")[y]]
    fit = model.fit(data, epochs=2, validation_data=([part[:10] for part in data], None), **OPTIONS)
    return ends(
        model, fits=[fit], evaluated=model.evaluate(data, batch_size=BATCH, verbose=0, return_dict=True)["loss"]
    )


class TruePositives(keras.metrics.Metric):
    def __init__(self, name: str = "hits") -> None:
        super().__init__(name=name)
        self.count = self.add_variable(shape=(), initializer="zeros", name="count")

    def update_state(self, y: Value, outputs: Value, sample_weight: Value = None) -> None:
        hits = K.cast(K.equal(K.cast(K.reshape(y, (-1,)), "int64"), K.cast(K.argmax(outputs, 1), "int64")), "float32")
        if sample_weight is not None:
            hits = hits * K.reshape(K.cast(sample_weight, "float32"), (-1,))
        self.count.assign_add(K.sum(hits))

    def result(self) -> Value:
        return self.count.value if hasattr(self.count, "value") else self.count


def several_outputs(job: Job) -> Results:
    """Two inputs, two outputs, losses and metrics of each by name, with weights; from dicts and from tf.data."""
    x, y = digits()
    with job.scope():
        image, series = keras.Input((8, 8, 1), name="image"), keras.Input((None, 4), name="series")
        h = L.Concatenate()(
            [L.GlobalMaxPooling2D()(L.Conv2D(3, 3)(image)), L.GlobalMaxPooling1D()(L.Conv1D(3, 3)(series))]
        )
        model = keras.Model(
            [image, series], {"score": L.Dense(1, name="score")(h), "kind": L.Dense(10, name="kind")(h)}
        )
        model.compile(
            keras.optimizers.RMSprop(0.003, epsilon=0.01),
            loss={"score": keras.losses.MeanSquaredError(), "kind": TOLD},
            loss_weights={"score": 2.0, "kind": 1.0},
            metrics={"score": [keras.metrics.MeanAbsolutePercentageError()], "kind": ["accuracy", TruePositives()]},
        )
    inputs = {"image": x.reshape(-1, 8, 8, 1), "series": x.reshape(-1, 16, 4)}
    targets = {"score": x.sum(1, keepdims=True) / 10, "kind": y}
    fits = [model.fit(inputs, targets, epochs=2, **OPTIONS)]
    data = sharded(tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(BATCH))
    fits.append(model.fit(data, epochs=1, steps_per_epoch=3, validation_data=data, validation_steps=2, verbose=0))
    predicted = model.predict(inputs, batch_size=BATCH, verbose=0)
    # The losses of single outputs, in evaluation, count once for each replica with rows (docs/contract.md).
    for fit in fits:
        for name in ("val_score_loss", "val_kind_loss"):
            fit.history.pop(name, None)
    return ends(model, fits=fits, **{f"predicted/{name}": value for name, value in predicted.items()})


def built_in(job: Job) -> Results:
    """`fit` with all that its guide names: held rows, weights of rows and classes, datasets, steps, a schedule."""
    x, y = digits()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.9, staircase=True)
    model = job.compiled(lambda: keras.optimizers.SGD(schedule), build=mlp, weighted_metrics=["accuracy"])
    rows = np.where(y == 5, 2.0, 1.0)
    data = lambda *arrays: sharded(tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH))  # noqa: E731
    fits = [
        model.fit(x, y, epochs=2, validation_split=0.3, **OPTIONS),
        model.fit(x, y, sample_weight=rows, validation_data=(x[:10], y[:10], rows[:10]), **OPTIONS),
        model.fit(x, y, class_weight={label: 1.0 + (label == 5) for label in range(10)}, **OPTIONS),
        model.fit(data(x, y, rows), validation_data=data(x[:10], y[:10]), validation_steps=1, verbose=0),
        model.fit(data(x, y).repeat(), steps_per_epoch=3, epochs=2, verbose=0),
        model.fit(
            data(x, y), initial_epoch=1, epochs=3, validation_freq=2, validation_data=(x[:10], y[:10]), verbose=0
        ),
    ]
    evaluated = model.evaluate(data(x, y, rows), verbose=0)
    return ends(model, fits=fits, evaluated=evaluated, predicted=model.predict(x[:9], batch_size=BATCH, verbose=0))
