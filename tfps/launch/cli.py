"""`tfps_launch`: runs a training script as several workers with several pservers on this machine."""

from __future__ import annotations

import argparse
import importlib.machinery
import math
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tfps.errors import ConfigError
from tfps.launch.job import Job

if TYPE_CHECKING:
    from tfps.launch.supervisor import Command, Process, Supervisor

START_S = 60.0  # a pserver needs less than a second; a busy machine or slow disks may take more
_PORTS = 65536
_WORKER_COLOURS = (32, 36, 34, 33)
_PSERVER_COLOUR = 35
_READY = re.compile(r"tfps_pserver ready at (?P<address>\S+:\d+) workers=\d+")


@dataclass(frozen=True)
class Plan:
    """What to start: `script` with its arguments (a module if `is_module`), and on how many processes.

    `metrics_port` is pserver 0's, others count up from it; 0 picks free ports; None: no metrics. `token_file` has the
    job token; "": one is made for the job.
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

    def __post_init__(self) -> None:
        for name in ("workers", "pservers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.metrics_port and not 0 < self.metrics_port <= _PORTS - self.pservers:
            raise ConfigError(
                f"--metrics-port must be from 0 to {_PORTS - self.pservers} with {self.pservers} pservers, which take "
                f"one port each, got {self.metrics_port}"
            )
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            raise ConfigError(f"--grace must be a number of seconds, 0 or more, got {self.grace_s}")


def parse(argv: Sequence[str]) -> Plan:
    """Parses the command line; exits with usage and code 2 if it is malformed."""
    parser = argparse.ArgumentParser(
        prog="tfps_launch",
        usage="tfps_launch [options] script.py [args ...]\n       tfps_launch [options] -m module [args ...]",
        description="Runs a training script as several workers with several pservers on this machine. Output is "
        "prefixed with where it comes from. If one process fails, all are ended; its exit code is that of tfps_launch.",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that run the script (default 1)")
    parser.add_argument("--pservers", type=int, default=1, metavar="N", help="pserver processes (default 1)")
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
    parser.add_argument("--log", metavar="FILE", help="also write all output to this file, without colours")
    parser.add_argument(
        "--grace",
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
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.kubernetes:
        parser.error("--kubernetes must be the first option: tfps_launch --kubernetes --print ... script.py")
    if not command:
        parser.error("what to run is missing: tfps_launch --workers 2 --pservers 2 script.py")
    try:
        return Plan(
            script=command[0],
            args=tuple(command[1:]),
            is_module=options.is_module,
            workers=options.workers,
            pservers=options.pservers,
            grace_s=options.grace,
            log=options.log,
            metrics_port=options.metrics_port,
            token_file=options.token_file,
        )
    except ConfigError as error:
        parser.error(str(error))


def check_script(plan: Plan) -> None:
    """Checks that there is something to run, before anything is started.

    Raises:
        ConfigError: there is no such script or module.
    """
    if not plan.is_module:
        path = Path(plan.script)
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise ConfigError(f"script {plan.script} is a directory without a __main__.py")
        if not path.exists():
            raise ConfigError(f"script not found: {plan.script} (in {Path.cwd()})")
        return
    # Only the outermost package is looked for: to find a submodule Python would have to import, and run, its package.
    outermost = plan.script.partition(".")[0]
    known = outermost in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(
        outermost, [str(Path.cwd()), *sys.path]
    )
    if not known:
        raise ConfigError(f"module not found: {plan.script}")


@contextmanager
def with_token(plan: Plan, environment: Mapping[str, str]) -> Iterator[Plan]:
    """The plan with the file of a job token. One that is made here only its user can read; it goes with the job.

    Raises:
        OSError: it cannot be written.
    """
    if known := plan.token_file or environment.get("TFPS_TOKEN_FILE", "").strip():
        yield replace(plan, token_file=known)
        return
    with tempfile.NamedTemporaryFile("w", prefix="tfps-token-") as file:  # with mode 0600
        file.write(secrets.token_urlsafe(32))
        file.flush()
        yield replace(plan, token_file=file.name)


def worker_command(plan: Plan, rank: int, job: Job, environment: Mapping[str, str]) -> Command:
    """The command of one worker."""
    from tfps.launch.supervisor import Command

    program = ["-m", plan.script] if plan.is_module else [plan.script]
    variables = {**_inherited(environment), **job.worker_variables(rank)}
    colour = _WORKER_COLOURS[rank % len(_WORKER_COLOURS)]
    return Command(f"worker {rank}", (sys.executable, *program, *plan.args), variables, colour)


def pserver_command(plan: Plan, index: int, job: Job, environment: Mapping[str, str]) -> Command:
    """The command of one pserver on a free port, with metrics on a predictable one."""
    from tfps.launch.supervisor import Command

    metrics_port = plan.metrics_port and plan.metrics_port + index
    argv = [sys.executable, "-m", "tfps.cli", *job.pserver_arguments("127.0.0.1", metrics_port=metrics_port)]
    variables = {**_inherited(environment), **job.pserver_variables()}
    return Command(f"pserver {index}", argv, variables, _PSERVER_COLOUR)


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    # A TF_CONFIG would describe another job; certificates are for hosts, and this job stays on one. Unbuffered: lines
    # are shown as they are written.
    kept = {
        name: value for name, value in environment.items() if name != "TF_CONFIG" and not name.startswith("TFPS_TLS_")
    }
    return {"PYTHONUNBUFFERED": "1", **kept}


def exit_code(code: int) -> int:
    """The exit code a shell would report: 128 + N after signal N."""
    return 128 - code if code < 0 else code


@dataclass(frozen=True)
class Outcome:
    """The launcher's exit code and a one-line message (may be empty)."""

    code: int
    message: str = ""


