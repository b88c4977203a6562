"""Tests of tfps.launch and tfps.supervisor: real launchers, pservers and small scripts as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import jobs
import psutil
import pytest

from tfps.errors import ConfigError
from tfps.launch.cli import Plan, check_script, exit_code, parse
from tfps.launch.terminal import LineAssembler, plain

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="tfps_launch needs Linux or macOS")

ROOT = Path(__file__).resolve().parent.parent.parent
END_S = 60.0

WriteScript = Callable[[str], Path]


@pytest.fixture
def write_script(tmp_path: Path) -> WriteScript:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("import os, signal, subprocess, sys\nrank = os.environ['TFPS_RANK']\n" + textwrap.dedent(text))
        return path

    return write


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tfps.launch", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **more}


def launch(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(**more), capture_output=True, text=True, timeout=END_S, check=False
    )


class Running:
    """A launcher whose script prints "ready" and then waits."""

    def __init__(self, *arguments: object) -> None:
        self.popen = subprocess.Popen(
            command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.processes: list[psutil.Process] = []  # those that it started, and what they have started

    def wait_ready(self, workers: int) -> None:
        ready = 0
        while ready < workers:
            line = self.output.readline()
            assert line, f"ended too early: {self.popen.stderr and self.popen.stderr.read()}"
            ready += line.rstrip().endswith("] ready")
        self.processes = psutil.Process(self.popen.pid).children(recursive=True)

    @property
    def output(self) -> IO[str]:
        assert self.popen.stdout is not None
        return self.popen.stdout

    def finish(self) -> tuple[int, str]:
        _, errors = self.popen.communicate(timeout=END_S)
        return self.popen.returncode, errors

    def survivors(self) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(self.processes, timeout=10)
        # Whoever has become an orphan may be dead and only not collected.
        return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(*arguments: object) -> Running:
        started.append(Running(*arguments))
        return started[-1]

    yield begin
    for running in started:
        running.popen.kill()
        running.popen.communicate()
        for process in running.survivors():
            process.kill()


def test_every_line_says_where_it_comes_from(write_script: WriteScript) -> None:
    result = launch("--workers", 2, "--pservers", 2, write_script("print('hello', rank)"))
    assert result.returncode == 0
    assert result.stderr == "" or all(line.startswith("[pserver ") for line in result.stderr.splitlines())
    lines = result.stdout.splitlines()
    assert sorted(line for line in lines if "hello" in line) == ["[worker 0] hello 0", "[worker 1] hello 1"]
    for index in (0, 1):
        assert any(line.startswith(f"[pserver {index}] tfps_pserver ready at 127.0.0.1:") for line in lines)
    assert len(lines) == 4


def test_it_makes_a_job_token_that_no_process_shows(write_script: WriteScript) -> None:
    script = write_script(
        """
        import json, pathlib, psutil, stat
        path = pathlib.Path(os.environ["TFPS_TOKEN_FILE"])
        token = path.read_text()
        from tfps.worker.worker import Worker
        worker = Worker(os.environ["TFPS_PSERVERS"].split(","), job=os.environ["TFPS_JOB"])
        launcher = psutil.Process().parent()
        processes = [launcher, *launcher.children(recursive=True)]
        shown = [p.name() for p in processes if any(token in part for part in [*p.cmdline(), *p.environ().values()])]
        mode = stat.S_IMODE(path.stat().st_mode)
        print("told", json.dumps([str(path), mode, len(token) >= 32, len(processes) >= 3, shown]))
        print("hash", hash(token))
        worker.close()
        """
    )
    result = launch("--workers", 2, "--pservers", 1, script, PYTHONHASHSEED="1")
    assert result.returncode == 0, result.stdout + result.stderr
    told = [json.loads(line.partition("told ")[2]) for line in result.stdout.splitlines() if "told " in line]
    path = Path(told[0][0])
    assert told == [[str(path), 0o600, True, True, []]] * 2
    assert len({line.partition("hash ")[2] for line in result.stdout.splitlines() if "hash " in line}) == 1
    assert not path.exists()


@pytest.mark.parametrize("how", ["option", "variable"])
def test_it_takes_a_job_token_that_is_given(how: str, write_script: WriteScript, tmp_path: Path) -> None:
    own = tmp_path / "token"
    own.touch(0o600)
    own.write_text("a-token-of-20-chars!")
    script = write_script("print('has', os.environ['TFPS_TOKEN_FILE'])")
    result = launch(*(("--token-file", own) if how == "option" else ()), script, **(
        {"TFPS_TOKEN_FILE": str(own)} if how == "variable" else {}
    ))  # fmt: skip
    assert f"has {own}" in result.stdout
    assert own.exists()


def test_workers_learn_their_place_in_the_job(write_script: WriteScript) -> None:
    script = write_script(
        """
        import json, socket
        from tfps.config import Launch
        told = Launch.from_environment()
        for address in told.pservers:
            host, port = address.split(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        has_tf_config = "TF_CONFIG" in os.environ
        print("told", json.dumps([told.rank, told.workers, told.job, len(set(told.pservers)), has_tf_config]))
        """
    )
    result = launch("--workers", 3, "--pservers", 2, script, TF_CONFIG="{}")
    assert result.returncode == 0, result.stderr
    told = sorted(json.loads(line.partition("told ")[2]) for line in result.stdout.splitlines() if "told " in line)
    assert [(rank, workers, pservers, has) for rank, workers, _, pservers, has in told] == [
        (rank, 3, 2, False) for rank in range(3)
    ]
    assert len({job for _, _, job, _, _ in told}) == 1
    assert told[0][2].startswith("script-")


def test_arguments_of_the_script_are_passed_through(write_script: WriteScript) -> None:
    script = write_script("print('got', sys.argv[1:])")
    result = launch("--workers", 1, script, "--workers", "9", "-m", "--", "a b", "")
    assert "[worker 0] got ['--workers', '9', '-m', '--', 'a b', '']\n" in result.stdout


def test_a_module_can_be_run(tmp_path: Path) -> None:
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "digits.py").write_text("import sys; print('module', __name__, sys.argv[1:])")
    result = launch("-m", "training.digits", "--epochs", "3", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert "[worker 0] module __main__ ['--epochs', '3']\n" in result.stdout


def test_standard_error_stays_standard_error(write_script: WriteScript) -> None:
    result = launch(write_script("print('a result'); print('a warning', file=sys.stderr)"))
    assert "[worker 0] a warning\n" in result.stderr
    assert "a warning" not in result.stdout


def test_lines_of_several_workers_are_never_mixed(write_script: WriteScript) -> None:
    script = write_script(
        """
        for index in range(500):
            for piece in (f"begin-{rank} ", "x" * 100, f" {index} ", f"end-{rank}\\n"):
                os.write(1, piece.encode())
        os.write(1, b"without a newline")
        """
    )
    result = launch("--workers", 2, script)
    lines = [line for line in result.stdout.splitlines() if "pserver" not in line]
    expected = [f"[worker {rank}] begin-{rank} {'x' * 100} {index} end-{rank}" for rank in "01" for index in range(500)]
    assert sorted(lines) == sorted([*expected, *(f"[worker {rank}] without a newline" for rank in "01")])


def test_a_progress_bar_in_a_pipe_is_one_line_per_pass(write_script: WriteScript) -> None:
    script = write_script(
        """
        for percent in (10, 50, 100):
            print("\\b" * 20 + "\\r\\x1b[32m" + f"{percent}%" + "\\x1b[0m", end="", flush=True)
        print()
        """
    )
    lines = launch(script).stdout.splitlines()
    assert [line for line in lines if line.startswith("[worker")] == ["[worker 0] 100%"]


def test_on_a_terminal_rank_0_draws_a_progress_bar_as_wide_as_fits(write_script: WriteScript) -> None:
    script = write_script(
        """
        import shutil
        if rank == "0":
            width = shutil.get_terminal_size().columns
            print("tty", sys.stdout.isatty(), sys.stderr.isatty(), width)
            for percent in (10, 50, 100):
                print("\\r" + f"{percent}%", end="", flush=True)
            print()
        else:
            print("tty", sys.stdout.isatty())
        """
    )
    read_end, write_end = os.openpty()
    variables = {name: value for name, value in environment().items() if name != "COLUMNS"}  # it would win
    launcher = subprocess.Popen(
        command("--workers", 2, script), env=variables, stdout=write_end, stderr=write_end, start_new_session=True
    )
    os.close(write_end)
    data = b""
    try:
        while piece := os.read(read_end, 65536):
            data += piece
    except OSError:  # Linux: nobody has it open any more
        pass
    finally:
        os.close(read_end)
        assert launcher.wait(END_S) == 0
    assembler = LineAssembler()
    screen = [plain(line) for line in [*assembler.feed(data.decode()), *assembler.finish()] if line]
    assert screen[0].startswith("[pserver 0] tfps_pserver ready")
    assert sorted(screen[1:]) == ["[worker 0] 100%", "[worker 0] tty True True 68", "[worker 1] tty False"]
    assert "\x1b[32m[worker 0] " in data.decode()


def test_the_exit_code_is_that_of_the_failing_worker(write_script: WriteScript) -> None:
    script = write_script("sys.exit(7) if rank == '1' else signal.pause()")
    result = launch("--workers", 3, "--grace", 0.2, script)
    assert result.returncode == 7
    assert result.stderr.splitlines()[-1] == "tfps_launch: worker 1 ended with exit code 7; all others were ended"


def test_a_worker_killed_by_a_signal_is_named_with_the_signal(write_script: WriteScript) -> None:
    script = write_script("os.kill(os.getpid(), signal.SIGSEGV) if rank == '1' else signal.pause()")
    result = launch("--workers", 2, "--grace", 0.2, script)
    assert result.returncode == 128 + signal.SIGSEGV
    assert result.stderr.splitlines()[-1] == "tfps_launch: worker 1 was killed by SIGSEGV; all others were ended"


def test_other_workers_may_say_what_they_saw_after_a_failure(write_script: WriteScript, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "peer")
    script = write_script(
        """
        if rank == "1":
            with open(sys.argv[1], "w"):
                sys.exit(7)
        with open(sys.argv[1]) as peer:
            peer.read()
        sys.exit("rank 0 saw rank 1 go")
        """
    )
    result = launch("--workers", 2, "--grace", END_S, script, tmp_path / "peer")
    assert result.returncode in (1, 7)  # which of the two ended first is a race; both speak
    assert "[worker 0] rank 0 saw rank 1 go" in result.stderr


def test_a_pserver_that_dies_ends_the_job(write_script: WriteScript) -> None:
    script = write_script(
        """
        import psutil
        siblings = psutil.Process(os.getppid()).children()
        next(process for process in siblings if "tfps.cli" in process.cmdline()).kill()
        signal.pause()
        """
    )
    result = launch("--grace", 0.2, script)
    assert result.returncode == 128 + signal.SIGKILL
    assert "tfps_launch: pserver 0 was killed by SIGKILL" in result.stderr.splitlines()[-1]


def test_a_pserver_that_does_not_start_is_a_clear_error(write_script: WriteScript, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "grpc.py").write_text("raise ImportError('this grpc is broken')")
    script = write_script("print('never')")
    result = launch("--workers", 2, script, PYTHONPATH=f"{tmp_path / 'broken'}{os.pathsep}{ROOT}")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == ("tfps_launch: pserver 0 did not start, it ended with exit code 1: ImportError: this grpc is broken")
    assert "[pserver 0] ImportError: this grpc is broken" in result.stderr
    assert "never" not in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all(
    number: signal.Signals, write_script: WriteScript, start: Callable[..., Running]
) -> None:
    running = start("--workers", 2, "--pservers", 2, write_script("print('ready'); signal.pause()"))
    running.wait_ready(2)
    assert len(running.processes) == 4
    running.popen.send_signal(number)
    code, errors = running.finish()
    assert code == 128 + number
    assert errors.splitlines()[-1] == f"tfps_launch: ended by {number.name}; all processes were ended"
    assert not running.survivors()


def test_a_worker_that_ignores_sigterm_is_killed(write_script: WriteScript, start: Callable[..., Running]) -> None:
    script = write_script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        while True:
            signal.pause()
        """
    )
    running = start("--workers", 2, "--grace", 0.2, script)
    running.wait_ready(2)
    running.popen.send_signal(signal.SIGINT)
    assert running.finish()[0] == 128 + signal.SIGINT
    assert not running.survivors()


