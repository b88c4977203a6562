"""Processes on several hosts find each other by mpi4py, under a real mpirun."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import mpi
import pytest

from tfps.errors import ConfigError
from tfps.launch import meet_by_mpi
from tfps.launch.ranks import Ranks

pytestmark = pytest.mark.long
WITHOUT = "import os; [os.environ.pop(name) for name in list(os.environ) if name.startswith('{prefix}')]\n"


@mpi.needs("Open MPI", mpi4py=True)
def test_each_host_has_a_pserver_and_all_know_all(tmp_path: Path) -> None:
    result = mpi.mpirun("Open MPI", *mpi.two_hosts(tmp_path), sys.executable, "-c", mpi.MEMBER)
    assert result.returncode == 0, result.stderr
    found = mpi.members(result.stdout)
    assert [words[:3] for words in found] == [[str(rank), "4", "2"] for rank in range(4)]
    assert len({name for *_, name in found}) == 1


@mpi.needs("Open MPI", mpi4py=True)
@pytest.mark.parametrize(
    "hosts", [1, pytest.param(2, marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root to name a host"))]
)
def test_pmix_without_variables_of_open_mpi_has_a_pserver_on_each_host(hosts: int, tmp_path: Path) -> None:
    program = WITHOUT.format(prefix="OMPI_COMM_WORLD_") + mpi.MEMBER
    where = mpi.two_hosts(tmp_path, with_names=True) if hosts == 2 else ["-n", 4]
    more = {"TFPS_WORKERS": "4", "MPI4PY_MPIABI": "openmpi"}
    result = mpi.mpirun("Open MPI", *where, sys.executable, "-c", program, **more)
    assert result.returncode == 0, result.stderr
    assert [words[:3] for words in mpi.members(result.stdout)] == [[str(rank), "4", str(hosts)] for rank in range(4)]


@mpi.needs("MPICH", mpi4py=True)
def test_pmi_without_local_ranks_has_one_pserver_on_a_host(tmp_path: Path) -> None:
    for library in Path("/usr/lib").glob("*/libmpich.so.12"):  # Debian's, by the name that mpi4py looks for
        (tmp_path / "libmpi.so.12").symlink_to(library)
    program = WITHOUT.format(prefix="MPI_LOCAL") + mpi.MEMBER
    result = mpi.mpirun("MPICH", "-n", 3, sys.executable, "-c", program, LD_LIBRARY_PATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert [words[:3] for words in mpi.members(result.stdout)] == [[str(rank), "3", "1"] for rank in range(3)]


@mpi.needs("Open MPI", mpi4py=True)
def test_processes_that_do_not_know_their_host_do_not_wait_without_end_for_one_that_does_not_come() -> None:
    program = f"""
import os, sys, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
{WITHOUT.format(prefix="OMPI_COMM_WORLD_")}
if rank == "2":
    from mpi4py import MPI  # else the others wait for it in MPI itself, before they look for it
    time.sleep(15)
{mpi.MEMBER}"""
    more = {"TFPS_WORKERS": "4", "MPI4PY_MPIABI": "openmpi", "LIMIT_S": "3"}
    result = mpi.mpirun("Open MPI", "-n", 4, sys.executable, "-c", program, **more)
    assert result.returncode != 0
    assert "1 of the 4 processes of PMIx did not create a tfps.Strategy within 3 s" in result.stderr
    assert "(connect_timeout_s): rank 2" in result.stderr


@mpi.needs("Open MPI", mpi4py=True)
def test_without_any_pserver_nobody_trains_alone() -> None:
    wrong = "import os; os.environ.update(OMPI_COMM_WORLD_LOCAL_RANK='5', OMPI_COMM_WORLD_LOCAL_SIZE='9')\n"
    result = mpi.mpirun("Open MPI", "-n", 2, sys.executable, "-c", wrong + mpi.MEMBER)
    assert result.returncode != 0
    assert mpi.members(result.stdout) == []
    assert "the one with local rank 0, but none of the 2 processes of mpirun (Open MPI) has it" in result.stderr


@mpi.needs("Open MPI", mpi4py=True)
def test_where_a_name_of_a_host_is_unknown_all_are_reached_by_their_addresses(tmp_path: Path) -> None:
    unknown = (
        "import os, socket\nif os.environ['OMPI_COMM_WORLD_RANK'] == '2':\n    socket.gethostname = lambda: 'no.such'\n"
    )
    program = unknown + mpi.MEMBER + "sys.stdout.write(variables['TFPS_PSERVERS'] + '\\n')"
    result = mpi.mpirun("Open MPI", *mpi.two_hosts(tmp_path), sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr
    assert len(mpi.members(result.stdout)) == 4
    (pservers,) = {line for line in result.stdout.splitlines() if "," in line}
    assert re.fullmatch(r"[\d.]+:\d+,[\d.]+:\d+", pservers)


@mpi.needs("Open MPI", mpi4py=True)
def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    program = f"""
import os, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    from mpi4py import MPI  # else the others wait for it in MPI itself, before they look for it
    time.sleep(15)
{mpi.MEMBER}"""
    result = mpi.mpirun(
        "Open MPI", *mpi.two_hosts(tmp_path), sys.executable, "-c", program, LIMIT_S="3", MPI4PY_MPIABI="openmpi"
    )
    assert result.returncode != 0
    assert "1 of the 4 processes of mpirun (Open MPI) did not create a tfps.Strategy within 3 s" in result.stderr
    assert "(connect_timeout_s): rank 2" in result.stderr


@mpi.needs("Open MPI")
def test_without_mpi4py_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not installed')")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    result = mpi.mpirun("Open MPI", *mpi.two_hosts(tmp_path), sys.executable, "-c", path + mpi.MEMBER)
    assert result.returncode != 0
    assert (
        "mpirun (Open MPI) has started 4 processes, not all of them on this host, and no pservers are named. They "
        "would find each other by mpi4py, which cannot be imported (not installed): pip install 'tfps[mpi]'; or start "
        "`tfps_pserver --workers 4` yourself and set TFPS_PSERVERS=HOST:PORT,...; or set TFPS_WORKERS=1 if each "
        "process is to train alone"
    ) in result.stderr


@mpi.needs("Open MPI", mpi4py=True)
def test_another_mpi_than_that_of_mpirun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_MPIABI", "openmpi")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="it sees 1 processes: it has loaded another MPI than that of mpirun"):
        meet_by_mpi.communicator(Ranks("mpirun (PMI)", "PMI_RANK", 1, 4))
