"""Which gradients are compressed, over real pservers with one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.compression import LEAST_BYTES
from tfps.errors import TfpsError
from tfps.pserver.server import ParameterServer
from tfps.types import Argument

Start = Callable[..., tfps.Strategy]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts strategies with one worker and two pservers."""
    servers: list[ParameterServer] = []
    strategies: list[tfps.Strategy] = []

    def started(**config: Argument) -> tfps.Strategy:
        servers.extend(ParameterServer("127.0.0.1", 0, workers=1) for _ in range(2))
        addresses = [server.address for server in servers[-2:]]
        strategies.append(tfps.Strategy(addresses, config=tfps.Config(**{"slice_bytes": 8192, **config})))
        return strategies[-1]

    yield started
    for strategy in strategies:
        strategy.close()
    for server in servers:
        server.stop()


def codecs_of(strategy: tfps.Strategy) -> dict[str, str]:
    """The codec of each variable's bucket."""
    worker = strategy._runtime.exchange
    found: dict[str, str] = {}
    for bucket in worker._buckets:  # type: ignore[attr-defined]
        if bucket.spec.kind == "sum" and not bucket.spec.occasional:
            found |= {name.split("/", 1)[-1]: str(bucket.spec.codec or "none") for name in bucket.spec.names}
    return found


def fitted(strategy: tfps.Strategy, *layers: keras.layers.Layer, epochs: int = 1, **options: Argument) -> keras.Model:
    x, y = training.digits()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), *layers])
        options.setdefault("optimizer", keras.optimizers.SGD(0.05))
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0, shuffle=False)
    return model


def wide(name: str, **options: Argument) -> keras.layers.Layer:
    return keras.layers.Dense(128, activation="relu", name=name, **options)


def test_large_float_buckets_are_compressed_others_and_exceptions_are_not(start: Start) -> None:
    strategy = start(compression={"*": "int8", "second/*": "bfloat16", "third/kernel": "none"})
    fitted(strategy, wide("first"), wide("second"), wide("third"), keras.layers.Dense(10, name="last"))
    codecs = codecs_of(strategy)
    assert codecs["first/kernel"] == "int8"
    assert codecs["second/kernel"] == "bfloat16"
    assert codecs["third/kernel"] == "none"
    assert codecs["last/bias"] == "none" or codecs["last/bias"] == codecs["first/kernel"]  # alone it is too small
    for bucket in strategy._runtime.exchange._buckets:  # type: ignore[attr-defined]
        assert bucket.spec.codec is None or bucket.spec.nbytes >= LEAST_BYTES


def test_sparse_double_and_integer_values_travel_as_they_are(start: Start) -> None:
    strategy = start(compression="int8")
    layers = [
        keras.layers.Embedding(5000, 8, name="words"),
        keras.layers.Flatten(),
        wide("double", dtype="float64"),
        keras.layers.Dense(10, name="last"),
    ]
    fitted(strategy, *layers)
    codecs = codecs_of(strategy)
    assert codecs["double/kernel"] == "none"
    assert "words/embeddings" not in codecs  # gathered
    total = strategy.reduce("SUM", tf.ones([10_000]), axis=None)
    assert total.numpy().tolist() == [1.0] * 10_000


@pytest.mark.long
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_half_precision_gradients_travel_as_they_are_in_their_own_codec(start: Start, half: str) -> None:
    """Then nothing is rounded: with one worker, the weights are bitwise those of no compression."""
    ends = []
    for compression in ("none", half):
        keras.utils.set_random_seed(3)
        strategy = start(compression=compression)
        model = fitted(strategy, wide("first", dtype=half), keras.layers.Dense(10, dtype=half, name="last"))
        ends.append(b"".join(np.asarray(weight).tobytes() for weight in model.get_weights()))
        assert codecs_of(strategy)["first/kernel"] == compression
    assert ends[0] == ends[1]


def test_without_pservers_nothing_is_compressed() -> None:
    ends = []
    for compression in ("none", "onebit"):
        keras.utils.set_random_seed(3)
        strategy = tfps.Strategy(config=tfps.Config(compression=compression))
        ends.append([each.tobytes() for each in fitted(strategy, wide("first")).get_weights()])
        strategy.close()
    assert ends[0] == ends[1]


def test_clipping_is_no_obstacle(start: Start) -> None:
    strategy = start(compression="int8")
    fitted(strategy, wide("first"), optimizer=keras.optimizers.SGD(0.05, global_clipnorm=1.0))
    assert codecs_of(strategy)["first/kernel"] == "int8"


