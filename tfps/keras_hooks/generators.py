"""Python generators that several loops read, one after the other: nothing that one has read ahead is lost.

Keras, tf.data and staging read ahead of training, as far as time allows: not equally far on each rank. What a loop has
read but not used is given back, and comes first for the next loop over the same generator object, in `fit` or in
`evaluate`. So each begins with the batch after the last one that was used, on every rank.

Tested in tests/keras_hooks/test_generators.py and tests/integration/test_programs.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

from tfps.errors import WaitTimeoutError
from tfps.graph.patches import BaseStrategy, replaced
from tfps.keras_hooks.hooks import replaces
from tfps.keras_hooks.keras_private import (
    GeneratorDataAdapter,
    continue_with,
    distributed_dataset,
    generator_adapter,
    trainer_module,
)
from tfps.types import Batches, Function, Structure

_TEST = "tests/keras_hooks/test_generators.py"
_LIMIT_S = 600.0  # for a generator to yield a batch that a loop which has ended is reading
Source = Generator[Structure, None, None]


class _Rest:
    """What a generator yields next: what was read of it too early, then its own. It does not keep the generator."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards all below, and the generator, in which it may stay for long
        self.early: deque[Structure] = deque()
        self.position = 0  # of the next batch
        self.reader: weakref.ref[View] | None = None  # the last one that gives back

    def peek(self, source: Source, ahead: int) -> tuple[int, Structure]:
        """The position of the batch that comes `ahead` batches after the next, and the batch; raises StopIteration."""
        self.free()
        with self.lock:
            while len(self.early) <= ahead:
                self.early.append(next(source))
            return self.position + ahead, self.early[ahead]

    def take(self, source: Source) -> Structure:
        """The next batch; the caller has the lock."""
        batch = self.early.popleft() if self.early else next(source)
        self.position += 1
        return batch

    def give_back(self, batches: Sequence[Structure]) -> None:
        """Makes `batches`, the last ones that were taken, the next; the caller has the lock."""
        self.early.extendleft(reversed(batches))
        self.position -= len(batches)

    def free(self) -> None:
        """Stops the last reader, and waits until it has given back what it has not used."""
        view = None if self.reader is None else self.reader()
        if view is None or view.ended.is_set():
            return
        view.stop()
        if not view.ended.wait(_LIMIT_S):
            raise WaitTimeoutError(
                f"a generator must yield a batch within {_LIMIT_S:.0f} s before another loop can read it: one that has "
                "ended still waits for it"
            )


class View(Iterator[Structure]):
    """One loop's way through a generator.

    It first yields those of the first batches of its adapter `again` that others have used, as Keras does. With `stop`,
    which ends the loop, it knows what is used and gives back the rest; without, what is read counts as used.
    """

    def __init__(self, source: Source, rest: _Rest, again: Sequence[Structure], stop: Callable[[], object] | None):
        self._source, self._rest, self._again = source, rest, deque(again)
        self._kept = stop is not None
        self.stop: Callable[[], object] = stop or (lambda: None)
        # Batches that may not be used yet: one thread appends, another removes those that are. And how many were
        # before: first those that are read again.
        self._out: deque[Structure] = deque()
        self._before = len(again)
        self.ended = threading.Event()

    def __next__(self) -> Structure:
        with self._rest.lock:
            if self.ended.is_set():
                raise StopIteration
            if self._again:
                return self._again.popleft()
            batch = self._rest.take(self._source)
            if self._kept:
                self._out.append(batch)
            return batch

    def used(self, count: int) -> None:
        """Notes that the first `count` batches have been used."""
        while self._before < count and self._out:
            self._out.popleft()
            self._before += 1

    def close(self, count: int) -> None:
        """Ends it when `count` batches have been used, and gives back the rest."""
        with self._rest.lock:  # waits for a batch that is being read
            self.used(count)
            self._rest.give_back(self._out)
            self._out.clear()
            self.ended.set()
        self.stop = lambda: None


_rests: weakref.WeakKeyDictionary[Source, _Rest] = weakref.WeakKeyDictionary()


class Reading:
    """How one data adapter of Keras reads a generator. `first` are those of its batches that Keras looks at before."""

    def __init__(self, source: Source) -> None:
        self._source, self._rest = source, _rests.setdefault(source, _Rest())
        self._first: list[tuple[int, Structure]] = []
        self._next: View | None = None  # of the loop that begins

    def look(self) -> Iterator[Structure]:
        """What comes next, without using it."""
        with contextlib.suppress(StopIteration):
            while True:
                self._first.append(self._rest.peek(self._source, len(self._first)))
                yield self._first[-1][1]

    def begin(self, stop: Callable[[], object], *, goes_on: bool) -> View:
        """Lets a loop begin, which `stop` ends; any loop before is stopped. tf.data opens what is returned.

        Args:
            goes_on: it is an earlier loop of this adapter that goes on, so it reads no batch again.
        """
        self._rest.free()
        with self._rest.lock:
            self._next = self._view(stop, goes_on=goes_on)
            self._rest.reader = weakref.ref(self._next)
            return self._next

    def open(self) -> View:
        """What tf.data reads: of the loop that has begun; of one that nobody has announced, all counts as used."""
        with self._rest.lock:
            view, self._next = self._next or self._view(None, goes_on=False), None
            return view

    def _view(self, stop: Callable[[], object] | None, *, goes_on: bool) -> View:
        again = [] if goes_on else [batch for position, batch in self._first if position < self._rest.position]
        return View(self._source, self._rest, again, stop)


_gives_back = contextvars.ContextVar("gives_back", default=False)  # whether a strategy of tfps reads what is adapted


@replaces(trainer_module.TFEpochIterator, "__init__", _TEST)
def _make_epochs(original: Function, epochs: Batches, *args: object, **options: object) -> None:
    """Lets loops over a generator give back what they have read ahead."""
    strategy = options.get("distribute_strategy", args[0] if args else None)
    before = _gives_back.set(isinstance(strategy, BaseStrategy))
    try:
        original(epochs, *args, **options)
    finally:
        _gives_back.reset(before)
    if (adapter := generator_adapter(epochs)) is not None and hasattr(adapter, "tfps_reading"):
        distributed_dataset(epochs).reading = adapter.tfps_reading


@replaces(GeneratorDataAdapter, "__init__", _TEST)
def _adapt(original: Function, adapter: Batches, source: Source) -> None:
    """Looks at first batches without using them, and reads those first that were given back."""
    if not _gives_back.get():
        original(adapter, source)
        return
    reading = Reading(source)
    original(adapter, reading.look())
    adapter.generator, adapter.tfps_reading = reading.open, reading


def current(epochs: Batches, iterator: Batches) -> Batches:
    """Returns `iterator`, or one that goes on for it if another loop over the same generator has stopped it."""
    if not getattr(iterator, "superseded", False):
        return iterator
    dataset = distributed_dataset(epochs)
    with replaced(dataset, "goes_on", True):
        fresh = iter(dataset)
    continue_with(epochs, fresh)
    return fresh
