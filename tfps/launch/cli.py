"""`tfps_launch`: runs a training script as several workers with several pservers, here or on several hosts."""

from __future__ import annotations

import importlib.machinery
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tfps.errors import ConfigError
from tfps.launch.job import LOOPBACK, READY, START_S, Job, LocalRank, Placement, secret_file
from tfps.launch.options import Plan, parse

if TYPE_CHECKING:
    from tfps.launch.engine import Engine, Task
    from tfps.launch.supervisor import Process, Supervisor

_WORKER_COLOURS = (32, 36, 34, 33)
_PSERVER_COLOUR = 35
_LOGINS = 8  # on their way to a host at a time: of more than 10 sshd refuses some (MaxStartups)


def check_script(plan: Plan) -> None:
    """Refuses a script or module that is not there, before anything is started."""
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
    """The plan with the file of a job token. One that is made here only its user can read; it goes with the job."""
    if known := plan.token_file or environment.get("TFPS_TOKEN_FILE", "").strip():
        yield replace(plan, token_file=known)
        return
    with secret_file(secrets.token_urlsafe(32)) as path:
        yield replace(plan, token_file=path)


def worker_task(plan: Plan, rank: int, job: Job, local_rank: LocalRank) -> Task:
    """What runs as one worker."""
    from tfps.launch.engine import Task

    program = ["-m", plan.script] if plan.is_module else [plan.script]
    colour = _WORKER_COLOURS[rank % len(_WORKER_COLOURS)]
    argv = (sys.executable, *program, *plan.args)
    variables = {**job.worker_variables(rank), **plan.trace_variables}
    return Task(f"worker {rank}", argv, variables, colour, local_rank)


def pserver_task(plan: Plan, index: int, job: Job, host: str) -> Task:
    """What runs as one pserver, on a free port of `host`, with metrics on a predictable one."""
    from tfps.launch.engine import Task

    metrics_port = plan.metrics_port and plan.metrics_port + index
    # What becomes of the job its workers and the launcher say.
    argv = (
        sys.executable,
        "-m",
        "tfps.pserver.cli",
        *job.pserver_arguments(host, metrics_port=metrics_port),
        "--quiet",
    )
    return Task(f"pserver {index}", argv, job.pserver_variables(), _PSERVER_COLOUR)


def engine_of(plan: Plan, environment: Mapping[str, str]) -> Engine:
    """What starts the processes of `plan`."""
    from tfps.launch.engine import Local, Slurm, Ssh, allocated

    hosts = allocated(environment) if plan.slurm else plan.hosts
    chosen = plan.chosen(environment)
    if not hosts or (not plan.slurm and hosts[0].name in LOOPBACK):
        pservers = plan.pservers_per_host if hosts else plan.pservers
        return Local(Placement(("localhost",) * plan.workers, ("localhost",) * pservers), environment, chosen=chosen)
    placement = Placement.of(hosts, plan.pservers_per_host)
    try:
        token = Path(plan.token_file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"token file {plan.token_file} cannot be read: {error}") from None
    options = placement, environment, _directory(environment), token, plan.grace_s
    if plan.slurm:
        return Slurm(*options, chosen=chosen)
    return Ssh(*options, tuple(shlex.split(plan.ssh)), chosen=chosen)


def _directory(environment: Mapping[str, str]) -> str:
    """The working directory as the user's shell calls it: an automounter's real name may be another on each host."""
    shown = environment.get("PWD", "")
    with suppress(OSError):
        if Path(shown).is_absolute() and Path(shown).samefile(Path.cwd()):
            return shown
    return str(Path.cwd())


def exit_code(code: int) -> int:
    """The exit code a shell would report: 128 + N after signal N."""
    return 128 - code if code < 0 else code


@dataclass(frozen=True)
class Outcome:
    """The launcher's exit code and a one-line message (may be empty)."""

    code: int
    message: str = ""