def run(plan: Plan, supervisor: Supervisor, environment: Mapping[str, str]) -> Outcome:
    """Starts pservers, then workers, and waits until the workers have ended or one process has failed."""
    name = plan.script if plan.is_module else Path(plan.script).stem
    job = Job.named(name, plan.workers, plan.token_file)

    addresses: dict[int, str] = {}

    def start_pserver(index: int) -> Process:
        def on_line(line: str) -> None:
            if ready := _READY.fullmatch(line):
                addresses[index] = ready["address"]

        return supervisor.start(pserver_command(plan, index, job, environment), on_line=on_line)

    pservers = [start_pserver(index) for index in range(plan.pservers)]
    started = supervisor.wait(
        lambda: len(addresses) == len(pservers) or any(pserver.ended for pserver in pservers), START_S
    )
    for index, pserver in enumerate(pservers):
        if pserver.ended:
            said = f": {pserver.tail[-1]}" if pserver.tail else ""
            message = f"{pserver.command.name} did not start, it {pserver.describe_end()}{said}"
            return Outcome(exit_code(pserver.code or 1), message)
        if not started and index not in addresses:
            return Outcome(1, f"{pserver.command.name} was not ready within {START_S:g} s")

    job = job.at([addresses[index] for index in range(plan.pservers)])
    workers = [
        # Rank 0 shows the progress bar, so it gets a terminal if there is one.
        supervisor.start(worker_command(plan, rank, job, environment), terminal=rank == 0)
        for rank in range(plan.workers)
    ]
    failed: list[Process] = []

    def is_over() -> bool:
        failed[:] = [process for process in workers if process.ended and process.code != 0]
        failed.extend(pserver for pserver in pservers if pserver.ended)
        return bool(failed) or all(worker.ended for worker in workers)

    supervisor.wait(is_over)
    if not failed:
        return Outcome(0)
    # Of several at once, one killed by a signal is the likelier cause: the others report its loss.
    first = min(failed, key=lambda process: (process.code or 0) >= 0)
    # Lets the others report what they saw (a stack, whom they waited for) before they are ended.
    supervisor.wait(lambda: all(worker.ended for worker in workers), plan.grace_s)
    too_early = " while workers were still running" if first.code == 0 else ""
    message = f"{first.command.name} {first.describe_end()}{too_early}; all others were ended"
    return Outcome(exit_code(first.code or 1), message)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `tfps_launch`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--kubernetes"]:
        from tfps.launch import kubernetes

        return kubernetes.main(argv[1:])
    plan = parse(argv)
    if sys.platform == "win32":
        print("tfps_launch: needs Linux or macOS; start tfps_pserver and the workers by hand", file=sys.stderr)
        return 1
    from tfps.launch.supervisor import Interrupted, Supervisor
    from tfps.launch.terminal import Console

    outcome: Outcome
    with ExitStack() as stack:
        try:
            check_script(plan)
            log = stack.enter_context(Path(plan.log).open("wb")) if plan.log else None
        except (ConfigError, OSError) as error:
            print(f"tfps_launch: {error}", file=sys.stderr)
            return 2
        try:
            plan = stack.enter_context(with_token(plan, os.environ))
            with Supervisor(Console(sys.stdout, sys.stderr, log), plan.grace_s) as supervisor:
                outcome = run(plan, supervisor, os.environ)
        except Interrupted as interrupted:
            outcome = Outcome(128 + interrupted.number, f"{interrupted}; all processes were ended")
        except BrokenPipeError:
            # The reader is gone (`tfps_launch ... | head`). Keeps Python from complaining when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except OSError as error:
            outcome = Outcome(1, f"cannot start a process: {error}")
    if outcome.message:
        print(f"tfps_launch: {outcome.message}", file=sys.stderr)
    return outcome.code
