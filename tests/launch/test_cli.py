"""`tfps_launch` with real pservers and small scripts: its arguments, and what it tells pservers and workers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jobs
import launching
import pytest
from launching import ROOT, WriteScript, environment, launch

from tfps.errors import ConfigError
from tfps.launch.cli import Plan, check_script, engine_of, exit_code, main, misplaced, parse
from tfps.launch.job import Host

pytestmark = launching.NEEDS_POSIX


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
def test_a_wrong_command_line_is_refused_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    said = capsys.readouterr()
    assert message in said.err.splitlines()[-1]
    assert said.out == ""


_LOSES_WORKER_1 = """
import pathlib, signal, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["TFPS_RANK"])
mine = folder / f"{rank}.{len(list(folder.glob(f'{rank}.*')))}"
mine.write_text(str(os.getpid()))
if rank == 1 and mine.suffix == ".0":
    os.kill(os.getpid(), signal.SIGKILL)
deadline = time.monotonic() + 30
def is_lost():  # and the launcher knows
    pid = (folder / "1.0").read_text() if (folder / "1.0").exists() else ""
    return pid and not pathlib.Path("/proc", pid).exists()
while not (folder / sys.argv[2]).exists() or not is_lost():
    assert time.monotonic() < deadline
    time.sleep(0.02)
print("min", os.environ["TFPS_MIN_WORKERS"])
"""


def test_a_worker_that_is_lost_starts_again_while_the_others_go_on(write_script: WriteScript, tmp_path: Path) -> None:
    script = write_script(_LOSES_WORKER_1)
    result = launch("--workers", 3, "--min-workers", 2, "--restart", 1, script, tmp_path, "1.1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "worker 1 was killed by SIGKILL" in result.stderr
    assert "it starts again (restarts left: 0)" in result.stderr
    assert result.stdout.count("min 2") == 3
    assert result.stderr.endswith("tfps_launch: all workers ended well\n")


def test_the_others_go_on_without_a_worker_that_does_not_start_again(write_script: WriteScript, tmp_path: Path) -> None:
    script = write_script(_LOSES_WORKER_1)
    result = launch("--workers", 3, "--min-workers", 2, script, tmp_path, "1.0")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        "worker 1 was killed by SIGKILL (the system does that when memory runs out); 2 workers go on" in result.stderr
    )
    assert result.stdout.count("min 2") == 2
    assert result.stderr.endswith("tfps_launch: 2 of 3 workers ended well\n")


_LOSES_PSERVERS = """
import signal, subprocess, threading, time
from tfps.config import Config
from tfps.exchange.interface import BucketSpec
from tfps.trace.recorder import Recorder
from tfps.recovery.exchange import ElasticExchange
rank, job, addresses = (os.environ[f"TFPS_{name}"] for name in ("RANK", "JOB", "PSERVERS"))
config, kills, replies = Config.from_environment(), [signal.SIGKILL], []
worker = ElasticExchange(addresses.split(","), rank=int(rank), job=job, config=config, recorder=Recorder())
worker.declare([BucketSpec(("b",), "sum", 4000, "float32", 0)])
deadline = time.monotonic() + 60
while len(replies) < 20 or len(worker.info.links()) < int(sys.argv[1]):
    assert time.monotonic() < deadline
    if rank == "0" and kills and len(replies) == 5:
        found = subprocess.run(["pgrep", "-f", f"tfps.pserver.cli.*{job}"], capture_output=True, text=True)
        os.kill(int(found.stdout.split()[0]), kills.pop())
    done = threading.Event()
    worker.push(0, b"\\0" * 4000, lambda reply: (replies.append(reply), done.set()))
    assert done.wait(60)
    assert replies[-1].error is None, replies[-1].error
