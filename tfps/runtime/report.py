"""Reports where a step's time goes and what would shorten it, from the times of gradients and updates alone.

docs/design.md ("Report") says how. Tested in tests/runtime/test_report.py.
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from tfps.compression import LEAST_BYTES
from tfps.errors import TfpsError
from tfps.exchange.codecs import codec_of
from tfps.exchange.codecs import sent_bytes as codec_bytes
from tfps.exchange.interface import BucketSpec, Link
from tfps.runtime.table_history import TableHistory, TableRows
from tfps.trace.step_times import NEGLIGIBLE, Interval, Intervals, Limit, clip, limit_of, overlap, total, union

MIN_STEPS = 4
_LINK = " link ("  # in a limit
_NOTHING = "nothing to exchange: this process updates its variables by itself"  # a limit
_SUGGESTED = ("bfloat16", "int8")
_INNER_STEPS = 50  # as of Config
_HALVINGS = 50
_LATE = 0.3  # of the time that a worker waits: what others come later is what it waits for


@dataclass(frozen=True, slots=True)
class Stepping:
    """When workers exchange what."""

    inner_steps: int = 1  # from one exchange of a bucket to the next; 1: every step exchanges all
    fragments: int = 1  # this and the next: of `Config`
    overlap_steps: int = 0
    waits: bool = True  # whether workers wait for each other's steps
    uncoded_replies: bool = False  # whether replies are parameters, not compressed as gradients are
    every_step: bool = True  # whether each step exchanges gradients that all wait for: other ways to train are faster

    @property
    def in_parts(self) -> bool:
        """Whether the model is exchanged in parts or behind further steps: then it does not wait layer by layer."""
        return self.fragments > 1 or self.overlap_steps > 0

    def waits_in(self, bounds: Interval, exchanges: Sequence[Interval]) -> Intervals:
        """When a worker waited (ns) in a round from one exchange of all to the next."""

        def waits(step_ns: float) -> Intervals:
            begins = ((ready + round(self.overlap_steps * step_ns), done) for ready, done in exchanges)
            return clip(union(begins), *bounds)

        duration, steps = bounds[1] - bounds[0], self.inner_steps
        # A step takes as long as makes its steps and waits fill the round.
        _, step_ns = _bisect(duration / steps, lambda step_ns: steps * step_ns + total(waits(step_ns)) < duration)
        return waits(step_ns)


_STEP_BY_STEP = Stepping()


class Round(NamedTuple):
    """One step of one bucket on this worker: when its gradient was ready and its variables were updated (seconds)."""

    ready_s: float
    done_s: float


@dataclass(frozen=True, slots=True)
class History:
    """The last steps of one bucket."""

    name: str
    priority: int
    nbytes: int
    rounds: Sequence[Round]
    sent_bytes: int | None = None  # on the wire, to the pservers; None: `nbytes`
    compressible: bool = True  # a sum of float32 that is not too small

    @classmethod
    def of(cls, spec: BucketSpec, rounds: Sequence[Round]) -> History:
        sent = codec_bytes(spec.codec, spec.nbytes)
        compressible = spec.kind == "sum" and spec.dtype == "float32" and spec.nbytes >= LEAST_BYTES
        return cls(spec.name, spec.priority, spec.nbytes, rounds, sent, compressible)

    def as_sent(self, codec: str) -> int:
        """Bytes that a step would send with `codec`."""
        return codec_bytes(codec_of(codec), self.nbytes) if self.compressible else self.nbytes


@dataclass(frozen=True, slots=True)
class Layer:
    """One bucket's share of the computation."""

    name: str
    forward_s: float
    backward_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """See `Strategy.report`. All times are medians over the last steps; in mode "diloco" and "local", over rounds.

    Attributes:
        step_s: from one step to the next.
        compute_s: part of step_s not spent waiting for parameters: forward, backward, input.
        exposed_wait_s: part of step_s in which the forward pass waited for parameters.
        rows_wait_s: part of that in which it waited for rows of tables, maybe for others as well.
        wire_s: time with data in flight to or from the pservers.
        overlap: part of wire_s that cost no time: 1 - exposed_wait_s / wire_s.
        step_bytes: of all gradients of a step, without those of tables.
        sent_bytes: what of them is on the wire to pservers: less if they are compressed.
        received_bytes: what is on the wire back; in mode "async" never compressed.
        bytes_per_s: payload rate to all pservers together while data was queued; 0 if the network always kept up.
        limit: the bottleneck, in words.
        without_schedule_s: estimated step if gradients were sent as they come, with one barrier for all variables.
        with_twice_the_bandwidth_s, with_one_more_pserver_s: estimated step.
        with_codec_s: estimated step with `Config(compression=...)`, by codec, as if encoding took no time; empty unless
            a link is the limit of training in mode "sync" and nothing is compressed yet. (In mode "async" what comes
            back takes as long as without.)
        with_inner_steps_s: estimated step with `Config(mode="diloco")` and 50 inner steps; None unless a link is the
            limit of training in mode "sync".
        inner_steps: of a round, which all other times are of; 1: times are of steps.
        one_host: whether all pservers are reached through shared memory, or are in this process: there is no network.
        skipped_steps: how many steps were not applied so far (`Config.on_nonfinite`), not only of the last ones.
        xla_parts: how many parts of a step XLA compiles (docs/xla.md); times are then of parts, not of layers.
        xla_sizes: for how many sizes of batches each was compiled.
        xla_compile_s: how long parts took, together, at their first run with each size: XLA compiles then, or reads its
            cache, and the run itself, which is in it, is short.
        layers: the profile of the model, in forward order, without tables.
        tables: what a step exchanges of each table.
        slice_bytes, window_bytes: current sizes; 0 without pservers.
    """

    step_s: float
    compute_s: float
    exposed_wait_s: float
    wire_s: float
    overlap: float
    bytes_per_s: float
    limit: str
    without_schedule_s: float
    with_twice_the_bandwidth_s: float
    with_one_more_pserver_s: float
    layers: tuple[Layer, ...] = field(repr=False)
    slice_bytes: int = 0
    window_bytes: int = 0
    step_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    with_codec_s: Mapping[str, float] = field(default_factory=dict)
    with_inner_steps_s: float | None = None
    inner_steps: int = 1
    one_host: bool = False
    skipped_steps: int = 0
    rows_wait_s: float = 0.0
    tables: tuple[TableRows, ...] = ()
    xla_parts: int = 0
    xla_sizes: int = 0
    xla_compile_s: float = 0.0

    def __str__(self) -> str:
        parts = f"{_ms(self.compute_s)} computing, {_ms(self.exposed_wait_s)} waiting for parameters"
        unit = "round" if self.inner_steps > 1 else "step"
        wire = "exchange under way" if self.one_host else "network in use"
        lines = [
            f"{unit}{f' of {self.inner_steps} steps' * (unit == 'round')} {_ms(self.step_s)}: {parts}",
            f"{wire} {_ms(self.wire_s)} of it, {self.overlap:.0%} of that while computing",
            f"limit: {self.limit}",
        ]
        if self.sent_bytes < self.step_bytes:
            sizes = f"{self.sent_bytes / 1e6:.3g} of {self.step_bytes / 1e6:.3g} MB"
            back = "as much" if self.received_bytes == self.sent_bytes else f"{self.received_bytes / 1e6:.3g} MB"
            lines.append(f"compressed: a {unit} sends {sizes}, and gets {back} back")
        lines += self._of_tables(unit)
        if limit_of(self.step_s, self.exposed_wait_s) is Limit.COMPUTATION:
            what = "a faster exchange" if self.one_host else "a faster network"
            lines.append(f"{what}, more pservers or other settings would not help")
        elif self.limit != _NOTHING:
            what = "an exchange twice as fast" if self.one_host else "twice the bandwidth"
            lines.append(f"with {what}: {_ms(self.with_twice_the_bandwidth_s)} a {unit}")
            lines.append(f"with one more pserver: {_ms(self.with_one_more_pserver_s)} a {unit}")
            lines += [f"with compression='{codec}': {_ms(s)} a {unit}" for codec, s in self.with_codec_s.items()]
            if self.with_inner_steps_s is not None:
                estimate = f"mode='diloco', inner_steps={_INNER_STEPS}: {_ms(self.with_inner_steps_s)} a step"
                lines.append(f"with {estimate}, but other results (docs/modes.md)")
        if self.xla_parts:
            sizes = f", for {self.xla_sizes} sizes of batches" if self.xla_sizes > 1 else ""
            parts = f"{self.xla_parts} part{'s' * (self.xla_parts > 1)}"
            lines.append(f"XLA compiles a step in {parts}{sizes}, which took {_ms(self.xla_compile_s)}")
        if self.skipped_steps:
            lines.append(f"steps skipped because of gradients that were not finite: {self.skipped_steps} so far")
        helped = self.without_schedule_s / self.step_s
        lines.append(
            f"without priorities and barriers per variable: {_ms(self.without_schedule_s)} a {unit}"
            if helped > 1 + NEGLIGIBLE
            else "the order of sending makes no difference here"
        )
        return "\n".join(lines)

    def _of_tables(self, unit: str) -> list[str]:
        if not self.tables:
            return []
        lines, back, there = [], sum(t.received_bytes for t in self.tables), sum(t.sent_bytes for t in self.tables)
        for t in self.tables:
            counts = f"{t.rows} asked for and {t.gradient_rows} with gradients a step"
            sizes = f"{t.received_bytes / 1e6:.3g} and {t.sent_bytes / 1e6:.3g} MB"
            lines.append(f"rows of {t.name}: {counts}, {sizes}; waited {_ms(t.wait_s)} for them")
        waits = f"{_ms(self.rows_wait_s)} for rows, {_ms(self.exposed_wait_s - self.rows_wait_s)} for dense parameters"
        rows = f"{back / 1e6:.3g} MB of rows and {there / 1e6:.3g} MB of their gradients a step"
        dense = f"{self.sent_bytes / 1e6:.3g} MB of dense gradients a {unit}"
        return [*lines, f"waiting: {waits} alone; {rows}, {dense}"]

    def save_profile(self, path: str | pathlib.Path) -> None:
        """Writes the model's times and bytes as JSON, for the calculator of docs/size.md."""
        layers = [asdict(layer) for layer in self.layers]
        content = {"name": pathlib.Path(path).stem, "source": "recorded by Strategy.report()", "layers": layers}
        pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")


