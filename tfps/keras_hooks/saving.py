"""Saving with Keras when several ranks run the same program.

`Model.save` and `save_weights` write a temporary file next to the path and rename it when complete: ranks that share
the directory overwrite each other with equal content, other ranks each get a file. Where content may differ (workers
that do not step together) a shared file is rank 0's in the end, see `shared_files`. Anything but a single local file
(`export`, shards, an object store) is written by rank 0 only. The same holds for `keras.saving.save_model` and
`save_weights`. `BackupAndRestore` writes and restores on rank 0, which passes what it has restored to all ranks. A save
never waits for other ranks. `OrbaxCheckpoint` writes on rank 0, and `RemoteMonitor` sends from there.

Tested in tests/integration/test_programs.py, test_shared_files.py and test_local_programs.py there.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import keras
import tensorflow as tf

from tfps.keras_hooks.agreed_logs import agreed_logs
from tfps.keras_hooks.exchanged_variable import of_tensorflow
from tfps.keras_hooks.keras_private import legacy_h5_format, saving_lib
from tfps.keras_hooks.remote_variable import take_from_first_rank
from tfps.keras_hooks.shared_files import bring
from tfps.types import Callback, Function, Logs, Model, Variable


class _Saving(threading.local):
    """Whether this thread is in a call that saves: those within it write where it says."""

    under_way = False


_saving = _Saving()


@contextmanager
def _under_way() -> Iterator[None]:
    _saving.under_way = True
    try:
        yield
    finally:
        _saving.under_way = False


@functools.cache
def save_what_functions_use() -> None:
    """Makes SavedModels track what functions use beside a variable of Keras: what TensorFlow's variable names.

    TensorFlow sees only the one of Keras. Done once per process.
    """
    original = keras.Variable._trackable_children

    @functools.wraps(original)
    def trackable_children(self: Variable, save_type: str = "checkpoint", **options: object) -> dict[str, object]:
        children: dict[str, object] = original(self, save_type, **options)
        own = of_tensorflow(self)
        if save_type == "savedmodel" and isinstance(own, tf.distribute.DistributedValues):
            children = {**own._trackable_children(save_type, **options), **children}
        return children

    keras.Variable._trackable_children = trackable_children


@functools.cache
def share_files(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes saving with Keras safe for several ranks, for models of a `strategy_class`; done once per process."""

    def strategy_of(model: Model) -> tf.distribute.Strategy | None:
        """Returns the strategy of `model` if it has several workers, else None."""
        strategy = getattr(model, "distribute_strategy", None)
        return strategy if isinstance(strategy, strategy_class) and strategy.num_workers > 1 else None

    def writes_one_file(original: Function, one_file: Callable[..., bool]) -> Function:
        @functools.wraps(original)
        def save(self: Model, filepath: str | os.PathLike[str], *arguments: object, **options: object) -> object:
            strategy = strategy_of(self)
            if strategy is None or _saving.under_way or not isinstance(filepath, str | os.PathLike):
                return original(self, filepath, *arguments, **options)
            with _under_way():
                if not one_file(str(filepath), *arguments, **options):
                    call = functools.partial(original, self)
                    return _first_rank_only(strategy, call, filepath, *arguments, **options)
                path = Path(filepath)
                # The name keeps its suffix: Keras picks the format by it.
                part = path.with_name(f".rank{strategy.rank}.{path.name}")
                try:
                    result = original(self, part, *arguments, **options)
                    _replace(part, path, strategy)
                finally:
                    part.unlink(missing_ok=True)
                return result

        return save

    original_export = keras.Model.export

    @functools.wraps(original_export)
    def export(self: Model, filepath: str | os.PathLike[str], *arguments: object, **options: object) -> object:
        strategy = strategy_of(self)
        call = functools.partial(original_export, self)
        if strategy is None:
            return call(filepath, *arguments, **options)
        return _first_rank_only(strategy, call, filepath, *arguments, **options)

    keras.Model.save = writes_one_file(keras.Model.save, _is_model_file)
    keras.Model.save_weights = writes_one_file(keras.Model.save_weights, _is_weights_file)
    keras.Model.export = export
    # What `keras.saving.save_model` and `save_weights` call, however the program has imported them.
    saving_lib.save_model = writes_one_file(saving_lib.save_model, _is_zip)
    saving_lib.save_weights_only = writes_one_file(saving_lib.save_weights_only, _is_whole)
    legacy_h5_format.save_model_to_hdf5 = writes_one_file(legacy_h5_format.save_model_to_hdf5, _is_local)
    _share_checkpoint(strategy_of)
    _share_backup(strategy_of)
    _share_csv(strategy_of)
    _send_once(strategy_of)
    if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # since Keras 3.14
        _share_orbax(strategy_of)


