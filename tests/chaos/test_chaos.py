"""Workers die, stop, are cut off, leave and join at random; what is trained is plain Keras' without their rows.

In a plan with a table of rows workers leave between steps, or pservers are lost: nothing is missing in the end.

A seed is one plan: what happens is tied to steps, not to times. A failure prints its seed and its plan;
`CHAOS_SEED=7 pytest tests/chaos` runs it again. The test marked "long" goes on for CHAOS_MINUTES.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import jobs
import numpy as np
import preloaded
import processes
import pytest
from preloaded import Process

from tfps.config import Security
from tfps.errors import PserverLostError
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.rendezvous import offer
from tfps.types import Json
from tfps.wire.control import Pserver
from tools.netlab import Netlab, plug, unavailable

HERE = Path(__file__).resolve().parent
EPOCHS, STEPS, WORKERS, PSERVERS = 5, 6, 3, 3
MINUTES = float(os.environ.get("CHAOS_MINUTES", "30"))
SEED = os.environ.get("CHAOS_SEED")
RUN_S = 200.0  # for one plan
PAUSE_S = 1.5  # which is no loss: that takes 5 s of silence
WITHOUT = ("the other workers went on without this one", "may go on elsewhere")  # the latter while it is cut off
POINTS = ("before a push", "between slices", "after the last push")
HANDING_OVER = ("in an admission", "in a hand-over")  # two of each per epoch in which somebody joins
KINDS = ("dataset", "arrays adam", "dataset validation adam", "arrays")
TRANSPORTS: tuple[dict[str, str], ...] = (
    {},
    {"TFPS_SHARED_MEMORY": "0"},
    {"TFPS_SHARED_MEMORY": "0", "TFPS_TRANSPORT": "grpc"},
)


@dataclass
class Life:
    """One process of a rank: see storm.Task. It ends well if nothing ends it."""

    not_before: int = 0
    faults: list[tuple[int, str, int]] = field(default_factory=list)
    wakes: str = ""  # one that was stopped and lost: "before" or "after" another has its rank

    @property
    def end(self) -> int:
        """The exit code."""
        numbers = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: -signal.SIGTERM, signal.SIGSTOP: 1}
        return numbers[signal.Signals(self.faults[-1][2])] if self.is_ended else 0

    @property
    def is_ended(self) -> bool:
        """Whether something ends it. One that is stopped goes on after a pause, unless it is to be lost."""
        return bool(self.faults) and (self.faults[-1][2] != signal.SIGSTOP or bool(self.wakes))


@dataclass
class Plan:
    """What happens in one run."""

    seed: int
    kind: str
    environment: dict[str, str]
    lives: list[list[Life]] = field(default_factory=lambda: [[Life()] for _ in range(WORKERS)])  # by rank
    due: dict[int, list[int]] = field(default_factory=dict)  # by epoch: who joins at its end
    at_the_end: list[int] = field(default_factory=lambda: list(range(WORKERS)))  # who takes part
    moves: list[tuple[int, int, str, int, int]] = field(default_factory=list)  # of pservers: see storm.Task

    @classmethod
    def drawn(cls, seed: int, epochs: int = EPOCHS, *, cuts: bool = False) -> Plan:
        """With `cuts` for hosts that are cut off instead of workers that are stopped."""
        draw = random.Random(seed)
        plan = cls(seed, draw.choice(KINDS), draw.choice(TRANSPORTS))
        if random.Random(f"stages {seed}").random() < 0.3:  # apart: seeds that have failed stay what they are
            plan.kind += " staged"
        if random.Random(f"table {seed}").random() < 0.2:
            plan.kind += " table"
            plan.environment = {**plan.environment, "TFPS_SNAPSHOT_STEPS": "2"}
        if cuts:
            plan.environment = {**plan.environment, "TFPS_SHARED_MEMORY": "0"}  # which nothing cuts
        if draw.random() < 0.6:
            if not cuts:  # who is cut off may be with a pserver that ends: then one of two ends by name, as it must
                plan._move_pservers(draw, epochs)
        elif random.Random(f"update {seed}").random() < 0.5:  # apart: seeds that have failed stay what they are
            plan.environment = {**plan.environment, "TFPS_UPDATE": "server", "TFPS_SNAPSHOT_STEPS": "2"}
        present, away = set(range(WORKERS)), dict[int, int]()  # rank -> the epoch at whose beginning it comes back
        for epoch in range(epochs):
            joining = {rank for rank, back in away.items() if back == epoch}
            if joining:
                plan.due[epoch - 1] = sorted(joining)
            away = {rank: back for rank, back in away.items() if back != epoch}
            everybody = sorted(present | joining)
            spared = draw.choice(sorted(present))  # has the state of the training, and hands it over
            doomed = [rank for rank in everybody if rank != spared and draw.random() < 0.55]
            if plan.has_table and plan.moves:  # both at once end the job by name
                doomed = []
            for rank in everybody:
                if rank not in doomed and draw.random() < 0.2:
                    plan._pause(draw, rank, epoch)
            for rank in doomed:
                plan._end(draw, rank, epoch, joining)
                back = epoch + draw.choice((1, 1, 1, 2))
                if back < epochs:
                    away[rank] = back
                    if draw.random() < 0.15:
                        plan.lives[rank].append(Life(back - 1, [(0, "while it asks to join", signal.SIGKILL)]))
                    plan.lives[rank].append(Life(back - 1))
            present = set(everybody).difference(doomed)
        plan.at_the_end = sorted(present)
        for life in [each for lives in plan.lives for each in lives if cuts and each.wakes]:
            life.wakes = "before"  # the next one needs the host
        return plan

    @property
    def has_table(self) -> bool:
        return "table" in self.kind

    def _move_pservers(self, draw: random.Random, epochs: int) -> None:
        """Pservers end, and others come in their places, in the middle of epochs: nobody joins there."""
        there = set(range(PSERVERS))
        for epoch in range(epochs):
            for step in sorted(draw.sample(range(2, STEPS - 1), draw.choice((0, 1, 1, 2)))):
                gone = sorted(set(range(PSERVERS)).difference(there))
                if gone and (len(there) == 1 or draw.random() < 0.5):
                    self.moves.append((epoch, step, "comes", draw.choice(gone), min(there)))
                    there.add(self.moves[-1][3])
                elif len(there) > 1:
                    self.moves.append((epoch, step, "ends", draw.choice(sorted(there)), 0))
                    there.remove(self.moves[-1][3])

    def _pause(self, draw: random.Random, rank: int, epoch: int) -> None:
        point = draw.choice(("before a push", "in an update"))
        self.lives[rank][-1].faults.append((epoch * STEPS + draw.randrange(STEPS), point, signal.SIGSTOP))

    def _end(self, draw: random.Random, rank: int, epoch: int, joining: set[int]) -> None:
        life, how = self.lives[rank][-1], signal.SIGKILL
        step = epoch * STEPS + draw.randrange(STEPS - 2 * (epoch == EPOCHS - 1))  # while the others still train
        point: str = draw.choice(POINTS)
        if self.moves:  # the others end when pservers have got all: pservers that may end as well
            point = "before a push"
        hands_over = not self.moves and not self.has_table  # the calls are counted by pservers
        if hands_over and rank in joining and draw.random() < 0.3:
            step, point = draw.randrange(2), "in a hand-over"
        elif hands_over and joining and rank not in joining and draw.random() < 0.4:
            step, point = self._admissions(rank, epoch) + draw.randrange(2), draw.choice(HANDING_OVER)
        elif (kind := draw.random()) < 0.25 and not self.has_table:
            how, life.wakes = signal.SIGSTOP, draw.choice(("before", "after"))
        elif kind < 0.45 or self.has_table:
            how, point = signal.SIGTERM, "before a push"
            # Another step may begin before the handler runs, which takes the batch that is announced, too.
            step = epoch * STEPS + min(draw.randrange(STEPS - 2), STEPS - 4)
        if "TFPS_UPDATE" in self.environment and point not in HANDING_OVER:
            step = max(step, 1)  # in the first step rank 0 writes the values of all
        life.faults.append((step, point, how))

    def _admissions(self, rank: int, epoch: int) -> int:
        """How many calls of Admit, one for each pserver, the process that has this rank has made before this epoch."""
        begun = self.lives[rank][-1].not_before  # it joined at the end of that epoch
        joined = begun + 1 if len(self.lives[rank]) > 1 else 0
        return PSERVERS * sum(joined <= end < epoch - 1 for end in self.due)

    def __str__(self) -> str:
        said = [f"seed {self.seed}: {self.kind} {self.environment}"]
        for rank, lives in enumerate(self.lives):
            said += [f"  rank {rank}, process {number}: {life}" for number, life in enumerate(lives)]
        return "\n".join(
            [
                *said,
                f"  pservers {self.moves}",
                f"  due at the ends of epochs: {self.due}; at the end {self.at_the_end}",
            ]
        )


@dataclass
class Child:
    """A process of a plan."""

    rank: int
    number: int  # of the processes that have had this rank
    life: Life
    process: Process
    pauses: int  # that are to come
    link: Link | None = None  # if it may be cut off
    stopped_s: float | None = None  # since when
    lost: bool = False  # stopped, and the others went on
    code: int | None = None
    output: str = ""

    def look(self, tick_s: float) -> bool:
        """Looks for `tick_s` whether it ends; returns whether it is stopped."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.output, _ = self.process.communicate(tick_s)
            self.code = self.process.returncode
            if self.link is not None:
                self.link.heal(self.process.pid)
            return False
        if self.link is not None:
            return self.link.is_cut(self.process.pid)
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def wake(self) -> None:
        self.stopped_s = None
        if self.link is not None:
            self.link.heal(self.process.pid)
        else:
            self.process.send_signal(signal.SIGCONT)


