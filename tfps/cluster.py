"""Who takes part: addresses of the pservers, this worker's rank, number of workers; from arguments and environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfps.config import Launch, check_address
from tfps.errors import ConfigError

_WORKER_TASKS = ("chief", "master", "worker")  # in the order of ranks


@dataclass(frozen=True)
class Cluster:
    """Addresses of the pservers (none: embedded), rank and number of workers (None: as the pservers say)."""

    pservers: tuple[str, ...] = ()
    rank: int | None = None
    workers: int | None = None
    job: str = ""


def resolve(
    pservers: Sequence[str] | tf.distribute.cluster_resolver.ClusterResolver | None,
    environment: Mapping[str, str] | None = None,
) -> Cluster:
    """The cluster that `pservers` and the environment describe.

    Explicit addresses win over `TFPS_PSERVERS` (set by `tfps_launch`), that over `TF_CONFIG`; with none of them the
    pserver is embedded. Rank and number of workers come from `TFPS_RANK` and `TFPS_WORKERS`, else from `TF_CONFIG`,
    else from the order of joining.

    Raises:
        ConfigError: an address or `TF_CONFIG` is malformed, or they contradict each other.
    """
    environment = os.environ if environment is None else environment
    launch = Launch.from_environment(environment)
    if isinstance(pservers, tf.distribute.cluster_resolver.ClusterResolver):
        spec = pservers.cluster_spec()
        return _from_tasks(
            spec.as_dict() if spec else {}, pservers.task_type, pservers.task_id, type(pservers).__name__, launch.job
        )
    if isinstance(pservers, str):
        raise ConfigError(f"pservers must be a list of 'host:port', got the string {pservers!r}; write [{pservers!r}]")
    text = environment.get("TF_CONFIG", "")
    described = _from_tf_config(text, launch.job) if text.strip() else None
    if pservers is not None:
        addresses = tuple(pservers)
        if not addresses:
            raise ConfigError(
                "pservers must name at least one 'host:port', got an empty list; leave it out for an embedded pserver"
            )
    elif launch.pservers:
        addresses = launch.pservers
    elif described is not None:
        if not described.pservers and (described.workers or 1) > 1:
            raise ConfigError(
                f"TF_CONFIG has {described.workers} workers but no 'ps' task; start one with tfps_pserver and add "
                '"ps": ["host:port"] to its cluster, or pass pservers=[...]'
            )
        addresses = described.pservers
    else:
        addresses = ()
    for address in addresses:
        check_address(address)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"pservers must be different addresses, got {', '.join(addresses)}")
    if not addresses:
        return Cluster(job=launch.job)
    rank, workers = launch.rank, launch.workers
    if rank is None and workers is None and described is not None:
        rank, workers = described.rank, described.workers
    return Cluster(addresses, rank, workers, launch.job)


def _from_tf_config(text: str, job: str) -> Cluster:
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
    return _from_tasks(content.get("cluster", {}), task.get("type"), task.get("index"), "TF_CONFIG", job)


def _from_tasks(tasks: Mapping[str, Any], task_type: str | None, task_index: Any, source: str, job: str) -> Cluster:
    """Cluster from the addresses of each task type, which `source` gave."""
    for name, addresses in tasks.items():
        if isinstance(addresses, str) or not all(isinstance(address, str) for address in addresses):
            raise ConfigError(f"{source}: cluster[{name!r}] must be a list of 'host:port', got {addresses!r}")
    ranked = [(name, index) for name in _WORKER_TASKS for index in range(len(tasks.get(name, ())))]
    pservers = tuple(check_address(address) for address in tasks.get("ps", ()))
    if not ranked:
        return Cluster(pservers, job=job)
    if task_type == "ps":
        raise ConfigError(
            f"{source} says that this process is a ps task: run tfps_pserver there instead of a training script"
        )
    if task_type == "evaluator":
        return Cluster(job=job)  # evaluates checkpoints on its own
    if isinstance(task_index, str) and task_index.isdigit():
        task_index = int(task_index)
    task: Any = (task_type, task_index)
    if task not in ranked:
        known = ", ".join(f"{name} {index}" for name, index in ranked)
        raise ConfigError(
            f"{source}: task must be one of the cluster's workers ({known}), "
            f"got type {task_type!r} index {task_index!r}"
        )
    return Cluster(pservers, ranked.index(task), len(ranked), job)
