"""Which task of the job this process is, in the words of TensorFlow: `strategy.cluster_resolver`.

Tested in tests/strategy/test_cluster.py and tests/integration/test_clusters.py.
"""

from __future__ import annotations

import tensorflow as tf

from tfps.graph.patches import BaseStrategy
from tfps.launch.cluster_spec import from_tasks


class JobResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """The job of a strategy as it is now: tasks "worker", of which number 0 saves, and "ps".

    So programs find that one of them is the chief, and that this is rank 0, also where it is the only one.
    """

    def __init__(self, strategy: BaseStrategy) -> None:
        self._strategy = strategy
        self.rpc_layer = "grpc"

    @property
    def task_type(self) -> str:
        return "worker"

    @property
    def task_id(self) -> int:
        rank: int = self._strategy.rank
        return rank

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Returns all tasks. Nothing connects to workers, so theirs are names and no addresses."""
        tasks = {"worker": [f"worker-{rank}:0" for rank in range(self._strategy.num_workers)]}
        if self._strategy.pservers:
            tasks["ps"] = list(self._strategy.pservers)
        return tf.train.ClusterSpec(tasks)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns "": this process, as no worker is a server of TensorFlow."""
        return ""


def resolver_of(
    strategy: BaseStrategy, given: tf.distribute.cluster_resolver.ClusterResolver | None
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Returns what knows the task of this process: `given`, TF_CONFIG if it describes this job, else `strategy`."""
    for each in (given, tf.distribute.cluster_resolver.TFConfigClusterResolver()):
        if each is not None and _describes(each, strategy):
            return each
    return JobResolver(strategy)


def _describes(resolver: tf.distribute.cluster_resolver.ClusterResolver, strategy: BaseStrategy) -> bool:
    try:
        spec = resolver.cluster_spec()
        named = spec.as_dict() if spec else {}
        tasks = from_tasks(named, resolver.task_type, resolver.task_id, type(resolver).__name__, may_not_know=True)
    except ValueError:  # ConfigError, or TF_CONFIG is no JSON
        return False
    if tasks.is_evaluator:
        return not strategy.pservers
    return (tasks.rank, tasks.workers) == (strategy.rank, strategy.num_workers)
