"""Layers, steps and datasets of generated programs that are about rows: texts, as those of prelude.py."""

from __future__ import annotations

UNIQUE = '''

class Unique(keras.layers.Layer):
    """Looks each id of the batch up once."""

    def build(self, shape):
        self.table = self.add_weight(shape=(12, 4), initializer="uniform", name="table")

    def call(self, inputs):
        ids, where = tf.unique(tf.reshape(inputs, [-1]))
        found = tf.gather(tf.gather(self.table.value, ids), where)
        return tf.reshape(found, [-1, inputs.shape[1], 4])
'''

POOLED = '''

class Pooled(keras.layers.Layer):
    """The mean of the rows of a table, by TensorFlow's lookup of sparse ids."""

    def build(self, shape):
        self.table = self.add_weight(shape=(12, 4), initializer="uniform", name="table")

    def call(self, inputs):
        return tf.nn.embedding_lookup_sparse(self.table.value, inputs.to_sparse(), None, combiner="mean")

    def compute_output_shape(self, shape):
        return (shape[0], 4)  # Keras' own symbolic inputs of ragged tensors have no `to_sparse`
'''

GATHERED = '''

class Gathered(keras.layers.Layer):
    """The mean of the rows of a table, as a ragged tensor's."""

    def build(self, shape):
        self.table = self.add_weight(shape=(12, 4), initializer="uniform", name="table")

    def call(self, inputs):
        return tf.ensure_shape(tf.reduce_mean(tf.gather(self.table.value, inputs), 1), [None, 4])
'''

BOXES = '''

class Boxes(keras.layers.Layer):
    """Adds up the boxes of each row."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(2, 4), initializer="glorot_uniform", name="kernel")

    def compute_output_shape(self, shape):
        return (shape[0], 4)

    def call(self, inputs):
        return tf.tanh(tf.reduce_sum(inputs.to_tensor(0.0, shape=[None, 4, 2]), 1) @ self.kernel)
'''

GRAPHS = '''

class Neighbours(keras.layers.Layer):
    """Adds to each node what comes along its edges."""

    def call(self, inputs):
        nodes, edges = inputs
        got = tf.math.unsorted_segment_sum(tf.gather(nodes, edges[:, 0]), edges[:, 1], tf.shape(nodes)[0])
        return tf.concat([nodes, got], 1)


def as_graph(x, *others):
    """The nodes and the edges of a batch: twice as many, between any of its nodes."""
    edges = tf.reshape(x["edges"], [-1, 2]) % tf.shape(x["nodes"])[0]
    return ({"nodes": x["nodes"], "edges": edges}, *others)
'''

GRAPH_BATCHES = '''

class GraphBatches(Batches):
    """Graphs, one for each batch."""

    def __getitem__(self, index):
        return as_graph(*super().__getitem__(index))
'''

STATE = '''

class State(keras.layers.Layer):
    """Has a state, which each step of training changes."""

    before = ()  # its dimensions before that of the inputs

    def build(self, shape):
        shape = (*self.before, shape[-1])
        self.state = self.add_weight(shape=shape, initializer="zeros", trainable=False, name="state")

    def call(self, inputs, training=None):
        if training:
            self.state.assign(self.after(tf.convert_to_tensor(self.state), inputs))
        return inputs
'''

STATES = {
    "running maximum": """

class Largest(State):
    def after(self, state, rows):
        return tf.maximum(state, tf.reduce_max(tf.abs(rows), 0))
""",
    "queue": """

class Queue(State):
    before = (16,)

    def after(self, state, rows):
        return tf.concat([rows, state], 0)[:16]
""",
    "moving sum": """

class Total(State):
    def after(self, state, rows):
        return 0.8 * state + 0.2 * tf.reduce_sum(rows, 0)
""",
    "rows counted": """

class Counted(State):
    def after(self, state, rows):
        return state + tf.cast(tf.shape(rows)[0], state.dtype)
""",
    "square of a mean": """

class SquareOfMean(State):
    def after(self, state, rows):
        return 0.8 * state + 0.2 * tf.square(tf.reduce_mean(rows, 0))
""",
    "mean of squares": """

class MeanOfSquares(State):
    def after(self, state, rows):
        return 0.8 * state + 0.2 * tf.reduce_mean(tf.square(rows), 0)
""",
    "mean that is used": '''

class Centred(State):
    """Subtracts what it has seen so far."""

    def after(self, state, rows):
        return 0.8 * state + 0.2 * tf.reduce_mean(rows, 0)

    def call(self, inputs, training=None):
        outputs = inputs - tf.convert_to_tensor(self.state)
        super().call(inputs, training)
        return outputs
''',
}

ROWS_STEP = '''

class Guided(keras.Model):
    """`train_step` with a loss of one number for each row, whose gradient is the sum over rows."""

    def loss_of(self, y, predictions):
        return tf.reduce_mean(tf.square(y - predictions), -1)

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": RETURNED}

    def test_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"loss": tf.reduce_mean(self.loss_of(y, self(x, training=False)))}
'''
STEPS = {
    "loss of each row": ROWS_STEP.replace("RETURNED", "tf.reduce_mean(loss)"),
    "loss of each row returned": ROWS_STEP.replace("RETURNED", "loss"),
}

METRICS = {
    "mean over the batch": '''

def mean_over_batch(y_true, y_pred):
    """One number for a batch, which is a mean over its rows."""
    return tf.reduce_mean(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred))
''',
    "part of the batch": '''

def part_of_batch(y_true, y_pred):
    """One number for a batch: a mean over some of its targets; NaN if there are none."""
    kept = tf.cast(y_true > 0, y_pred.dtype)
    return tf.reduce_sum(kept * tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred)) / tf.reduce_sum(kept)
''',
}

UNORDERED = '''

def unordered_map(dataset):
    """Its rows as they become ready: some take longer."""

    def slowly(number, row):
        size = tf.where(number % 3 == 0, 150, 1)
        with tf.control_dependencies([tf.reduce_sum(tf.matmul(*[tf.ones(tf.stack([size, size]))] * 2))]):
            return tf.nest.map_structure(tf.identity, row, expand_composites=True)

    return dataset.enumerate().map(slowly, num_parallel_calls=4, deterministic=False)


def unordered_interleave(dataset):
    """Its rows, read in four parts at the same time."""
    count = dataset.cardinality()
    parts = tf.data.Dataset.range(4)
    read = parts.interleave(
        lambda n: unordered_map(dataset.shard(4, n)), cycle_length=4, num_parallel_calls=4, deterministic=False
    )
    return read.apply(tf.data.experimental.assert_cardinality(count))
'''
