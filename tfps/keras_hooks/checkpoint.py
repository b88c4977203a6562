"""Checkpoints when several ranks run the same program: who writes which file, and state that Keras' files lack.

`Model.save`, `save_weights` and those of `keras.saving` write a temporary file next to the path and rename it when
complete: ranks that share the directory overwrite each other with equal content, other ranks each get a file. Where
content may differ (workers that do not step together) a shared file is rank 0's in the end, see `bring`. Anything but a
single local file (`export`, shards, an object store) is written by rank 0 only. `BackupAndRestore` writes and restores
on rank 0, which passes what it has restored to all ranks; `OrbaxCheckpoint` writes there, and `RemoteMonitor` sends
from there. A save never waits for other ranks. Where workers train alone, global parameters are saved.

Residuals of compression and what a policy adds (`ExtraState`) are part of `tf.train.Checkpoint`, carried by the
optimizer, and of BackupAndRestore, in files beside the weights. Keras' own files (`model.save`, `save_weights`) do not
have them: they are for programs without tfps, too, and Keras would refuse the optimizer's state in a file with more
than that.

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
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import h5py
import keras
import numpy as np
import tensorflow as tf

from tfps.graph.patches import BaseStrategy, Patch, for_callbacks, for_models, strategy_of
from tfps.keras_hooks.agreed_logs import agreed_logs
from tfps.keras_hooks.keras_private import legacy_h5_format, saving_lib
from tfps.keras_hooks.loops import with_global_parameters
from tfps.keras_hooks.variables import of_tensorflow, take_from_first_rank
from tfps.runtime.remote import Ahead
from tfps.types import Argument, Array, Callback, Function, Logs, Model, Optimizer, Variable

logger = logging.getLogger("tfps")
_ITERATIONS, _EXACT, _SHOWN = "iterations", "exact", "shown"
_MARK = "tfps_brought"  # attribute of an HDF5 file


# State beside what Keras saves.


class ExtraState(abc.ABC):
    """State of an optimizer that Keras' files lack.

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


class Residuals(ExtraState):
    """What compression with error feedback could not send yet, and what pservers have beyond what workers were shown.

    Every rank must save or restore it in a checkpoint, or call `strategy.combine()` before one rank saves.
    """

    name, file, title = "tfps_held_back", "tfps_error_feedback.npz", "the residual of compression"

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
            arrays |= {f"{_EXACT}{place}": each.exact, f"{_SHOWN}{place}": np.array(each.worker_view, np.uint32)}
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


class _Carried(tf.train.experimental.PythonState):
    """An extra state as a checkpoint of its optimizer has it."""

    def __init__(self, state: ExtraState) -> None:
        self._state = state

    def serialize(self) -> bytes:
        self._state.collect()
        return _packed(self._state.arrays())

    def deserialize(self, string_value: bytes) -> None:
        self._state.restore(_unpacked(string_value)[0])


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
            setattr(optimizer, state.name, _Carried(state))  # Keras tracks it as it tracks variables


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


def _write(callback: Callback, state: ExtraState) -> None:
    """Writes `state` beside a backup that has just been saved."""
    step, path = int(callback.model.optimizer.iterations.numpy()), _beside(callback, state)
    with tf.io.gfile.GFile(f"{path}.part", "wb") as file:
        file.write(_packed(state.arrays(), step))
    tf.io.gfile.rename(f"{path}.part", path, overwrite=True)


def _read(callback: Callback, state: ExtraState) -> dict[str, Array] | None:
    """Reads what there is of `state` beside a backup that has just been restored.

    Returns None if there is nothing, or if it is of another step than the backup, which is logged as its loss.
    """
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


def _beside(callback: Callback, state: ExtraState) -> str:
    return str(tf.io.gfile.join(str(callback.backup_dir), state.file))


# BackupAndRestore.


