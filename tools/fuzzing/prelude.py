"""What generated programs have in common: plain Python text that each of them begins with."""

from __future__ import annotations

IMPORTS = """from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import zipfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import h5py
import keras
import numpy as np
import tensorflow as tf

import tfps
"""

HELPERS = '''

class Job:
    """Where the program runs, and what it has found: arrays by name."""

    def __init__(self, strategy, folder):
        self.strategy, self.folder = strategy, pathlib.Path(folder)
        self.rank, self.workers = getattr(strategy, "rank", 0), getattr(strategy, "num_workers", 1)
        # A gradient of `fit` is clipped whole under tfps, and the replica's part of it under MirroredStrategy.
        mirrored = type(strategy) is tf.distribute.MirroredStrategy
        self.parts = strategy.num_replicas_in_sync if mirrored else 1
        self.found = {}

    def scope(self):
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    def path(self, name):
        return str(self.folder / name)

    def note(self, name, model, fit=None):
        """What `model` and `fit` have become; the variables of a stage that is over are unknown to one who joins."""
        for key, value in (fit.history if fit else {}).items():
            self.found[f"history/{name}/{key}"] = np.asarray(value)
        if fit:
            self.found[f"epochs/{name}"] = np.asarray(fit.epoch)
        with contextlib.suppress(tfps.JoinError):
            self.note_variables(name, model)

    def note_variables(self, name, model):
        for index, weight in enumerate(model.weights):
            kind = "statistics" if "moving_" in weight.path else "weights"
            self.found[f"{kind}/{name}/{index}"] = weight.numpy()
        for index, variable in enumerate(model.optimizer.variables if model.optimizer else []):
            self.found[f"optimizer {variable.path.rpartition('/')[2]}/{name}/{index}"] = variable.numpy()
        for index, layer in enumerate(model._flatten_layers()):
            if isinstance(layer, tfps.layers.Embedding):
                ids = np.arange(12) * (1 if layer.input_dim else 2**50)
                self.found[f"weights/{name}/rows {index}"] = layer.read_rows(ids)

    def note_csv(self, name):
        """What CSVLogger has written: its numbers."""
        lines = (self.folder / f"log{name}.{self.rank}.csv").read_text().splitlines()
        names, *rows = (line.split(",") for line in lines)
        for key, column in zip(names, zip(*rows)):
            numbers = [float(cell.strip('"[]')) for cell in column if cell != "NA"]
            self.found[f"seen/{name}/csv/{key}"] = np.array(numbers)

    def note_exported(self, name, folder, inputs):
        """What the signature of an exported model makes of `inputs`, once rank 0 has written it."""
        if self.workers > 1:
            self.strategy.reduce("MEAN", tf.constant(1.0), axis=None)  # waits for all
        loaded = tf.saved_model.load(folder)
        for index, value in enumerate(tf.nest.flatten(loaded.serve(inputs))):
            self.found[f"exported/{name}/{index}"] = value.numpy()

    def note_files(self, name):
        """Weights and configurations in the files that action `name` has saved: other ranks may be ahead."""
        for path in sorted(self.folder.glob(f"{name}-*")):
            if path.is_dir():  # rows of tables, which a model has read
                continue
            if path.suffix == ".keras":
                own = self.folder / f"own{self.rank}"
                with zipfile.ZipFile(path) as archive:
                    # Numbers of shared objects are addresses.
                    config = re.sub(r'"shared_object_id": \\d+', "", archive.read("config.json").decode())
                    self.found[f"files/{name}/{path.name}/config"] = config
                    archive.extract("model.weights.h5", own)
                self.note_h5(f"files/{name}/{path.name}", own / "model.weights.h5")
            else:
                self.note_h5(f"files/{name}/{path.name}", path)

    def note_h5(self, name, path):
        with h5py.File(path) as file:
            file.visititems(
                # The rows of tables are named by the run that has saved them.
                lambda key, item: (
                    self.found.update({f"{name}/{key}": item[()]})
                    if hasattr(item, "dtype") and item.dtype != np.uint8
                    else None
                )
            )


class Seen(keras.callbacks.Callback):
    """Notes what callbacks get at the end of each epoch and of each evaluation."""

    def __init__(self, job, name):
        super().__init__()
        self.job, self.name, self.count = job, name, 0

    def keep(self, where, logs):
        self.count += 1
        for key, value in (logs or {}).items():
            self.job.found[f"seen/{self.name}/{self.count} {where}/{key}"] = np.asarray(value)

    def on_epoch_end(self, epoch, logs=None):
        self.keep(f"epoch {epoch}", logs)

    def on_test_end(self, logs=None):
        self.keep("evaluated", logs)

    def on_train_end(self, logs=None):
        self.keep("trained", logs)
'''

