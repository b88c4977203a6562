"""Jobs within a Slurm allocation, on a real Slurm."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mpi
import psutil
import pytest
from launching import END_S, ROOT
from slurm_cluster import NEEDS_SLURM, SlurmCluster

from tfps.errors import ConfigError
from tfps.launch.engine import Slurm, allocated, tasks_of_nodes
from tfps.launch.job import Host, LocalRank, Placement, Task

TASK = Task("worker 0", ("python", "train.py"), {"TFPS_RANK": "0"}, 32, LocalRank(0, 2))
WORKER = """
import os, subprocess, sys, time
rank = os.environ["TFPS_RANK"]
"""


@pytest.mark.parametrize(("text", "counts"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])])
def test_tasks_of_nodes_are_written_shortly(text: str, counts: list[int]) -> None:
    assert tasks_of_nodes(text) == counts


@pytest.mark.parametrize("text", ["", "0", "2(x3", "two", "2,,1"])
def test_malformed_tasks_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"SLURM_TASKS_PER_NODE must be like 2\(x3\),1, got {re.escape(repr(text))}"):
        tasks_of_nodes(text)


def test_without_an_allocation_there_is_an_error_that_says_where_to_use_it() -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is not set; use it in a script for sbatch, or"):
        allocated({})


def test_several_launchers_of_one_allocation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"srun has started 4 launchers .* start tfps_launch once, without srun"):
        allocated({"SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "4", "SLURM_STEP_NUM_TASKS": "4"})


@NEEDS_SLURM
def test_the_allocation_says_which_nodes_and_how_many_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=tests\nSlurmctldHost=localhost\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    nodes = {"SLURM_JOB_NODELIST": "a[08-09],b", "SLURM_TASKS_PER_NODE": "8(x2),4"}
    expected = (Host("a08", 8), Host("a09", 8), Host("b", 4))
    assert allocated({**nodes, "SLURM_NTASKS": "20"}) == expected
    one_each = (Host("a08"), Host("a09"), Host("b"))
    assert allocated(nodes) == one_each  # nobody asked for tasks: these are the CPUs
    with pytest.raises(ConfigError, match=r"is for 1 nodes, but SLURM_JOB_NODELIST=.* has 3; within a step of srun"):
        allocated({**nodes, "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"})


def engine(**environment: str) -> Slurm:
    placement = Placement.of([Host("a", 2), Host("b", 1)], 1)
    return Slurm(placement, environment, "/somewhere", "the token", 5.0)


def test_a_process_is_a_step_that_is_named_like_it_and_does_not_inherit_the_options_of_the_allocation() -> None:
    options = {"SLURM_NTASKS_PER_NODE": "2", "SLURM_EXPORT_ENV": "NONE", "SLURM_HINT": "x", "SRUN_CPUS_PER_TASK": "3"}
    others = {"SLURM_CONF": "c", "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "PATH": "/bin"}
    command = engine(**options, **others).on("b", TASK)
    assert command.environment == others
    argv = list(command.argv)
    assert argv[:2] == ["srun", "--job-name=worker-0"]
    assert {"--nodelist=b", "--ntasks=1", "--overlap", "--input=0"} <= set(argv)
    assert argv[-3:] == ["sh", "-c", f"exec {sys.executable} -m tfps.launch.remote"]
    assert command.stdin is not None
    assert not any("token" in word for word in argv)


@pytest.mark.parametrize(("asked", "of_a"), [("1", "gpu:2"), ("2", "gpu:4"), ("a100:1", "gpu:a100:2")])
def test_a_step_asks_for_the_gpus_of_all_workers_of_its_node(asked: str, of_a: str) -> None:
    assert f"--gres={of_a}" in engine(SLURM_GPUS_PER_TASK=asked).on("a", TASK).argv
    assert not [word for word in engine().on("a", TASK).argv if "gres" in word]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


def script(slurm: SlurmCluster, text: str) -> Path:
    path = slurm.folder / "script.py"
    path.write_text(WORKER + text)
    return path


def launch(slurm: SlurmCluster, allocation: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A launcher in an allocation by salloc."""
    launcher = [sys.executable, "-m", "tfps.launch", "--slurm", *arguments]
    return slurm.run("salloc", "--quiet", *allocation.split(), *launcher)


