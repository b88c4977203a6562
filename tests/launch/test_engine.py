"""What an engine makes of a task: commands, variables, addresses, explanations."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tfps.launch.engine import Engine, Remote
from tfps.launch.job import Host, LocalRank, Placement, Task
from tfps.types import Json

PLACE = Placement.of([Host("a", 2), Host("b")], 1)
TASK = Task("worker 1", ("python", "train.py"), {"TFPS_RANK": "1"}, 32, LocalRank(1, 2))


@dataclass(frozen=True)
class Shell(Remote):
    """Shows what it would run."""

    def reach(self, host: str, command: str) -> list[str]:
        return ["shell", host, command]


def sent(environment: Mapping[str, str], **chosen: str) -> Json:
    """What travels to a host."""
    command = Shell(PLACE, environment, "/job", "a token", 5.0, chosen=chosen).on("b", TASK)
    assert command.stdin is not None
    return json.loads(command.stdin)


def test_a_process_on_a_host_is_told_what_to_run_on_its_standard_input() -> None:
    found = sent({})
    assert (found["argv"], found["directory"], found["local_rank"]) == (["python", "train.py"], "/job", [1, 2])
    assert (found["token"], found["grace_s"]) == ("a token", 5.0)


def test_neither_arguments_nor_variables_nor_the_token_are_in_the_command() -> None:
    command = Shell(PLACE, {"TFPS_POLICY": "fifo"}, "/job", "a token", 5.0).on("b", TASK)
    assert list(command.argv) == ["shell", "b", f"{sys.executable} -m tfps.launch.remote"]
    assert "a token" not in repr(command)
    assert command.title == "worker 1 on b"


def test_settings_travel_and_the_rest_of_the_environment_stays() -> None:
    environment = {
        "TFPS_POLICY": "fifo",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow",
        "PYTHONHASHSEED": "1",
        "TF_CONFIG": "{}",
        "TFPS_TOKEN_FILE": "/here/token",
        "HOME": "/home/me",
        "LD_LIBRARY_PATH": "/lib/mine",
    }
    variables = sent(environment, LD_LIBRARY_PATH="/lib/mine", TFPS_POLICY="priority")["variables"]
    assert variables == {
        "TFPS_POLICY": "priority",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow",
        "PYTHONHASHSEED": "1",
        "LD_LIBRARY_PATH": "/lib/mine",
        "TFPS_RANK": "1",
    }


def test_a_set_of_words_has_one_order_in_all_processes_unless_the_user_says_otherwise() -> None:
    for engine in (Engine(PLACE, {}), Engine(PLACE, {"PYTHONHASHSEED": "7"}), Engine(PLACE, {}, chosen={"A": "b"})):
        found = engine.on("localhost", TASK).environment["PYTHONHASHSEED"]
        assert found == engine.environment.get("PYTHONHASHSEED", "0")
    assert sent({})["variables"]["PYTHONHASHSEED"] == "0"


def test_a_relative_path_of_modules_is_one_in_the_directory_of_the_job() -> None:
    command = Shell(PLACE, {"PYTHONPATH": "lib:/abs:"}, "/job", "t", 5.0).on("b", TASK)
    assert command.argv[-1] == f"env PYTHONPATH=/job/lib:/abs:/job {sys.executable} -m tfps.launch.remote"


def test_pservers_listen_for_other_hosts_and_are_reached_by_the_name_of_their_host() -> None:
    shell = Shell(PLACE, {}, "/job", "t", 5.0)
    assert [shell.listens_at(host) for host in ("no-such-host.invalid", "10.0.0.4", "[fd00::1]", "[::1]")] == [
        "",
        "",
        "::",
        "::1",
    ]
    assert shell.reached_at("b", "192.0.2.7:7070") == "b:7070"
    assert shell.reached_at("[fd00::1]", "127.0.0.1:7070") == "[fd00::1]:7070"


@pytest.mark.parametrize(
    ("code", "answered", "says"),
    [
        (127, False, f"b needs the same Python as this host, at {sys.executable}"),
        (1, False, f"`{sys.executable} -m tfps.launch.remote` must run on b: install the same tfps there"),
        (127, True, ""),
        (1, True, ""),
    ],
)
def test_a_host_that_lacks_something_is_told_from_a_process_that_failed(code: int, answered: bool, says: str) -> None:
    assert Shell(PLACE, {}, "/job", "t", 5.0).explain("b", code, answered) == says


def test_on_this_machine_a_process_keeps_the_environment_but_for_other_jobs_and_certificates() -> None:
    environment = {"HOME": "/home/me", "TF_CONFIG": "{}", "TFPS_TLS_CA": "ca.pem", "CUDA_VISIBLE_DEVICES": "0,1"}
    command = Engine(PLACE, environment, chosen={"A": "b"}).on("localhost", TASK)
    assert command.environment == {
        "HOME": "/home/me",
        "CUDA_VISIBLE_DEVICES": "1",
        "A": "b",
        "TFPS_RANK": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONHASHSEED": "0",
    }
    assert (command.stdin, command.title) == (None, "worker 1")
    assert Path(command.argv[0]).name == "python"