@for_callbacks
def _restore_backup(
    original: Function, strategy: BaseStrategy, callback: Callback, *arguments: object, **options: object
) -> None:
    model, restored = callback.model, False
    if strategy.rank == 0:
        restored = tf.io.gfile.exists(str(callback._weights_path))  # Keras looks for it, too
        original(callback, *arguments, **options)
    if strategy.num_workers > 1:
        _take_from_first_rank(strategy, model, restored)
    for state in _states_of(strategy, model):
        state.collect()  # on all ranks; only the first knows whether there is a backup
        found = _read(callback, state) if strategy.rank == 0 else None
        if found is not None:
            state.restore(found)
        state.share(found is not None)


@for_callbacks
def _save_backup(original: Function, strategy: BaseStrategy, callback: Callback) -> None:
    model = callback.model
    if strategy.num_workers > 1:
        strategy.extended.policy.check_saves_now("BackupAndRestore")
    if strategy.rank == 0:
        original(callback)
    else:
        _first_rank_only(strategy, model.save_weights, callback._weights_path)
    for state in _states_of(strategy, model):
        state.collect()
        if strategy.rank == 0:
            _write(callback, state)


@for_callbacks
def _delete_backup(
    original: Function, strategy: BaseStrategy, callback: Callback, *arguments: object, **options: object
) -> None:
    if strategy.rank == 0:
        original(callback, *arguments, **options)


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
    own = take_from_first_rank([*model.weights, *model.optimizer.variables], strategy)
    strategy.extended.take_from_first_rank(list({id(each.value): each.value for each in own}.values()))


# Files that every rank writes.


_saving = contextvars.ContextVar("saving", default=False)  # whether a call that saves is under way


@for_models
def _save(
    original: Function,
    strategy: BaseStrategy,
    model: Model,
    filepath: str | os.PathLike[str],
    *arguments: object,
    **options: object,
) -> object:
    is_path = isinstance(filepath, str | os.PathLike)
    with strategy.extended.policy.global_parameters():
        if strategy.num_workers == 1 or _saving.get() or not is_path:
            return original(model, filepath, *arguments, **options)
        before = _saving.set(True)
        try:
            if not _is_one_file(original, model, filepath, *arguments, **options):
                call = functools.partial(original, model)
                return _first_rank_only(strategy, call, filepath, *arguments, **options)
            path = Path(filepath)
            # The name keeps its suffix: Keras picks the format by it.
            part = path.with_name(f".rank{strategy.rank}.{path.name}")
            try:
                result = original(model, part, *arguments, **options)
                _replace(part, path, strategy)
            finally:
                part.unlink(missing_ok=True)
            return result
        finally:
            _saving.reset(before)


def _is_one_file(
    save: Function, model: Model, filepath: str | os.PathLike[str], *arguments: object, **options: object
) -> bool:
    """Whether a call of `save` writes a single local file, without a question."""
    given = inspect.signature(save).bind(model, filepath, *arguments, **options).arguments
    said = {**given, **given.get("kwargs", {})}
    one = said.get("zipped") is not False and said.get("max_shard_size") is None
    return _is_local(str(filepath)) and one and bool(said.get("overwrite", True))


@for_models
def _export(
    original: Function, strategy: BaseStrategy, model: Model, filepath: str, *arguments: object, **options: object
) -> object:
    call = functools.partial(original, model)
    with strategy.extended.policy.global_parameters():
        return _first_rank_only(strategy, call, filepath, *arguments, **options)


def _first_rank_only(
    strategy: BaseStrategy, save: Function, filepath: str | os.PathLike[str], *arguments: object, **options: object
) -> object:
    """Saves on rank 0; other ranks write to a temporary directory, so they take part in any collective work."""
    if strategy.rank == 0:
        return save(filepath, *arguments, **options)
    with tempfile.TemporaryDirectory(prefix="tfps-") as scratch:
        return save(f"{scratch}/{str(filepath).rstrip('/').rpartition('/')[2]}", *arguments, **options)


