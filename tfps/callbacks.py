"""Keras callbacks: `model.fit(..., callbacks=[tfps.callbacks.Metrics("logs")])`."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Literal

import keras
import tensorflow as tf

from tfps.config import check_steps
from tfps.errors import ConfigError, TfpsError, in_a_line
from tfps.runtime.report import Report
from tfps.runtime.trace_run import TraceRun
from tfps.strategy.strategy import Strategy
from tfps.types import Logs

logger = logging.getLogger("tfps")


class Metrics(keras.callbacks.Callback):
    """Writes where step time goes as TensorBoard scalars to the run `<log_dir>/tfps`.

    Only rank 0 writes. The values are those of `Strategy.report()`, medians over the last 16 steps; docs/metrics.md
    lists their names. TensorBoard need not be installed. Where they cannot be written, as on a full disk, it warns once
    and training goes on.

    Args:
        log_dir: the directory that `tensorboard --logdir` gets.
        update_freq: `"epoch"` writes at the end of each epoch, a number N also after every N batches. A report
            costs a few milliseconds and queries every pserver.

    Raises:
        ConfigError: `update_freq` is invalid; in `fit`, the model was not built under a `tfps.Strategy`.
    """

    def __init__(self, log_dir: str | pathlib.Path, update_freq: int | Literal["epoch"] = "epoch") -> None:
        super().__init__()
        if update_freq != "epoch" and (not isinstance(update_freq, int) or update_freq < 1):
            raise ConfigError(f"update_freq must be 'epoch' or a positive number of batches, got {update_freq!r}")
        self._directory = pathlib.Path(log_dir) / "tfps"
        self._every = update_freq
        self._batches = self._written_at = 0
        self._writer: tf.summary.SummaryWriter | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if _strategy_of(self).rank == 0:
            with self._warned():
                self._writer = tf.summary.create_file_writer(str(self._directory))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._batches = self._written_at = 0

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._batches = batch + 1  # with steps_per_execution, Keras calls this once per several batches
        if self._every != "epoch" and self._batches - self._written_at >= self._every:
            self._write()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._batches > self._written_at:
            self._write()

    def on_train_end(self, logs: Logs | None = None) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._warned():
                writer.close()

    @contextlib.contextmanager
    def _warned(self) -> Iterator[None]:
        """Writes no more after an error. Keras takes TensorFlow's for a file too large, OutOfRangeError, for the end of
        the data."""
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            self._writer = None
            logger.warning("tfps: the metrics could not be written, and are not until fit ends: %s", in_a_line(error))

    def _write(self) -> None:
        if (writer := self._writer) is None:
            return
        self._written_at = self._batches
        try:
            found = scalars(self.model.distribute_strategy.report())
        except TfpsError:
            return  # too few steps yet; a lost pserver stops training anyway
        values = [tf.compat.v1.Summary.Value(tag=f"tfps/{k}", simple_value=v) for k, v in found.items()]
        summary = tf.compat.v1.Summary(value=values).SerializeToString()
        with self._warned(), writer.as_default():  # tf.summary.scalar would need TensorBoard
            step = int(self.model.optimizer.iterations.numpy())
            tf.summary.experimental.write_raw_pb(summary, step=step)
            writer.flush()


def scalars(report: Report) -> dict[str, float]:
    """Returns the scalars of `report` by name; slice and window sizes only if anything is sliced."""
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


class Trace(keras.callbacks.Callback):
    """Records some steps of `fit` on all workers and pservers, for TensorBoard's tabs "Parameter servers" and Profile.

    Written at the end of the last step; for the Profile tab at the end of `fit`, merged with the TensorFlow profile
    that the TensorBoard callback took in the same directory (docs/traceview.md). Rank 0 controls the recording; on
    other ranks the callback does nothing. Training waits for the writing.

    Args:
        log_dir: the directory that `tensorboard --logdir` gets.
        steps: first and last batch, inclusive, counted from 0 over all epochs of `fit`.
        name: name of the run; default: the current time.

    Raises:
        ConfigError: `steps` is not such a pair, `name` is not a file name; in `fit`, the model was not built under a
            `tfps.Strategy`.
        TfpsError: in `fit`, another capture is already running.
    """

    def __init__(self, log_dir: str | pathlib.Path, steps: tuple[int, int] = (10, 20), name: str | None = None) -> None:
        super().__init__()
        self._log_dir, self._name = log_dir, name
        self._first, self._last = check_steps("steps of tfps.callbacks.Trace", steps)
        self._run: TraceRun | None = None  # that records
        self._written: TraceRun | None = None
        self._begun = 0  # the batch at which recording began
        self._batch = self._before = self._ended = 0  # first of the execution; in earlier epochs; so far
        self._active = False  # still to begin

    def on_train_begin(self, logs: Logs | None = None) -> None:
        strategy = _strategy_of(self)
        self._active = strategy.rank == 0
        if (abandon := strategy._runtime.abandon_capture) is not None:  # left by a `fit` that raised
            abandon()
        self._batch = self._before = self._ended = 0
        self._run = self._written = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._before = self._ended

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._batch = batch
        begin = self._before + batch
        if self._active and begin + self._per_execution > self._first:
            self._active, self._begun = False, begin
            self._run = TraceRun(_strategy_of(self)._runtime, self._log_dir, self._name, of_fit=True)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        # Keras passes the first or the last batch of an execution, depending on its version.
        count = max(batch - self._batch + 1, self._per_execution)
        if (steps := self.params.get("steps")) is not None:
            count = min(count, max(steps - self._batch, 1))
        self._ended = self._before + self._batch + count
        if self._ended > self._last:
            self._stop()

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._active:
            logger.warning(
                "tfps: nothing was recorded: Trace asks for the batches from %d on, but fit had only %d",
                self._first,
                self._ended,
            )
        self._stop()
        if self._written is not None:
            with _warned():
                self._written.write_profile()

    @property
    def _per_execution(self) -> int:
        return int(getattr(self.model, "steps_per_execution", 1))

    def _stop(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            with _warned():
                run.stop(self._chosen)
                self._written = run

    def _chosen(self, steps: Sequence[int]) -> Sequence[int]:
        """Returns the `steps` of the requested batches; an execution may have more."""
        if len(steps) != self._ended - self._begun:  # gradients accumulated, or steps skipped by loss scaling
            return steps
        return [step for at, step in enumerate(steps, self._begun) if self._first <= at <= self._last]


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    try:
        yield
    except (TfpsError, OSError) as error:  # must not end training
        logger.warning("tfps: the trace could not be written: %s", error)


def _strategy_of(callback: keras.callbacks.Callback) -> Strategy:
    strategy = callback.model.distribute_strategy
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"tfps.callbacks.{type(callback).__name__} needs a model that was built in `with strategy.scope():` of a "
            f"tfps.Strategy, got one under {type(strategy).__name__}"
        )
    return strategy