def make_report(
    histories: Sequence[History],
    links: Sequence[Link],
    slice_bytes: int = 0,
    window_bytes: int = 0,
    stepping: Stepping = _STEP_BY_STEP,
    tables: Iterable[TableHistory] = (),
    rank: int = 0,
) -> Report:
    tables = list(tables)
    if not histories:
        histories = [_of_table(table) for table in tables]
    longest = max((len(history.rounds) for history in histories), default=0)
    if longest < MIN_STEPS:
        every = stepping.inner_steps
        what = "training steps after the first ones" if every == 1 else f"exchanges, one in {every} steps"
        none = "" if histories else ": no model that was made in `with strategy.scope():` has trained"
        raise TfpsError(f"a report needs at least {MIN_STEPS} {what}, got {longest}{none}")
    # Only buckets of every step: other models and a second optimizer have separate steps.
    buckets = sorted((h for h in histories if len(h.rounds) == longest), key=lambda h: h.priority)
    rounds = [[history.rounds[step] for history in buckets] for step in range(longest)]
    backward = _backward(rounds)
    lookups = union(wait for table in tables for wait in table.waits())
    explained = (_explain(now, after, backward, stepping, lookups) for now, after in pairwise(rounds))
    waits_ns, rows_ns, exchanges_ns, factors = zip(*explained, strict=True)
    ends = [max(one.ready_s for one in step) for step in rounds]
    step_s = statistics.median(after - now for now, after in pairwise(ends))
    exposed_s = min(statistics.median(waits_ns) / 1e9, step_s)
    wire_s = statistics.median(exchanges_ns) / 1e9
    factor = statistics.median(factors)
    layers = tuple(
        Layer(history.name, factor * seconds, seconds, history.nbytes)
        for history, seconds in zip(buckets, backward, strict=True)
    )
    bytes_per_s = _rate(links)
    step_bytes = sum(h.nbytes for h in buckets)
    sent_bytes = sum(h.nbytes if h.sent_bytes is None else h.sent_bytes for h in buckets)
    received_bytes = step_bytes if stepping.uncoded_replies else sent_bytes
    dense_bytes = max(sent_bytes, received_bytes)  # both ways are used at the same time
    uses = tuple(use for table in tables if (use := table.use()) is not None)
    wire_bytes = max(
        sent_bytes + sum(use.sent_bytes for use in uses), received_bytes + sum(use.received_bytes for use in uses)
    )
    # A round of many steps may be limited by an exchange that takes a small part of it.
    exchanging_s = wire_s if stepping.inner_steps > 1 else step_s
    others = _others(links, rank, exposed_s) if stepping.waits else ""
    limit = _limit(step_s, exposed_s, exchanging_s, wire_bytes, links, others)
    # The rate is that of compressed bytes, the layers' are not compressed.
    encoded = step_bytes / dense_bytes if dense_bytes else 1.0
    rate = bytes_per_s * encoded or math.inf
    # A forward pass begins with rows, which compute nothing.
    rows = [Layer(use.name, 0.0, 0.0, round(encoded * max(use.sent_bytes, use.received_bytes))) for use in uses]
    compute_s = step_s - exposed_s
    modelled_s = _modelled_s([*rows, *layers], compute_s, rate, stepping)
    in_order_s = modelled_s if stepping.in_parts else _in_order_s([*rows, *layers], compute_s, rate)

    def calibrated(estimate_s: float) -> float:
        # Nothing is known of a step that only waited, and for no network.
        return estimate_s * (step_s / modelled_s) if modelled_s else step_s

    def estimate(faster: float, smaller: float = 1.0) -> float:
        """A step with a network so many times as fast, and gradients, but not rows, by so much smaller."""
        larger = [replace(each, nbytes=round(each.nbytes * smaller)) for each in rows]
        return calibrated(_modelled_s([*larger, *layers], compute_s, rate * faster * smaller, stepping))

    other_ways = _LINK in limit and stepping.every_step  # to train are worth naming
    may_compress = other_ways and sent_bytes == step_bytes and any(history.compressible for history in buckets)
    more = (len(links) + 1) / len(links) if limit.startswith("pserver") else 1.0
    return Report(
        step_s=step_s,
        compute_s=compute_s,
        exposed_wait_s=exposed_s,
        wire_s=wire_s,
        overlap=overlap(max(wire_s - exposed_s, 0.0), wire_s),
        bytes_per_s=bytes_per_s,
        limit=limit,
        without_schedule_s=max(calibrated(in_order_s), step_s),
        with_twice_the_bandwidth_s=estimate(2.0),
        with_one_more_pserver_s=estimate(more),
        layers=layers,
        slice_bytes=slice_bytes,
        window_bytes=window_bytes,
        step_bytes=step_bytes,
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
        with_codec_s={
            codec: estimate(1.0, step_bytes / sum(history.as_sent(codec) for history in buckets))
            for codec in (_SUGGESTED if may_compress else ())
        },
        with_inner_steps_s=step_s - exposed_s * (1 - 1 / _INNER_STEPS) if other_ways else None,
        inner_steps=stepping.inner_steps,
        one_host=all(link.shared_memory for link in links),
        rows_wait_s=min(statistics.median(rows_ns) / 1e9, exposed_s),
        tables=uses,
    )


