"""Everything that a training depends on, in one place: what a worker that joins takes over from the others.

That is, by construction: every variable that the strategy has created, of any model, optimizer or layer; what pservers
keep for them; constants that models have captured; what callbacks have found; random states; the place in the data.
Metrics begin anew with the epoch, sums of gradients that are not applied yet are each rank's own.

Tested in tests/elastic/test_joined.py and tests/keras_hooks/test_training_state.py.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfps.errors import JoinError
from tfps.graph.patches import BaseStrategy
from tfps.graph.tf_private import values
from tfps.keras_hooks import python_data, random_numbers
from tfps.keras_hooks.captured import Captured
from tfps.keras_hooks.kept_rows import KeptRows
from tfps.keras_hooks.keras_private import (
    continues,
    distributed_dataset,
    global_seeds,
    has_read,
    known_batches,
    set_global_seeds,
    set_known_batches,
)
from tfps.keras_hooks.variables import ACCUMULATOR, fingerprint
from tfps.types import Argument, Array, Callback, Json, Model, Optimizer, Variable

_PLAIN, _SETTINGS = "plain", "settings"
_ARRAY = "tfps array"  # key of what stands for an array in JSON
_SMALL = 1024  # items of a variable that may be a setting of the next steps


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A `TrainingState` at one moment, without the values of variables.

    Attributes:
        plain: what JSON can say.
        arrays: arrays of any dtype, by name.
    """

    plain: dict[str, Json]
    arrays: dict[str, Array]

    def packed(self) -> bytes:
        """As `unpacked` takes it, on another rank."""
        file, plain = io.BytesIO(), np.frombuffer(json.dumps(self.plain).encode(), np.uint8)
        np.savez(file, **{_PLAIN: plain, **self.arrays})  # type: ignore[arg-type]  # it takes any name
        return file.getvalue()

    @staticmethod
    def unpacked(content: bytes) -> Snapshot:
        """The reverse of `packed`; lists stand for tuples."""
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = dict(file)
        return Snapshot(json.loads(arrays.pop(_PLAIN).tobytes()), arrays)


