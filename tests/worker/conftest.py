"""What tests of workers share."""

from __future__ import annotations

from collections.abc import Iterator

import jobs
import pytest
from jobs import Cluster


@pytest.fixture(params=["tcp", "grpc", "shared memory"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A job over each data path; modules to which the path does not matter have a simpler one of this name."""
    jobs.use(request.param, monkeypatch)
    with Cluster() as cluster:
        yield cluster
