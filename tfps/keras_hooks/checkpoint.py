"""Checkpoints when several ranks run the same program: who writes which file, and state that Keras' files lack.

A save never waits for other ranks. Each writes a single local file; anything else is written by rank 0 only.
`ExtraState` is part of `tf.train.Checkpoint` and of BackupAndRestore, not of Keras' own files: these are for programs
without tfps, too, and Keras would refuse the optimizer's state in a file with more than that.

Tested in tests/keras_hooks/test_checkpoint.py, tests/integration/test_programs.py, test_shared_files.py,
test_local_programs.py and test_compression.py there.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import functools
import inspect
import io
import logging
import os
import shutil
import socket
import tempfile
import time
import weakref
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import h5py
import keras
import numpy as np
import tensorflow as tf

from tfps.errors import saving
from tfps.graph.patches import BaseStrategy, replaced, strategy_of
from tfps.keras_hooks.agreed_logs import agreed_logs
from tfps.keras_hooks.hooks import for_callbacks, for_models, replaces
from tfps.keras_hooks.keras_private import legacy_h5_format, saving_lib
from tfps.keras_hooks.loops import with_global_parameters
from tfps.keras_hooks.variables import RemoteVariable, of_tensorflow, slots_from_first_rank
from tfps.runtime.remote import Ahead
from tfps.types import Argument, Array, Callback, Function, Logs, Model, Optimizer, Variable

StrPath = str | os.PathLike[str]
logger = logging.getLogger("tfps")
_ITERATIONS, _EXACT, _SHOWN = "iterations", "exact", "shown"
_MARK = "tfps_brought"  # attribute of an HDF5 file
_SINCE_NS = time.time_ns()  # before any rank of a job has written a file
_shared: set[str] = set()  # directories of TensorBoard for which this was said
_PROGRAMS, _LOCAL = "tests/integration/test_programs.py", "tests/integration/test_local_programs.py"
_OUTER, _TABLES = "tests/policies/test_outer.py", "tests/layers/test_saving.py"
_backup, _checkpoint = keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint


class ExtraState(tf.train.experimental.PythonState):
    """State of an optimizer that Keras' files lack, as a checkpoint of that optimizer has it.

    Attributes:
        name: of the optimizer's attribute that carries it into checkpoints, which have this name in them.
        file: its name beside the weights of BackupAndRestore.
        title: for messages.
    """

    name: str
    file: str
    title: str

    @abc.abstractmethod
    def collect(self) -> None:
        """Does what all ranks do together so that rank 0 has all of it."""

    @abc.abstractmethod
    def arrays(self) -> dict[str, Array]:
        """Returns it as named arrays; empty if what it belongs to is gone."""

    @abc.abstractmethod
    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Takes what `arrays` has returned."""

    @abc.abstractmethod
    def share(self, restored: bool) -> None:
        """Gives all ranks what rank 0 has, if it has `restored` it from a backup; every rank calls it."""

    def serialize(self) -> bytes:
        self.collect()
        return _packed(self.arrays())

    def deserialize(self, string_value: bytes) -> None:
        self.restore(_unpacked(string_value)[0])


