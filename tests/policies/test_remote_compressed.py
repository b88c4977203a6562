"""Update on the server with compression, over real pservers with one worker: variables are what pservers have shown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.pserver.server import ParameterServer
from tfps.types import Argument, Array, Model, Options, Value

Start = Callable[..., tfps.Strategy]
FIT: Options = {"batch_size": 64, "verbose": 0, "shuffle": False}


@contextlib.contextmanager
def started(compression: str, pservers: int = 2, **config: Argument) -> Iterator[tfps.Strategy]:
    """A strategy with one worker."""
    servers = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(pservers)]
    settings: Options = {"update": "server", "slice_bytes": 8192, **config}
    addresses = [server.address for server in servers]
    strategy = tfps.Strategy(addresses, config=tfps.Config(compression=compression, **settings))
    try:
        yield strategy
    finally:
        strategy.close()
        for server in servers:
            server.stop()


def compiled(
    strategy: tfps.Strategy, optimizer: keras.optimizers.Optimizer | None = None, units: int = 128
) -> tuple[Model, Array, Array]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, x, y = training.mlp(units)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer or keras.optimizers.Adam(), loss)
        model.optimizer.build(model.trainable_variables)
    return model, x, y


def kept(strategy: tfps.Strategy, variable: Value, number: int = 0) -> Array:
    """What the pservers have of a Keras variable: its parameters, or another array."""
    nbytes, served = variable.numpy().nbytes, variable.value.remote  # waits for updates under way
    found = strategy.extended.exchange.state.read(served.holder, number, served.begin, nbytes)
    return found.view(np.float32).reshape(variable.shape)


def is_compressed(strategy: tfps.Strategy, variable: Value) -> bool:
    return strategy.extended.exchange._buckets[variable.value.remote.holder].spec.codec is not None


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "codec", ["int8", pytest.param("bfloat16", marks=LONG), pytest.param("topk:0.05,*/bias=none", marks=LONG)]
)
def test_variables_are_bitwise_what_pservers_have_shown_and_pservers_are_ahead(codec: str) -> None:
    with started(codec) as strategy:
        model, x, y = compiled(strategy)
        for epochs in (1, 2):
            model.fit(x, y, epochs=epochs, **FIT)
            for variable in model.trainable_variables:
                compressed = is_compressed(strategy, variable)
                shown = kept(strategy, variable, 3 if compressed else 0)  # after the slots of Adam
                assert shown.tobytes() == variable.numpy().tobytes()
                assert (kept(strategy, variable) != variable.numpy()).any() == compressed
        assert is_compressed(strategy, model.layers[1].kernel)
        assert "topk" not in codec or not is_compressed(strategy, model.layers[1].bias)


@LONG
@pytest.mark.parametrize("codec", ["bfloat16", "float16"])
def test_with_16_bits_training_ends_close_to_that_without_compression(codec: str) -> None:
    ends = []
    for compression in ("none", codec):
        with started(compression) as strategy:
            model, x, y = compiled(strategy, keras.optimizers.SGD(0.05, momentum=0.9))
            model.fit(x, y, epochs=3, **FIT)
            ends.append(model.get_weights())
    for plain, compressed in zip(*ends, strict=True):
        assert np.abs(plain - compressed).max() < 0.01 * np.abs(plain).max()


@LONG
def test_what_pservers_have_moves_with_variables_that_come_in_other_buckets() -> None:
    with started("int8", slice_bytes="auto") as strategy:
        model, x, y = compiled(strategy, keras.optimizers.SGD(0.05), units=96)  # both in one bucket
        model.fit(x, y, **FIT)
        first, second = model.layers[0].kernel, model.layers[1].kernel
        assert first.value.remote.holder == second.value.remote.holder
        bucket, exact, shown = second.value.remote.holder, kept(strategy, second), second.numpy()
        optimizer, loss = model.optimizer, model.loss
        optimizer.learning_rate = 0.0  # so that steps change nothing but what is shown
        model.layers[0].trainable = False
        model.compile(optimizer, loss)
        model.fit(x, y, **FIT)
        assert second.value.remote.holder != bucket
        assert kept(strategy, second).tobytes() == exact.tobytes()
        assert np.abs(second.numpy() - exact).mean() < np.abs(shown - exact).mean()
        model.layers[0].trainable = True
        exacts = [kept(strategy, each) for each in (first, second)]
        model.compile(optimizer, loss, run_eagerly=True)  # travels as it is
        model.fit(x[:64], y[:64], **FIT)
        assert [first.numpy().tobytes(), second.numpy().tobytes()] == [each.tobytes() for each in exacts]
        model.compile(optimizer, loss)
        model.fit(x, y, **FIT)
        assert kept(strategy, first).tobytes() == first.numpy().tobytes() == exacts[0].tobytes()


@LONG
def test_what_the_program_assigns_replaces_what_pservers_have_of_that_variable() -> None:
    with started("int8") as strategy:
        model, x, y = compiled(strategy, keras.optimizers.SGD(0.05))
        model.fit(x, y, **FIT)
        first, second = model.layers[0].kernel, model.layers[1].kernel
        exact = kept(strategy, second)
        model.optimizer.learning_rate = 0.0
        first.assign(first * 2.0)
        value = first.numpy()
        model.fit(x[:64], y[:64], **FIT)
        assert value.tobytes() == first.numpy().tobytes() == kept(strategy, first).tobytes()
        assert kept(strategy, second).tobytes() == exact.tobytes()
        assert (second.numpy() != exact).any()


@pytest.mark.parametrize("codec", ["bfloat16", pytest.param("topk:0.05", marks=LONG)])
def test_a_checkpoint_goes_on_bitwise_also_with_other_pservers(codec: str, tmp_path: Path) -> None:
    def checkpoint(model: Model) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    def ends(model: Model) -> list[bytes]:
        return [np.asarray(each.numpy()).tobytes() for each in [*model.weights, *model.optimizer.variables]]

    with started(codec) as strategy:
        model, x, y = compiled(strategy)
        model.fit(x, y, **FIT)
        path = checkpoint(model).write(str(tmp_path / "checkpoint"))
        model.fit(x, y, **FIT)
        expected = ends(model)
        checkpoint(model).read(path).assert_consumed()
        model.fit(x, y, **FIT)
        assert ends(model) == expected
        checkpoint(model).read(path)
        again = checkpoint(model).write(str(tmp_path / "again"))  # before anything was pushed
    with started(codec, pservers=3) as strategy:
        model, x, y = compiled(strategy)
        checkpoint(model).read(again).assert_existing_objects_matched()
        model.fit(x, y, **FIT)
        assert ends(model) == expected
        checkpoint(model).read(path)
        model.layers[0].kernel.assign(model.layers[0].kernel * 0.5)
        model.optimizer.learning_rate = 0.0
        model.fit(x[:64], y[:64], **FIT)
        assert kept(strategy, model.layers[0].kernel).tobytes() == model.layers[0].kernel.numpy().tobytes()
        assert (kept(strategy, model.layers[1].kernel) != model.layers[1].kernel.numpy()).any()


@LONG
def test_workers_that_update_drop_what_pservers_had_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths: dict[str, str] = {}
    for update in ("server", "worker", "server"):
        with started("int8", update=update) as strategy:
            model, x, y = compiled(strategy, keras.optimizers.SGD(0.05, momentum=0.9))
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            for path in paths.values():
                checkpoint.read(path).expect_partial()
            model.fit(x, y, **FIT)
            paths[update] = checkpoint.write(str(tmp_path / update))
    said = [
        record.getMessage() for record in caplog.records if "beyond what workers had is dropped" in record.getMessage()
    ]
    assert len(said) == 2
    assert "kernel" in said[0]
