"""What a program may do under the strategy, and what it is told when it may not."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import training
from keras_versions import KERAS_3_8
from training import compiled

import tfps
from tfps.graph.ops import outside
from tfps.types import Argument, Batches, Options, Structure, Value


def test_the_embedded_strategy_is_one_worker(strategy: tfps.Strategy) -> None:
    assert (strategy.rank, strategy.num_workers, strategy.pservers, strategy.num_replicas_in_sync) == (0, 1, (), 1)


def test_a_report_needs_steps_and_then_explains_them(strategy: tfps.Strategy, remote: tfps.Strategy) -> None:
    for each in (strategy, remote):
        with pytest.raises(tfps.TfpsError, match="at least 4 training steps"):
            each.report()
        model, x, y = compiled(each)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        model.get_weights()
        report = each.report()
        assert report.step_s == pytest.approx(report.compute_s + report.exposed_wait_s)
        assert sum(layer.nbytes for layer in report.layers) == 4 * model.count_params()
        assert f"limit: {report.limit}" in str(report)
    assert strategy.report().bytes_per_s == 0


def test_over_grpc_eager_steps_end_bitwise_equal_to_plain_keras(remote: tfps.Strategy) -> None:
    options: Options = {"run_eagerly": True, "epochs": 1}
    distributed = training.train(remote, keras.optimizers.Adam, training.embedding_sparse, **options)
    assert distributed == training.train(None, keras.optimizers.Adam, training.embedding_sparse, **options)


@pytest.mark.parametrize(
    "name",
    [
        *("SGD", "Adam", "Ftrl", "Muon", "ScheduleFreeAdamW"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("AdamW", "RMSprop", "Nadam", "Lion", "Lamb")),
    ],
)
def test_updates_of_dense_and_sparse_gradients_are_deferred(
    strategy: tfps.Strategy, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    if not hasattr(keras.optimizers, name) or (name == "Ftrl" and KERAS_3_8):
        pytest.skip("this Keras does not have it, or not with slots of the variables")
    with caplog.at_level(logging.WARNING, "tfps"):
        training.train(strategy, getattr(keras.optimizers, name), training.embedding_sparse, epochs=1)
    assert "runs inside the step" not in caplog.text
    assert strategy._runtime.update_buckets() > 0


def test_an_update_that_writes_a_foreign_variable_runs_in_the_step_and_says_so_once(
    strategy: tfps.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tfps"):
        training.train(strategy, keras.optimizers.Adafactor, epochs=1)
    assert caplog.text.count("runs inside the step") == 1
    assert strategy._runtime.update_buckets() == 0


def test_a_function_around_run_that_xla_compiles_is_refused_with_what_to_write(strategy: tfps.Strategy) -> None:
    step = tf.function(lambda: strategy.run(lambda: tf.constant(1.0)), jit_compile=True, autograph=False)
    with pytest.raises(tfps.UnsupportedError, match=r"jit_compile=False for it, and tfps\.Config\(xla='on'\)"):
        step()


def test_a_function_compiled_by_xla_inside_a_step_is_refused_by_variable(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        variable = tf.Variable([1.0], name="weights")
    doubled = tf.function(lambda: variable * 2.0, jit_compile=True, autograph=False)
    with pytest.raises(tfps.UnsupportedError, match=r"weights.*XLA"):
        tf.function(lambda: strategy.run(lambda: doubled()), autograph=False)()


def test_a_variable_of_another_strategy_is_refused_by_name(strategy: tfps.Strategy) -> None:
    other = tf.distribute.MirroredStrategy(["CPU:0"])
    with other.scope():
        foreign = tf.Variable([1.0], name="foreign")
    with strategy.scope():
        optimizer = keras.optimizers.SGD()

    def step() -> None:
        optimizer.apply([tf.constant([1.0])], [foreign])

    with pytest.raises((tfps.UnsupportedError, ValueError), match="foreign"):
        strategy.run(step)


def test_a_model_built_outside_the_scope_is_refused_by_variable(strategy: tfps.Strategy) -> None:
    model, x, y = training.mlp()
    with strategy.scope(), pytest.raises((tfps.UnsupportedError, ValueError), match="scope"):
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, y, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pservers": "host:1"}, "got 'host:1'; write"),
        ({"pservers": ["host"]}, "'host:port'"),
        ({"devices": "GPU:0"}, "devices must be a list"),
        ({"devices": []}, "devices must be a list"),
        ({"config": {"slice_bytes": 1}}, "config must be a tfps.Config"),
        ({"pservers": 2}, "pservers must be a list of 'host:port', got 2; .* tfps_launch --workers 2"),
        ({"pservers": tfps.Config()}, r"pservers must be .*; write tfps\.Strategy\(config=\.\.\.\)"),
        ({"devices": 2}, "devices must be a list such as .*, got 2"),
        ({"device": ["CPU:0"]}, "tfps.Strategy has no argument 'device'; did you mean 'devices'?"),
        ({"compresion": "int8"}, r"did you mean tfps\.Strategy\(config=tfps\.Config\(compression='int8'\)\)\?"),
        ({"workers": 2}, "tfps.Strategy has no argument 'workers'; it has pservers, devices, config"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Argument], message: str) -> None:
    with pytest.raises(tfps.ConfigError, match=message):
        tfps.Strategy(**arguments)


def test_a_setting_is_refused_with_where_it_belongs_whichever_it_is() -> None:
    for name in (field.name for field in dataclasses.fields(tfps.Config)):
        given: Options = {name: 7}
        with pytest.raises(tfps.ConfigError) as caught:
            tfps.Strategy(**given)
        assert str(caught.value) == (
            f"{name} is a field of tfps.Config: write tfps.Strategy(config=tfps.Config({name}=7))"
        )


def test_a_variable_fills_a_config_of_the_program_or_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TFPS_MIN_WORKERS", "1")
    monkeypatch.setenv("TFPS_CHECK_EVERY", "50")
    with caplog.at_level(logging.WARNING, "tfps"):
        for config in (None, tfps.Config(check_every=7), tfps.Config(check_every=7)):
            strategy = tfps.Strategy(config=config)
            strategy.close()
            assert strategy.config.min_workers == 1
    assert caplog.text.count("TFPS_CHECK_EVERY=50 has no effect: the program's config has check_every=7") == 1
    assert "TFPS_MIN_WORKERS" not in caplog.text


def test_data_that_each_worker_makes_for_itself_does_not_go_with_more_workers(cluster: jobs.Cluster) -> None:
    config = tfps.Config(min_workers=1, max_workers=2)
    strategy = tfps.Strategy(cluster.pservers(1, 1), config=config)
    cluster.callback(strategy.close)
    options, data = tf.data.Options(), tf.data.Dataset.range(4).batch(2)
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    assert [batch.numpy().tolist() for batch in strategy.experimental_distribute_dataset(data)] == [[0, 1], [2, 3]]
    for distribute in (
        lambda: strategy.experimental_distribute_dataset(data.with_options(options)),
        lambda: strategy.distribute_datasets_from_function(lambda _: data),
    ):
        with pytest.raises(tfps.UnsupportedError, match="does not work with max_workers: parts of each batch would be"):
            distribute()


def test_a_loop_inside_a_function_that_would_take_global_batches_whole_is_refused(cluster: jobs.Cluster) -> None:
    strategy = tfps.Strategy(cluster.pservers(1, 1), config=tfps.Config(min_workers=1, max_workers=2))
    cluster.callback(strategy.close)
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))

    def looped(batches: Batches) -> None:
        for batch in batches:
            tf.print(batch)

    for function, given in ((looped, [distributed]), (lambda: looped(distributed), [])):
        with pytest.raises(tfps.UnsupportedError, match=r"with min_workers take batches outside, or in model\.fit"):
            tf.function(function)(*given)


def test_no_pserver_at_an_address_is_an_error_within_the_deadline() -> None:
    with pytest.raises(tfps.ConnectError, match=r"127\.0\.0\.1:9"):
        tfps.Strategy(["127.0.0.1:9"], config=tfps.Config(connect_timeout_s=1))


def test_a_custom_loop_ends_bitwise_equal_to_one_device_strategy(remote: tfps.Strategy) -> None:
    def trained(strategy: tf.distribute.Strategy) -> list[bytes]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, x, y = training.mlp()
            optimizer = keras.optimizers.Adam()
            optimizer.build(model.trainable_variables)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
        losses = []

        def step(batch: Structure) -> Value:
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(batch[1], model(batch[0]), from_logits=True)
                loss = tf.reduce_mean(losses)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        @tf.function
        def distributed_step(batch: Structure) -> Value:
            return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

        for batch in strategy.experimental_distribute_dataset(data):
            losses.append(distributed_step(batch).numpy())
        return [np.asarray(value).tobytes() for value in [*model.get_weights(), *losses]]

    assert trained(remote) == trained(tf.distribute.OneDeviceStrategy("CPU:0"))


def test_a_reduced_gradient_that_the_program_computes_with_is_pulled(remote: tfps.Strategy) -> None:
    with remote.scope():
        variable = tf.Variable([3.0, 4.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    @tf.function
    def step() -> Value:
        def in_replica() -> Value:
            (reduced,) = tf.distribute.get_replica_context().all_reduce("SUM", [variable * 1.0])
            variable.assign_sub(reduced / tf.norm(reduced))
            return tf.norm(reduced)

        return remote.run(in_replica)

    assert step().numpy() == 5.0
    np.testing.assert_allclose(variable.numpy(), [2.4, 3.2], rtol=1e-6)


def test_nan_gradients_arrive_as_arithmetic_passes_them_on(remote: tfps.Strategy) -> None:
    with remote.scope():
        variable = tf.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
    remote.run(tf.function(lambda: optimizer.apply([tf.constant([np.nan, 1.0])], [variable])))
    assert np.isnan(variable.numpy()[0])
    assert variable.numpy()[1] == 1.0


def test_fit_again_recompile_and_a_second_model_under_one_strategy(remote: tfps.Strategy) -> None:
    first, x, y = compiled(remote)
    second, _, _ = compiled(remote, "sgd")
    for model in (first, second, first):
        loss = [model.fit(x, y, verbose=0, epochs=2, shuffle=False).history["loss"] for _ in range(2)]
        assert loss[1][-1] < loss[0][0]
    with remote.scope():
        first.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    first.fit(x, y, verbose=0)


def test_a_forgotten_step_function_frees_its_transfers(strategy: tfps.Strategy) -> None:
    def train() -> list[weakref.ref[object]]:
        with strategy.scope():
            variable = tf.Variable([1.0, 2.0])
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([variable])
        before = set(strategy._runtime._transfers)

        @tf.function(autograph=False)
        def step() -> None:
            # Sparse, because TensorFlow itself keeps the graph of every dense all_reduce (in its registry of
            # gradients).
            gradient = tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([2]))
            strategy.run(lambda: optimizer.apply([gradient], [variable]))

        step()
        variable.numpy()
        transfers = strategy._runtime._transfers
        return [weakref.ref(transfers[identity]) for identity in transfers.keys() - before]

    first = train()
    assert len(first) == 1

    def forgotten() -> bool:
        gc.collect()  # does nothing while another thread collects
        train()  # the pump forgets what is gone when it is idle
        return first[0]() is None

    jobs.poll(forgotten)


def test_evaluate_predict_and_checkpoint_read_current_values(remote: tfps.Strategy, tmp_path: Path) -> None:
    model, x, y = compiled(remote, metrics=["accuracy"])
    model.fit(x, y, epochs=20, verbose=0)
    _, accuracy = model.evaluate(x, y, verbose=0)
    predicted = (model.predict(x, verbose=0).argmax(1) == y).mean()
    assert accuracy == pytest.approx(predicted)
    assert accuracy > 0.9
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    for mine, saved in zip(model.get_weights(), restored.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, saved)


def test_two_updates_of_one_variable_apply_one_after_the_other(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def step() -> None:
        def in_replica() -> None:
            for gradient in tf.distribute.get_replica_context().all_reduce("SUM", [tf.ones([2]), tf.fill([2], 2.0)]):
                strategy.extended.update(variable, lambda v, g: v.assign(v * g + 1.0), args=(gradient,))

        strategy.run(in_replica)

    step()
    np.testing.assert_array_equal(variable.numpy(), [(1 * 1 + 1) * 2 + 1, (2 * 1 + 1) * 2 + 1])


def test_a_gradient_of_another_shape_is_applied_in_the_step(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])

    @tf.function(autograph=False)
    def step() -> None:
        def in_replica() -> None:
            (scalar,) = tf.distribute.get_replica_context().all_reduce("SUM", [tf.constant(1.0)])
            strategy.extended.update(variable, lambda v, g: v.assign_sub(g * tf.ones([2])), args=(scalar,))

        strategy.run(in_replica)

    step()
    np.testing.assert_array_equal(variable.numpy(), [0.0, 1.0])


def test_predicting_in_one_thread_leaves_the_datasets_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with companion.strategy_with_companion(monkeypatch, tfps.Config(step_timeout_s=30)) as (strategy, _):
        data = tf.data.Dataset.range(4).batch(2)
        with ThreadPoolExecutor(1) as other, strategy.extended.sharding.off():
            mine = strategy.experimental_distribute_dataset(data)
            theirs = other.submit(strategy.experimental_distribute_dataset, data).result(jobs.DEADLINE_S)
        assert [batch.shape for batch in mine.sources[0]] == [2, 2]
        assert [batch.shape for batch in theirs.sources[0]] == [1, 1]


def test_what_updates_keep_of_the_optimizer_is_read_once_per_step() -> None:
    strategy = tfps.Strategy(config=tfps.Config(slice_bytes=1024))
    model, x, y = compiled(strategy, optimizer="adam")
    model.fit(x, y, batch_size=32, verbose=0)
    assert strategy._runtime.update_buckets() > 2
    (graph,) = (made for ref in strategy.extended.scheduler.graphs.values() if (made := ref()) is not None)
    rate = model.optimizer.learning_rate
    handle = strategy.experimental_local_results(rate.value)[0].handle
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp" and outside(op.inputs[0]) is handle]
    strategy.close()
    assert len(reads) <= 2  # TensorFlow's conversion of a variable reads it twice
