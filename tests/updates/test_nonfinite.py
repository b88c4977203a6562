"""Steps with gradients that are not finite, in one process: skipped exactly, or an error; the default costs nothing.

Jobs of two workers are in tests/integration/test_nonfinite.py.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.errors import NonFiniteError
from tfps.graph.tf_private import outer_graphs
from tfps.pserver.server import ParameterServer
from tfps.types import Argument, Model, Optimizer, Options, Value

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BATCH, BAD = 64, slice(128, 192)
Start = Callable[..., tfps.Strategy]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts one worker, with so many pservers, or an embedded one."""
    with contextlib.ExitStack() as ends:

        def started(pservers: int = 0, **settings: Argument) -> tfps.Strategy:
            servers = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(pservers)]
            for server in servers:
                ends.callback(server.stop)
            strategy = tfps.Strategy([each.address for each in servers] or None, config=tfps.Config(**settings))
            ends.callback(strategy.close)
            return strategy

        yield started


def compiled(
    strategy: tfps.Strategy | None, optimizer: Optimizer, build: training.Build = training.mlp, **options: Argument
) -> tuple[Model, Value, Value]:
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, x, y = build()
        model.compile(optimizer, LOSS, **options)
        model.optimizer.build(model.trainable_variables)
    return model, x, y


def fit(model: Model, x: Value, y: Value, *, drop: bool = False, epochs: int = 1) -> None:
    """Trains on batches of which the third has a NaN, or on the others."""
    heavy = np.ones(len(x), np.float32)
    heavy[BAD.start + 5] = np.nan
    x, y, heavy = (np.delete(each, np.r_[BAD], 0) if drop else each for each in (x, y, heavy))
    model.fit(x, y, sample_weight=heavy, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)


def state(model: Model) -> list[bytes]:
    return [np.asarray(each.numpy()).tobytes() for each in [*model.weights, *model.optimizer.variables]]


def skipped(strategy: tfps.Strategy) -> int:
    assert strategy._runtime.settle(60.0)
    return strategy._runtime.skipped_steps


OPTIMIZERS: dict[str, tuple[Callable[[], Optimizer], training.Build]] = {
    "Adam": (Adam, training.mlp),
    "decay": (lambda: keras.optimizers.AdamW(weight_decay=0.01, use_ema=True), training.mlp),
    "accumulation": (lambda: Adam(gradient_accumulation_steps=3), training.mlp),
    "sparse": (Adam, training.embedding_sparse),
}
SETTINGS: dict[str, dict[str, Argument]] = {
    "embedded": {},
    "pservers": {"pservers": 2, "slice_bytes": 4096},
    "server": {"pservers": 2, "slice_bytes": 4096, "update": "server"},
}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *(("embedded", name) for name in ("accumulation", "sparse")),
        ("pservers", "Adam"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("embedded", "decay"), ("server", "accumulation"))),
    ],
)
def test_a_step_that_is_skipped_leaves_what_plain_keras_has_without_its_batch(
    where: str, name: str, start: Start
) -> None:
    optimizer, build = OPTIMIZERS[name]
    strategy = start(on_nonfinite="skip", **SETTINGS[where])
    model, x, y = compiled(strategy, optimizer(), build)
    fit(model, x, y, epochs=2)
    plain, x, y = compiled(None, optimizer(), build)
    fit(plain, x, y, drop=True, epochs=2)
    assert state(model) == state(plain)
    assert skipped(strategy) == 2


@pytest.mark.parametrize("eagerly", [False, True])
def test_an_error_leaves_the_model_as_it_was_and_training_may_go_on(eagerly: bool, start: Start) -> None:
    strategy = start(on_nonfinite="raise")
    model, x, y = compiled(strategy, Adam(), run_eagerly=eagerly)
    plain, *_ = compiled(None, Adam(), run_eagerly=eagerly)
    with pytest.raises(
        NonFiniteError, match=r"the gradient of \S+/kernel is not finite on rank 0; the step is not app"
    ):
        fit(model, x, y)
    options: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    plain.fit(x[: BAD.start], y[: BAD.start], sample_weight=np.ones(BAD.start, np.float32), **options)
    assert state(model) == state(plain)
    for each in (model, plain):
        each.fit(x[BAD.stop :], y[BAD.stop :], **options)
    assert state(model) == state(plain)


def ops_of(strategy: tfps.Strategy) -> list[str]:
    """Types of all ops of the last step that was traced."""
    *_, last = strategy.extended.scheduler.graphs.values()
    graph = outer_graphs(last())[-1].as_graph_def()
    return [node.op for nodes in (graph.node, *(each.node_def for each in graph.library.function)) for node in nodes]


