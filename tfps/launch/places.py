"""Where the processes of a job are: pservers, this worker's rank, number of workers, from arguments and environment.

Without TensorFlow, whose cluster resolvers `tfps/strategy/cluster.py` knows.

Tested in tests/launch/test_places.py, tests/strategy/test_cluster.py and tests/doctor/test_run.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tfps.config import Launch, check_address
from tfps.errors import ConfigError
from tfps.launch.ranks import Ranks, ranks_of
from tfps.types import Json

_WORKER_TASKS = ("chief", "master", "worker")  # in rank order


@dataclass(frozen=True)
class Cluster:
    """Pserver addresses (empty: embedded), rank and number of workers (None: the pservers decide).

    Args:
        others: without addresses: the processes that one command has started with this one, which have to meet.
    """

    pservers: tuple[str, ...] = ()
    rank: int | None = None
    workers: int | None = None
    job: str = ""
    others: Ranks | None = None


@dataclass(frozen=True)
class Tasks:
    """The tasks in `source` (TF_CONFIG or a resolver). `rank` is None if it does not know this process's task."""

    source: str
    pservers: tuple[str, ...] = ()
    rank: int | None = None
    workers: int | None = None
    is_evaluator: bool = False


def locate(pservers: Sequence[str] | None, environment: Mapping[str, str] | None = None) -> Cluster:
    """Returns the cluster that `pservers` and the environment describe.

    Explicit addresses win over `TFPS_PSERVERS` (set by launchers), and that over `TF_CONFIG`. Rank and number of
    workers come from `TFPS_RANK` and `TFPS_WORKERS`, else from `TF_CONFIG`, else from the variables of mpirun or of a
    step of srun with several tasks (`ranks_of`), else from the order of joining. If `TFPS_WORKERS` is not their number
    of processes, their ranks do not count.

    Without any addresses one worker has an embedded pserver, and so has an evaluator. Several that one mpirun or srun
    has started have to meet (`Cluster.others`).

    Raises:
        ConfigError: an address or `TF_CONFIG` is malformed, they contradict each other, workers have no pserver, or
            this process is a `ps` task.
    """
    environment = os.environ if environment is None else environment
    launch = Launch.from_environment(environment)
    others = started_with(launch, environment)
    text = environment.get("TF_CONFIG", "")
    tasks = _from_tf_config(text) if text.strip() else Tasks("TF_CONFIG")
    if tasks.is_evaluator and launch.rank is None:
        return Cluster(job=launch.job)
    addresses = _explicit(pservers) or launch.pservers or pservers_of(tasks)
    rank, workers = launch.rank, launch.workers
    if rank is None and workers is None:
        rank, workers = tasks.rank, tasks.workers
    if rank is None and others is not None:
        rank, workers = others.rank, others.workers
    return cluster_of(addresses, rank, workers, launch.job, others)


def cluster_of(
    addresses: tuple[str, ...], rank: int | None, workers: int | None, job: str, others: Ranks | None
) -> Cluster:
    """A cluster; without addresses one whose pserver is embedded, or whose processes have to meet.

    Args:
        others: see `started_with`.

    Raises:
        ConfigError: an address is malformed, or is there twice; or a worker of several has no pserver.
    """
    for address in addresses:
        check_address(address)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"pservers must be different addresses, got {', '.join(addresses)}")
    if addresses:
        return Cluster(addresses, rank, workers, job)
    return Cluster(job=job, others=_who_have_to_meet(rank, workers, others))


def started_with(launch: Launch, environment: Mapping[str, str]) -> Ranks | None:
    """The processes of mpirun or srun, if TFPS_WORKERS does not say that the job consists of others.

    Raises:
        ConfigError: TFPS_WORKERS has to say how many they are, and is not above the rank of this one.
    """
    others = ranks_of(environment)
    if launch.workers == 1:  # each trains alone
        return None
    if others is not None and others.workers is None and launch.workers is not None:
        if others.rank >= launch.workers and launch.rank is None:
            raise ConfigError(
                f"TFPS_WORKERS must be the number of processes that {others.source} has started, above "
                f"{others.variable}={others.rank}, got {launch.workers}; set it to that number, or to 1 if each "
                "process is to train alone"
            )
        others = replace(others, workers=launch.workers)
    return others if others is None or launch.workers in (None, others.workers) else None


