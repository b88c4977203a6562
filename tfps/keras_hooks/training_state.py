"""Everything that a training depends on, in one place: what a worker that joins takes over from the others.

That is: variables, what pservers keep for them, constants that the model has captured, what Keras' own callbacks have
found, random states, and the place in the data.

Tested in tests/elastic/test_joined.py and tests/keras_hooks/test_training_state.py.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from tfps.errors import MismatchError
from tfps.graph.patches import BaseStrategy
from tfps.keras_hooks import python_data, random_numbers
from tfps.keras_hooks.captured import Captured, captured_by
from tfps.keras_hooks.keras_private import (
    continues,
    distributed_dataset,
    has_read,
    known_batches,
    set_known_batches,
)
from tfps.keras_hooks.variables import RemoteVariable
from tfps.runtime.remote import RemoteParameter, RemoteSlot
from tfps.types import Array, Callback, Json, Model, Variable
from tfps.updates.states import fingerprint

Digest = tuple[list[str], list[int]]  # names, fingerprints
_PLAIN = "plain"  # name of what is not an array in a packed snapshot
# What Keras' callbacks have found so far. Arrays may be among them.
_FOUND: dict[type, tuple[str, ...]] = {
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A `TrainingState` at one moment, without the values of variables.

    Attributes:
        digest: of the whole state.
        plain: what JSON can say.
        arrays: arrays of any dtype, by name.
    """

    digest: Digest
    plain: dict[str, Json]
    arrays: dict[str, Array]

    def packed(self) -> bytes:
        """As `unpacked` takes it, on another rank."""
        text = json.dumps([self.digest, self.plain], default=float)
        file, plain = io.BytesIO(), np.frombuffer(text.encode(), np.uint8)
        np.savez(file, **{_PLAIN: plain, **self.arrays})  # type: ignore[arg-type]  # it takes any name
        return file.getvalue()

    @staticmethod
    def unpacked(content: bytes) -> Snapshot:
        """The reverse of `packed`; lists stand for tuples."""
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = dict(file)
        digest, plain = json.loads(arrays.pop(_PLAIN).tobytes())
        return Snapshot(digest, plain, arrays)


class TrainingState:
    """Of the training under way, whose callbacks are in `callbacks`.

    On one who has the state: `capture`, `digest`. On one who takes it over: `check_names`, then the values of
    `variables` and `constants` come (`Extended.take_from_first_rank`), then `apply`, and `check` that all is equal.

    Attributes:
        variables: TensorFlow's, whose values are part of the state; no metrics, which begin anew with the epoch.
        constants: of the model and models within it.
    """

    def __init__(self, strategy: BaseStrategy, callbacks: Callback) -> None:
        self._strategy, self._callbacks = strategy, callbacks.callbacks
        self._model: Model = callbacks.model
        self.variables, self._remote = _variables(self._model)
        self.constants = captured_by(self._model)
        self._traced = [each.numpy() for each in self.constants]  # with which this rank may have traced a step

    @property
    def names(self) -> list[str]:
        """Name, shape and dtype of each variable."""
        return [f"{each.name} {each.shape} {each.dtype.name}" for each in self.variables]

    def digest(self) -> Digest:
        """The names, and the fingerprints of the values."""
        return self.names, [fingerprint(each.numpy()) for each in self.variables]

    def check_names(self, snapshot: Snapshot) -> None:
        """Raises MismatchError if this rank's variables are others than those of the rank that gave `snapshot`."""
        theirs, own = snapshot.digest[0], self.names
        if theirs != own:
            first = next((pair for pair in zip(theirs, own, strict=False) if pair[0] != pair[1]), ("", ""))
            raise MismatchError(
                f"a worker that joins must have the variables of the others, got {len(own)} and {len(theirs)}"
                f"; the first that differ are {first[1]!r} here and {first[0]!r} there"
            )

    def check(self, snapshot: Snapshot) -> None:
        """Raises MismatchError if this rank, which has applied `snapshot`, has another state than who gave it."""
        _check_traced(self.constants, self._traced)
        for name, theirs, own in zip(*snapshot.digest, self.digest()[1], strict=True):
            if theirs != own:
                raise MismatchError(
                    f"a worker that joins must have the values of the others, but those of {name!r} have the checksum "
                    f"{own:#x} here and {theirs:#x} there: was it assigned on some ranks only?"
                )

    def capture(self, batch: int) -> Snapshot:
        """The state before `batch` of the epoch."""
        extended = self._strategy.extended
        position, lockstep = extended.training, extended.staging.lockstep
        epochs = position.iterator
        dataset = distributed_dataset(epochs)
        # Of the iterator that goes on, if one does: how many batches it has given.
        taken = (lockstep.taken or 0) if batch or has_read(epochs) else 0
        is_open = batch > 0 or continues(epochs)
        missed = position.begun_epochs - (batch > 0)
        found, arrays = _found(self._callbacks)
        plain = {
            "epoch": position.epoch,
            "batch": batch,
            "taken": taken,
            "iterators": lockstep.places,
            "opened": getattr(dataset, "opened", 0) - is_open,  # before the one that is read next
            "is_open": is_open,
            "known_batches": known_batches(epochs),
            "shuffles": random_numbers.shuffles(epochs),
            "python_data": python_data.position(epochs, missed, goes_on=taken > 0),
            "missed": missed,
            "callbacks": found,
            "remote": [each.place(arrays, f"remote/{number}") for number, each in enumerate(self._remote)],
        }
        return Snapshot(self.digest(), plain, arrays)

    def move_remote(self, snapshot: Snapshot) -> None:
        """Finds on pservers what was there for the rank that captured `snapshot`: another rank, or this one before.

        Assigning the variables that it belongs to has overwritten it.
        """
        for number, (each, place) in enumerate(zip(self._remote, snapshot.plain["remote"], strict=True)):
            each.move(place, snapshot.arrays, f"remote/{number}")

    def apply(self, snapshot: Snapshot) -> None:
        """Goes on where the rank was that captured `snapshot`, from its data's place to what callbacks have found."""
        extended, said = self._strategy.extended, snapshot.plain
        position, epochs = extended.training, extended.training.iterator
        self.move_remote(snapshot)
        goes_on = int(said["taken"] > 0)  # an iterator goes on, which is counted among these
        extended.staging.lockstep.places = said["iterators"] - goes_on
        skips = {"opened": said["opened"], "skipping": said["taken"]}
        begins_there = python_data.go_on(epochs, said["python_data"], **skips)
        distributed_dataset(epochs).open_until(
            said["opened"], said["taken"], reads_skipped=not begins_there, open_elsewhere=said["is_open"]
        )
        random_numbers.set_shuffles(epochs, said["shuffles"] - goes_on)
        set_known_batches(epochs, said["known_batches"])
        position.skipped_steps, position.begun_epochs = said["batch"], said["missed"]
        seen = epochs.steps_per_epoch is not None and goes_on
        position.seen_steps = said["taken"] - said["batch"] if seen else 0
        _set_found(self._callbacks, said["callbacks"], snapshot.arrays)
        position.move(self._model, said["epoch"])


