"""A pserver's shard of a job: the slices it owns of every bucket, with current and upcoming cuttings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tfps.config import Config
from tfps.errors import ConfigError
from tfps.exchange.aggregate import GatherRound, SliceFormat, SumRound
from tfps.exchange.interface import BucketSpec, declared, kept_arrays, parse_dtype
from tfps.exchange.kinds import ByKind
from tfps.exchange.layout import Cutting, Layout, Placer, cut_anew, cut_sum
from tfps.exchange.parameter_shard import ParameterShard
from tfps.exchange.staleness import StalenessBound
from tfps.membership.view import RankSets, View
from tfps.pserver.async_slice import AsyncSlice, RankScalars
from tfps.pserver.slices import GatherSlice, OwnedSlice, RoundScalars, SumSlice
from tfps.pserver.table_slice import TableSlice
from tfps.tables.rounds import Apart, Rounds
from tfps.tables.spec import TableSpec
from tfps.tables.table import Table
from tfps.trace.recorder import Recorder

_SLICE_BYTES = 1024  # that a slice takes beside its payload, on every pserver
_ROW_BYTES = 24  # that a row of a table takes beside itself and its slots
_ARRAY_BYTES, _TEXT_BYTES, _CHARACTER_BYTES = 128, 128, 4  # that an array, a text and each of its characters take


@dataclass(slots=True)
class OwnedBucket:
    """A declared bucket, as far as this pserver owns it."""

    spec: BucketSpec
    # By index (a gather: 0); only replaced as a whole, so streams read it without a lock.
    slices: dict[int, OwnedSlice] = field(default_factory=dict)
    next: dict[int, dict[int, OwnedSlice]] = field(default_factory=dict)  # by first step
    scalars: RoundScalars | RankScalars | None = None  # if it has an update

    @property
    def steps(self) -> int:
        """How many rounds are over, if this pserver owns any slice."""
        return max((item.steps_over for item in self.slices.values()), default=0)

    def advance(self, step: int) -> None:
        """Switches to the next cutting if `step` uses it. The step before is over by then, on all pservers."""
        for first in sorted(first for first in self.next if first <= step):
            self.slices = self.next.pop(first)


class Shard:
    """What the pserver at place `index` owns; its caller's lock guards all changes and the buckets' `next`."""

    def __init__(
        self,
        config: Config,
        view: View,
        index: int,
        recorder: Recorder,
        max_memory: int = 2**63,
        notify: Callable[[int, tuple[int, ...]], object] = lambda number, ranks: None,  # see RankSets
    ) -> None:
        self.config, self.view, self.index, self._max_memory = config, view, index, max_memory
        self.sets = RankSets(range(view.workers), notify)
        self.buckets: list[OwnedBucket] = []  # only grows, until `clear`: streams read it without the lock
        self._recorder = recorder
        self._placer = Placer(view.pservers, config.placement)
        self.bound = StalenessBound(view, config.staleness)  # of mode "async"
        self._saved: dict[str, str] = {}  # see TableSlice
        self._owned = ByKind(sum=self._sum, gather=self._gather, table=self._table)  # what is made of a bucket, by step

    def check(self, more: Sequence[BucketSpec], slice_bytes: int = 0) -> None:
        """Checks that there is memory for `more` buckets beside those that are here."""
        specs = [*(bucket.spec for bucket in self.buckets), *more]
        slice_bytes = slice_bytes or self.config.first_slice_bytes
        workers, pservers = self.view.workers, len(self.view.pservers)
        # Of a slice, that are kept. In mode "async" pushes may wait for each other, and each reply is a copy.
        parts = workers if self.config.deterministic or self.config.applies_each_push else 1
        copies = workers if self.config.delay_compensation else 0  # of parameters, as each rank has them
        tables = sum(_table_bytes(spec, pservers) for spec in specs if spec.table)
        kept = sum(spec.nbytes * (kept_arrays(spec) + copies * (spec.update is not None)) for spec in specs)
        payload = (sum(spec.nbytes * parts for spec in specs) + kept) // pservers + tables
        counts = [spec.nbytes // slice_bytes + 1 for spec in specs]
        slices = sum(counts) + sum(len(found) for bucket in self.buckets for found in bucket.next.values())
        arrays = sum(count * kept_arrays(spec) for count, spec in zip(counts, specs, strict=True))
        beside = slices * _SLICE_BYTES + arrays * _ARRAY_BYTES + sum(map(_text_bytes, specs))
        if payload + beside > self._max_memory:
            raise ConfigError(
                f"what a job declares must fit into the {self._max_memory} bytes that a pserver may use "
                f"(--max-memory), got {payload} bytes here in {slices} slices of up to {slice_bytes} bytes on all of "
                f"the {pservers} pservers"
            )

    def add(self, specs: Sequence[BucketSpec], steps: Sequence[int] = ()) -> None:
        """Adds buckets, whose first `steps` are 0 unless given."""
        for spec, step in zip(specs, steps or [0] * len(specs), strict=True):
            bucket = OwnedBucket(spec)
            if spec.update is not None:
                if self.config.applies_each_push:
                    bucket.scalars = RankScalars(spec.name, spec.update, self.view)
                else:
                    bucket.scalars = RoundScalars(spec.name, spec.update, step)
            bucket.slices = self._owned[spec.kind](bucket, step)
            self.buckets.append(bucket)

    def _sum(self, bucket: OwnedBucket, step: int) -> dict[int, OwnedSlice]:
        return self._slices(bucket, cut_sum(bucket.spec, self.config.first_slice_bytes, self._placer, step))

    def _gather(self, bucket: OwnedBucket, step: int) -> dict[int, OwnedSlice]:
        if self._placer.place_gather() != self.index:
            return {}
        label, slice_bytes = f"bucket '{bucket.spec.name}'", self.config.first_slice_bytes
        round_ = GatherRound(label, self.view, slice_bytes, self._max_memory, step)
        return {0: GatherSlice(self._recorder, round_, self.sets)}

    def _table(self, bucket: OwnedBucket, step: int) -> dict[int, OwnedSlice]:
        spec = bucket.spec
        label, pservers = f"table '{spec.name}'", self.view.pservers
        if spec.replaces is not None:
            before = declared(self.buckets, spec.replaces).slices.get(0)
            if not isinstance(before, TableSlice):
                raise ConfigError(f"{label} must take the rows of a table, got bucket {spec.replaces}")
            before.change(TableSpec.parse(spec.table), spec.codec, step)
            return {0: before}
        table = Table(TableSpec.parse(spec.table), pservers.index(self.index), len(pservers), label)
        together = self.config.steps_together
        rounds = Rounds(table, self.view, step) if together else Apart(table, self.view, step, self.bound)
        return {0: TableSlice(self._recorder, rounds, spec.codec, self.sets, self._saved)}

    def cut_anew(self, layout: Layout) -> None:
        """Prepares the cuttings of `layout`, each from its step on."""
        if layout.slice_bytes > 0:  # else it does not fit
            self.check((), layout.slice_bytes)
        specs = [bucket.spec for bucket in self.buckets]
        for number, cutting in cut_anew(specs, layout, self.view.pservers, self.config.placement).items():
            self.buckets[number].next[cutting.step] = self._slices(self.buckets[number], cutting)

    def set_view(self, view: View) -> None:
        """Makes new slices wait for the ranks of `view`, and those of upcoming cuttings."""
        self.view = self.bound.view = view
        for bucket in self.buckets:
            if isinstance(bucket.scalars, RankScalars):
                bucket.scalars.set_view(view)
            for slices in bucket.next.values():
                for item in slices.values():
                    item.change_view(view)  # nobody has pushed yet, so nobody is answered

    def resume(self) -> None:
        """What workers have put into slices of mode "async" counts: a job goes on with it."""
        for _, item in self.async_slices():
            with item.lock:
                item.parameters.resume()

    def slices(self) -> Iterator[tuple[str, OwnedSlice]]:
        """The slices in use, each with its bucket's name."""
        return ((bucket.spec.name, item) for bucket in self.buckets for item in bucket.slices.values())

    def tables(self) -> Iterator[tuple[str, TableSlice]]:
        return ((name, item) for name, item in self.slices() if isinstance(item, TableSlice))

    def async_slices(self) -> Iterator[tuple[str, AsyncSlice]]:
        return ((name, item) for name, item in self.slices() if isinstance(item, AsyncSlice))

    def _slices(self, bucket: OwnedBucket, cutting: Cutting) -> dict[int, OwnedSlice]:
        spec, scalars, codec, config = bucket.spec, bucket.scalars, bucket.spec.codec, self.config
        found: dict[int, OwnedSlice] = {}
        for index, (piece, owner) in enumerate(zip(cutting.slices, cutting.owners, strict=True)):
            if owner != self.index:
                continue
            label = f"slice {index} of bucket '{spec.name}'"
            format_ = SliceFormat(label, parse_dtype(spec.dtype), piece.nbytes, codec)
            parameters: ParameterShard | None = None
            if scalars is not None:
                viewed = codec is not None and not config.applies_each_push
                parameters = ParameterShard(label, scalars.spec, piece.offset, piece.nbytes, viewed=viewed)
                if isinstance(scalars, RankScalars):
                    delay, first = config.delay_compensation, cutting.step
                    found[index] = AsyncSlice(
                        self._recorder, format_, self.sets, parameters, scalars, self.bound, delay, first
                    )
                    continue
            round_ = SumRound(format_, self.view, config.deterministic, cutting.step)
            found[index] = SumSlice(self._recorder, round_, self.sets, parameters, scalars)
        return found


def _table_bytes(spec: BucketSpec, pservers: int) -> int:
    """What the rows of a table take on each of so many pservers, if it says how many it may have."""
    table = TableSpec.parse(spec.table)
    rows = table.rows or table.max_rows or 0
    return -(-rows // pservers) * (table.row_bytes + _ROW_BYTES)


def _text_bytes(spec: BucketSpec) -> int:
    """What the names and the update of a bucket take."""
    texts = [*spec.names]
    if (update := spec.update) is not None:
        texts += [name for name, _ in (*update.constants, *update.slots)] + [""] * len(update.sizes)
    return sum(_TEXT_BYTES + _CHARACTER_BYTES * len(text) for text in texts)
