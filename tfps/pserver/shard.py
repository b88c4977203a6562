"""A pserver's shard of a job: the slices it owns of every bucket, with current and upcoming cuttings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tfps.config import Config
from tfps.errors import ConfigError, ProtocolError, TfpsError
from tfps.exchange.aggregate import GatherRound, SumRound
from tfps.exchange.encoded_sum import EncodedSumRound
from tfps.exchange.interface import BucketSpec, parse_dtype
from tfps.exchange.layout import Cutting, Layout, Placer, cut_anew, cut_sum
from tfps.pserver.async_slice import AsyncSlice, RankNumbers
from tfps.pserver.compressed_slice import CompressedSlice
from tfps.pserver.owned_slice import OwnedSlice
from tfps.pserver.pace import Pace
from tfps.pserver.shown_slice import ShownSlice
from tfps.pserver.updated_slice import UpdatedSlice, UpdateNumbers, kept_arrays
from tfps.trace.recorder import Recorder

_SLICE_BYTES = 1024  # that a slice takes beside its payload, on every pserver


@dataclass(slots=True)
class OwnedBucket:
    """A declared bucket; `slices` are those this pserver owns, by index (a gather: index 0).

    `slices` is only replaced as a whole, so streams read it without a lock.
    """

    spec: BucketSpec
    slices: dict[int, OwnedSlice] = field(default_factory=dict)
    next: dict[int, dict[int, OwnedSlice]] = field(default_factory=dict)  # by first step
    numbers: UpdateNumbers | RankNumbers | None = None  # if it has an update

    def take_numbers(self, rank: int, step: int, data: memoryview) -> TfpsError | None:
        """See `UpdateNumbers.take` and `RankNumbers.take`."""
        if self.numbers is None:
            raise ProtocolError(f"bucket '{self.spec.name}' has no update, got numbers for one")
        return self.numbers.take(rank, step, data)

    def advance(self, step: int) -> None:
        """Switches to the next cutting if `step` uses it. The step before is over by then, on all pservers."""
        for first in sorted(first for first in self.next if first <= step):
            self.slices = self.next.pop(first)


class Shard:
    """What one pserver owns. The caller's lock guards all changes and the buckets' `next`.

    Args:
        workers: number of workers in the job.
        pservers: number of pservers; `index` is this one's place in the workers' lists.
        max_memory: bytes that the buckets may take.
    """

    def __init__(
        self, config: Config, workers: int, pservers: int, index: int, recorder: Recorder, max_memory: int = 2**63
    ) -> None:
        self.config, self.index, self._max_memory = config, index, max_memory
        self.buckets: list[OwnedBucket] = []  # only grows, until `clear`: streams read it without the lock
        self._workers, self._pservers, self._recorder = workers, pservers, recorder
        self._placer = Placer(pservers, config.placement)
        self.pace = Pace(workers, config.staleness)  # of mode "async"

    def check(self, specs: Sequence[BucketSpec]) -> None:
        """Checks that there is memory for `specs` beside the buckets that are here.

        Raises:
            ConfigError: there is not.
        """
        self._check([*(bucket.spec for bucket in self.buckets), *specs], self.config.first_slice_bytes)

    def _check(self, specs: Sequence[BucketSpec], slice_bytes: int) -> None:
        # Of a slice, that are kept. In mode "async" pushes may wait for each other, and each reply is a copy.
        parts = self._workers if self.config.deterministic or self.config.mode == "async" else 1
        copies = self._workers if self.config.delay_compensation else 0  # of parameters, as each rank has them
        kept = sum(spec.nbytes * (kept_arrays(spec) + copies * (spec.update is not None)) for spec in specs)
        payload = (sum(spec.nbytes * parts for spec in specs) + kept) // self._pservers
        slices = sum(spec.nbytes // slice_bytes + 1 for spec in specs)
        if payload + slices * _SLICE_BYTES > self._max_memory:
            raise ConfigError(
                f"what a job declares must fit into the {self._max_memory} bytes that a pserver may use "
                f"(--max-memory), got {payload} bytes here in {slices} slices of up to {slice_bytes} bytes on all of "
                f"the {self._pservers} pservers"
            )

    def add(self, specs: Sequence[BucketSpec]) -> None:
        """Adds buckets that all ranks have declared."""
        for spec in specs:
            bucket = OwnedBucket(spec)
            bucket.numbers = self._numbers(spec)
            if spec.kind == "sum":
                bucket.slices = self._slices(
                    spec, cut_sum(spec, self.config.first_slice_bytes, self._placer), bucket.numbers
                )
            elif self._placer.place_gather(spec.common_name) == self.index:
                bucket.slices[0] = item = OwnedSlice(self._recorder)
                item.round = GatherRound(f"bucket '{spec.name}'", self._workers, self.config.first_slice_bytes)
            self.buckets.append(bucket)

    def cut_anew(self, layout: Layout) -> None:
        """Prepares the cuttings of `layout`, each from its step on.

        Raises:
            ProtocolError: the layout does not fit the buckets.
            ConfigError: so many slices take more memory than there is.
        """
        specs = [bucket.spec for bucket in self.buckets]
        if layout.slice_bytes > 0:  # else it does not fit
            self._check(specs, layout.slice_bytes)
        for number, cutting in cut_anew(specs, layout, self._pservers, self.config.placement).items():
            self.buckets[number].next[cutting.step] = self._slices(specs[number], cutting)

    def clear(self) -> None:
        """Forgets all buckets."""
        self.buckets = []

    def _numbers(self, spec: BucketSpec) -> UpdateNumbers | RankNumbers | None:
        numbers = UpdateNumbers.of(spec)
        if numbers is None or self.config.mode != "async":
            return numbers
        return RankNumbers(spec.name, numbers.spec, self._workers)

    def _slices(
        self, spec: BucketSpec, cutting: Cutting, numbers: UpdateNumbers | RankNumbers | None = None
    ) -> dict[int, OwnedSlice]:
        """The slices of a sum that this pserver owns."""
        owned: dict[int, OwnedSlice] = {}
        dtype, deterministic, codec = parse_dtype(spec.dtype), self.config.deterministic, spec.codec
        for index, (piece, owner) in enumerate(zip(cutting.slices, cutting.owners, strict=True)):
            if owner == self.index:
                label = f"slice {index} of bucket '{spec.name}'"
                if isinstance(numbers, RankNumbers):
                    delay = self.config.delay_compensation
                    owned[index] = AsyncSlice(self._recorder, label, numbers, piece, self.pace, delay, codec)
                    continue
                if codec is not None:
                    encoded = EncodedSumRound(label, self._workers, piece.nbytes, deterministic, codec)
                    kind = CompressedSlice if numbers is None else ShownSlice
                    item: OwnedSlice = kind(self._recorder, codec, encoded)
                else:
                    item = OwnedSlice(self._recorder)
                    item.round = SumRound(label, self._workers, dtype, piece.nbytes, deterministic)
                item.round.step = cutting.step
                if numbers is not None:
                    item.kept = UpdatedSlice(label, numbers, piece, shows=codec is not None)
                owned[index] = item
        return owned
