"""What a process that Ray has started does to take its place in a job.

The job token comes as an argument of a call, from the driver (or Ray Train's controller) straight to the process. It
goes on through a file in memory, which no other user may read and which ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

from tfps.launch.job import Job, lasting_secret_file


def take_place(job: Job, rank: int, token: str) -> None:
    """Sets the variables by which `tfps.Strategy()` finds the job, in this process."""
    os.environ.pop("TF_CONFIG", None)  # describes another job, or this one without its pservers
    os.environ.update(replace(job, token_file=lasting_secret_file(token)).worker_variables(rank))


@contextlib.contextmanager
def program() -> Iterator[None]:
    """What a training function runs in: at its end this process leaves the job, as at the end of a script."""
    try:
        yield
    except BaseException as error:
        _leave(error)
        raise
    _leave()


def _leave(failure: BaseException | None = None) -> None:
    strategies = sys.modules.get("tfps.strategy.strategy")  # if it has not been imported, there is nothing to leave
    if strategies is not None:
        strategies.close_all(failure)
