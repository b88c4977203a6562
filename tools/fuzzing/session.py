"""Draws cases until the time is over, shrinks those that fail, and counts what has been covered."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tools.fuzzing import runner
from tools.fuzzing.cases import Case, Fit, features
from tools.fuzzing.draw import draw, usable
from tools.fuzzing.pool import Pool
from tools.fuzzing.runner import Result
from tools.fuzzing.simplify import simplified
from tools.fuzzing.source import program

Change = Callable[[str, int], str]


def unchanged(text: str, rank: int) -> str:
    return text


@dataclass
class Session:
    """
    Args:
        minutes: after which no new case begins; a failure that was found before is still shrunk for `shrink_s`.
        most_cases: as `minutes`, and repeatable.
        without: features that are not drawn.
        folder: programs that fail are written there.
        compressed, compiled: of `draw`.
        change: puts a fault into the program of a rank (`runner.run`).
        say: takes lines of progress.
        update: `tfps.Config.update` of the strategies.
        elastic: in each case a worker leaves and comes back, if `fit` gets so far.
    """

    minutes: float
    seed: int = 1
    workers: tuple[int, ...] = (1, 2, 3)
    most_cases: int = 1_000_000
    without: Collection[str] = ()
    folder: pathlib.Path | None = None
    shrink_s: float = 240.0
    compressed: int = 6
    change: Change = unchanged
    say: Callable[[str], None] = print
    update: str = "worker"
    elastic: bool = False
    compiled: int = 4
    ran: Counter[str] = field(default_factory=Counter)  # by how they ended
    covered: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    largest: float = 0.0
    failures: list[Result] = field(default_factory=list)

    def run(self, pool: Pool | None = None) -> None:
        """Runs cases until the time is over, on `pool` or on one of its own."""
        self._start = time.monotonic()
        # One process for what is compared with, beside the workers.
        count = 1 + max(self.workers) + self.elastic
        with contextlib.nullcontext(pool) if pool else Pool(count) as processes:
            for number in itertools.count():
                if self._is_over():
                    return
                case = draw(f"{self.seed} {number}", self.workers, self.without, self.compressed, self.compiled)
                if self.elastic:
                    case = _longer(case)
                if self._may_run(case):
                    self._try(case, processes)

    def _may_run(self, case: Case) -> bool:
        """Whether a worker can leave it, if one is to."""
        return not self.elastic or bool(case.place.workers > 1 and case.place.pservers and case.fits)

    def _is_over(self) -> bool:
        return time.monotonic() - self._start > self.minutes * 60 or sum(self.ran.values()) >= self.most_cases

    def _try(self, case: Case, pool: Pool) -> None:
        """Runs a case, and shrinks it where it fails."""
        result = self._run(case, pool)
        self._count(result)
        if result.difference is None:
            return
        if self._is_known(result):
            self.ran["failed as others did"] += 1
            return
        self.say(f"FAILS {result.difference.kind}: {case!r}\n{result.difference.details[:600]}")
        self._keep(self._shrunk(result, pool))

    def _run(self, case: Case, pool: Pool) -> Result:
        draws, leaves = random.Random(f"{self.seed} {case.seed}"), None
        if self.elastic:
            leaves = draws.randrange(case.place.workers), draws.choice((1, 1, 2, 2, 3, 5, 8))
        return runner.run(case, pool, self.change, self.update, leaves)

    def _shrunk(self, result: Result, pool: Pool) -> Result:
        until, smallest, kind = time.monotonic() + self.shrink_s, result, _kind(result)

        def fails(case: Case) -> bool:
            nonlocal smallest
            try:
                program(case)
            except KeyError:  # a layer that does not fit the one before
                return False
            if not usable(case, self.without) or not self._may_run(case):
                return False
            tried = self._run(case, pool)
            if _kind(tried) != kind:
                return False
            smallest = tried
            return True

        simplified(result.case, fails, lambda: time.monotonic() > until)
        return smallest

    def _is_known(self, result: Result) -> bool:
        """Whether it has all features of a failure of its kind that this session has found."""
        return any(
            features(failure.case) <= features(result.case) and _kind(failure) == _kind(result)
            for failure in self.failures
        )

    def _count(self, result: Result) -> None:
        how = "failed" if result.difference else "refused" if result.refused else "passed"
        self.ran[how] += 1
        self.covered.update(features(result.case))
        self.rules.update(result.rules)
        if how == "passed":
            self.largest = max(self.largest, result.largest)
        if how == "refused":
            self.say(f"refused: {result.refused.partition(chr(10))[0]}: {result.case!r}")
        seconds = time.monotonic() - self._start
        names = ", ".join(sorted(features(result.case)))
        self.say(f"{seconds:5.0f} s {sum(self.ran.values()):4} {how} ({result.largest:.2g}): {names}")

    def _keep(self, result: Result) -> None:
        self.failures.append(result)
        difference = result.difference
        self.say(f"SHRUNK to {sorted(features(result.case))}: {difference and difference.kind}")
        self.say(f"{result.case!r}\n{difference and difference.details[:2000]}")
        if self.folder is not None:
            path = self.folder / f"failure{len(self.failures)}_seed{self.seed}.py"
            path.write_text(result.text, encoding="utf-8")
            self.say(f"program: {path}")

    def summary(self) -> str:
        """What was run, covered and found."""
        count = sum(self.ran.values())
        lines = [f"{count} cases: {dict(self.ran)}", f"largest difference: {self.largest:.3g} of what is tolerated"]
        lines.append("rules: " + ", ".join(f"{name} {times}" for name, times in self.rules.most_common()))
        lines.append("features: " + ", ".join(f"{name} {times}" for name, times in self.covered.most_common()))
        for number, failure in enumerate(self.failures, 1):
            kind = failure.difference.kind if failure.difference else ""
            lines.append(f"failure {number}: {kind}: {', '.join(sorted(features(failure.case)))}")
        return "\n".join(lines)


def _longer(case: Case) -> Case:
    """With epochs enough for a worker to come back in them."""
    longer = [
        dataclasses.replace(each, epochs=each.epochs + 5) if isinstance(each, Fit) else each for each in case.actions
    ]
    return dataclasses.replace(case, actions=tuple(longer))


def _kind(result: Result) -> str:
    return result.difference.kind if result.difference else ""
