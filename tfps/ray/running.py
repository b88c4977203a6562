"""`tfps.ray.run`: a function as the training program of several workers on a Ray cluster."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from typing import TypeVar

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group

from tfps.errors import ConfigError, PserverLostError, WaitTimeoutError
from tfps.launch.job import Job
from tfps.ray.job import Recovery, as_options, check_count, check_placement, check_pservers, hashes_alike
from tfps.ray.pservers import Deadline, Pservers, line
from tfps.ray.workers import Workers
from tfps.types import Options

_T = TypeVar("_T")
_WORKER = {"CPU": 1.0}  # as in Ray's ScalingConfig


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
    min_workers: int | None = None,
    max_failures: int = 0,
) -> list[_T]:
    """Runs `train_fn` on several workers of a Ray cluster; returns what it returns, in rank order.

    `tfps.Strategy()` in `train_fn` joins the job. If one worker fails, all are ended; but with `min_workers` the others
    go on (docs/faults.md), and with `max_failures` it is started again and joins them.

    Args:
        train_fn: called without arguments, once in each worker, on the main thread of a process of its own.
        workers: how many.
        pservers: how many; None: one on each node that has workers. They are on nodes of workers.
        resources_per_worker: what Ray reserves for each, such as `{"CPU": 4, "GPU": 1}`; None: a CPU.
        resources_per_pserver: the same for each pserver, beside the workers of its node; None: nothing.
        placement_strategy: how Ray spreads workers over nodes: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        runtime_env: Ray's runtime environment for workers and pservers.
        start_timeout_s: seconds until all must have a place and be ready.
        min_workers: with how many workers the job goes on when others are lost (`Config.min_workers`); None: with all.
            If some are lost for good, the result has an entry for each of the others.
        max_failures: how often a worker that has failed is started again, all workers together. Needs `min_workers`.

    Raises:
        ConfigError: an argument is out of range.
        WaitTimeoutError: the cluster has no room, or a process was not ready in time.
        WorkerLostError: a worker failed, and too few are left. The message names its rank; `__cause__` is Ray's error.
        PserverLostError: a pserver was lost; likewise.
    """
    if not callable(train_fn):
        raise ConfigError(f"train_fn must be a function without arguments, got {train_fn!r}")
    check_count("workers", workers)
    recovery = Recovery(workers, min_workers, max_failures)
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
        crew = Workers(group, as_options(resources, hashes_alike(runtime_env)), recovery)
        stack.callback(crew.end)
        servers = Pservers(crew.nodes(deadline), pservers, resources_per_pserver or {}, runtime_env)
        stack.callback(servers.end)
        stack.callback(crew.end)  # before the pservers, so that none reports the loss of one
        try:
            job = servers.start(job, token, deadline)
        except RayActorError as error:
            raise PserverLostError(f"a pserver ended while it started: {line(error)}; no worker has begun") from error
        results: dict[int, _T] = crew.train(job, token, function, servers)
        return [results[rank] for rank in sorted(results)]
