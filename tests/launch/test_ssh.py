"""Jobs on hosts that ssh reaches: one by a program that stands for ssh, the others by sshd in network namespaces."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import launching
import psutil
import pytest
import ssh_hosts
from launching import ROOT, WriteScript
from ssh_hosts import NEEDS_SSH_HOSTS, SshHosts, read_until

from tfps.launch.engine import Ssh
from tfps.launch.job import Host, Placement
from tools.netlab import Netlab

pytestmark = launching.NEEDS_POSIX

WAIT = "print('ready', flush=True)\nsignal.pause()"
DEAF = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAIT}\nwhile True: signal.pause()"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with Netlab(hosts=2, rate_mbit=1000) as lab:
        made = SshHosts(lab, tmp_path_factory.mktemp("hosts"))
        for index in range(2):
            made.serve(index)
        yield made


def ssh(*program: str) -> Ssh:
    return Ssh(Placement.of([Host("a")], 1), {}, "/job", "a token", 5.0, program or ("ssh",))


def told(output: str) -> list[list[object]]:
    return sorted(json.loads(line.partition("told ")[2]) for line in output.splitlines() if "told " in line)


def test_options_of_the_user_win_over_ours() -> None:
    argv = ssh("ssh", "-o", "ConnectTimeout=1").reach("[fd00::1]", "the command")
    assert argv[:3] == ["ssh", "-o", "ConnectTimeout=1"]
    assert argv[-2:] == ["fd00::1", "the command"]
    shown = subprocess.run([*argv[:-2], "-F", "none", "-G", "a"], capture_output=True, text=True, check=False)
    if shown.returncode == 0:  # ssh is installed
        assert "connecttimeout 1\n" in shown.stdout
        assert "batchmode yes\n" in shown.stdout


def test_what_ssh_reports_of_itself_is_explained() -> None:
    assert ssh("ssh", "-p", "22").explain("a", 255, False) == "`ssh -p 22 a true` must work without a question"
    assert ssh().explain("a", 255, True) == "ssh says so when it loses a"
    assert ssh().explain("a", 127, False).startswith("a needs the same Python")


def test_a_host_that_does_not_answer_is_named(tmp_path: Path, write_script: WriteScript) -> None:
    stand_in = tmp_path / "ssh"
    stand_in.write_text(
        '#!/bin/sh\nfor last; do host=$next; next=$last; done\n[ $host = a ] || exec sleep 1000\nexec sh -c "$last"\n'
    )
    stand_in.chmod(0o755)
    impatient = "from tfps.launch import cli, supervisor; cli.START_S = 2.0; supervisor.REMOTE_S = 0.0"
    program = ["-c", f"import sys; {impatient}; sys.exit(cli.main())", "--grace", "0.1", "--ssh", str(stand_in)]
    result = subprocess.run(
        [sys.executable, *program, "--hosts", "a,b", write_script("print('never')")],
        env=launching.environment(),
        capture_output=True,
        text=True,
        timeout=launching.END_S,
        check=False,
    )
    assert result.returncode == 1
    assert re.fullmatch(
        r"tfps_launch: (pserver 0 on a, )?pserver 1 on b: not ready within 2 s; [ab] has not answered",
        result.stderr.splitlines()[-1],
    )
    assert "never" not in result.stdout


@pytest.mark.long
@NEEDS_SSH_HOSTS
def test_every_process_learns_its_place_and_the_token_shows_nowhere(hosts: SshHosts, write_script: WriteScript) -> None:
    script = write_script(
        """
        import json, pathlib, psutil, socket
        from tfps.worker.worker import Worker
        path = pathlib.Path(os.environ["TFPS_TOKEN_FILE"])
        token = path.read_text()
        pservers = os.environ["TFPS_PSERVERS"].split(",")
        worker = Worker(pservers, rank=int(rank), job=os.environ["TFPS_JOB"])
        shown = []
        for process in psutil.process_iter():
            try:
                shown += [text[:20] for text in [*process.cmdline(), *process.environ().values()] if token in text]
            except psutil.Error:
                pass
        names = [address.partition(":")[0] for address in pservers]
        chosen = [os.environ.get(name) for name in ("CHOSEN", "SET", "NOT_CHOSEN", "TFPS_POLICY", "TF_CONFIG")]
        print("told", json.dumps([rank, socket.gethostname(), os.getcwd(), names, chosen, len(token) >= 32, shown]))
        print("token in", path)
        print("to standard error", file=sys.stderr)
        worker.close()
        """
    )
    result = hosts.launch(
        *("--hosts", "host0:2,host1", "--pservers-per-host", 2, "-x", "CHOSEN", "-x", "SET=b c", script),
        CHOSEN="a",
        NOT_CHOSEN="x",
        TFPS_POLICY="fifo",
        TF_CONFIG="{}",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    pservers = ["host0", "host0", "host1", "host1"]
    assert told(result.stdout) == [
        [rank, host, str(hosts.folder), pservers, ["a", "b c", None, "fifo", None], True, []]
        for rank, host in (("0", "host0"), ("1", "host0"), ("2", "host1"))
    ]
    for rank in range(3):
        assert f"[worker {rank}] to standard error\n" in result.stderr
    assert sum(line.startswith("[pserver ") and " ready at " in line for line in result.stdout.splitlines()) == 4
    files = [Path(line.split()[-1]) for line in result.stdout.splitlines() if "] token in " in line]
    assert [file.is_absolute() and not file.exists() for file in files] == [True] * 3
    jobs.poll(lambda: not hosts.running())


@pytest.mark.long
@NEEDS_SSH_HOSTS
@pytest.mark.parametrize(
    ("end", "code", "how"),
    [
        ("sys.exit(7)", 7, "ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV, "was killed by SIGSEGV"),
        ("sys.exit(255)", 255, "ended with exit code 255 (ssh says so when it loses host1)"),
    ],
)
def test_a_worker_that_fails_is_named_with_its_host(
    end: str, code: int, how: str, hosts: SshHosts, write_script: WriteScript
) -> None:
    script = write_script(f"if rank == '2': {end}\nsignal.pause()")
    result = hosts.launch("--hosts", "host0:2,host1:2", "--grace", 0.2, script)
    assert result.returncode == code
    assert result.stderr.splitlines()[-1] == f"tfps_launch: worker 2 on host1 {how}; all others were ended"
    jobs.poll(lambda: not hosts.running())


@pytest.mark.long
@NEEDS_SSH_HOSTS
@pytest.mark.parametrize("what", [WAIT, DEAF], ids=["ends", "ignores SIGTERM"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_no_process_on_any_host(
    number: signal.Signals, what: str, hosts: SshHosts, write_script: WriteScript
) -> None:
    script = write_script(f"subprocess.Popen(['sleep', '1000'])\n{what}")
    with hosts.start("--hosts", "host0:2,host1:1", "--grace", 1, script) as launcher:
        read_until(launcher.stdout, "] ready", 3)
        assert len([line for line in hosts.running() if "sleep 1000" in line]) == 3
        os.kill(launcher.pid, number)
        _, errors = launcher.communicate(timeout=ssh_hosts.END_S)
    if number == signal.SIGINT:
        assert launcher.returncode == 128 + number
        assert errors.splitlines()[-1] == "tfps_launch: ended by SIGINT; all processes were ended"
        assert not [line for line in hosts.running() if "sleep 1000" in line or "script.py" in line]
    jobs.poll(lambda: not hosts.running())


@pytest.mark.long
@NEEDS_SSH_HOSTS
def test_a_second_ctrl_c_ends_the_grace_on_all_hosts(hosts: SshHosts, write_script: WriteScript) -> None:
    script = write_script(DEAF)
    with hosts.start("--hosts", "host0,host1", "--grace", 10_000, script) as launcher:
        read_until(launcher.stdout, "] ready", 2)
        launcher.send_signal(signal.SIGINT)
        # The pservers end, the workers do not.
        jobs.poll(lambda: not [line for line in hosts.running() if "tfps.pserver.cli" in line])
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=ssh_hosts.END_S)
    assert launcher.returncode == 128 + signal.SIGINT
    assert "worker 0 on host0, worker 1 on host1: no answer; a host ends by itself within 120 s" in errors
    jobs.poll(lambda: not hosts.running())


@pytest.mark.long
@NEEDS_SSH_HOSTS
def test_more_workers_start_than_sshd_lets_in_at_a_time(hosts: SshHosts, write_script: WriteScript) -> None:
    result = hosts.launch("--hosts", "host1:24", write_script("print('done')"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("] done\n") == 24


@pytest.mark.long
@NEEDS_SSH_HOSTS
def test_what_outlives_the_job_with_its_output_open_does_not_keep_the_launcher(
    hosts: SshHosts, write_script: WriteScript
) -> None:
    script = write_script("print('left', subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)")
    result = hosts.launch("--hosts", "host1", script)
    assert result.returncode == 0, result.stderr
    left = re.search(r"left (\d+)", result.stdout)
    assert left is not None
    psutil.Process(int(left[1])).kill()


@pytest.mark.long
@NEEDS_SSH_HOSTS
@pytest.mark.parametrize("how", ["addresses", "names"])
def test_hosts_may_have_ipv6_only(how: str, hosts: SshHosts, write_script: WriteScript) -> None:
    for index, host in enumerate(hosts.hosts):
        address = ["ip", "-n", host.namespace, "addr", "replace", f"fd77::{index + 1}/64", "dev", "eth0", "nodad"]
        subprocess.run(address, check=True, timeout=ssh_hosts.END_S)
        file = Path("/etc/netns") / host.namespace / "hosts"
        if "six0" not in file.read_text():
            with file.open("a") as lines:
                lines.write("fd77::1 six0\nfd77::2 six1\n")
    script = write_script(
        """
        import jobs, numpy as np
        from tfps.config import Config
        from tfps.worker.worker import Worker
        pservers, config = os.environ["TFPS_PSERVERS"].split(","), Config(transport="tcp")
        worker = Worker(pservers, rank=int(rank), job=os.environ["TFPS_JOB"], config=config)
        (bucket,) = worker.declare([jobs.bucket(4096)])
        total = jobs.summed(jobs.push(worker, bucket, np.full(1024, int(rank) + 1, np.float32)).wait())
        print("sum", set(total.tolist()))
        worker.close()
        """
    )
    names = ("[fd77::1]", "[fd77::2]") if how == "addresses" else ("six0", "six1")
    helpers = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers'}"
    result = hosts.launch("--hosts", f"{names[0]}:1,{names[1]}:2", script, PYTHONPATH=helpers)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("] sum {6.0}\n") == 3
