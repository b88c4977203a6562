"""Pservers as Ray actors, on the nodes of the workers; and calls of actors: what became of them, in one line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tfps.config import Security
from tfps.errors import ConfigError, WaitTimeoutError
from tfps.launch.job import Job, lasting_secret_file
from tfps.malloc import tune_malloc
from tfps.pserver.server import ParameterServer
from tfps.ray.job import as_options, spread
from tfps.types import Options


def node() -> str:
    """Ray's id of the node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def line(error: RayError) -> str:
    """What Ray says."""
    return " ".join(str(error).split())


def failure(error: RayError) -> str:
    """What became of a call: what its function raised, or that its process ended, or what Ray could not do."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}"
    if isinstance(error, RayActorError):
        return f"its process ended ({line(error)})"
    return f"{type(error).__name__}: {line(error)}"


_ANSWER_S = 10.0  # how long a pserver may take to answer; one that lives needs milliseconds


class Deadline:
    """The end of the user's time for a start of many steps, `timeout_s` from now."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._end_s = timeout_s, time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(self._end_s - time.monotonic(), 0.0)

    def __str__(self) -> str:
        return f"within {self._timeout_s:g} s"


def wait_all(calls: Sequence[ray.ObjectRef], deadline: Deadline) -> list[int]:
    """Waits until all calls have ended, one has raised, or the time is up; the indices of those that have not ended."""
    pending = list(calls)
    while pending:
        ready, _ = ray.wait(pending, timeout=deadline.left_s)
        if not ready:
            break
        for each in ready:
            pending.remove(each)
            ray.get(each)
    return [index for index, each in enumerate(calls) if each in pending]


class TfpsPserver:
    """A pserver in a process of its own, from `start` until the process ends."""

    def __init__(self, index: int) -> None:
        self._index = index
        tune_malloc(one_arena=True)

    def start(self, job: str, workers: int, token: str) -> str:
        """Begins to serve; returns its address, at which Ray's other nodes reach this one.

        It listens at the one address that Ray knows this node by: on loopback if the cluster is this host alone.
        """
        host = ray.util.get_node_ip_address()
        security = Security.from_environment(token_file=lasting_secret_file(token))
        self._server = ParameterServer(host, 0, workers=workers, job=job, security=security)
        return self._server.address

    def lives(self) -> bool:
        return True

    def __repr__(self) -> str:  # what Ray puts before each line that the process prints
        return f"pserver {self._index}"


class Pservers:
    """The pservers of one job: `count` (None: one on each) on the nodes (Ray's ids) of its workers."""

    def __init__(
        self,
        nodes: Sequence[str],
        count: int | None,
        resources: Mapping[str, float],
        runtime_env: Options | None = None,
    ) -> None:
        self._nodes, self._resources = spread(nodes, count), dict(resources)
        options = as_options(resources, runtime_env)
        pserver = ray.remote(TfpsPserver)
        self._actors: list[ray.actor.ActorHandle] = []
        for index, node in enumerate(self._nodes):
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._actors.append(pserver.options(**options, scheduling_strategy=there).remote(index))

    def start(self, job: Job, token: str, deadline: Deadline) -> Job:
        """Starts them; returns the job with their addresses. Ray's errors (`failure` tells them) are raised, too."""
        starting = [actor.start.remote(job.name, job.workers, token) for actor in self._actors]
        try:
            late = wait_all(starting, deadline)
        except ActorUnschedulableError as error:
            raise ConfigError(
                f"resources_per_pserver must be what every node with workers has, got {self._resources}; or such a "
                f"node has just gone ({line(error)})"
            ) from error
        if late:
            raise WaitTimeoutError(
                f"pserver {late[0]} of {len(starting)} was not ready {deadline}: on node {self._nodes[late[0]]} it "
                f"needs {self._resources or 'no resources'} beside the workers, and a process with tfps; ask "
                "for less with resources_per_pserver, or leave room for it on the nodes of the workers"
            )
        return job.at(ray.get(starting))

    def all_live(self) -> bool:
        """Whether each of them answers."""
        try:
            return not wait_all([actor.lives.remote() for actor in self._actors], Deadline(_ANSWER_S))
        except RayError:
            return False

    def any_lives(self) -> bool:
        """Whether one of them answers, or may do so soon."""
        calls = [actor.lives.remote() for actor in self._actors]
        done, late = ray.wait(calls, num_returns=len(calls), timeout=_ANSWER_S)
        return bool(late) or any(map(_is_well, done))

    def end(self) -> None:
        """Ends their processes, at once; may be called again."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


def _is_well(answer: ray.ObjectRef) -> bool:
    try:
        ray.get(answer)
    except RayError:
        return False
    return True
