"""Jobs on this machine, or on the hosts of a lab, that take rounds of steps when a benchmark says so."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tfps.types import Json
from tools import children, peers
from tools.netlab import Host
from tools.tables.work import Work

ANSWER_S = 900.0
# tfps' rows on pservers or in one process, those of Keras, and of peers (worker.py and peer_worker.py say more).
TFRA = peers.Environment(
    "tfra",
    "TensorFlow Recommenders Addons 0.8.1, its last release, which is for TensorFlow 2.16",
    "3.10",
    (("tensorflow-cpu==2.16.*", "tf_keras==2.16.*", "tensorflow-recommenders-addons==0.8.1"),),
)
_FOLDER = pathlib.Path(__file__).parent
_TOTALS = ("cpu_s", "server_cpu_s", "asked", "early", "pushed", "received_bytes", "sent_bytes")
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


class Job:
    """Processes that train one table together.

    Args:
        workers: processes that take the steps of a round, and say what they measured.
        servers: their pservers, or what peers have in their place.
        asks: whether `servers` are those of pserver.py.
    """

    def __init__(
        self,
        work: Work,
        steps: int,
        workers: Sequence[subprocess.Popen[str]],
        servers: Sequence[subprocess.Popen[str]] = (),
        *,
        asks: bool = False,
    ) -> None:
        self.work, self._steps, self._workers, self._servers, self._asks = work, steps, workers, servers, asks

    def fill(self) -> dict[str, Json]:
        """Puts all rows into the pservers' tables, which a round has declared; how long it took, rows and bytes."""
        return _together(self._all(self._servers, f"fill {self.work.to_json()}"))

    def round(self, work: Work | None = None) -> dict[str, Json]:
        """Takes the steps of a round, with other ids if `work` says so.

        Returns:
            step_s, wait_s: of the slowest worker: per step, and of that waiting for rows. Others are means of steps:
            cpu_s, server_cpu_s: of all processes, and of all servers.
            asked, early, pushed: rows, of all workers; see `Traffic`.
            received_bytes, sent_bytes: payload that pservers have received and sent.
        """
        self._all(self._workers, f"prepare {(work or self.work).to_json()}")
        before = self._totals()
        found = self._all(self._workers, "fit")
        after = self._totals()
        slowest = {name: max(float(each[name]) for each in found) for name in ("step_s", "wait_s")}
        means = {
            name: round((after[name] - before.get(name, 0.0)) / self._steps, 6) for name in _TOTALS if name in after
        }
        return {**slowest, **means}

    def _totals(self) -> dict[str, Json]:
        figures = _together(self._all(self._servers, "figures")) if self._asks else {}
        figures["server_cpu_s"] = sum(children.cpu_s(each.pid) for each in self._servers)
        figures["cpu_s"] = figures["server_cpu_s"] + sum(children.cpu_s(each.pid) for each in self._workers)
        return figures

    def _all(self, processes: Sequence[subprocess.Popen[str]], line: str) -> list[dict[str, Json]]:
        for each in processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended, as its missing answer says
                children.tell(each, line)
        return [json.loads(children.answer(each, ANSWER_S)) for each in processes]


def _together(found: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Sums, and of times the longest."""
    total: Counter[str] = Counter()
    for each in found:
        total.update({name: value for name, value in each.items() if not name.endswith("_s")})
        total.update({name: max(value - total[name], 0.0) for name, value in each.items() if name.endswith("_s")})
    return dict(total)


def keras_job(stack: contextlib.ExitStack, kind: str, work: Work, warmup: int, steps: int) -> Job:
    """One process, of a kind of worker.py."""
    arguments = [str(_FOLDER / "worker.py"), kind, *_about(work, warmup, steps)]
    return Job(work, warmup + steps, [stack.enter_context(children.python(arguments, _QUIET))])


def tfps_job(
    stack: contextlib.ExitStack,
    work: Work,
    warmup: int,
    steps: int,
    *,
    workers: int = 1,
    pservers: int = 2,
    hosts: Sequence[Host] = (),
    options: Sequence[str] = (),
) -> Job:
    """Workers and pservers, in this order on `hosts` of a lab, or all on this one; `options` are of worker.py."""
    starts: list[children.Start] = [host.popen for host in hosts] or [subprocess.Popen] * (workers + pservers)
    addresses = [host.address for host in hosts] or ["127.0.0.1"] * (workers + pservers)
    servers = [
        stack.enter_context(
            children.python(
                [str(_FOLDER / "pserver.py"), address, str(workers), str(place), str(pservers)], popen=start
            )
        )
        for place, (start, address) in enumerate(zip(starts[workers:], addresses[workers:], strict=True))
    ]
    where = ",".join(children.answer(each, ANSWER_S).strip() for each in servers)
    variables = {**_QUIET, "TFPS_PSERVERS": where, "TFPS_WORKERS": str(workers)}
    arguments = [str(_FOLDER / "worker.py"), "tfps", *_about(work, warmup, steps), *options]
    processes = [
        stack.enter_context(children.python(arguments, {**variables, "TFPS_RANK": str(rank)}, popen=start))
        for rank, start in enumerate(starts[:workers])
    ]
    return Job(work, warmup + steps, processes, servers, asks=True)


def absence(kind: str) -> str | None:
    """Why a peer cannot be measured here; None if it can."""
    if kind.startswith("tfra") and not TFRA.is_installed:
        return "not installed: tools/python -m tools.tables.job"
    return None


def peer_job(stack: contextlib.ExitStack, kind: str, work: Work, warmup: int, steps: int) -> Job:
    """One process of peer_worker.py, or one that coordinates one worker and two servers."""
    python = TFRA.interpreter if kind.startswith("tfra") else pathlib.Path(sys.executable)

    def started(what: str, **variables: str) -> subprocess.Popen[str]:
        def popen(arguments: Sequence[str], **settings: Json) -> subprocess.Popen[str]:
            return subprocess.Popen([str(python), *arguments[1:]], **settings)

        arguments = [str(_FOLDER / "peer_worker.py"), what, *_about(work, warmup, steps)]
        settings = {**_QUIET, "TF_USE_LEGACY_KERAS": "1", **variables}
        return stack.enter_context(children.python(arguments, settings, popen=popen))

    every = 2 * steps if kind.startswith("tfra") else warmup + steps  # see there
    if kind == "tfra":
        return Job(work, every, [started(kind)])
    tasks = [("worker", 0), ("ps", 0), ("ps", 1), ("chief", 0)]
    cluster: dict[str, list[str]] = {}
    for job, _ in tasks:
        cluster.setdefault(job, []).append(f"127.0.0.1:{_free_port()}")

    def config(job: str, index: int) -> str:
        return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})

    *serving, chief = (
        started("serve" if job != "chief" else kind, TF_CONFIG=config(job, index)) for job, index in tasks
    )
    return Job(work, every, [chief], serving)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _about(work: Work, warmup: int, steps: int) -> list[str]:
    return ["--work", work.to_json(), "--warmup", str(warmup), "--steps", str(steps)]


if __name__ == "__main__":
    peers.install(TFRA)