worker.close()
print("pushed")
"""


@pytest.mark.parametrize(("pservers", "restarts"), [(2, 1), pytest.param(1, 1, marks=pytest.mark.long), (2, 0)])
def test_a_pserver_that_is_lost_starts_again_or_the_workers_go_on_with_the_others(
    write_script: WriteScript, pservers: int, restarts: int
) -> None:
    numbers = ("--workers", 2, "--pservers", pservers, "--min-workers", 1, "--restart", restarts)
    result = launch(*numbers, write_script(_LOSES_PSERVERS), pservers - 1 + restarts)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "was killed by SIGKILL" in result.stderr
    then = "it starts again (restarts left: 0)" if restarts else "workers go on with 1 other"
    assert then in result.stderr
    assert result.stdout.count("pushed") == 2


_GROWS = """
import os, sys, threading, time
from tfps.config import Config
from tfps.exchange.interface import BucketSpec
from tfps.trace.recorder import Recorder
from tfps.recovery.exchange import ElasticExchange
addresses, rank = os.environ["TFPS_PSERVERS"].split(","), os.environ.get("TFPS_RANK")
about = {"job": os.environ["TFPS_JOB"], "config": Config.from_environment(), "recorder": Recorder()}
worker = ElasticExchange(addresses, rank=rank and int(rank), **about)
deadline = time.monotonic() + 60
def push():
    assert time.monotonic() < deadline
    done, replies = threading.Event(), []
    worker.push(0, b"\\0" * 4000, lambda reply: (replies.append(reply), done.set()))
    assert done.wait(60)
    return list(replies[0].ranks)
joins = worker.joining.pending
if joins:
    worker.joining.lines()
worker.declare([BucketSpec(("b",), "sum", 4000, "float32", 0)])
if joins:
    worker.joining.take_part(1)
else:
    print("ready")
    while len(worker.view.ranks) == 1 and push() == [0]:
        if joiners := worker.joining.joiners(1):
            worker.joining.admit(joiners)
print("together", push())
while joins and not os.path.exists(sys.argv[1]):
    assert time.monotonic() < deadline
    time.sleep(0.02)
if joins:
    print("alone", push())
worker.close()
"""


def test_another_launcher_starts_workers_that_join_and_may_end_later(tmp_path: Path) -> None:
    script, ended = tmp_path / "script.py", tmp_path / "it has ended"
    script.write_text(_GROWS)
    numbers = ("--workers", 1, "--pservers", 2, "--min-workers", 1, "--max-workers", 2)
    first = launching.Running(*numbers, script, ended)
    first.wait_ready(1)
    errors = first.popen.stderr
    assert errors is not None
    said = (re.search("join by tfps_launch (.*)", line) for line in iter(errors.readline, ""))
    other = launching.Running(*shlex.split(next(found[1] for found in said if found)))
    assert any("all workers ended well" in line for line in iter(errors.readline, ""))
    ended.touch()  # the pservers wait for who has joined
    output, more = other.popen.communicate(timeout=launching.END_S)
    assert other.popen.returncode == 0, output + more
    assert "together [0, 1]" in output
    assert "alone [1]" in output
    assert "together [0, 1]" in first.output.read()
    assert first.finish() == (0, "")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["--workers", "3", "--min-workers", "1", "--max-workers", "2"],
            "--max-workers must be at least 3 (--workers)",
        ),
        (["--max-workers", "2"], "needs --min-workers, got 2 with --min-workers None"),
        (["--join", "job@a:1,b"], "must be JOB@HOST:PORT,... (a pserver address must be 'host:port'"),
        (["--join", "job@a:1"], "--join needs the options --min-workers and --max-workers that the job was started"),
        (["--join", "job@a:1", "--pservers", "2"], "--pservers does not go with --join"),
    ],
)
def test_what_does_not_go_with_more_workers_is_refused(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*options, "script.py"])
    assert why in capsys.readouterr().err


HELPERS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])}
_ENDS = """
import atexit, pathlib, signal
import jobs
from tfps import errors
from tfps.config import Config
from tfps.worker.worker import Worker
errors.show_outlines()
folder, how, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(os.environ["TFPS_RANK"])
again = (folder / f"{rank}.0").exists()
mine = folder / f"{rank}.{int(again)}"
mine.write_text(str(os.getpid()))
def has_come(rank, life):
    return (folder / f"{rank}.{life}").exists()
def ended(rank, life):
    return has_come(rank, life) and not pathlib.Path("/proc", (folder / f"{rank}.{life}").read_text()).exists()
if how == "an error before the job begins":
    jobs.poll(lambda: has_come(0, 0) and has_come(1, 0))
    raise NameError("nothing")
if how == "the end of the others" and rank == 1 and again:
    jobs.poll(lambda: False)  # it is too slow to join
