"""Which codec the gradients of a variable get, and the residuals that compression has of it (see docs/compression.md).

Tested in tests/updates/test_compressing.py and tests/integration/test_compression.py.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from tfps.compression import NONE, Rules
from tfps.errors import WaitTimeoutError
from tfps.exchange.codecs import Codec, Floats, codec_of
from tfps.exchange.interface import BucketSpec, Reply
from tfps.malloc import trim_malloc
from tfps.runtime.remote import Ahead
from tfps.runtime.runtime import Runtime, indivisible, wait
from tfps.updates.names import common_name, unnumbered
from tfps.updates.variables import GatedVariable

logger = logging.getLogger("tfps")
_RESIDUALS = "the residuals of compression"  # in messages


class _Bucket:
    """A bucket whose codec feeds back; `residual` is the sum over the job after its first `steps` steps."""

    def __init__(self, variables: Sequence[GatedVariable]) -> None:
        self.places: dict[str, slice] = {}  # of numbers in the residual, by unique id of the variable
        self.items = self.steps = 0
        self.residual: Floats | None = None
        for variable in variables:
            begin, self.items = self.items, self.items + math.prod(variable.shape)
            self.places[variable._unique_id] = slice(begin, self.items)


class Compressing:
    """Of one strategy. Used by the threads that trace or run eagerly."""

    def __init__(self, rules: Rules, runtime: Runtime, remote: bool) -> None:
        """`rules` count where there are pservers: else nothing travels. `remote`: pservers keep parameters."""
        self._rules = Rules() if runtime.alone else rules
        self._runtime = runtime
        runtime.compresses = self._rules.codecs != {NONE}
        # Whether there may be residuals, or pservers ahead of the workers.
        self.has_state = any(each and (each.feeds_back or remote) for each in map(codec_of, self._rules.codecs))
        self._buckets: dict[int, _Bucket] = {}  # by number, those whose codec feeds back; last those used last
        self._restored: dict[str, Floats] = {}  # by unique id of variables that have no such bucket yet

    @property
    def has_residuals(self) -> bool:
        return bool(self._buckets)

    def codec(self, variable: GatedVariable) -> str:
        """The codec for gradients of `variable`, if they are dense and not too small."""
        return self._rules.codec(common_name(variable)) if self._runtime.compresses else NONE

    def codec_of_table(self, name: str) -> Codec | None:
        """The codec for gradients of the rows of the table of this name: one that needs no residual."""
        codec = codec_of(self._rules.codec(unnumbered(name)) if self._runtime.compresses else NONE)
        if codec is not None and codec.feeds_back:
            logger.warning(
                "tfps: gradients of table %r go as bfloat16, not as %s, whose error feedback would need a residual as "
                "large as the table",
                name,
                codec,
            )
            return codec_of("bfloat16")
        return codec

    def declared(self, number: int, spec: BucketSpec, variables: Sequence[GatedVariable]) -> None:
        """Notes a bucket of `variables`, in this order, that has been declared as `number`, maybe before."""
        if spec.codec is None or not spec.codec.feeds_back:
            return
        known = self._buckets.pop(number, None)  # in use again, as after other layers were frozen for a while
        self._buckets[number] = bucket = known or _Bucket(variables)
        if known is None and not self._restored.keys().isdisjoint(bucket.places):
            self._put_back(number, bucket)

    def collect(self) -> None:
        """Collects the residuals, if anything was sent since the last time; then every rank must call it."""
        if not self._buckets:
            return
        runtime, state = self._runtime, self._runtime.exchange.state
        self._settle()  # so that all ranks see the same steps
        if not (used := self._used()):
            return
        trim_malloc()  # steps have left free what is too scattered for the residuals
        replies: dict[int, Reply] = {}
        done = threading.Event()

        def take(bucket: int, reply: Reply) -> None:
            replies[bucket] = reply
            if len(replies) == len(used):
                done.set()

        with indivisible(runtime.exchange, _RESIDUALS):
            for number in used:
                runtime.next_round(number)  # so that later steps have the numbers of their rounds
                state.collect_residual(number, functools.partial(take, number))
            if not wait(done, runtime.wait_s * 2):  # the exchange fails earlier and says why
                raise WaitTimeoutError(f"no reply with {_RESIDUALS} within {runtime.wait_s * 2:.0f} s")
            for reply in replies.values():
                if reply.error is not None:
                    raise reply.error
        for number, reply in replies.items():
            bucket = self._buckets[number]
            bucket.residual, bucket.steps = np.asarray(reply.sum).view(np.float32), state.steps(number)

    def take_part(self) -> bool:
        """Collects if another rank does, which then waits for this one; returns whether it did.

        For a time in which no rank sends anything new.
        """
        if not self._is_awaited():
            return False
        self._settle()  # it may have been awaited for what was under way
        if not self._is_awaited():
            return False
        self.collect()
        return True

    def _is_awaited(self) -> bool:
        used = self._used()
        return bool(used) and self._runtime.exchange.peers.is_awaited(used[0])

    def _used(self) -> list[int]:
        """The buckets whose residuals may have changed since they were collected.

        In an order that ranks share: one of them may have traced a function again, and used buckets are then moved.
        """
        steps = self._runtime.exchange.state.steps
        return sorted(number for number, bucket in self._buckets.items() if steps(number) != bucket.steps)

    def _settle(self) -> None:
        runtime = self._runtime
        runtime.finish()
        if (failure := runtime.exchange.failure) is not None:
            raise failure

    def residuals(self, variables: Sequence[GatedVariable]) -> dict[int, Floats]:
        """The residuals that `variables` have, by place among them, flat, as last collected or restored."""
        found: dict[int, Floats] = {}
        for place, variable in enumerate(variables):
            name = variable._unique_id
            parts = [self._restored[name]] if name in self._restored else []
            for bucket in self._buckets.values():
                if bucket.residual is not None and name in bucket.places:
                    parts.append(bucket.residual[bucket.places[name]])
            if parts:
                found[place] = np.sum(parts, axis=0, dtype=np.float32)
        return found

    def ahead(self, variables: Sequence[GatedVariable]) -> dict[int, Ahead]:
        """What pservers have of `variables` where workers have another value, by place; for one rank alone."""
        found: dict[int, Ahead] = {}
        for place, variable in enumerate(variables):
            shared = variable.shared
            if shared.remote is not None:
                shared.wait()
                if (each := shared.remote.read_ahead(self._runtime.exchange, shared._values[0])) is not None:
                    found[place] = each
        return found

    def restore(
        self, variables: Sequence[GatedVariable], values: Mapping[int, Floats], ahead: Mapping[int, Ahead]
    ) -> None:
        """Takes the `values` of `residuals` in place of those of now, and those of `ahead`; for every rank."""
        for place, variable in enumerate(variables):
            if (remote := variable.shared.remote) is not None:
                remote.restored = ahead.get(place)  # counts if the variable has its value at the next push
            elif place in ahead:
                logger.warning(
                    "tfps: what pservers had of %s in the checkpoint beyond what workers had is dropped: it is of "
                    "update='server', and workers update it here",
                    variable.name,
                )
        self.collect()  # so that neither ranks nor pservers have anything but what is replaced here
        replaced = {variable._unique_id for variable in variables}
        self._restored = {name: value for name, value in self._restored.items() if name not in replaced}
        for place, variable in enumerate(variables):
            if (value := values.get(place)) is None:
                continue
            codec, items = codec_of(self.codec(variable)), math.prod(variable.shape)
            if codec is not None and codec.feeds_back and value.size == items:
                self._restored[variable._unique_id] = value
                continue
            logger.warning(
                "tfps: the residual of %s in the checkpoint, %d numbers, is dropped: the variable has %d "
                "numbers here and codec %s",
                *(variable.name, value.size, items, self.codec(variable)),
            )
        for number, bucket in reversed(list(self._buckets.items())):  # the last one is that which is in use
            if not replaced.isdisjoint(bucket.places):
                self._put_back(number, bucket, replaced)

    def _put_back(self, number: int, bucket: _Bucket, replaced: Collection[str] = ()) -> None:
        """Gives a bucket the restored residuals of its variables, in place of those that it has of the `replaced`."""
        residual = np.zeros(bucket.items, np.float32) if bucket.residual is None else bucket.residual.copy()
        for name, place in bucket.places.items():
            if name in replaced:
                residual[place] = 0
            if (value := self._restored.pop(name, None)) is not None:
                residual[place] = value
        state = self._runtime.exchange.state
        state.set_residual(number, residual)
        bucket.residual, bucket.steps = residual, state.steps(number)
