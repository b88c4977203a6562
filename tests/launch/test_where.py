"""`tfps_launch --logdir`: what is recorded, and what is said of where to look."""

from __future__ import annotations

import shlex

import jobs
import launching
import pytest
from launching import WriteScript, launch

from tfps.config import TraceRequest
from tfps.errors import ConfigError
from tfps.launch.hosts import Host, Placement
from tfps.launch.options import Plan
from tfps.launch.where import FIRST, LAST, trace_variables, where_to_look

HERE = Placement(("localhost",) * 2, ("localhost",) * 2)
ELSEWHERE = Placement.of([Host("a", 2), Host("b", 1)], 1)


def test_what_a_worker_is_told_asks_for_a_capture_of_some_steps_in_that_directory() -> None:
    for logdir in ("logs", "gs://bucket:80/a b"):
        asked = TraceRequest.from_environment(trace_variables(logdir))
        assert asked == TraceRequest(logdir, FIRST, LAST)
    assert trace_variables(None) == {}


@pytest.mark.parametrize("place", [HERE, ELSEWHERE], ids=["here", "elsewhere"])
def test_what_is_said_can_be_pasted_into_a_shell(place: Placement) -> None:
    (line,) = where_to_look("my logs", place, None)
    assert shlex.split(line, comments=True) == ["tensorboard", "--logdir", "my logs"]


def test_each_pserver_whose_port_is_known_has_its_address_in_the_line() -> None:
    assert where_to_look("logs", HERE, 9100) == [
        "tensorboard --logdir logs",
        "metrics at http://127.0.0.1:9100/metrics http://127.0.0.1:9101/metrics",
    ]
    assert where_to_look("logs", HERE, 0) == ["tensorboard --logdir logs"]
    assert where_to_look(None, HERE, 9100) == []


def test_what_is_on_other_hosts_is_said_to_be_there() -> None:
    assert where_to_look("logs", ELSEWHERE, 9100) == [
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
        "tfps_launch: tensorboard --logdir logs",
        f"tfps_launch: metrics at http://127.0.0.1:{port}/metrics http://127.0.0.1:{port + 1}/metrics",
        "[worker 0] told logs:10-20",
    ]
    for url in said[1].split()[-2:]:
        assert f"metrics at {url}\n" in result.stderr  # the pservers themselves say so, too
