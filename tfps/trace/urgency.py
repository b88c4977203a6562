"""Effects of urgency: the variables that steps waited for, and messages that more urgent ones waited behind.

Tested in tests/trace/test_summary.py.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tfps.trace.capture import CapturedBucket, Span
from tfps.trace.intervals import Interval


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