class Residuals(ExtraState):
    """What compression with error feedback could not send yet, and what pservers have beyond what workers were shown.

    Every rank must save or restore it in a checkpoint, or call `strategy.combine()` before one rank saves.
    """

    name, file, title = "tfps_residual", "tfps_error_feedback.npz", "the residual of compression"

    def __init__(self, strategy: BaseStrategy, variables: Sequence[Variable]) -> None:
        """`variables` are TensorFlow's."""
        self._strategy = weakref.ref(strategy)
        self._variables = [weakref.ref(variable) for variable in variables]

    def _alive(self) -> tuple[BaseStrategy, list[Variable]] | None:
        strategy, variables = self._strategy(), [ref() for ref in self._variables]
        return None if strategy is None or any(each is None for each in variables) else (strategy, variables)

    def collect(self) -> None:
        if (alive := self._alive()) is not None:
            alive[0].extended.compressing.collect()

    def arrays(self) -> dict[str, Array]:
        if (alive := self._alive()) is None:
            return {}
        strategy, variables = alive
        arrays = {str(place): value for place, value in strategy.extended.compressing.residuals(variables).items()}
        for place, each in strategy.extended.compressing.ahead(variables).items():
            arrays |= {f"{_EXACT}{place}": each.exact, f"{_SHOWN}{place}": np.array(each.shadow, np.uint32)}
        return arrays

    def restore(self, arrays: Mapping[str, Array]) -> None:
        if (alive := self._alive()) is None:
            return
        strategy, variables = alive
        values = {int(name): array for name, array in arrays.items() if name.isdecimal()}
        places = [int(name.removeprefix(_EXACT)) for name in arrays if name.startswith(_EXACT)]
        ahead = {place: Ahead(arrays[f"{_EXACT}{place}"], int(arrays[f"{_SHOWN}{place}"])) for place in places}
        strategy.extended.compressing.restore(variables, values, ahead)

    def share(self, restored: bool) -> None:
        """The sum of all residuals is rank 0's."""


def _extra_states(strategy: BaseStrategy, optimizer: Optimizer, variables: Sequence[Variable]) -> list[ExtraState]:
    """Returns those of `optimizer` of `variables`, of TensorFlow."""
    own = strategy.extended.policy.checkpoint_state(optimizer)
    residuals: list[ExtraState] = [Residuals(strategy, variables)] if strategy.extended.compressing.has_state else []
    return residuals if own is None else [*residuals, own]


def _states_of(strategy: BaseStrategy, model: Model) -> list[ExtraState]:
    return _extra_states(strategy, model.optimizer, [each.value for each in model.trainable_variables])


def carry_extra_states(optimizer: Optimizer, strategy: BaseStrategy, variables: Sequence[Variable]) -> None:
    """Makes checkpoints of `optimizer` of `variables`, of TensorFlow, have its extra states."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # the one that it wraps carries them
        for state in _extra_states(strategy, optimizer, variables):
            setattr(optimizer, state.name, state)  # Keras tracks it as it tracks variables


def _packed(arrays: Mapping[str, Array], iterations: int = 0) -> bytes:
    """`arrays` in one file, of that step of the optimizer."""
    content = io.BytesIO()
    named: dict[str, Argument] = {_ITERATIONS: np.array(iterations, np.int64), **arrays}
    np.savez(content, **named)
    return content.getvalue()


def _unpacked(content: bytes) -> tuple[dict[str, Array], int]:
    """The reverse of `_packed`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files if name != _ITERATIONS}, int(arrays[_ITERATIONS])


def _beside(callback: Callback, state: ExtraState) -> str:
    return str(tf.io.gfile.join(str(callback.backup_dir), state.file))


def _read(callback: Callback, state: ExtraState) -> dict[str, Array] | None:
    """Reads `state` beside a backup that has just been restored; None if there is none, or, logged, of another step."""
    path = _beside(callback, state)
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path, "rb") as file:
        arrays, iterations = _unpacked(file.read())
    now = int(callback.model.optimizer.iterations.numpy())
    if iterations != now:
        logger.warning(
            "tfps: %s is dropped: %s is of step %d, the backup of step %d", state.title, path, iterations, now
        )
        return None
    return arrays


@replaces(_backup, "on_train_begin", _LOCAL)
@for_callbacks
def _restore_backup(
    original: Function, strategy: BaseStrategy, callback: Callback, *args: object, **options: object
) -> None:
    """Rank 0 restores and passes on: weights, then the residuals of compression, then what the policy adds.

    A worker that joins a job under way restores nothing: it gets what the others have now.
    """
    model, restored = callback.model, False
    for prepare in before_restoring:
        prepare(model)
    restores = strategy.rank == 0 and not strategy.extended.exchange.joining.pending
    if restores:
        restored = tf.io.gfile.exists(str(callback._weights_path))  # Keras looks for it, too
        before = restores_alone.set(True)
        try:
            original(callback, *args, **options)
        finally:
            restores_alone.reset(before)
    if strategy.num_workers > 1:
        _take_from_first_rank(strategy, model, restored)
    for state in _states_of(strategy, model):
        state.collect()  # on all ranks; only the first knows whether there is a backup
        found = _read(callback, state) if restores else None
        if found is not None:
            state.restore(found)
        state.share(found is not None)


