"""Options that do not go together, and variables that are chosen. More in tests/launch/test_cli.py."""

from __future__ import annotations

import pytest

from tfps.errors import ConfigError
from tfps.launch.hosts import Host
from tfps.launch.options import Plan, parse


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