class TrainingState:
    """Of the training under way, whose callbacks are in `callbacks`.

    Ranks compare what they have (`inventory`), and agree on it (`restrict`). Those who join then get the values of
    `variables` and `constants` (`Extended.take_from_first_rank`), and `apply` what another rank has captured
    (`capture`). In the end all have the same `digest`.
    """

    def __init__(self, strategy: BaseStrategy, callbacks: Callback) -> None:
        self._strategy, self._callbacks = strategy, callbacks.callbacks
        self._model: Model = callbacks.model
        metrics = {id(each.value) for each in self._model.metrics_variables}
        own = {id(each.value) for each in self._model.variables} - metrics
        self._found: dict[int, Variable | Captured] = {}  # by order of creation, the same on all ranks
        self._apart: list[Variable] = []  # that each rank has for itself
        for number, reference in enumerate(strategy.extended.initial_values.agreed):
            variable = reference()
            if isinstance(variable, values.MirroredVariable) and ACCUMULATOR in variable.name:
                self._apart.append(variable)
            elif isinstance(variable, (values.MirroredVariable, Captured)) or id(variable) in own:
                self._found[number] = variable
        self._traced = {number: each.numpy() for number, each in self._found.items() if isinstance(each, Captured)}

    @property
    def variables(self) -> list[Variable | Captured]:
        """Whose values are part of the state: variables of TensorFlow, and constants of models."""
        return list(self._found.values())

    def inventory(self) -> dict[str, str]:
        """Name, shape and dtype of each variable, by number, and the settings of the optimizer."""
        found = {str(number): _described(each) for number, each in self._found.items()}
        return {**found, _SETTINGS: _settings(self._model.optimizer)}

    def restrict(self, inventories: Sequence[Mapping[str, str]]) -> None:
        """Leaves out what some rank has not any more."""
        self._found = {
            number: each for number, each in self._found.items() if all(str(number) in said for said in inventories)
        }

    def difference(self, theirs: Mapping[str, str], own: Mapping[str, str]) -> str:
        """Says where `own`, the inventory of one who joins, is not `theirs`; empty: nowhere that matters."""
        for number, text in theirs.items():
            if number in own and own[number] != text:
                if number == _SETTINGS:
                    return f"its optimizer differs from the others': {_first_difference(own[number], text)}"
                return f"it has other variables than the others: {own[number]!r} where they have {text!r}"
        last = max((int(number) for number in own if number != _SETTINGS), default=-1)
        later = [text for number, text in theirs.items() if number != _SETTINGS and int(number) > last]
        if later:
            return f"the others have created {later[0]} in this training, which it has not"
        return ""

    def digest(self) -> Array:
        """Fingerprints of the values, int64 [variables]."""
        return np.array([fingerprint(each.numpy()) for each in self._found.values()], np.int64)

    def described(self, place: int) -> str:
        """The variable at `place` of the digest, for messages."""
        return _described(self.variables[place])

    def capture(self, batch: int) -> Snapshot:
        """The state before `batch` of the epoch."""
        extended = self._strategy.extended
        position, agreement = extended.training, extended.staging.agreement
        epochs = position.iterator
        dataset = distributed_dataset(epochs)
        # Of the iterator that goes on, if one does: how many batches it has given.
        taken = (agreement.taken or 0) if batch or has_read(epochs) else 0
        is_open = batch > 0 or continues(epochs)
        missed = position.begun_epochs - (batch > 0)
        arrays: dict[str, Array] = {}
        plain = {
            "epoch": position.epoch,
            "batch": batch,
            "taken": taken,
            "iterators": agreement.places,
            "opened": getattr(dataset, "opened", 0) - is_open,  # before the one that is read next
            "is_open": is_open,
            "known_batches": known_batches(epochs),
            "shuffles": random_numbers.shuffles(epochs),
            "python_data": python_data.position(epochs, missed, goes_on=taken > 0),
            "random": {**random_numbers.states(), "keras": global_seeds()},
            "missed": missed,
            "stops": bool(self._model.stop_training),
            "callbacks": {key: found_by(key, each, arrays) for key, each in keyed(self._callbacks)},
            "remote": [each.place(arrays, f"remote/{number}") for number, each in enumerate(self._remote)],
        }
        return Snapshot(plain, arrays)

    @property
    def _remote(self) -> Iterator[Argument]:
        """What pservers have of the variables."""
        for each in self._found.values():
            if (remote := getattr(each, "remote", None)) is not None:
                yield remote
                yield from remote.slots

    def move_remote(self, snapshot: Snapshot) -> None:
        """Finds on pservers what was there for the rank that captured `snapshot`: another rank, or this one before.

        Assigning the variables that it belongs to has overwritten it.
        """
        for number, (each, place) in enumerate(zip(self._remote, snapshot.plain["remote"], strict=True)):
            each.move(place, snapshot.arrays, f"remote/{number}")

    def apply(self, snapshot: Snapshot) -> list[str]:
        """Goes on where the rank was that captured `snapshot`; the variables have its values already.

        Returns the callbacks that begin anew.

        Raises:
            JoinError: it cannot.
        """
        extended, said = self._strategy.extended, snapshot.plain
        position, epochs = extended.training, extended.training.iterator
        self._check_traced()
        for variable in self._apart:
            variable.assign(tf.zeros_like(variable))
        self.move_remote(snapshot)
        goes_on = int(said["taken"] > 0)  # an iterator goes on, which is counted among these
        extended.staging.agreement.places = said["iterators"] - goes_on
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
        self._model.stop_training = said["stops"]
        anew = [
            key
            for key, callback in keyed(self._callbacks)
            if (found := said["callbacks"].get(key)) is not None and not set_found(key, callback, found, snapshot)
        ]
        random_numbers.set_states(said["random"])
        set_global_seeds(said["random"]["keras"])
        position.move(self._model, said["epoch"])
        return anew

    def _check_traced(self) -> None:
        """Raises JoinError if this rank has traced its step with other constants than the others have."""
        for number, own in self._traced.items():
            constant = self._found.get(number)
            if constant is None or np.allclose(constant.numpy(), own, rtol=1e-3, atol=1e-6):  # hosts may round
                continue
            raise JoinError(
                f"a worker that joins must have the constants of the others, but the model has captured another one as "
                f"{constant.name!r}, computed from weights or random numbers when it was built; set one seed on all "
                "ranks before the model is built (keras.utils.set_random_seed)"
            )

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What is assigned in the block to scalars and small variables is undone: others have done it before."""
        small = [
            each
            for each in self._found.values()
            if isinstance(each, values.MirroredVariable) and (each.shape.num_elements() or _SMALL + 1) <= _SMALL
        ]
        before = [each.numpy() for each in small]
        yield
        for variable, value in zip(small, before, strict=True):
            if variable.numpy().tobytes() != value.tobytes():
                variable.assign(value)


def _described(variable: Variable | Captured) -> str:
    return f"{variable.name} {variable.shape} {variable.dtype.name}"


def _settings(optimizer: Optimizer) -> str:
    """The settings of `optimizer` that are not variables."""
    config = {"class": type(optimizer).__name__, **optimizer.get_config()}
    if isinstance(config.get("learning_rate"), float):
        del config["learning_rate"]  # a variable
    return json.dumps(config, default=repr, sort_keys=True)


def _first_difference(own: str, theirs: str) -> str:
    mine, its = json.loads(own), json.loads(theirs)
    for name in (*its, *mine):
        if (here := mine.get(name)) != (there := its.get(name)):
            return f"{name} is {here!r}, not {there!r}"
    raise AssertionError("they are equal")


# What callbacks have found: of Keras' own what has changed since training began, of others what they say themselves.


def keyed(callbacks: Sequence[Callback]) -> list[tuple[str, Callback]]:
    """The callbacks with names: class, and how many of it come before."""
    seen: Counter[str] = Counter()
    keyed = []
    for each in callbacks:
        kind = f"{type(each).__module__}.{type(each).__qualname__}"
        keyed.append((f"{kind} {seen[kind]}", each))
        seen[kind] += 1
    return keyed


def note_begun(callbacks: Sequence[Callback]) -> None:
    """Notes what `callbacks` have when training begins."""
    for each in callbacks:
        each.tfps_begun = copy.deepcopy(_plain_of(each))


def _of_keras(callback: Callback) -> bool:
    """Whether `callback` is one of Keras' own with a state, or inherits from one."""
    stateless = (keras.callbacks.Callback, keras.callbacks.LambdaCallback)
    return any(each.__module__.startswith("keras.") and each not in stateless for each in type(callback).__mro__)