@replaces(_backup, "_save_model", _LOCAL)
@for_callbacks
def _save_backup(original: Function, strategy: BaseStrategy, callback: Callback) -> None:
    """Rank 0 writes, in the order in which it restores."""
    model = callback.model
    if strategy.num_workers > 1:
        strategy.extended.policy.check_saves_now("BackupAndRestore")
    if strategy.rank == 0:
        with saving(callback.backup_dir):  # also what says which epoch it is
            original(callback)
    else:
        _first_rank_only(strategy, model.save_weights, callback._weights_path)
    for state in _states_of(strategy, model):
        state.collect()
        if strategy.rank == 0:
            step, path = int(model.optimizer.iterations.numpy()), _beside(callback, state)
            with saving(path), tf.io.gfile.GFile(f"{path}.part", "wb") as file:
                file.write(_packed(state.arrays(), step))
            tf.io.gfile.rename(f"{path}.part", path, overwrite=True)


@for_callbacks
def _on_first_rank(
    original: Function, strategy: BaseStrategy, callback: Callback, *args: object, **options: object
) -> None:
    if strategy.rank == 0 and not strategy.extended.exchange.joining.pending:
        original(callback, *args, **options)


replaces(_backup, "on_train_end", _PROGRAMS, "rank 0 deletes the backup")(_on_first_rank)
# Logs are the same on all ranks.
replaces(keras.callbacks.RemoteMonitor, "on_epoch_end", _PROGRAMS, "rank 0 tells the server of an epoch")(
    _on_first_rank
)


