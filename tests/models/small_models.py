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
JIT_COMPILE = False  # of all models; test_xla.py sets it


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
    model.compile(keras.optimizers.SGD(learning_rate, momentum=0.9), loss, metrics=[], jit_compile=JIT_COMPILE)
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


def briefly(job: Job, build: Callable[[], Model], x: Structure, y: Structure) -> Results:
    """Three steps, of 5, 5 and 1 rows, and what the model predicts then: for models that take long to be built."""
    with job.scope():
        model = build()
    fit = model.fit(part(x), part(y), **OPTIONS)
    predicted = model.predict(part(x), batch_size=BATCH, verbose=0)
    outputs = {f"predicted/{n}": value for n, value in enumerate(keras.tree.flatten(predicted))}
    return {**weights(model), **history(fit), **outputs}


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


OF_THREE: Options = {"weights": None, "input_shape": (32, 32, 3), "classes": 3, "classifier_activation": None}


def densenet(job: Job) -> Results:
    from keras.src.applications.densenet import DenseNet

    return roughly(briefly(job, lambda: compiled(DenseNet([1, 1, 1, 1], **OF_THREE)), 255 * pictures(), labels()))


def nasnet(job: Job) -> Results:
    from keras.src.applications.nasnet import NASNet

    def build() -> Model:
        sizes: Options = {"penultimate_filters": 96, "num_blocks": 1, "stem_block_filters": 4, "skip_reduction": False}
        return compiled(NASNet(**sizes, **OF_THREE))

    return roughly(briefly(job, build, 255 * pictures(), labels()))


def efficientnet_v2(job: Job) -> Results:
    from keras.src.applications.efficientnet_v2 import EfficientNetV2

    def build() -> Model:
        sizes: Options = {"width_coefficient": 0.1, "depth_coefficient": 0.1, "default_size": 32}
        return compiled(
            EfficientNetV2(**sizes, dropout_rate=0.0, drop_connect_rate=0.0, name="efficientnetv2-b0", **OF_THREE)
        )

    return roughly(briefly(job, build, 255 * pictures(), labels()))


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


def llama(job: Job) -> Results:
    """Positions that rotate, heads that share keys, activations with gates."""
    import keras_hub

    def build() -> Model:
        sizes: Options = {"num_query_heads": 2, "num_key_value_heads": 1, "hidden_dim": 8, "intermediate_dim": 12}
        backbone = keras_hub.models.LlamaBackbone(WORDS, 1, **sizes)
        return compiled(keras_hub.models.LlamaCausalLM(backbone, preprocessor=None))

    x = {"token_ids": words(), "padding_mask": np.ones((ROWS, LENGTH), "int32")}
    return run(job, build, x, np.roll(words(), -1, 1))


def mit(job: Job) -> Results:
    """The transformer of SegFormer: attention over patches that overlap, in levels."""
    import keras_hub

    def build() -> Model:
        backbone = keras_hub.models.MiTBackbone(
            layerwise_depths=[1, 1],
            num_layers=2,
            layerwise_num_heads=[1, 2],
            layerwise_sr_ratios=[2, 1],
            max_drop_path_rate=0.0,
            layerwise_patch_sizes=[7, 3],
            layerwise_strides=[4, 2],
            image_shape=(32, 32, 3),
            hidden_dims=[4, 8],
        )
        for layer in backbone._flatten_layers():
            if isinstance(layer, L.Dropout):  # no argument of the backbone's
                layer.rate = 0.0
        return compiled(keras_hub.models.MiTImageClassifier(backbone, num_classes=3, preprocessor=None))

    return briefly(job, build, pictures(), labels())


def pyramid(job: Job) -> Results:
    """RetinaNet's levels of features, with a head that classifies pictures."""
    import keras_hub

    def build() -> Model:
        encoder = keras_hub.models.ResNetBackbone(
            [64], [3], [64, 64, 64], [1, 1, 1], [1, 2, 2], "basic_block", image_shape=(32, 32, 3)
        )
        backbone = keras_hub.models.RetinaNetBackbone(encoder, 3, 4, use_p5=False, image_shape=(32, 32, 3))
        levels = [L.GlobalAveragePooling2D()(level) for _, level in sorted(backbone.output.items())]
        return compiled(keras.Model(backbone.inputs, L.Dense(3)(L.Concatenate()(levels))))

    return roughly(briefly(job, build, pictures(), labels()))


