"""What a launcher writes to processes on other hosts. With hosts: tests/launch/test_ssh_failures.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import IO

import launching
import pytest

from tfps.launch import remote_input
from tfps.launch.remote_input import Beats, RemoteInput

pytestmark = launching.NEEDS_POSIX

Ends = tuple[IO[bytes], IO[bytes]]  # of a pipe: to read, to write


@pytest.fixture
def ends() -> Iterator[Ends]:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb", buffering=0) as reader, os.fdopen(write_end, "wb", buffering=0) as writer:
        yield reader, writer


def test_signs_of_life_follow_what_to_run_until_the_end(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_input, "BEAT_S", 0.01)
    reader, writer = ends
    beats, one = Beats(), RemoteInput("worker 0", writer)
    one.send(b"line\n")
    beats.add(one)
    assert [reader.read(5), reader.read(1), reader.read(1)] == [b"line\n", b"\n", b"\n"]
    one.close()
    assert reader.readall().strip(b"\n") == b""  # type: ignore[attr-defined]
    beats.close()
    assert "tfps-launch-beats" not in [thread.name for thread in threading.enumerate()]


def test_a_line_that_does_not_fit_is_refused(ends: Ends) -> None:
    with pytest.raises(OSError, match=r"worker 0: arguments and variables of 2000000 bytes are too long to send"):
        RemoteInput("worker 0", ends[1]).send(b"x" * 2_000_000)


def test_neither_a_full_pipe_nor_a_reader_that_is_gone_nor_the_end_stop_the_signs(ends: Ends) -> None:
    reader, writer = ends
    one = RemoteInput("worker 0", writer)
    with pytest.raises(OSError, match="too long"):
        one.send(b"x" * 2_000_000)
    one.beat()
    reader.close()
    one.beat()
    one.send(b"line\n")
    one.close()
    one.beat()
