"""How the processes that mpirun or srun has started find each other: they start pservers of their own.

One process of each host starts a pserver. Rank 0 makes the job's name and token, and tells all where the pservers are.
"""

from __future__ import annotations

import sys

from tfps.errors import ConfigError
from tfps.launch import meet_by_mpi, meet_on_host
from tfps.launch.job import Job
from tfps.launch.ranks import Ranks
from tfps.launch.secret import lasting_secret_file


def meet(ranks: Ranks, token_file: str, timeout_s: float) -> dict[str, str]:
    """Returns the variables by which a worker finds the others (`tfps.config.Launch`), as `tfps_launch` sets them.

    Args:
        token_file: has the job token, on each host; "": rank 0 makes one.
        timeout_s: for all processes to come.

    Raises:
        ConfigError: there is no way to find the others; the message says what to do.
        ConnectError: a pserver did not start, or somebody else answers.
        WaitTimeoutError: others did not come in time; the message says which.
    """
    if ranks.workers is None:
        raise ConfigError(
            f"{ranks.variable}={ranks.rank} says that {ranks.source} has started this process with others, but not how "
            f"many; {_what_to_do('N')}"
        )
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"the processes of {ranks.source} find each other on Linux only; " + _what_to_do(ranks.workers)
        )
    if ranks.on_one_host:
        found = meet_on_host.meet(ranks, token_file, timeout_s)
    else:
        if not ranks.has_mpi:
            raise ConfigError(
                f"srun has started {ranks.workers} processes on several nodes, and no pservers are named: start "
                f"`tfps_launch --slurm` once instead, without srun; or {_what_to_do(ranks.workers)}"
            )
        try:
            communicator = meet_by_mpi.communicator(ranks)
        except ConfigError as error:
            raise ConfigError(
                f"{ranks.source} has started {ranks.workers} processes, not all of them on this host, and no pservers "
                f"are named. {error}; or {_what_to_do(ranks.workers)}"
            ) from None
        found = meet_by_mpi.meet(communicator, ranks, token_file, timeout_s)
    job = Job(found.job, ranks.workers, found.pservers, lasting_secret_file(found.token) if found.token else token_file)
    return job.worker_variables(ranks.rank)


def _what_to_do(workers: int | str) -> str:
    return (
        f"start `tfps_pserver --workers {workers}` yourself and set TFPS_PSERVERS=HOST:PORT,...; or set TFPS_WORKERS=1 "
        "if each process is to train alone"
    )
