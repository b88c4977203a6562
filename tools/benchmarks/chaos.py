"""Steps per second of a job to which everything happens that `min_workers` survives, one after the other.

Three workers and two pservers in `fit`: 4 MB of gradients per step, batches of 12 rows. A worker sleeps 15 ms for each
of its rows, as if it had a machine of its own to compute it, so fewer workers take longer for a batch. Another process
is started 5 s after a worker has ended, and 6 s after a pserver. Pause: the longest time from one step to the next
within 6 s after something happens (or before it, if a worker joins).
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import statistics
import time
from collections.abc import Sequence

from tfps.types import Json
from tools.benchmarks.common import Outcome
from tools.recovery.job import TICK, Job, until

WORKERS, UNITS, EPOCH_STEPS, ROW_MS = 3, 512, 100, 15.0
QUIET_S, QUICK_QUIET_S = 6.0, 2.0  # between what happens
WATCHED_S, BIN_S = 6.0, 0.5
RESTART_S, SILENT_S = 5.0, 9.0
STEPS_AFTER = 20  # that a process has taken when it counts as one of them again


class _Story:
    """The job, and what has happened to it since the story began."""

    def __init__(self, job: Job, quiet_s: float) -> None:
        self._job, self._quiet_s = job, quiet_s
        self._began_s = time.monotonic()
        self._started: list[list[float]] = [[0.0] for _ in range(WORKERS)]  # processes of each rank
        self._ended: list[list[float]] = [[] for _ in range(WORKERS)]
        self._pservers: list[list[float]] = [[0.0] for _ in job.pservers]  # when each began and ended
        self.events: list[tuple[float, str]] = []

    def tell(self) -> None:
        """Does everything."""
        self._rest()
        self._worker(2, "worker 2 killed", signal.SIGKILL)
        self._worker(0, "rank 0 killed", signal.SIGKILL)
        self._silent(1)
        self._pserver(1, "a pserver killed")
        self._worker(2, "worker 2: SIGTERM", signal.SIGTERM)
        self._pserver(0, "the first pserver killed")

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _note(self, at_s: float, what: str) -> None:
        self.events.append((at_s, what))
        print(f"{at_s:6.1f} s  {what}", flush=True)

    def _rest(self) -> None:
        TICK.wait(self._quiet_s)

    def _worker(self, rank: int, what: str, how: int) -> None:
        process, at_s = self._job.workers[rank], self._now()
        self._job.end(process, how)
        self._note(at_s, what)
        until(lambda: process.poll() is not None)
        self._ended[rank].append(at_s)
        TICK.wait(RESTART_S)
        self._start_again(rank)

    def _silent(self, rank: int) -> None:
        """A worker is stopped, wakes up when the others have gone on, and ends by itself."""
        process, at_s = self._job.workers[rank], self._now()
        self._job.end(process, signal.SIGSTOP)
        self._note(at_s, f"worker {rank} silent")
        self._ended[rank].append(at_s)
        TICK.wait(SILENT_S)
        process.send_signal(signal.SIGCONT)
        until(lambda: process.poll() is not None)
        self._start_again(rank)

    def _start_again(self, rank: int) -> None:
        before = len(self._job.steps(rank))
        self._started[rank].append(self._now())
        self._job.start_again(rank)
        until(lambda: len(self._job.steps(rank)) > before + STEPS_AFTER)
        self._note(self._job.steps(rank)[before].end_s - self._began_s, f"worker {rank} joins")
        self._rest()

    def _pserver(self, number: int, what: str) -> None:
        at_s = self._now()
        self._job.end(self._job.pservers[number])
        self._note(at_s, what)
        self._pservers[number].append(at_s)
        self._rest()
        at_s = self._job.join() - self._began_s
        self._note(at_s, "a pserver joins")
        self._pservers.append([at_s])
        self._rest()

    def runs(self) -> list[dict[str, Json]]:
        """Rates, events with pauses, and who took part when."""
        end_s = self._now()
        ends: dict[tuple[int, int], list[float]] = {}
        bars: list[dict[str, Json]] = []
        for rank in range(WORKERS):
            steps = self._job.steps(rank)
            for step in steps:
                ends.setdefault(step[:2], []).append(step.end_s - self._began_s)
            for start_s, stop_s in itertools.zip_longest(self._started[rank], self._ended[rank], fillvalue=end_s):
                own = [step.end_s - self._began_s for step in steps]
                first_s = min(at for at in own if at > start_s)
                bars.append(_bar(f"worker {rank}", start_s, first_s if start_s else 0.0, stop_s))
        for number, (start_s, *stops_s) in enumerate(self._pservers):
            bars.append(_bar(f"pserver {number}", start_s, start_s, stops_s[0] if stops_s else end_s))
        times = sorted(statistics.median(each) for each in ends.values())
        rates = [{"what": "rate", "at_s": BIN_S * n, "steps_per_s": _rate(n, times)} for n in range(int(end_s / BIN_S))]
        events = [_event(at_s, what, times) for at_s, what in self.events]
        return [*rates, *events, *bars]


def _bar(who: str, start_s: float, first_s: float, end_s: float) -> dict[str, Json]:
    found = {"start_s": start_s, "first_s": first_s, "end_s": end_s}
    return {"what": "bar", "who": who, **{key: round(value, 2) for key, value in found.items()}}


def _rate(number: int, times: Sequence[float]) -> float:
    """Steps per second in a bin; of a step that is only partly in it this part counts."""
    begin_s, end_s = BIN_S * number, BIN_S * (number + 1)
    steps = [(a, b) for a, b in itertools.pairwise(times) if a < end_s and b > begin_s]
    return round(sum((min(b, end_s) - max(a, begin_s)) / (b - a) for a, b in steps) / BIN_S, 2)


def _event(at_s: float, what: str, times: Sequence[float]) -> dict[str, Json]:
    begin_s = at_s - WATCHED_S if what.startswith("worker") and what.endswith("joins") else at_s
    pauses = [b - a for a, b in itertools.pairwise(times) if b > begin_s and a < begin_s + WATCHED_S]
    return {"what": "event", "event": what, "at_s": round(at_s, 2), "pause_s": round(max(pauses), 3)}


def run(quick: bool) -> Outcome:
    """One run."""
    with contextlib.ExitStack() as stack:
        work = ["fit", "--units", str(UNITS), "--steps", str(EPOCH_STEPS), "--row-ms", str(ROW_MS)]
        job = Job(stack, WORKERS, work, TFPS_MIN_WORKERS="1")
        until(lambda: all(len(job.steps(rank)) > EPOCH_STEPS for rank in range(WORKERS)))
        story = _Story(job, QUICK_QUIET_S if quick else QUIET_S)
        story.tell()
        runs = story.runs()
    rates = [each["steps_per_s"] for each in runs if each["what"] == "rate"]
    pauses = [each["pause_s"] for each in runs if each["what"] == "event"]
    usual = statistics.median(rates)
    headline = {"mean_steps_per_s": statistics.mean(rates), "median_steps_per_s": usual, "longest_pause_s": max(pauses)}
    return Outcome(headline, runs)
