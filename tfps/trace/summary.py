"""Summary of a capture: where the time of a step goes, what it waits for, and whether urgent slices went first.

Everything is counted within steps: times are clipped to the workers' step spans, messages belong to the step in which
they begin. Figures of no single worker use the bounds of the step's lowest rank.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from tfps.errors import TfpsError
from tfps.trace.capture import WAITS, Capture, CapturedView, Setting, Span
from tfps.trace.step_times import (
    Interval,
    Intervals,
    Limit,
    StepTimes,
    clip,
    difference,
    intersection,
    limit_of,
    overlap,
    step_times,
    total,
    union,
)

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")
_SHOWN_INVERSIONS = 0.05  # of all messages
_NAMED = 4  # pservers
_UNEVEN = 1.3  # times the mean of the others
_NETWORK = "the network: messages of the waiting worker are on the wire"
_MEMORY = "the exchange on this one host: messages of the waiting worker are under way"
_WIRES = ("wire", "reply_wire")
_LOOPBACK = ("127.", "localhost:", "[::1]:")


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Traffic of one pserver with all workers. Busy: at least one message was on the wire in that direction."""

    pserver: int
    pushed_bytes: int
    replied_bytes: int
    push_busy_ns: int
    reply_busy_ns: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Figures of one step, or of all. Times are means over workers, added up over steps; see `StepTimes`."""

    duration_ns: float
    compute_ns: float
    exposed_ns: float
    input_ns: float
    under_way_ns: float  # at least one of a worker's slices was queued, sent, summed or coming back
    hidden_ns: float
    overlap: float  # see `overlap`
    links: tuple[LinkUse, ...]
    waited_for: Mapping[int, int]  # rank -> ns that slices waited for it, the last to arrive; added up over slices
    slowest: int | None  # the rank that slices waited for the longest
    sums: int  # how many slices were summed
    inversions: int  # how many of `messages` were sent while a more urgent one waited in the same queue
    messages: int


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step; times of workers by rank."""

    step: int
    begin_ns: int
    end_ns: int
    totals: Totals
    workers: Mapping[int, StepTimes]


@dataclass(frozen=True, slots=True)
class Cost:
    """Exposed wait for one variable, or the rows of one table: nanoseconds over all workers and steps. Each instant
    counts once per worker, for the most urgent variable waited for."""

    variable: str
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class TableUse:
    """What steps have exchanged of one table, and how long that took; added up over workers and steps.

    Other than elsewhere messages count that are of these steps, whenever they begin.
    """

    table: str
    wait_ns: int  # at least one of a worker's lookups waited for its rows
    questions: int  # about rows, that reached a pserver
    held_ns: int  # from these to their last answer: most of it, until the step before had been applied
    asked_bytes: int  # ids of rows that were asked for
    rows_bytes: int  # the rows
    gradient_bytes: int  # gradients, with their ids


@dataclass(frozen=True, slots=True)
class PartUse:
    """A part of a step that XLA compiles, and how long it ran, added up over workers and steps."""

    part: str
    waits: tuple[str, ...]  # the variables at whose gates it waits
    ran_ns: int
    compile_s: float


@dataclass(frozen=True, slots=True)
class Inversion:
    """The pair of buckets most often in the wrong order."""

    waiting: str
    sent: str
    times: int


@dataclass(frozen=True, slots=True)
class Summary:
    """See `summarize`."""

    name: str
    settings: Mapping[str, Setting]
    workers: int
    totals: Totals
    steps: tuple[StepSummary, ...]
    costs: tuple[Cost, ...]  # the most expensive first; they add up to the exposed time of all workers
    inversion: Inversion | None
    limit: str
    view: str  # at the start: generation, workers, pservers; empty if the capture does not say
    changes: tuple[str, ...]  # of the view: when, who takes part from then on, why
    tables: tuple[TableUse, ...]
    parts: tuple[PartUse, ...]  # those that ran, in the order in which they can


