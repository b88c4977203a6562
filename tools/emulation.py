#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Training that sleeps instead of computing: real workers and pservers of tfps, without TensorFlow.

`Emulation` starts the processes on the hosts of a netlab (or on this machine) and gives them one task after the other.
Run as a program this file is one of those processes: a worker that reads tasks from stdin, or a pserver that holds
replies back (see `Holding`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from tfps.compression import LEAST_BYTES, NONE
from tfps.config import MAX_SLICE_BYTES, Auto, Config
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketSpec, Reply
from tfps.pserver import job
from tfps.pserver.slices import Answer
from tfps.pserver.state import JobState
from tfps.types import Argument, Array, Json, Options
from tfps.wire import connection
from tfps.worker.worker import Worker
from tools import children
from tools.model_profiles import Layer, Profile
from tools.netlab import Host
from tools.simulation.plan import Plan, make_plan
from tools.simulation.settings import Cluster, Policy, Settings

UNLIMITED = 2**40
GOODPUT = 0.955  # of a rate of netlab, which counts headers, what payload gets
_START_S = 60.0


@dataclass(frozen=True)
class Task:
    """What workers emulate. `steps` are counted, after `warmup_steps`.

    Layers are fused into buckets of `fuse_bytes`, as the strategy fuses variables; slices and windows may be "auto".
    Policies with barriers split variables from `split_parameters` on, as Settings says.
    """

    profile: Profile
    policy: Policy
    workers: int
    pservers: int
    slice_bytes: int | Auto
    window_bytes: int | Auto
    fuse_bytes: int = 64 * 1024
    split_parameters: int = 1_000_000
    warmup_steps: int = 2
    steps: int = 6
    shared_memory: bool = True
    compression: str = "none"

    @property
    def settings(self) -> Settings:
        """For the plan, which simulation and emulation share."""
        return Settings(
            policy=self.policy,
            slice_bytes=self.fuse_bytes,
            first_bytes=self.fuse_bytes // 16,
            split_parameters=self.split_parameters,
        )

    @property
    def cluster(self) -> Cluster:
        """For the plan: rates play no part in it."""
        return Cluster(self.workers, self.pservers, rate_gbit=1.0)

    @property
    def plan(self) -> Plan:
        """Buckets and pieces."""
        return make_plan(self.profile, self.cluster, self.settings)

    @property
    def config(self) -> Config:
        """Policies with barriers know neither slices nor windows nor priorities."""
        common: Options = {"step_timeout_s": 120, "shared_memory": self.shared_memory}
        common["compression"] = self.compression
        if self.settings.barriers:
            return Config(MAX_SLICE_BYTES, UNLIMITED, "fifo", "round_robin", **common)
        policy: Literal["priority", "fifo"] = "priority" if self.policy == "priority" else "fifo"
        return Config(self.slice_bytes, self.window_bytes, policy, **common)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        content = json.loads(text)
        profile = content.pop("profile")
        layers = tuple(Layer(**layer) for layer in profile.pop("layers"))
        return cls(profile=Profile(layers=layers, **profile), **content)


class Emulation:
    """Workers and pservers, one of each per host, as in the P3 paper; a context manager.

    Args:
        hosts: of a netlab; worker i and pserver i share host i.
        workers, pservers: at most as many as hosts.
        part_bytes: the least that is handed to the kernel at a time, in place of tfps' own (`RateEstimator`). Where
            bytes and bandwidth are divided by much, its 64 KiB would stand for megabytes in front of what is urgent.
        apart: pservers have hosts of their own, behind the workers'.
    """

    def __init__(
        self, hosts: Sequence[Host], workers: int, pservers: int, part_bytes: int = 0, *, apart: bool = False
    ) -> None:
        self._hosts, self._workers, self._pservers, self._part_bytes = hosts, workers, pservers, part_bytes
        self._first = workers if apart else 0  # host of the first pserver
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Emulation:  # noqa: PYI034 (typing.Self is not in Python 3.10)
        with contextlib.ExitStack() as stack:
            me = [sys.executable, "-u", __file__, str(self._part_bytes)]
            cli = [
                sys.executable,
                "-u",
                "-m",
                "tfps.pserver.cli",
            ]  # without what else is imported here: its memory is measured
            self._addresses, self._processes = {}, {}
            for hold, command in ((False, [*me, "pserver"] if self._part_bytes else cli), (True, [*me, "holding"])):
                started = []
                for host in self._hosts[self._first : self._first + self._pservers]:
                    options = [f"--host={host.address}", "--port=0", f"--workers={self._workers}", "--insecure"]
                    started.append(stack.enter_context(_start(host, [*command, *options])))
                self._addresses[hold] = [children.answer(process, _START_S).split()[3] for process in started]
                self._processes[hold] = started
            self._members = [
                stack.enter_context(_start(host, [*me, "worker"])) for host in self._hosts[: self._workers]
            ]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, task: Task) -> dict[str, Json]:
        """Emulates `task`; seconds per step, of each step the mean over the workers, and CPU seconds per step.

        Raises:
            RuntimeError: a process has ended or did not answer.
        """
        hold = task.policy == "overlap_send_barrier"
        cpu_s = sum(children.cpu_s(process.pid) for process in self._processes[hold])
        for rank, process in enumerate(self._members):
            order = {"rank": rank, "pservers": self._addresses[hold], "task": task.to_json()}
            children.tell(process, json.dumps(order))
        expected_s = _START_S + 20 * task.profile.compute_s * (task.warmup_steps + task.steps)
        answers = [json.loads(children.answer(process, expected_s)) for process in self._members]
        cpu_s = sum(children.cpu_s(process.pid) for process in self._processes[hold]) - cpu_s
        steps = np.array([answer["step_s"] for answer in answers]).mean(axis=0)
        total = task.steps + task.warmup_steps
        return {
            "step_s": float(np.median(steps)),
            "steps_s": steps.tolist(),
            "wait_s": float(np.mean([answer["wait_s"] for answer in answers])),
            "slice_bytes": answers[0]["slice_bytes"],
            "window_bytes": answers[0]["window_bytes"],
            "worker_cpu_s": sum(answer["cpu_s"] for answer in answers) / total / task.workers,
            "pserver_cpu_s": cpu_s / total / task.pservers,
            "shared_bytes": sum(answer["shared_bytes"] for answer in answers),
            "worker_peak_bytes": max(answer["peak_bytes"] for answer in answers),
            "pserver_peak_bytes": max(_peak_bytes(process.pid) for process in self._processes[hold]),
        }


