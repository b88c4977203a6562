"""What a launcher says of a job is what its processes read."""

from __future__ import annotations

from tfps.config import Launch
from tfps.launch.job import Job


def test_a_worker_reads_its_place_from_the_variables() -> None:
    job = Job("train", 3, token_file="/run/token").at(["a:1", "[::1]:2"])
    variables = job.worker_variables(2)
    assert Launch.from_environment(variables) == Launch(("a:1", "[::1]:2"), 2, 3, "train")
    assert variables["TFPS_TOKEN_FILE"] == "/run/token"


def test_without_a_rank_all_workers_have_the_same_variables() -> None:
    assert Launch.from_environment(Job("train", 3).at(["a:1"]).worker_variables()).rank is None


def test_jobs_of_the_same_script_have_names_of_their_own() -> None:
    assert Job.named("train", 1).name != Job.named("train", 1).name
