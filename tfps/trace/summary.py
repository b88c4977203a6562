"""Summary of a capture: where the time of a step goes, what it waits for, and whether urgent slices went first.

Everything is counted within steps: times are clipped to the workers' step spans, messages belong to the step in which
they begin. Figures of no single worker use the bounds of the step's lowest rank.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from tfps.errors import TfpsError
from tfps.trace.capture import Capture, CapturedBucket, Setting, Span
from tfps.trace.step_times import (
    Interval,
    Intervals,
    Limit,
    clip,
    difference,
    intersection,
    limit_of,
    overlap,
    step_times,
    total,
    union,
)
from tfps.types import Json

_SHOWN_INVERSIONS = 0.05  # of all messages
_UNEVEN = 1.3  # times the mean of the others
_NETWORK = "the network: messages of the waiting worker are on the wire"
_MEMORY = "the exchange on this one host: messages of the waiting worker are under way"
_LOOPBACK = ("127.", "localhost:", "[::1]:")


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """One step of one worker, nanoseconds; see `StepTimes`.

    Attributes:
        under_way_ns: at least one of its slices was queued, sent, summed or coming back.
    """

    step: int
    rank: int
    begin_ns: int
    end_ns: int
    compute_ns: int
    exposed_ns: int
    input_ns: int
    under_way_ns: int
    hidden_ns: int

    @property
    def duration_ns(self) -> int:
        """Duration of the step."""
        return self.end_ns - self.begin_ns


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
    """Figures of one step, or of all. Times are means over workers, added up over steps.

    Attributes:
        waited_for: rank -> nanoseconds that slices waited for this rank, the last to arrive; added up over slices.
        sums: how many slices were summed.
        inversions: how many of `messages` were sent while a more urgent one waited in the same queue.
    """

    duration_ns: float
    compute_ns: float
    exposed_ns: float
    input_ns: float
    under_way_ns: float
    hidden_ns: float
    links: tuple[LinkUse, ...]
    waited_for: Mapping[int, int]
    sums: int
    inversions: int
    messages: int

    @property
    def overlap(self) -> float:
        """Fraction of the exchange's time during which no read waited. 1 if nothing was exchanged."""
        return overlap(self.hidden_ns, self.under_way_ns)

    @property
    def slowest(self) -> int | None:
        """The rank that slices waited for the longest."""
        waited = {rank: ns for rank, ns in self.waited_for.items() if ns and rank >= 0}
        return max(waited, key=lambda rank: (waited[rank], -rank)) if waited else None


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step."""

    step: int
    begin_ns: int
    end_ns: int
    totals: Totals
    workers: tuple[WorkerStep, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """See `summarize`."""

    name: str
    settings: Mapping[str, Setting]
    workers: int
    totals: Totals
    steps: tuple[StepSummary, ...]
    costs: tuple[Cost, ...]
    inversion: Inversion | None
    limit: str

    def to_json(self) -> dict[str, Json]:
        """Everything as plain values."""
        content = asdict(self)
        content["totals"].update(_derived(self.totals))
        for step, made in zip(self.steps, content["steps"], strict=True):
            made["totals"].update(_derived(step.totals))
        return content


def _derived(totals: Totals) -> dict[str, Json]:
    return {"overlap": totals.overlap, "slowest": totals.slowest}


def summarize(capture: Capture) -> Summary:
    """All figures of a capture. Takes about 10 microseconds per span.

    Raises:
        TfpsError: it has no steps.
    """
    return _Summarizer(capture).run()


class _Summarizer:
    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._kinds: dict[str, list[Span]] = defaultdict(list)
        for span in capture.spans:
            self._kinds[span.kind].append(span)
        wanted = set(capture.steps)
        # step -> rank -> bounds
        self._bounds: dict[int, dict[int, Interval]] = defaultdict(dict)
        for span in self._kinds["step"]:
            if not wanted or span.step in wanted:
                self._bounds[span.step][capture.processes[span.process].number] = (span.begin_ns, span.end_ns)
        if not self._bounds:
            raise TfpsError(f"a capture needs at least one span of kind 'step' to be summarized, got none of {wanted}")
        self._ranks = sorted({rank for ranks in self._bounds.values() for rank in ranks})
        self._gates = self._per_rank(["gate"])
        self._under_way = self._slices_under_way()
        self._wires = {
            kind: self._per_key((span.pserver, span) for span in self._kinds[kind]) for kind in ("wire", "reply_wire")
        }
        self._waited = self._per_key((span.rank, span) for span in self._kinds["aggregate"])
        self._wrong, self._inversion = inversions(self._kinds, capture.buckets)

    def run(self) -> Summary:
        """Summarizes each step, then all together."""
        computing = self._per_rank(["forward", "backward"])
        inputs = self._per_rank(["input"])
        messages = self._by_step("wire", "reply_wire")
        sums = self._by_step("aggregate")
        steps = []
        for step, bounds in sorted(self._bounds.items()):
            workers = []
            for rank, own in sorted(bounds.items()):
                times = step_times(own, computing[rank], self._gates[rank], inputs[rank], self._under_way[rank])
                workers.append(WorkerStep(step, rank, *own, **times._asdict()))
            begin, end = bounds[min(bounds)]
            totals = self._totals([[one] for one in workers], [(begin, end)], messages[step], sums[step])
            steps.append(StepSummary(step, begin, end, totals, tuple(workers)))
        every_message, every_sum = ([span for own in found.values() for span in own] for found in (messages, sums))
        by_rank = [[one for step in steps for one in step.workers if one.rank == rank] for rank in self._ranks]
        totals = self._totals(by_rank, [(step.begin_ns, step.end_ns) for step in steps], every_message, every_sum)
        return Summary(
            name=self._capture.name,
            settings=dict(self._capture.settings),
            workers=len(self._ranks),
            totals=totals,
            steps=tuple(steps),
            costs=costs(self._gates_by_rank(), self._bounds.values(), self._capture.buckets),
            inversion=self._inversion,
            limit=self._limit(totals),
        )

    def _per_key(self, found: Iterable[tuple[int, Span]]) -> dict[int, Intervals]:
        times: dict[int, list[Interval]] = defaultdict(list)
        for key, span in found:
            times[key].append((span.begin_ns, span.end_ns))
        return defaultdict(list, {key: union(own) for key, own in times.items()})

    def _per_rank(self, kinds: list[str]) -> dict[int, Intervals]:
        processes = self._capture.processes
        return self._per_key((processes[span.process].number, span) for kind in kinds for span in self._kinds[kind])

    def _gates_by_rank(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = defaultdict(list)
        for span in self._kinds["gate"]:
            found[self._capture.processes[span.process].number].append(span)
        return found

    def _slices_under_way(self) -> dict[int, Intervals]:
        """Per rank, when its slices were under way: each from its first to its last span."""
        whole: dict[tuple[int, int, int, int], Interval] = {}
        for kind in ("queued", "wire", "reply_queued", "reply_wire"):
            for span in self._kinds[kind]:
                key = span.rank, span.step, span.bucket, span.slice
                begin, end = whole.get(key, (span.begin_ns, span.end_ns))
                whole[key] = min(begin, span.begin_ns), max(end, span.end_ns)
        times: dict[int, list[Interval]] = defaultdict(list)
        for (rank, *_), one in whole.items():
            times[rank].append(one)
        return defaultdict(list, {rank: union(own) for rank, own in times.items()})

    def _by_step(self, *kinds: str) -> dict[int, list[Span]]:
        """The spans that begin within each step."""
        bounds = sorted((*ranks[min(ranks)], step) for step, ranks in self._bounds.items())
        found: dict[int, list[Span]] = defaultdict(list)
        position = 0
        spans = [span for kind in kinds for span in self._kinds[kind]]
        for span in sorted(spans, key=lambda span: span.begin_ns):
            while position < len(bounds) and bounds[position][1] <= span.begin_ns:
                position += 1
            if position < len(bounds) and bounds[position][0] <= span.begin_ns:
                found[bounds[position][2]].append(span)
        return found

    def _totals(
        self, workers: list[list[WorkerStep]], bounds: list[Interval], messages: list[Span], sums: list[Span]
    ) -> Totals:
        def mean(name: str) -> float:
            return float(sum(getattr(one, name) for own in workers for one in own)) / len(workers)

        def within(times: Intervals) -> int:
            return sum(total(clip(times, begin, end)) for begin, end in bounds)

        waited: Counter[int] = Counter()
        for span in sums:
            waited[span.rank] += span.duration_ns
        pushed: Counter[int] = Counter()
        replied: Counter[int] = Counter()
        for span in messages:
            (pushed if span.kind == "wire" else replied)[span.pserver] += max(span.nbytes, 0)
        links = tuple(
            LinkUse(
                pserver=process.number,
                pushed_bytes=pushed[process.number],
                replied_bytes=replied[process.number],
                push_busy_ns=within(self._wires["wire"][process.number]),
                reply_busy_ns=within(self._wires["reply_wire"][process.number]),
            )
            for process in self._capture.pservers
        )
        names = ("duration_ns", "compute_ns", "exposed_ns", "input_ns", "under_way_ns", "hidden_ns")
        return Totals(
            **{name: mean(name) for name in names},
            links=links,
            waited_for=dict(sorted(waited.items())),
            sums=len(sums),
            inversions=sum(id(span) in self._wrong for span in messages),
            messages=len(messages),
        )

    def _limit(self, totals: Totals) -> str:
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
        said = f"{cause}, in {_part(ns, sum(causes.values()))} of the exposed wait"
        here = cause == _NETWORK and _on_one_host(self._capture)
        if here:
            said = said.replace(_NETWORK, _MEMORY)
        if cause == _NETWORK and (busiest := _busiest(links)) is not None:
            said += f", most of it to and from pserver {busiest}"
        # Only if slices wait for it: else others are later, for reasons of their own, and there is no way on one host.
        if cause == _NETWORK and not here and (slowest := _busiest(waiting)) is not None and slowest == totals.slowest:
            said += f"; worker {slowest} has the slowest way, and the others wait for it"
        if totals.messages and totals.inversions > _SHOWN_INVERSIONS * totals.messages:
            said += f"; {_part(totals.inversions, totals.messages)} of the messages were sent before more urgent ones"
        return said

    def _explain(self, rank: int, causes: Counter[str], links: Counter[int]) -> None:
        """Attributes the time that this rank's reads waited, each moment to the first cause that applies."""
        bounds = [ranks[rank] for ranks in self._bounds.values() if rank in ranks]
        left = union(one for begin, end in bounds for one in clip(self._gates[rank], begin, end))
        found: dict[int, list[Interval]] = defaultdict(list)
        for kind in ("wire", "reply_wire"):
            for span in self._kinds[kind]:
                if span.rank == rank:
                    found[span.pserver].append((span.begin_ns, span.end_ns))
        for pserver, times in found.items():
            links[pserver] += total(intersection(left, union(times)))
        rules = [(_NETWORK, union(one for times in found.values() for one in times))]
        others = sorted(self._waited.items(), key=lambda item: -total(item[1]))
        rules += [
            (f"worker {other}, which is later than the others", times) for other, times in others if other != rank
        ]
        rules.append(("updates of variables", self._per_rank(["update"])[rank]))
        for cause, times in rules:
            causes[cause] += total(intersection(left, times))
            left = difference(left, times)
        causes["pservers and queues, with nothing on the wire"] += total(left)