def run(plan: Plan, supervisor: Supervisor, engine: Engine) -> Outcome:
    """Starts pservers, then workers, and waits until the workers have ended or one process has failed."""
    from tfps.launch.engine import Local

    is_local = isinstance(engine, Local)
    name = plan.script if plan.is_module else Path(plan.script).stem
    place = engine.placement
    # On other hosts a process gets the token itself, and a file there.
    job = Job.named(name, len(place.workers), plan.token_file if is_local else "")

    addresses: dict[int, str] = {}
    logging_in: dict[str, list[Process]] = {}

    def start(
        host: str, task: Task, *, terminal: bool = False, on_line: Callable[[str], None] | None = None
    ) -> Process:
        """Starts a task when fewer than `_LOGINS` are on their way to its host."""
        before = logging_in.setdefault(host, [])
        supervisor.wait(lambda: sum(not (each.answered or each.ended) for each in before) < _LOGINS, START_S)
        before.append(supervisor.start(engine.on(host, task), terminal=terminal, on_line=on_line))
        return before[-1]

    def start_pserver(index: int, host: str) -> Process:
        def on_line(line: str) -> None:
            if ready := READY.fullmatch(line):
                addresses[index] = engine.reached_at(host, ready["address"])

        return start(host, pserver_task(plan, index, job, engine.listens_at(host)), on_line=on_line)

    pservers = [start_pserver(index, host) for index, host in enumerate(place.pservers)]
    supervisor.wait(lambda: len(addresses) == len(pservers) or any(pserver.ended for pserver in pservers), START_S)
    for pserver in pservers:
        if pserver.ended:
            said = f": {pserver.tail[-1]}" if pserver.tail else ""
            message = (
                f"{pserver.command.title} did not start, it {pserver.describe_end()}{said}{_explain(pserver, engine)}"
            )
            return Outcome(exit_code(pserver.code or 1), message)
    if late := [pserver for index, pserver in enumerate(pservers) if index not in addresses]:
        return Outcome(1, _describe_late(late))

    for line in hints(plan, place):
        print(f"tfps_launch: {line}", file=sys.stderr, flush=True)
    job = job.at([addresses[index] for index in range(len(pservers))])
    workers = [
        # Rank 0 shows the progress bar, so it gets a terminal if there is one. On another host there is none.
        start(host, worker_task(plan, rank, job, place.local_rank(rank)), terminal=rank == 0 and is_local)
        for rank, host in enumerate(place.workers)
    ]
    failed: list[Process] = []

    def is_over() -> bool:
        failed[:] = [process for process in workers if process.ended and process.code != 0]
        failed.extend(pserver for pserver in pservers if pserver.ended)
        return bool(failed) or all(worker.ended for worker in workers)

    supervisor.wait(lambda: is_over() or all(worker.answered for worker in workers), START_S)
    if late := [worker for worker in workers if not (worker.answered or worker.ended or failed)]:
        return Outcome(1, _describe_late(late))
    supervisor.wait(is_over)
    if not failed:
        return Outcome(0)
    # Of several at once, one killed by a signal is the likelier cause: the others report its loss.
    first = min(failed, key=lambda process: (process.code or 0) >= 0)
    # Lets the others report what they saw (a stack, whom they waited for) before they are ended.
    supervisor.wait(lambda: all(worker.ended for worker in workers), plan.grace_s)
    too_early = " while workers were still running" if first.code == 0 else ""
    message = f"{first.command.title} {first.describe_end()}{_explain(first, engine)}{too_early}; all others were ended"
    return Outcome(exit_code(first.code or 1), message)


def hints(plan: Plan, place: Placement) -> list[str]:
    """Where to look at a job with a logdir while it runs: a command that can be pasted, and addresses.

    With metrics on port 0 only the pservers know where, and say so themselves.
    """
    if plan.logdir is None:
        return []

    def elsewhere(host: str, text: str) -> str:
        return "" if host in LOOPBACK else text.format(host)

    # Rank 0 writes, on its host.
    lines = [f"tensorboard --logdir {shlex.quote(plan.logdir)}{elsewhere(place.workers[0], '  # on {}')}"]
    if plan.metrics_port:
        urls = [
            f"http://127.0.0.1:{plan.metrics_port + index}/metrics{elsewhere(host, ' (on {})')}"
            for index, host in enumerate(place.pservers)
        ]
        lines.append(f"metrics at {' '.join(urls)}")
    return lines


def _explain(process: Process, engine: Engine) -> str:
    """In brackets, what its host needs; "" if the process ran."""
    why = engine.explain(process.command.host, process.code or 0, process.answered)
    return f" ({why})" if why else ""


def _describe_late(late: Sequence[Process]) -> str:
    """Which have not started in time."""
    names = ", ".join(process.command.title for process in late)
    host = next((process.command.host for process in late if not process.answered), "")
    return f"{names}: not ready within {START_S:g} s{f'; {host} has not answered' if host else ''}"


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
    from tfps.launch.engine import SILENCE_S, is_note, wants_notes
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
        shown = [] if wants_notes([*os.environ, *plan.variables]) else [is_note]
        supervisor = Supervisor(Console(sys.stdout, sys.stderr, log, *shown), plan.grace_s)
        try:
            plan = stack.enter_context(with_token(plan, os.environ))
            with supervisor:
                outcome = run(plan, supervisor, engine_of(plan, os.environ))
        except ConfigError as error:
            outcome = Outcome(2, str(error))
        except Interrupted as interrupted:
            outcome = Outcome(128 + interrupted.number, f"{interrupted}; all processes were ended")
        except BrokenPipeError:
            # The reader is gone (`tfps_launch ... | head`). Keeps Python from complaining when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except OSError as error:
            outcome = Outcome(1, f"cannot start a process: {error}")
        if supervisor.unheard:
            names = ", ".join(process.command.title for process in supervisor.unheard)
            print(
                f"tfps_launch: {names}: no answer; a host ends by itself within {SILENCE_S:g} s what it runs for a "
                "launcher that it does not hear",
                file=sys.stderr,
            )
    if outcome.message:
        print(f"tfps_launch: {outcome.message}", file=sys.stderr)
    return outcome.code
