"""Parameters and slots of one slice where they live. No I/O and no locks: the caller holds the slice's."""

from __future__ import annotations

import itertools

import numpy as np

from tfps.errors import ProtocolError
from tfps.exchange import rules
from tfps.exchange.codecs import ITEM_BYTES, Bytes, Codec, Floats
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.types import Buffer

_MOST_PUT, _MOST_PUTS = 2, 2**16  # of what waits for the next step: times all arrays, and parts


class ParameterShard:
    """Part of a bucket's parameters (array 0) and of its slots (arrays 1, 2, ... in the order of the spec).

    The parameters have no values until they have been put; slots begin with those of the spec. If `viewed`, the last
    array is the **shadow copy**: the parameters as all workers have them.
    """

    def __init__(self, label: str, spec: UpdateSpec, begin: int, nbytes: int, *, viewed: bool = False) -> None:
        self.label, self.spec = label, spec
        first, items = begin // ITEM_BYTES, nbytes // ITEM_BYTES
        values = [0.0, *(value for _, value in spec.slots), *([0.0] if viewed else [])]
        self._arrays: list[Floats] = [  # zeros take memory when written to
            np.full(items, value, np.float32) if value else np.zeros(items, np.float32) for value in values
        ]
        self._viewed = viewed
        self._put: list[tuple[int, int, bytes]] = []  # number of the array, first byte, values
        self._updated = False
        self._missing = [(0, nbytes)] if nbytes else []  # parameters without values: first byte, end
        self._runs = _runs(spec, first, items)

    def put(self, number: int, begin: int, values: Buffer) -> None:
        """Replaces the bytes from `begin` on of array `number`, from the next `take_put` on.

        Writing array 0 also overwrites the shadow copy: every rank has just assigned it. Write that last if it must
        differ.
        """
        values = bytes(values)
        end = begin + len(values)
        self._check(number, begin, len(values))
        # What this replaces wholly needs no memory any more: a program may assign often between two steps.
        kept = [put for put in self._put if put[0] != number or put[1] < begin or put[1] + len(put[2]) > end]
        most = _MOST_PUT * self._arrays[0].nbytes * len(self._arrays)
        if sum(len(put[2]) for put in kept) + len(values) > most or len(kept) >= _MOST_PUTS:
            raise ProtocolError(
                f"what is put into {self.label} between two steps must be at most {_MOST_PUTS} parts and {most} bytes, "
                f"where parts overlap, got one more of {len(values)} bytes"
            )
        self._put = [*kept, (number, begin, values)]

    def take_put(self) -> None:
        """Makes what has been put count; other bytes stay as updates have left them.

        Changed arrays are new ones: a reply with the old one may still be on its way.
        """
        changed: dict[int, Floats] = {}
        for number, begin, values in self._put:
            for each in (0, len(self._arrays) - 1) if number == 0 and self._viewed else (number,):
                if each not in changed:
                    changed[each] = self._arrays[each].copy()
                changed[each].view(np.uint8)[begin : begin + len(values)] = np.frombuffer(values, np.uint8)
            if number == 0:
                end = begin + len(values)
                around = [part for a, b in self._missing for part in ((a, min(b, begin)), (max(a, end), b))]
                self._missing = [(a, b) for a, b in around if a < b]
        for each, array in changed.items():
            self._arrays[each] = array
        self._put = []

    def resume(self) -> None:
        """What has been put is from other owners: assigned values that are put from now on wait for `take_put`."""
        self.take_put()
        self._updated = not self._missing

    def get(self, number: int, begin: int, nbytes: int) -> bytes:
        """A copy of `nbytes` from `begin` on of array `number`, as of the last update; before the first one, as put."""
        self._check(number, begin, nbytes)
        if not self._updated:
            self.take_put()
        return self._arrays[number].view(np.uint8)[begin : begin + nbytes].tobytes()

    def update(self, gradient: Buffer, scalars: StepScalars) -> memoryview:
        """Applies the rule to what is here; returns the new parameters, which change with the next update."""
        parameters, self._updated = self.parameters, True
        slots = {name: each for (name, _), each in zip(self.spec.slots, self._arrays[1:], strict=False)}
        named = dict(zip(self.spec.scalars, scalars.values, strict=True))
        rules.update(self.spec, self._runs, parameters, slots, np.frombuffer(gradient, np.float32), named)
        return parameters.view(np.uint8).data

    @property
    def parameters(self) -> Floats:
        """They change with the next update."""
        if self._missing:
            missing = sum(end - first for first, end in self._missing)
            raise ProtocolError(
                f"the parameters of {self.label} must be put before its first update, {missing} bytes are missing"
            )
        return self._arrays[0]

    @property
    def shadow(self) -> Floats:
        """The parameters as all workers have them, if it is kept. Use it between a `take_put` and the next."""
        return self._arrays[-1]

    def _check(self, number: int, begin: int, nbytes: int) -> None:
        size = self._arrays[0].nbytes
        if not 0 <= number < len(self._arrays) or begin < 0 or nbytes < 0 or begin + nbytes > size:
            raise ProtocolError(
                f"{self.label} has {len(self._arrays)} arrays of {size} bytes, got array {number}, bytes {begin} to "
                f"{begin + nbytes}"
            )


class Delta:
    """Encodes parameters as their change since the shadow copy, to which it adds what workers decode, bit for bit.

    What a codec cannot express is part of the next change, so it is late but not lost, and there is no residual beside
    it. Workers compute gradients at their view, the owner updates the exact parameters (a preserved central model: MCM,
    https://arxiv.org/abs/2102.12528).
    """

    def __init__(self, codec: Codec, view: Floats) -> None:
        self._codec, self._view = codec, view
        self.wire_bytes = codec.wire_bytes

    def encode(self, values: Floats, residual: Floats | None = None) -> Bytes:
        """Encodes the change from the view to `values`; `residual` is not used."""
        with np.errstate(all="ignore"):
            change = np.subtract(values, self._view)
        data = self._codec.encode(change)
        self._codec.decode(data, change)
        # All of it, not only what a codec has chosen: adding 0 makes 0 of -0 and of denormals, as in TensorFlow.
        with rules.flushed(), np.errstate(all="ignore"):
            np.add(self._view, change, out=self._view)
        return data


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
