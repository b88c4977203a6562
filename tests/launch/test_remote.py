"""What runs a process for a launcher on another host, here on this one: pipes stand for the connection."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs
import launching
import psutil
import pytest

from tfps.launch.remote import Request
from tfps.launch.supervisor import HELLO
from tfps.types import Argument

pytestmark = launching.NEEDS_POSIX

Begin = Callable[..., "Connection"]
WAIT = "print('ready'); signal.pause()"


class Connection:
    """One run of it, of Python code in the directory `where`."""

    def __init__(self, code: str, where: Path, options: dict[str, Argument]) -> None:
        argv = options.pop("argv", (sys.executable, "-c", f"import os, signal, subprocess, sys\n{code}"))
        fields = {"directory": str(where), "variables": {}, "grace_s": 30.0, **options}
        self.line = Request(tuple(argv), **fields).line()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tfps.launch.remote"],
            env=launching.environment(TF_CONFIG="{}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )

    def send(self) -> Connection:
        assert self.popen.stdin is not None
        self.popen.stdin.write(self.line)
        return self

    def wait_ready(self) -> list[psutil.Process]:
        """What it has started, once that is ready."""
        assert self.popen.stdout is not None
        output = b""
        while not output.endswith(b"ready\n"):
            piece = self.popen.stdout.read(1000)
            assert piece, self.popen.stderr and self.popen.stderr.read()
            output += piece
        return psutil.Process(self.popen.pid).children(recursive=True)

    def hang_up(self) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.stdin = None  # communicate() would flush it

    def end(self) -> tuple[int, str, str]:
        """Exit code and output; the connection stays open meanwhile."""
        stdin, self.popen.stdin = self.popen.stdin, None  # communicate() would close it
        output, errors = self.popen.communicate(timeout=jobs.DEADLINE_S)
        if stdin is not None:
            stdin.close()
        return self.popen.returncode, output.decode(), errors.decode()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    begun: list[Connection] = []

    def start(code: str = "", **options: Argument) -> Connection:
        begun.append(Connection(code, tmp_path, options))
        return begun[-1]

    yield start
    for connection in begun:
        connection.popen.kill()
        connection.popen.wait(jobs.DEADLINE_S)


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=jobs.DEADLINE_S)
    return not [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_it_says_hello_and_passes_on_output_and_exit_code(begin: Begin, tmp_path: Path) -> None:
    code = "print(os.environ['A'], os.getcwd(), 'TF_CONFIG' in os.environ); print('bad', file=sys.stderr); sys.exit(7)"
    ended = begin(code, variables={"A": "b c"}).send().end()
    assert ended == (7, f"{HELLO}\nb c {tmp_path} False\n", "bad\n")


def test_it_reports_a_signal_as_a_shell_does(begin: Begin) -> None:
    assert begin("os.kill(os.getpid(), signal.SIGKILL)").send().end()[0] == 128 + signal.SIGKILL


@pytest.mark.long
def test_much_output_arrives_completely(begin: Begin) -> None:
    _, output, errors = begin("print('x' * 999_999); print('y' * 999_999, file=sys.stderr)").send().end()
    assert output == f"{HELLO}\n{'x' * 999_999}\n"
    assert errors == f"{'y' * 999_999}\n"


@pytest.mark.parametrize("how", ["hang up", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_when_the_launcher_goes_or_wants_the_end_so_does_the_process(how: str, begin: Begin) -> None:
    connection = begin(WAIT).send()
    processes = connection.wait_ready()
    if how == "hang up":
        connection.hang_up()
    else:
        connection.popen.send_signal(signal.Signals[how])
    code, _, _ = connection.end()
    assert code == (-signal.SIGKILL if how == "SIGKILL" else 128 + signal.SIGTERM)
    assert len(processes) == 1
    assert gone(processes)


def test_silence_of_the_launcher_ends_the_process(begin: Begin) -> None:
    assert begin("signal.pause()", silence_s=0.3).send().end()[0] == 128 + signal.SIGTERM


@pytest.mark.long
def test_signs_of_life_keep_the_process_running(begin: Begin) -> None:
    connection = begin("print('ready'); import time; time.sleep(2)", silence_s=1.0).send()
    connection.wait_ready()
    assert connection.popen.stdin is not None
    while connection.popen.poll() is None:
        with contextlib.suppress(BrokenPipeError):
            connection.popen.stdin.write(b"\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            connection.popen.wait(0.05)
    assert connection.popen.returncode == 0


@pytest.mark.long
def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_with_its_children(begin: Begin) -> None:
    child = "subprocess.Popen(['sleep', '1000'])"
    connection = begin(f"{child}\n{launching.DEAF}", grace_s=0.2).send()
    processes = connection.wait_ready()
    connection.hang_up()
    assert connection.end()[0] == 128 + signal.SIGKILL
    assert len(processes) == 2
    assert gone(processes)


@pytest.mark.long
def test_the_grace_ends_when_nobody_reads_any_more(begin: Begin) -> None:
    connection = begin(launching.DEAF, grace_s=100_000.0).send()
    processes = connection.wait_ready()
    connection.hang_up()
    assert connection.popen.stdout is not None and connection.popen.stderr is not None
    connection.popen.stdout.close()
    connection.popen.stderr.close()
    assert connection.popen.wait(jobs.DEADLINE_S) == 128 + signal.SIGKILL
    assert gone(processes)


@pytest.mark.long
def test_what_a_process_leaves_behind_in_its_group_is_ended(begin: Begin) -> None:
    code, output, _ = begin("print(subprocess.Popen(['sleep', '1000']).pid)").send().end()
    assert code == 0
    pid = int(output.split()[-1])
    with contextlib.suppress(psutil.NoSuchProcess):
        assert gone([psutil.Process(pid)])


def test_the_token_is_in_a_file_that_goes_even_if_it_is_killed(begin: Begin) -> None:
    token = "a-token-of-20-chars!"
    code = "path = os.environ['TFPS_TOKEN_FILE']; print(open(path).read(), path, os.stat(path).st_mode & 0o777)\n"
    connection = begin(code + WAIT, token=token).send()
    processes = connection.wait_ready()
    shown = [text for each in processes for text in [*each.cmdline(), *each.environ().values()]]
    shown += psutil.Process(connection.popen.pid).cmdline()
    assert not [text for text in shown if token in text]
    path = Path(processes[0].environ()["TFPS_TOKEN_FILE"])
    assert path.read_text() == token
    connection.popen.kill()
    connection.end()
    if sys.platform.startswith("linux"):
        assert not path.exists()
        assert gone(processes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"directory": "/no/such"},
            "this host has no directory /no/such; every host needs the same program in the sam",
        ),
        ({"argv": ("/no/such/python", "x.py")}, "cannot run /no/such/python in "),
        ({"version": "0.0.0"}, "but tfps_launch is of tfps 0.0.0; install the same on all hosts"),
    ],
)
def test_what_a_host_lacks_is_said(options: dict[str, Argument], message: str, begin: Begin) -> None:
    code, output, errors = begin(**options).send().end()
    assert (code, output) == (126, f"{HELLO}\n")
    assert errors.startswith("tfps_launch: ")
    assert message in errors


def test_a_connection_that_ends_early_is_said(begin: Begin) -> None:
    connection = begin()
    connection.hang_up()
    code, _, errors = connection.end()
    assert (code, errors) == (126, "tfps_launch: the connection ended before it had said what to run\n")


def test_it_needs_neither_grpc_nor_tensorflow() -> None:
    program = "import sys, tfps.launch.remote; print([n for n in ('grpc', 'numpy', 'tensorflow') if n in sys.modules])"
    shell = shlex.join([sys.executable, "-c", program])
    result = subprocess.run(shell, shell=True, env={**os.environ}, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
