"""Checks that weights and the values that updates read stay equal on all ranks during training.

An update returns a digest: what it read as of its step (learning rate, step counter) and, in turn with others, a
checksum of the weights it wrote. Rows of digests are exchanged every few steps in a bucket that no step waits for.
"""

from __future__ import annotations

import inspect
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfps.collectives import AllGather
from tfps.errors import MismatchError
from tfps.exchange.interface import Reply
from tfps.graph.ops import HOST
from tfps.graph.tf_private import distribute_lib
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import DeferredUpdate
from tfps.types import Argument, Array, Function, Structure, Value, Variable
from tfps.updates.variables import GatedVariable

KEPT = 6  # columns of a row for values that an update reads; further values share the last
_WIDTH = 3 + KEPT  # columns: what was updated (0: nothing), round, checksum, values
_MOST_ROWS = 64  # in one exchange
_LEAST_URGENT = 2**32 - 1
_COLUMNS, _CHUNK = 1024, 2**18  # of a checksum, in items
_MOST_CHUNKS = 64
_PRIME = 6364136223846793005  # multiplier of Knuth's generator: odd, without a pattern
_SHOWN = 3  # variables of a bucket that a message names


@dataclass(frozen=True)
class _Subject:
    """What rows describe: names of the weights and of the values their update reads, and which are floats."""

    weights: tuple[str, ...]
    labels: tuple[str, ...]
    floating: tuple[bool | None, ...]  # None: a checksum


class Invariants:
    """Compares this rank's digests with those of all others, of a job with several workers. Any thread may add rows."""

    def __init__(self, runtime: Runtime, every: int) -> None:  # steps between comparisons of a bucket's weights
        self._runtime, self._every = runtime, every
        self._rows = min(every, _MOST_ROWS)
        # The name refuses a rank with another number.
        self._said = AllGather(runtime, f"checks every {every} steps", key="checks", priority=_LEAST_URGENT)
        self._said.later()
        with tf.init_scope(), tf.device(HOST):
            self._flags = tf.constant(False), tf.constant(True)  # once: an eager constant takes 0.03 ms
        self._lock = threading.Lock()  # guards all below
        self._outbox: list[list[int]] = []
        self._subjects: dict[int, _Subject] = {}
        # By unique id of a variable that is updated eagerly: number, rounds.
        self._eager: dict[str, tuple[int, int]] = {}
        self._awaited: dict[tuple[int, int], dict[int, Array]] = {}  # rows by round and number, then by rank

    @staticmethod
    def of(runtime: Runtime, every: int) -> Invariants | None:
        """Returns the instance that all strategies of `runtime` share; None if there is nothing to compare."""
        if not every or runtime.exchange.view.workers == 1:
            return None
        return runtime.shared(Invariants, lambda: Invariants(runtime, every))

    def weigh(self, transfer: DeferredUpdate) -> tf.Tensor:
        """Whether the current round of `transfer` takes the checksum: buckets take turns to spread the cost."""
        return self._flags[self._due(transfer.bucket, transfer.round)]

    def _due(self, number: int, round_: int) -> bool:
        return (number + round_) % self._every == 0

    def note(self, transfer: DeferredUpdate, digests: Sequence[tf.Tensor]) -> None:
        """Takes the digests that the update of `transfer` returned, one per local replica."""
        due = self._due(transfer.bucket, transfer.round)
        if not due and not transfer.leads:
            return
        first, *others = (digest.numpy() for digest in digests)
        for replica, other in enumerate(others if due else (), 1):
            if (other != first).any():
                rank = self._runtime.exchange.rank
                raise MismatchError(
                    f"rank {rank}: after step {transfer.round + 1} of {_names(transfer.spec.names)} its devices 0 and "
                    f"{replica} have different weights or learning rates; change them by the strategy's variables only"
                )
        subject = _Subject(transfer.spec.names, *transfer.labels)
        self._add(transfer.bucket + 1, subject, [transfer.round, *map(int, first)])

    def note_eager(self, variable: Variable, function: Function, arguments: Sequence[Argument]) -> None:
        """Notes an eager update that just ran, if `variable` is trainable and this is the first local replica."""
        gated = isinstance(variable, GatedVariable) and variable.has_own_gates
        if not gated or distribute_lib.get_replica_context()._replica_id:
            return
        with self._lock:
            number, round_ = self._eager.get(variable._unique_id, (len(self._eager), 0))
            self._eager[variable._unique_id] = number, round_ + 1
        if not self._due(number, round_):
            return
        labels = names_of(function, arguments)
        values = [each for each in arguments if _is_number(each)][:KEPT]
        subject = _Subject(
            (str(variable.name).removesuffix(":0"),),
            tuple(labels.get(id(each), "a value") for each in values),
            tuple(floating(each) for each in values),
        )
        numbers = [int(as_number(tf.convert_to_tensor(each))) for each in values]
        checksum_ = zlib.crc32(np.ascontiguousarray(variable._values[0].read_value().numpy()).tobytes())
        self._add(-1 - number, subject, [round_, checksum_, *numbers, *[0] * (KEPT - len(numbers))])

    def _add(self, number: int, subject: _Subject, rest: list[int]) -> None:
        with self._lock:
            self._subjects[number] = subject
            self._outbox.append([number, *rest])
            if len(self._outbox) < self._rows:
                return
            rows, self._outbox = self._outbox, []
            self._said.push(np.array(rows, np.int64).reshape(-1), self._compare)  # declared with the updates: no wait

    def reset(self) -> None:
        """Forgets what has not been compared yet; all ranks do at the same place."""
        with self._lock:
            self._outbox.clear()
            self._awaited.clear()

    def _compare(self, reply: Reply) -> None:
        """Compares the rows of all ranks. Called by the update executor."""
        parts = reply.parts or {}  # none: a failure
        said = {rank: np.frombuffer(part, np.int64).reshape(-1, _WIDTH) for rank, part in parts.items()}
        if all((each == next(iter(said.values()))).all() for each in said.values()):
            return
        different: tuple[_Subject, int, Array, list[int]] | None = None
        with self._lock:
            for rank, rows in said.items():
                for row in rows[rows[:, 0] != 0]:
                    self._awaited.setdefault((int(row[1]), int(row[0])), {})[rank] = row
            for round_, number in sorted(
                key for key, by_rank in self._awaited.items() if by_rank.keys() >= said.keys()
            ):
                by_rank = self._awaited.pop((round_, number))
                rows = np.stack([by_rank[rank] for rank in sorted(by_rank)])
                if different is None and (rows != rows[0]).any():
                    different = self._subjects[number], round_, rows, sorted(by_rank)
        if different is not None:
            self._runtime.exchange.fail(MismatchError(_difference(*different)))


