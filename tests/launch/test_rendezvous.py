"""How processes of one mpirun become a job: on one host without a word of the user, on several by mpi4py."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jobs
import mpi
import numpy as np
import psutil
import pytest

from tfps.errors import ConfigError, ConnectError, WaitTimeoutError
from tfps.launch.cluster_spec import Ranks
from tfps.launch.job import Job
from tfps.launch.rendezvous import HostLink, MpiLink, first_of_hosts, rendezvous, socket_name, start_pserver

TRAINING = """
import sys
import keras
import numpy as np
import tfps

keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
x = random.normal(size=(64, 8)).astype("float32")
y = (x.sum(1) > 0).astype("float32")
strategy = tfps.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
np.savez(f"{sys.argv[1]}/{strategy.rank}.npz", *model.get_weights())
# In one piece: processes share the output.
sys.stdout.write(f"trained {strategy.rank} of {strategy.num_workers}, {len(strategy.pservers)} pservers\\n")
strategy.close()
again = tfps.Strategy()  # as a notebook does
sys.stdout.write(f"again {again.rank} of {again.num_workers}\\n")
"""


def test_one_process_of_each_host_starts_a_pserver() -> None:
    assert first_of_hosts({0: [0, "a"], 1: [1, "a"], 2: [0, "a"], 3: [1, "a"]}) == {0, 2}  # as mpirun says
    assert first_of_hosts({0: [None, "a"], 1: [None, "a"], 2: [None, "b"], 3: [None, "b"]}) == {0, 2}


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            Ranks("PMIx", "PMIX_RANK", 1, None),
            "PMIX_RANK=1 says that PMIx has started this process with others, but not how many; start `tfps_pserver",
        ),
        (
            Ranks("srun", "SLURM_PROCID", 0, 4, has_mpi=False),
            "srun has started 4 processes on several nodes, and no pservers are named: start `tfps_launch --slurm`",
        ),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the error is another")
def test_who_cannot_find_the_others_says_what_to_do(ranks: Ranks, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        rendezvous(ranks, "", 1.0)


@pytest.mark.skipif(sys.platform != "linux" or (os.cpu_count() or 1) < 2, reason="needs Linux and several CPUs")
@pytest.mark.parametrize("by_mpi", [True, False])
def test_a_pserver_may_use_all_cpus_though_open_mpi_has_bound_its_worker_to_one(
    by_mpi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_mpi:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    free, others = os.sched_getaffinity(0), set(psutil.Process().children())
    one = {min(free)}
    os.sched_setaffinity(0, one)
    try:
        start_pserver(Job.named("mpi", 1), True)
        (pserver,) = set(psutil.Process().children()) - others
        try:
            found = {*pserver.cpu_affinity()}
            assert found >= free > one if by_mpi else found == one  # Slurm or taskset means all that is started
            assert os.sched_getaffinity(0) == one
        finally:
            pserver.kill()
    finally:
        os.sched_setaffinity(0, free)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=mpi.needs(kind)) for kind in mpi.MPIRUNS])
def test_mpirun_alone_makes_a_job(kind: str) -> None:
    result = mpi.mpirun(kind, "-n", 3, sys.executable, "-c", mpi.MEMBER)
    assert result.returncode == 0, result.stderr
    assert [words[:3] for words in mpi.members(result.stdout)] == [[str(rank), "3", "1"] for rank in range(3)]


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=mpi.needs(kind)) for kind in mpi.MPIRUNS])
def test_a_rank_that_dies_ends_all_and_no_pserver_is_left(kind: str) -> None:
    program = mpi.MEMBER.replace(
        "worker.close()",
        "import signal, time; os.kill(os.getpid(), signal.SIGKILL) if worker.rank else time.sleep(600)",
    )
    result = mpi.mpirun(kind, "-n", 2, sys.executable, "-c", program)
    assert result.returncode != 0
    (name,) = {words[3] for words in mpi.members(result.stdout)}
    jobs.poll(lambda: mpi.no_pserver_has(lambda pserver: pserver.cmdline(), name))


@pytest.mark.long
@mpi.needs("Open MPI")
def test_two_ranks_of_mpirun_train_to_the_same_weights(tmp_path: Path) -> None:
    # Nothing is said in time on a busy machine, where importing TensorFlow alone takes a minute.
    more = {"TFPS_CONNECT_TIMEOUT_S": "240", "TF_CPP_MIN_LOG_LEVEL": "2"}
    result = mpi.mpirun("Open MPI", "-n", 2, sys.executable, "-c", TRAINING, tmp_path, **more)
    assert result.returncode == 0, result.stderr
    said = sorted(line for line in result.stdout.splitlines() if line.startswith(("trained", "again")))
    expected = ["again 0 of 2", "again 1 of 2", "trained 0 of 2, 1 pservers", "trained 1 of 2, 1 pservers"]
    assert said == expected
    first, second = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    assert first.files == second.files
    assert len(first.files) == 4
    for name in first.files:
        assert first[name].tobytes() == second[name].tobytes()


NEEDS_LINUX = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
RANKS = Ranks("mpirun (PMI)", "PMI_RANK", 1, 2, 1, 2, "somebody's")


@pytest.fixture
def start() -> Iterator[ExitStack]:
    """Ends all processes that enter it."""
    with ExitStack() as stack:
        yield stack


def member(start: ExitStack, rank: int, workers: int, **more: str) -> subprocess.Popen[str]:
    process = start.enter_context(mpi.believing(rank, workers, **more))
    start.callback(process.kill)
    return process


@NEEDS_LINUX
def test_all_find_the_pserver_of_rank_0_and_it_ends_with_them(start: ExitStack) -> None:
    processes = [member(start, rank, 3) for rank in range(3)]
    results = [process.communicate(timeout=jobs.DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    found = [mpi.members(out)[0] for out, _ in results]
    jobs_names = {name for *_, name in found}
    assert [words[:3] for words in found] == [[str(rank), "3", "1"] for rank in range(3)]
    assert len(jobs_names) == 1
    (name,) = jobs_names
    jobs.poll(lambda: mpi.no_pserver_has(lambda pserver: pserver.cmdline(), name))


@NEEDS_LINUX
def test_who_does_not_come_is_named_and_no_pserver_is_left(start: ExitStack) -> None:
    process = member(start, 0, 4, LIMIT_S="0.2")
    _, errors = process.communicate(timeout=jobs.DEADLINE_S)
    assert errors.strip().endswith(
        "rank 0: 3 of the 4 processes of mpirun (PMI) did not create a tfps.Strategy within 0.2 s (connect_timeout_s): "
        "rank 1, 2, 3"
    )
    jobs.poll(lambda: mpi.no_pserver_has(lambda pserver: [pserver.environ().get("LIMIT_S", "")], "0.2"))


@NEEDS_LINUX
def test_without_rank_0_the_error_says_so() -> None:
    with pytest.raises(WaitTimeoutError, match=r"rank 0 of the 2 processes of mpirun .* within 0\.3 s .* is rank 1"):
        rendezvous(RANKS, "", 0.3)


@NEEDS_LINUX
def test_a_second_rank_0_is_refused() -> None:
    first = Ranks("mpirun (PMI)", "PMI_RANK", 0, 2, 0, 2, "taken")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(socket_name(first))
        with pytest.raises(ConnectError, match="cannot listen for the others, another process with rank 0 does"):
            rendezvous(first, "", 0.3)


@NEEDS_LINUX
def test_jobs_and_their_starts_have_names_of_their_own() -> None:
    other = Ranks("mpirun (PMI)", "PMI_RANK", 1, 2, 1, 2, "another's")
    assert socket_name(RANKS) == socket_name(RANKS)
    assert socket_name(RANKS) != socket_name(other)


@NEEDS_LINUX
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_ends_meanwhile_ends_the_wait_of_the_others(lost: int) -> None:
    ranks = [Ranks("mpirun (PMI)", "PMI_RANK", rank, 3, rank, 3, "lost") for rank in range(2)]
    links = [HostLink(each, jobs.DEADLINE_S) for each in ranks]
    links[1].send(0, ["hello"])
    assert links[0].receive([1]) == {1: ["hello"]}
    links[lost].close()
    with pytest.raises(ConnectError, match=f"rank {lost} of mpirun .* ended before all processes had found each other"):
        links[1 - lost].receive([lost])
    links[1 - lost].close()


@NEEDS_LINUX
def test_a_killed_rank_0_leaves_nothing(start: ExitStack) -> None:
    process = member(start, 0, 2, LIMIT_S="300")
    own = psutil.Process(process.pid)
    jobs.poll(lambda: bool(own.children()))
    (pserver,) = own.children()
    process.send_signal(signal.SIGKILL)
    jobs.poll(lambda: not pserver.is_running() or pserver.status() == psutil.STATUS_ZOMBIE)


WITHOUT = "import os; [os.environ.pop(name) for name in list(os.environ) if name.startswith('{prefix}')]\n"


@pytest.mark.long
@mpi.needs("Open MPI", mpi4py=True)
def test_each_host_has_a_pserver_and_all_know_all(tmp_path: Path) -> None:
    result = mpi.mpirun("Open MPI", *mpi.two_hosts(tmp_path), sys.executable, "-c", mpi.MEMBER)
    assert result.returncode == 0, result.stderr
    found = mpi.members(result.stdout)
    assert [words[:3] for words in found] == [[str(rank), "4", "2"] for rank in range(4)]
    assert len({name for *_, name in found}) == 1


@pytest.mark.long
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


@pytest.mark.long
@mpi.needs("MPICH", mpi4py=True)
def test_pmi_without_local_ranks_has_one_pserver_on_a_host(tmp_path: Path) -> None:
    for library in Path("/usr/lib").glob("*/libmpich.so.12"):  # Debian's, by the name that mpi4py looks for
        (tmp_path / "libmpi.so.12").symlink_to(library)
    program = WITHOUT.format(prefix="MPI_LOCAL") + mpi.MEMBER
    result = mpi.mpirun("MPICH", "-n", 3, sys.executable, "-c", program, LD_LIBRARY_PATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert [words[:3] for words in mpi.members(result.stdout)] == [[str(rank), "3", "1"] for rank in range(3)]


@pytest.mark.long
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


@pytest.mark.long
@mpi.needs("Open MPI", mpi4py=True)
def test_where_no_process_says_that_it_is_the_first_of_its_host_rank_0_starts_a_pserver() -> None:
    wrong = "import os; os.environ.update(OMPI_COMM_WORLD_LOCAL_RANK='5', OMPI_COMM_WORLD_LOCAL_SIZE='9')\n"
    result = mpi.mpirun("Open MPI", "-n", 2, sys.executable, "-c", wrong + mpi.MEMBER)
    assert result.returncode == 0, result.stderr
    assert [words[:3] for words in mpi.members(result.stdout)] == [["0", "2", "1"], ["1", "2", "1"]]


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
@mpi.needs("Open MPI", mpi4py=True)
def test_another_mpi_than_that_of_mpirun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_MPIABI", "openmpi")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="it sees 1 processes: it has loaded another MPI than that of mpirun"):
        MpiLink(Ranks("mpirun (PMI)", "PMI_RANK", 1, 4), 1.0)