def _replace(part: Path, path: Path, strategy: BaseStrategy) -> None:
    """Moves the whole file `part` to `path`."""
    state = strategy.extended.policy.state
    if state is None:
        part.replace(path)
        return
    bring(part, path, strategy.rank, strategy.num_workers, f"{strategy.extended.exchange.info.run}/{state}")


def _is_local(path: str) -> bool:
    return "://" not in path


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
            _link(part, claims[0])
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


def _link(file: Path, name: Path) -> None:
    """Makes `name` another name of `file`, or a copy where a file has one name only."""
    name.unlink(missing_ok=True)
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)


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


def _set_model(original: Function) -> Function:
    def set_model(self: Callback, model: Model) -> None:
        strategy = strategy_of(model)
        if strategy is not None and strategy.num_workers > 1:
            strategy.extended.policy.check_save_freq(type(self).__name__, self.save_freq)
        original(self, model)

    return set_model


@for_callbacks
def _save_checkpoint(
    original: Function, strategy: BaseStrategy, callback: Callback, epoch: int, batch: int | None, logs: Logs
) -> None:
    if strategy.num_workers > 1:
        if batch is not None:  # within an epoch logs are local; ranks would decide and name files differently
            strategy.extended.policy.check_saves_now("ModelCheckpoint")
            logs = agreed_logs(callback.model, logs or {})
        if "://" not in str(callback.filepath):
            # Several ranks may create it at once, which Keras does not expect.
            Path(callback._get_file_path(epoch, batch, logs)).parent.mkdir(parents=True, exist_ok=True)
    original(callback, epoch, batch, logs)


@for_callbacks
def _append_alike(
    original: Function, strategy: BaseStrategy, callback: Callback, *arguments: object, **options: object
) -> None:
    """Makes ranks that append to one file write each line at the same place, so that it is there once.

    Logs are the same on all ranks, and no rank ends an epoch before all have begun to train.
    """
    original(callback, *arguments, **options)
    if strategy.num_workers == 1 or not callback.append or not _is_local(str(callback.filename)):
        return
    callback.csv_file.close()
    callback.csv_file = open(callback.filename, "r+")  # noqa: SIM115, PTH123  # closed by Keras
    callback.csv_file.seek(0, os.SEEK_END)


@for_callbacks
def _send_once(
    original: Function, strategy: BaseStrategy, callback: Callback, epoch: int, logs: Logs | None = None
) -> None:
    if strategy.rank == 0:  # logs are the same on all ranks
        original(callback, epoch, logs)


class _Discarding:
    """Stands for Orbax' checkpointer where nothing is to be written: whatever it is asked to do is done."""

    def __getattr__(self, name: str) -> Callable[..., _Discarding]:
        return lambda *_, **__: self


def _set_orbax_model(original: Function) -> Function:
    checked = _set_model(original)

    def set_model(self: Callback, model: Model) -> None:
        strategy = strategy_of(model)
        if strategy is not None and strategy.rank > 0:  # it reads what rank 0 saves, which may take all ranks
            self.checkpointer.close()
            self.checkpointer = _Discarding()
        checked(self, model)

    return set_model


@for_callbacks
def _save_orbax(
    original: Function, strategy: BaseStrategy, callback: Callback, batch: int, logs: Logs | None = None
) -> None:
    if strategy.num_workers > 1 and callback.save_freq != "epoch":
        strategy.extended.policy.check_saves_now("OrbaxCheckpoint")
        if callback.save_best_only:  # within an epoch logs are local; ranks would decide differently
            logs = agreed_logs(callback.model, logs or {})
    original(callback, batch, logs)


# Variables.


