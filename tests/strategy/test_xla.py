"""`jit_compile=True` under the strategy: results of plain Keras with XLA, in parts that do not delay sends."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import training
from training import compiled

import tfps
from tfps.trace.capture_file import chrome_path, read
from tfps.types import Argument, Array, Options, Structure, Value
from tfps.updates.compiled import _say_once, _warn_of_sizes

PARTS = tfps.Config(xla_part_bytes=8192)
UNITS, CLASSES = 16, 10


def mlp() -> keras.Model:
    x = inputs = keras.Input((UNITS,))
    for _ in range(3):
        y = keras.layers.LayerNormalization()(x)
        y = keras.ops.gelu(keras.layers.Dense(4 * UNITS)(y), approximate=False)
        x = x + keras.layers.Dense(UNITS)(y)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, dtype="float32")(x))


def normalized() -> keras.Model:
    x = inputs = keras.Input((UNITS,))
    for _ in range(3):
        x = keras.layers.Dense(2 * UNITS, use_bias=False)(x)
        x = keras.layers.Dropout(0.2)(keras.layers.ReLU()(keras.layers.BatchNormalization()(x)))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


def attention() -> keras.Model:
    x = inputs = keras.Input((UNITS,))
    x = keras.layers.Reshape((4, UNITS // 4))(x)
    x = keras.layers.Dense(UNITS)(x)
    for _ in range(2):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(2, UNITS // 2)(y, y)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling1D()(x)))


def embedding() -> keras.Model:
    inputs = keras.Input((UNITS,))
    words = keras.ops.cast(keras.ops.abs(inputs) * 10, "int32") % 40
    x = keras.layers.Flatten()(keras.layers.Embedding(40, 8)(words))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Dense(64, "gelu")(x)))


def recurrent() -> keras.Model:
    x = inputs = keras.Input((UNITS,))
    x = keras.layers.GRU(8, use_cudnn=False)(keras.layers.Reshape((4, UNITS // 4))(x))
    x = keras.layers.LayerNormalization()(keras.layers.Dense(64, "gelu")(x))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


def convolutions() -> keras.Model:
    x = inputs = keras.Input((UNITS,))
    x = keras.layers.Reshape((4, 4, 1))(x)
    for _ in range(2):
        x = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(x)))


def data(rows: int = 80) -> tuple[Array, Array]:
    random = np.random.default_rng(0)
    return random.normal(size=(rows, UNITS)).astype("float32"), random.integers(0, CLASSES, rows)


def train(
    strategy: tfps.Strategy | None,
    build: Callable[[], keras.Model],
    optimizer: Callable[[], keras.optimizers.Optimizer] = keras.optimizers.SGD,
    *,
    rows: int = 80,  # of batches of 32: the last has 16
    **options: Argument,
) -> keras.Model:
    keras.utils.set_random_seed(1)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        settings: Options = {"jit_compile": True, "metrics": ["accuracy"], **options}
        model.compile(optimizer(), loss, **settings)
    x, y = data(rows)
    model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False)
    return model


def difference(one: keras.Model, other: keras.Model) -> float:
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(np.asarray(a, "float64") - b).max()) for a, b in pairs)


def parts_of(strategy: tfps.Strategy, function: str = "one_step_on_data") -> int:
    """How many parts the last traced function of this name has."""
    return len(next(each.parts for each in strategy.extended.compiled.made if each.function == function))


@pytest.fixture
def in_parts() -> Iterator[tfps.Strategy]:
    strategy = tfps.Strategy(config=PARTS)
    yield strategy
    strategy.close()


def sgd(**options: Argument) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.SGD(0.1, **options)


def adam(**options: Argument) -> Callable[[], keras.optimizers.Optimizer]:
    return lambda: keras.optimizers.Adam(0.01, **options)


@pytest.mark.parametrize(
    ("build", "optimizer", "options"),
    [
        (mlp, sgd(), {}),
        pytest.param(mlp, sgd(), {"steps_per_execution": 2}, marks=pytest.mark.long),
        pytest.param(mlp, sgd(global_clipnorm=0.1), {}, marks=pytest.mark.long),
        pytest.param(mlp, lambda: keras.optimizers.LossScaleOptimizer(sgd()()), {}, marks=pytest.mark.long),
        pytest.param(normalized, adam(), {}, marks=pytest.mark.long),
        pytest.param(attention, sgd(gradient_accumulation_steps=2), {}, marks=pytest.mark.long),
        pytest.param(embedding, sgd(momentum=0.9), {}, marks=pytest.mark.long),
        pytest.param(convolutions, sgd(), {}, marks=pytest.mark.long),
    ],
    ids=("mlp", "executions", "clipping", "loss scale", "normalized", "accumulation", "embedding", "convolutions"),
)
def test_one_worker_ends_with_the_weights_of_plain_keras_with_xla(
    in_parts: tfps.Strategy, build: Callable[[], keras.Model], optimizer: Argument, options: Options
) -> None:
    own, plain = train(in_parts, build, optimizer, **options), train(None, build, optimizer, **options)
    assert difference(own, plain) < 1e-6
    assert parts_of(in_parts) >= (1 if build in (embedding, convolutions) else 3)  # whose kernels are small
    x, y = data()
    assert own.evaluate(x, y, batch_size=32, verbose=0) == pytest.approx(plain.evaluate(x, y, batch_size=32, verbose=0))
    np.testing.assert_allclose(own.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)
    assert len({each.function for each in in_parts.extended.compiled.made if each.parts}) >= 2  # predict has its own


@pytest.mark.long
def test_half_precision_is_that_of_plain_keras_with_xla(in_parts: tfps.Strategy) -> None:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        own, plain = train(in_parts, mlp), train(None, mlp)
        assert difference(own, plain) < 1e-6
        assert difference(own, train(None, mlp, jit_compile=False)) > 1e-6, "XLA rounds otherwise: nothing was compiled"
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize(
    ("cell", "steps"),
    [
        (keras.layers.GRU, 4),
        pytest.param(keras.layers.LSTM, 4, marks=pytest.mark.long),
        (keras.layers.LSTM, None),  # of an unknown number
    ],
)
def test_loops_of_recurrent_layers_stay_and_the_rest_is_compiled(
    in_parts: tfps.Strategy,
    caplog: pytest.LogCaptureFixture,
    cell: Callable[..., keras.layers.Layer],
    steps: int | None,
) -> None:
    def cells() -> keras.Model:
        x = inputs = keras.Input((UNITS,))
        x = keras.layers.Reshape((4, UNITS // 4))(x)
        if steps is None:
            x = x[:, : keras.ops.shape(x)[0]]
        x = cell(8, use_cudnn=False, return_sequences=True)(x)
        x = cell(8, use_cudnn=False)(x)
        return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Dense(64, "gelu")(x)))

    _say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tfps"):
        build = recurrent if cell is keras.layers.GRU else cells
        own = train(in_parts, build, rows=64)
    said = [each.getMessage() for each in caplog.records if "stay" in each.getMessage()]
    assert len(said) == 1
    assert "loops, so the cells of recurrent layers, stay with TensorFlow" in said[0]
    assert parts_of(in_parts) > (steps is not None)
    assert difference(own, train(None, build, jit_compile=False, rows=64)) < 1e-6


class OwnStep(keras.Model):
    """A `train_step` of its own, with a tape and two losses."""

    def train_step(self, batch: Structure) -> Structure:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss += 1e-3 * tf.add_n([tf.nn.l2_loss(each) for each in self.trainable_variables])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}


@pytest.mark.long
def test_a_train_step_of_a_program_and_single_batches_are_compiled(in_parts: tfps.Strategy) -> None:
    def build() -> keras.Model:
        inner = mlp()
        return OwnStep(inner.inputs, inner.outputs)

    x, y = data(32)
    models = []
    for strategy in (in_parts, None):
        model = train(strategy, build, metrics=None)
        logs = model.train_on_batch(x, y, return_dict=True)
        models.append((model, logs))
    (own, logs), (plain, expected) = models
    assert parts_of(in_parts) > 2
    assert difference(own, plain) < 1e-6
    assert logs == pytest.approx(expected, abs=1e-5)


@pytest.mark.long
def test_a_loop_of_a_program_is_compiled_with_xla_on() -> None:
    ends = []
    for xla in ("off", "auto", "on"):
        strategy = tfps.Strategy(config=dataclasses.replace(PARTS, xla=xla))
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, optimizer = mlp(), keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step(x: Value, y: Value, model=model, optimizer=optimizer, loss=loss) -> Value:  # type: ignore[no-untyped-def]
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
            return value

        twice = tf.function(lambda x, y: [strategy.run(step, (x, y)) for _ in range(2)], autograph=False)  # noqa: B023
        x, y = data(32)
        values = [float(each) for _ in range(2) for each in twice(x, y)]
        made = [len(each.parts) for each in strategy.extended.compiled.made]
        ends.append((values, model.get_weights(), made))
        strategy.close()
    (off, _, none), (auto, _, nothing), (on, _, some) = ends
    assert (none, nothing) == ([], [])
    assert min(some) > 2
    assert off == auto
    assert on == pytest.approx(off, abs=1e-5)
    assert on[-1] < on[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"update": "server"},
        {"update": "server", "mode": "async"},
        {"on_nonfinite": "skip"},
        {"mode": "diloco", "inner_steps": 2},
        {"mode": "local", "inner_steps": 2, "fragments": 2},
    ],
    ids=str,
)
def test_other_modes_compile_their_steps(settings: Options) -> None:
    ends = []
    for jit_compile in (True, False):
        strategy = tfps.Strategy(config=dataclasses.replace(PARTS, **settings))
        ends.append(train(strategy, mlp, adam(), jit_compile=jit_compile, rows=64).get_weights())
        if jit_compile:
            assert parts_of(strategy) > (0 if "inner_steps" in settings else 1)
        strategy.close()
    assert max(float(np.abs(a - b).max()) for a, b in zip(*ends, strict=True)) < 1e-5


def test_off_compiles_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    strategy = tfps.Strategy(config=tfps.Config(xla="off"))
    with caplog.at_level(logging.WARNING, "tfps"):
        own = train(strategy, mlp)
    assert "xla is 'off'" in caplog.text
    assert strategy.extended.compiled.made == []
    strategy.close()
    assert own.jit_compile


@pytest.mark.long
def test_on_compiles_no_model_that_has_declined(tmp_path: Path) -> None:
    strategy = tfps.Strategy(config=dataclasses.replace(PARTS, xla="on"))
    steps, (x, y) = strategy.extended.compiled, data(32)
    own = train(strategy, mlp, jit_compile=False)
    own.evaluate(x, y, verbose=0)
    own.predict(x, verbose=0)
    assert steps.made == []
    own.save(tmp_path / "model.keras")  # Keras writes False for "auto", too
    with strategy.scope():
        keras.models.load_model(tmp_path / "model.keras").fit(x, y, verbose=0)
    assert parts_of(strategy) > 1
    steps.made.clear()
    train(strategy, mlp, jit_compile="auto").predict(x, verbose=0)
    assert len(steps.made) == 2
    strategy.close()


def test_several_local_devices_are_refused_by_name(strategy: tfps.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy.extended.compiled, "_devices", ("/device:CPU:0", "/device:CPU:1"))
    model, x, y = compiled(strategy, jit_compile=True)
    with pytest.raises(tfps.UnsupportedError, match=r"jit_compile=True is for one local device, got 2 \(/device:CPU:0"):
        model.fit(x, y, verbose=0)


def test_eager_steps_are_not_compiled(in_parts: tfps.Strategy) -> None:
    with pytest.warns(UserWarning, match="`jit_compile` cannot also be True"):
        train(in_parts, mlp, run_eagerly=True)
    tf.config.run_functions_eagerly(True)
    try:
        train(in_parts, mlp)
    finally:
        tf.config.run_functions_eagerly(False)
    assert in_parts.extended.compiled.made == []


class Sized(keras.layers.Layer):
    """Takes a size from data, which XLA cannot."""

    def call(self, x: Value) -> Value:
        size = tf.cast(tf.reduce_max(x[:, 0]), tf.int32) * 0 + 2
        y = keras.ops.tanh(x) * 2 + keras.ops.sigmoid(x)
        return tf.reshape(tf.reshape(y, [size, -1, UNITS]), tf.shape(x))


def test_what_xla_cannot_compile_is_an_error_that_names_the_layer_and_says_what_to_do(strategy: tfps.Strategy) -> None:
    def build() -> keras.Model:
        dense = keras.layers.Dense(UNITS, "gelu")
        return keras.Sequential([keras.Input((UNITS,)), dense, Sized(name="odd"), keras.layers.Dense(CLASSES)])

    with pytest.raises(tfps.UnsupportedError, match=r"at \S*odd\S*/Reshape: Input 1 .*Use jit_compile=False"):
        train(strategy, build)


def test_where_plain_keras_would_have_used_xla_it_is_said(
    strategy: tfps.Strategy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_with(**options: Argument) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "tfps"):
            with strategy.scope():
                model = mlp()
                model.compile("sgd", "mse", **options)
            assert not model.jit_compile
        return caplog.text

    assert not compile_with()  # Keras uses none on CPUs
    monkeypatch.setattr(strategy.extended, "_devices", ("/device:GPU:0",))
    assert not compile_with(run_eagerly=True)
    assert not compile_with(jit_compile=False)
    assert "model.compile(..., jit_compile=True) has it do so" in compile_with()


def test_clustering_by_tensorflow_itself_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = "gradients leave only after the whole backward pass"
    with caplog.at_level(logging.WARNING, "tfps"):
        monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=0")
        tfps.Strategy().close()
        assert warning not in caplog.text
        monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_cpu_global_jit --tf_xla_auto_jit=2")
        tfps.Strategy().close()
        assert caplog.text.count(warning) == 1


def test_the_report_knows_parts_and_sizes_of_batches_and_the_second_size_is_warned_of(
    in_parts: tfps.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_sizes.cache_clear()
    warning = "batches of different sizes on this worker"
    with caplog.at_level(logging.INFO, "tfps"):
        began_s = time.monotonic()
        model = train(in_parts, mlp, rows=128)
        model.get_weights()
        assert warning not in caplog.text
        first_s = in_parts.report().xla_compile_s
        assert 0.0 < first_s < time.monotonic() - began_s
        x, y = data(48)
        model.fit(x, y, batch_size=32, verbose=0)
        model.fit(x, y, batch_size=32, verbose=0)
    assert caplog.text.count(warning) == 1
    assert f"XLA compiles one_step_on_data in {parts_of(in_parts)} parts" in caplog.text
    model.get_weights()
    model.evaluate(x, y, verbose=0)  # its step has the same name
    report = in_parts.report()
    assert (report.xla_parts, report.xla_sizes) == (parts_of(in_parts), 2)
    assert report.xla_compile_s > first_s
    assert f"XLA compiles a step in {report.xla_parts} parts, for 2 sizes of batches" in str(report)


def test_sizes_of_single_batches_are_counted_and_warned_of(
    in_parts: tfps.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_sizes.cache_clear()
    with in_parts.scope():
        model = training_of_one_layer()
    x = np.ones((8, UNITS), "float32")
    with caplog.at_level(logging.WARNING, "tfps"):
        for rows, warned in ((8, False), (8, False), (4, True)):
            model.train_on_batch(x[:rows], x[:rows])
            model.get_weights()
            assert ("batches of different sizes" in caplog.text) == warned
    assert in_parts.extended.compiled.made[-1].sizes == 2


def training_of_one_layer() -> keras.Model:
    model = keras.Sequential([keras.Input((UNITS,)), keras.layers.Dense(UNITS, "gelu")])
    model.compile("sgd", "mse", jit_compile=True)
    return model


class IsAFunction(OwnStep):
    train_step = tf.function(OwnStep.train_step, autograph=False)


class CallsAFunction(OwnStep):
    inner = tf.function(OwnStep.train_step, autograph=False)

    def train_step(self, batch: Structure) -> Structure:
        return self.inner(batch)


@pytest.mark.parametrize("kind", [pytest.param(IsAFunction, marks=pytest.mark.long), CallsAFunction])
def test_a_train_step_may_be_a_function_of_tensorflow_but_what_it_calls_must_not_which_is_warned_of(
    in_parts: tfps.Strategy, caplog: pytest.LogCaptureFixture, kind: type[OwnStep]
) -> None:
    def build() -> keras.Model:
        inputs = keras.Input((UNITS,))
        return kind(inputs, keras.layers.Dense(CLASSES)(keras.layers.Dense(UNITS, "gelu")(inputs)))

    _say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tfps"):
        own = train(in_parts, build, metrics=None, rows=32)
    compiles = kind is IsAFunction
    assert [len(each.parts) > 0 for each in in_parts.extended.compiled.made] == [compiles]
    assert ("take the tf.function from what a train_step calls" in caplog.text) != compiles
    assert difference(own, train(None, build, metrics=None, rows=32, jit_compile=compiles)) < 1e-6


def test_a_capture_has_the_parts_of_each_step_and_at_which_gates_they_wait(tmp_path: Path) -> None:
    strategy = tfps.Strategy(config=dataclasses.replace(PARTS, slice_bytes=1024))  # a gate for each kernel
    model, (x, y) = train(strategy, mlp, rows=32), data(96)
    with strategy.trace(tmp_path, "one"):
        model.fit(x, y, batch_size=32, verbose=0)
    capture, parts = read(chrome_path(tmp_path, "one")), parts_of(strategy)
    assert len(capture.parts) == parts
    assert sum(part.compile_s for part in capture.parts) >= strategy.report().xla_compile_s > 0
    names = {variable.path for variable in model.trainable_variables}
    assert {name for part in capture.parts for name in part.waits} <= names
    assert sorted(name for part in capture.parts for name in part.sends) == sorted(names), "each gradient in one part"
    ran = [span for span in capture.spans if span.kind == "part"]
    assert [len([span for span in ran if span.slice == number]) for number in range(parts)] == [3] * parts
    before = len(strategy._runtime.recorder.records())
    model.fit(x, y, batch_size=32, verbose=0)
    assert len(strategy._runtime.recorder.records()) == before
    strategy.close()


def test_after_close_a_model_predicts_batches_of_any_size() -> None:
    strategy = tfps.Strategy(config=PARTS)
    with strategy.scope():
        model = mlp()
        model.compile("sgd", "mse", jit_compile=True)
    x, _ = data(12)
    expected = model.predict(x, batch_size=8, verbose=0)
    strategy.close()
    np.testing.assert_allclose(model.predict(x, batch_size=7, verbose=0), expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("build", [*training.MODELS, training.without_call])
def test_small_models_end_with_the_weights_of_plain_keras_with_xla(build: training.Build) -> None:
    ends = []
    strategy = tfps.Strategy(config=tfps.Config(xla_part_bytes=2048))
    for scope in (strategy.scope(), contextlib.nullcontext()):
        keras.utils.set_random_seed(1)
        with scope:
            model, x, y = build()
            model.compile(sgd()(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
        model.fit(x, y, batch_size=64, shuffle=False, verbose=0)
        ends.append(model)
    assert difference(*ends) < 1e-6
    assert parts_of(strategy) >= 1
    strategy.close()


_MODULES = """
import pathlib, sys
import keras, numpy as np, tfps
strategy = tfps.Strategy(config=tfps.Config(xla_part_bytes=4096))
with strategy.scope():
    layers = [keras.layers.Dense(32, "gelu", use_bias=False) for _ in range(4)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    model.compile("sgd", "mse", jit_compile=True)
for rows in (8, 8, 8):
    model.train_on_batch(np.ones((rows, 32), "float32"), np.ones((rows, 32), "float32"))
modules = {each.name.split(".")[1] for each in pathlib.Path(sys.argv[1]).glob("*part*before_optimizations.txt")}
print("modules", len(modules), "parts", len(strategy.extended.compiled.made[-1].parts))
"""


@pytest.mark.long
def test_xla_compiles_each_part_once_for_one_size(tmp_path: Path) -> None:
    flags = {"XLA_FLAGS": f"--xla_dump_to={tmp_path}", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-c", _MODULES, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **flags}, capture_output=True, text=True, timeout=240)
    modules, parts = re.search(r"modules (\d+) parts (\d+)", done.stdout).groups()  # type: ignore[union-attr]
    assert int(parts) > 2
    assert modules == parts