def _take_from_first_rank(strategy: BaseStrategy, model: Model, restored: bool) -> None:
    """Copies rank 0's first epoch of `model` to all ranks, and its weights and optimizer state if it `restored` them.

    Else these stay as they are: an optimizer's state may be each rank's own, and pservers may have more than workers.
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
    state = [*model.weights, *model.optimizer.variables]
    slots_from_first_rank([each.slot for each in state if isinstance(each, RemoteVariable)], strategy)
    own = {id(each.value): each.value for each in state if not isinstance(each, RemoteVariable)}
    strategy.extended.take_from_first_rank(list(own.values()))


_saving = contextvars.ContextVar("saving", default=False)  # whether a call that saves is under way
_around = contextvars.ContextVar("around", default=False)  # whether `saved_beside` has been entered
# Whether this rank restores what others then take from it, and wait for.
restores_alone = contextvars.ContextVar("restores_alone", default=False)
# What folders above save beside a model's file, or restore: each is called with the model and the path.
saved_beside: list[Callable[[Model, StrPath], contextlib.AbstractContextManager[object]]] = []
loaded_beside: list[Callable[[Model, StrPath], object]] = []
before_restoring: list[Callable[[Model], object]] = []  # called with the model, on all ranks
before_exporting: list[Callable[[Model, str], object]] = []  # called with what is written, too; may refuse
_CALLED = "as `Model.save`, however a program has imported what calls it"


@replaces(legacy_h5_format, "save_model_to_hdf5", _PROGRAMS, _CALLED)
@replaces(saving_lib, "save_weights_only", _PROGRAMS, _CALLED)
@replaces(saving_lib, "save_model", _PROGRAMS, _CALLED)
@replaces(keras.Model, "save_weights", _PROGRAMS, "as `Model.save`")
@replaces(keras.Model, "save", _PROGRAMS)
def _save(original: Function, model: Model, filepath: StrPath, *args: object, **options: object) -> object:
    """Each rank writes a whole file, of global parameters where workers train alone; the last one is rank 0's. Rows of
    tables go beside it.
    """
    with saving(filepath), contextlib.ExitStack() as around:
        if not _around.get():
            around.callback(_around.reset, _around.set(True))
            for each in saved_beside:
                around.enter_context(each(model, filepath))
        return _save_under_strategy(original, model, filepath, *args, **options)


@for_models
def _save_under_strategy(
    original: Function, strategy: BaseStrategy, model: Model, filepath: StrPath, *args: object, **options: object
) -> object:
    with strategy.extended.policy.global_parameters():
        if strategy.num_workers == 1 or _saving.get() or not isinstance(filepath, str | os.PathLike):
            return original(model, filepath, *args, **options)
        before = _saving.set(True)
        try:
            given = inspect.signature(original).bind(model, filepath, *args, **options).arguments
            said = {**given, **given.get("kwargs", {})}
            one_file = said.get("zipped") is not False and said.get("max_shard_size") is None
            if "://" in str(filepath) or not one_file or not said.get("overwrite", True):  # else Keras asks
                call = functools.partial(original, model)
                return _first_rank_only(strategy, call, filepath, *args, **options)
            path = Path(filepath)
            # The name keeps its suffix: Keras picks the format by it.
            part = path.with_name(f".rank{strategy.rank}.{path.name}")
            try:
                result = original(model, part, *args, **options)
                if (state := strategy.extended.policy.state) is None:
                    part.replace(path)
                else:
                    moment = f"{strategy.extended.exchange.info.run}/{state}"
                    bring(part, path, strategy.rank, strategy.num_workers, moment)
            finally:
                part.unlink(missing_ok=True)
            return result
        finally:
            _saving.reset(before)


@replaces(saving_lib, "load_weights_only", _TABLES)
def _load_weights(original: Function, model: Model, filepath: StrPath, *args: object, **options: object) -> object:
    """Restores rows of tables from beside the file."""
    result = original(model, filepath, *args, **options)
    for each in loaded_beside:
        each(model, filepath)
    return result


@replaces(saving_lib, "load_model", _TABLES, "as `load_weights`")
def _load_model(original: Function, filepath: StrPath, *args: object, **options: object) -> Model:
    model = original(filepath, *args, **options)
    for each in loaded_beside if isinstance(model, keras.Model) else ():
        each(model, filepath)
    return model


replaces(saving_lib, "_save_model_to_fileobj", _OUTER, "pickles global parameters where workers train alone")(
    for_models(with_global_parameters)
)


@replaces(keras.Model, "export", _PROGRAMS)
def _export(original: Function, model: Model, *args: object, **options: object) -> object:
    """Rank 0 writes the folder, with global parameters; what is not in a model's memory cannot be in it."""
    for check in before_exporting:
        check(model, "a SavedModel")
    return _export_under_strategy(original, model, *args, **options)


@for_models
def _export_under_strategy(
    original: Function, strategy: BaseStrategy, model: Model, filepath: str, *args: object, **options: object
) -> object:
    call = functools.partial(original, model)
    with saving(filepath), strategy.extended.policy.global_parameters():
        return _first_rank_only(strategy, call, filepath, *args, **options)


def _first_rank_only(
    strategy: BaseStrategy, save: Function, filepath: StrPath, *args: object, **options: object
) -> object:
    """Saves on rank 0; other ranks write to a temporary directory, so they take part in any collective work."""
    if strategy.rank == 0:
        return save(filepath, *args, **options)
    with tempfile.TemporaryDirectory(prefix="tfps-") as scratch:
        return save(f"{scratch}/{str(filepath).rstrip('/').rpartition('/')[2]}", *args, **options)


# Files that ranks with different content write to one path: it is rank 0's in the end, and nobody waits.
#
# Ranks may share the folder or not, and any of them may be the only one that saves. So each brings a file of its own,
# but a rank other than 0 leaves what another rank has brought since all ranks last met. A mark in the file says who
# brought it and when: the comment of an archive (.keras), an attribute of an HDF5 file.


