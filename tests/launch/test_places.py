"""Where a process of several is; more in tests/strategy/test_cluster.py, with TensorFlow's resolvers."""

from __future__ import annotations

import pytest

from tfps.errors import ConfigError
from tfps.launch.places import Cluster, locate

PMIX = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "j"}


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