def test_by_default_a_step_checks_nothing_and_its_buckets_are_the_same(start: Start) -> None:
    found, buckets = {}, {}
    for action in ("pass", "skip"):
        strategy = start(**({} if action == "pass" else {"on_nonfinite": action}))
        model, x, y = compiled(strategy, Adam())
        model.fit(x, y, batch_size=BATCH, verbose=0)
        found[action] = ops_of(strategy)
        buckets[action] = [(len(each.variables), each.nbytes) for each in strategy._runtime.declared.known()]
    assert "IsFinite" not in found["pass"]
    assert found["skip"].count("If") == found["pass"].count("If") + 1
    assert buckets["pass"] == buckets["skip"]


def test_a_norm_that_overflows_counts_as_not_finite(start: Start) -> None:
    """Keras' global clipping makes NaN of large gradients."""
    strategy = start(on_nonfinite="skip")
    with strategy.scope():
        variable, optimizer = tf.Variable([1.0]), SGD(0.1, global_clipnorm=1.0)
        optimizer.build([variable])
    step = tf.function(lambda size: strategy.run(lambda: optimizer.apply([size[None]], [variable])))
    for size in (2.0, 1e30, 2.0):
        step(tf.constant(size))
    np.testing.assert_allclose(variable.numpy(), [0.8], rtol=1e-6)
    assert (skipped(strategy), int(optimizer.iterations.numpy())) == (1, 2)


@pytest.mark.parametrize(("dtype", "large"), [("float64", 1e300), ("float32", 3e38)])
def test_large_numbers_that_are_finite_are_applied(dtype: str, large: float, start: Start) -> None:
    strategy = start(on_nonfinite="skip")
    with strategy.scope():
        variable, optimizer = tf.Variable(tf.ones([1], dtype)), SGD(1e-30)
        optimizer.build([variable])
    step = tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.constant([large], dtype)], [variable])))
    step()
    assert variable.numpy()[0] < 0
    assert skipped(strategy) == 0


def test_what_a_codec_makes_infinite_is_skipped(start: Start) -> None:
    strategy = start(pservers=1, on_nonfinite="skip", compression="float16")
    with strategy.scope():
        variable, optimizer = tf.Variable(tf.zeros([8192])), SGD(1.0)
        optimizer.build([variable])
    step = tf.function(lambda size: strategy.run(lambda: optimizer.apply([tf.fill([8192], size)], [variable])))
    for size in (1.0, 7e4, 2.0):
        step(tf.constant(size))
    assert set(variable.numpy()) == {-3.0}
    assert skipped(strategy) == 1


@pytest.mark.parametrize("traced", [False, True])
def test_loops_outside_of_run_skip_too(traced: bool, start: Start) -> None:
    strategy = start(on_nonfinite="skip")
    with strategy.scope():
        variable, optimizer = keras.Variable([1.0, 2.0]), SGD(0.5, momentum=0.5)

    def step(factor: Value) -> None:
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(variable.value)
        optimizer.apply([tape.gradient(loss, variable.value)], [variable])

    for factor in (1.0, np.nan, np.inf, 1.0):
        (tf.function(step) if traced else step)(tf.constant(factor))
    assert variable.numpy().tolist() == [-0.25, 0.75]
    assert (skipped(strategy), int(optimizer.iterations.numpy())) == (2, 2)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer")
def test_several_optimizers_in_one_skip_together(start: Start) -> None:
    strategy = start(on_nonfinite="skip")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3, name="one"), keras.layers.Dense(2, name="two")]
        )
        optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(SGD(0.2), {".*one.*": SGD(0.1)}))
        optimizer.build(model.trainable_variables)
    before = model.get_weights()

    @tf.function
    def step(last: Value) -> None:
        def apply() -> None:
            *gradients, end = [tf.ones(each.shape) for each in model.trainable_variables]
            optimizer.apply([*gradients, end * last], model.trainable_variables)

        strategy.run(apply)

    step(tf.constant(np.nan))
    assert all(np.array_equal(mine, old) for mine, old in zip(model.get_weights(), before, strict=True))
    step(tf.constant(1.0))
    assert not any(np.array_equal(mine, old) for mine, old in zip(model.get_weights(), before, strict=True))
    assert (skipped(strategy), int(optimizer.iterations.numpy())) == (1, 1)


def test_skipped_steps_are_in_the_report_and_the_log(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    strategy = start(on_nonfinite="skip")
    model, x, y = compiled(strategy, Adam())
    fit(model, x, y, epochs=3)
    assert skipped(strategy) == 3
    report = strategy.report()
    assert report.skipped_steps == 3
    assert "steps skipped because of gradients that were not finite: 3 so far" in str(report)
    lines = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(lines) == 3
    assert re.search(r"the gradient of \S+/kernel is not finite on rank 0 \(3 so far; docs/contract.md", lines[-1])
