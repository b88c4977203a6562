"""Where a process of several is; more in tests/strategy/test_cluster.py, with TensorFlow's resolvers."""

from __future__ import annotations

import pytest

from tfps.errors import ConfigError
from tfps.launch.cluster_spec import Cluster, Ranks, locate, ranks_of

PMIX = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "j"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "job",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
STEP = {**BATCH, "SLURM_PROCID": "2", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


def test_processes_of_pmix_that_are_to_train_alone_do() -> None:
    assert locate(None, {**PMIX, "TFPS_WORKERS": "1"}) == Cluster()
    assert locate(None, {**PMIX, "PMIX_RANK": "0", "TFPS_WORKERS": "1"}) == Cluster()


def test_pmix_gives_the_rank_where_the_number_is_named() -> None:
    cluster = locate(None, {**PMIX, "TFPS_WORKERS": "2"})
    assert cluster.others is not None
    assert (cluster.others.rank, cluster.others.workers) == (1, 2)
    assert locate(["x:1"], {**PMIX, "TFPS_WORKERS": "2"}) == Cluster(("x:1",), 1, 2)


@pytest.mark.parametrize("pservers", [None, ["x:1"]])
def test_a_number_of_workers_that_the_rank_of_pmix_exceeds_is_refused(pservers: list[str] | None) -> None:
    message = "TFPS_WORKERS must be the number of processes that PMIx has started, above PMIX_RANK=3, got 3; set it to"
    with pytest.raises(ConfigError, match=message):
        locate(pservers, {**PMIX, "PMIX_RANK": "3", "TFPS_WORKERS": "3"})


def test_a_rank_that_somebody_names_wins_over_that_of_pmix() -> None:
    found = locate(["x:1"], {"PMIX_RANK": "3", "TFPS_RANK": "0", "TFPS_WORKERS": "2"})
    assert found == Cluster(("x:1",), 0, 2)


def test_open_mpi_says_all() -> None:
    assert ranks_of(OPEN_MPI) == Ranks("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", 3, 4, 1, 2, "job")


def test_pmi_says_all_with_mpich_and_intel_mpi() -> None:
    found = ranks_of(MPICH)
    assert found == Ranks("mpirun (PMI)", "PMI_RANK", 1, 2, 1, 2)
    assert found.on_one_host


def test_several_hosts_are_not_one() -> None:
    found = ranks_of(OPEN_MPI)
    assert found is not None
    assert not found.on_one_host


def test_a_task_of_a_step_has_its_rank_there() -> None:
    assert ranks_of(STEP) == Ranks("srun", "SLURM_PROCID", 2, 4, 0, None, "slurm-7.1", has_mpi=False)
    found = ranks_of({**STEP, "SLURM_STEP_NUM_NODES": "1"})
    assert found is not None
    assert found.on_one_host


def test_a_batch_script_and_an_interactive_shell_are_alone() -> None:
    assert ranks_of(BATCH) is None
    assert ranks_of({**BATCH, "SLURM_STEP_NUM_TASKS": "4"}) is None
    interactive = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}
    assert ranks_of({**BATCH, **interactive}) is None


def test_mpirun_within_an_allocation_wins_over_the_step_that_its_daemons_are() -> None:
    daemons = {**STEP, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    found = ranks_of({**daemons, **OPEN_MPI})
    assert found is not None
    assert (found.rank, found.workers) == (3, 4)


def test_srun_that_offers_pmi_is_srun() -> None:
    found = ranks_of({**STEP, "PMI_RANK": "2", "PMI_SIZE": "4"})
    assert found is not None
    assert (found.source, found.has_mpi) == ("srun", True)


def test_pmix_alone_does_not_know_the_number() -> None:
    assert ranks_of({"PMIX_RANK": "1", "PMIX_NAMESPACE": "j"}) == Ranks("PMIx", "PMIX_RANK", 1, None, job="j")


@pytest.mark.parametrize("environment", [{}, {**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1"}, {"PMI_RANK": "1"}])
def test_who_has_no_others_is_alone(environment: dict[str, str]) -> None:
    assert ranks_of(environment) is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PMI_RANK", "one", "environment variable PMI_RANK must be a whole number, got 'one'"),
        ("PMI_RANK", "2", "environment variable PMI_RANK must be below the number of processes, 2, got 2"),
    ],
)
def test_malformed_variables_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ranks_of({**MPICH, name: value})