def _plain_of(callback: Callback) -> dict[str, Json]:
    """The attributes of `callback` that JSON can say, but for settings: those of Keras and its arguments."""
    settings = {"params", "tfps_begun"}
    for each in type(callback).__mro__:
        settings.update(inspect.signature(each.__init__).parameters)  # type: ignore[misc]
    found = {name: in_json(value) for name, value in vars(callback).items() if name not in settings}
    return {name: value for name, value in found.items() if _plain(value)}


def _plain(value: Argument) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def in_json(value: Argument) -> Argument:
    """`value`, which JSON can say, with numbers of Python in the place of NumPy's; see `from_json` for small arrays."""
    if isinstance(value, dict):
        return {key: in_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(each) for each in value]
    if isinstance(value, np.ndarray) and value.size <= _SMALL and value.dtype.kind in "biuf":  # as of F1Score
        return {_ARRAY: value.tolist(), "dtype": value.dtype.name}
    return value.item() if isinstance(value, np.generic) else value


def from_json(value: Argument) -> Argument:
    """The reverse of `in_json`, with lists for tuples."""
    if isinstance(value, dict):
        if _ARRAY in value:
            return np.array(value[_ARRAY], value["dtype"])
        return {key: from_json(each) for key, each in value.items()}
    return [from_json(each) for each in value] if isinstance(value, list) else value


def found_by(key: str, callback: Callback, arrays: dict[str, Array]) -> Json:
    """What `callback` has found, for `set_found`; lists of arrays go to `arrays`."""
    if callable(get := getattr(callback, "get_state", None)) and not _of_keras(callback):
        state = in_json(get())
        if not _plain(state):
            raise JoinError(f"{key.split()[0]}.get_state() must give what JSON can say")
        return {"state": state}
    begun = getattr(callback, "tfps_begun", {})
    changed = {name: each for name, each in _plain_of(callback).items() if name not in begun or begun[name] != each}
    if not _of_keras(callback):
        return {"anew": bool(changed) and not type(callback).__module__.startswith("tfps.")}
    lists: dict[str, int] = {}
    kept: dict[str, Json] = {}
    for name, value in vars(callback).items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(each, np.ndarray) for each in value):
            lists[name] = len(value)
            arrays |= {f"{key}/{name}/{number}": each for number, each in enumerate(value)}
            kept |= {f"{name}/{place}": each.said for place, each in enumerate(value) if isinstance(each, KeptRows)}
    return {"changed": changed, "lists": lists, "kept": kept}


def set_found(key: str, callback: Callback, found: Json, snapshot: Snapshot) -> bool:
    """Gives `callback` what another rank's has found; returns False if it begins anew in spite of that."""
    if "state" in found:
        callback.set_state(from_json(found["state"]))
    for name, value in found.get("changed", {}).items():
        setattr(callback, name, from_json(value))
    for name, count in found.get("lists", {}).items():
        values = [snapshot.arrays[f"{key}/{name}/{number}"] for number in range(count)]
        said = [found["kept"].get(f"{name}/{number}") for number in range(count)]
        values = [KeptRows.of(each, of) if of else each for each, of in zip(values, said, strict=True)]
        setattr(callback, name, values)
    if isinstance(callback, keras.callbacks.CSVLogger) and callback.csv_file is not None:
        callback.csv_file.seek(0, os.SEEK_END)  # the others have written lines since it was opened
    return not found.get("anew", False)