def test_sums_that_the_program_computes_with_travel_as_they_are_and_that_is_said(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = start(compression="onebit")
    items = LEAST_BYTES // 4

    def total() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return 2.0 * context.all_reduce("SUM", tf.range(items, dtype=tf.float32))

    found = tf.function(lambda: strategy.run(total))()
    assert found.numpy().tolist() == [2.0 * each for each in range(items)]
    said = [record.getMessage() for record in caplog.records if "is not compressed" in record.getMessage()]
    assert len(said) == 1
    assert f"tensor ({items},) float32 is not compressed: the program computes with the sum" in said[0]


def test_a_report_has_both_raw_and_sent_bytes(start: Start) -> None:
    strategy = start(compression="int8")
    fitted(strategy, wide("first"), wide("second"), epochs=2)
    report = strategy.report()
    assert 0.25 < report.sent_bytes / report.step_bytes < 0.3
    assert report.received_bytes == report.sent_bytes
    assert "compressed: a step sends" in str(report)
    strategy = start(compression="int8", mode="async", update="server")  # parameters come back as they are
    fitted(strategy, wide("first"), wide("second"), epochs=2)
    report = strategy.report()
    assert 0.25 < report.sent_bytes / report.step_bytes < 0.3
    assert report.received_bytes == report.step_bytes
    strategy = start()
    fitted(strategy, wide("first"), wide("second"), epochs=2)
    report = strategy.report()
    assert report.sent_bytes == report.step_bytes
    assert "compressed" not in str(report)


def test_a_gradient_that_is_not_finite_is_seen(start: Start) -> None:
    for codec in ("bfloat16", "float16", "int8", "topk:0.01", "onebit"):
        strategy = start(compression=codec)
        x, y = training.digits()
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((64,)), wide("first"), keras.layers.Dense(10)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x[0, 0] = np.nan
        model.fit(x[:64], y[:64], batch_size=64, epochs=1, verbose=0)
        assert np.isnan(model.get_weights()[0]).any(), codec


def test_restoring_one_model_leaves_the_residuals_of_another_alone(start: Start, tmp_path: Path) -> None:
    strategy = start(compression="int8")
    models = [fitted(strategy, keras.layers.Dense(128), keras.layers.Dense(10)) for _ in range(2)]
    variables = [[each.value for each in model.trainable_variables] for model in models]
    checkpoint = tf.train.Checkpoint(optimizer=models[1].optimizer)
    path = checkpoint.write(str(tmp_path / "second"))
    before = [strategy.extended.compressing.residuals(each) for each in variables]
    assert all(np.abs(held[0]).max() > 0 for held in before)
    models[1].fit(*training.digits(), batch_size=64, verbose=0)
    checkpoint.read(path).assert_consumed()
    after = [strategy.extended.compressing.residuals(each) for each in variables]
    for own, others in zip(before, after, strict=True):
        np.testing.assert_equal(own, others)


def test_what_is_restored_after_layers_were_frozen_for_a_while_is_sent_as_in_a_new_job(
    start: Start, tmp_path: Path
) -> None:
    """Training them again leads back to the buckets of before, and those of meanwhile send nothing any more."""
    path, ends = str(tmp_path / "checkpoint"), list[list[bytes]]()
    for frozen in ((False, True, False), (False,)):
        strategy = start(compression="topk:0.02", slice_bytes=1 << 20)
        with strategy.scope():
            hidden = [keras.layers.Dense(80, activation="tanh") for _ in range(3)]
            model = keras.Sequential([keras.layers.Input((64,)), *hidden, keras.layers.Dense(10)])
            optimizer = keras.optimizers.SGD(0.05)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        for each in frozen:
            hidden[0].trainable = not each
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            model.fit(*training.digits(), batch_size=64, verbose=0, shuffle=False)
        path = path if ends else checkpoint.write(path)
        checkpoint.read(path).assert_consumed()
        model.fit(*training.digits(), batch_size=64, verbose=0, shuffle=False)
        ends.append([weight.tobytes() for weight in model.get_weights()])
    assert ends[0] == ends[1]


def test_a_strategy_with_other_compression_is_refused_while_one_is_open(start: Start) -> None:
    strategy = start(compression="int8")
    with pytest.raises(TfpsError, match="other settings"):
        tfps.Strategy(list(strategy.pservers), config=tfps.Config(compression="onebit", slice_bytes=8192))
