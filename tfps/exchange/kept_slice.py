"""Parameters and slots of one slice where they live. No I/O and no locks: the caller holds the slice's."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ProtocolError
from tfps.exchange import rules
from tfps.exchange.update_spec import StepNumbers, UpdateSpec
from tfps.types import Buffer

_ITEM_BYTES = 4


class KeptSlice:
    """Part of a bucket's parameters (number 0) and of its slots (numbers 1, 2, ... in the order of the spec).

    The parameters have no values until they have been put; slots begin with those of the spec.

    Args:
        label: for messages.
        begin, nbytes: the part of the bucket, in bytes.
        shows: whether to keep what workers have of the parameters, too, as the last number; see shown.py.
    """

    def __init__(self, label: str, spec: UpdateSpec, begin: int, nbytes: int, *, shows: bool = False) -> None:
        self.label, self.spec = label, spec
        first, items = begin // _ITEM_BYTES, nbytes // _ITEM_BYTES
        self._arrays: list[NDArray[np.float32]] = [np.zeros(items, np.float32)]  # zeros take memory when written to
        for _, value in spec.slots:
            self._arrays.append(np.full(items, value, np.float32) if value else np.zeros(items, np.float32))
        self._shows = shows
        if shows:
            self._arrays.append(np.zeros(items, np.float32))
        self._put: dict[int, NDArray[np.float32]] = {}  # arrays from the next update on
        self._missing = [(0, nbytes)] if nbytes else []  # parameters that have not been put yet: first byte, end
        self._runs = _runs(spec, first, items)

    @property
    def nbytes(self) -> int:
        """Of the parameters."""
        return self._arrays[0].nbytes

    def put(self, number: int, begin: int, values: Buffer) -> None:
        """Replaces the bytes from `begin` on of array `number`, from the next update on; parameters are shown, too.

        Until then other ranks read what was there after the last one. A new array takes the place of the old one, of
        which a reply may still be on its way.

        Raises:
            ProtocolError: there is no such part.
        """
        nbytes = memoryview(values).nbytes
        self._check(number, begin, nbytes)
        if number not in self._put:
            self._put[number] = self._arrays[number].copy()
        self._put[number].view(np.uint8)[begin : begin + nbytes] = np.frombuffer(values, np.uint8)
        if number == 0:
            around = [part for a, b in self._missing for part in ((a, min(b, begin)), (max(a, begin + nbytes), b))]
            self._missing = [(a, b) for a, b in around if a < b]
            if self._shows:
                self.put(len(self._arrays) - 1, begin, values)

    def get(self, number: int, begin: int, nbytes: int) -> bytes:
        """A copy of `nbytes` from `begin` on of array `number`, as of the last update.

        Raises:
            ProtocolError: there is no such part.
        """
        self._check(number, begin, nbytes)
        return self._arrays[number].view(np.uint8)[begin : begin + nbytes].tobytes()

    def update(self, gradient: Buffer, numbers: StepNumbers) -> memoryview:
        """Applies the rule; returns the bytes of the new parameters, which change with the next update.

        Raises:
            ProtocolError: the parameters have not been put.
        """
        self.check_put()
        self.take_new()
        slots = {name: each for (name, _), each in zip(self.spec.slots, self._arrays[1:], strict=False)}
        g = np.frombuffer(gradient, np.uint8).view(np.float32)
        named = dict(zip(self.spec.numbers, numbers.values, strict=True))
        rules.update(self.spec, self._runs, self._arrays[0], slots, g, named)
        return self._arrays[0].view(np.uint8).data

    @property
    def shown(self) -> NDArray[np.float32]:
        """What workers have of the parameters, if it is kept; see `Change`. Use it between an update and the next."""
        return self._arrays[-1]

    def check_put(self) -> None:
        """Checks that there are parameters.

        Raises:
            ProtocolError: they have not been put.
        """
        if self._missing:
            missing = sum(end - first for first, end in self._missing)
            raise ProtocolError(
                f"the parameters of {self.label} must be put before its first update, {missing} bytes are missing"
            )

    def take_new(self) -> None:
        """Makes what has been put count."""
        for number, changed in self._put.items():
            self._arrays[number] = changed
        self._put.clear()

    def _check(self, number: int, begin: int, nbytes: int) -> None:
        size = self._arrays[0].nbytes
        if not 0 <= number < len(self._arrays) or begin < 0 or nbytes < 0 or begin + nbytes > size:
            raise ProtocolError(
                f"{self.label} has {len(self._arrays)} arrays of {size} bytes, got array {number}, bytes {begin} to "
                f"{begin + nbytes}"
            )


def _runs(spec: UpdateSpec, first: int, items: int) -> list[tuple[int, int, bool]]:
    """The parts of the slice with and without weight decay: first item, end, whether it decays."""
    runs: list[tuple[int, int, bool]] = []
    ends = itertools.accumulate(spec.sizes)
    for size, end, decayed in zip(spec.sizes, ends, spec.decayed, strict=True):
        begin, stop = max(end - size - first, 0), min(end - first, items)
        if begin >= stop:
            continue
        if runs and runs[-1][2] == decayed:
            runs[-1] = runs[-1][0], stop, decayed
        else:
            runs.append((begin, stop, decayed))
    return runs