def _of_table(table: TableHistory) -> History:
    """Returns the steps of a model that has no other gradients: they end with those of rows."""
    return History(table.name, 0, 0, [Round(end_s, end_s) for end_s in table.ends_s()], compressible=False)


def _backward(rounds: Sequence[Sequence[Round]]) -> list[float]:
    """Returns seconds between each bucket's gradient and the previous one; for the first, the mean of the others."""
    own: list[list[float]] = [[] for _ in rounds[0]]
    for step in rounds:
        order = sorted(range(len(step)), key=lambda bucket: step[bucket].ready_s)
        for before, bucket in pairwise(order):
            own[bucket].append(step[bucket].ready_s - step[before].ready_s)
    known = [statistics.median(times) for times in own if times]
    mean = statistics.fmean(known) if known else 0.0
    return [statistics.median(times) if len(times) > len(rounds) / 2 else mean for times in own]


def _explain(
    now: Sequence[Round], after: Sequence[Round], backward: Sequence[float], stepping: Stepping, lookups: Intervals
) -> tuple[int, int, int, float]:
    """Returns waits, those of lookups, and exchanges (ns) from the last gradient of `now` to that of `after`; and
    forward / backward.
    """
    start_s, end_s = max(one.ready_s for one in now), min(one.ready_s for one in after)
    bounds = _ns(start_s, max(one.ready_s for one in after))
    exchanges = [_ns(*one) for one in (*now, *after)]
    exchanges_ns = total(clip(union([*exchanges, *lookups]), *bounds))
    rows = clip(lookups, *bounds)
    rows_ns = total(rows)
    if stepping.in_parts:
        waits_ns = total(union([*stepping.waits_in(bounds, exchanges), *rows]))
        compute_s = (bounds[1] - bounds[0] - waits_ns) / 1e9
        return waits_ns, rows_ns, exchanges_ns, max(compute_s / sum(backward) - 1, 0.0) if sum(backward) else 0.0
    # The first gradient's backward time is included, too: as if its layers were passed twice more.
    weights = [*backward[:-1], 3 * backward[-1]]

    def run(factor: float) -> tuple[float, Intervals]:
        """Returns when the forward pass would end, and its waits."""
        clock_s, waits = start_s, []
        for one, weight in zip(now, weights, strict=True):
            waits.append(_ns(clock_s, one.done_s))
            clock_s = _computed(max(clock_s, one.done_s), factor * weight, rows)
        return clock_s, union([*waits, *rows])

    most = (end_s - start_s) / sum(weights) if sum(weights) else 0.0
    factor, _ = _bisect(most, lambda factor: run(factor)[0] < end_s)
    return total(clip(run(factor)[1], *_ns(start_s, end_s))), rows_ns, exchanges_ns, factor


