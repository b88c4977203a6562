"""What a launcher says of a job is what its processes read; which hosts a job gets; files with its token."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import jobs
import pytest

from tfps.config import Launch
from tfps.errors import ConfigError
from tfps.launch.job import Host, Job, Placement, families, lasting_secret_file, parse_hosts, secret_file

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux has files that end with a process"
)


def test_a_worker_reads_its_place_from_the_variables() -> None:
    job = Job("train", 3, token_file="/run/token").at(["a:1", "[::1]:2"])
    variables = job.worker_variables(2)
    assert Launch.from_environment(variables) == Launch(("a:1", "[::1]:2"), 2, 3, "train")
    assert variables["TFPS_TOKEN_FILE"] == "/run/token"


def test_without_a_rank_all_workers_have_the_same_variables() -> None:
    assert Launch.from_environment(Job("train", 3).at(["a:1"]).worker_variables()).rank is None


def test_jobs_of_the_same_script_have_names_of_their_own() -> None:
    assert Job.named("train", 1).name != Job.named("train", 1).name


def test_hosts_have_their_numbers_of_workers_by_default_one() -> None:
    assert parse_hosts("a:4, b.example.org,10.0.0.4:2") == (Host("a", 4), Host("b.example.org", 1), Host("10.0.0.4", 2))


def test_an_ipv6_address_keeps_its_brackets() -> None:
    assert parse_hosts("[fd00::1]:2,[fe80::1%eth0]") == (Host("[fd00::1]", 2), Host("[fe80::1%eth0]", 1))


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:x", "a:-1", "-oProxyCommand=x", "fd00::1", "a b", "root@a"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--hosts must be HOST:WORKERS, separated by commas"):
        parse_hosts(text)


def test_a_host_that_no_resolver_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a host must be a name or an IP address, got 'a\.\.b' in --hosts: "):
        parse_hosts("a..b:2,c")


def test_a_host_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"each host must be named once, got a 2 times; write a:N"):
        parse_hosts("a,b,a")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_among_several_hosts_none_is_called_as_each_calls_itself(name: str) -> None:
    with pytest.raises(ConfigError, match="is another machine on each host"):
        parse_hosts(f"{name}:2,b:2")
    assert parse_hosts(f"{name}:2") == (Host(name, 2),)


def test_ranks_of_a_host_are_neighbors() -> None:
    placement = Placement.of([Host("a", 2), Host("b", 1)], pservers_per_host=2)
    assert placement == Placement(("a", "a", "b"), ("a", "a", "b", "b"))
    assert [placement.local_rank(rank) for rank in range(3)] == [(0, 2), (1, 2), (0, 1)]


def test_only_what_is_known_to_have_ipv6_alone_counts_as_such() -> None:
    assert [families(name) == {socket.AF_INET6} for name in ("[fd00::1]", "[::1]", "127.0.0.1")] == [True, True, False]
    assert families("no-such-host.invalid") == set()


def test_only_this_user_reads_it_and_only_for_a_while() -> None:
    with secret_file("a secret") as path:
        assert Path(path).read_text() == "a secret"
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert subprocess.run(["cat", path], capture_output=True, text=True, check=True).stdout == "a secret"
    assert not Path(path).exists()


@on_linux
def test_one_that_lasts_is_read_by_this_user_only_and_names_no_secret() -> None:
    path = Path(lasting_secret_file("a secret"))
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert subprocess.run(["cat", path], capture_output=True, text=True, check=True).stdout == "a secret"
        assert "secret" not in str(path)
        assert not Path(str(path.readlink()).split()[0]).exists()  # it is in no directory that it could stay in
    finally:
        os.close(int(path.name))


@on_linux
@pytest.mark.parametrize(
    "program",
    [
        "with secret_file('x') as path: print(path, flush=True); input()",
        "print(lasting_secret_file('x'), flush=True); input()",
    ],
)
def test_it_ends_with_a_process_that_is_killed(program: str) -> None:
    program = f"from tfps.launch.job import lasting_secret_file, secret_file\n{program}"
    with jobs.python("-c", program) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.exists()
        process.send_signal(signal.SIGKILL)
        process.wait(jobs.DEADLINE_S)
        assert not path.exists()


def test_where_there_is_no_memory_for_files_it_is_removed_on_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with secret_file("a secret") as path:
        assert Path(path).read_text() == "a secret"
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert Path(path).is_absolute() and not path.startswith("/proc")
    assert not Path(path).exists()
