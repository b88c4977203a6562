"""The cluster: pserver addresses, this worker's rank and the number of workers, from arguments and environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfps.config import Config, Launch, Security
from tfps.errors import ConfigError
from tfps.launch.cluster_spec import Cluster, Tasks, cluster_of, from_tasks, locate, pservers_of, started_with
from tfps.launch.rendezvous import rendezvous

__all__ = ["Cluster", "find", "resolve"]


def find(pservers: Sequence[str] | tf.distribute.cluster_resolver.ClusterResolver | None, config: Config) -> Cluster:
    """Returns the cluster. Processes of mpirun or srun to which nobody has named pservers start their own.

    From then on this process's environment says where they are, as if `tfps_launch` had started it: later strategies
    use the same, and so do processes that the program starts.

    Raises:
        ConfigError: see `resolve`; or there is no way to find the other processes, or none has started a pserver.
        ConnectError: a pserver did not start.
        WaitTimeoutError: not all processes came within `config.connect_timeout_s`.
    """
    cluster = resolve(pservers)
    if cluster.others is None:
        return cluster
    security = Security.of_worker(config)
    if security.tls_ca:
        raise ConfigError(
            f"the pservers that processes of {cluster.others.source} start for themselves have no TLS, but tls_ca is "
            "set; start tfps_pserver with its certificates and set TFPS_PSERVERS"
        )
    os.environ.update(rendezvous(cluster.others, security.token_file, config.connect_timeout_s))
    found = resolve(None)
    if not found.pservers:  # an embedded one would let each process train alone
        raise ConfigError(
            f"{cluster.others.source} has started {cluster.others.workers} processes, but none of them has started a "
            "pserver; start tfps_pserver and set TFPS_PSERVERS=HOST:PORT,..."
        )
    return found


def resolve(
    pservers: Sequence[str] | tf.distribute.cluster_resolver.ClusterResolver | None,
    environment: Mapping[str, str] | None = None,
) -> Cluster:
    """Returns the cluster that `pservers` and the environment describe.

    Only a resolver's addresses, rank and number of workers count if there is one, but for a rank that it does not know:
    `TFPS_RANK` and `TFPS_WORKERS`, the variables of mpirun or srun, or the order of joining. Without a resolver: see
    `locate`.

    Raises:
        ConfigError: see `locate`.
    """
    environment = os.environ if environment is None else environment
    if not isinstance(pservers, tf.distribute.cluster_resolver.ClusterResolver):
        return locate(pservers, environment)
    launch = Launch.from_environment(environment)
    others = started_with(launch, environment)
    tasks = _from_resolver(pservers)
    if tasks.is_evaluator:
        return Cluster(job=launch.job)
    addresses, rank, workers = pservers_of(tasks), tasks.rank, tasks.workers
    if rank is None and launch.rank is not None:
        rank, workers = launch.rank, workers or launch.workers
    elif rank is None and others is not None and workers in (None, others.workers):
        rank, workers = others.rank, others.workers
    return cluster_of(addresses, rank, workers, launch.job, others)


def _from_resolver(resolver: tf.distribute.cluster_resolver.ClusterResolver) -> Tasks:
    spec = resolver.cluster_spec()  # first: this makes SlurmClusterResolver find its task
    tasks = spec.as_dict() if spec else {}
    return from_tasks(tasks, resolver.task_type, resolver.task_id, type(resolver).__name__, may_not_know=True)
