"""Processes that run as one, as real launchers run them: their output, their ends, and that none is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import launching
import pytest
from launching import END_S, ROOT, Running, WriteScript, command, environment, launch

from tfps.launch import supervisor
from tfps.launch.supervisor import Command, RemoteInput, Supervisor, beat_until
from tfps.launch.terminal import Console, LineAssembler, plain

pytestmark = launching.NEEDS_POSIX
Ends = tuple[IO[bytes], IO[bytes]]  # of a pipe: to read, to write


def test_every_line_says_where_it_comes_from(write_script: WriteScript) -> None:
    result = launch("--workers", 2, "--pservers", 2, write_script("print('hello', rank)"))
    assert result.returncode == 0
    said = [line for line in result.stderr.splitlines() if not line.startswith("[pserver ")]
    assert said == ["tfps_launch: starts 2 workers", "tfps_launch: all workers ended well"]
    lines = result.stdout.splitlines()
    assert sorted(line for line in lines if "hello" in line) == ["[worker 0] hello 0", "[worker 1] hello 1"]
    for index in (0, 1):
        assert any(line.startswith(f"[pserver {index}] tfps_pserver ready at 127.0.0.1:") for line in lines)
    assert len(lines) == 4


def test_noise_of_standard_error_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('hum'); print('hum\\nalarm\\nhum hum', file=sys.stderr)"
    with Supervisor(Console(sys.stdout, sys.stderr, None), 1.0) as supervisor:
        noisy = Command("x", [sys.executable, "-c", program], os.environ, noise=re.compile("hum"))
        process = supervisor.start(noisy)
        assert supervisor.wait(lambda: process.ended, END_S)
    # Of the process: other threads of this one write there, too, as gRPC's do at a fork.
    out, errors = ([line for line in said.splitlines() if "[x] " in line] for said in capfd.readouterr())
    assert (out, errors) == (["[x] hum"], ["[x] alarm", "[x] hum hum"])
    assert process.tail == ["alarm", "hum hum"]


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
    of_workers = [line for line in screen if line.startswith("[worker")]
    assert sorted(of_workers) == ["[worker 0] 100%", "[worker 0] tty True True 68", "[worker 1] tty False"]
    assert "\x1b[32m[worker 0] " in data.decode()


def test_the_exit_code_is_that_of_the_failing_worker(write_script: WriteScript) -> None:
    script = write_script("sys.exit(7) if rank == '1' else signal.pause()")
    result = launch("--workers", 3, "--grace", 0.2, script)
    assert result.returncode == 7
    assert result.stderr.splitlines()[-1] == "tfps_launch: worker 1 ended with exit code 7; all others were ended"


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
        next(process for process in siblings if "tfps.pserver.cli" in process.cmdline()).kill()
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
    old = signal.signal(number, signal.SIG_DFL)  # nohup has SIGHUP ignored, in us too
    running = start("--workers", 2, "--pservers", 2, write_script("print('ready'); signal.pause()"))
    signal.signal(number, old)
    running.wait_ready(2)
    assert len(running.processes) == 4
    running.popen.send_signal(number)
    code, errors = running.finish()
    assert code == 128 + number
    assert errors.splitlines()[-1] == f"tfps_launch: ended by {number.name}; all processes were ended"
    assert not running.survivors()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_of_an_elastic_job_ends_workers_before_pservers(
    number: signal.Signals, write_script: WriteScript, start: Callable[..., Running], tmp_path: Path
) -> None:
    script = write_script(
        """
        import socket
        host, port = os.environ["TFPS_PSERVERS"].split(":")
        pserver = socket.create_connection((host, int(port)))
        def end(*_):
            pserver.settimeout(0.5)
            try:
                while pserver.recv(1000):
                    pass
                print("the pserver ended first", flush=True)
            except TimeoutError:
                print("the pserver lives", flush=True)
            sys.exit()
        signal.signal(signal.SIGTERM, end)
        print("ready", flush=True)
        while True:
            signal.pause()
        """
    )
    log = tmp_path / "log"
    running = start("--workers", 2, "--min-workers", 1, "--restart", 1, "--log", log, script)
    running.wait_ready(2)
    running.popen.send_signal(number)
    out, errors = running.popen.communicate(timeout=END_S)
    assert running.popen.returncode == 128 + number
    assert out.count("the pserver lives") == 2, out
    for heard in (errors, log.read_text()):
        assert f"tfps_launch: ended by {number.name}: the whole job is being stopped\n" in heard
    assert "starts again" not in errors
    assert not running.survivors()


def test_under_nohup_the_job_outlives_its_terminal(write_script: WriteScript, start: Callable[..., Running]) -> None:
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    running = start("--grace", 0.2, write_script("print('ready'); signal.pause()"))
    signal.signal(signal.SIGHUP, old)
    running.wait_ready(1)
    running.popen.send_signal(signal.SIGHUP)
    running.popen.send_signal(signal.SIGTERM)
    assert running.finish()[0] == 128 + signal.SIGTERM


def test_a_worker_that_ignores_sigterm_is_killed(write_script: WriteScript, start: Callable[..., Running]) -> None:
    script = write_script(launching.DEAF)
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
    script = write_script(launching.DEAF)
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


@pytest.fixture
def ends() -> Iterator[Ends]:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb", buffering=0) as reader, os.fdopen(write_end, "wb", buffering=0) as writer:
        yield reader, writer


def test_signs_of_life_follow_what_to_run_until_the_end(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BEAT_S", 0.01)
    reader, writer = ends
    one, over = RemoteInput("worker 0", writer), threading.Event()
    beats = threading.Thread(target=beat_until, args=(over, [one]))
    one.send(b"line\n")
    beats.start()
    assert [reader.read(5), reader.read(1), reader.read(1)] == [b"line\n", b"\n", b"\n"]
    one.close()
    assert reader.readall().strip(b"\n") == b""  # type: ignore[attr-defined]
    over.set()
    beats.join(END_S)
    assert not beats.is_alive()


def test_a_line_that_does_not_fit_is_refused(ends: Ends) -> None:
    with pytest.raises(OSError, match=r"worker 0: arguments and variables of 2000000 bytes are too long to send"):
        RemoteInput("worker 0", ends[1]).send(b"x" * 2_000_000)


def test_neither_a_full_pipe_nor_a_reader_that_is_gone_nor_the_end_stop_the_signs(ends: Ends) -> None:
    reader, writer = ends
    one = RemoteInput("worker 0", writer)
    with pytest.raises(OSError, match="too long"):
        one.send(b"x" * 2_000_000)
    one.beat()
    reader.close()
    one.beat()
    one.send(b"line\n")
    one.close()
    one.beat()