def bring(part: Path, path: Path, rank: int, workers: int, moment: str) -> None:
    """Replaces the file `path` by `part`, unless that would replace another rank's file of the same moment.

    Rank 0 replaces what is there at least once after the last look that another rank took before it saw rank 0's file:
    who has looked loses its claim between the two times.

    Args:
        part: a whole file beside `path`, which may remain.
        moment: tells where in the program ranks are, without spaces; the same on all ranks between two meetings.
    """
    claims = [path.with_name(f".claim{each}.{path.name}") for each in range(workers)]
    _mark(part, f"{moment} {rank}")
    try:
        if rank == 0:
            claims[0].unlink(missing_ok=True)
            try:
                os.link(part, claims[0])
            except OSError:  # a file has one name only
                shutil.copyfile(part, claims[0])
            part.replace(path)
            for claim in claims[1:]:
                claim.unlink(missing_ok=True)
            claims[0].replace(path)
        else:
            part.replace(claims[rank])
            when, _, who = _mark_of(path).rpartition(" ")
            if when != moment or who == str(rank):
                with contextlib.suppress(FileNotFoundError):  # rank 0 was faster: its file is there
                    claims[rank].replace(path)
    finally:
        claims[rank].unlink(missing_ok=True)


def _mark(file: Path, text: str) -> None:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file, "a") as archive:
            archive.comment = text.encode()
    else:
        with h5py.File(file, "r+") as opened:
            opened.attrs[_MARK] = text


def _mark_of(file: Path) -> str:
    """The mark of `file`; empty if it has none, is none, or is no file of Keras."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                return archive.comment.decode(errors="replace")
        with h5py.File(file) as opened:
            return str(opened.attrs.get(_MARK, ""))
    except (OSError, zipfile.BadZipFile):
        return ""


# Callbacks.


_REFUSES = "refuses to save within an epoch where ranks are at other steps"


@replaces(_backup, "set_model", _LOCAL, _REFUSES)
@replaces(_checkpoint, "set_model", _LOCAL, _REFUSES)
def _set_model(original: Function, callback: Callback, model: Model) -> None:
    strategy = strategy_of(model)
    if strategy is not None and strategy.num_workers > 1:
        strategy.extended.policy.check_save_freq(type(callback).__name__, callback.save_freq)
    original(callback, model)


@replaces(_checkpoint, "_save_model", _PROGRAMS)
@for_callbacks
def _save_checkpoint(
    original: Function, strategy: BaseStrategy, callback: Callback, epoch: int, batch: int | None, logs: Logs
) -> None:
    """Decides and names files by logs that ranks agree on."""
    if strategy.num_workers > 1:
        if batch is not None:  # within an epoch logs are local; ranks would decide and name files differently
            strategy.extended.policy.check_saves_now("ModelCheckpoint")
            logs = agreed_logs(callback.model, logs or {})
        if "://" not in str(callback.filepath):
            # Several ranks may create it at once, which Keras does not expect.
            path = Path(callback._get_file_path(epoch, batch, logs))
            with saving(path):
                path.parent.mkdir(parents=True, exist_ok=True)
    original(callback, epoch, batch, logs)


@replaces(keras.callbacks.CSVLogger, "on_train_begin", _PROGRAMS)
@for_callbacks
def _append_alike(
    original: Function, strategy: BaseStrategy, callback: Callback, *args: object, **options: object
) -> None:
    """Ranks that append to one file write each line at the same place, so that it is there once.

    Logs are the same on all ranks, and no rank ends an epoch before all have begun to train. A worker that joins a job
    under way goes on with the file.
    """
    with replaced(callback, "append", callback.append or strategy.extended.exchange.joining.pending):
        original(callback, *args, **options)
        appends = callback.append
    if strategy.num_workers > 1 and appends and "://" not in str(callback.filename):
        callback.csv_file.close()
        callback.csv_file = open(callback.filename, "r+")  # noqa: SIM115, PTH123  # closed by Keras
        callback.csv_file.seek(0, os.SEEK_END)


@replaces(keras.callbacks.TensorBoard, "on_epoch_end", _PROGRAMS)
@for_callbacks
def _say_who_else_writes(
    original: Function, strategy: BaseStrategy, callback: Callback, *args: object, **options: object
) -> None:
    """Says once that several ranks write to one directory of TensorBoard."""
    original(callback, *args, **options)
    if strategy.rank == 0 and strategy.num_workers > 1:
        _look_for_others(str(callback.log_dir))


def _look_for_others(folder: str) -> None:
    own = f".{socket.gethostname()}.{os.getpid()}."
    files = [file for file in tf.io.gfile.glob(f"{folder}/*/events.out.tfevents.*") if own not in file]
    # Files of earlier jobs, which a program goes on with, are older than this process.
    if folder not in _shared and any(tf.io.gfile.stat(file).mtime_nsec > _SINCE_NS for file in files):
        _shared.add(folder)
        logger.warning(
            "tfps: other workers write to the directory %r of the callback TensorBoard, too: their values are shown as "
            "points of the same curves. Give rank 0 alone the callback, or each rank its directory, as in "
            "TensorBoard(f'logs/{strategy.rank}')",
            folder,
        )


class _Discarding:
    """Stands for Orbax' checkpointer where nothing is to be written: whatever it is asked to do is done."""

    def __getattr__(self, name: str) -> Callable[..., _Discarding]:
        return lambda *_, **__: self


