"""The place of this process among those that mpirun or srun has started with it, from their environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfps.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """This process among those that one command has started.

    Args:
        source: which command, for messages.
        variable: of the environment, that has the rank.
        rank: of this process, from 0.
        workers: number of processes; None: not known.
        local_rank: the place among those of this host, from 0; None: not known.
        local_workers: number of processes on this host; None: not known.
        job: what all processes share, and no others; "": not known.
        has_mpi: whether they can exchange messages by MPI.
    """

    source: str
    variable: str
    rank: int
    workers: int | None
    local_rank: int | None = None
    local_workers: int | None = None
    job: str = ""
    has_mpi: bool = True

    @property
    def on_one_host(self) -> bool:
        """Whether all processes are known to be on this host."""
        return self.workers is not None and self.workers == self.local_workers


@dataclass(frozen=True)
class _Source:
    """The variables of one kind of command; the first two must be there."""

    name: str
    rank: str
    workers: str
    local_rank: str
    local_workers: str


# In this order: mpirun starts its daemons by srun, whose variables the processes then also have.
_MPIS = (
    _Source(
        "mpirun (Open MPI)",
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    _Source("mpirun (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def ranks_of(environment: Mapping[str, str]) -> Ranks | None:
    """Returns this process's place; None if it is alone.

    A single process is alone, whoever has started it: its rank would say nothing.

    Raises:
        ConfigError: a number is malformed.
    """
    for found in (*(_of_mpi(source, environment) for source in _MPIS), _of_step(environment), _of_pmix(environment)):
        if found is not None:
            return None if found.workers == 1 else found
    return None


def _of_mpi(source: _Source, environment: Mapping[str, str]) -> Ranks | None:
    rank, workers = _number(environment, source.rank), _number(environment, source.workers)
    if rank is None or workers is None:
        return None
    step = _of_step(environment)
    if step is not None and (step.rank, step.workers) == (rank, workers):
        return step  # `srun --mpi=pmi2`: Slurm knows more
    return Ranks(
        source.name,
        source.rank,
        _checked(source.rank, rank, workers),
        workers,
        _number(environment, source.local_rank),
        _number(environment, source.local_workers),
        environment.get("PMIX_NAMESPACE", "") + environment.get("PMI_JOBID", ""),
    )


def _of_step(environment: Mapping[str, str]) -> Ranks | None:
    """A task of a step. SLURM_PROCID alone says nothing: a batch script has it, and what somebody starts within it."""
    rank, workers = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_STEP_NUM_TASKS")
    step = environment.get("SLURM_STEP_ID", "")
    if rank is None or workers is None or not step:
        return None
    return Ranks(
        "srun",
        "SLURM_PROCID",
        _checked("SLURM_PROCID", rank, workers),
        workers,
        _number(environment, "SLURM_LOCALID"),
        workers if environment.get("SLURM_STEP_NUM_NODES") == "1" else None,
        f"slurm-{environment.get('SLURM_JOB_ID', '')}.{step}",
        has_mpi="PMI_RANK" in environment or "PMIX_RANK" in environment,
    )


def _of_pmix(environment: Mapping[str, str]) -> Ranks | None:
    """PMIx itself has no variable for the number of processes."""
    rank = _number(environment, "PMIX_RANK")
    if rank is None:
        return None
    return Ranks("PMIx", "PMIX_RANK", rank, None, job=environment.get("PMIX_NAMESPACE", ""))


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if text and not text.isdigit():
        raise ConfigError(f"environment variable {name} must be a whole number, got {text!r}")
    return int(text) if text else None


def _checked(variable: str, rank: int, workers: int) -> int:
    if rank >= workers:
        raise ConfigError(
            f"environment variable {variable} must be below the number of processes, {workers}, got {rank}"
        )
    return rank
