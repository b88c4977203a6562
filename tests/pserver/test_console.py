"""`tfps_pserver --metrics-port` and `--status` as processes, and what the console makes of two looks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import jobs
import numpy as np
import pytest
from jobs import Cluster

from tfps.errors import ConfigError
from tfps.exchange.interface import BucketSpec
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.console import Look, rates, table
from tfps.types import Options

SERVE = ("-m", "tfps.pserver.cli", "--host=127.0.0.1", "--port=0")
START_S = 1.0  # of CPU time, that a pserver with metrics may take to start; where Python itself is slow,
START_FACTOR = 4  # so many times what this takes:
BARE = "import time, grpc, numpy, prometheus_client; print(time.process_time())"


def member(*values: float | str | bool) -> pb.MemberStatus:
    """A member whose first fields have these values."""
    names = [field.name for field in pb.MemberStatus.DESCRIPTOR.fields]
    fields: Options = dict(zip(names, values, strict=False))
    return pb.MemberStatus(**fields)


BEFORE = member(0, "host", 7, "streaming", 10, 1000, 10, 2000, 10, 0, 0, 4096, 1.0, 0)
NOW = member(0, "host", 7, "streaming", 30, 5000, 50, 3000, 20, 2, 3000, 4096, 1.2, 0)
SLOW = member(1, "other", 8, "streaming", 28, 4000, 40, 3000, 20, 0, 0, 4096, 9.0, 3, True)


def look(*members: pb.MemberStatus, state: str = "running", reason: str = "") -> Look:
    """Two seconds lie between the two looks."""
    job: Options = {"job": "digits", "workers": 2, "state": state, "reason": reason, "buckets": 3, "slices": 5}
    job |= {"version": "1.0", "memory_bytes": 2**20, "jobs": 1, "shard_bytes": 2048, "open_slices": 1}
    job |= {"generation": 2, "present": [0], "changes": ["view 2: rank 1 (other:8) died"], "lost_workers": 1}
    errors = [pb.ErrorCount(where="Join", error="ConnectError", count=2)]
    before = pb.StatusReply(cpu_s=1.0, uptime_s=100.0, members=[BEFORE], **job)
    return Look("host:1", before, pb.StatusReply(cpu_s=2.0, uptime_s=102.0, members=members, errors=errors, **job))


def test_rates_are_differences_per_second() -> None:
    found = rates(BEFORE, NOW, 2.0)
    assert (found.steps_per_s, found.received_bytes_per_s, found.sent_bytes_per_s) == (10, 2000, 500)
    assert found.late_s == pytest.approx(0.2 / 40)


@pytest.mark.parametrize("before", [None, NOW, member(0, "host", 6, "departed", 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)])
def test_a_member_of_a_new_job_has_no_rates_yet(before: pb.MemberStatus | None) -> None:
    assert rates(before, BEFORE, 2.0).received_bytes_per_s == 0


def test_the_table_shows_members_rates_who_is_behind_and_errors() -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with contextlib.closing(console.file):
        console.print(table(look(NOW, SLOW)))
    text = console.export_text()
    assert "pserver host:1, tfps 1.0, up 0:01:42, 50% of a core, 1 MiB of memory" in text
    assert "view 2: 1 of 2 workers take part; latest changes:" in text
    assert "view 2: rank 1 (other:8) died" in text
    assert "job 'digits' running: 2 of 2 workers, 3 buckets, here 5 slices with 2 KiB, 1 of them wait" in text
    assert re.search(r"0 +host:7 +streaming +30 +10.0 +0 +0.0 +0.0 +2 +3 KiB +5.0 ms +0", text)
    assert re.search(r"1 +other:8 +streaming, shared memory +28 +0.0 +2 +0.0 +0.0 +0 +0 B +0.0 ms +3", text)
    assert "errors since the start: Join: 2 ConnectError" in text
    assert "being built" not in text


@pytest.mark.parametrize("state", ["running", "joining"])
def test_the_table_says_whose_first_step_is_being_built_once_all_have_joined(state: str) -> None:
    from rich.console import Console

    new = member(1, "other", 8, "streaming", 0)
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    with contextlib.closing(console.file):
        console.print(table(look(NOW, new, state=state)))
    said = "rank 1: no step yet, the first one is being built" in console.export_text()
    assert said == (state == "running")


def test_a_failed_job_shows_its_reason() -> None:
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as captured:
        console.print(table(look(state="failed", reason="rank 1 died")))
    assert "failed: rank 1 died" in captured.get()


def test_what_others_have_named_is_no_markup() -> None:
    from rich.console import Console

    console = Console(width=200)
    foreign = "x[/x][red]:smile:\\"
    other = pb.MemberStatus()
    other.CopyFrom(NOW)
    other.host = foreign
    with console.capture() as captured:
        console.print(table(look(other, state="failed", reason=foreign)))
    assert f"{foreign}:7" in captured.get()
    assert f"failed: {foreign}" in captured.get()


def test_without_rich_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfps.pserver.console import Watcher, show

    monkeypatch.setitem(sys.modules, "rich.console", None)
    watcher = Watcher("127.0.0.1:1")
    with contextlib.closing(watcher), pytest.raises(ConfigError, match=r"pip install 'tfps\[console\]'"):
        show(watcher, 1.0)


def test_a_pserver_with_metrics_starts_fast_and_is_seen_by_curl_json_table_and_live_view() -> None:
    with jobs.python("-c", BARE) as process:
        bare_s = float(process.communicate(timeout=jobs.DEADLINE_S)[0])
    with jobs.python("-X", "importtime", *SERVE, "--workers=2", "--metrics-port=0") as process, Cluster() as cluster:
        assert process.stdout is not None
        address = process.stdout.readline().split()[3]
        cpu_s = _cpu_s(process.pid)
        assert process.stderr is not None
        said: list[str] = []
        while not said or "metrics at" not in said[-1]:
            said.append(process.stderr.readline())
        url = said[-1].split()[-1]
        imported = {line.rpartition("|")[2].strip() for line in said}
        assert {"tfps.pserver.metrics", "prometheus_client"} <= imported
        assert not {"tensorflow", "keras", "rich"} & imported
        assert cpu_s < max(START_S, START_FACTOR * bare_s), "a pserver starts in under a second, also with metrics"

        workers = cluster.workers([address], 2)
        spec = BucketSpec(("dense",), "sum", 4000, "float32", 0)
        jobs.together(*(functools.partial(worker.declare, [spec]) for worker in workers))
        for pending in [jobs.push(worker, 0, np.ones(1000, np.float32)) for worker in workers]:
            pending.wait()

        with urllib.request.urlopen(url, timeout=jobs.DEADLINE_S) as reply:
            text = reply.read().decode()
        assert 'tfps_received_bytes_total{rank="1"} 4000.0' in text
        with urllib.request.urlopen(url.replace("/metrics", "/healthz"), timeout=jobs.DEADLINE_S) as reply:
            assert reply.read() == b"ok\n"

        found = json.loads(_status(address, "--json"))
        assert (found["pserver"], found["job"]["state"], found["job"]["workers"]) == (address, "running", 2)
        assert [(m["rank"], m["received_bytes"], m["steps_behind"]) for m in found["job"]["members"]] == [
            (0, 4000, 0),
            (1, 4000, 0),
        ]
        assert {"received_bytes_per_s", "sent_bytes_per_s", "steps_per_s", "late_s"} <= set(found["job"]["members"][0])
        once = _status(address, COLUMNS="80")
        assert f"pserver {address}" in once
        assert re.search(r"^ *1  \S+:\d+ +streaming, shared memory +0", once, re.M)
        _live(address)
        workers[0].close()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=jobs.DEADLINE_S)
        assert process.returncode == 0


def _cpu_s(pid: int) -> float:
    """User and system time of a process: what starting takes where other programs do not take the cores."""
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(address: str, *options: str, **environment: str) -> str:
    with jobs.python("-m", "tfps.pserver.cli", "--status", address, *options, **environment) as process:
        out, log = process.communicate(timeout=jobs.DEADLINE_S)
    assert (process.returncode, log) == (0, "")
    return out


def _live(address: str) -> None:
    """The live view on a terminal: it comes, is drawn again, and ends at Ctrl-C."""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40", "PYTHONPATH": str(jobs.ROOT)}
    command = [sys.executable, "-m", "tfps.pserver.cli", "--status", address]
    with subprocess.Popen(command, env=environment, stdout=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        text, deadline_s = "", time.monotonic() + jobs.DEADLINE_S
        while text.count("streaming") < 6 and time.monotonic() < deadline_s:  # three looks at two members
            text += os.read(ours, 65536).decode()
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how Linux says that nobody has the terminal open any more
            while os.read(ours, 65536):
                pass
        assert process.wait(jobs.DEADLINE_S) == 0
    os.close(ours)
    assert text.count("streaming") >= 6