addresses, name = os.environ["TFPS_PSERVERS"].split(","), os.environ["TFPS_JOB"]
worker = Worker(addresses, rank=rank, job=name, config=Config.from_environment())
atexit.register(worker.close)
failed = jobs.Failed(worker)
if how == "a difference":
    if rank == 1:
        worker.fail(errors.MismatchError("the weights differ"))
    raise failed.wait()
if how in ("a refusal", "the end of the others"):
    if rank == 1 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        raise errors.JoinError("its weights differ")
    jobs.poll(lambda: ended(1, 1) if how == "a refusal" else has_come(1, 1))
    worker.close()
    print("well")
if how == "an error after the end":
    worker.close()
    if rank == 1:
        jobs.poll((folder / "closed").exists)
        raise NameError("nothing")
    (folder / "closed").touch()
    jobs.poll(lambda: ended(1, 0))
    print("saved")
if how == "an error on one after the other":
    if rank == 0 and again:
        worker.client.ready(1)
        raise failed.wait()
    if rank == 1:
        jobs.poll(lambda: list(worker.client.ready(1).candidates) == [0])
    worker.close("NameError: nothing")
    raise NameError("nothing")
"""


@pytest.mark.parametrize(
    ("how", "starts"),
    [
        pytest.param("an error before the job begins", 3, marks=pytest.mark.long),
        pytest.param("a difference", 2, marks=pytest.mark.long),
        ("an error on one after the other", 3),
    ],
)
def test_a_job_that_has_ended_with_an_error_is_not_begun_anew(
    write_script: WriteScript, tmp_path: Path, how: str, starts: int
) -> None:
    options = ("--workers", 2, "--min-workers", 1, "--restart", 2, "--grace", 20)
    result = launch(*options, write_script(_ENDS), tmp_path, how, **HELPERS)
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("it starts again") <= starts - 2, result.stderr
    assert "; the job is over, and is not begun anew; all others were ended" in result.stderr
    assert "tfps_pserver job" not in result.stdout


def test_a_worker_that_was_refused_is_left_out_with_the_reason(write_script: WriteScript, tmp_path: Path) -> None:
    options = ("--workers", 2, "--min-workers", 1, "--restart", 2)
    result = launch(*options, write_script(_ENDS), tmp_path, "a refusal", **HELPERS)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("it starts again") == 1
    assert (
        "tfps_launch: worker 1 ended with exit code 76: its weights differ; started again, it would be refused again; "
        "1 worker goes on\n" in result.stderr
    )
    assert "[worker 0] well" in result.stdout


def test_a_worker_that_fails_after_the_job_has_ended_ends_no_other(write_script: WriteScript, tmp_path: Path) -> None:
    options = ("--workers", 2, "--min-workers", 1, "--restart", 2, "--grace", 0)
    result = launch(*options, write_script(_ENDS), tmp_path, "an error after the end", **HELPERS)
    assert result.returncode == 0, result.stderr
    assert "tfps_launch: worker 1 ended with exit code 1; 1 worker goes on\n" in result.stderr
    assert "[worker 0] saved" in result.stdout


def test_a_worker_that_comes_back_too_late_does_not_wait_for_the_others(
    write_script: WriteScript, tmp_path: Path
) -> None:
    options = ("--workers", 2, "--min-workers", 1, "--restart", 2)
    result = launch(*options, write_script(_ENDS), tmp_path, "the end of the others", **HELPERS)
    assert result.returncode == 0, result.stderr
    late, end = result.stderr.splitlines()[-2:]
    assert late == "tfps_launch: worker 1 came too late: the job has ended"
    assert end == "tfps_launch: 1 of 2 workers ended well"


def test_too_few_workers_end_all(write_script: WriteScript, tmp_path: Path) -> None:
    script = write_script(_LOSES_WORKER_1)
    result = launch("--workers", 2, "--min-workers", 2, "--grace", 1, script, tmp_path, "never")
    assert result.returncode == 128 + 9
    assert "worker 1 was killed by SIGKILL" in result.stderr
    assert "all others were ended" in result.stderr


def test_the_log_has_every_line(write_script: WriteScript, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for code, end in ((0, "all workers ended well"), (3, "worker 0 ended with exit code 3; all others were ended")):
        script = write_script(f"print('out'); print('err', file=sys.stderr); sys.exit({code})")
        result = launch("--log", log, script, "--workers", 1)  # which the launcher says something about
        assert result.returncode == code
        lines = log.read_text().splitlines()
        assert sorted(lines) == sorted([*result.stdout.splitlines(), *result.stderr.splitlines()])
        assert f"tfps_launch: {end}" in lines
        assert any("--workers after the script" in line for line in lines)


def test_the_launcher_does_not_import_tensorflow() -> None:
    program = (
        "import sys, tfps.launch.cli, tfps.launch.supervisor\n"
        "print([name for name in ('tensorflow', 'grpc', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [("--restart", "1"), ("--min-workers", "3"), ("--min-workers", "0")])
def test_numbers_that_do_not_fit_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--workers", "2", *arguments, "script.py"])
    assert arguments[0] in capsys.readouterr().err


def test_an_allocation_says_how_many_workers_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = parse(["--slurm", "--min-workers", "2", "script.py"])
    assert plan.elastic_variables == {"TFPS_MIN_WORKERS": "2"}
    token = tmp_path / "job.token"
    token.write_text("t" * 32)
    for workers, fits in ((1, False), (2, True)):
        monkeypatch.setattr("tfps.launch.engine.allocated", lambda _, count=workers: (Host("node0", count),))
        with nullcontext() if fits else pytest.raises(ConfigError, match=r"from 1 to 1 \(tasks of the allocation\)"):
            engine_of(replace(plan, token_file=str(token)), {})
    with pytest.raises(SystemExit):
        parse(["--slurm", "--min-workers", "0", "script.py"])


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


def test_notes_of_tensorflow_about_itself_are_shown_to_those_who_ask_for_more_only(write_script: WriteScript) -> None:
    notes = (
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "I0000 00:00:1.2  345 port.cc:153] oneDNN custom operations are on. You may see slightly different",
        "I0000 00:00:1.2  345 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be used.",
        "E0000 00:00:1.2  345 cuda_dnn.cc:8579] Unable to register cuDNN factory: Attempting to register factory for",
        "W0000 00:00:1.2  345 computation_placer.cc:177] computation placer already registered. Please check linkage",
        "E0000 00:00:1.2  345 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: UNKNOWN ERROR (303)",
        "2026-01-01 00:00:00.1: E external/cuda_driver.cc:265] failed call to cuInit: CUDA_ERROR_NO_DEVICE: no device",
    )
    error = "E0000 00:00:1.2  345 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: UNKNOWN ERROR (803)"
    script = write_script(
        f"print(*{(*notes, error)!r}, sep='\\n', file=sys.stderr); print('level', os.environ['TF_CPP_MIN_LOG_LEVEL'])"
    )
    without = {name: value for name, value in environment().items() if not name.startswith("TF_")}
    for options, variables, level in (
        ([], {}, "2"),
        ([], {"TF_CPP_MIN_LOG_LEVEL": "0"}, "0"),
        (["--env", "TF_CPP_MIN_LOG_LEVEL=1"], {}, "1"),
        (["--env", "TF_CPP_MIN_LOG_LEVEL"], {"TF_CPP_MIN_LOG_LEVEL": "3"}, "3"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "tfps.launch", *options, script],
            env={**without, **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        assert f"[worker 0] level {level}\n" in result.stdout
        assert [note in result.stderr for note in notes] == [level in "01"] * len(notes)
        assert error in result.stderr


@pytest.mark.parametrize("python", ["python", "python3", "/nowhere/python3.11"])
def test_python_before_the_script_is_refused_with_what_to_write(python: str) -> None:
    with pytest.raises(ConfigError, match=f"leave out '{python}': .* as in train.py --epochs 3"):
        check_script(parse([python, "train.py", "--epochs", "3"]))


def test_options_of_the_launcher_after_the_script_are_told() -> None:
    assert "--workers after the script is the script's" in misplaced(parse(["train.py", "--workers", "2"]))
    assert "--pservers=2 after" in misplaced(parse(["train.py", "--pservers=2"]))
    assert misplaced(parse(["--workers", "2", "train.py", "--epochs", "3"])) == ""