def prints(result: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(line for line in result.stdout.splitlines() if line.startswith("[worker "))


@NEEDS_SLURM
@pytest.mark.long
def test_workers_and_pservers_are_on_their_nodes(slurm: SlurmCluster) -> None:
    path = script(
        slurm,
        """
steps = subprocess.run(["squeue", "-s", "-h", "-o", "%j"], capture_output=True, text=True).stdout.split()
print(rank, os.environ["TFPS_WORKERS"], os.environ["SLURMD_NODENAME"], os.environ["TFPS_PSERVERS"], os.getcwd())
if rank == "0":
    print(*sorted(steps), file=sys.stderr)
""",
    )
    result = launch(slurm, "-N2 -n3", path)
    assert result.returncode == 0, result.stderr
    # Names that no resolver knows: the addresses are those by which Slurm reaches the nodes.
    addresses = r"127\.0\.0\.1:\d+,127\.0\.0\.1:\d+"
    for rank, (line, node) in enumerate(zip(prints(result), ("node1", "node1", "node2"), strict=True)):
        assert re.fullmatch(rf"\[worker {rank}\] {rank} 3 {node} {addresses} {slurm.folder}", line)
    (steps,) = [line for line in result.stderr.splitlines() if line.startswith("[worker 0]")]
    assert {"pserver-0", "pserver-1", "worker-0"} <= set(steps.split())
    assert not slurm.steps()


@NEEDS_SLURM
@pytest.mark.long
@pytest.mark.parametrize(
    ("allocation", "gpus"),
    [
        ("-N2 -n4 --ntasks-per-node=2 --gres=gpu:2", ["0", "1", "0", "1"]),
        ("-N2 -n4 --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-task=1", ["0", "1", "0", "1"]),
        ("-N1 -n3 --gpus=2 --mem-per-cpu=200", ["0", "1", "0"]),
        ("-N2 --exclusive --gpus-per-node=2", ["0,1", "0,1"]),
    ],
)
def test_workers_of_a_node_divide_its_gpus(slurm: SlurmCluster, allocation: str, gpus: list[str]) -> None:
    result = launch(slurm, allocation, script(slurm, "print(rank, os.environ['CUDA_VISIBLE_DEVICES'])"))
    assert result.returncode == 0, result.stderr
    assert prints(result) == [f"[worker {rank}] {rank} {gpu}" for rank, gpu in enumerate(gpus)]
    assert result.stderr == ""


@NEEDS_SLURM
@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "end", "code"),
    [
        ("sys.exit(3)", "ended with exit code 3", 3),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (the system does that when memory runs out)", 137),
    ],
)
def test_one_worker_that_fails_ends_all(slurm: SlurmCluster, how: str, end: str, code: int) -> None:
    path = script(slurm, f"if rank == '1':\n    {how}\ntime.sleep(600)")
    result = launch(slurm, "-N2 -n3", "--grace", "1", path)
    assert result.stderr.splitlines()[-1] == f"tfps_launch: worker 1 on node1 {end}; all others were ended"
    assert result.returncode == code
    assert "Exited with exit code" not in result.stderr
    assert not slurm.processes()


@NEEDS_SLURM
@pytest.mark.long
@pytest.mark.parametrize("how", ["interrupt", "terminate", "kill", "cancel"])
def test_whatever_ends_the_job_nothing_is_left_on_the_nodes(slurm: SlurmCluster, how: str) -> None:
    path = script(
        slurm,
        """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
""",
    )
    launcher = [sys.executable, "-m", "tfps.launch", "--slurm", "--grace", "2", path]
    with subprocess.Popen(
        slurm.command("salloc", "--quiet", "-N2", "-n3", *launcher),
        env=slurm.environment,
        cwd=slurm.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as salloc:
        try:
            assert salloc.stdout is not None
            for _ in range(3):
                while not (line := salloc.stdout.readline()).endswith("] ready\n"):
                    assert line, "ended too early"
            (found,) = psutil.Process(salloc.pid).children()
            running = slurm.processes()
            assert len(running) >= 2 * (2 + 3)  # each has tfps.launch.remote above it
            if how == "cancel":
                slurm.ask("scancel", *slurm.ask("squeue", "-h", "-o", "%i").split())
            else:
                found.send_signal(
                    {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}[how]
                )
            _, errors = salloc.communicate(timeout=END_S)
        finally:
            salloc.kill()
    slurm.poll(lambda: not slurm.processes() and not slurm.steps(), END_S)
    if how in ("interrupt", "terminate"):
        assert errors.splitlines()[-1] == (
            f"tfps_launch: ended by SIG{'INT' if how == 'interrupt' else 'TERM'}; all processes were ended"
        )


@NEEDS_SLURM
@pytest.mark.long
def test_srun_alone_makes_a_job_on_one_node(slurm: SlurmCluster) -> None:
    result = slurm.run("srun", "-N1", "-n3", sys.executable, "-c", mpi.MEMBER)
    assert result.returncode == 0, result.stderr
    assert [words[:3] for words in mpi.members(result.stdout)] == [[str(rank), "3", "1"] for rank in range(3)]


@NEEDS_SLURM
@pytest.mark.long
def test_a_batch_script_and_a_shell_within_an_allocation_are_alone(slurm: SlurmCluster) -> None:
    program = (
        "import os\nfrom tfps.launch.cluster_spec import ranks_of\n"
        "print(ranks_of(os.environ), os.environ['SLURM_NTASKS'])"
    )
    assert slurm.run("salloc", "--quiet", "-n4", sys.executable, "-c", program).stdout == "None 4\n"
    out = slurm.folder / "batch.out"
    script = slurm.folder / "batch.py"
    script.write_text(f"#!{sys.executable}\n{program}\n")
    assert slurm.run("sbatch", "--wait", "-n4", f"--output={out}", script).returncode == 0
    assert out.read_text() == "None 4\n"


@NEEDS_SLURM
@pytest.mark.long
def test_the_example_trains_in_a_batch_job(slurm: SlurmCluster) -> None:
    out = slurm.folder / "digits.out"
    options = ["--wait", f"--output={out}", f"--chdir={ROOT}", "--ntasks-per-node=1"]
    result = slurm.run("sbatch", *options, ROOT / "examples" / "slurm.sbatch", timeout_s=280.0)
    text = out.read_text()
    assert result.returncode == 0, text
    found = re.search(r"\[worker 0\] test_accuracy=(0\.\d+) workers=2 pservers=2 ", text)
    assert found is not None, text
    assert float(found[1]) > 0.95
