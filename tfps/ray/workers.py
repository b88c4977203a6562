"""Workers as Ray actors: where they are, what they return, and that those that are lost are started again."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RaySystemError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tfps.errors import OF_JOB, JoinError, PserverLostError, TfpsError, WaitTimeoutError, WorkerLostError
from tfps.launch.job import Job
from tfps.ray.job import Recovery, default_sigterm, program, take_place
from tfps.ray.pservers import Deadline, Pservers, failure, node
from tfps.types import Function, Options

logger = logging.getLogger("tfps")
_T = TypeVar("_T")
_LOOK_S = 10.0  # between two looks whether a pserver is left
_GRACE_S = 5.0  # how long other workers may go on after the job has failed: to say what they saw


class TfpsWorker:
    """A worker in a process of its own. Runs on the node that its bundle is on."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def node(self) -> str:
        return node()

    def train(self, job: Job, token: str, recovery: Recovery, train_fn: Function) -> object:
        """Returns or raises what `train_fn` does."""
        take_place(job, self._rank, token, recovery.variables)
        with contextlib.nullcontext() if recovery.min_workers is None else default_sigterm(), program():
            return train_fn()

    def __repr__(self) -> str:  # what Ray puts before each line that the process prints
        return f"worker {self._rank}"


class Workers:
    """The workers of one job, by rank, each in its bundle of `group`; `options` are Ray's for each."""

    def __init__(self, group: PlacementGroup, options: Options, recovery: Recovery) -> None:
        self._group, self._options, self._recovery = group, options, recovery
        self._class = ray.remote(TfpsWorker)
        self._actors = [self._new(rank) for rank in range(recovery.workers)]
        self._replaced: dict[int, RayError] = {}  # what the last one of a rank ended with that was started again
        self._ready: dict[int, ray.ObjectRef] = {}  # calls of those: on which node have they begun?
        self._nodes: dict[int, str] = {}  # where the one of a rank was that began last, as far as is known

    def _new(self, rank: int) -> ray.actor.ActorHandle:
        there = PlacementGroupSchedulingStrategy(self._group, rank)
        return self._class.options(**self._options, scheduling_strategy=there).remote(rank)

    def nodes(self, deadline: Deadline) -> list[str]:
        """The node of each worker, which is ready then."""
        for rank, actor in enumerate(self._actors):
            try:
                self._nodes[rank] = ray.get(actor.node.remote(), timeout=deadline.left_s)
            except GetTimeoutError:
                raise WaitTimeoutError(
                    f"worker {rank} of {len(self._actors)} has a place on the cluster, but was not ready {deadline}; "
                    "Ray's logs of its node say what its process does"
                ) from None
            except RayError as error:
                raise self._failed(rank, error) from error
        return list(self._nodes.values())

    def train(self, job: Job, token: str, function: ray.ObjectRef, pservers: Pservers) -> dict[int, _T]:
        """What the workers return that end well, by rank. After a failure of the job the others may say what they saw.

        A lost worker is started again, if it may be: it joins the others, which go on.
        """
        recovery = self._recovery

        def begin(rank: int) -> ray.ObjectRef:
            return self._actors[rank].train.remote(job, token, recovery, function)

        pending = {begin(rank): rank for rank in range(recovery.workers)}
        results: dict[int, _T] = {}
        failures: dict[int, RayError] = {}
        restarts = 0
        end_s: float | None = None  # nobody knows how long training takes; steps have deadlines of their own
        while pending and not (results and self._none_has_begun(pending.values())):
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            looks = end_s is None and recovery.min_workers is not None
            done, _ = ray.wait(list(pending), timeout=_LOOK_S if looks else left_s)
            if looks and not done and not pservers.any_lives():
                raise PserverLostError(f"no pserver is left of job {job.name!r}, and none is started again")
            for reference in done:
                rank = pending.pop(reference)
                try:
                    results[rank] = ray.get(reference)
                except RayError as error:
                    failures[rank] = error
                    ray.kill(self._actors[rank])  # the others learn that it is gone
                    restarts -= self._came_to_nothing(rank)
                    # Who was refused would be so again.
                    again = recovery.starts_again(restarts, len(results)) and not _is(JoinError, error)
                    enough = again or recovery.goes_on_without(len(failures))
                    if end_s is not None or not enough or not _may_go_on(error, pservers):
                        end_s = end_s or time.monotonic() + _GRACE_S
                    elif again:
                        restarts += 1
                        self._replace(rank, failures.pop(rank))
                        pending[begin(rank)] = rank
                        _log(rank, error, f"it starts again (restarts left: {recovery.max_failures - restarts})")
                    else:
                        _log(rank, error, f"{recovery.workers - len(failures)} workers go on")
        if len(results) < recovery.least:
            blamed = failures or {rank: error for rank, error in self._replaced.items() if rank not in results}
            rank = min(blamed, key=lambda each: (_order(blamed[each]), each))
            raise self._failed(rank, blamed[rank], restarts) from blamed[rank]
        return results

    def _replace(self, rank: int, error: RayError) -> None:
        self._actors[rank] = self._new(rank)
        self._ready[rank] = self._actors[rank].node.remote()
        self._replaced[rank] = error

    def _came_to_nothing(self, rank: int) -> bool:
        """Whether this one was started again on a node that was gone, which Ray notices late. Once for each node."""
        if rank not in self._ready:
            return False
        before = self._nodes.pop(rank, None)
        try:
            self._nodes[rank] = ray.get(self._ready[rank], timeout=0)
        except RayError:
            return before is not None and before not in {each["NodeID"] for each in ray.nodes() if each["Alive"]}
        return False

    def _none_has_begun(self, ranks: Iterable[int]) -> bool:
        """Whether all of these have been started again, and wait for a place."""
        return all(rank in self._ready and not ray.wait([self._ready[rank]], timeout=0)[0] for rank in ranks)

    def _failed(self, rank: int, error: RayError, restarts: int = 0) -> TfpsError:
        """What to tell the user; Ray's own error, with the stack of the worker, is to be its cause."""
        said, recovery = failure(error), self._recovery
        if isinstance(error, RaySystemError):
            said += ": what train_fn returns must load where run was called"
        if recovery.min_workers is not None:
            said += (
                f"; workers were started again {restarts} times (max_failures={recovery.max_failures}, "
                f"min_workers={recovery.min_workers})"
            )
        text = f"rank {rank} of {recovery.workers} failed: {said}; all others were ended"
        return PserverLostError(text) if _is(PserverLostError, error) else WorkerLostError(text)

    def end(self) -> None:
        """Ends their processes, at once; may be called again."""
        for actor in self._actors:
            ray.kill(actor)


def _is(kind: type[TfpsError] | tuple[type[TfpsError], ...], error: RayError) -> bool:
    """Whether the function has raised that."""
    return isinstance(getattr(error, "cause", None), kind)


def _may_go_on(error: RayError, pservers: Pservers) -> bool:
    """Whether others may go on after this: not if a pserver has died, or all would meet it: each of them says so."""
    return not _is(OF_JOB, error) and (not _is(PserverLostError, error) or pservers.all_live())


def _log(rank: int, error: RayError, then: str) -> None:
    logger.warning("tfps: worker %d failed: %s; %s", rank, failure(error), then)


def _order(error: RayError) -> int:
    """Of several: a process that has died is the likelier cause, and what tfps reports of others the unlikeliest."""
    cause = getattr(error, "cause", None)  # what the function raised
    if cause is None:
        return 0 if isinstance(error, RayActorError) else 1
    return 3 if isinstance(cause, WorkerLostError) else 2 if isinstance(cause, PserverLostError) else 1
