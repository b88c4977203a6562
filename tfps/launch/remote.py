"""`python -m tfps.launch.remote`: runs one process of a job on a host, for a launcher on another.

Its standard input says what to run, in one line of JSON (arguments and the token stay out of the process list), and
then stays open: when it ends, the launcher has asked for the end, or is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from tfps.launch.gpus import share_of_gpus
from tfps.launch.supervisor import end_with_parent, signal_group

_MAX_LINE_BYTES = 4 << 20
_CANNOT_START = 126  # what a shell reports


@dataclass(frozen=True)
class Request:
    """What to run.

    Args:
        variables: of its environment, besides those of the host.
        among: see `tfps.launch.engine.Task`.
        token: of the job; the process gets a file that has it.
        grace_s: from SIGTERM to SIGKILL, once the launcher asks for the end.
    """

    argv: tuple[str, ...]
    directory: str
    variables: Mapping[str, str]
    grace_s: float
    among: tuple[int, int] | None = None
    token: str = field(default="", repr=False)

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Request:
        """Reads what `line` has written."""
        found = json.loads(line)
        among = found.pop("among")
        return cls(**{**found, "argv": tuple(found["argv"]), "among": tuple(among) if among else None})


def main() -> int:
    """Runs the process; returns its exit code, 128 + N after signal N."""
    line = sys.stdin.buffer.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        print("tfps_launch: the connection ended before it had said what to run", file=sys.stderr)
        return _CANNOT_START
    request = Request.from_line(line)
    with _token_file(request.token) as token_file:
        variables = {"PYTHONUNBUFFERED": "1", **os.environ, **request.variables, **token_file}
        variables.pop("TF_CONFIG", None)  # it would describe another job
        variables |= share_of_gpus(variables, request.among)
        try:
            child = subprocess.Popen(
                request.argv,
                cwd=request.directory,
                env=variables,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that it can be ended with all its children
                preexec_fn=end_with_parent(),
            )
        except OSError as error:
            print(
                f"tfps_launch: cannot run {request.argv[0]} in {request.directory}: {error}; every host needs the same "
                "program in the same place",
                file=sys.stderr,
            )
            return _CANNOT_START
        code = _follow(child, request.grace_s)
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _token_file(token: str) -> Iterator[dict[str, str]]:
    """The variable that names a file with `token`, which only this user can read and which goes with the process."""
    if not token:
        yield {}
        return
    with tempfile.NamedTemporaryFile("w", prefix="tfps-token-") as file:  # with mode 0600
        file.write(token)
        file.flush()
        yield {"TFPS_TOKEN_FILE": file.name}


def _follow(child: subprocess.Popen[bytes], grace_s: float) -> int:
    """Waits for the end of `child`, and ends it when standard input ends or this process is told to."""
    wakeup, wake = os.pipe()
    over = threading.Event()

    def reap() -> None:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # until it is reaped nobody else gets its number
        over.set()
        os.write(wake, b"x")

    def asked(number: int, frame: object) -> None:
        os.write(wake, b"x")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, asked)
    threading.Thread(target=reap, name="tfps-launch-reap", daemon=True).start()
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        while not over.is_set():
            if any(key.fd == wakeup or not os.read(key.fd, 65536) for key, _ in selector.select()):
                break
    begun_s = time.monotonic()
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, None)):
        if over.is_set():
            break
        signal_group(child.pid, number)
        over.wait(limit_s if limit_s is None else max(0.0, begun_s + limit_s - time.monotonic()))
    signal_group(child.pid, signal.SIGKILL)  # what it has left behind
    return child.wait()


if __name__ == "__main__":
    raise SystemExit(main())