def _replace(part: Path, path: Path, strategy: tf.distribute.Strategy) -> None:
    """Moves the whole file `part` to `path`."""
    state = strategy.extended.policy.state
    if state is None:
        part.replace(path)
        return
    bring(part, path, strategy.rank, strategy.num_workers, f"{strategy.extended.exchange.info.run}/{state}")


def _first_rank_only(
    strategy: tf.distribute.Strategy,
    save: Function,
    filepath: str | os.PathLike[str],
    *arguments: object,
    **options: object,
) -> object:
    """Saves on rank 0; other ranks write to a temporary directory, so they take part in any collective work."""
    if strategy.rank == 0:
        return save(filepath, *arguments, **options)
    with tempfile.TemporaryDirectory(prefix="tfps-") as scratch:
        return save(f"{scratch}/{str(filepath).rstrip('/').rpartition('/')[2]}", *arguments, **options)


# Whether a call writes a single local file, without a question; with the parameters of what is called.


def _is_model_file(path: str, overwrite: bool = True, zipped: bool | None = None, **_: object) -> bool:
    return _is_local(path) and overwrite and zipped is not False


def _is_weights_file(path: str, overwrite: bool = True, max_shard_size: float | None = None, **_: object) -> bool:
    return _is_local(path) and overwrite and max_shard_size is None


def _is_zip(path: str, weights_format: str = "h5", zipped: bool = True) -> bool:
    return _is_local(path) and zipped


def _is_whole(path: str, max_shard_size: float | None = None, *_: object, **__: object) -> bool:
    return _is_local(path) and max_shard_size is None


def _is_local(path: str, *_: object, **__: object) -> bool:
    return "://" not in path


def _share_checkpoint(strategy_of: Callable[[Model], tf.distribute.Strategy | None]) -> None:
    original = keras.callbacks.ModelCheckpoint._save_model

    @functools.wraps(original)
    def save_model(self: Callback, epoch: int, batch: int | None, logs: Logs) -> None:
        if (strategy := strategy_of(self.model)) is not None:
            if batch is not None:  # within an epoch logs are local; ranks would decide and name files differently
                strategy.extended.policy.check_saves_now("ModelCheckpoint")
                logs = agreed_logs(self.model, logs or {})
            if "://" not in str(self.filepath):
                # Several ranks may create it at once, which Keras does not expect.
                Path(self._get_file_path(epoch, batch, logs)).parent.mkdir(parents=True, exist_ok=True)
        original(self, epoch, batch, logs)

    keras.callbacks.ModelCheckpoint._save_model = save_model


def _share_backup(strategy_of: Callable[[Model], tf.distribute.Strategy | None]) -> None:
    callback = keras.callbacks.BackupAndRestore
    original_begin, original_save, original_end = callback.on_train_begin, callback._save_model, callback.on_train_end

    @functools.wraps(original_begin)
    def on_train_begin(self: Callback, logs: Logs | None = None) -> None:
        strategy, restored = strategy_of(self.model), False
        if strategy is None or strategy.rank == 0:
            restored = strategy is not None and tf.io.gfile.exists(str(self._weights_path))  # Keras looks for it, too
            original_begin(self, logs)
        if strategy is not None:
            _take_from_first_rank(strategy, self.model, restored)

    @functools.wraps(original_save)
    def save_model(self: Callback) -> None:
        strategy = strategy_of(self.model)
        if strategy is not None:
            strategy.extended.policy.check_saves_now("BackupAndRestore")
        if strategy is None or strategy.rank == 0:
            original_save(self)
        else:
            _first_rank_only(strategy, self.model.save_weights, self._weights_path)

    @functools.wraps(original_end)
    def on_train_end(self: Callback, logs: Logs | None = None) -> None:
        strategy = strategy_of(self.model)
        if strategy is None or strategy.rank == 0:
            original_end(self, logs)

    callback.on_train_begin, callback._save_model, callback.on_train_end = on_train_begin, save_model, on_train_end