def _variables(model: Model) -> tuple[list[Variable], list[RemoteParameter | RemoteSlot]]:
    """The variables whose values are part of the state, and what pservers have of them."""
    metrics = {id(variable) for variable in model.metrics_variables}
    found = [each for each in (*model.variables, *model.optimizer.variables) if id(each) not in metrics]
    own = list({id(each.value): each.value for each in found if not isinstance(each, RemoteVariable)}.values())
    remote = [each.remote for each in own if getattr(each, "remote", None) is not None]
    slots = {id(each): each.slot for each in found if isinstance(each, RemoteVariable)}
    return own, [*remote, *slots.values()]


def _check_traced(constants: Sequence[Captured], before: Sequence[Array]) -> None:
    """Raises MismatchError if this rank has traced its step with other `constants` than the others have."""
    for constant, own in zip(constants, before, strict=True):
        if not np.allclose(constant.numpy(), own, rtol=1e-3, atol=1e-6):  # hosts may round differently
            raise MismatchError(
                f"a worker that joins must have the constants of the others, but the model has captured another one as "
                f"{constant.name!r}, computed from weights or random numbers when it was built; set one seed on all "
                "ranks before the model is built (keras.utils.set_random_seed)"
            )


def _found(callbacks: Sequence[Callback]) -> tuple[list[Json], dict[str, Array]]:
    """What Keras' own callbacks have found, in their order; lists of arrays apart, by place and name."""
    found, arrays = [], {}
    for place, callback in enumerate(callbacks):
        names = next((names for kind, names in _FOUND.items() if type(callback) is kind), ())
        values = {}
        for name in names:
            value = getattr(callback, name, None)
            if name == "best_weights":
                for number, each in enumerate(value or ()):
                    arrays[f"{place}/{name}/{number}"] = np.asarray(each)
                value = None if value is None else len(value)
            values[name] = value
        found.append(values)
    return found, arrays


def _set_found(callbacks: Sequence[Callback], found: Sequence[Json], arrays: Mapping[str, Array]) -> None:
    for place, (callback, values) in enumerate(zip(callbacks, found, strict=False)):
        for name, value in values.items():
            if name == "best_weights" and value is not None:
                value = [arrays[f"{place}/{name}/{number}"] for number in range(value)]
            setattr(callback, name, value)