@dataclass
class Link:
    """That of a worker's host."""

    folder: Path
    switch: str  # its namespace
    rank: int

    def is_cut(self, pid: int) -> bool:
        """Cuts it if the process asks for it: storm.cut."""
        asked, out = (self.folder / f"{what}{pid}" for what in ("cut", "out"))
        if asked.exists():
            plug(self.switch, 1 + self.rank, out=True)
            asked.rename(out)
        return out.exists()

    def heal(self, pid: int) -> None:
        if (out := self.folder / f"out{pid}").exists():
            plug(self.switch, 1 + self.rank, out=False)
            out.unlink()


class Run:
    """The processes of one plan."""

    def __init__(self, plan: Plan, folder: Path, lab: str = "") -> None:
        self.plan, self.folder, self.lab = plan, folder, lab
        self.host = os.environ["NETLAB_ADDRESSES"].split(",")[0] if lab else "127.0.0.1"
        (folder / "kind").write_text(plan.kind)
        self.children: dict[tuple[int, int], Child] = {}
        self._stack = contextlib.ExitStack()
        self._pservers: list[Pserver] = []
        self._mover = futures.ThreadPoolExecutor(1)  # meanwhile stopped workers are woken up
        self._moves: dict[int, futures.Future[None]] = {}  # that have begun
        self._servers: list[subprocess.Popen[str]] = []

    @contextlib.contextmanager
    def pservers(self) -> Iterator[None]:
        """For the block, which no worker survives."""
        with self._stack, self._mover:
            for number in range(PSERVERS):
                self._serve(number)
            try:
                yield
            finally:
                for child in self.children.values():
                    child.process.kill()
                    child.process.communicate()

    def _serve(self, number: int) -> None:
        """Starts a pserver, or another one in the place of one that has ended."""
        again = number < len(self._pservers)
        port = self._pservers[number].address.rpartition(":")[2] if again else 0
        serve = ("-m", "tfps.pserver.cli", f"--host={self.host}", f"--port={port}", f"--workers={WORKERS}", "--quiet")
        process = self._stack.enter_context(jobs.python(*serve, *(["--insecure"] if self.lab else [])))
        assert process.stdout is not None
        address = process.stdout.readline().split()[3]
        if again:
            self._servers[number] = process
        else:
            self._servers.append(process)
            self._pservers.append(self._stack.enter_context(contextlib.closing(Pserver(address, Security()))))

    def _script(self, *arguments: str, rank: int = 0) -> Process:
        more = {
            "TFPS_MIN_WORKERS": "1",
            "TFPS_SLICE_BYTES": "2048",
            "EPOCHS": str(EPOCHS),
            **({"TFPS_SNAPSHOT_FOLDER": str(self.folder / "snapshots")} if self.plan.has_table else {}),
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "elastic"), processes.PYTHONPATH]),
            **self.plan.environment,
        }
        if self.lab:
            more[preloaded.NAMESPACE] = f"{self.lab}-host{1 + rank}"
        addresses = [pserver.address for pserver in self._pservers]
        environment = processes.worker_environment(addresses, rank, WORKERS, **more)
        return processes.start("../chaos/storm.py", str(self.folder), *arguments, environment=environment)

    def _start(self, rank: int, number: int) -> None:
        life = self.plan.lives[rank][number]
        link = Link(self.folder, f"{self.lab}-switch", rank) if self.lab else None
        task = [self.plan.kind, number, life.not_before, life.faults, self.plan.due, bool(self.lab), self.plan.moves]
        stops = sum(how == signal.SIGSTOP for _, _, how in life.faults)
        process = self._script(json.dumps(task), rank=rank)
        self.children[rank, number] = Child(rank, number, life, process, stops - bool(life.wakes), link)

    def __call__(self) -> None:
        """Runs all processes to their ends: each begins when the one before it has ended, or stands still for ever."""
        for rank in range(WORKERS):
            self._start(rank, 0)
        deadline_s = time.monotonic() + RUN_S
        while [child for child in self.children.values() if child.code is None]:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"it has not ended\n{self}")
            for child in list(self.children.values()):
                if child.code is None:
                    self._look(child)
            for index, move in enumerate(self.plan.moves):
                if (self.folder / f"move{index}").exists() and index not in self._moves:
                    moved = self.folder / f"moved{index}"
                    self._moves[index] = self._mover.submit(self._move, *move[2:], moved)

    def _move(self, what: str, number: int, other: int, moved: Path) -> None:
        """Ends a pserver, and starts another one in its place; or lets that take part, as its neighbour is told."""
        if what == "ends":
            self._servers[number].kill()
            self._servers[number].wait()
            moved.touch()
            self._serve(number)
        else:
            offer(self._pservers[other].address, self._pservers[number].address, WORKERS, Security())
            moved.touch()

    def _look(self, child: Child) -> None:
        successor = (child.rank, child.number + 1)
        is_next = False
        if not child.look(0.02):
            child.stopped_s = None
        else:
            child.stopped_s = child.stopped_s or time.monotonic()
            if time.monotonic() - child.stopped_s < PAUSE_S:
                return
            if child.pauses:
                child.pauses -= 1
                child.wake()
                return
            is_next = child.life.wakes == "after"  # it waits until this one is lost
            present = self._present(child.rank)
            # Back before all have lost it, it says that it lost pservers, which snapshots do not outlive just then.
            child.lost = child.lost or not (any if "TFPS_UPDATE" in self.plan.environment else all)(present)
            after = self.children.get(successor)
            has_other = after is not None and (after.code is not None or all(present))
            is_last = child.number + 1 == len(self.plan.lives[child.rank])
            if child.lost and (child.life.wakes == "before" or is_last or has_other):
                child.wake()
        if (
            (child.code is not None or is_next)
            and successor not in self.children
            and successor[1] < len(self.plan.lives[child.rank])
        ):
            self._start(*successor)

    def _present(self, rank: int) -> list[bool]:
        """Whether it takes part, by pserver that the job has now."""
        present: list[bool] = []
        for each in self._pservers:
            with contextlib.suppress(PserverLostError):
                status = each.call("Status", pb.StatusRequest(details=True), 10.0)
                present += [rank in status.present] if status.members else []
        return present

    def check(self) -> dict[str, Json]:
        """All has gone as planned, and nothing of the result shows it; returns what happened."""
        for child in self.children.values():
            assert child.code == child.life.end, f"rank {child.rank}, process {child.number} ended with {child.code}"
            if child.code == 1:
                assert any(each in child.output for each in WITHOUT), f"rank {child.rank}, process {child.number}"
        for move in self._moves.values():
            move.result()
        for number, server in enumerate(self._servers):
            assert server.poll() is None, f"pserver {number} ended with {server.returncode}"
        found = {
            rank: pickle.loads((self.folder / f"rank{rank}-{number}.pickle").read_bytes())
            for (rank, number), child in self.children.items()
            if child.code == 0
        }
        assert sorted(found) == self.plan.at_the_end
        first = next(iter(found.values()))
        for each in found.values():
            assert list(each["ranks"]) == self.plan.at_the_end
            assert [w.tobytes() for w in each["weights"]] == [w.tobytes() for w in first["weights"]]
        process = self._script("plain")
        output, _ = process.communicate(RUN_S)
        assert process.returncode == 0, output
        for mine, its in zip(first["weights"], pickle.loads((self.folder / "plain.pickle").read_bytes()), strict=True):
            np.testing.assert_allclose(mine, its, rtol=0, atol=1e-5)
        found_out: dict[str, Json] = json.loads((self.folder / "summary.json").read_text())
        assert not (self.plan.has_table and found_out["lost"]), found_out["lost"]
        self._check_losses({(step, rank) for step, rank in found_out["lost"]})
        return found_out

    def _check_losses(self, lost: set[tuple[int, int]]) -> None:
        """A death takes rows of the step in flight and of the batch after it, no more; given (step, rank)."""
        deaths = {
            (life.faults[-1][0], rank) for rank, lives in enumerate(self.plan.lives) for life in lives if life.is_ended
        }
        for step, rank in lost:
            after = {(step + 1, rank), (step + 2, rank)}
            assert not after <= lost or after & deaths, sorted(lost)

    def __str__(self) -> str:
        said = [str(self.plan)]
        for child in self.children.values():
            said.append(
                f"--- rank {child.rank}, process {child.number}, ended with {child.code}\n{child.output[-6000:]}"
            )
        return "\n".join(said)