def _share_csv(strategy_of: Callable[[Model], tf.distribute.Strategy | None]) -> None:
    """Makes ranks that append to one file write each line at the same place, so that it is there once.

    Logs are the same on all ranks, and no rank ends an epoch before all have begun to train.
    """
    callback = keras.callbacks.CSVLogger
    original = callback.on_train_begin

    @functools.wraps(original)
    def on_train_begin(self: Callback, logs: Logs | None = None) -> None:
        original(self, logs)
        if strategy_of(self.model) is None or not self.append or not _is_local(str(self.filename)):
            return
        self.csv_file.close()
        self.csv_file = open(self.filename, "r+")  # noqa: SIM115, PTH123  # closed by Keras
        self.csv_file.seek(0, os.SEEK_END)

    callback.on_train_begin = on_train_begin


def _send_once(strategy_of: Callable[[Model], tf.distribute.Strategy | None]) -> None:
    """Makes RemoteMonitor tell its server of each epoch once: logs are the same on all ranks."""
    original = keras.callbacks.RemoteMonitor.on_epoch_end

    @functools.wraps(original)
    def on_epoch_end(self: Callback, epoch: int, logs: Logs | None = None) -> None:
        strategy = strategy_of(self.model)
        if strategy is None or strategy.rank == 0:
            original(self, epoch, logs)

    keras.callbacks.RemoteMonitor.on_epoch_end = on_epoch_end


class _Discarding:
    """Stands for Orbax' checkpointer where nothing is to be written: whatever it is asked to do is done."""

    def __getattr__(self, name: str) -> Callable[..., _Discarding]:
        return lambda *_, **__: self


def _share_orbax(strategy_of: Callable[[Model], tf.distribute.Strategy | None]) -> None:
    """Makes OrbaxCheckpoint write on rank 0 only; all ranks read what it saves, which may take all of them."""
    callback = keras.callbacks.OrbaxCheckpoint
    original_set, original_end = callback.set_model, callback.on_train_batch_end

    @functools.wraps(original_set)
    def set_model(self: Callback, model: Model) -> None:
        strategy = strategy_of(model)
        if strategy is not None and strategy.rank > 0:
            self.checkpointer.close()
            self.checkpointer = _Discarding()
        original_set(self, model)

    @functools.wraps(original_end)
    def on_train_batch_end(self: Callback, batch: int, logs: Logs | None = None) -> None:
        strategy = strategy_of(self.model)
        if strategy is not None and self.save_freq != "epoch":
            strategy.extended.policy.check_saves_now("OrbaxCheckpoint")
            if self.save_best_only:  # within an epoch logs are local; ranks would decide differently
                logs = agreed_logs(self.model, logs or {})
        original_end(self, batch, logs)

    callback.set_model, callback.on_train_batch_end = set_model, on_train_batch_end


def _take_from_first_rank(strategy: tf.distribute.Strategy, model: Model, restored: bool) -> None:
    """Copies rank 0's first epoch of `model` to all ranks, and its weights and optimizer state if it `restored` them.

    Else these stay as they are: an optimizer's state may be each rank's own, and pservers may have more than workers.
    Only what rank 0 says of that counts, so that all ranks do the same.
    """
    epoch = model._initial_epoch
    with strategy.scope():
        said = tf.Variable([restored, -1 if epoch is None else epoch], dtype=tf.int64, trainable=False, name="restored")
    strategy.extended.take_from_first_rank([said])
    has_restored, epoch = map(int, said.numpy())
    model._initial_epoch = None if epoch < 0 else epoch
    if not has_restored:
        return
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    own = take_from_first_rank([*model.weights, *model.optimizer.variables], strategy)
    strategy.extended.take_from_first_rank(list({id(each.value): each.value for each in own}.values()))
