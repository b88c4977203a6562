"""Hosts that ssh does not reach, that lack something, or that are lost while a job runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs
import launching
import pytest
import ssh_hosts
from launching import ROOT, WriteScript
from ssh_hosts import NEEDS_SSH_HOSTS, SshHosts, read_until

from tools.netlab import Netlab

pytestmark = [launching.NEEDS_POSIX, NEEDS_SSH_HOSTS, pytest.mark.long]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with Netlab(hosts=2, rate_mbit=1000) as lab:
        made = SshHosts(lab, tmp_path)
        made.serve(0)
        made.serve(1)
        yield made


def cut(hosts: SshHosts) -> str:
    hosts.link(1, "down")
    hosts.command += " -o ConnectTimeout=2"  # instead of 20
    return "ssh: connect to host host1 port 2222: "


def closed(hosts: SshHosts) -> str:
    hosts.stop(1)
    return "ssh: connect to host host1 port 2222: Connection refused"


def other_key(hosts: SshHosts) -> str:
    (hosts.folder / "authorized_keys").write_text((hosts.folder / "other_key.pub").read_text())
    return "root@host1: Permission denied (publickey)."


def other_host_key(hosts: SshHosts) -> str:
    key = (hosts.folder / "host_key.pub").read_text()
    (hosts.folder / "known_hosts").write_text(f"[host0]:{ssh_hosts.PORT} {key}")
    return "Host key verification failed."


@pytest.mark.parametrize("what", [cut, closed, other_key, other_host_key], ids=lambda what: str(what.__name__))
def test_a_host_that_cannot_be_reached_is_named_with_what_to_try(
    what: Callable[[SshHosts], str], hosts: SshHosts, write_script: WriteScript
) -> None:
    said = what(hosts)
    place = "host1" if what is other_key else "host0,host1"
    result = hosts.launch("--hosts", place, write_script("print('never')"))
    assert result.returncode == 255
    last = result.stderr.splitlines()[-1]
    index = 0 if what is other_key else 1
    assert last.startswith(f"tfps_launch: pserver {index} on host1 did not start, it ended with exit code 255: {said}")
    assert last.endswith(f" (`{hosts.command} host1 true` must work without a question)")
    assert "never" not in result.stdout
    hosts.link(1, "up")
    jobs.poll(lambda: not hosts.running())


def test_a_host_without_the_directory_is_named(hosts: SshHosts, write_script: WriteScript, tmp_path: Path) -> None:
    place = tmp_path / "only" / "here"
    place.mkdir(parents=True)
    hosts.serve(1, without=[place.parent])
    with hosts.start("--hosts", "host0,host1", write_script("print('never')"), cwd=place) as launcher:
        _, errors = launcher.communicate(timeout=ssh_hosts.END_S)
    assert launcher.returncode == 126
    assert errors.splitlines()[-1] == (
        "tfps_launch: pserver 1 on host1 did not start, it ended with exit code 126: tfps_launch: this host has no "
        f"directory {place}; every host needs the same program in the same place"
    )


@pytest.mark.parametrize("what", ["Python", "tfps"])
def test_a_host_without_python_or_tfps_is_named(what: str, hosts: SshHosts, write_script: WriteScript) -> None:
    python = Path(sys.executable)
    hosts.serve(1, without=[python.parent if what == "Python" else ROOT / "tfps"])
    result = hosts.launch("--hosts", "host0,host1", write_script("print('never')"))
    last = result.stderr.splitlines()[-1]
    assert last.startswith("tfps_launch: pserver 1 on host1 did not start, it ended with exit code ")
    if what == "Python":
        assert result.returncode == 127
        assert last.endswith(f"(host1 needs the same Python as this host, at {python})")
    else:
        assert result.returncode == 1
        assert "No module named" in last
        assert last.endswith(f"(`{python} -m tfps.launch.remote` must run on host1: install the same tfps there)")


def impatient(hosts: SshHosts, silence_s: float, *arguments: object) -> subprocess.Popen[str]:
    """A launcher on host0 whose hosts believe it gone after so long instead of 120 s."""
    program = (
        "import sys; from tfps.launch import cli, engine, supervisor; supervisor.BEAT_S = 1.0; "
        f"engine.SILENCE_S = {silence_s}; sys.exit(cli.main())"
    )
    return hosts.hosts[0].popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=launching.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_connection_that_is_cut_ends_the_job_here_and_there(hosts: SshHosts, write_script: WriteScript) -> None:
    script = write_script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\nsignal.pause()")
    command = f"{hosts.command} -o ServerAliveInterval=1 -o ServerAliveCountMax=3"
    launcher = impatient(hosts, 8.0, "--ssh", command, "--grace", 1, "--hosts", "host0,host1", script)
    with launcher:
        read_until(launcher.stdout, "] ready", 2)
        assert [line for line in hosts.running() if line.startswith("host1: ") and "script.py" in line]
        hosts.link(1, "down")
        _, errors = launcher.communicate(timeout=ssh_hosts.END_S)
    assert launcher.returncode == 255
    # Both connections to host1 are cut at once, and either may be noticed first.
    assert " on host1 ended with exit code 255 (ssh says so when it loses host1)" in errors.splitlines()[-1]
    assert "Timeout, server host1 not responding." in errors
    jobs.poll(lambda: not [line for line in hosts.running() if "sshd" not in line])
    hosts.link(1, "up")


def test_a_launcher_that_stands_still_loses_its_hosts(hosts: SshHosts, write_script: WriteScript) -> None:
    script = write_script("print('ready', flush=True)\nsignal.pause()")
    launcher = impatient(hosts, 8.0, "--ssh", hosts.command, "--hosts", "host1", script)
    with launcher:
        read_until(launcher.stdout, "] ready")
        launcher.send_signal(signal.SIGSTOP)
        try:
            jobs.poll(lambda: not [line for line in hosts.running() if line.startswith("host1: ") and "tfps." in line])
        finally:
            launcher.send_signal(signal.SIGCONT)
        launcher.communicate(timeout=ssh_hosts.END_S)
    assert launcher.returncode in (0, 128 + signal.SIGTERM)


def test_a_launcher_whose_output_is_not_read_keeps_its_hosts(hosts: SshHosts, write_script: WriteScript) -> None:
    script = write_script("print('ready')\nfor _ in range(40_000): print('x' * 99)\nprint('end')")
    with impatient(hosts, 15.0, "--ssh", hosts.command, "--hosts", "host0,host1", script) as launcher:
        read_until(launcher.stdout, "] ready", 2)
        enough_s = time.monotonic() + 25.0
        jobs.poll(lambda: time.monotonic() > enough_s)
        output, errors = launcher.communicate(timeout=ssh_hosts.END_S)
    assert launcher.returncode == 0, errors
    assert output.count("] end\n") == 2