BATCHES = '''

class Batches(keras.utils.PyDataset):
    """The batches of the whole job."""

    def __init__(self, batch, *arrays):
        super().__init__()
        self.batch, self.arrays = batch, arrays
        self.rows = len(tf.nest.flatten(arrays[0])[0])

    def __len__(self):
        return -(-self.rows // self.batch)

    def __getitem__(self, index):
        return tf.nest.map_structure(lambda a: a[index * self.batch : (index + 1) * self.batch], self.arrays)


def endless(batches):
    """A generator that goes through them again and again."""
    for index in itertools.cycle(range(len(batches))):
        yield batches[index]


def without_cardinality(dataset):
    """A dataset that does not know how many batches it has."""
    return dataset.filter(lambda *_: True)
'''

ADD_LOSS = '''

class AddLoss(keras.layers.Layer):
    """Adds a loss of its own: the mean over rows."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs
'''

COUNTING = '''

class Counting(keras.layers.Layer):
    """Counts its steps of training."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="steps")

    def call(self, inputs, training=None):
        if training:
            self.steps.assign_add(1)
        return inputs
'''

FOLLOWING = '''

class Following(keras.layers.Layer):
    """Follows the mean of its inputs, which does not change them."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="moving_level")

    def call(self, inputs, training=None):
        if training:
            self.mean.assign(0.8 * self.mean + 0.2 * keras.ops.mean(inputs, 0))
        return inputs
'''

PLACED = '''

class Placed(keras.layers.Layer):
    """Adds what it has learned of each position."""

    def build(self, shape):
        self.places = keras.layers.Embedding(shape[1], shape[2])
        self.places.build()

    def call(self, inputs):
        return inputs + self.places(keras.ops.arange(inputs.shape[1]))
'''

MEASURING = '''

class Measuring(keras.layers.Layer):
    """Has a metric of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.level = keras.metrics.Mean(name="level")

    def call(self, inputs):
        self.level.update_state(keras.ops.mean(keras.ops.abs(inputs), -1))
        return inputs
'''

NESTED = '''

class Nested(keras.layers.Layer):
    """A part of the step is a function of TensorFlow's."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def get_config(self):
        return {**super().get_config(), "units": self.units}

    @tf.function
    def multiplied(self, inputs):
        return tf.tanh(tf.matmul(inputs, self.kernel))

    def call(self, inputs):
        return self.multiplied(inputs)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor((*inputs.shape[:-1], self.units), inputs.dtype)
'''

ROWS = '''

class Rows(keras.metrics.Metric):
    """The sum of targets: that of all rows, in whatever order they come."""

    def __init__(self, name="z_rows", **options):
        super().__init__(name=name, **options)
        self.total = self.add_variable(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y_true, "float32")))

    def result(self):
        return keras.ops.convert_to_tensor(self.total)
'''

LOSSES = '''

def mean_of_squares(y_true, y_pred):
    """One number for all rows."""
    return tf.reduce_mean(tf.square(tf.cast(y_true, y_pred.dtype) - y_pred))


def mean_of_classes(y_true, y_pred):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))


def squares_of_rows(y_true, y_pred):
    """A number for each row."""
    return tf.reduce_mean(tf.square(y_true - y_pred), -1)


class ScalarLoss(keras.losses.Loss):
    """Returns one number for all rows."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred)) + keras.ops.mean(keras.ops.square(y_pred))


class RowsLoss(keras.losses.Loss):
    """Returns a number for each row."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred) + 0.1 * keras.ops.abs(y_pred), -1)
'''

SUBCLASSED = '''

class Subclassed(keras.Model):
    """Calls an inner model."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs, training=None):
        return self.inner(inputs, training=training)
'''

GUIDE = '''

class Guided(keras.Model):
    """`train_step` and `test_step` as in Keras' guide, with compiled metrics."""

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predictions)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        predictions = self(x, training=False)
        loss = self.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predictions)
        return {metric.name: metric.result() for metric in self.metrics}
'''