def summarize(capture: Capture) -> Summary:
    """All figures of a capture, which must have steps. Takes about 3 microseconds per span."""
    return _Summarizer(capture).run()


class _Summarizer:
    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._kinds: dict[str, list[Span]] = _grouped((span.kind, span) for span in capture.spans)
        wanted = set(capture.steps)
        self._bounds: dict[int, dict[int, Interval]] = defaultdict(dict)  # step -> rank -> bounds
        for span in self._kinds["step"]:
            if not wanted or span.step in wanted:
                self._bounds[span.step][self._rank(span)] = (span.begin_ns, span.end_ns)
        if not self._bounds:
            raise TfpsError(f"a capture needs at least one span of kind 'step' to be summarized, got none of {wanted}")
        self._ranks = sorted({rank for ranks in self._bounds.values() for rank in ranks})
        self._waits, self._updates = self._times(self._rank, *WAITS), self._times(self._rank, "update")
        self._wires: dict[tuple[str, int], Intervals] = self._times(lambda span: (span.kind, span.pserver), *_WIRES)
        late = self._times(lambda span: span.rank, "aggregate")
        self._late = dict(sorted(late.items(), key=lambda item: -total(item[1])))  # rank -> when a sum waited for it
        self._wrong, self._inversion = self._inversions()

    def run(self) -> Summary:
        """Summarizes each step, then all together."""
        computing, inputs = self._times(self._rank, "forward", "backward"), self._times(self._rank, "input")
        under_way = self._slices_under_way()
        messages, sums = self._by_step(*_WIRES), self._by_step("aggregate")
        steps = []
        for step, bounds in sorted(self._bounds.items()):
            workers = {
                rank: step_times(own, computing[rank], self._waits[rank], inputs[rank], under_way[rank])
                for rank, own in sorted(bounds.items())
            }
            begin, end = bounds[min(bounds)]
            totals = self._totals(workers.values(), len(workers), [(begin, end)], messages[step], sums[step])
            steps.append(StepSummary(step, begin, end, totals, workers))
        totals = self._totals(
            [times for step in steps for times in step.workers.values()],
            len(self._ranks),
            [(step.begin_ns, step.end_ns) for step in steps],
            list(itertools.chain(*messages.values())),
            list(itertools.chain(*sums.values())),
        )
        costs = self._costs()
        return Summary(
            name=self._capture.name,
            settings=dict(self._capture.settings),
            workers=len(self._ranks),
            totals=totals,
            steps=tuple(steps),
            costs=costs,
            inversion=self._inversion,
            limit=self._limit(totals, costs),
            view=self._view(),
            changes=tuple(itertools.starmap(self._change, self._capture.changes)),
            tables=tuple(self._tables()),
            parts=tuple(self._parts()),
        )

    def _rank(self, span: Span) -> int:
        return self._capture.processes[span.process].number

    def _times(self, key: Callable[[Span], _Key], *kinds: str) -> dict[_Key, Intervals]:
        return _unions((key(span), (span.begin_ns, span.end_ns)) for kind in kinds for span in self._kinds[kind])

    def _slices_under_way(self) -> dict[int, Intervals]:
        """Per rank, when its slices were under way: each from its first to its last span.

        Rows may be asked for long before there is an answer: what is held back meanwhile is not under way.
        """
        whole: dict[tuple[int, ...], Interval] = {}
        for kind in ("queued", "wire", "reply_queued", "reply_wire"):
            for span in self._kinds[kind]:
                own = len(whole) if self._capture.is_lookup(span) else 0
                key = span.rank, span.step, span.bucket, span.slice, span.pserver, own
                begin, end = whole.get(key, (span.begin_ns, span.end_ns))
                whole[key] = min(begin, span.begin_ns), max(end, span.end_ns)
        return _unions((rank, times) for (rank, *_), times in whole.items())

    def _by_step(self, *kinds: str) -> dict[int, list[Span]]:
        """The spans that begin between the begin of each step and that of the next: updates go on after backward."""
        of_step = {span.step: span.begin_ns for span in sorted(self._kinds["step"], key=self._rank, reverse=True)}
        begins = sorted((begin_ns, step) for step, begin_ns in of_step.items())  # on the lowest rank that has it
        found: dict[int, list[Span]] = defaultdict(list)
        for span in itertools.chain(*(self._kinds[kind] for kind in kinds)):
            if position := bisect_right(begins, (span.begin_ns, sys.maxsize)):
                found[begins[position - 1][1]].append(span)
        return defaultdict(list, {step: found[step] for step in self._bounds})

    def _totals(
        self, times: Iterable[StepTimes], workers: int, bounds: list[Interval], messages: list[Span], sums: list[Span]
    ) -> Totals:
        means = {
            each.name: float(sum(getattr(one, each.name) for one in times)) / workers for each in fields(StepTimes)
        }
        nbytes: Counter[tuple[str, int]] = Counter()
        for span in messages:
            nbytes[span.kind, span.pserver] += max(span.nbytes, 0)
        links = []
        for number in (process.number for process in self._capture.pservers):
            ways = [(kind, number) for kind in _WIRES]
            busy = [sum(total(clip(self._wires[way], *one)) for one in bounds) for way in ways]
            links.append(LinkUse(number, *(nbytes[way] for way in ways), *busy))
        waited: Counter[int] = Counter()
        for span in sums:
            waited[span.rank] += span.duration_ns
        late = [(ns, -rank) for rank, ns in waited.items() if ns and rank >= 0]
        return Totals(
            **means,
            overlap=overlap(means["hidden_ns"], means["under_way_ns"]),
            links=tuple(links),
            waited_for=dict(sorted(waited.items())),
            slowest=-max(late)[1] if late else None,
            sums=len(sums),
            inversions=sum(id(span) in self._wrong for span in messages),
            messages=len(messages),
        )

    def _costs(self) -> tuple[Cost, ...]:
        spent: Counter[tuple[int, str]] = Counter()
        found = _grouped((self._rank(span), span) for kind in WAITS for span in self._kinds[kind])
        for ranks in self._bounds.values():
            for rank, (begin, end) in ranks.items():
                waits = sorted(
                    (span.priority, max(span.begin_ns, begin), min(span.end_ns, end), span)
                    for span in found[rank]
                    if span.begin_ns < end and begin < span.end_ns
                )
                causes = (
                    ((span.bucket, self._capture.variable_name(span) or "?"), [(first, last)])
                    for _, first, last, span in waits
                )
                _attribute(clip(self._waits[rank], begin, end), causes, spent)
        costs = [Cost(name, ns) for (_, name), ns in spent.items() if ns]
        return tuple(sorted(costs, key=lambda cost: (-cost.exposed_ns, cost.variable)))

    def _parts(self) -> Iterator[PartUse]:
        ran: Counter[int] = Counter()
        for span in itertools.chain(*self._by_step("part").values()):
            ran[span.slice] += span.duration_ns
        for number, part in enumerate(self._capture.parts):
            if ran[number]:
                yield PartUse(part.name, part.waits, ran[number], part.compile_s)

    def _tables(self) -> Iterator[TableUse]:
        """What belongs to lookups that begin within steps: gradients come, and ids may go, outside of these."""
        lookups = _grouped((span.bucket, span) for span in self._kinds["lookup"])
        others = _grouped((span.bucket, span) for kind in (*_WIRES, "held") for span in self._kinds[kind])
        for bucket in sorted(self._capture.tables):
            steps, waits = set[int](), 0
            own = _grouped((self._rank(span), span) for span in lookups[bucket])
            for rank, found in own.items():
                times = union((span.begin_ns, span.end_ns) for span in found)
                for begin, end in (ranks[rank] for ranks in self._bounds.values() if rank in ranks):
                    waits += total(clip(times, begin, end))
                    steps.update(span.step for span in found if begin <= span.begin_ns < end)
            nbytes: Counter[tuple[str, bool]] = Counter()
            held: list[int] = []
            for span in others[bucket]:
                if span.step in steps and span.kind == "held":
                    held.append(span.duration_ns)
                elif span.step in steps:
                    nbytes[span.kind, self._capture.is_lookup(span)] += max(span.nbytes, 0)
            yield TableUse(
                self._capture.buckets[bucket].name,
                waits,
                len(held),
                sum(held),
                nbytes["wire", True],
                nbytes["reply_wire", True],
                nbytes["wire", False],
            )

    def _inversions(self) -> tuple[set[int], Inversion | None]:
        """The messages (by id) that a more urgent one waited behind, and the most frequent pair."""
        wrong: set[int] = set()
        pairs: Counter[tuple[int, int]] = Counter()
        for queued, sent in (("queued", "wire"), ("reply_queued", "reply_wire")):
            waiting, messages = (
                _grouped(((span.rank, span.pserver), span) for span in self._kinds[kind]) for kind in (queued, sent)
            )
            for queue, own in messages.items():
                line, heap = iter(waiting[queue]), list[tuple[int, int, int]]()
                coming = next(line, None)
                for span in own:
                    while coming is not None and coming.begin_ns < span.begin_ns:
                        heapq.heappush(heap, (coming.priority, coming.end_ns, coming.bucket))
                        coming = next(line, None)
                    while heap and heap[0][1] <= span.begin_ns:
                        heapq.heappop(heap)
                    if heap and heap[0][0] < span.priority:
                        wrong.add(id(span))
                        pairs[heap[0][2], span.bucket] += 1
        if not pairs:
            return wrong, None
        pair, times = pairs.most_common(1)[0]
        first, second = (self._capture.buckets[bucket].name if bucket >= 0 else "?" for bucket in pair)
        return wrong, Inversion(first, second, times)

    def _limit(self, totals: Totals, costs: Sequence[Cost]) -> str:
        """What a step waits for, in words."""
        limit = limit_of(totals.duration_ns, totals.exposed_ns, totals.input_ns)
        if limit is Limit.COMPUTATION:
            return f"computation: waiting is {_part(totals.exposed_ns + totals.input_ns, totals.duration_ns)} of a step"
        if limit is Limit.INPUT:
            return f"input: workers wait for batches in {_part(totals.input_ns, totals.duration_ns)} of a step"
        causes: Counter[str] = Counter()
        links: Counter[int] = Counter()
        waiting: Counter[int] = Counter()  # for the network, by rank
        for rank in self._ranks:
            before = causes[_NETWORK]
            self._explain(rank, causes, links)
            waiting[rank] = causes[_NETWORK] - before
        cause, ns = causes.most_common(1)[0]
        # All processes are on one host, and workers reach pservers by loopback: there is no network.
        hosts = {process.host for process in self._capture.workers if process.host}  # of lost workers it is unknown
        by_loopback = all(process.host.startswith(_LOOPBACK) for process in self._capture.pservers)
        here = len(hosts) == 1 and by_loopback
        said = _MEMORY if cause == _NETWORK and here else cause
        said += f", in {_part(ns, sum(causes.values()))} of the exposed wait"
        if cause == _NETWORK and (busiest := _busiest(links)) is not None:
            said += f", most of it to and from pserver {busiest}"
        # Only if slices wait for it: else others are later, for reasons of their own, and there is no way on one host.
        if cause == _NETWORK and not here and (slowest := _busiest(waiting)) is not None and slowest == totals.slowest:
            said += f"; worker {slowest} has the slowest way, and the others wait for it"
        tables = {self._capture.buckets[bucket].name for bucket in self._capture.tables}
        if rows := sum(cost.exposed_ns for cost in costs if cost.variable in tables):
            said += f"; {_part(rows, sum(cost.exposed_ns for cost in costs))} of that wait is for rows of tables"
        if totals.messages and totals.inversions > _SHOWN_INVERSIONS * totals.messages:
            said += f"; {_part(totals.inversions, totals.messages)} of the messages were sent before more urgent ones"
        return said

    def _view(self) -> str:
        pservers = [process.host for process in self._capture.pservers]
        more = f" and {len(pservers) - _NAMED} more" if len(pservers) > _NAMED else ""
        names = f"{_several('pserver', pservers)} {', '.join(pservers[:_NAMED])}{more}"
        return "".join(f"generation {v.generation}, with {_workers(v)} and {names}" for v in self._capture.views[:1])

    def _change(self, span: Span, view: CapturedView) -> str:
        steps = sorted((*ranks[min(ranks)], step) for step, ranks in self._bounds.items())
        during = [f", in step {step}" for begin, end, step in steps if begin <= span.begin_ns < end]
        after = [f"step {step} is the first that begins after it" for begin, _, step in steps if begin >= span.begin_ns]
        when = f"{(span.begin_ns - steps[0][0]) / 1e6:.4g} ms{''.join(during[:1])}"
        details = [part for part in (view.reason, view.note or "".join(after[:1])) if part]
        return f"{when}: generation {view.generation}, with {_workers(view)}: {'; '.join(details)}"

    def _explain(self, rank: int, causes: Counter[str], links: Counter[int]) -> None:
        """Attributes the time that this rank's reads waited, each moment to the first cause that applies."""
        bounds = [ranks[rank] for ranks in self._bounds.values() if rank in ranks]
        left = union(part for begin, end in bounds for part in clip(self._waits[rank], begin, end))
        own = (span for kind in _WIRES for span in self._kinds[kind] if span.rank == rank)
        found = _unions((span.pserver, (span.begin_ns, span.end_ns)) for span in own)
        for pserver, times in found.items():
            links[pserver] += total(intersection(left, times))
        others = [(other, late) for other, late in self._late.items() if other != rank]
        rules = [
            (_NETWORK, union(one for times in found.values() for one in times)),
            *((f"worker {other}, which is later than the others", late) for other, late in others),
            ("updates of variables", self._updates[rank]),
            ("pservers and queues, with nothing on the wire", left),
        ]
        _attribute(left, rules, causes)


