"""A job as every launcher describes it, and the variables and arguments by which its processes learn their place."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

START_S = 60.0  # a pserver needs less than a second; a busy machine or slow disks may take more
READY = re.compile(r"tfps_pserver ready at (?P<address>\S+:\d+) workers=\d+")  # what it prints then


@dataclass(frozen=True)
class Job:
    """Roles, addresses, ranks and token, the same whatever starts the processes.

    Args:
        name: other jobs on the same pservers have other names.
        workers: their number.
        pservers: their addresses ("host:port"), as workers reach them; empty until they are known.
        token_file: where a process finds the job token, on its own host.
    """

    name: str
    workers: int
    pservers: tuple[str, ...] = ()
    token_file: str = ""

    @classmethod
    def named(cls, what: str, workers: int, token_file: str = "") -> Job:
        """A job called `what` and something that no other job is called."""
        return cls(f"{what}-{secrets.token_hex(4)}", workers, token_file=token_file)

    def at(self, pservers: Sequence[str]) -> Job:
        """This job with its pservers' addresses."""
        return replace(self, pservers=tuple(pservers))

    def worker_variables(self, rank: int | None = None) -> dict[str, str]:
        """A worker's environment variables (see `tfps.config.Launch`), without `rank` the same for all workers."""
        variables = {
            "TFPS_PSERVERS": ",".join(self.pservers),
            "TFPS_WORKERS": str(self.workers),
            "TFPS_JOB": self.name,
            **self.pserver_variables(),
        }
        return variables if rank is None else {**variables, "TFPS_RANK": str(rank)}

    def pserver_variables(self) -> dict[str, str]:
        """A pserver's environment variables."""
        return {"TFPS_TOKEN_FILE": self.token_file} if self.token_file else {}

    def pserver_arguments(self, host: str = "", port: int = 0, metrics_port: int | None = None) -> list[str]:
        """The arguments of a `tfps_pserver`.

        Args:
            host: that it listens at; "": all interfaces, if there is a token.
            port: 0: one that the system picks.
            metrics_port: of Prometheus metrics and /healthz; None: no metrics.
        """
        arguments = ["--port", str(port), "--workers", str(self.workers), "--job", self.name]
        if host:
            arguments += ["--host", host]
        return arguments if metrics_port is None else [*arguments, "--metrics-port", str(metrics_port)]