def _set_orbax_model(original: Function, callback: Callback, model: Model) -> None:
    """Rank 0 writes, all refuse what ModelCheckpoint refuses, and what is not in a model's memory."""
    for check in before_exporting:
        check(model, "a checkpoint of Orbax")
    strategy = strategy_of(model)
    if strategy is not None and strategy.rank > 0:  # it reads what rank 0 saves, which may take all ranks
        callback.checkpointer.close()
        callback.checkpointer = _Discarding()
    _set_model(original, callback, model)


@for_callbacks
def _save_orbax(
    original: Function, strategy: BaseStrategy, callback: Callback, batch: int, logs: Logs | None = None
) -> None:
    """Decides by logs that ranks agree on."""
    if strategy.num_workers > 1 and callback.save_freq != "epoch":
        strategy.extended.policy.check_saves_now("OrbaxCheckpoint")
        if callback.save_best_only:  # within an epoch logs are local; ranks would decide differently
            logs = agreed_logs(callback.model, logs or {})
    original(callback, batch, logs)


if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # since Keras 3.14
    replaces(keras.callbacks.OrbaxCheckpoint, "set_model", _LOCAL)(_set_orbax_model)
    replaces(keras.callbacks.OrbaxCheckpoint, "on_train_batch_end", _PROGRAMS)(_save_orbax)


@replaces(keras.Variable, "_trackable_children", _PROGRAMS)
def _track_what_functions_use(
    original: Function, variable: Variable, save_type: str = "checkpoint", **options: object
) -> dict[str, object]:
    """A SavedModel has what functions use beside the variable: what TensorFlow's variable names.

    TensorFlow sees only the one of Keras.
    """
    children: dict[str, object] = original(variable, save_type, **options)
    own = of_tensorflow(variable)
    if save_type == "savedmodel" and isinstance(own, tf.distribute.DistributedValues):
        children = {**own._trackable_children(save_type, **options), **children}
    return children


@replaces(keras.Variable, "_serialize_to_tensors", _OUTER)
def _serialize_global(original: Function, variable: Variable) -> dict[str, tf.Tensor]:
    """A checkpoint has the global parameters where workers train alone."""
    shared = getattr(variable.value, "global_copy", None)  # what a checkpoint has in its place
    return original(variable) if shared is None else {"VARIABLE_VALUE": shared.read_value()}
