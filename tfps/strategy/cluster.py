"""The cluster: pserver addresses, this worker's rank and the number of workers, from arguments and environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfps.config import Launch
from tfps.launch.places import Cluster, Tasks, cluster_of, from_tasks, locate, pservers_of

__all__ = ["Cluster", "resolve"]


def resolve(
    pservers: Sequence[str] | tf.distribute.cluster_resolver.ClusterResolver | None,
    environment: Mapping[str, str] | None = None,
) -> Cluster:
    """Returns the cluster that `pservers` and the environment describe.

    Only a resolver's addresses, rank and number of workers count if there is one, but for a rank that it does not know:
    `TFPS_RANK` and `TFPS_WORKERS`, or the order of joining. Without a resolver: see `locate`.

    Raises:
        ConfigError: see `locate`.
    """
    environment = os.environ if environment is None else environment
    if not isinstance(pservers, tf.distribute.cluster_resolver.ClusterResolver):
        return locate(pservers, environment)
    launch = Launch.from_environment(environment)
    tasks = _from_resolver(pservers)
    if tasks.is_evaluator:
        return Cluster(job=launch.job)
    addresses, rank, workers = pservers_of(tasks), tasks.rank, tasks.workers
    if rank is None and launch.rank is not None:
        rank, workers = launch.rank, workers or launch.workers
    return cluster_of(addresses, rank, workers, launch.job)


def _from_resolver(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> Tasks:
    spec = resolver.cluster_spec()  # first: this makes SlurmClusterResolver find its task
    tasks = spec.as_dict() if spec else {}
    return from_tasks(tasks, resolver.task_type, resolver.task_id, type(resolver).__name__, may_not_know=True)