def names_of(function: Function, arguments: Sequence[Argument]) -> dict[int, str]:
    """Returns the parameter names of `arguments` in `function(component, gradient, *arguments)`, by their ids."""
    try:
        names = list(inspect.signature(function).parameters)[2:]
    except (TypeError, ValueError):  # no signature: a builtin
        return {}
    return {id(argument): name for argument, name in zip(arguments, names, strict=False)}


def _is_number(value: Value) -> bool:
    if not tf.is_tensor(value):
        return False
    dtype = tf.as_dtype(value.dtype)  # a Keras variable has the dtype's name
    return len(value.shape) == 0 and (dtype.is_floating or dtype.is_integer)


def floating(tensor: Value) -> bool | None:
    """Whether `as_number` encodes `tensor` as a float; None if by a checksum."""
    return bool(tf.as_dtype(tensor.dtype).is_floating) if _is_number(tensor) else None


def as_number(tensor: tf.Tensor) -> tf.Tensor:
    """Encodes `tensor` (no strings) in one int64: integers as is, floats as float64 bits, others by a checksum."""
    if not _is_number(tensor):
        return checksum([tf.cast(tensor, tf.int64) if tensor.dtype == tf.bool else tensor])
    if tensor.dtype.is_floating:
        return tf.bitcast(tf.cast(tensor, tf.float64), tf.int64)
    return tf.cast(tensor, tf.int64)


