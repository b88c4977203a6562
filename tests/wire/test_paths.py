"""Which data path a worker opens where the data port cannot be reached."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from jobs import Cluster

from tfps.config import Config
from tfps.wire import paths
from tfps.wire.connection import dial

CLOSED = Config(slice_bytes=1024, shared_memory=False)


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that drops what comes, as behind a firewall: nobody accepts, and no more connections may wait."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        with pytest.raises(TimeoutError):
            for _ in range(20):
                stack.enter_context(socket.create_connection(listening.getsockname(), 0.5))
        yield int(listening.getsockname()[1])


def test_after_one_data_port_that_never_answers_the_others_get_less_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silent: int
) -> None:
    given: list[float] = []

    def dialled(*arguments: object) -> object:
        given.append(float(str(arguments[-1])))
        return dial(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(paths, "dial", dialled)
    monkeypatch.setattr(paths, "_DIAL_S", 0.4)
    monkeypatch.setattr(paths, "_NEXT_DIAL_S", 0.1)
    servers = [cluster.pserver(1) for _ in range(3)]
    for server in servers:
        server._data_port = silent  # what it tells workers
    cluster.worker([server.address for server in servers], config=CLOSED)
    assert given == [0.4, 0.1, 0.1]
    assert caplog.text.count("cannot be reached: timed out") == 3
