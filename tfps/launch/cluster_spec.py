"""Where the processes of a job are: pservers, this worker's rank, number of workers, from arguments and environment.

Tested in tests/launch/test_cluster_spec.py, tests/strategy/test_cluster.py and tests/doctor/test_cli.py.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tfps.config import Config, Launch, check_address
from tfps.errors import ConfigError
from tfps.types import Json

_WORKER_TASKS = ("chief", "master", "worker")  # in rank order


@dataclass(frozen=True)
class Ranks:
    """This process among those that one command has started; None: not known."""

    source: str  # which command, for messages
    variable: str  # of the environment, that has the rank
    rank: int
    workers: int | None
    local_rank: int | None = None  # the place among those of this host, from 0
    local_workers: int | None = None  # number of processes on this host
    job: str = ""  # what all processes share, and no others; "": not known
    has_mpi: bool = True  # whether they can exchange messages by MPI

    @property
    def on_one_host(self) -> bool:
        """Whether all processes are known to be on this host."""
        return self.workers is not None and self.workers == self.local_workers


@dataclass(frozen=True)
class Cluster:
    """Pserver addresses (empty: embedded), rank and number of workers (None: the pservers decide).

    Without addresses, `others` are the processes that one command has started with this one: a rendezvous follows.
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
    has started need a rendezvous (`Cluster.others`).
    """
    environment = os.environ if environment is None else environment
    launch = Launch.from_environment(environment)
    others = started_with(launch, environment)
    text = environment.get("TF_CONFIG", "")
    tasks = _from_tf_config(text) if text.strip() else Tasks("TF_CONFIG")
    if tasks.is_evaluator and launch.rank is None:
        return Cluster(job=launch.job)
    if isinstance(pservers, str) or not isinstance(pservers, Iterable | None):
        if isinstance(pservers, str):
            instead = f"write [{pservers!r}]"
        elif isinstance(pservers, Config):
            instead = "write tfps.Strategy(config=...)"
        else:
            instead = "numbers of processes are for who starts them: tfps_launch --workers 2 --pservers 2 script.py"
        raise ConfigError(f"pservers must be a list of 'host:port', got {reprlib.repr(pservers)}; {instead}")
    if pservers is not None and not pservers:
        raise ConfigError(
            "pservers must name at least one 'host:port', got an empty list; leave it out for an embedded pserver"
        )
    addresses = tuple(pservers or ()) or launch.pservers or pservers_of(tasks)
    rank, workers = launch.rank, launch.workers
    if rank is None and workers is None:
        rank, workers = tasks.rank, tasks.workers
    if rank is None and others is not None:
        rank, workers = others.rank, others.workers
    return cluster_of(addresses, rank, workers, launch.job, others)


def cluster_of(
    addresses: tuple[str, ...], rank: int | None, workers: int | None, job: str, others: Ranks | None
) -> Cluster:
    """A cluster; without addresses one whose pserver is embedded, or whose processes need a rendezvous."""
    for address in addresses:
        check_address(address)
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"pservers must be different addresses, got {', '.join(addresses)}")
    if addresses:
        return Cluster(addresses, rank, workers, job)
    if others is not None and (rank, workers) != (others.rank, others.workers):
        raise ConfigError(
            f"{others.source} has started {others.workers} processes, but TFPS_RANK, TF_CONFIG or the cluster resolver "
            f"says that this one is rank {rank} of {workers or 'an unknown number of'} workers, and names no pservers; "
            "unset it, or set TFPS_PSERVERS, or set TFPS_WORKERS=1 if each process is to train alone"
        )
    if others is None and ((workers or 1) > 1 or (rank or 0) > 0):
        raise ConfigError(
            f"this process is rank {'?' if rank is None else rank} of {workers or 'several'} workers (TFPS_RANK, "
            "TFPS_WORKERS), but no pservers are named; start tfps_pserver and set TFPS_PSERVERS=HOST:PORT,..."
        )
    return Cluster(job=job, others=others)


def started_with(launch: Launch, environment: Mapping[str, str]) -> Ranks | None:
    """The processes of mpirun or srun, if TFPS_WORKERS does not say that the job consists of others."""
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


def pservers_of(tasks: Tasks) -> tuple[str, ...]:
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
    tasks: Mapping[str, Sequence[str]], task_type: str | None, task_index: Json, source: str, may_not_know: bool = False
) -> Tasks:
    """Interprets `tasks` (addresses by task type) and this process's task, which `source` may not know."""
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


# By command: the variables with rank and number of processes, which must be there, and the same among those of a host.
# In this order: mpirun starts its daemons by srun, whose variables the processes then also have.
_MPIS = {
    "mpirun (Open MPI)": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    "mpirun (PMI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def ranks_of(environment: Mapping[str, str]) -> Ranks | None:
    """Returns this process's place; None if it is alone.

    A single process is alone, whoever has started it: its rank would say nothing.
    """

    def number(name: str) -> int | None:
        text = environment.get(name, "").strip()
        if text and not text.isdigit():
            raise ConfigError(f"environment variable {name} must be a whole number, got {text!r}")
        return int(text) if text else None

    def place(variable: str, size: str) -> tuple[int, int] | None:
        rank, workers = number(variable), number(size)
        if rank is None or workers is None:
            return None
        if rank >= workers:
            raise ConfigError(
                f"environment variable {variable} must be below the number of processes, {workers}, got {rank}"
            )
        return rank, workers

    namespace = environment.get("PMIX_NAMESPACE", "")
    ranks, step_id = None, environment.get("SLURM_STEP_ID", "")
    # SLURM_PROCID alone says nothing: a batch script has it, and what somebody starts within it.
    if step_id and (found := place("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        local_workers = found[1] if environment.get("SLURM_STEP_NUM_NODES") == "1" else None
        job = f"slurm-{environment.get('SLURM_JOB_ID', '')}.{step_id}"
        has_mpi = "PMI_RANK" in environment or "PMIX_RANK" in environment
        ranks = Ranks("srun", "SLURM_PROCID", *found, number("SLURM_LOCALID"), local_workers, job, has_mpi)
    for command, (variable, size, *local) in _MPIS.items():
        if found := place(variable, size):
            if ranks is not None and (ranks.rank, ranks.workers) == found:
                break  # `srun --mpi=pmi2`: Slurm knows more
            job = namespace + environment.get("PMI_JOBID", "")
            local_rank, local_workers = map(number, local)
            ranks = Ranks(command, variable, *found, local_rank, local_workers, job)
            break
    if ranks is None and (rank := number("PMIX_RANK")) is not None:  # PMIx itself has no variable for the number
        return Ranks("PMIx", "PMIX_RANK", rank, None, job=namespace)
    return None if ranks is None or ranks.workers == 1 else ranks