def _computed(clock_s: float, seconds: float, waits: Intervals) -> float:
    """Returns when something that takes so long and begins at `clock_s` ends, if it stands still meanwhile."""
    for begin_ns, end_ns in waits:
        begin_s, end_s = begin_ns / 1e9, end_ns / 1e9
        if clock_s + seconds <= begin_s:
            break
        if end_s > clock_s:
            seconds -= max(begin_s - clock_s, 0.0)
            clock_s = end_s
    return clock_s + seconds


def _bisect(high: float, is_below: Callable[[float], bool]) -> tuple[float, float]:
    """Returns bounds, within 0 and `high`, of the number up to which `is_below` holds."""
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low, high


def _ns(begin_s: float, end_s: float) -> Interval:
    return round(begin_s * 1e9), round(end_s * 1e9)


def _busy(links: Sequence[Link]) -> list[Link]:
    """Returns links that were busy; those through shared memory only if there are no others."""
    busy = [link for link in links if link.bytes_per_s]
    return [link for link in busy if not link.shared_memory] or busy


def _rate(links: Sequence[Link]) -> float:
    """Returns bytes per second to all pservers, assuming equal parts, over the time that the network takes."""
    busy = _busy(links)
    rate = sum(link.bytes_per_s for link in busy)
    if busy and not busy[0].shared_memory:
        rate *= len(links) / sum(not link.shared_memory for link in links)
    return rate