def test_processes_that_a_worker_has_started_end_with_it(
    write_script: WriteScript, start: Callable[..., Running]
) -> None:
    script = write_script(
        """
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print("ready")
        signal.pause()
        """
    )
    running = start(script)
    running.wait_ready(1)
    assert len(running.processes) == 3
    running.popen.send_signal(signal.SIGTERM)
    running.finish()
    assert not running.survivors()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends children with their parent")
def test_nothing_survives_a_killed_launcher(write_script: WriteScript, start: Callable[..., Running]) -> None:
    script = write_script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        while True:
            signal.pause()
        """
    )
    running = start("--workers", 2, "--pservers", 2, script)
    running.wait_ready(2)
    running.popen.kill()
    running.popen.wait(END_S)
    assert not running.survivors()


def test_when_nobody_reads_any_more_all_end(write_script: WriteScript, start: Callable[..., Running]) -> None:
    running = start("--workers", 2, write_script("print('ready')\nwhile True: print('x' * 1000)"))
    running.wait_ready(2)
    running.output.close()
    assert running.popen.wait(END_S) == 128 + signal.SIGPIPE
    assert running.popen.stderr is not None
    assert "Traceback" not in running.popen.stderr.read().replace("[worker", "")
    assert not running.survivors()


def test_each_pserver_serves_its_metrics_on_a_port_that_is_known(write_script: WriteScript) -> None:
    port = jobs.unused_ports(2)
    script = write_script(
        """
        from urllib.request import urlopen
        for port in sys.argv[1:]:
            text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
            print("members", "tfps_workers 1.0" in text)
        """
    )
    result = launch("--pservers", 2, "--metrics-port", port, script, port, port + 1)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("[worker 0] members True") == 2
    for index in (0, 1):
        assert f"[pserver {index}] tfps_pserver: metrics at http://127.0.0.1:{port + index}/metrics" in result.stderr
    free = launch("--metrics-port", 0, write_script("pass"))
    assert free.returncode == 0
    assert re.search(r"metrics at http://127.0.0.1:[1-9]\d*/metrics", free.stderr)


def test_metrics_without_their_package_are_a_clear_error(write_script: WriteScript, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "prometheus_client.py").write_text("raise ImportError")
    path = f"{tmp_path / 'without'}{os.pathsep}{ROOT}"
    result = launch("--metrics-port", 0, write_script("print('never')"), PYTHONPATH=path)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        "tfps_launch: pserver 0 did not start, it ended with exit code 1: tfps_pserver: metrics need"
    )
    assert "pip install 'tfps[metrics]'" in last
    assert "never" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "script not found: missing.py"),
        (["-m", "no_such_module_at_all.sub"], "module not found: no_such_module_at_all.sub"),
        (["--workers", "0", "x.py"], "--workers must be at least 1, got 0"),
        (
            ["--metrics-port", "-1", "x.py"],
            "--metrics-port must be from 0 to 65535 with 1 pservers, which take",
        ),
        (
            ["--pservers", "3", "--metrics-port", "65534", "x.py"],
            "--metrics-port must be from 0 to 65533 with 3 pservers",
        ),
        (["--pservers", "-1", "x.py"], "--pservers must be at least 1, got -1"),
        (["--grace", "nan", "x.py"], "--grace must be a number of seconds, 0 or more, got nan"),
        (["--workers", "two", "x.py"], "invalid int value: 'two'"),
        ([], "what to run is missing"),
        (["--log", "no/such/directory/log", __file__], "no/such/directory/log"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    result = launch(*arguments)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert result.stdout == ""


def test_the_log_has_every_line(write_script: WriteScript, tmp_path: Path) -> None:
    log = tmp_path / "log"
    result = launch("--log", log, write_script("print('out'); print('err', file=sys.stderr)"))
    assert result.returncode == 0
    lines = log.read_text().splitlines()
    assert sorted(lines) == sorted([*result.stdout.splitlines(), *result.stderr.splitlines()])


def test_the_launcher_does_not_import_tensorflow() -> None:
    program = (
        "import sys, tfps.launch.cli, tfps.launch.supervisor\n"
        "print([name for name in ('tensorflow', 'grpc', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_parse_splits_own_options_from_those_of_the_script() -> None:
    assert parse(["--workers", "2", "a.py", "--pservers", "7"]) == Plan("a.py", ("--pservers", "7"), workers=2)
    assert parse(["-m", "pkg.mod", "-m"]) == Plan("pkg.mod", ("-m",), is_module=True)
    assert parse(["--", "a.py"]) == Plan("a.py")


def test_a_directory_with_a_main_is_a_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"directory without a __main__\.py"):
        check_script(Plan(str(tmp_path)))
    (tmp_path / "__main__.py").touch()
    check_script(Plan(str(tmp_path)))


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [exit_code(code) for code in (0, 3, -9)] == [0, 3, 137]
