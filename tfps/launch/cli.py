"""`tfps_launch`: runs a training script as several workers with several pservers, here or on several hosts."""

from __future__ import annotations

import argparse
import importlib.machinery
import math
import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tfps import __version__
from tfps.config import check_address
from tfps.errors import REFUSED, ConfigError, JoinError
from tfps.launch.job import LOOPBACK, READY, START_S, TOLD, Host, Job, Placement, Task, parse_hosts, secret_file

if TYPE_CHECKING:
    from tfps.launch.engine import Engine
    from tfps.launch.supervisor import Process, Supervisor

_WORKER_COLOURS = (32, 36, 34, 33)
_PSERVER_COLOUR = 35
_LOGINS = 8  # on their way to a host at a time: of more than 10 sshd refuses some (MaxStartups)
_PORTS = 65536
_FIRST, _LAST = 10, 20  # steps to record: until then TensorFlow traces the model and slice sizes are tuned


@dataclass(frozen=True)
class Plan:
    """What to start. With `hosts` or `slurm` (those of the allocation), these say how many workers there are."""

    script: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    workers: int = 1
    pservers: int = 1
    min_workers: int | None = None  # with which the job goes on when others are lost; None: it needs all
    max_workers: int | None = None  # how many may take part, those that join a job under way included; None: `workers`
    join: tuple[str, tuple[str, ...]] | None = None  # the job, by its name and pservers, that the workers join
    restart: int = 0  # how often each worker that is lost is started again
    grace_s: float = 5.0
    log: str | None = None
    metrics_port: int | None = None  # of pserver 0, others count up from it; 0 picks free ports
    token_file: str = ""  # "": a token is made for the job
    hosts: tuple[Host, ...] = ()
    slurm: bool = False
    pservers_per_host: int = 1
    ssh: str = "ssh"
    logdir: str | None = None  # where some steps are recorded for TensorBoard
    variables: tuple[str, ...] = ()  # NAME or NAME=VALUE, which all processes get

    def __post_init__(self) -> None:
        for name in ("workers", "pservers", "pservers_per_host"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} must be at least 1, got {getattr(self, name)}")
        pservers = len(self.hosts) * self.pservers_per_host or self.pservers
        if self.join is None:
            self.check_number(max(self.workers, self.min_workers or 1) if self.slurm else self.workers)
        elif self.max_workers is None:
            raise ConfigError("--join needs the options --min-workers and --max-workers that the job was started with")
        if self.restart < 0:
            raise ConfigError(f"--restart must be at least 0, got {self.restart}")
        if self.restart and self.min_workers is None:
            raise ConfigError(
                f"--restart needs --min-workers, with how many workers the others go on meanwhile; got --restart "
                f"{self.restart} alone"
            )
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

    def check_number(self, workers: int) -> None:
        """Raises ConfigError if so many workers cannot be as few as `min_workers` or as many as `max_workers`."""
        where = "tasks of the allocation" if self.slurm else "--workers"
        if self.min_workers is not None and not 1 <= self.min_workers <= workers:
            raise ConfigError(f"--min-workers must be from 1 to {workers} ({where}), got {self.min_workers}")
        if self.max_workers is not None and (self.min_workers is None or self.max_workers < workers):
            raise ConfigError(
                f"--max-workers must be at least {workers} ({where}) and needs --min-workers, got {self.max_workers} "
                f"with --min-workers {self.min_workers}"
            )

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
    def elastic_variables(self) -> dict[str, str]:
        """The variables by which workers go on without others or with more; they win over inherited ones."""
        numbers = {"TFPS_MIN_WORKERS": self.min_workers, "TFPS_MAX_WORKERS": self.max_workers}
        return {name: str(number) for name, number in numbers.items() if number is not None}

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
        "tfps_launch. With --min-workers the others go on without a worker that fails.",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {__version__}")
    add("--workers", type=int, metavar="N", help="processes that run the script (default 1)")
    add("--pservers", type=int, metavar="N", help="pserver processes (default 1)")
    text = "go on when workers are lost, with no fewer than N (default: if one fails, all are ended)"
    add("--min-workers", type=int, metavar="N", help=text)
    text = "with --min-workers: start each worker and pserver that is lost again, up to N times; it joins the others"
    add("--restart", type=int, metavar="N", help=text)
    text = "with --min-workers: let more workers join while the job trains, up to N in all; --join starts them"
    add("--max-workers", type=int, metavar="N", help=text)
    text = "start workers, and no pservers, that join a job under way, as its launcher says at its start"
    add("--join", type=_job_and_pservers, metavar="JOB@HOST:PORT,...", help=text)
    place = parser.add_mutually_exclusive_group()
    text = "run N workers on each of these hosts, reached by ssh, by the names under which they reach each other"
    place.add_argument("--hosts", metavar="HOST:N,...", help=text)
    text = "run a worker for each task of this Slurm allocation, on its nodes"
    place.add_argument("--slurm", action="store_true", help=text)
    text = "with --hosts or --slurm: pserver processes on each host (default 1)"
    add("--pservers-per-host", type=int, metavar="N", help=text)
    text = "with --hosts: the command that reaches a host, with its options (default: ssh)"
    add("--ssh", metavar="COMMAND", help=text)
    add(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="pserver 0 serves Prometheus metrics and /healthz on this port of 127.0.0.1, pserver 1 on the next, ...; "
        "0 picks free ones (default: do not)",
    )
    text = "file with the job token of pservers and workers (default: TFPS_TOKEN_FILE, else one is made for the job)"
    add("--token-file", default="", metavar="FILE", help=text)
    add(
        "--logdir",
        metavar="DIR",
        help=f"record the training steps {_FIRST} to {_LAST} for TensorBoard in this directory, as "
        f"TFPS_TRACE=DIR:{_FIRST}-{_LAST} does, and say where to look",
    )
    add(
        *("-x", "--env"),
        action="append",
        default=[],
        dest="variables",
        metavar="NAME[=VALUE]",
        help="an environment variable of all processes, on all hosts; may be repeated (TFPS_*, TF_*, KERAS_* and "
        "PYTHON* go along by themselves)",
    )
    add("--log", metavar="FILE", help="also write all output to this file, without colours")
    add(
        "--grace",
        dest="grace_s",
        type=float,
        default=Plan.grace_s,
        metavar="SECONDS",
        help="how long other workers may go on after one has failed, and how long a process may take to end when told "
        "to (default %(default)g)",
    )
    add("--kubernetes", action="store_true", help="write manifests instead; comes first, has its own --help")
    add("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    add("command", nargs=argparse.REMAINDER, metavar="script.py [args ...]", help="what to run")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    command = given.pop("command")
    command = command[1:] if command[:1] == ["--"] else command
    if given.pop("kubernetes"):
        parser.error("--kubernetes must be the first option: tfps_launch --kubernetes --print ... script.py")
    if not command:
        parser.error("what to run is missing: tfps_launch --workers 2 --pservers 2 script.py")
    try:
        several = "--hosts" if "hosts" in given else "--slurm" if given["slurm"] else ""
        if several and "workers" in given:
            instead = "--hosts a:4,b:4 says how many workers each host gets"
            if given["slurm"]:
                instead = "the allocation's tasks are the workers"
            raise ConfigError(f"--workers does not go with {several}: {instead}")
        if several and "pservers" in given:
            raise ConfigError(f"--pservers does not go with {several}: use --pservers-per-host")
        if "join" in given:
            _check_joining(given)
        if "pservers_per_host" in given and not several:
            raise ConfigError("--pservers-per-host needs --hosts or --slurm; on this machine alone use --pservers")
        if "ssh" in given and "hosts" not in given:
            raise ConfigError("--ssh needs --hosts")
        if "hosts" in given:
            given["hosts"] = parse_hosts(given["hosts"])
            given["workers"] = sum(host.workers for host in given["hosts"])
        given["variables"] = tuple(given["variables"])
        return Plan(command[0], tuple(command[1:]), **given)
    except ConfigError as error:
        parser.error(str(error))


def _job_and_pservers(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, addresses = text.rpartition("@")
    try:
        return name, tuple(map(check_address, addresses.split(",")))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"must be JOB@HOST:PORT,... ({error}), got {text!r}") from None


def _check_joining(given: Mapping[str, object]) -> None:
    """Raises ConfigError for options of pservers, which a job under way has already."""
    for name in ("pservers", "pservers_per_host", "metrics_port", "logdir"):
        if name in given:
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --join: the job has its pservers already")


def check_script(plan: Plan) -> None:
    """Refuses a script or module that is not there, before anything is started."""
    if not plan.is_module:
        path = Path(plan.script)
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise ConfigError(f"script {plan.script} is a directory without a __main__.py")
        if not path.exists():
            if re.fullmatch(r"python[\d.]*", path.name):
                rest = " ".join(plan.args) or "script.py"
                raise ConfigError(f"leave out {plan.script!r}: tfps_launch runs the script by itself, as in {rest}")
            raise ConfigError(f"script not found: {plan.script} (in {Path.cwd()})")
        return
    # Only the outermost package is looked for: to find a submodule Python would have to import, and run, its package.
    outermost = plan.script.partition(".")[0]
    known = outermost in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(
        outermost, [str(Path.cwd()), *sys.path]
    )
    if not known:
        raise ConfigError(f"module not found: {plan.script}")


def engine_of(plan: Plan, environment: Mapping[str, str]) -> Engine:
    """What starts the processes of `plan`."""
    from tfps.launch.engine import Engine, Slurm, Ssh, allocated

    hosts = allocated(environment) if plan.slurm else plan.hosts
    chosen = plan.chosen(environment)
    if not hosts or (not plan.slurm and hosts[0].name in LOOPBACK):
        pservers = 0 if plan.join else plan.pservers_per_host if hosts else plan.pservers
        return Engine(Placement(("localhost",) * plan.workers, ("localhost",) * pservers), environment, chosen=chosen)
    try:
        token = Path(plan.token_file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"token file {plan.token_file} cannot be read: {error}") from None
    directory = str(Path.cwd())
    shown = Path(environment.get("PWD", ""))
    with suppress(OSError):
        if shown.is_absolute() and shown.samefile(directory):
            directory = str(shown)  # as the user's shell calls it: an automounter's real name may differ between hosts
    pservers = 0 if plan.join else plan.pservers_per_host
    options = Placement.of(hosts, pservers), environment, directory, token, plan.grace_s
    if plan.slurm:
        if plan.join is None:
            plan.check_number(len(options[0].workers))
        return Slurm(*options, chosen=chosen)
    return Ssh(*options, tuple(shlex.split(plan.ssh)), chosen=chosen)


def misplaced(plan: Plan) -> str:
    """Says which options after the script are those of tfps_launch by name; the script gets them. "": none."""
    found = [
        arg
        for arg in plan.args
        if arg.partition("=")[0] in ("--workers", "--pservers", "--min-workers", "--max-workers", "--join")
    ]
    if not found:
        return ""
    return (
        f"{', '.join(found)} after the script is the script's: options of tfps_launch come before it, as in "
        f"tfps_launch --workers 2 {plan.script}"
    )


def exit_code(code: int) -> int:
    """The exit code a shell would report: 128 + N after signal N."""
    return 128 - code if code < 0 else code


def run(plan: Plan, supervisor: Supervisor, engine: Engine) -> tuple[int, str]:
    """Starts pservers, then workers, and waits until these have ended or one process has failed; exit code and why."""
    name = plan.script if plan.is_module else Path(plan.script).stem
    place = engine.placement
    # On other hosts a process gets the token itself, and a file there.
    token_file = "" if engine.is_remote else plan.token_file
    job = Job.named(name, len(place.workers), token_file)
    if plan.join is not None:
        job = Job(plan.join[0], None, plan.join[1], token_file)

    addresses: dict[int, str] = {}
    job_is: dict[int, str] = {}  # what each pserver that runs has said last of the job: see TOLD
    apart = set[int]()  # ranks that were started again and do not take part yet
    logging_in: dict[str, list[Process]] = {}

    def start(
        host: str, task: Task, *, terminal: bool = False, on_line: Callable[[str], None] | None = None
    ) -> Process:
        """Starts a task when fewer than `_LOGINS` are on their way to its host."""
        before = logging_in.setdefault(host, [])
        supervisor.wait(lambda: sum(not (each.answered or each.ended) for each in before) < _LOGINS, START_S)
        before.append(supervisor.start(engine.on(host, task), terminal=terminal, on_line=on_line))
        return before[-1]

    def start_pserver(index: int, host: str, join: str = "") -> Process:
        def on_line(line: str) -> None:
            if ready := READY.fullmatch(line):
                addresses[index] = engine.reached_at(host, ready["address"])
            if said := TOLD.fullmatch(line):
                if said["job"]:
                    job_is[index] = said["job"]
                else:
                    apart.discard(int(said["worker"]))

        metrics_port = plan.metrics_port and plan.metrics_port + index
        port = int(addresses[index].rpartition(":")[2]) if index in addresses else 0  # it is started again
        arguments = job.pserver_arguments(engine.listens_at(host), port, metrics_port, join)
        if plan.max_workers is not None:  # who has joined from elsewhere may need a moment more than workers here
            arguments += ["--linger", f"{max(plan.grace_s - 1, 0):g}"]
        # What becomes of the job its workers and the launcher say.
        argv = (sys.executable, "-m", "tfps.pserver.cli", *arguments, "--quiet", "--tell")
        return start(host, Task(f"pserver {index}", argv, job.pserver_variables(), _PSERVER_COLOUR), on_line=on_line)

    def start_worker(rank: int, host: str) -> Process:
        argv = (sys.executable, *(["-m"] if plan.is_module else []), plan.script, *plan.args)
        own = job.worker_variables(None if plan.join else rank)  # who joins gets a free number
        variables = {**own, **plan.trace_variables, **plan.elastic_variables}
        colour = _WORKER_COLOURS[rank % len(_WORKER_COLOURS)]
        task = Task(f"worker {rank}", argv, variables, colour, place.local_rank(rank))
        # Rank 0 shows the progress bar, so it gets a terminal if there is one. On another host there is none.
        return start(host, task, terminal=rank == 0 and not engine.is_remote)

    def why_refused(process: Process) -> str:
        """What a worker has said that could not join the others; "": it is none."""
        if process.code != REFUSED:
            return ""
        said = (line.partition(f"{JoinError.__name__}: ")[2] for line in reversed(process.tail))
        return f": {next(filter(None, said), 'it cannot join the others')}; started again, it would be refused again"

    def explain(process: Process) -> str:
        """In brackets, what its host needs; "" if the process ran."""
        why = engine.explain(process.command.host, process.code or 0, process.answered)
        return f" ({why})" if why else ""

    def not_ready(late: Sequence[Process]) -> tuple[int, str]:
        names = ", ".join(process.command.title for process in late)
        host = next((process.command.host for process in late if not process.answered), "")
        return 1, f"{names}: not ready within {START_S:g} s{f'; {host} has not answered' if host else ''}"

    pservers = [start_pserver(index, host) for index, host in enumerate(place.pservers)]
    supervisor.last = pservers  # workers that leave still talk to them
    supervisor.wait(lambda: len(addresses) == len(pservers) or any(pserver.ended for pserver in pservers), START_S)
    for pserver in pservers:
        if pserver.ended:
            said = f": {pserver.tail[-1]}" if pserver.tail else ""
            end = f"{pserver.command.title} did not start, it {pserver.describe_end()}{said}"
            return exit_code(pserver.code or 1), end + explain(pserver)
    if late := [pserver for index, pserver in enumerate(pservers) if index not in addresses]:
        return not_ready(late)

    started = f"starts {len(place.workers)} worker{'s' * (len(place.workers) > 1)}"
    if plan.join is None:
        job = job.at([addresses[index] for index in range(len(pservers))])
    for line in [started, *how_to_join(plan, place, job), *hints(plan, place)]:
        supervisor.say(line)
    workers = [start_worker(rank, host) for rank, host in enumerate(place.workers)]
    first_workers = list(workers)
    begun = False  # whether the job has, as a pserver has said
    failed: list[Process] = []
    waiting: list[Process] = []  # that are to start again
    lost: list[Process] = []  # that have failed and did not end the job
    restarts = {process.command.name: plan.restart for process in (*workers, *pservers)}  # that are left

    def lose(process: Process, again: bool, otherwise: str) -> None:
        """Starts a process again, if it may be; else the others go on without it."""
        name, then = process.command.name, otherwise
        if again and restarts[name]:
            restarts[name] -= 1
            waiting.append(process)
            then = f"it starts again (restarts left: {restarts[name]})"
        end = f"{process.describe_end()}{why_refused(process)}{explain(process)}"
        supervisor.say(f"{process.command.title} {end}; {then}")
        lost.append(process)

    def was_last(worker: Process) -> bool:
        """Whether the job is over with a worker that has failed: one that is started again would begin it anew."""
        if not begun:
            return all(each.ended for each in first_workers)
        if said := set(job_is.values()):
            return "fails" in said and "begins" not in said
        return (worker.code or 0) > 0 and not explain(worker)  # else it may have been lost with all pservers, by itself

    def too_late() -> list[Process]:
        """Who would wait for a job that has ended: all others have ended."""
        running = {rank: worker for rank, worker in enumerate(workers) if not worker.ended}
        said = set(job_is.values())
        over = "ends" in said and "begins" not in said and apart.issuperset(running)
        return list(running.values()) if over else []

    def is_over() -> bool:
        nonlocal begun
        begun = begun or bool(job_is)
        failed[:] = [process for process in workers if process.ended and process.code != 0]
        new = [process for process in failed if process not in lost]
        for process in filter(why_refused, new):
            restarts[process.command.name] = 0
        for_good = sum(restarts[process.command.name] == 0 for process in failed)
        needed = plan.min_workers if plan.join is None else 1  # others of the job are not known here
        if needed is not None and len(workers) - for_good >= needed:
            going = sum(not each.ended for each in workers)
            may_join = "ends" not in job_is.values() and not any(worker.code == 0 for worker in workers)
            failed[:] = filter(was_last, new) if may_join else []
            for process in () if failed else new:
                lose(process, may_join, f"{going} worker{' goes' if going == 1 else 's go'} on")
        others = sum(not each.ended for each in pservers)
        for index, pserver in ((at, each) for at, each in enumerate(pservers) if each.ended and each not in lost):
            if plan.min_workers is None or not (others or restarts[pserver.command.name]):
                failed.append(pserver)
            else:
                job_is.pop(index, None)
                lose(pserver, True, f"workers go on with {others} other{'s' * (others > 1)}")
        return bool(failed) or all(worker.ended for worker in workers)

    supervisor.wait(lambda: is_over() or all(worker.answered for worker in workers), START_S)
    if late := [worker for worker in workers if not (worker.answered or worker.ended or failed)]:
        return not_ready(late)
    while True:
        supervisor.wait(lambda: is_over() or bool(waiting or too_late()))
        for worker in () if failed else too_late():
            supervisor.say(f"{worker.command.title} came too late: the job has ended")
            lost.append(worker)
            supervisor.end([worker])
        if not waiting:
            break
        for index, pserver in enumerate(pservers):
            if pserver in waiting:
                others = [addresses[other] for other, each in enumerate(pservers) if not each.ended]
                pservers[index] = start_pserver(index, place.pservers[index], next(iter(others), ""))
        for rank, worker in enumerate(workers):
            if worker in waiting:
                workers[rank] = start_worker(rank, place.workers[rank])
                apart.add(rank)
        waiting.clear()
    if not failed:
        well = sum(worker.code == 0 for worker in workers)
        supervisor.say(f"{'all' if well == len(workers) else f'{well} of {len(workers)}'} workers ended well")
        return 0, ""
    # Of several at once, one killed by a signal is the likelier cause: the others report its loss.
    first = min(failed, key=lambda process: (process.code or 0) >= 0)
    # Lets the others report what they saw (a stack, whom they waited for) before they are ended.
    supervisor.wait(lambda: all(worker.ended for worker in workers), plan.grace_s)
    too_early = " while workers were still running" if first.code == 0 else ""
    anew = "; the job is over, and is not begun anew" if plan.restart else ""
    end = f"{first.command.title} {first.describe_end()}{explain(first)}{too_early}{anew}; all others were ended"
    return exit_code(first.code or 1), end


def how_to_join(plan: Plan, place: Placement, job: Job) -> list[str]:
    """The command that starts more workers, to be pasted, if there may be more."""
    if plan.join is not None or plan.max_workers in (None, len(place.workers)):
        return []
    options = ["--join", f"{job.name}@{','.join(job.pservers)}", "--token-file", plan.token_file]
    numbers = ["--min-workers", f"{plan.min_workers}", "--max-workers", f"{plan.max_workers}"]
    script = [*(["-m"] if plan.is_module else []), plan.script, *plan.args]
    return [f"more workers join by {shlex.join(['tfps_launch', '--workers', '1', *options, *numbers, *script])}"]


def hints(plan: Plan, place: Placement) -> list[str]:
    """Where to look at a job with a logdir while it runs: a command that can be pasted, and addresses."""
    if plan.logdir is None:
        return []

    def elsewhere(host: str, text: str) -> str:
        return "" if host in LOOPBACK else text.format(host)

    # Rank 0 writes, on its host.
    lines = [f"tensorboard --logdir {shlex.quote(plan.logdir)}{elsewhere(place.workers[0], '  # on {}')}"]
    if plan.metrics_port:  # with port 0 only the pservers know where, and say so themselves
        urls = [
            f"http://127.0.0.1:{plan.metrics_port + index}/metrics{elsewhere(host, ' (on {})')}"
            for index, host in enumerate(place.pservers)
        ]
        lines.append(f"metrics at {' '.join(urls)}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `tfps_launch`; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--kubernetes"]:
        from tfps.launch import kubernetes

        sys.stdout.write(kubernetes.as_yaml(kubernetes.parse(argv[1:]), argv[1:]))
        return 0
    plan = parse(argv)
    if sys.platform == "win32":
        print("tfps_launch: needs Linux or macOS; start tfps_pserver and the workers by hand", file=sys.stderr)
        return 1
    from tfps.launch.engine import LOG_LEVEL, NOTE, SILENCE_S, wants_notes
    from tfps.launch.supervisor import Interrupted, Supervisor
    from tfps.launch.terminal import Console

    with ExitStack() as stack:
        try:
            check_script(plan)
            log = stack.enter_context(Path(plan.log).open("wb")) if plan.log else None
        except (ConfigError, OSError) as error:
            print(f"tfps_launch: {error}", file=sys.stderr)
            return 2
        given = dict(each.split("=", 1) for each in plan.variables if "=" in each)
        shown = wants_notes({**os.environ, **given}.get(LOG_LEVEL))
        hidden = [TOLD.fullmatch, *([] if shown else [NOTE.match])]
        console = Console(sys.stdout, sys.stderr, log, lambda line: any(each(line) for each in hidden))
        supervisor = Supervisor(console, plan.grace_s)
        try:
            token_file = plan.token_file or os.environ.get("TFPS_TOKEN_FILE", "").strip()
            if not token_file:  # only this user can read one that is made here, and it goes with the job
                token_file = stack.enter_context(secret_file(secrets.token_urlsafe(32)))
            plan = replace(plan, token_file=token_file)
            if said := misplaced(plan):
                console.say(said)
            with supervisor:
                code, message = run(plan, supervisor, engine_of(plan, os.environ))
        except ConfigError as error:
            code, message = 2, str(error)
        except Interrupted as interrupted:
            code, message = 128 + interrupted.number, f"{interrupted}; all processes were ended"
        except BrokenPipeError:
            # The reader is gone (`tfps_launch ... | head`). Keeps Python from complaining when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except OSError as error:
            code, message = 1, f"cannot start a process: {error}"
        if supervisor.unheard:
            names = ", ".join(process.command.title for process in supervisor.unheard)
            console.say(
                f"{names}: no answer; a host ends by itself within {SILENCE_S:g} s what it runs for a launcher that it "
                "does not hear"
            )
        if message:
            console.say(message)
    return code
