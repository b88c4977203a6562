"""Models of sequences: CTC, encoders and decoders, transformers, mixtures of experts; see taught.py."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
from program import Job, Results
from taught import BATCH, OPTIONS, ROWS, TOLD, L, digits, ends, roughly

from tfps.types import Model, Optimizer, Structure, Value

K = keras.ops
LENGTH, WORDS = 6, 12


def words(seed: int = 0, rows: int = ROWS, *, padded: bool = False) -> np.ndarray:
    random = np.random.default_rng(seed)
    found = random.integers(1, WORDS, (rows, LENGTH))
    if padded:
        for row, length in enumerate(random.integers(1, LENGTH + 1, rows)):
            found[row, length:] = 0
    return found


def adam() -> Optimizer:
    """Some gradients are next to nothing (keys of attention): what is rounded shall not decide where they lead."""
    return keras.optimizers.Adam(0.003, epsilon=0.01)


def lines() -> tuple[np.ndarray, np.ndarray]:
    """[rows, 8, 8] and labels of 3 characters, 0: none."""
    labels = words(padded=True)[:, :3] % 5
    return digits()[0].reshape(-1, 8, 8), labels


def recognizer() -> Model:
    layers = [L.Bidirectional(L.LSTM(4, return_sequences=True)), L.Dense(6)]
    return keras.Sequential([keras.Input((8, 8)), *layers])


def ctc(job: Job) -> Results:
    x, y = lines()
    model = job.compiled(lambda: keras.optimizers.Adam(0.005), build=recognizer, loss=keras.losses.CTC(), metrics=[])
    fit = model.fit(x, y, epochs=2, validation_data=(x[:10], y[:10]), **OPTIONS)
    return ends(model, fits=[fit])


class CtcEndpoint(L.Layer):
    """Adds the loss, from labels that are an input."""

    def call(self, labels: Value, outputs: Value) -> Value:
        rows = K.shape(labels)[0]
        lengths = K.ones((rows,), "int32")
        labels = K.cast(labels, "int32")
        count = K.sum(K.cast(labels != 0, "int32"), 1)
        self.add_loss(K.mean(K.ctc_loss(labels, outputs, count, 8 * lengths)))
        return outputs


def ctc_endpoint(job: Job) -> Results:
    """Compiled without a loss; the model for predictions is part of it."""
    x, y = lines()
    with job.scope():
        image, label = keras.Input((8, 8), name="image"), keras.Input((3,), name="label")
        inner = recognizer()
        model = keras.Model([image, label], CtcEndpoint()(label, inner(image)))
        model.compile(optimizer=keras.optimizers.Adam(0.005))
    data = {"image": x, "label": y.astype("float32")}
    part = {name: value[:10] for name, value in data.items()}
    fit = model.fit(data, epochs=2, validation_data=(part, None), **OPTIONS)
    return ends(model, fits=[fit], predicted=inner.predict(x[:9], verbose=0))


def seq2seq(job: Job) -> Results:
    """The decoder begins with the encoder's state; both are used by themselves, too."""
    with job.scope():
        source, target = keras.Input((None, 5)), keras.Input((None, 5))
        _, *state = L.LSTM(6, return_state=True)(source)
        h, _, _ = L.LSTM(6, return_sequences=True, return_state=True)(target, initial_state=state)
        model = keras.Model([source, target], L.Dense(5, activation="softmax")(h))
        model.compile(optimizer="rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
        encoder = keras.Model(source, state)
    one, two = (np.eye(5, dtype="float32")[words(seed) % 5] for seed in (0, 1))
    data = [one, np.roll(two, 1, 1)]
    fit = model.fit(data, two, epochs=2, validation_split=0.2, **OPTIONS)
    predicted = encoder.predict(one[:9], verbose=0)
    return ends(model, fits=[fit], **{f"state/{n}": value for n, value in enumerate(predicted)})


def attentive_seq2seq(job: Job) -> Results:
    """Masks from the embedding reach the attention, the loss and the metrics; weights per position."""
    with job.scope():
        source, target = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH,), dtype="int32")
        encoded = L.Bidirectional(L.GRU(4, return_sequences=True), merge_mode="sum")(
            L.Embedding(WORDS, 4, mask_zero=True)(source)
        )
        h = L.GRU(4, return_sequences=True)(L.Embedding(WORDS, 4, mask_zero=True)(target))
        h = L.LayerNormalization()(L.Add()([h, L.MultiHeadAttention(1, 4)(query=h, value=encoded)]))
        model = keras.Model([source, target], L.Dense(WORDS)(h))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        model.compile(keras.optimizers.SGD(0.5), loss, weighted_metrics=["accuracy"])
    one, two = words(padded=True), words(1, padded=True)
    fit = model.fit([one, np.roll(two, 1, 1)], two, epochs=2, sample_weight=(two != 0).astype("float32"), **OPTIONS)
    return ends(model, fits=[fit])


class Positions(L.Layer):
    """Embeds words and where they are."""

    def __init__(self, *, mask: bool = False) -> None:
        super().__init__()
        self.words, self.places = L.Embedding(WORDS, 8, mask_zero=mask), L.Embedding(LENGTH, 8)

    def call(self, inputs: Value) -> Value:
        return self.words(inputs) + self.places(K.arange(LENGTH))

    def compute_mask(self, inputs: Value, previous: Value = None) -> Value:
        return self.words.compute_mask(inputs, previous)


