"""A job as far as it needs no Ray: what a user asks for, checked and in Ray's words, and how a process takes its place.

The job token comes as an argument of a call, straight to the process, and goes on through a file in its memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tfps.config import is_whole
from tfps.errors import ConfigError
from tfps.launch.job import HASHES_ALIKE, Job, lasting_secret_file
from tfps.types import Options

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Recovery:
    """What becomes of a job whose workers are lost: with how many it goes on, and how often one is started again."""

    workers: int
    min_workers: int | None = None  # None: it needs all
    max_failures: int = 0  # of all workers together

    def __post_init__(self) -> None:
        least, failures = self.min_workers, self.max_failures
        if least is not None and (not is_whole(least) or not 1 <= least <= self.workers):
            raise ConfigError(
                f"min_workers must be a whole number from 1 to workers={self.workers}, or None (all are needed), got "
                f"{least!r}"
            )
        if not is_whole(failures) or failures < 0 or (failures and least is None):
            raise ConfigError(
                f"max_failures must be a whole number from 0 and needs min_workers, got {failures!r} with "
                f"min_workers={least!r}"
            )

    @property
    def least(self) -> int:
        """How many workers must end well."""
        return self.workers if self.min_workers is None else self.min_workers

    @property
    def variables(self) -> dict[str, str]:
        """What a worker's environment says of it."""
        return {} if self.min_workers is None else {"TFPS_MIN_WORKERS": str(self.min_workers)}

    def goes_on_without(self, lost: int) -> bool:
        """Whether enough workers are left if so many are lost for good."""
        return self.workers - lost >= self.least

    def starts_again(self, started_again: int, ended_well: int) -> bool:
        """Whether one that has just been lost is started again; there is no job to join once others have ended well."""
        return started_again < self.max_failures and not ended_well


def spread(nodes: Sequence[str], count: int | None) -> list[str]:
    """The node of each pserver: those of the workers in turn, that of rank 0 first; once each if `count` is None."""
    hosts = list(dict.fromkeys(nodes))
    return [hosts[index % len(hosts)] for index in range(len(hosts) if count is None else count)]


def check_pservers(
    pservers: int | None, resources_per_pserver: Mapping[str, float] | None, start_timeout_s: float
) -> None:
    """Checks what a user asks for, before anything is started."""
    if pservers is not None:
        check_count("pservers", pservers, ", or None for one on each node that has workers")
    check_resources("resources_per_pserver", resources_per_pserver)
    is_number = isinstance(start_timeout_s, (int, float)) and not isinstance(start_timeout_s, bool)
    if not is_number or not 0 < start_timeout_s < float("inf"):
        raise ConfigError(f"start_timeout_s must be a positive number of seconds, got {start_timeout_s!r}")


def check_count(name: str, count: int, otherwise: str = "") -> None:
    if not is_whole(count) or count < 1:
        raise ConfigError(f"{name} must be a whole number from 1{otherwise}, got {count!r}")


def check_resources(name: str, resources: Mapping[str, float] | None) -> None:
    known = resources is None or isinstance(resources, Mapping)
    amounts = list(resources.values()) if known and resources else []
    if not known or not all(isinstance(each, (int, float)) and 0 <= each < float("inf") for each in amounts):
        raise ConfigError(f'{name} must be amounts from 0 by name such as {{"CPU": 2, "GPU": 1}}, got {resources!r}')


def as_options(resources: Mapping[str, float], runtime_env: Options | None) -> Options:
    """`resources`, such as `{"CPU": 2, "GPU": 1}`, and `runtime_env` as arguments of an actor's `options`."""
    others = dict(resources)
    named: Options = {"num_cpus": others.pop("CPU", 0), "num_gpus": others.pop("GPU", 0), "resources": others}
    if "memory" in others:
        named["memory"] = others.pop("memory")
    return {**named, "runtime_env": runtime_env} if runtime_env else named


def hashes_alike(runtime_env: Options | None) -> Options:
    """`runtime_env`, by default with one order of sets in all processes."""
    given = runtime_env or {}
    return {**given, "env_vars": {**HASHES_ALIKE, **given.get("env_vars", {})}}


def check_placement(resources: Mapping[str, float] | None, strategy: str) -> None:
    """Checks what places for workers are asked for."""
    check_resources("resources_per_worker", resources)
    if resources is not None and not any(resources.values()):
        raise ConfigError(f'resources_per_worker must have an amount above 0 such as {{"CPU": 1}}, got {resources!r}')
    if strategy not in STRATEGIES:
        raise ConfigError(f"placement_strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")


def take_place(job: Job, rank: int, token: str, variables: Mapping[str, str] | None = None) -> None:
    """Sets the variables by which `tfps.Strategy()` finds the job, and other `variables`, in this process."""
    os.environ.pop("TF_CONFIG", None)  # describes another job, or this one without its pservers
    os.environ.update(replace(job, token_file=lasting_secret_file(token)).worker_variables(rank))
    os.environ.update(variables or {})


@contextlib.contextmanager
def default_sigterm() -> Iterator[None]:
    """What a training function runs in whose worker may leave: SIGTERM is for tfps, which takes no other's handler.

    Ray's ends the process within a step. On the main thread.
    """
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def program() -> Iterator[None]:
    """What a training function runs in: at its end this process leaves the job, as at the end of a script."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        # If it has not been imported, there is nothing to leave.
        if (strategies := sys.modules.get("tfps.strategy.strategy")) is not None:
            strategies.close_all(failure)
