"""Which codec the gradients of a variable get, and what compression holds back of it.

Codecs with error feedback (exchange/codecs.py) hold back what they could not express, on every rank and pserver. In a
checkpoint that is one array per variable: the sum of all of it, what has not been applied yet. Where pservers update
variables, their own parameters are ahead of the workers', and are in checkpoints, too. See docs/compression.md.

Tested in tests/updates/test_compressing.py and tests/integration/test_compression.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfps.compression import NONE, Rules
from tfps.exchange.codecs import Floats, codec_of
from tfps.exchange.interface import BucketSpec
from tfps.runtime.collecting import collect, settle
from tfps.runtime.remote import Ahead
from tfps.runtime.runtime import Runtime
from tfps.updates.names import common_name
from tfps.updates.variables import GatedVariable

logger = logging.getLogger("tfps")


class _Part(NamedTuple):
    """Where the numbers of a variable are in a bucket."""

    variable: str  # its unique id
    begin: int
    end: int


class _Bucket:
    """A bucket whose codec holds something back; `held` is the sum of that after its first `steps` steps."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.parts = parts
        self.steps = 0
        self.held: Floats | None = None

    @property
    def items(self) -> int:
        return self.parts[-1].end


class Compressing:
    """Of one strategy. Used by the threads that trace or run eagerly."""

    def __init__(self, rules: Rules, runtime: Runtime, remote: bool) -> None:
        """`rules` count where there are pservers: else nothing travels. `remote`: pservers keep parameters."""
        self._rules = Rules() if runtime.alone else rules
        self._runtime, self._remote = runtime, remote
        runtime.compresses = self._rules.codecs != {NONE}
        self._buckets: dict[int, _Bucket] = {}  # by number, those whose codec feeds back; last those used last
        self._restored: dict[str, Floats] = {}  # by unique id of variables that have no such bucket yet

    @property
    def has_state(self) -> bool:
        """Whether anything may be held back, or pservers be ahead of the workers."""
        codecs = map(codec_of, self._rules.codecs)
        return any(codec is not None and (codec.feeds_back or self._remote) for codec in codecs)

    def codec(self, variable: GatedVariable) -> str:
        """The codec for gradients of `variable`, if they are dense and not too small."""
        return self._rules.codec(common_name(variable)) if self._runtime.compresses else NONE

    def declared(self, number: int, spec: BucketSpec, variables: Sequence[GatedVariable]) -> None:
        """Notes a bucket of `variables`, in this order, that has been declared as `number`, maybe before."""
        if spec.codec is None or not spec.codec.feeds_back:
            return
        if (known := self._buckets.pop(number, None)) is not None:
            self._buckets[number] = known  # in use again, as after other layers were frozen for a while
            return
        parts, begin = [], 0
        for variable in variables:
            end = begin + math.prod(variable.shape)
            parts.append(_Part(variable._unique_id, begin, end))
            begin = end
        self._buckets[number] = bucket = _Bucket(parts)
        if any(part.variable in self._restored for part in parts):
            self._hold(number, bucket)

    def collect(self) -> None:
        """Collects what is held back, if anything was sent since the last time; then every rank must call it.

        Raises:
            TfpsError: another rank did not, or the exchange failed.
        """
        if not self._buckets:
            return
        state = self._runtime.exchange.state
        settle(self._runtime)  # so that all ranks see the same steps
        # In an order that ranks share: one of them may have traced a function again, and used buckets are then moved.
        used = sorted(number for number, bucket in self._buckets.items() if state.steps(number) != bucket.steps)
        if not used:
            return
        for number, held in collect(self._runtime, used).items():
            self._buckets[number].held, self._buckets[number].steps = held, state.steps(number)

    def residuals(self, variables: Sequence[GatedVariable]) -> dict[int, Floats]:
        """What is held back of each of `variables` by its place among them, flat, as last collected or restored.

        Variables of which nothing is held back are left out.
        """
        found: dict[int, Floats] = {}
        for place, variable in enumerate(variables):
            parts = [self._restored[variable._unique_id]] if variable._unique_id in self._restored else []
            for bucket in self._buckets.values():
                own = [part for part in bucket.parts if part.variable == variable._unique_id]
                parts += [bucket.held[part.begin : part.end] for part in own if bucket.held is not None]
            if parts:
                found[place] = np.sum(parts, axis=0, dtype=np.float32)
        return found

    def ahead(self, variables: Sequence[GatedVariable]) -> dict[int, Ahead]:
        """What pservers have of each of `variables` by its place among them; no other rank need take part.

        Variables of which they have what the workers have are left out.

        Raises:
            TfpsError: a pserver does not answer, or the exchange has failed or was closed.
        """
        found: dict[int, Ahead] = {}
        for place, variable in enumerate(variables):
            kept = _kept(variable)
            if kept.remote is None:
                continue
            kept.wait()
            each = kept.remote.read_ahead(self._runtime.exchange, kept._values[0])
            if each is not None:
                found[place] = each
        return found

    def restore(
        self, variables: Sequence[GatedVariable], values: Mapping[int, Floats], ahead: Mapping[int, Ahead]
    ) -> None:
        """Holds back `values` as `residuals` has returned them, instead of what is held back now; for every rank.

        What `ahead` has returned counts from the next push on, if `variables` have the values that belong to it then.

        Raises:
            TfpsError: see `collect`.
        """
        for place, variable in enumerate(variables):
            if (remote := _kept(variable).remote) is not None:
                remote.restored = ahead.get(place)
            elif place in ahead:
                logger.warning(
                    "tfps: what pservers had of %s in the checkpoint beyond what workers had is dropped: it is of "
                    "update='server', and workers update it here",
                    variable.name,
                )
        self.collect()  # so that neither ranks nor pservers hold anything but what is replaced here
        for place, variable in enumerate(variables):
            self._restored.pop(variable._unique_id, None)
            value = values.get(place)
            if value is None:
                continue
            codec, items = codec_of(self.codec(variable)), math.prod(variable.shape)
            if codec is None or not codec.feeds_back or value.size != items:
                logger.warning(
                    "tfps: what compression had held back of %s in the checkpoint, %d numbers, is dropped: it has %d "
                    "numbers here and codec %s",
                    *(variable.name, value.size, items, self.codec(variable)),
                )
                continue
            self._restored[variable._unique_id] = value
        replaced = {variable._unique_id for variable in variables}
        for number, bucket in reversed(list(self._buckets.items())):  # the last one is that which is in use
            if any(part.variable in replaced for part in bucket.parts):
                self._hold(number, bucket, replaced)

    def _hold(self, number: int, bucket: _Bucket, replaced: Collection[str] = ()) -> None:
        """Gives a bucket what has been restored of its variables, instead of what it holds of those `replaced`."""
        held = np.zeros(bucket.items, np.float32) if bucket.held is None else bucket.held.copy()
        for part in bucket.parts:
            if part.variable in replaced:
                held[part.begin : part.end] = 0
            if (value := self._restored.pop(part.variable, None)) is not None:
                held[part.begin : part.end] = value
        state = self._runtime.exchange.state
        state.set_residual(number, held)
        bucket.held, bucket.steps = held, state.steps(number)


def _kept(variable: GatedVariable) -> GatedVariable:
    """What pservers keep of `variable`: its global copy if workers train alone."""
    return variable if variable.global_copy is None else variable.global_copy
