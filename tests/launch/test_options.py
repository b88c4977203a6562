"""Options of `tfps_launch`, and what it says of where to look at a job with a logdir."""

from __future__ import annotations

import shlex

import jobs
import launching
import pytest
from launching import WriteScript, launch

from tfps.config import TraceRequest
from tfps.errors import ConfigError
from tfps.launch.cli import Plan, hints, parse
from tfps.launch.job import Host, Placement

HERE = Placement(("localhost",) * 2, ("localhost",) * 2)
ELSEWHERE = Placement.of([Host("a", 2), Host("b", 1)], 1)


def test_hosts_say_how_many_workers_there_are() -> None:
    plan = parse(["--hosts", "a:4,b:2", "--pservers-per-host", "2", "--ssh", "ssh -p 2222", "a.py", "x"])
    hosts = (Host("a", 4), Host("b", 2))
    assert plan == Plan("a.py", ("x",), workers=6, hosts=hosts, pservers_per_host=2, ssh="ssh -p 2222")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "a:4", "--workers", "4"], "--workers does not go with --hosts: --hosts a:4,b:4 says how many"),
        (["--hosts", "a:4", "--pservers", "1"], "--pservers does not go with --hosts: use --pservers-per-host"),
        (["--slurm", "--workers", "4"], "--workers does not go with --slurm: the allocation's tasks are the workers"),
        (["--slurm", "--hosts", "a"], "not allowed with argument"),
        (["--pservers-per-host", "1"], "--pservers-per-host needs --hosts or --slurm; on this machine alone use"),
        (["--hosts", "a", "--pservers-per-host", "0"], "--pservers-per-host must be at least 1, got 0"),
        (["--ssh", "ssh"], "--ssh needs --hosts"),
        (["--hosts", "a", "--ssh", "ssh 'x"], "--ssh must be a command and its options, as for a shell"),
        (["--hosts", "a", "--ssh", ""], "--ssh must be a command and its options, as for a shell"),
        (["--hosts", ""], "--hosts must be HOST:WORKERS"),
        (["--env", "a-b=1"], "--env must be NAME or NAME=VALUE, got 'a-b=1'"),
        (["-x", "=1"], "--env must be NAME or NAME=VALUE, got '=1'"),
        (
            ["--hosts", "a,b,c", "--metrics-port", "65534"],
            "--metrics-port must be from 0 to 65533 with 3 pservers, which take",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_with_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*arguments, "a.py"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_variables_are_chosen_by_name_or_with_a_value() -> None:
    plan = parse(["-x", "A", "--env", "B=1=2", "-x", "C=", "a.py", "-x", "theirs"])
    assert plan.args == ("-x", "theirs")
    assert plan.chosen({"A": "here", "B": "not this", "D": "nor this"}) == {"A": "here", "B": "1=2", "C": ""}


def test_a_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--env A: there is no such variable here; set it, or write --env A=VALUE"):
        Plan("a.py", variables=("A",)).chosen({})


def test_what_a_worker_is_told_asks_for_a_capture_of_some_steps_in_that_directory() -> None:
    for logdir in ("logs", "gs://bucket:80/a b"):
        asked = TraceRequest.from_environment(Plan("train.py", logdir=logdir).trace_variables)
        assert asked == TraceRequest(logdir, 10, 20)
    assert Plan("train.py").trace_variables == {}


@pytest.mark.parametrize("place", [HERE, ELSEWHERE], ids=["here", "elsewhere"])
def test_what_is_said_can_be_pasted_into_a_shell(place: Placement) -> None:
    (line,) = hints(Plan("train.py", logdir="my logs", metrics_port=None), place)
    assert shlex.split(line, comments=True) == ["tensorboard", "--logdir", "my logs"]


def test_each_pserver_whose_port_is_known_has_its_address_in_the_line() -> None:
    assert hints(Plan("train.py", logdir="logs", metrics_port=9100), HERE) == [
        "tensorboard --logdir logs",
        "metrics at http://127.0.0.1:9100/metrics http://127.0.0.1:9101/metrics",
    ]
    assert hints(Plan("train.py", logdir="logs", metrics_port=0), HERE) == ["tensorboard --logdir logs"]
    assert hints(Plan("train.py", logdir=None, metrics_port=9100), HERE) == []


def test_what_is_on_other_hosts_is_said_to_be_there() -> None:
    assert hints(Plan("train.py", logdir="logs", metrics_port=9100), ELSEWHERE) == [
        "tensorboard --logdir logs  # on a",
        "metrics at http://127.0.0.1:9100/metrics (on a) http://127.0.0.1:9101/metrics (on b)",
    ]


@pytest.mark.parametrize("logdir", ["", " "])
def test_an_empty_directory_is_refused(logdir: str) -> None:
    with pytest.raises(ConfigError, match=r"--logdir must name a directory, as in --logdir logs, got '"):
        Plan("train.py", logdir=logdir)


@launching.NEEDS_POSIX
def test_the_launcher_says_where_to_look_before_the_workers_run_and_an_argument_wins(write_script: WriteScript) -> None:
    port = jobs.unused_ports(2)
    script = write_script("print('told', os.environ['TFPS_TRACE'], file=sys.stderr)")
    given = ("--pservers", 2, "--logdir", "logs", "--metrics-port", port)
    result = launch(*given, script, TFPS_TRACE="elsewhere:1-2")
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stderr.splitlines() if not line.startswith("[pserver")]
    assert said == [
        "tfps_launch: starts 1 worker",
        "tfps_launch: tensorboard --logdir logs",
        f"tfps_launch: metrics at http://127.0.0.1:{port}/metrics http://127.0.0.1:{port + 1}/metrics",
        "[worker 0] told logs:10-20",
        "tfps_launch: all workers ended well",
    ]
    for url in said[2].split()[-2:]:
        assert f"metrics at {url}\n" in result.stderr  # the pservers themselves say so, too
