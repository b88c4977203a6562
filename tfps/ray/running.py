"""`tfps.ray.run`: a function as the training program of several workers on a Ray cluster."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RaySystemError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tfps.errors import ConfigError, PserverLostError, TfpsError, WaitTimeoutError, WorkerLostError
from tfps.launch.job import Job
from tfps.ray.job import as_options, check_count, check_placement, check_pservers, program, take_place
from tfps.ray.pservers import Deadline, Pservers, failure, line, node
from tfps.types import Function, Options

_T = TypeVar("_T")
_GRACE_S = 5.0  # how long other workers may go on after one has failed: to say what they saw
_WORKER = {"CPU": 1.0}  # as in Ray's ScalingConfig


class TfpsWorker:
    """A worker in a process of its own. Runs on the node that its bundle is on."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def node(self) -> str:
        return node()

    def train(self, job: Job, token: str, train_fn: Function) -> object:
        """Returns or raises what `train_fn` does."""
        take_place(job, self._rank, token)
        with program():
            return train_fn()

    def __repr__(self) -> str:  # what Ray puts before each line that the process prints
        return f"worker {self._rank}"


def run(
    train_fn: Callable[[], _T],
    *,
    workers: int = 1,
    pservers: int | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    resources_per_pserver: Mapping[str, float] | None = None,
    placement_strategy: str = "PACK",
    runtime_env: Options | None = None,
    start_timeout_s: float = 600.0,
) -> list[_T]:
    """Runs `train_fn` on several workers of a Ray cluster; returns what it returns, in rank order.

    `tfps.Strategy()` in `train_fn` joins the job. If one worker fails, all are ended; nothing is started again.

    Args:
        train_fn: called without arguments, once in each worker, on the main thread of a process of its own.
        workers: how many.
        pservers: how many; None: one on each node that has workers. They are on nodes of workers.
        resources_per_worker: what Ray reserves for each, such as `{"CPU": 4, "GPU": 1}`; None: a CPU.
        resources_per_pserver: the same for each pserver, beside the workers of its node; None: nothing.
        placement_strategy: how Ray spreads workers over nodes: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        runtime_env: Ray's runtime environment for workers and pservers.
        start_timeout_s: seconds until all must have a place and be ready.

    Raises:
        ConfigError: an argument is out of range.
        WaitTimeoutError: the cluster has no room, or a process was not ready in time.
        WorkerLostError: a worker failed. The message names its rank; `__cause__` is Ray's error.
        PserverLostError: a pserver was lost; likewise.
    """
    if not callable(train_fn):
        raise ConfigError(f"train_fn must be a function without arguments, got {train_fn!r}")
    check_count("workers", workers)
    check_pservers(pservers, resources_per_pserver, start_timeout_s)
    check_placement(resources_per_worker, placement_strategy)
    function = ray.put(train_fn)
    name = str(getattr(train_fn, "__name__", "train"))
    token, job = secrets.token_urlsafe(32), Job.named(name, workers)
    resources = dict(_WORKER if resources_per_worker is None else resources_per_worker)
    deadline = Deadline(start_timeout_s)

    with contextlib.ExitStack() as stack:
        group = placement_group([resources] * workers, strategy=placement_strategy)
        stack.callback(remove_placement_group, group)
        if not group.wait(deadline.left_s):
            known = ray.cluster_resources()
            amounts = {name: known.get(name, 0.0) for name in resources}
            raise WaitTimeoutError(
                f"there was no room for {workers} workers {deadline}: each needs {resources} "
                f"({placement_strategy}), of which the cluster has {amounts} in all, used or not; ask for "
                "less, wait for what uses it, or add nodes"
            )
        worker, options = ray.remote(TfpsWorker), as_options(resources, runtime_env)
        actors = [
            worker.options(**options, scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank)).remote(rank)
            for rank in range(workers)
        ]
        stack.callback(_kill, actors)
        servers = Pservers(_nodes(actors, deadline), pservers, resources_per_pserver or {}, runtime_env)
        stack.callback(servers.end)
        stack.callback(_kill, actors)  # before the pservers, so that none reports the loss of one
        try:
            job = servers.start(job, token, deadline)
        except RayActorError as error:
            raise PserverLostError(f"a pserver ended while it started: {line(error)}; no worker has begun") from error
        return _results(actors, [actor.train.remote(job, token, function) for actor in actors])


def _nodes(actors: Sequence[ray.actor.ActorHandle], deadline: Deadline) -> list[str]:
    """The node of each worker, which is ready then."""
    nodes = []
    for rank, actor in enumerate(actors):
        try:
            nodes.append(ray.get(actor.node.remote(), timeout=deadline.left_s))
        except GetTimeoutError:
            raise WaitTimeoutError(
                f"worker {rank} of {len(actors)} has a place on the cluster, but was not ready {deadline}; "
                "Ray's logs of its node say what its process does"
            ) from None
        except RayError as error:
            raise _failed(rank, error, len(actors)) from error
    return nodes


def _results(actors: Sequence[ray.actor.ActorHandle], running: Sequence[ray.ObjectRef]) -> list[_T]:
    """What the workers return. After a failure the others are given time to say what they saw."""
    pending = {reference: rank for rank, reference in enumerate(running)}
    results: dict[int, _T] = {}
    failures: dict[int, RayError] = {}
    end_s: float | None = None  # nobody knows how long training takes; steps have deadlines of their own
    while pending:
        left_s = None if end_s is None else end_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            break
        done, _ = ray.wait(list(pending), timeout=left_s)
        for reference in done:
            rank = pending.pop(reference)
            try:
                results[rank] = ray.get(reference)
            except RayError as error:
                failures[rank] = error
                ray.kill(actors[rank])  # the others learn that it is gone
                end_s = end_s or time.monotonic() + _GRACE_S
    if failures:
        # Of several, a process that has died is the likelier cause, and what tfps reports of others the unlikeliest.
        rank = min(failures, key=lambda each: (_order(failures[each]), each))
        raise _failed(rank, failures[rank], len(running)) from failures[rank]
    return [results[rank] for rank in range(len(running))]


def _order(error: RayError) -> int:
    cause = getattr(error, "cause", None)  # what the function raised
    if cause is None:
        return 0 if isinstance(error, RayActorError) else 1
    return 3 if isinstance(cause, WorkerLostError) else 2 if isinstance(cause, PserverLostError) else 1


def _failed(rank: int, error: RayError, workers: int) -> TfpsError:
    """What to tell the user; Ray's own error, with the stack of the worker, is to be its cause."""
    said = failure(error)
    if isinstance(error, RaySystemError):
        said += ": what train_fn returns must load where run was called"
    text = f"rank {rank} of {workers} failed: {said}; all others were ended"
    lost = isinstance(getattr(error, "cause", None), PserverLostError)
    return PserverLostError(text) if lost else WorkerLostError(text)


def _kill(actors: Sequence[ray.actor.ActorHandle]) -> None:
    for actor in actors:
        ray.kill(actor)