def _start(host: Host, command: list[str]) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).resolve().parent.parent)}
    return children.ended(
        host.popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )


def _peak_bytes(pid: int | str = "self") -> int:
    """The most memory that the process has had resident, what others share with it included."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no VmHWM of process {pid}")


# The worker


class Trainer:
    """One emulated worker and its job."""

    def __init__(self, worker: Worker, task: Task) -> None:
        self._worker, self._task = worker, task
        plan = task.plan
        self._buckets: list[list[int]] = []  # per plan bucket, ids of the exchange: one, or one per piece
        self._payloads: dict[int, Array] = {}
        specs: list[BucketSpec] = []
        for number, pieces in enumerate(plan.pieces):
            sizes = [p.nbytes for p in pieces] if task.settings.barriers else [sum(p.nbytes for p in pieces)]
            self._buckets.append(list(range(len(specs), len(specs) + len(sizes))))
            for nbytes in sizes:
                codec = task.compression if nbytes >= LEAST_BYTES else NONE
                self._payloads[len(specs)] = _payload(nbytes // 4, codec)
                specs.append(
                    BucketSpec((f"b{number}.{len(specs)}",), "sum", nbytes, "float32", number, codec=codec_of(codec))
                )
        worker.declare(specs)
        self._ready_after = {min(members): bucket for bucket, members in enumerate(plan.layers)}  # in backward
        self._needed_by = {layer: bucket for bucket, members in enumerate(plan.layers) for layer in members}
        self._changed = threading.Condition()  # guards the next two
        self._outstanding = [0] * len(self._buckets)
        self._error: Exception | None = None
        self._clock_s = 0.0  # when the emulated computation is where it is
        self.wait_s = 0.0

    def _push(self, bucket: int) -> None:
        with self._changed:
            self._outstanding[bucket] = len(self._buckets[bucket])

        def on_reply(reply: Reply) -> None:
            with self._changed:
                self._error = self._error or reply.error
                self._outstanding[bucket] -= 1
                self._changed.notify_all()

        for identity in self._buckets[bucket]:
            self._worker.push(identity, self._payloads[identity], on_reply)

    def _wait_for(self, buckets: Sequence[int]) -> None:
        with self._changed:
            if not any(self._outstanding[bucket] for bucket in buckets) and self._error is None:
                return
            self._changed.wait_for(lambda: self._error or not any(self._outstanding[b] for b in buckets))
        if self._error is not None:
            raise self._error
        now_s = time.perf_counter()
        # Replies that came while a sleep was overslept have not delayed anything.
        self.wait_s += max(now_s - self._clock_s, 0.0)
        self._clock_s = max(now_s, self._clock_s)

    def _compute(self, seconds: float) -> None:
        """Sleeps to where the computation would be; what one sleep takes too long the next ones make up for."""
        self._clock_s += seconds
        if (left_s := self._clock_s - time.perf_counter()) > 0:
            time.sleep(left_s)

    def step(self) -> None:
        """Forward, with its waits, and backward, with its pushes."""
        layers, barriers = self._task.profile.layers, self._task.settings.barriers
        if barriers:
            self._wait_for(range(len(self._buckets)))
        for number, layer in enumerate(layers):
            if not barriers and number in self._needed_by:
                self._wait_for([self._needed_by[number]])
            self._compute(layer.forward_s)
        late = []
        for number in reversed(range(len(layers))):
            self._compute(layers[number].backward_s)
            if number in self._ready_after:
                late.append(self._ready_after[number])
                if self._task.policy != "barrier":
                    self._push(late.pop())
        for bucket in late:
            self._push(bucket)

    def train(self) -> dict[str, Json]:
        """All steps of the task; seconds from turn to turn (end of forward to end of forward would be the same)."""
        starts = []
        waits = []
        self._clock_s = time.perf_counter()
        for _ in range(self._task.warmup_steps + self._task.steps):
            self.step()
            starts.append(self._clock_s)
            waits.append(self.wait_s)
        self._wait_for(range(len(self._buckets)))
        first = self._task.warmup_steps - 1
        return {
            "step_s": np.diff(starts[first:]).tolist(),
            "wait_s": (waits[-1] - waits[first]) / self._task.steps,
        }


def _payload(items: int, codec: str) -> Array:
    """A gradient; noise where it matters what is in it."""
    if codec == NONE:
        return np.ones(items, np.float32)
    return np.random.default_rng().standard_normal(items, np.float32)


def _work(order: dict[str, Json]) -> dict[str, Json]:
    task = Task.from_json(order["task"])
    cpu_s = time.process_time()
    worker = Worker(order["pservers"], rank=order["rank"], workers=task.workers, config=task.config)
    try:
        found = Trainer(worker, task).train()
        sizes = {name: getattr(worker.info, name) for name in ("slice_bytes", "window_bytes")}
        sizes["shared_bytes"] = worker._memory.arena.nbytes if worker._memory.arena else 0
    finally:
        worker.close()
    return {**found, **sizes, "cpu_s": time.process_time() - cpu_s, "peak_bytes": _peak_bytes()}


class Holding(JobState):
    """Of a job that replies only when all buckets of a step are summed: the send barrier of PaddlePaddle #10550.

    There the trainers fetch nothing before all of them have sent everything.
    """

    def __init__(self, *arguments: Argument) -> None:
        super().__init__(*arguments)
        self._holding = threading.Lock()  # guards _held
        self._held: list[Collection[Answer]] = []  # each of one slice

    def send(self, answers: Collection[Answer]) -> None:
        if not answers:
            return
        with self._holding:
            self._held.append(answers)
            if len(self._held) < sum(len(bucket.slices) for bucket in self.shard.buckets):
                return
            held, self._held = self._held, []
        for each in held:
            super().send(each)


def main() -> None:
    """A process of an emulation."""
    if part_bytes := int(sys.argv[1]):
        connection.MIN_PART_BYTES = connection.CHEAP_PART_BYTES = part_bytes
    if sys.argv[2] != "worker":
        from tfps.pserver import cli

        if sys.argv[2] == "holding":
            setattr(job, "JobState", Holding)  # noqa: B010  # jobs make theirs themselves
        sys.exit(cli.main(sys.argv[3:]))
    for line in sys.stdin:
        print(json.dumps(_work(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
