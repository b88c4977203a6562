"""Models as keras_rs' examples have them, small and on generated data, with `tfps.layers` in place of their embeddings.

In plain Keras, where there is no strategy, rows of tables live in the process. Batches divide neither by two nor by
three workers, and the last one has one row. They run as the programs of tests/integration/program.py do.
"""

from __future__ import annotations

import keras
import keras_rs
import numpy as np
import tensorflow as tf
from program import Job, Results, history, weights
from small_models import BATCH, OPTIONS, ROWS, compiled, drawn, labels, part, run
from taught import roughly

import tfps
from tfps.types import Layer, Library, Model, Structure, Value

L: Library = keras.layers
RS: Library = keras_rs.layers
USERS, FILMS, GENRES, DIM, LENGTH = 15, 24, 6, 8, 5


def ids(count: int, seed: int, *shape: int) -> np.ndarray:
    """From 1 on, as 0 is padding."""
    return drawn(seed).integers(1, count, (ROWS, *shape)).astype("int32")


def lengths(seed: int) -> np.ndarray:
    """How much of LENGTH each row has: some have nothing."""
    return drawn(seed).integers(0, LENGTH + 1, ROWS)


def tables(layer: Layer) -> Results:
    return {f"tables/{name}": rows.numpy() for name, rows in layer.get_embedding_tables().items()}


def feature(name: str, table: object, *ids: int | None, batch: int | None = None) -> object:
    return RS.FeatureConfig(name, table, (batch, *ids), (batch, DIM))


class Ranking(keras.Model):
    """Users and films, each with a table and an optimizer of its own; as for SparseCores, but where these are not."""

    def __init__(self) -> None:
        super().__init__()
        users = RS.TableConfig("users", USERS, DIM, optimizer="adam")
        films = RS.TableConfig("films", FILMS, DIM, optimizer=keras.optimizers.Adagrad(0.05))
        features = {
            "user": feature("user", users, batch=BATCH),
            "film": feature("film", films, batch=BATCH),
            "seen": feature("seen", films, LENGTH, batch=BATCH),  # other features of the table
        }
        self.embedding = tfps.layers.DistributedEmbedding(features)
        self.top = keras.Sequential([L.Dense(16, activation="relu"), L.Dense(1)])

    def call(self, inputs: Structure) -> Value:
        found = self.embedding(inputs)
        return self.top(keras.ops.concatenate([found["user"], found["film"], found["seen"]], axis=1))


def ranking(job: Job) -> Results:
    x = {"user": ids(USERS, 1), "film": ids(FILMS, 2), "seen": ids(FILMS, 3, LENGTH)}
    y = drawn(4).uniform(size=(ROWS, 1)).astype("float32")
    with job.scope():
        model = Ranking()
        model.compile("adagrad", keras.losses.MeanSquaredError(), metrics=[keras.metrics.RootMeanSquaredError()])
    before = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    fit = model.fit(x, y, epochs=2, validation_data=(part(x), part(y)), **OPTIONS)
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    return {**weights(model), **tables(model.embedding), **history(fit), "before": before, "predicted": predicted}


def dlrm(job: Job) -> Results:
    """Numbers, ids, several ids of an example with weights, and crosses of all; saved, loaded and trained on."""

    def build() -> Model:
        films = RS.TableConfig("films", FILMS, DIM, optimizer=keras.optimizers.SGD(0.1), combiner="sum")
        genres = RS.TableConfig("genres", GENRES, DIM, optimizer=keras.optimizers.Adam(0.01), combiner="sqrtn")
        features = {
            "film": feature("film", films),
            "several": [feature("seen", films, LENGTH), feature("genres", genres, LENGTH)],
        }
        inputs = {
            "film": L.Input((), dtype="int32", name="film"),
            "several": [L.Input((LENGTH,), dtype="int32", name=name) for name in ("seen", "genres")],
        }
        numbers, many = L.Input((4,), name="numbers"), L.Input((LENGTH,), name="weights")
        bottom = L.Dense(DIM, activation="relu")(numbers)
        found = tfps.layers.DistributedEmbedding(features, name="embedding")(
            inputs, {"film": None, "several": [None, many]}
        )
        embedded = [bottom, found["film"], *found["several"]]
        start = L.Concatenate()([bottom, RS.DotInteraction()(embedded)])
        crossed = RS.FeatureCross(projection_dim=4)(start, start)
        everything = {"numbers": numbers, "weights": many, "film": inputs["film"]}
        everything |= {each.name: each for each in inputs["several"]}
        return compiled(keras.Model(everything, L.Dense(1)(crossed)), keras.losses.BinaryCrossentropy(from_logits=True))

    x = {
        "numbers": drawn().normal(size=(ROWS, 4)).astype("float32"),
        "weights": drawn(1).uniform(size=(ROWS, LENGTH)).astype("float32"),
        "film": ids(FILMS, 2),
        "seen": ids(FILMS, 3, LENGTH),
        "genres": ids(GENRES, 4, LENGTH),
    }
    return run(job, build, x, labels(2)[:, None].astype("float32"))