def _grouped(found: Iterable[tuple[_Key, _Item]]) -> dict[_Key, list[_Item]]:
    groups: dict[_Key, list[_Item]] = defaultdict(list)
    for key, item in found:
        groups[key].append(item)
    return groups


def _unions(found: Iterable[tuple[_Key, Interval]]) -> dict[_Key, Intervals]:
    return defaultdict(list, {key: union(times) for key, times in _grouped(found).items()})


def _attribute(left: Intervals, causes: Iterable[tuple[_Key, Intervals]], spent: Counter[_Key]) -> None:
    """Adds each moment of `left` to the first cause that applies."""
    for cause, times in causes:
        own = intersection(times, left)
        spent[cause] += total(own)
        left = difference(left, own)


def _busiest(links: Counter[int]) -> int | None:
    """The pserver, or worker, that stands out, if one does."""
    if len(links) < 2:
        return None
    (busiest, ns), *others = links.most_common()
    return busiest if ns > _UNEVEN * sum(one for _, one in others) / len(others) else None


def _several(name: str, of: Sequence[object]) -> str:
    return name if len(of) == 1 else f"{name}s"


def _workers(view: CapturedView) -> str:
    """`workers 0 to 7`, or `workers 0, 2`."""
    ranks = view.ranks
    run = len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1
    return f"{_several('worker', ranks)} {f'{ranks[0]} to {ranks[-1]}' if run else ', '.join(map(str, ranks))}"


def _part(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
