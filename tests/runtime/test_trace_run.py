"""Captures of real training: what is in them for each way to train, and that they change nothing."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import training
from recorded import captured
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tfps
from tests.strategy.test_overlap import CONFIG, LAYERS, UNITS, Watched, fit
from tfps.graph.timestamps import Timestamps
from tfps.runtime import trace_run
from tfps.runtime.step_spans import StepSpans
from tfps.runtime.transfers import DeferredUpdate
from tfps.trace.capture import Capture, Span
from tfps.trace.step_times import clip, total, union
from tfps.trace.summary import summarize
from tfps.types import Argument, Array, Logs, Options, Structure, Value


def by_kind(capture: Capture, step: int | None = None) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in capture.spans:
        if step in (None, span.step):
            found[span.kind].append(span)
    return found


def compiled(strategy: tfps.Strategy | None, **options: Argument) -> tuple[keras.Model, Array, Array]:
    with strategy.scope() if strategy else contextlib.nullcontext():
        model, x, y = training.batch_normalization() if options.pop("images", False) else training.mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(options.pop("optimizer", keras.optimizers.Adam)(), loss, **options)
        model.optimizer.build(model.trainable_variables)
    return model, x, y


def check_step(capture: Capture, step: int) -> None:
    """A step has all its spans, in order."""
    kinds = by_kind(capture, step)
    (one,) = kinds["step"]
    (forward,), (backward,) = kinds["forward"], kinds["backward"]
    assert one.begin_ns <= forward.begin_ns <= forward.end_ns == backward.begin_ns <= backward.end_ns == one.end_ns
    deferred = {number for number, bucket in enumerate(capture.buckets) if bucket.variables}
    ready = {span.bucket: span for span in kinds["ready"] if span.bucket in deferred}
    updates = {span.bucket: span for span in kinds["update"]}
    assert ready.keys() == updates.keys() == deferred
    for bucket, span in ready.items():
        assert forward.end_ns <= span.begin_ns <= one.end_ns, "gradients are of the backward pass"
        assert updates[bucket].begin_ns >= span.begin_ns
        assert span.nbytes == capture.buckets[bucket].nbytes
    waited = [span for span in kinds["gate"] if span.bucket in deferred]
    for gate in waited:
        assert one.end_ns <= gate.begin_ns, "it waits for this step's update in a later one"
        assert updates[gate.bucket].begin_ns <= gate.end_ns <= updates[gate.bucket].end_ns + 1_000_000


def test_a_capture_that_is_lost_with_a_pserver_costs_no_training(
    cluster: jobs.Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [cluster.pserver(1) for _ in range(2)]
    strategy = tfps.Strategy([server.address for server in servers], config=tfps.Config(min_workers=1))
    cluster.callback(strategy.close)
    model, x, y = compiled(strategy)

    def end(batch: int, logs: Logs) -> None:
        if batch == 3:
            servers[0].stop(0)

    ends = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    model.fit(x, y, epochs=1, verbose=0, callbacks=[tfps.callbacks.Trace(tmp_path, steps=(2, 6)), ends])
    assert "is lost: " in caplog.text
    assert not list(tmp_path.glob("plugins/tfps/*"))
    model.fit(x, y, epochs=1, verbose=0)


@pytest.mark.parametrize(
    ("depth", "options"),
    [(2, {}), (0, {}), (2, {"steps_per_execution": 4}), (2, {"images": True})],
    ids=["plain", "nothing staged", "several steps per execution", "batch normalization"],
)
def test_fit_records_every_step_of_the_window_and_no_other(
    depth: int, options: Options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = tfps.Strategy(config=tfps.Config(staging_depth=depth))
    model, x, y = compiled(strategy, **options)
    with caplog.at_level(logging.INFO, "tfps"):
        # Ten batches per epoch: the window lies over its end.
        model.fit(x, y, batch_size=32, epochs=2, verbose=0, callbacks=[tfps.callbacks.Trace(tmp_path, steps=(7, 12))])
    strategy.close()
    capture = captured(tmp_path)
    assert capture.steps == (7, 8, 9, 10, 11, 12)
    for step in capture.steps:
        check_step(capture, step)
    kinds = by_kind(capture)
    assert kinds["staging"] or not depth
    if depth and "steps_per_execution" not in options:
        (before,), (first,) = (by_kind(capture, step)["step"] for step in (9, 10))
        staged_ns = min(one.end_ns for one in kinds["staging"] if one.begin_ns > before.end_ns)
        if staged_ns > first.begin_ns + 1_000_000:  # unless the step was not there before its batch
            assert by_kind(capture, 10)["input"], "the first batch of an epoch is waited for"
    assert sum(len(bucket.variables) for bucket in capture.buckets) == len(model.trainable_variables)
    steps = sorted(kinds["step"])
    assert all(before.end_ns <= after.begin_ns for before, after in itertools.pairwise(steps))
    assert summarize(capture).workers == 1
    assert f"recorded 6 steps, 7 to 12: {len(capture.spans)} spans of 1 worker," in caplog.text
    assert list(tmp_path.glob(f"plugins/profile/{capture.name}/tfps.xplane.pb"))


def test_accumulation_has_a_step_per_update_and_eager_fit_has_steps_as_a_whole(
    remote: tfps.Strategy, tmp_path: Path
) -> None:
    model, x, y = compiled(remote, optimizer=lambda: keras.optimizers.Adam(gradient_accumulation_steps=2))
    with remote.trace(tmp_path / "accumulated"):
        model.fit(x, y, batch_size=32, epochs=1, verbose=0)
    capture = captured(tmp_path / "accumulated")
    assert capture.steps == (0, 1, 2, 3, 4)
    for step in capture.steps:
        check_step(capture, step)
    assert by_kind(capture)["gate"], "reads are noted around the branch that sends"

    model, x, y = compiled(remote, run_eagerly=True)
    with remote.trace(tmp_path / "eager"):
        model.fit(x[:96], y[:96], batch_size=32, verbose=0)
    kinds = by_kind(captured(tmp_path / "eager"))
    assert len(kinds["step"]) == len(kinds["forward"]) == 3
    for whole in kinds["step"]:
        within = [one for one in kinds["ready"] if whole.begin_ns <= one.begin_ns <= whole.end_ns]
        assert len(within) == len(model.trainable_variables)
        waited = [one for one in kinds["gate"] if whole.begin_ns <= one.begin_ns and one.end_ns <= whole.end_ns]
        assert len(waited) == len(within), "each sum is waited for"
    assert {"queued", "wire", "aggregate", "reply_queued", "reply_wire"} <= kinds.keys()


def test_a_custom_loop_is_recorded_with_the_wait_for_its_batches(tmp_path: Path) -> None:
    strategy = tfps.Strategy()
    model, x, y = compiled(strategy)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    @tf.function
    def train(batch: Structure) -> None:
        def step(x: Value, y: Value) -> None:
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            variables = model.trainable_variables
            model.optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))

        strategy.run(step, args=batch)

    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(64))
    for batch in batches:
        train(batch)
    with strategy.trace(tmp_path, name="loop"):
        for batch in batches:
            train(batch)
    capture = captured(tmp_path)
    assert capture.name == "loop"
    assert capture.steps == (5, 6, 7, 8, 9)
    kinds = by_kind(capture)
    for step in capture.steps:
        check_step(capture, step)
    asked = [one for one in kinds["input"] if one.step == -1]
    assert len(asked) == 6, "one for each step and one for the batch that does not exist"
    assert by_kind(capture, 5)["step"][0].begin_ns == asked[0].begin_ns, "the step begins when its batch is asked for"
    with strategy.trace(tmp_path, name="loop"):
        train(batch)
    assert (tmp_path / "plugins" / "tfps" / "loop-2.trace.json.gz").exists(), "no capture is written over"
    strategy.close()


def note_what_is_wanted(monkeypatch: pytest.MonkeyPatch, seen: list[tuple[str, str]]) -> None:
    """From now on, steps add ("wanted", unique id of a variable) to `seen` when they have noted that they want it."""
    read = Timestamps._read

    def watched(timestamps: Timestamps, variables: Sequence[str]) -> tuple[list[Value], int]:
        notes, number = read(timestamps, variables)

        def say(at: Array) -> Array:
            seen.append(("wanted", variables[number]))
            return at

        if notes:
            notes[0] = tf.numpy_function(say, notes[:1], tf.float64, stateful=False)
            notes[0].set_shape([])
        return notes, number

    monkeypatch.setattr(Timestamps, "_read", watched)


def test_a_gate_is_seen_where_a_reply_was_late_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with companion.strategy_with_companion(monkeypatch, CONFIG) as (strategy, other):
        seen: list[tuple[str, str]] = []
        note_what_is_wanted(monkeypatch, seen)
        with strategy.scope():
            layers = [Watched(number, lambda layer: None) for number in range(LAYERS)]
            model = keras.Sequential([keras.layers.Input((UNITS,)), *layers])
            model.compile("sgd", "mse", jit_compile=False)
        fit(model, 1)
        assert strategy._runtime.settle(jobs.DEADLINE_S)  # and noted: nothing is waited for in the next step
        late = max(other.specs, key=lambda spec: spec.priority)
        with strategy.trace(tmp_path):
            other.holds = lambda spec: spec is late
            trainer = threading.Thread(target=fit, args=(model, 2))
            trainer.start()
            assert other.wait_held()
            # With that of `fit(1)` the third forward pass: it has come as far as it may.
            last = ("wanted", model.trainable_variables[-1].value._unique_id)
            jobs.poll(lambda: seen.count(last) == 3)
            released_ns = strategy._runtime.recorder.clock()
            other.release()
            trainer.join(jobs.DEADLINE_S)
        capture = captured(tmp_path)
        assert capture.steps == (1, 2)
        gates = [one for one in by_kind(capture)["gate"] if capture.buckets[one.bucket].variables]
        assert {gate.step for gate in gates} == {1}, "the first step found its variables updated"
        (gate,) = [gate for gate in gates if capture.buckets[gate.bucket].name == late.name]
        assert gate.begin_ns < released_ns < gate.end_ns
        assert capture.variable_name(gate) == late.name
        assert (gate.priority, gate.rank) == (late.priority, 0)
        assert all(one.end_ns < gate.end_ns for one in gates if one is not gate)


def test_training_ends_bitwise_the_same_recorded_or_not_and_in_plain_keras(tmp_path: Path) -> None:
    ends = []
    for how in ("recorded", "not recorded", "plain"):
        keras.utils.set_random_seed(1)
        strategy = None if how == "plain" else tfps.Strategy()
        model, x, y = compiled(strategy, images=True)
        trace = [tfps.callbacks.Trace(tmp_path, steps=(2, 15))] if how == "recorded" else []
        model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False, callbacks=trace)
        ends.append(
            [weight.tobytes() for weight in [*model.get_weights(), *map(np.asarray, model.optimizer.variables)]]
        )
        if strategy is not None:
            strategy.close()
    assert captured(tmp_path).steps == tuple(range(2, 16))
    assert ends[0] == ends[1] == ends[2]


def test_the_summary_counts_what_gates_were_waited_for_within_steps(remote: tfps.Strategy, tmp_path: Path) -> None:
    model, x, y = compiled(remote)
    with remote.trace(tmp_path):
        model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    capture = captured(tmp_path)
    gates = union((one.begin_ns, one.end_ns) for one in by_kind(capture)["gate"])
    per_step = [total(clip(gates, one.begin_ns, one.end_ns)) / 1e9 for one in by_kind(capture)["step"]]
    assert sum(per_step) > 0
    assert summarize(capture).totals.exposed_ns / len(per_step) / 1e9 == pytest.approx(np.mean(per_step), rel=0.01)


def test_an_unchanged_program_is_recorded_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TFPS_TRACE", f"{tmp_path}:3-5")
    strategy = tfps.Strategy()
    other = tfps.Strategy()  # of the first strategy only
    for each in (other, strategy):
        model, x, y = compiled(each)
        model.fit(x, y, batch_size=32, epochs=1, verbose=0)
        each.close()
    capture = captured(tmp_path)
    assert capture.steps == (3, 4, 5)
    for step in capture.steps:
        check_step(capture, step)
    assert list(tmp_path.glob("plugins/profile/*/tfps.xplane.pb"))


def test_a_capture_asked_for_by_the_environment_has_updates_that_are_noted_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TFPS_TRACE", f"{tmp_path}:3-5")
    strategy = tfps.Strategy(config=tfps.Config(slice_bytes=9216))  # two buckets: with one nothing comes meanwhile
    runtime, noted = strategy._runtime, StepSpans.updated

    def late(spans: StepSpans, begin_ns: int, end_ns: int, transfer: DeferredUpdate, step: int) -> None:
        if step == 5 and transfer.spec.priority:  # all gates are open, so that step 6 can be sent
            jobs.poll(lambda: runtime.spans.counted == 7)
            threading.Event().wait(0.2)  # nothing should happen
        noted(spans, begin_ns, end_ns, transfer, step)

    monkeypatch.setattr(StepSpans, "updated", late)
    model, x, y = compiled(strategy)
    model.fit(x, y, batch_size=32, epochs=1, verbose=0)
    strategy.close()
    check_step(captured(tmp_path), 5)


def test_an_environment_that_asks_for_more_than_there_is_gets_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for directory, asked, steps in ((tmp_path, "8-20", (8, 9)), (tmp_path / "none", "10-60", None)):
        monkeypatch.setenv("TFPS_TRACE", f"{directory}:{asked}")
        strategy = tfps.Strategy()
        model, x, y = compiled(strategy)
        model.fit(x, y, batch_size=32, epochs=1, verbose=0)
        strategy.close()
        assert steps is None or captured(tmp_path).steps == steps
    assert "TFPS_TRACE asks for the steps from 10 on, but there were only 10" in caplog.text
    assert not (tmp_path / "none").exists()
    monkeypatch.setenv("TFPS_TRACE", "10-20")
    with pytest.raises(tfps.ConfigError, match=r"TFPS_TRACE must be DIRECTORY:FIRST-LAST .* got '10-20'"):
        tfps.Strategy()


def test_the_profile_of_the_same_window_is_in_the_same_file_on_the_same_clock(tmp_path: Path) -> None:
    strategy = tfps.Strategy()
    model, x, y = compiled(strategy)
    model.fit(x, y, batch_size=32, verbose=0)
    with strategy.trace(tmp_path, name="both"):
        tf.profiler.experimental.start(str(tmp_path))
        model.fit(x, y, batch_size=32, verbose=0)
        tf.profiler.experimental.stop()
    strategy.close()
    capture = captured(tmp_path)
    space = xplane_pb2.XSpace.FromString((tmp_path / "plugins/profile/both/tfps.xplane.pb").read_bytes())
    planes = {plane.name: plane for plane in space.planes}
    (worker,) = [plane for name, plane in planes.items() if name.startswith("/device:CUSTOM")]
    assert worker.name == "/device:CUSTOM:worker0"
    assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 2, "TensorFlow's own stays"
    # MatMul of the forward pass lies in a step of the capture: the clocks are the same within a millisecond.
    names = {key: made.name for key, made in planes["/host:CPU"].event_metadata.items()}
    found = [
        line.timestamp_ns + event.offset_ps // 1000
        for line in planes["/host:CPU"].lines
        for event in line.events
        if "MatMul" in names[event.metadata_id]
    ]
    steps = [one for one in capture.spans if one.kind == "step"]
    within = [any(one.begin_ns - 1e6 <= at <= one.end_ns + 1e6 for one in steps) for at in found]
    assert len(found) >= 10
    assert sum(within) > 0.8 * len(within)


def test_what_cannot_be_recorded_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = tfps.Strategy()
    model, x, y = compiled(strategy)
    with strategy.trace(tmp_path), pytest.raises(tfps.TfpsError, match="being recorded"), strategy.trace(tmp_path):
        pass
    with pytest.raises(tfps.ConfigError, match=r"must be a file name, .* got 'a/b'"), strategy.trace(tmp_path, "a/b"):
        pass
    model.fit(x, y, batch_size=32, verbose=0, callbacks=[tfps.callbacks.Trace(tmp_path, steps=(50, 60))])
    assert "nothing was recorded: Trace asks for the batches from 50 on, but fit had only 10" in caplog.text
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    model.fit(x, y, batch_size=32, verbose=0, callbacks=[tfps.callbacks.Trace(blocked, steps=(0, 2))])
    assert "the trace could not be written: " in caplog.text, "which does not end the training"

    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, verbose=0, callbacks=[tfps.callbacks.Trace(tmp_path / "lost", steps=(0, 5)), Interrupts()])
    model.fit(x, y, verbose=0, callbacks=[tfps.callbacks.Trace(tmp_path / "after", steps=(0, 2))])
    assert len(captured(tmp_path / "after").steps) == 3
    assert not (tmp_path / "lost").exists()
    strategy.close()
    for steps in ((3, 2), (-1, 2), 5, (1, 2, 3), (0.0, 1)):
        with pytest.raises(tfps.ConfigError, match=r"steps of tfps.callbacks.Trace must be the first and the last"):
            tfps.callbacks.Trace(tmp_path, steps=steps)  # type: ignore[arg-type]
    model, x, y = compiled(None)
    with pytest.raises(tfps.ConfigError, match=r"tfps.callbacks.Trace needs a model that was built in"):
        model.fit(x, y, verbose=0, callbacks=[tfps.callbacks.Trace(tmp_path)])


@pytest.fixture(autouse=True)
def _forget_requests() -> Iterator[None]:
    yield
    trace_run._requests.clear()
