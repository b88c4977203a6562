"""Ray Train: pservers beside the workers of a `TensorflowTrainer`.

A backend is where Ray Train lets a framework set up its workers, before they train and each time Ray starts them again:
the token, the pservers and the incarnation of the job are new then.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import ray
import ray.train.tensorflow
from ray.train.backend import Backend

from tfps.errors import WaitTimeoutError
from tfps.launch.job import Job
from tfps.ray.job import check_pservers, program, take_place
from tfps.ray.pservers import Deadline, Pservers, node, wait_all
from tfps.types import Function, Library


@dataclass
class TensorflowConfig(ray.train.tensorflow.TensorflowConfig):
    """`TensorflowTrainer(tensorflow_config=tfps.ray.TensorflowConfig())`: `tfps.Strategy()` finds pservers and rank.

    Unlike Ray's own, it sets neither TF_CONFIG nor TF_USE_LEGACY_KERAS: Keras is Keras 3.

    Args:
        pservers: how many; None: one on each node that has workers. They are on nodes of workers.
        resources_per_pserver: what Ray reserves for each, such as `{"CPU": 1}`, beside the workers of its node; None:
            nothing.
        start_timeout_s: seconds until the pservers must be ready, once the workers are.

    Raises:
        ConfigError: an argument is out of range.
    """

    pservers: int | None = None
    resources_per_pserver: Mapping[str, float] | None = None
    start_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_pservers(self.pservers, self.resources_per_pserver, self.start_timeout_s)

    @property
    def train_func_context(self) -> Function:
        return program

    @property
    def backend_cls(self) -> type[Backend]:
        return _Pservers


class _Pservers(Backend):
    """Lives in Ray Train's controller, which has one group of workers at a time."""

    def __init__(self) -> None:
        self._running: Pservers | None = None

    def on_start(self, worker_group: Library, backend_config: TensorflowConfig) -> None:
        """Called when a group of workers is ready, and before they train."""
        self.on_shutdown(worker_group, backend_config)  # of a group that Ray has given up without a word
        token = secrets.token_urlsafe(32)
        deadline = Deadline(backend_config.start_timeout_s)
        nodes = _get(worker_group.execute_async(node), deadline, "say which node it is on")
        self._running = Pservers(nodes, backend_config.pservers, backend_config.resources_per_pserver or {})
        try:
            job = self._running.start(Job.named("ray", len(nodes)), token, deadline)
            placing = [
                worker_group.execute_single_async(rank, take_place, job, rank, token) for rank in range(len(nodes))
            ]
            _get(placing, deadline, "take its place in the job")
        except BaseException:
            self._running.end()
            raise

    def on_shutdown(self, worker_group: Library, backend_config: TensorflowConfig) -> None:
        """Called when the workers have ended, or one has failed."""
        if self._running is not None:
            self._running.end()
            self._running = None


def _get(calls: list[ray.ObjectRef], deadline: Deadline, what: str) -> list[str]:
    """The results of calls of all workers."""
    if late := wait_all(calls, deadline):
        raise WaitTimeoutError(
            f"rank {', '.join(map(str, late))} of {len(calls)} did not {what} {deadline}; Ray's logs of its "
            "node say what its process does"
        )
    results: list[str] = ray.get(calls)
    return results