def _on_one_host(capture: Capture) -> bool:
    """Whether there is no network: all processes are on one host, and workers reach pservers by a loopback address."""
    hosts = {process.host for process in capture.processes if process.role == "worker"}
    return len(hosts) == 1 and "" not in hosts and all(each.host.startswith(_LOOPBACK) for each in capture.pservers)


def _busiest(links: Counter[int]) -> int | None:
    """The pserver, or worker, that stands out, if one does."""
    if len(links) < 2:
        return None
    (busiest, ns), *others = links.most_common()
    return busiest if ns > _UNEVEN * sum(one for _, one in others) / len(others) else None


def _part(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


@dataclass(frozen=True, slots=True)
class Cost:
    """Exposed wait for one variable: nanoseconds over all workers and steps. Each instant counts once per worker, for
    the most urgent variable waited for."""

    variable: str
    bucket: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class Inversion:
    """The pair of buckets most often in the wrong order."""

    waiting: str
    sent: str
    times: int


def costs(
    gates: Mapping[int, Sequence[Span]], steps: Iterable[Mapping[int, Interval]], buckets: Sequence[CapturedBucket]
) -> tuple[Cost, ...]:
    """Exposed time by variable, the most expensive first; adds up to that of all workers.

    Args:
        gates: when reads waited, by rank.
        steps: bounds of each step, by rank.
    """
    spent: Counter[tuple[int, int]] = Counter()
    for step in steps:
        for rank, bounds in step.items():
            _attribute(gates.get(rank, ()), bounds, spent)
    found = [Cost(_variable(buckets, *key), key[0], ns) for key, ns in spent.items()]
    return tuple(sorted(found, key=lambda cost: (-cost.exposed_ns, cost.variable)))


def inversions(
    spans: Mapping[str, Sequence[Span]], buckets: Sequence[CapturedBucket]
) -> tuple[set[int], Inversion | None]:
    """The messages (by id) that a more urgent one waited behind, and the most frequent pair.

    Args:
        spans: by kind, each in the order in which they began.
    """
    wrong: set[int] = set()
    pairs: Counter[tuple[int, int]] = Counter()
    for queued, sent in (("queued", "wire"), ("reply_queued", "reply_wire")):
        waiting, messages = _by_queue(spans[queued]), _by_queue(spans[sent])
        for queue, own in messages.items():
            line, position, heap = waiting.get(queue, []), 0, list[tuple[int, int, int]]()
            for span in own:
                while position < len(line) and line[position].begin_ns < span.begin_ns:
                    one = line[position]
                    heapq.heappush(heap, (one.priority, one.end_ns, one.bucket))
                    position += 1
                while heap and heap[0][1] <= span.begin_ns:
                    heapq.heappop(heap)
                if heap and heap[0][0] < span.priority:
                    wrong.add(id(span))
                    pairs[heap[0][2], span.bucket] += 1
    if not pairs:
        return wrong, None
    (first, second), times = pairs.most_common(1)[0]
    return wrong, Inversion(_name(buckets, first), _name(buckets, second), times)


def _by_queue(spans: Sequence[Span]) -> dict[tuple[int, int], list[Span]]:
    found: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        found[span.rank, span.pserver].append(span)
    return found


def _attribute(gates: Sequence[Span], bounds: Interval, spent: Counter[tuple[int, int]]) -> None:
    """Adds to each variable the time in which it was the most urgent one waited for."""
    begin, end = bounds
    line = sorted((max(one.begin_ns, begin), min(one.end_ns, end), one) for one in gates if one.end_ns > begin)
    line = [one for one in line if one[0] < one[1]]
    times = sorted({one[0] for one in line} | {one[1] for one in line})
    heap: list[tuple[int, int, int, Span]] = []
    position = 0
    for now, after in pairwise(times):
        while position < len(line) and line[position][0] <= now:
            heapq.heappush(heap, (line[position][2].priority, position, line[position][1], line[position][2]))
            position += 1
        while heap and heap[0][2] <= now:
            heapq.heappop(heap)
        if heap:
            spent[heap[0][3].bucket, heap[0][3].variable] += after - now


def _variable(buckets: Sequence[CapturedBucket], bucket: int, variable: int) -> str:
    return buckets[bucket].variables[variable] if bucket >= 0 and variable >= 0 else _name(buckets, bucket)


def _name(buckets: Sequence[CapturedBucket], bucket: int) -> str:
    return buckets[bucket].name if bucket >= 0 else "?"