def run(plan: Plan, lab: str = "") -> dict[str, Json]:
    """Runs a plan, on the first host of `lab` if there is one; returns what happened."""
    with tempfile.TemporaryDirectory(prefix="tfps-chaos-") as folder:
        one = Run(plan, Path(folder), lab)
        with one.pservers():
            try:
                one()
                return one.check()
            except Exception as error:
                for child in one.children.values():
                    if child.code is None:
                        child.process.kill()
                        child.output, _ = child.process.communicate()
                raise AssertionError(f"{error}\n{one}") from error


@pytest.mark.parametrize(
    "seed", [int(SEED)] if SEED else [pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2)]
)
def test_a_storm_leaves_what_plain_keras_trains_without_the_lost_rows(seed: int) -> None:
    check_harmful(run(plan := Plan.drawn(seed)), plan)


def check_harmful(happened: dict[str, Json], plan: Plan) -> None:
    """Rows were lost, or a worker that has died in an announcement lost none, or a table lets nobody lose some."""
    assert happened["lost"] or plan.has_table or max(map(len, plan.lives)) > 1, "nobody was lost: the plan is none"


def run_with_cuts(seed: int) -> dict[str, Json]:
    """Runs the plan of a seed in which hosts are cut off."""
    preloaded.ready()
    with Netlab(hosts=1 + WORKERS, rate_mbit=1000) as lab:
        here = lab.hosts[0]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, str(seed), here.namespace.rpartition("-")[0]]
        process = here.popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    happened: dict[str, Json] = json.loads(output)
    return happened


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("seed", [int(SEED)] if SEED else [pytest.param(9, marks=pytest.mark.long)])
def test_so_does_a_storm_that_cuts_off_hosts(seed: int) -> None:
    check_harmful(run_with_cuts(seed), Plan.drawn(seed, cuts=True))


