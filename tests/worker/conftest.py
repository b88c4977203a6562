"""What tests of workers share."""

from __future__ import annotations

from collections.abc import Iterator

import jobs
import pytest
from jobs import Cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Over the first pserver's data connection and other pservers' shared memory, unless a test asks for a path."""
    jobs.use(getattr(request, "param", "both"), monkeypatch)
    with Cluster() as cluster:
        yield cluster
