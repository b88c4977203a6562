"""Jobs of three workers of which one is killed now and then, and another one started in its place 5 s later."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from typing import Protocol

from tfps.types import Json
from tools import peers
from tools.recovery.horovod_job import HorovodJob
from tools.recovery.job import TICK, Job, Step, until

WORKERS, EPOCH_STEPS, ROW_MS = 3, 40, 15.0
REPLACED_S = 5.0
HOROVOD = {"horovod_undisturbed": {}, "horovod": {}, "horovod_5s": {"HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}}
KINDS = ("undisturbed", "goes_on", "restarts", *HOROVOD)


class _Dying(Protocol):
    def kill(self, number: int) -> float:
        """Ends a worker; returns when."""

    def replace(self, number: int) -> None:
        """Starts another process in place of one that was killed, or lets that be done."""

    def steps(self) -> Sequence[Sequence[Step]]:
        """Of all processes that there have been."""


class _Tfps:
    def __init__(self, stack: contextlib.ExitStack, units: int, restarts: bool) -> None:
        work = ["fit", "--units", str(units), "--steps", str(EPOCH_STEPS), "--row-ms", str(ROW_MS)]
        self._restarts = restarts
        if restarts:
            self._job = Job(stack, WORKERS, [*work, "--backup"])
        else:
            self._job = Job(stack, WORKERS, work, TFPS_MIN_WORKERS="1")

    def kill(self, number: int) -> float:
        killed_s = self._job.end(self._job.workers[number])
        for each in self._job.workers if self._restarts else ():  # they end by themselves, but later
            self._job.end(each)
        return killed_s

    def replace(self, number: int) -> None:
        for each in range(WORKERS) if self._restarts else (number,):
            self._job.start_again(each)

    def steps(self) -> list[list[Step]]:
        return [self._job.steps(rank) for rank in range(WORKERS)]


def absence(kind: str) -> str | None:
    """Why a kind cannot be measured here; None if it can."""
    if kind in HOROVOD and not peers.environment("horovod").is_installed:
        return f"{kind} is left out: tools/peers.py install horovod"
    return None


def measure(kind: str, units: int, every_s: float, window_s: float) -> dict[str, Json]:
    """One run. Steps that are taken again count once, and a pause is the time from one new step to the next.

    Returns:
        lost_pauses_s: by deaths, the longest pause that begins before the other one is started.
        join_pauses_s: the longest that begins afterwards.
        load: of the machine in the last 5 minutes.
    """
    with contextlib.ExitStack() as stack:
        job: _Dying
        if kind in HOROVOD:
            job = HorovodJob(stack, WORKERS, units, ROW_MS, **HOROVOD[kind])
        else:
            job = _Tfps(stack, units, kind == "restarts")
        until(lambda: all(len(each) > EPOCH_STEPS for each in job.steps()))
        began_s = time.monotonic()
        killed_s: list[float] = []
        while not kind.endswith("undisturbed") and (len(killed_s) + 0.5) * every_s < window_s:
            TICK.wait(began_s + (len(killed_s) + 0.5) * every_s - time.monotonic())
            number = len(killed_s) % WORKERS
            killed_s.append(job.kill(number))
            TICK.wait(REPLACED_S)
            job.replace(number)
        TICK.wait(max(began_s + window_s - time.monotonic(), 0.0))
        ends = [end_s for end_s in _new_steps(job.steps()) if end_s < began_s + window_s]
    steps = sum(end_s > began_s for end_s in ends)
    found = {"what": "deaths", "kind": kind, "units": units, "deaths": len(killed_s), "steps": steps}
    found |= {"window_s": window_s, "steps_per_h": round(steps / window_s * 3600), "load": round(os.getloadavg()[1], 1)}
    if killed_s:
        whole = [*ends, began_s + window_s]  # a pause that lasts until the end counts up to there
        lost, joined = zip(*(_pauses(whole, at_s, at_s + every_s - 1.0) for at_s in killed_s), strict=True)
        found |= {"lost_pauses_s": lost, "join_pauses_s": joined}
    return found


def _new_steps(processes: Sequence[Sequence[Step]]) -> list[float]:
    """When each step that counts ended first."""
    ends: dict[tuple[int, int], float] = {}
    for step in itertools.chain(*processes):
        ends[step[:2]] = min(ends.get(step[:2], step.end_s), step.end_s)
    return sorted(ends.values())


def _pauses(ends: Sequence[float], killed_s: float, end_s: float) -> tuple[float, float]:
    """The longest time between two steps after a worker was killed, and of those that begin after it was replaced."""
    replaced_s = killed_s + REPLACED_S
    pairs = list(itertools.pairwise(ends))
    lost = max(b - a for a, b in pairs if a < replaced_s and b > killed_s)
    joined = max((b - a for a, b in pairs if replaced_s <= a < end_s), default=0.0)
    return round(lost, 3), round(joined, 3)
