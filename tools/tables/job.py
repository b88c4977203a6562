"""Jobs on this machine, or on the hosts of a lab, that take rounds of steps when a benchmark says so."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tfps.types import Json
from tools import children
from tools.netlab import Host
from tools.tables.work import Work

ANSWER_S = 900.0
_FOLDER = pathlib.Path(__file__).parent
_TOTALS = ("worker_cpu_s", "pserver_cpu_s", "asked", "early", "pushed", "received_bytes", "sent_bytes")


class Job:
    """Processes of one kind that train one table; what they measure is of all workers together.

    Args:
        kind: of worker.py.
        pservers: how many; 0: the workers are one process.
        hosts: of a lab, for workers and then for pservers; none: all processes are on this one.
        options: more arguments of the workers.
        variables: of the environment of workers.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        kind: str,
        work: Work,
        *,
        warmup: int,
        steps: int,
        workers: int = 1,
        pservers: int = 0,
        hosts: Sequence[Host] = (),
        options: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self.work, self._steps = work, warmup + steps
        starts = [host.popen for host in hosts] or [subprocess.Popen] * (workers + pservers)
        addresses = [host.address for host in hosts] or ["127.0.0.1"] * (workers + pservers)
        self.pservers = [
            stack.enter_context(
                children.python(
                    [str(_FOLDER / "pserver.py"), address, str(workers), str(place), str(pservers)], popen=start
                )
            )
            for place, (start, address) in enumerate(zip(starts[workers:], addresses[workers:], strict=True))
        ]
        settings = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", **variables}
        if pservers:
            asked = [children.answer(each, ANSWER_S).strip() for each in self.pservers]
            settings |= {"TFPS_PSERVERS": ",".join(asked), "TFPS_WORKERS": str(workers)}
        about = ["--work", work.to_json(), "--warmup", str(warmup), "--steps", str(steps), *options]
        self.workers = [
            stack.enter_context(
                children.python(
                    [str(_FOLDER / "worker.py"), kind, *about], {**settings, "TFPS_RANK": str(rank)}, popen=start
                )
            )
            for rank, start in enumerate(starts[:workers])
        ]

    def fill(self) -> dict[str, float]:
        """Puts all rows into the pservers' tables, which a round before has declared."""
        for each in self.pservers:
            children.tell(each, f"fill {self.work.to_json()}")
        return _sums(json.loads(children.answer(each, ANSWER_S)) for each in self.pservers)

    def figures(self) -> dict[str, float]:
        """Totals of all pservers since they began."""
        for each in self.pservers:
            children.tell(each, "figures")
        return _sums(json.loads(children.answer(each, ANSWER_S)) for each in self.pservers)

    def round(self) -> dict[str, Json]:
        """Takes the steps of a round.

        Returns:
            step_s, wait_s: of the slowest worker: per step, and of that waiting for rows. Others: means of all steps.
            worker_cpu_s, pserver_cpu_s: of all workers, and of all pservers.
            asked, early, pushed: rows, of all workers; see `Traffic`.
            received_bytes, sent_bytes: payload that pservers have received and sent.
        """
        self._all("prepare")
        before = self._totals()
        found = self._all("fit")
        after = self._totals()
        every = self._steps
        of_step = {name: (total - before.get(name, 0.0)) / every for name, total in after.items() if name in _TOTALS}
        slowest = {name: max(float(each[name]) for each in found) for name in ("step_s", "wait_s")}
        return {**slowest, **{name: round(value, 6) for name, value in of_step.items()}}

    def _all(self, line: str) -> list[dict[str, Json]]:
        """The answers of all workers."""
        for each in self.workers:
            children.tell(each, line)
        return [json.loads(children.answer(each, ANSWER_S)) for each in self.workers]

    def _totals(self) -> dict[str, float]:
        figures = self.figures() if self.pservers else {}
        for name, processes in (("worker_cpu_s", self.workers), ("pserver_cpu_s", self.pservers)):
            figures[name] = sum(children.cpu_s(each.pid) for each in processes)
        return figures


def _sums(found: Iterable[Mapping[str, Json]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for each in found:
        total.update(each)
    return dict(total)