def _others(links: Sequence[Link], rank: int, exposed_s: float) -> str:
    """Who comes late to steps, in the same words on all ranks; "" if no one comes so late that it matters."""
    ranks = sorted(set().union(*(link.late_s for link in links)))
    if len(ranks) < 2:
        return "other workers, which come later to each step than this one"
    late_s = {each: statistics.fmean(link.late_s.get(each, 0.0) for link in links) for each in ranks}
    most_s = max(late_s.values())
    if most_s < _LATE * exposed_s:
        return ""
    latest = [each for each in ranks if late_s[each] > most_s / 2]
    if len(latest) == len(ranks):
        return f"workers that wait for each other: now one comes later, now another, by {_ms(most_s)}"
    if len(latest) == 1:
        which = f"rank {latest[0]}{' (this worker)' * (rank in latest)}, which comes"
    else:
        which = f"ranks {', '.join(map(str, latest))}{' (this worker is one)' * (rank in latest)}, which come"
    return f"{which} {_ms(most_s)} later to each step than the first"


def _limit(
    step_s: float, exposed_s: float, exchanging_s: float, nbytes: int, links: Sequence[Link], others: str
) -> str:
    """`others`: who of the workers is waited for, "" for none."""
    if limit_of(step_s, exposed_s) is Limit.COMPUTATION:
        return "computation"
    if not links:
        return _NOTHING
    cpu_s, busiest = max(((link.cpu_s_per_step or 0.0, link.pserver) for link in links), default=(0.0, ""))
    if cpu_s > 0.8 * step_s:
        return f"pserver {busiest}: its CPU ({cpu_s / step_s:.0%} of one core)"
    busy, rate = _busy(links), _rate(links)
    # If this worker's gradients take much less to send than there is time for, the network is not the limit.
    if not busy or nbytes / rate < 0.3 * exchanging_s:
        return others or "round trips and the work per message, not bytes"
    slowest = min(busy, key=lambda link: link.bytes_per_s)
    if len(busy) > 1 and slowest.bytes_per_s < 0.6 * statistics.median(link.bytes_per_s for link in busy):
        return f"pserver {slowest.pserver}: its link ({slowest.bytes_per_s * 8e-6:.0f} Mbit/s)"
    if busy[0].shared_memory:
        return f"this host's memory and processors ({rate * 1e-6:.0f} MB/s to all pservers)"
    return f"this worker's link ({sum(link.bytes_per_s for link in busy) * 8e-6:.0f} Mbit/s to all pservers)"