def segment_anything(job: Job) -> Results:
    """Pictures with points and boxes, no masks (which have no items); masks and how good they are come out."""
    import keras_hub

    def build() -> Model:
        side, models = 32, keras_hub.models
        encoder = models.ViTDetBackbone(
            hidden_size=8,
            num_layers=2,
            intermediate_dim=12,
            num_heads=2,
            global_attention_layer_indices=[1],
            patch_size=8,
            num_output_channels=8,
            window_size=2,
            image_shape=(side, side, 3),
        )
        prompts = keras_hub.layers.SAMPromptEncoder(
            hidden_size=8, image_embedding_size=(4, 4), input_image_size=(side, side), mask_in_channels=4
        )
        decoder = keras_hub.layers.SAMMaskDecoder(
            num_layers=1,
            hidden_size=8,
            intermediate_dim=12,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
        )
        segmenter = models.SAMImageSegmenter(models.SAMBackbone(encoder, prompts, decoder, dtype="float32"))
        outputs = [L.Flatten()(segmenter.output[name]) for name in ("masks", "iou_pred")]
        return compiled(
            keras.Model(segmenter.input, outputs), [keras.losses.MeanSquaredError() for _ in range(2)], 0.002
        )

    x = {
        "images": pictures(),
        "points": drawn(1).uniform(0, 32, (ROWS, 1, 2)).astype("float32"),
        "labels": labels(2)[:, None].astype("float32"),
        "boxes": drawn(2).uniform(0, 32, (ROWS, 1, 2, 2)).astype("float32"),
        "masks": np.zeros((ROWS, 0, 32, 32, 1), "float32"),
    }
    y = [drawn(3).uniform(size=(ROWS, 4 * 16 * 16)), drawn(4).uniform(size=(ROWS, 4))]
    found = briefly(job, build, x, [values.astype("float32") for values in y])
    # Masks turn rounding of weights into 3e-5.
    return {f"ranks {name}" if name.startswith("predicted") else name: value for name, value in found.items()}


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
        model.compile(keras.optimizers.SGD(0.01), jit_compile=JIT_COMPILE)
    fit = model.fit(images, {"boxes": boxes, "labels": kinds}, batch_size=4, shuffle=False, epochs=2, verbose=0)
    return {**weights(model), **history(fit)}


# Those of keras_rs.


def two_towers(job: Job) -> Results:
    """Users and candidates given for each, ranked: a loss over the pairs of a row, by how often each is drawn."""
    import keras_rs

    def build() -> Model:
        user, films = keras.Input((), dtype="int32", name="user"), keras.Input((LENGTH,), dtype="int32", name="films")
        often = keras.Input((LENGTH,), name="often")
        query = L.Dense(8)(L.Embedding(WORDS, 8)(user))
        candidates = L.Dense(8)(L.Embedding(WORDS, 8)(films))
        scores = L.Dot((1, 2))([query, candidates])
        corrected = keras_rs.layers.SamplingProbabilityCorrection()(scores, often)
        model = keras.Model({"user": user, "films": films, "often": often}, corrected)
        model.compile(
            keras.optimizers.Adagrad(0.1),
            keras_rs.losses.PairwiseLogisticLoss(),
            metrics=[keras_rs.metrics.MeanReciprocalRank(), keras_rs.metrics.NDCG(k=3)],
            jit_compile=JIT_COMPILE,
        )
        return model

    x = {"user": words(1, 1)[:, 0], "films": words(2), "often": drawn(3).uniform(0.1, 0.9, (ROWS, LENGTH))}
    x["often"] = x["often"].astype("float32")
    return run(job, build, x, drawn(4).integers(0, 3, (ROWS, LENGTH)).astype("float32"))


def sasrec(job: Job) -> Results:
    """The next film after each of a sequence, among all films; the best for each user by `BruteForceRetrieval`."""
    import keras_rs

    def build() -> Model:
        items = keras.Input((LENGTH,), dtype="int32", name="items")
        table = keras.layers.ReversibleEmbedding(WORDS, 8)
        places = keras.ops.cumsum(keras.ops.ones_like(items), 1) - 1  # of the inputs: what a model captures stays
        h = table(items) + L.Embedding(LENGTH, 8)(places)
        h = h + L.MultiHeadAttention(1, 8, use_bias=False)(L.LayerNormalization()(h), h, use_causal_mask=True)
        h = h + L.Dense(8)(L.Dense(8, activation="relu")(L.LayerNormalization()(h)))
        return compiled(keras.Model(items, table(h, reverse=True)), learning_rate=0.05)

    found = run(job, build, words(1), words(2))
    index = keras_rs.layers.BruteForceRetrieval(np.asarray(found["predicted/0"])[:, -1], k=3)
    scores, _ = index(drawn(6).normal(size=(4, WORDS)).astype("float32"))
    return {**found, "scores": scores.numpy()}


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
        model.compile(keras.optimizers.Adagrad(0.1), jit_compile=JIT_COMPILE)
    fit = model.fit(tf.data.Dataset.from_tensor_slices((x,)).batch(BATCH), epochs=2, verbose=0)
    found = model.predict(x, batch_size=BATCH, verbose=0)
    return roughly({**weights(model), **history(fit), "best": found["best"]})
