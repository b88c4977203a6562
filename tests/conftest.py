"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import tfps

# TensorFlow reads this when it is imported, here and in the processes that tests start: only warnings and errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


@pytest.fixture
def remote() -> Iterator[tfps.Strategy]:
    """One worker over gRPC, two pservers, many small slices."""
    import tfps  # here: most tests need no TensorFlow
    from tfps.server import ParameterServer

    servers = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(2)]
    config = tfps.Config(slice_bytes=1024, window_bytes=2048)
    strategy = tfps.Strategy([server.address for server in servers], config=config)
    yield strategy
    strategy.close()
    for server in servers:
        server.stop()