def least_step_s(layers: Iterable[tuple[float, int]], compute_s: float, exchange_s: Callable[[int], float]) -> float:
    """Returns the lower bound of a step (docs/lower_bound.md), of `compute_s` without any waiting.

    `layers`, in forward order: seconds of forward and backward together, and bytes. `exchange_s` bounds an exchange.
    """
    best, before_s, nbytes = compute_s, 0.0, 0
    for layer_s, layer_bytes in layers:
        nbytes += layer_bytes
        if nbytes:
            best = max(best, compute_s - before_s + exchange_s(nbytes))
        before_s += layer_s
    return best


def _modelled_s(layers: Sequence[Layer], compute_s: float, bytes_per_s: float, stepping: Stepping) -> float:
    """Estimates a step from its profile."""
    if not stepping.in_parts:
        times = ((layer.forward_s + layer.backward_s, layer.nbytes) for layer in layers)
        return least_step_s(times, compute_s, lambda nbytes: nbytes / bytes_per_s)
    exchange_s = sum(layer.nbytes for layer in layers) / bytes_per_s
    meanwhile_s = compute_s * stepping.overlap_steps / stepping.inner_steps
    return compute_s + stepping.fragments * max(exchange_s / stepping.fragments - meanwhile_s, 0.0)


def _in_order_s(layers: Sequence[Layer], compute_s: float, bytes_per_s: float) -> float:
    """Estimates a step if gradients are sent as they come and the next forward pass waits for all of them."""
    clock_s = sent_s = 0.0
    for layer in reversed(layers):
        clock_s += layer.backward_s
        sent_s = max(sent_s, clock_s) + layer.nbytes / bytes_per_s
    return compute_s + max(sent_s - clock_s, 0.0)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.3g} s"