@pytest.mark.long
@pytest.mark.parametrize("when", [0, 1])
def test_who_hands_over_the_training_dies_and_another_one_that_has_it_goes_on(when: int) -> None:
    """The next rank has just come, and has nothing to give."""
    plan = Plan(0, "arrays adam", {}, due={0: [1]}, at_the_end=[1, 2])
    plan.lives[0][0].faults.append((when, "in a hand-over", signal.SIGKILL))
    plan.lives[1][0].faults.append((2, "before a push", signal.SIGKILL))
    plan.lives[1].append(Life())
    run(plan)


@pytest.mark.long
def test_who_was_alone_for_an_epoch_goes_on_with_one_who_joins() -> None:
    plan = Plan(0, "arrays", {}, due={0: [1]}, at_the_end=[0, 1])
    plan.lives[1][0].faults.append((2, "before a push", signal.SIGKILL))
    plan.lives[2][0].faults.append((2, "before a push", signal.SIGKILL))
    plan.lives[1].append(Life())
    run(plan)


@pytest.mark.long
def test_who_joins_comes_after_the_end_of_the_epoch_before_is_known() -> None:
    plan = Plan(0, "dataset late", {}, due={0: [1]})
    plan.lives[1][0].faults.append((2, "before a push", signal.SIGKILL))
    plan.lives[1].append(Life())
    run(plan)


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_storms_for_half_an_hour() -> None:
    end_s, seed = time.monotonic() + MINUTES * 60, int(SEED or time.time())
    while time.monotonic() < end_s:
        run(Plan.drawn(seed))
        if unavailable() is None:
            run_with_cuts(seed)
        seed += 1


if __name__ == "__main__":  # python tests/chaos/test_chaos.py SEED: shows the plan. SEED LAB: runs it on a host of it
    if sys.argv[2:]:
        print(json.dumps(run(Plan.drawn(int(sys.argv[1]), cuts=True), sys.argv[2])))
    else:
        print(Plan.drawn(int(sys.argv[1])))