class Ragged(keras.Model):
    """Ids without padding, as ragged and as sparse tensors; the layer is given what it has preprocessed."""

    def __init__(self) -> None:
        super().__init__()
        films = RS.TableConfig("films", FILMS, DIM, optimizer=keras.optimizers.Ftrl(0.1))
        features = [feature("seen", films, None), feature("liked", films, LENGTH)]
        self.embedding = tfps.layers.DistributedEmbedding(features)
        self.top = L.Dense(1)

    def call(self, inputs: Structure) -> Value:
        given = self.embedding.preprocess([inputs["seen"], tf.sparse.from_dense(inputs["liked"])])
        return self.top(keras.ops.concatenate(self.embedding(given), axis=1))


def ragged(job: Job) -> Results:
    masks = np.arange(LENGTH) < lengths(5)[:, None]
    seen = tf.RaggedTensor.from_tensor(tf.constant(ids(FILMS, 3, LENGTH)), lengths(4))
    x = {"seen": seen, "liked": ids(FILMS, 6, LENGTH) * masks}
    y = labels(5)[:, None].astype("float32")
    with job.scope():
        model = compiled(Ragged(), keras.losses.MeanSquaredError())
    fit = model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH), epochs=2, verbose=0)
    return {**weights(model), **tables(model.embedding), **history(fit)}


class Towers(keras.Model):
    """A table of users and one of films, whose rows are the candidates of a retrieval."""

    def __init__(self, users: Value, films: Value) -> None:
        super().__init__()
        self.users, self.films = tfps.layers.Embedding(users, DIM), tfps.layers.Embedding(films, DIM)
        self.retrieval = RS.BruteForceRetrieval(k=3, return_scores=True)
        self.loss_of = keras.losses.MeanSquaredError()

    def build(self, input_shape: Structure) -> None:
        self.users.build(input_shape)
        self.films.build(input_shape)
        self.retrieval.candidate_embeddings = self.films.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs: Value, training: bool = False) -> Structure:
        user = self.users(inputs)
        return {"user": user} if training else {"user": user, "best": self.retrieval(user)}

    def compute_loss(
        self, x: Value, y: Value, y_pred: Value, sample_weight: Value = None, training: bool = True
    ) -> Value:
        scores = keras.ops.sum(y_pred["user"] * self.films(y["film"]), axis=1, keepdims=True)
        return self.loss_of(keras.ops.expand_dims(y["rating"], -1), scores, sample_weight)


def retrieval(job: Job) -> Results:
    users, y = ids(USERS, 1), {"film": ids(FILMS, 2), "rating": drawn(3).uniform(size=ROWS).astype("float32")}
    with job.scope():
        model = Towers(np.int32(USERS), np.int64(FILMS))  # as counts of a dataset are
        model.compile(keras.optimizers.Adagrad(0.1))
    fit = model.fit(users, y, epochs=2, validation_data=(part(users), part(y)), **OPTIONS)
    scores, best = model.predict(users, batch_size=BATCH, verbose=0)["best"]
    return {**weights(model), **history(fit), "scores": scores, "best": best, "rows": model.films.embeddings.numpy()}


def retrieval_by_index(job: Job) -> Results:
    """Candidates are copied from a table when it has been trained."""
    users = RS.TableConfig("users", USERS, DIM, optimizer=keras.optimizers.Adagrad(0.1))
    films = RS.TableConfig("films", FILMS, DIM, optimizer=keras.optimizers.Adagrad(0.1))
    features = {"user": feature("user", users), "film": feature("film", films)}
    x = {"user": ids(USERS, 1), "film": ids(FILMS, 2)}
    with job.scope():
        inputs = {name: L.Input((), dtype="int32", name=name) for name in x}
        layer = tfps.layers.DistributedEmbedding(features)
        found = layer(inputs)
        model = keras.Model(inputs, L.Dot(1)([found["user"], found["film"]]))
        model.compile("sgd", "mse")
    fit = model.fit(x, drawn(3).uniform(size=(ROWS, 1)), epochs=2, **OPTIONS)
    rows = layer.get_embedding_tables()
    index = RS.BruteForceRetrieval(rows["films"], k=3)
    scores, best = index(rows["users"])
    return {**history(fit), **tables(layer), "scores": scores.numpy(), "best": best.numpy()}


