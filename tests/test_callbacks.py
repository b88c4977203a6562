"""What the callbacks write, for a worker with pservers and for one without."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jobs
import keras
import pytest
import tensorflow as tf
import training

import tfps
from tfps.callbacks import scalars

DOCS = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
STEPS = 10  # of an epoch


def written(log_dir: Path) -> dict[int, dict[str, float]]:
    """Scalars by step, as TensorFlow reads them back."""
    found: dict[int, dict[str, float]] = {}
    for file in sorted((log_dir / "tfps").glob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                found.setdefault(event.step, {})[value.tag] = value.simple_value
    return found


def fit(strategy: tfps.Strategy, *callbacks: keras.callbacks.Callback, epochs: int = 2) -> None:
    with strategy.scope():
        model, x, y = training.mlp()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=320 // STEPS, epochs=epochs, verbose=0, callbacks=list(callbacks))


def test_each_epoch_writes_what_the_report_says(remote: tfps.Strategy, tmp_path: Path) -> None:
    fit(remote, tfps.callbacks.Metrics(tmp_path))
    found = written(tmp_path)
    assert list(found) == [STEPS, 2 * STEPS]
    last = found[2 * STEPS]
    assert set(last) == {f"tfps/{name}" for name in scalars(remote.report())}
    assert last["tfps/step_s"] == pytest.approx(last["tfps/compute_s"] + last["tfps/exposed_wait_s"], rel=1e-5)
    assert (last["tfps/slice_bytes"], last["tfps/window_bytes"]) == (1024, 2048)
    assert 0 <= last["tfps/overlap"] <= 1
    assert last["tfps/sent_bytes_per_s"] > 0
    assert set(last) == set(re.findall(r"`(tfps/\w+)`", DOCS.read_text()))


def test_a_number_writes_every_so_many_batches_and_at_the_end_of_each_epoch(tmp_path: Path) -> None:
    strategy = tfps.Strategy()
    fit(strategy, tfps.callbacks.Metrics(tmp_path, update_freq=4))
    strategy.close()
    # The first report needs the times of 4 steps, which may be known a moment after the fourth.
    assert set(written(tmp_path)) - {4} == {8, 10, 14, 18, 20}
    assert "tfps/slice_bytes" not in written(tmp_path)[20]


@pytest.mark.parametrize("when", ["at the start", "later"])
def test_metrics_that_cannot_be_written_are_a_warning_and_training_goes_on(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = tfps.Strategy()
    if when == "at the start":
        (tmp_path / "tfps").write_text("a file in the place of the directory")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    callback = tfps.callbacks.Metrics(tmp_path, update_freq=4)
    steps: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # TensorFlow's error is OutOfRangeError then
    try:
        fit(strategy, callback, count)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
        strategy.close()
    assert steps == 2 * list(range(STEPS))
    (warning,) = [each.message for each in caplog.records if "metrics" in each.message]
    assert "tfps: the metrics could not be written" in warning
    assert warning.count("\n") == 0


def test_training_with_the_callback_ends_bitwise_as_without(remote: tfps.Strategy, tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [tfps.callbacks.Metrics(tmp_path, update_freq=1)]):
        keras.utils.set_random_seed(1)
        with remote.scope():
            model, x, y = training.mlp()
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(x, y, batch_size=32, epochs=1, verbose=0, shuffle=False, callbacks=callbacks)
        weights.append([weight.tobytes() for weight in model.get_weights()])
    assert weights[0] == weights[1]
    assert written(tmp_path)


def test_a_model_without_the_strategy_is_refused(tmp_path: Path) -> None:
    model, x, y = training.mlp()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(tfps.ConfigError, match=r"needs a model that was built in `with strategy.scope"):
        model.fit(x, y, verbose=0, callbacks=[tfps.callbacks.Metrics(tmp_path)])


@pytest.mark.parametrize("update_freq", ["batch", 0, 1.5])
def test_a_bad_frequency_is_refused_by_name(update_freq: int) -> None:
    with pytest.raises(tfps.ConfigError, match="update_freq must be 'epoch' or a positive number of batches, got "):
        tfps.callbacks.Metrics("logs", update_freq=update_freq)


def test_importing_tfps_imports_no_tensorflow_until_callbacks_are_asked_for() -> None:
    code = "import sys, tfps; print('tensorflow' in sys.modules); sys.modules['tensorflow'] = None; tfps.callbacks"
    with jobs.python("-c", code) as process:
        out, errors = process.communicate(timeout=2 * jobs.DEADLINE_S)
    assert out.split() == ["False"]
    assert "No module named 'tensorflow" in errors  # which would be imported now
