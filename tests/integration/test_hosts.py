"""A job on several hosts, as users run it: by ssh, with a token and TLS; a worker dies, and the job resumes."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import jobs
import processes
import pytest
from ssh_hosts import NEEDS_SSH_HOSTS, SshHosts

from tools.certificates import Authority
from tools.netlab import Netlab

pytestmark = [NEEDS_SSH_HOSTS, pytest.mark.long, pytest.mark.timeout(900)]

TRAINED = re.compile(r"^\[worker (\d)\] trained (\d) (\w+) (\[.*\]) (\w{64})$", re.MULTILINE)


def with_certificates(hosts: SshHosts) -> dict[str, str]:
    """Each host has its own certificate at the same path; the variables that name it."""
    place, authority = hosts.folder / "tls", Authority(hosts.folder)
    place.mkdir()
    for host in hosts.hosts:
        own = hosts.folder / f"tls-{host.name}"
        own.mkdir()
        certificate = authority.sign(host.name, of=f"DNS:{host.name}")
        for name, source in (("cert.pem", certificate.cert), ("key.pem", certificate.key), ("ca.pem", authority.file)):
            (own / name).write_bytes(Path(source).read_bytes())
        hosts.serve(host.index, instead={place: own})
    return {f"TFPS_TLS_{name.upper()}": str(place / f"{name}.pem") for name in ("ca", "cert", "key")}


def run(hosts: SshHosts, folder: Path, variables: dict[str, str], *dies: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    script = Path(__file__).with_name("hosted.py")
    return hosts.launch(
        *("--hosts", "host0:2,host1:1", "--pservers-per-host", 1, "--grace", 60, script, folder, *dies),
        timeout_s=processes.TIMEOUT_S,
        TF_CPP_MIN_LOG_LEVEL="2",
        **{**variables, "PYTHONPATH": processes.PYTHONPATH},
    )


def test_a_job_whose_worker_was_killed_resumes_and_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    with Netlab(hosts=2, rate_mbit=1000) as lab:
        hosts = SshHosts(lab, tmp_path)
        variables = with_certificates(hosts)

        undisturbed = run(hosts, tmp_path / "undisturbed", variables)
        assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
        expected = sorted(TRAINED.findall(undisturbed.stdout))
        assert [found[1:4] for found in expected] == [
            ("0", "host0", "[1, 2, 3, 4, 5, 6]"),
            ("1", "host0", "[1, 2, 3, 4, 5, 6]"),
            ("2", "host1", "[1, 2, 3, 4, 5, 6]"),
        ]
        assert len({digest for *_, digest in expected}) == 1
        assert undisturbed.stdout.count(" ready at ") == 2
        assert re.findall(r"secured \(\('DNS', '(\w+)'\),\)", undisturbed.stdout) == ["host0", "host1"]

        killed = run(hosts, tmp_path / "killed", variables, "2")
        assert killed.returncode == 128 + signal.SIGKILL, killed.stdout + killed.stderr
        assert killed.stderr.splitlines()[-1].startswith("tfps_launch: worker 2 on host1 was killed by SIGKILL")
        for rank in (0, 1):
            assert re.search(
                rf"\[worker {rank}\] .*WorkerLostError: rank 2 \(host1\S*\) died at step \d+", killed.stderr
            )
        jobs.poll(lambda: not hosts.running())

        resumed = run(hosts, tmp_path / "killed", variables)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert sorted(TRAINED.findall(resumed.stdout)) == [(*found[:3], "[4, 5, 6]", found[4]) for found in expected]
        jobs.poll(lambda: not hosts.running())