OWN_METRICS = '''

class Guided(keras.Model):
    """`train_step` and `test_step` as in Keras' guide, with a loss and metrics of its own."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.mean_loss = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="error")
        self.own_loss = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.mean_loss, self.error]

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.own_loss(y, predictions, sample_weight=weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.mean_loss.update_state(loss)
        self.error.update_state(y, predictions)
        return {"loss": self.mean_loss.result(), "error": self.error.result()}

    def test_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        predictions = self(x, training=False)
        self.mean_loss.update_state(self.own_loss(y, predictions, sample_weight=weights))
        self.error.update_state(y, predictions)
        return {"loss": self.mean_loss.result(), "error": self.error.result()}
'''

OWN_MEAN = '''

class Guided(keras.Model):
    """`train_step` and `test_step` with a mean over rows that no loss of Keras makes."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.mean_loss = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    @property
    def metrics(self):
        return [self.mean_loss, self.error]

    def loss_of(self, y, predictions):
        return tf.reduce_mean(tf.square(y - predictions)) + 0.1 * tf.reduce_mean(tf.abs(predictions))

    def updated(self, loss, y, predictions):
        self.mean_loss.update_state(loss)
        self.error.update_state(y, predictions)
        return {"loss": self.mean_loss.result(), "error": self.error.result()}

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.loss_of(y, predictions)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return self.updated(loss, y, predictions)

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        predictions = self(x, training=False)
        return self.updated(self.loss_of(y, predictions), y, predictions)
'''

SHAKE = '''

def shaken(model):
    """`model` with weights that differ by a rounding."""
    random = np.random.default_rng(0)

    def changed(weight):
        if weight.dtype.kind != "f":
            return weight
        return (weight * (1 + random.choice([-1, 1], weight.shape) * 2.0**-23)).astype(weight.dtype)

    model.set_weights([changed(weight) for weight in model.get_weights()])
    return model
'''

LOOP = '''

def loop(job, model, optimizer, loss, dataset, batch, epochs, how):
    """A training loop of one's own; returns the loss of each step."""
    strategy = job.strategy or tf.distribute.get_strategy()
    with job.scope():
        optimizer = optimizer()
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            value = tf.nn.compute_average_loss(loss(y, model(x, training=True)), global_batch_size=batch)
            scaled = optimizer.scale_loss(value)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return value

    def train(x, y):
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    losses = []
    distributed = strategy.experimental_distribute_dataset(dataset)
    if how == "epoch in a function":

        @tf.function
        def epoch(data):
            total = 0.0
            for x, y in data:
                total += train(x, y)
            return total

        losses = [epoch(distributed).numpy() for _ in range(epochs)]
    elif how == "steps that reduce nothing":
        run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
        for _ in range(epochs):
            for x, y in distributed:
                run(x, y)
    else:
        run = train if how == "eager steps" else tf.function(train)
        for _ in range(epochs):
            losses += [run(x, y).numpy() for x, y in distributed]
    return np.asarray(losses)
'''

INTERRUPT = '''

class Interrupt(keras.callbacks.Callback):
    """Ctrl-C after so many batches, once."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt
'''

STOP = '''

class Stop(keras.callbacks.Callback):
    """Ends training by an error in an epoch, once."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise RuntimeError("stopped on purpose")
'''

MAIN = """

if __name__ == "__main__":
    import sys
    import tempfile

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)

    def run(strategy):
        with tempfile.TemporaryDirectory() as folder:
            return main(strategy, folder)

    distributed = strategy()
    rank = distributed.rank
    found = run(distributed)
    distributed.close()
    keras.backend.clear_session()
    expected = run(reference())
    for name, value in found.items():
        other, value = np.asarray(expected.get(name)), np.asarray(value)
        if value.dtype.kind == "f" and value.shape == other.shape:
            text = f"differs by {np.abs(value - other).max(initial=0.0):.3g} of {np.abs(other).max(initial=0.0):.3g}"
            text = "bitwise" if value.tobytes() == other.tobytes() else text
        else:
            text = "equal" if np.array_equal(value, other) else f"{value} instead of {other}"
        if text not in ("bitwise", "equal") or "-v" in sys.argv:
            print(f"rank {rank}: {name}: {text}; {value.reshape(-1)[:3]}", flush=True)
    print(f"rank {rank}: {len(found)} results", flush=True)
"""