class Block(L.Layer):
    """Attention and a part that is given, with dropout that does nothing."""

    def __init__(self, inner: L.Layer, *, causal: bool = False) -> None:
        super().__init__()
        self.attend, self.inner, self.causal = L.MultiHeadAttention(2, 4), inner, causal
        self.normalize, self.again, self.drop = L.LayerNormalization(), L.LayerNormalization(), L.Dropout(0.0)
        self.supports_masking = True

    def call(self, inputs: Value) -> Value:
        h = self.normalize(inputs + self.drop(self.attend(inputs, inputs, use_causal_mask=self.causal)))
        return self.again(h + self.inner(h))


def feed_forward() -> Model:
    return keras.Sequential([L.Dense(16, activation="relu"), L.Dense(8)])


def text_transformer(job: Job) -> Results:
    with job.scope():
        inputs = keras.Input((LENGTH,))
        h = Block(feed_forward())(Positions(mask=True)(inputs))
        model = keras.Model(inputs, L.Dense(2, activation="softmax")(L.GlobalAveragePooling1D()(h)))
        model.compile(adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    x = words(padded=True)
    y = x.sum(1) % 2
    fit = model.fit(x, y, epochs=2, validation_data=(x[:10], y[:10]), **OPTIONS)
    return ends(model, fits=[fit])


def small_gpt(job: Job) -> Results:
    """Two outputs, one of them without a loss."""
    with job.scope():
        inputs = keras.Input((LENGTH,), dtype="int32")
        h = Block(feed_forward(), causal=True)(Positions()(inputs))
        model = keras.Model(inputs, [L.Dense(WORDS)(h), h])
        model.compile(adam(), loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])
    x = words()
    fit = model.fit(x, np.roll(x, -1, 1), epochs=2, **OPTIONS)
    return ends(model, fits=[fit])


class Experts(L.Layer):
    """All experts, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = [L.Dense(8, activation="relu") for _ in range(3)], L.Dense(3, activation="softmax")

    def call(self, inputs: Value) -> Value:
        made = K.stack([expert(inputs) for expert in self.experts], -1)
        return K.sum(made * K.expand_dims(self.gate(inputs), -2), -1)


class Switch(L.Layer):
    """One expert for each word, of a capacity, and a loss that balances them over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.route = [L.Dense(8, activation="relu") for _ in range(3)], L.Dense(3)

    def build(self, shape: Sequence[int]) -> None:
        for layer in (*self.experts, self.route):
            layer.build((None, shape[-1]))

    def call(self, inputs: Value) -> Value:
        flat = K.reshape(inputs, (-1, 8))
        chances = K.softmax(self.route(flat), -1)
        chosen = K.one_hot(K.argmax(chances, -1), 3)
        self.add_loss(0.1 * K.mean(K.mean(chosen, 0) * K.mean(chances, 0)) * 9)
        place = K.cumsum(chosen, 0) * chosen
        chosen *= K.cast(place <= 10.0, "float32")  # what comes later passes by
        made = K.stack([expert(flat) for expert in self.experts], -1)
        gated = K.sum(made * K.expand_dims(chosen * chances, 1), -1)
        return K.reshape(gated, K.shape(inputs))


def _experts(job: Job, layer: type[L.Layer]) -> Results:
    with job.scope():
        inputs = keras.Input((LENGTH,))
        h = Block(layer())(Positions()(inputs))
        model = keras.Model(inputs, L.Dense(10)(L.GlobalAveragePooling1D()(h)))
        model.compile(adam(), TOLD, metrics=["accuracy"])
    x = words()
    fit = model.fit(x, x.sum(1) % 10, epochs=2, validation_data=(x[:10], x[:10].sum(1) % 10), **OPTIONS)
    return ends(model, fits=[fit])


def experts(job: Job) -> Results:
    return _experts(job, Experts)


def switch_experts(job: Job) -> Results:
    """What balances experts, and their capacity, go by a replica's rows."""
    return roughly(_experts(job, Switch))


def sorted_by_recurrence(job: Job) -> Results:
    """Adds numbers: encoder, repeated, decoder; layers that are wrapped, and a PyDataset."""

    class Sums(keras.utils.PyDataset):
        def __len__(self) -> int:
            return -(-ROWS // BATCH)

        def __getitem__(self, index: int) -> Structure:
            x = words()[index * BATCH : (index + 1) * BATCH]
            return np.eye(WORDS, dtype="float32")[x], np.sort(x, 1)[:, :3]

    def build() -> Model:
        layers = [L.LSTM(6), L.RepeatVector(3), L.LSTM(6, return_sequences=True), L.TimeDistributed(L.Dense(WORDS))]
        return keras.Sequential([keras.Input((LENGTH, WORDS)), *layers])

    model = job.compiled("adam", build=build)
    fit = model.fit(Sums(), epochs=2, shuffle=False, verbose=0, validation_data=Sums())
    return ends(model, fits=[fit])


def convolutional_recurrence(job: Job) -> Results:
    """Next frames: ConvLSTM2D and Conv3D."""

    def build() -> Model:
        layers = [L.ConvLSTM2D(2, 3, padding="same", return_sequences=True), L.Conv3D(1, 3, padding="same")]
        return keras.Sequential([keras.Input((None, 4, 4, 1)), *layers])

    frames = digits()[0].reshape(-1, 4, 4, 4, 1)
    model = job.compiled("adam", build=build, loss="mse", metrics=[])
    fit = model.fit(frames[:, :-1], frames[:, 1:], epochs=2, **OPTIONS)
    return ends(model, fits=[fit])
