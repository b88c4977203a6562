"""The commands of docs/slurm.md and docs/ssh.md run as the pages have them, on a Slurm and on hosts with sshd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import doc_blocks
import jobs
import launching
import pytest
from doc_blocks import ROOT
from slurm_cluster import NEEDS_SLURM, SlurmCluster
from ssh_hosts import NEEDS_SSH_HOSTS, SshHosts

from tools.netlab import Netlab

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

END_S = 500.0
SLURM, SSH = (doc_blocks.blocks(ROOT / "docs" / page, "sh") for page in ("slurm.md", "ssh.md"))
# On a busy machine processes start minutes apart.
VARIABLES = {"TFPS_CONNECT_TIMEOUT_S": "400", "TF_CPP_MIN_LOG_LEVEL": "2"}


def prepare(folder: Path) -> None:
    """A train.py, and an environment to activate."""
    shutil.copy(ROOT / "tests" / "doc_pages" / "train.py", folder)
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"export PATH={Path(sys.executable).parent}:$PATH\n")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    cluster.environment.update(VARIABLES)
    prepare(cluster.folder)
    yield cluster
    cluster.close()


@NEEDS_SLURM
def test_the_page_about_slurm_has_the_commands_that_are_run_here() -> None:
    firsts = [block.text.split()[0] for block in SLURM]
    assert firsts == ["#!/bin/bash", "salloc", "(umask"]


@NEEDS_SLURM
def test_the_script_for_sbatch_trains(slurm: SlurmCluster) -> None:
    batch(slurm, SLURM[0].text)


@NEEDS_SLURM
def test_the_command_for_salloc_trains(slurm: SlurmCluster) -> None:
    ended = slurm.run("bash", "-euc", SLURM[1].text, timeout_s=END_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@NEEDS_SLURM
def test_the_script_with_srun_alone_trains_with_the_pserver_that_it_starts(slurm: SlurmCluster) -> None:
    text = SLURM[2].text.replace("7070", str(jobs.unused_ports(1)))
    batch(slurm, f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks=4\nset -euo pipefail\nsource .venv/bin/activate\n{text}")


def batch(slurm: SlurmCluster, text: str) -> None:
    """Runs a script for sbatch, which must end well."""
    (slurm.folder / "script.sh").write_text(text)
    ended = slurm.run("sbatch", "--wait", "--output=said.txt", "script.sh", timeout_s=END_S)
    assert ended.returncode == 0, ended.stderr + (slurm.folder / "said.txt").read_text()


@NEEDS_SSH_HOSTS
def test_the_command_for_ssh_trains(tmp_path: Path) -> None:
    prepare(tmp_path)
    ssh = tmp_path / "bin" / "ssh"  # with the key of the test
    ssh.parent.mkdir()
    with Netlab(hosts=2, rate_mbit=1000) as lab:
        hosts = SshHosts(lab, tmp_path)
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {hosts.command.partition(" ")[2]} "$@"\n')
        ssh.chmod(0o755)
        for index in range(2):
            hosts.serve(index)
        (block,) = SSH
        path = os.pathsep.join([str(ssh.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        with lab.hosts[0].popen(
            ["bash", "-euc", block.text],
            env=launching.environment(PATH=path, **VARIABLES),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            output, _ = process.communicate(timeout=END_S)
        assert process.returncode == 0, output