def _track_what_functions_use(original: Function) -> Function:
    """A SavedModel tracks what functions use beside a variable of Keras: what TensorFlow's variable names.

    TensorFlow sees only the one of Keras.
    """

    def trackable_children(self: Variable, save_type: str = "checkpoint", **options: object) -> dict[str, object]:
        children: dict[str, object] = original(self, save_type, **options)
        own = of_tensorflow(self)
        if save_type == "savedmodel" and isinstance(own, tf.distribute.DistributedValues):
            children = {**own._trackable_children(save_type, **options), **children}
        return children

    return trackable_children


def _serialize_global(original: Function) -> Function:
    def serialize_to_tensors(self: Variable) -> dict[str, tf.Tensor]:
        shared = getattr(self.value, "global_copy", None)  # what a checkpoint has in its place
        return original(self) if shared is None else {"VARIABLE_VALUE": shared.read_value()}

    return serialize_to_tensors


_PROGRAMS, _LOCAL = "tests/integration/test_programs.py", "tests/integration/test_local_programs.py"
_ONE_FILE = "each rank writes a whole file, of global parameters where workers train alone; the last one is rank 0's"
_CALLED = "as `Model.save`, however a program has imported what calls it"
_backup, _checkpoint = keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint
_OUTER = "tests/policies/test_outer.py"
PATCHES: tuple[Patch, ...] = (
    Patch(keras.Model, "save", _save, _ONE_FILE, _PROGRAMS),
    Patch(keras.Model, "save_weights", _save, "as `Model.save`", _PROGRAMS),
    Patch(saving_lib, "save_model", _save, _CALLED, _PROGRAMS),
    Patch(saving_lib, "save_weights_only", _save, _CALLED, _PROGRAMS),
    Patch(legacy_h5_format, "save_model_to_hdf5", _save, _CALLED, _PROGRAMS),
    Patch(
        saving_lib,
        "_save_model_to_fileobj",
        for_models(with_global_parameters),
        "pickles global parameters where workers train alone",
        _OUTER,
    ),
    Patch(keras.Model, "export", _export, "rank 0 writes the folder, with global parameters", _PROGRAMS),
    Patch(
        _checkpoint, "set_model", _set_model, "refuses to save within an epoch where ranks are at other steps", _LOCAL
    ),
    Patch(
        _checkpoint, "_save_model", _save_checkpoint, "decides and names files by logs that ranks agree on", _PROGRAMS
    ),
    Patch(_backup, "set_model", _set_model, "refuses to save within an epoch where ranks are at other steps", _LOCAL),
    Patch(
        _backup,
        "on_train_begin",
        _restore_backup,
        "rank 0 restores and passes on: weights, then the residuals of compression, then what the policy adds",
        _LOCAL,
    ),
    Patch(_backup, "_save_model", _save_backup, "rank 0 writes, in the order in which it restores", _LOCAL),
    Patch(_backup, "on_train_end", _delete_backup, "rank 0 deletes the backup", _PROGRAMS),
    Patch(
        keras.callbacks.CSVLogger,
        "on_train_begin",
        _append_alike,
        "ranks that append to one file write each line at the same place",
        _PROGRAMS,
    ),
    Patch(keras.callbacks.RemoteMonitor, "on_epoch_end", _send_once, "rank 0 tells the server of an epoch", _PROGRAMS),
    Patch(
        keras.Variable,
        "_trackable_children",
        _track_what_functions_use,
        "a SavedModel has what functions use beside the variable",
        _PROGRAMS,
    ),
    Patch(
        keras.Variable,
        "_serialize_to_tensors",
        _serialize_global,
        "a checkpoint has the global parameters where workers train alone",
        _OUTER,
    ),
)
if hasattr(keras.callbacks, "OrbaxCheckpoint"):  # since Keras 3.14
    _orbax = keras.callbacks.OrbaxCheckpoint
    PATCHES += (
        Patch(_orbax, "set_model", _set_orbax_model, "rank 0 writes, all refuse what ModelCheckpoint refuses", _LOCAL),
        Patch(_orbax, "on_train_batch_end", _save_orbax, "decides by logs that ranks agree on", _PROGRAMS),
    )
