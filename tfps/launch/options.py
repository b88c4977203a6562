"""The options of `tfps_launch`: what to start, and on which engine."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfps import __version__
from tfps.errors import ConfigError
from tfps.launch.job import Host, parse_hosts
from tfps.types import Argument

_PORTS = 65536
_FIRST, _LAST = 10, 20  # steps to record: until then TensorFlow traces the model and slice sizes are tuned


@dataclass(frozen=True)
class Plan:
    """What to start: `script` with its arguments (a module if `is_module`), and on how many processes.

    `metrics_port` is pserver 0's, others count up from it; 0 picks free ports; None: no metrics. `token_file` has the
    job token; "": one is made for the job. With `hosts` (reached by the command `ssh`) or `slurm` (those of the
    allocation), these say how many workers there are, and each gets `pservers_per_host`. `logdir`: where some steps
    are recorded for TensorBoard; None: nowhere. `variables`: NAME or NAME=VALUE, which all processes get.
    """

    script: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    workers: int = 1
    pservers: int = 1
    grace_s: float = 5.0
    log: str | None = None
    metrics_port: int | None = None
    token_file: str = ""
    hosts: tuple[Host, ...] = ()
    slurm: bool = False
    pservers_per_host: int = 1
    ssh: str = "ssh"
    logdir: str | None = None
    variables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("workers", "pservers", "pservers_per_host"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} must be at least 1, got {getattr(self, name)}")
        pservers = len(self.hosts) * self.pservers_per_host or self.pservers
        if self.metrics_port and not 0 < self.metrics_port <= _PORTS - pservers:
            raise ConfigError(
                f"--metrics-port must be from 0 to {_PORTS - pservers} with {pservers} pservers, which take "
                f"one port each, got {self.metrics_port}"
            )
        if self.logdir is not None and not self.logdir.strip():  # as by a variable of a shell that is not set
            raise ConfigError(f"--logdir must name a directory, as in --logdir logs, got {self.logdir!r}")
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            raise ConfigError(f"--grace must be a number of seconds, 0 or more, got {self.grace_s}")
        try:
            if not shlex.split(self.ssh):
                raise ValueError("nothing")
        except ValueError as error:
            raise ConfigError(
                f"--ssh must be a command and its options, as for a shell, got {self.ssh!r}: {error}"
            ) from None
        for text in self.variables:
            if not re.fullmatch(r"[A-Za-z_]\w*(=.*)?", text, re.DOTALL):
                raise ConfigError(f"--env must be NAME or NAME=VALUE, got {text!r}")

    def chosen(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`variables` and their values, by default those in `environment`."""
        found: dict[str, str] = {}
        for text in self.variables:
            name, given, value = text.partition("=")
            if not given and name not in environment:
                raise ConfigError(f"--env {name}: there is no such variable here; set it, or write --env {name}=VALUE")
            found[name] = value if given else environment[name]
        return found

    @property
    def trace_variables(self) -> dict[str, str]:
        """The variables by which a worker records steps to `logdir`; they win over what the launcher inherits."""
        return {} if self.logdir is None else {"TFPS_TRACE": f"{self.logdir}:{_FIRST}-{_LAST}"}


def parse(argv: Sequence[str]) -> Plan:
    """Parses the command line; exits with usage and code 2 if it is malformed."""
    parser = argparse.ArgumentParser(
        prog="tfps_launch",
        usage="tfps_launch [options] script.py [args ...]\n       tfps_launch [options] -m module [args ...]",
        description="Runs a training script as several workers with several pservers, on this machine or on several. "
        "Output is prefixed with where it comes from. If one process fails, all are ended; its exit code is that of "
        "tfps_launch.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that run the script (default 1)")
    parser.add_argument("--pservers", type=int, metavar="N", help="pserver processes (default 1)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--hosts",
        metavar="HOST:N,...",
        help="run N workers on each of these hosts, reached by ssh, by the names under which they reach each other",
    )
    place.add_argument(
        "--slurm", action="store_true", help="run a worker for each task of this Slurm allocation, on its nodes"
    )
    parser.add_argument(
        "--pservers-per-host",
        type=int,
        metavar="N",
        help="with --hosts or --slurm: pserver processes on each host (default 1)",
    )
    parser.add_argument(
        "--ssh",
        metavar="COMMAND",
        help="with --hosts: the command that reaches a host, with its options (default: ssh)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="pserver 0 serves Prometheus metrics and /healthz on this port of 127.0.0.1, pserver 1 on the next, ...; "
        "0 picks free ones (default: do not)",
    )
    parser.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="file with the job token of pservers and workers (default: TFPS_TOKEN_FILE, else one is made for the job)",
    )
    parser.add_argument(
        "--logdir",
        metavar="DIR",
        help=f"record the training steps {_FIRST} to {_LAST} for TensorBoard in this directory, as "
        f"TFPS_TRACE=DIR:{_FIRST}-{_LAST} does, and say where to look",
    )
    parser.add_argument(
        "-x",
        "--env",
        action="append",
        default=[],
        dest="variables",
        metavar="NAME[=VALUE]",
        help="an environment variable of all processes, on all hosts; may be repeated (TFPS_*, TF_*, KERAS_* and "
        "PYTHON* go along by themselves)",
    )
    parser.add_argument("--log", metavar="FILE", help="also write all output to this file, without colours")
    parser.add_argument(
        "--grace",
        dest="grace_s",
        type=float,
        default=Plan.grace_s,
        metavar="SECONDS",
        help="how long other workers may go on after one has failed, and how long a process may take to end when told "
        "to (default %(default)g)",
    )
    parser.add_argument(
        "--kubernetes", action="store_true", help="write manifests instead; comes first, has its own --help"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py [args ...]", help="what to run")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    command = given.pop("command")
    command = command[1:] if command[:1] == ["--"] else command
    if given.pop("kubernetes"):
        parser.error("--kubernetes must be the first option: tfps_launch --kubernetes --print ... script.py")
    if not command:
        parser.error("what to run is missing: tfps_launch --workers 2 --pservers 2 script.py")
    try:
        _check_together(given)
        if "hosts" in given:
            given["hosts"] = parse_hosts(given["hosts"])
            given["workers"] = sum(host.workers for host in given["hosts"])
        given["variables"] = tuple(given["variables"])
        return Plan(command[0], tuple(command[1:]), **given)
    except ConfigError as error:
        parser.error(str(error))


def _check_together(given: Mapping[str, Argument]) -> None:
    """Raises ConfigError for options that do not go together."""
    several = "--hosts" if "hosts" in given else "--slurm" if given["slurm"] else ""
    for name in ("workers", "pservers"):
        if several and name in given:
            instead = "--hosts a:4,b:4 says how many workers each host gets"
            if given["slurm"]:
                instead = "the allocation's tasks are the workers"
            if name == "pservers":
                instead = "use --pservers-per-host"
            raise ConfigError(f"--{name} does not go with {several}: {instead}")
    if "pservers_per_host" in given and not several:
        raise ConfigError("--pservers-per-host needs --hosts or --slurm; on this machine alone use --pservers")
    if "ssh" in given and "hosts" not in given:
        raise ConfigError("--ssh needs --hosts")
