"""Keras callbacks: `model.fit(..., callbacks=[tfps.callbacks.Metrics("logs")])`."""

from __future__ import annotations

import pathlib
from typing import Any, Literal

import keras
import tensorflow as tf

from tfps.errors import ConfigError, TfpsError
from tfps.report import Report
from tfps.strategy import Strategy


class Metrics(keras.callbacks.Callback):
    """Writes where the time of steps goes as TensorBoard scalars, into the run `<log_dir>/tfps`.

    Rank 0 writes, the other ranks do nothing. What is written is `Strategy.report()`, medians over the last 16 steps;
    docs/metrics.md has the names. TensorBoard need not be installed.

    Args:
        log_dir: the directory that `tensorboard --logdir` gets.
        update_freq: `"epoch"` writes at the end of each epoch, a number also after every so many batches. A report
            costs some milliseconds and asks every pserver.

    Raises:
        ConfigError: `update_freq` is neither; in `fit`, the model was not built under a `tfps.Strategy`.
    """

    def __init__(self, log_dir: str | pathlib.Path, update_freq: int | Literal["epoch"] = "epoch") -> None:
        super().__init__()
        if update_freq != "epoch" and (not isinstance(update_freq, int) or update_freq < 1):
            raise ConfigError(f"update_freq must be 'epoch' or a positive number of batches, got {update_freq!r}")
        self._directory = pathlib.Path(log_dir) / "tfps"
        self._every = update_freq
        self._batches = self._written_at = 0
        self._writer: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        if not isinstance(strategy, Strategy):
            raise ConfigError(
                "tfps.callbacks.Metrics needs a model that was built in `with strategy.scope():` of a tfps.Strategy, "
                f"got one under {type(strategy).__name__}"
            )
        if strategy.rank == 0:
            self._writer = tf.summary.create_file_writer(str(self._directory))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._batches = self._written_at = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches = batch + 1  # with steps_per_execution this comes once for several batches
        if self._every != "epoch" and self._batches - self._written_at >= self._every:
            self._write()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._batches > self._written_at:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self) -> None:
        if self._writer is None:
            return
        self._written_at = self._batches
        try:
            report = self.model.distribute_strategy.report()
        except TfpsError:
            return  # too few steps yet; a pserver that is gone stops the training by itself
        values = [tf.compat.v1.Summary.Value(tag=f"tfps/{k}", simple_value=v) for k, v in scalars(report).items()]
        step = int(self.model.optimizer.iterations.numpy())
        with self._writer.as_default():  # tf.summary.scalar would need TensorBoard
            tf.summary.experimental.write_raw_pb(tf.compat.v1.Summary(value=values).SerializeToString(), step=step)
        self._writer.flush()


def scalars(report: Report) -> dict[str, float]:
    """What of a report is written, by name; sizes only where something is cut into slices."""
    found = {
        "step_s": report.step_s,
        "compute_s": report.compute_s,
        "exposed_wait_s": report.exposed_wait_s,
        "wire_s": report.wire_s,
        "overlap": report.overlap,
        "sent_bytes_per_s": sum(layer.nbytes for layer in report.layers) / report.step_s if report.step_s else 0.0,
        "link_bytes_per_s": report.bytes_per_s,
    }
    if report.slice_bytes:
        found |= {"slice_bytes": float(report.slice_bytes), "window_bytes": float(report.window_bytes)}
    return found