def _who_have_to_meet(rank: int | None, workers: int | None, others: Ranks | None) -> Ranks | None:
    """Returns the processes that one command has started, for a worker without pservers; None: it is alone.

    Raises:
        ConfigError: it is not alone, or cannot know, and these are not the others: each process would train alone.
    """
    if others is not None and (rank, workers) == (others.rank, others.workers):
        return others
    if others is not None:
        raise ConfigError(
            f"{others.source} has started {others.workers} processes, but TFPS_RANK, TF_CONFIG or the cluster resolver "
            f"says that this one is rank {rank} of {workers or 'an unknown number of'} workers, and names no pservers; "
            "unset it, or set TFPS_PSERVERS, or set TFPS_WORKERS=1 if each process is to train alone"
        )
    if (workers or 1) > 1 or (rank or 0) > 0:
        raise ConfigError(
            f"this process is rank {'?' if rank is None else rank} of {workers or 'several'} workers (TFPS_RANK, "
            "TFPS_WORKERS), but no pservers are named; start tfps_pserver and set TFPS_PSERVERS=HOST:PORT,..."
        )
    return None


def _explicit(pservers: Sequence[str] | None) -> tuple[str, ...]:
    if pservers is None:
        return ()
    if isinstance(pservers, str):
        raise ConfigError(f"pservers must be a list of 'host:port', got the string {pservers!r}; write [{pservers!r}]")
    if not pservers:
        raise ConfigError(
            "pservers must name at least one 'host:port', got an empty list; leave it out for an embedded pserver"
        )
    return tuple(pservers)


def pservers_of(tasks: Tasks) -> tuple[str, ...]:
    """Their pservers.

    Raises:
        ConfigError: there are several workers and no pserver.
    """
    if not tasks.pservers and (tasks.workers or 1) > 1:
        raise ConfigError(
            f"{tasks.source} has {tasks.workers} workers but no 'ps' task; start one with tfps_pserver and add "
            '"ps": ["host:port"] to its cluster, or pass pservers=[...]'
        )
    return tasks.pservers


def _from_tf_config(text: str) -> Tasks:
    example = (
        '{"cluster": {"worker": ["host:port", ...], "ps": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
    )
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"TF_CONFIG must be JSON like {example}, got {text!r} ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("cluster", {}), dict):
        raise ConfigError(f"TF_CONFIG must be an object like {example}, got {text!r}")
    task = content.get("task", {})
    if not isinstance(task, dict):
        raise ConfigError(f"TF_CONFIG: task must be an object like {example}, got {task!r}")
    return from_tasks(content.get("cluster", {}), task.get("type"), task.get("index"), "TF_CONFIG")


def from_tasks(
    tasks: Mapping[str, Sequence[str]],
    task_type: str | None,
    task_index: Json,
    source: str,
    may_not_know: bool = False,
) -> Tasks:
    """Interprets `tasks` (addresses by task type) and this process's task, both from `source`.

    Args:
        may_not_know: whether the task may be missing; ranks then come from elsewhere.
    """
    for name, addresses in tasks.items():
        if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
            raise ConfigError(f"{source}: cluster[{name!r}] must be a list of 'host:port', got {addresses!r}")
    ranked = [(name, index) for name in _WORKER_TASKS for index in range(len(tasks.get(name, ())))]
    pservers = tuple(check_address(address) for address in tasks.get("ps", ()))
    if isinstance(task_index, str) and task_index.isdigit():
        task_index = int(task_index)
    if task_type == "ps":
        known = isinstance(task_index, int) and 0 <= task_index < len(pservers)
        port = pservers[task_index].rpartition(":")[2] if known else "PORT"
        raise ConfigError(
            f"{source} says that this process is a ps task: run `tfps_pserver --port {port} --workers "
            f"{len(ranked) or 'N'}` there instead of a training script, with --token-file FILE if workers are on other "
            "hosts (docs/security.md)"
        )
    if task_type == "evaluator":
        return Tasks(source, pservers, is_evaluator=True)
    if not ranked or (may_not_know and task_type is None):
        return Tasks(source, pservers, workers=len(ranked) or None)
    task: tuple[object, object] = (task_type, task_index)
    if task not in ranked:
        listed = ", ".join(f"{name} {index}" for name, index in ranked)
        raise ConfigError(
            f"{source}: task must be one of the cluster's workers ({listed}), "
            f"got type {task_type!r} index {task_index!r}"
        )
    return Tasks(source, pservers, ranked.index(task), len(ranked))