def digest(variables: Sequence[Variable], kept: Sequence[tf.Tensor], weigh: tf.Tensor) -> tf.Tensor:
    """Returns int64 [1 + KEPT], in an update: a checksum of the written `variables` (0 unless `weigh`), and `kept`."""
    nothing = tf.constant(0, tf.int64)
    weights = tf.cond(weigh, lambda: checksum([each.read_value() for each in variables]), lambda: nothing)
    with tf.device(HOST):
        values = [as_number(each) for each in kept]
        shared = values[KEPT - 1 :]
        if len(shared) > 1:
            values = [*values[: KEPT - 1], checksum([tf.stack(shared)])]
        return tf.stack([weights, *values, *[nothing] * (KEPT - len(values))])


def checksum(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sums 32-bit pieces of `tensors` in 64 bits, each times an odd number that its place determines."""
    flat = [tf.reshape(each, [-1]) for each in tensors]
    if len({each.dtype for each in flat}) == 1:
        flat = [tf.concat(flat, 0)] if len(flat) > 1 else flat
    total = tf.constant(0, tf.int64)
    for items in flat:
        size = int(items.shape[0])
        chunk = max(_CHUNK, -(-size // (_MOST_CHUNKS * _COLUMNS)) * _COLUMNS)
        for start in range(0, size, chunk):
            with tf.control_dependencies([total]):  # one after the other: pieces need twice the memory of the items
                total = total * _PRIME + _sum(items[start : start + chunk])
    return total


def _sum(items: tf.Tensor) -> tf.Tensor:
    """Sums the bits of flat `items`, each times the product of its row's and its column's number."""
    size = int(items.shape[0])
    rows = size // _COLUMNS
    total = tf.constant(0, tf.int64)
    if rows:
        for bits in _bits(tf.reshape(items[: rows * _COLUMNS], [rows, _COLUMNS])):
            total = total * _PRIME + tf.reduce_sum(tf.reduce_sum(bits * _odd(_COLUMNS), 1) * _odd(rows))
    if size % _COLUMNS:
        for bits in _bits(items[rows * _COLUMNS :]):
            total = total * _PRIME + tf.reduce_sum(bits * _odd(size % _COLUMNS))
    return total


def _bits(items: tf.Tensor) -> list[tf.Tensor]:
    """Returns the bits of `items` as int64 of up to 32 bits each, in the same shape; both halves of 64-bit items."""
    integer = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}[items.dtype.size]
    whole = items if items.dtype == integer else tf.bitcast(items, integer)
    if integer == tf.int64:
        return [tf.bitwise.right_shift(whole, 32), tf.bitwise.bitwise_and(whole, 2**32 - 1)]
    return [tf.cast(whole, tf.int64)]


def _odd(count: int) -> Array:
    return np.random.default_rng(1).integers(-(2**63), 2**63 - 1, count, np.int64) | 1


def _difference(subject: _Subject, round_: int, rows: Array, ranks: Sequence[int]) -> str:
    step = f"at step {round_ + 1} of {_names(subject.weights)}"
    for column, (label, is_float) in enumerate(zip(subject.labels, subject.floating, strict=True), 3):
        values = rows[:, column]
        if (values != values[0]).any():
            shown = values.view(np.float64) if is_float else values
            what = f"{label} is {by_value(shown, hexadecimal if is_float is None else decimal, ranks)}"
            break
    else:
        what = (
            f"the weights after the update have checksum {by_value(rows[:, 2], hexadecimal, ranks)} (processors of "
            "different kinds may round differently)"
        )
    return (
        f"the workers no longer train alike: {step} {what}. What is changed between steps (callbacks, assign, "
        "set_weights, load_weights, a learning rate) must be changed on every rank alike. Config(check_every=0) or "
        "TFPS_CHECK_EVERY=0 turns this check off"
    )


def by_value(values: Structure, shown: Callable[[Value], str], ranks: Sequence[int]) -> str:
    """Returns which of `ranks`, each with its value, have which: `0.1 on rank 0, 2 and 0.2 on rank 1`."""
    found: dict[bytes, tuple[Value, list[int]]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value.tobytes(), (value, []))[1].append(rank)
    return " and ".join(f"{shown(value)} on rank {', '.join(map(str, who))}" for value, who in found.values())


def decimal(value: Value) -> str:
    """Formats `value` at its own precision: a float32 does not get the digits of a float64."""
    return str(np.float32(value) if isinstance(value, np.float64) and np.float32(value) == value else value)


def hexadecimal(value: Value) -> str:
    return f"{int(value) & (2**64 - 1):016x}"


def _names(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
