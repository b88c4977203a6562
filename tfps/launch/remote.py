"""`python -m tfps.launch.remote`: runs one process of a job on a host, for a launcher on another.

Its standard input says what to run, in one line of JSON, and then that the launcher lives.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from tfps import __version__
from tfps.launch.job import LocalRank, secret_file
from tfps.launch.supervisor import HELLO, KILL_S, end_with_parent, signal_group

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NAME = r"[0-9]+|(GPU|MIG)-\S+"
_LINE = re.compile(r"(?P<indent>\s*)(?:GPU|MIG) .*\(UUID:\s*(?P<uuid>(?:GPU|MIG)-[^)\s]+)\)")
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_ASK_S = 20.0  # nvidia-smi starts slowly where the driver is not kept loaded


def share_of_gpus(environment: Mapping[str, str], local_rank: LocalRank | None) -> dict[str, str]:
    """Returns the variables that limit a worker to its share of the GPUs that `environment` leaves it, if any."""
    if local_rank is None or local_rank.workers == 1 or not (visible := visible_gpus(environment)):
        return {}
    variables = {_VARIABLE: ",".join(share(visible, *local_rank))}
    if len(visible) < local_rank.workers and _GROWTH not in environment:
        variables[_GROWTH] = "true"  # else the first of those that share a GPU would take all of its memory
    return variables


def share(gpus: Sequence[str], index: int, count: int) -> Sequence[str]:
    """Returns the GPUs of worker `index` of `count`: neighbors, as equal in number as can be, one at least."""
    if len(gpus) < count:  # each is used by several
        return [gpus[index % len(gpus)]]
    return gpus[index * len(gpus) // count : (index + 1) * len(gpus) // count]


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that a program with this environment would see, as CUDA_VISIBLE_DEVICES names them."""
    if (limited := environment.get(_VARIABLE)) is not None:
        names = (name.strip() for name in limited.split(","))
        # As CUDA reads it: what follows a name that stands for nothing is not visible either.
        return list(itertools.takewhile(lambda name: re.fullmatch(_NAME, name), names))
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    return [] if program is None else list(_listed(program))


@functools.cache
def _listed(program: str) -> tuple[str, ...]:
    try:
        return tuple(parse_list(output_of(program, "-L", timeout_s=_ASK_S)))
    except (OSError, subprocess.SubprocessError):
        return ()


def output_of(*argv: str, timeout_s: float) -> str:
    """What a program writes; raises OSError or subprocess.SubprocessError."""
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=True
    ).stdout


def parse_list(text: str) -> list[str]:
    """Returns the devices that `nvidia-smi -L` lists. Of a GPU that is split (MIG) only its parts can be used."""
    found: list[str] = []
    for match in filter(None, map(_LINE.match, text.splitlines())):
        if match["indent"] and found and found[-1].startswith("GPU-"):
            found.pop()
        found.append(match["uuid"])
    return found


_MAX_LINE_BYTES = 4 << 20
_LINE_S = 60  # for what to run to arrive
_DRAIN_S = 5.0  # how long to pass on output after the process has ended: others may hold its pipe
_CANNOT_START = 126  # what a shell reports


@dataclass(frozen=True)
class Request:
    """What to run."""

    argv: tuple[str, ...]
    directory: str
    variables: Mapping[str, str]  # of its environment, besides those of the host
    grace_s: float  # from SIGTERM to SIGKILL, once the launcher asks for the end
    local_rank: LocalRank | None = None  # None: not a worker
    token: str = field(default="", repr=False)  # of the job; the process gets a file that has it
    silence_s: float = 120.0  # without a sign of life for so long, the launcher is gone
    version: str = __version__

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Request:
        """Reads what `line` has written."""
        found = json.loads(line)
        theirs = found.get("version") if isinstance(found, dict) else None
        if theirs != __version__:
            raise ValueError(
                f"this host has tfps {__version__}, but tfps_launch is of tfps {theirs}; install the same on all hosts"
            )
        local_rank = found.pop("local_rank")
        return cls(**{**found, "argv": tuple(found["argv"]), "local_rank": local_rank and LocalRank(*local_rank)})


def main() -> int:
    """Runs the process; returns its exit code, 128 + N after signal N."""
    print(HELLO, flush=True)
    signal.alarm(_LINE_S)  # ends this process if nothing arrives
    line = sys.stdin.buffer.readline(_MAX_LINE_BYTES)
    signal.alarm(0)
    if not line.endswith(b"\n"):
        return _refuse("the connection ended before it had said what to run")
    try:
        request = Request.from_line(line)
    except ValueError as error:
        return _refuse(str(error))
    if not Path(request.directory).is_dir():
        return _refuse(f"this host has no directory {request.directory}; {_EVERY_HOST}")
    with contextlib.ExitStack() as stack:
        variables = {"PYTHONUNBUFFERED": "1", **os.environ, **request.variables}
        if request.token:
            variables["TFPS_TOKEN_FILE"] = stack.enter_context(secret_file(request.token))
        variables.pop("TF_CONFIG", None)  # it would describe another job
        variables |= share_of_gpus(variables, request.local_rank)
        try:
            child = subprocess.Popen(
                request.argv,
                cwd=request.directory,
                env=variables,
                stdin=subprocess.DEVNULL,
                # Passed on by us: what outlives the job with its output open would keep the connection open, too.
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # so that it can be ended with all its children
                preexec_fn=end_with_parent(),
            )
        except OSError as error:
            return _refuse(f"cannot run {request.argv[0]} in {request.directory}: {error}; {_EVERY_HOST}")
        code = _follow(child, request)
    return 128 - code if code < 0 else code


_EVERY_HOST = "every host needs the same program in the same place"


def _refuse(why: str) -> int:
    print(f"tfps_launch: {why}", file=sys.stderr)
    return _CANNOT_START


def _follow(child: subprocess.Popen[bytes], request: Request) -> int:
    """Waits for the end of `child`, and ends it when standard input ends or falls silent, or when told to."""
    outputs = [
        threading.Thread(target=_pass_on, args=args, name="tfps-launch-output", daemon=True)
        for args in ((child.stdout, 1), (child.stderr, 2))
    ]
    wakeup, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # every signal with a handler writes a byte there
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})  # whoever started this may have blocked it
    for thread in outputs:
        thread.start()

    def is_over() -> bool:  # and not reaped yet: until then nobody else gets its number
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    poll = select.poll()
    poll.register(wakeup, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    while not (asked or is_over()) and (ready := poll.poll(request.silence_s * 1000)):
        if not all(os.read(fd, 65536) for fd, _ in ready):
            break
    poll.unregister(sys.stdin.fileno())
    poll.register(sys.stdout.fileno(), 0)  # only errors
    if not is_over():
        signal_group(child.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + request.grace_s
    while not is_over() and (left_s := deadline_s - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1000):
            if fd == wakeup:
                os.read(fd, 65536)
            else:  # nobody reads our output any more
                deadline_s = 0.0
    signal_group(child.pid, signal.SIGKILL)  # it, or what it has left behind
    try:
        code = child.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return _refuse(f"process {child.pid} does not end, although it was killed")
    deadline_s = time.monotonic() + _DRAIN_S
    for thread in outputs:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return code


def _pass_on(source: IO[bytes], target: int) -> None:
    """Copies output until it ends, or until nobody takes it: then `source` is closed, and its writer notices."""
    with source, contextlib.suppress(OSError):
        while data := source.read(65536):
            while data:
                data = data[os.write(target, data) :]


if __name__ == "__main__":
    raise SystemExit(main())