class Sequential(keras.Model):
    """The next film after some, by a recurrent layer; negatives are the other rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query = keras.Sequential([tfps.layers.Embedding(FILMS, DIM), L.GRU(DIM)])
        self.candidates = tfps.layers.Embedding(FILMS, DIM)
        self.retrieval = RS.BruteForceRetrieval(k=3, return_scores=False)
        self.loss_of = keras.losses.CategoricalCrossentropy(from_logits=True)

    def build(self, input_shape: Structure) -> None:
        self.query.build(input_shape)
        self.candidates.build(input_shape)
        self.retrieval.candidate_embeddings = self.candidates.embeddings
        self.retrieval.build(input_shape)
        super().build(input_shape)

    def call(self, inputs: Value, training: bool = False) -> Structure:
        query = self.query(inputs)
        return {"query": query} if training else {"query": query, "best": self.retrieval(query)}

    def compute_loss(
        self, x: Value, y: Value, y_pred: Value, sample_weight: Value = None, training: bool = True
    ) -> Value:
        scores = keras.ops.matmul(y_pred["query"], keras.ops.transpose(self.candidates(y)))
        rows = keras.ops.shape(scores)[0]
        return self.loss_of(keras.ops.eye(rows, rows), scores, sample_weight)


def gru4rec(job: Job) -> Results:
    x, y = ids(FILMS, 1, LENGTH), ids(FILMS, 2)
    with job.scope():
        model = Sequential()
        model.compile(keras.optimizers.AdamW(0.05))
    fit = model.fit(x, y, epochs=2, **OPTIONS)
    best = model.predict(x, batch_size=BATCH, verbose=0)["best"]
    return roughly({**weights(model), **history(fit), "best": best, "rows": model.candidates.embeddings.numpy()})


class SelfAttentive(keras.Model):
    """The next film after each of a sequence, by attention; with a film for each that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.items = tfps.layers.Embedding(FILMS, DIM, embeddings_initializer="glorot_uniform", name="items")
        self.places = L.Embedding(LENGTH, DIM)
        self.attention = L.MultiHeadAttention(1, DIM, use_bias=False)  # whose gradient is rounding
        self.norms = [L.LayerNormalization() for _ in range(2)]
        self.inner = keras.Sequential([L.Dense(DIM, activation="relu"), L.Dense(DIM)])
        self.retrieval = RS.BruteForceRetrieval(k=3)

    def call(self, inputs: Structure, training: bool = False) -> Structure:
        x = self.items(inputs["items"]) + self.places(keras.ops.arange(LENGTH))
        mask = inputs["mask"]
        x = x + self.attention(self.norms[0](x), x, attention_mask=mask[:, None, :], use_causal_mask=True)
        x = x + self.inner(self.norms[1](x))
        if training:
            return {"sequence": x}
        self.retrieval.candidate_embeddings = self.items.embeddings
        last = keras.ops.maximum(keras.ops.sum(keras.ops.cast(mask, "int32"), 1) - 1, 0)
        scores, _ = self.retrieval(keras.ops.take_along_axis(x, last[:, None, None], 1)[:, 0])
        return {"sequence": x, "scores": scores}

    def compute_loss(
        self, x: Value, y: Value, y_pred: Value, sample_weight: Value = None, training: bool = True
    ) -> Value:
        def losses(items: Value, sign: int) -> Value:
            return keras.ops.softplus(-sign * keras.ops.sum(self.items(items) * y_pred["sequence"], -1))

        each = (losses(y["next"], 1) + losses(y["none"], -1)) * keras.ops.cast(x["mask"], "float32")
        return keras.ops.mean(keras.ops.sum(each, 1))


def sasrec(job: Job) -> Results:
    mask = np.arange(LENGTH) < np.maximum(lengths(5), 1)[:, None]
    x = {"items": ids(FILMS, 1, LENGTH) * mask, "mask": mask}
    y = {"next": ids(FILMS, 2, LENGTH) * mask, "none": ids(FILMS, 3, LENGTH) * mask}
    with job.scope():
        model = SelfAttentive()
        model.compile(keras.optimizers.Adam(0.01, beta_2=0.98))
    fit = model.fit(x, y, epochs=2, validation_data=(part(x), part(y)), **OPTIONS)
    scores = model.predict(x, batch_size=BATCH, verbose=0)["scores"]
    return {**weights(model), **history(fit), "scores": scores, "rows": model.items.embeddings.numpy()}
