"""Architectures of Keras' libraries, small and with random weights: trained, evaluated, saved, loaded, trained on.

Batches divide neither by two nor by three workers, and the last one has one row. They run as the programs of
tests/integration/program.py do.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results, history, weights
from taught import roughly

from tfps.types import Library, Model, Options, Structure, Value

L: Library = keras.layers
ROWS, BATCH = 36, 5
OPTIONS: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
WORDS, LENGTH = 20, 8


def drawn(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def words(seed: int = 0, length: int = LENGTH) -> np.ndarray:
    return drawn(seed).integers(1, WORDS, (ROWS, length)).astype("int32")


def pictures() -> np.ndarray:
    return drawn().uniform(size=(ROWS, 32, 32, 3)).astype("float32")


def labels(count: int = 3) -> np.ndarray:
    return drawn(5).integers(0, count, ROWS)


def part(values: Structure, rows: int = 11) -> Structure:
    return keras.tree.map_structure(lambda value: value[:rows], values)


def compiled(model: Model, loss: Value = None, learning_rate: float = 0.02) -> Model:
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(learning_rate, momentum=0.9), loss, metrics=[], jit_compile=False)
    return model


def run(job: Job, build: Callable[[], Model], x: Structure, y: Structure) -> Results:
    """All that is done with a model, and what it ends with."""
    with job.scope():
        model = build()
    fits = [model.fit(x, y, epochs=2, validation_data=(part(x), part(y)), **OPTIONS)]
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    predicted = model.predict(part(x), batch_size=BATCH, verbose=0)
    path = job.shared / "model.keras"
    model.save(path)
    with job.scope():
        model = keras.models.load_model(path)
    fits.append(model.fit(x, y, **OPTIONS))
    outputs = {f"predicted/{n}": value for n, value in enumerate(keras.tree.flatten(predicted))}
    return {**weights(model), **history(*fits), **outputs, "evaluated": evaluated}


def normalized(results: Results) -> Results:
    """Of a model with batch normalization, whose moving statistics, still far off, decide what evaluation finds."""
    return {
        name.replace("history", "validation") if "val_" in name else name: v for name, v in roughly(results).items()
    }


# Those of Keras itself: its public functions build some of full size only.


def convnext(job: Job) -> Results:
    from keras.src.applications.convnext import ConvNeXt

    def build() -> Model:
        options: Options = {"default_size": 32, "drop_path_rate": 0.0, "layer_scale_init_value": 0.1, "classes": 3}
        model = ConvNeXt(
            depths=[1, 1, 1, 1],
            projection_dims=[4, 8, 8, 12],
            weights=None,
            input_shape=(32, 32, 3),
            classifier_activation=None,
            **options,
        )
        return compiled(model, learning_rate=0.005)  # with 0.02, it turns rounding of its pictures into 2e-5

    return run(job, build, 255 * pictures(), labels())


def mobilenet(job: Job) -> Results:
    def build() -> Model:
        return compiled(
            keras.applications.MobileNetV3Small(
                (32, 32, 3), alpha=0.1, weights=None, classes=3, dropout_rate=0.0, classifier_activation=None
            )
        )

    return normalized(run(job, build, 255 * pictures(), labels()))


def efficientnet(job: Job) -> Results:
    from keras.src.applications.efficientnet import EfficientNet

    def build() -> Model:
        return compiled(
            EfficientNet(
                width_coefficient=0.1,
                depth_coefficient=0.1,
                default_size=32,
                dropout_rate=0.0,
                drop_connect_rate=0.0,
                weights=None,
                weights_name="efficientnetb0",
                input_shape=(32, 32, 3),
                classes=3,
                classifier_activation=None,
            )
        )

    return normalized(run(job, build, 255 * pictures(), labels()))


# Those of keras_hub.

SIZES: Options = {"vocabulary_size": WORDS, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12}


def bert(job: Job) -> Results:
    import keras_hub

    def build() -> Model:
        backbone = keras_hub.models.BertBackbone(**SIZES, dropout=0.0, max_sequence_length=LENGTH)
        return compiled(keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=0.0))

    masks = (np.arange(LENGTH) < drawn(1).integers(1, LENGTH + 1, (ROWS, 1))).astype("int32")
    x = {"token_ids": words() * masks, "segment_ids": np.zeros_like(masks), "padding_mask": masks}
    return run(job, build, x, labels())


def gpt2(job: Job) -> Results:
    import keras_hub

    def build() -> Model:
        backbone = keras_hub.models.GPT2Backbone(**SIZES, dropout=0.0, max_sequence_length=LENGTH)
        return compiled(keras_hub.models.GPT2CausalLM(backbone, preprocessor=None))

    x = {"token_ids": words(), "padding_mask": np.ones((ROWS, LENGTH), "int32")}
    return run(job, build, x, np.roll(words(), -1, 1))


def t5(job: Job) -> Results:
    import keras_hub

    def build() -> Model:
        backbone = keras_hub.models.T5Backbone(**SIZES, dropout=0.0, key_value_dim=4)
        return compiled(keras.Model(backbone.inputs, L.Dense(WORDS)(backbone.outputs[1])))

    ones = np.ones((ROWS, LENGTH), "int32")
    x = {
        "encoder_token_ids": words(),
        "encoder_padding_mask": ones,
        "decoder_token_ids": words(1),
        "decoder_padding_mask": ones,
    }

    return run(job, build, x, words(2))


def whisper(job: Job) -> Results:
    import keras_hub

    def build() -> Model:
        backbone = keras_hub.models.WhisperBackbone(
            **SIZES, num_mels=6, max_encoder_sequence_length=16, max_decoder_sequence_length=LENGTH
        )
        return compiled(keras.Model(backbone.inputs, L.Dense(WORDS)(backbone.outputs[1])))

    x = {
        "encoder_features": drawn().normal(size=(ROWS, 16, 6)).astype("float32"),
        "decoder_token_ids": words(1),
        "decoder_padding_mask": np.ones((ROWS, LENGTH), "int32"),
    }
    return run(job, build, x, words(2))


def vit(job: Job) -> Results:
    import keras_hub

    def build() -> Model:
        backbone = keras_hub.models.ViTBackbone((32, 32, 3), 8, 1, 2, 8, 12)
        return compiled(keras_hub.models.ViTImageClassifier(backbone, num_classes=3, preprocessor=None))

    return run(job, build, pictures(), labels())


def resnet(job: Job) -> Results:
    import keras_hub

    def build() -> Model:
        backbone = keras_hub.models.ResNetBackbone(
            [64], [3], [64, 64], [1, 1], [1, 2], "basic_block", image_shape=(32, 32, 3)
        )
        return compiled(keras_hub.models.ResNetImageClassifier(backbone, num_classes=3, preprocessor=None))

    return normalized(run(job, build, pictures(), labels()))


def retinanet(job: Job) -> Results:
    """Its losses are sums by the number of positives of the batch: exact where that number is one of all replicas."""
    import keras_hub

    class Detector(keras_hub.models.RetinaNetObjectDetector):
        def compute_loss(
            self, x: Value, y: Structure, y_pred: Structure, sample_weight: Value = None, **options: Value
        ) -> Value:
            boxes, kinds = self.label_encoder(images=x, gt_boxes=y["boxes"], gt_classes=y["labels"])
            positive = tf.cast(kinds > -1, tf.float32)
            context = tf.distribute.get_replica_context()
            count = tf.maximum(context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(positive)), 1.0)
            weights = {"bbox_regression": positive / count, "cls_logits": tf.cast(kinds != -2, tf.float32) / count}
            targets = {"bbox_regression": boxes, "cls_logits": tf.one_hot(tf.cast(kinds, tf.int32), self.num_classes)}
            return keras.Model.compute_loss(self, x, targets, y_pred, weights, **options)

    # Plain Keras runs the library's own.
    kind = Detector if job.strategy else keras_hub.models.RetinaNetObjectDetector
    corners = drawn(3).uniform(0, 28, size=(10, 2, 2))
    boxes = np.concatenate([corners, corners + drawn(4).uniform(12, 36, size=(10, 2, 2))], -1).astype("float32")
    kinds = drawn(5).integers(0, 3, (10, 2)).astype("float32")
    boxes[::3, 1], kinds[::3, 1] = -1, -1  # padding
    images = drawn().uniform(size=(10, 64, 64, 3)).astype("float32")
    with job.scope():
        encoder = keras_hub.models.ResNetBackbone(
            [64], [3], [64, 64, 64, 64], [1, 1, 1, 1], [1, 2, 2, 2], "basic_block", image_shape=(64, 64, 3)
        )
        backbone = keras_hub.models.RetinaNetBackbone(encoder, 3, 5, use_p5=False, image_shape=(64, 64, 3))
        model = kind(backbone, num_classes=3, bounding_box_format="xyxy", pre_logits_num_conv_layers=1)
        for layer in encoder.layers:
            if isinstance(layer, L.BatchNormalization):
                layer.trainable = False  # it would normalize a replica's own rows
        model.compile(keras.optimizers.SGD(0.01), jit_compile=False)
    fit = model.fit(images, {"boxes": boxes, "labels": kinds}, batch_size=4, shuffle=False, epochs=2, verbose=0)
    return {**weights(model), **history(fit)}


# Those of keras_rs.


def dlrm(job: Job) -> Results:
    """Features that are numbers and such that are ids, which interact."""
    import keras_rs

    def build() -> Model:
        numbers = keras.Input((6,), name="numbers")
        ids = [keras.Input((), dtype="int32", name=f"id{n}") for n in range(3)]
        bottom = L.Dense(8, activation="relu")(numbers)
        embedded = [L.Embedding(WORDS, 8)(each) for each in ids]
        dots = keras_rs.layers.DotInteraction()([bottom, *embedded])
        start = L.Concatenate()([bottom, dots])
        crossed = keras_rs.layers.FeatureCross(projection_dim=4)(start, start)
        model = keras.Model({"numbers": numbers, **{each.name: each for each in ids}}, L.Dense(1)(crossed))
        return compiled(model, keras.losses.BinaryCrossentropy(from_logits=True))

    x = {"numbers": drawn().normal(size=(ROWS, 6)).astype("float32")}
    x |= {f"id{n}": words(n, 1)[:, 0] for n in range(3)}
    return run(job, build, x, labels(2)[:, None].astype("float32"))


def distributed_embedding(job: Job) -> Results:
    """What keras_rs gives to large tables, here on a CPU."""
    import keras_rs

    def build() -> Model:
        rs = keras_rs.layers
        table = rs.TableConfig("films", WORDS, 8, optimizer="sgd", placement="default_device")
        features = {
            "film": rs.FeatureConfig("film", table, (None,), (None, 8)),
            "seen": rs.FeatureConfig("seen", table, (None, LENGTH), (None, 8)),
        }
        inputs = {
            "film": keras.Input((), dtype="int32", name="film"),
            "seen": keras.Input((LENGTH,), dtype="int32", name="seen"),
        }
        embedded = rs.DistributedEmbedding(features)(inputs)
        outputs = L.Dense(1)(L.Concatenate()([embedded["film"], embedded["seen"]]))
        return compiled(keras.Model(inputs, outputs), keras.losses.MeanSquaredError())

    x = {"film": words(1, 1)[:, 0], "seen": words()}
    return run(job, build, x, labels(5)[:, None].astype("float32"))


def retrieval(job: Job) -> Results:
    """Two towers, whose negatives are the other rows of the batch; then the best for each user."""
    import keras_rs

    class Towers(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.films = L.Embedding(WORDS, 8), L.Embedding(WORDS, 8)
            self.films.build()
            self.best = keras_rs.layers.BruteForceRetrieval(self.films.embeddings, k=3, return_scores=False)

        def call(self, inputs: Structure, training: bool = False) -> Structure:
            user = self.users(inputs["user"])
            found = {"user": user, "film": self.films(inputs["film"])}
            if not training:
                found["best"] = self.best(user)
            return found

        def compute_loss(self, x: Value = None, y: Value = None, y_pred: Value = None, *_: Value, **__: Value) -> Value:
            scores = keras.ops.matmul(y_pred["user"], keras.ops.transpose(y_pred["film"]))
            same = keras.ops.arange(keras.ops.shape(scores)[0])
            return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(same, scores, from_logits=True))

    x = {"user": words(1, 1)[:, 0], "film": words(2, 1)[:, 0]}
    with job.scope():
        model = Towers()
        model.compile(keras.optimizers.Adagrad(0.1), jit_compile=False)
    fit = model.fit(tf.data.Dataset.from_tensor_slices((x,)).batch(BATCH), epochs=2, verbose=0)
    found = model.predict(x, batch_size=BATCH, verbose=0)
    return roughly({**weights(model), **history(fit), "best": found["best"]})
