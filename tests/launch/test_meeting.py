"""How processes of one mpirun become a job: real ones, and what they say where they cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jobs
import mpi
import numpy as np
import psutil
import pytest

from tfps.errors import ConfigError
from tfps.launch.meeting import meet
from tfps.launch.own_pserver import Found, start_pserver
from tfps.launch.ranks import Ranks

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


def test_what_rank_0_tells_arrives_and_does_not_show_the_token() -> None:
    found = Found.new(2, "").at("a:1", "b:2")
    assert Found.from_line(found.line()) == found
    assert found.token not in repr(found)
    assert Found.new(2, "/some/file").token == ""


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
        meet(ranks, "", 1.0)


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
        start_pserver(Found.new(1, ""), 1, "", on_one_host=True)
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
@mpi.needs("Open MPI")
def test_two_jobs_at_a_time_do_not_mix() -> None:
    program = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {mpi.MEMBER!r}]).returncode)"
    command = f'{mpi.MPIRUNS["Open MPI"]} --oversubscribe -n 2 {sys.executable} -c "$PROGRAM"'
    result = subprocess.run(
        ["sh", "-c", f"{command} & {command} & wait"],
        env=mpi.environment(PROGRAM=program),
        capture_output=True,
        text=True,
        timeout=mpi.END_S,
        check=True,
    )
    found = mpi.members(result.stdout)
    assert [words[0] for words in found] == ["0", "0", "1", "1"], result.stderr
    assert len({name for *_, name in found}) == 2


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
