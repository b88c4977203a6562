"""A host is cut off from the network: for long, and the others go on without it; for a short while, and all go on."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfps.types import Json
from tfps.wire.connection import RTO_MAX_MS
from tfps.wire.send_queue import SILENT_S
from tools import children, netlab
from tools.netlab import Netlab

HERE = Path(__file__).resolve().parent
REASON = netlab.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ANSWER_S = 90.0


def tcp_is_bounded() -> bool:
    """Whether the kernel bounds the time after which TCP sends again."""
    with socket.socket() as one, contextlib.suppress(OSError):
        one.setsockopt(socket.IPPROTO_TCP, *RTO_MAX_MS)
        return True
    return False


CUT = 1  # the rank of the worker whose host is cut off
HEALS_S = 3.6 if tcp_is_bounded() else 2.5  # an older kernel tries again too late: see wire/connection.py


class Cut:
    """Three workers and two pservers, each on a host of its own."""

    def __init__(self, lab: Netlab, stack: contextlib.ExitStack) -> None:
        self.lab = lab
        serve = ["-m", "tfps.pserver.cli", "--port=7070", "--workers=3", "--insecure", "--quiet", "--host=0.0.0.0"]
        hosts = lab.hosts[:2]
        servers = [stack.enter_context(children.python(serve, popen=each.popen)) for each in hosts]
        for each in servers:
            children.answer(each, ANSWER_S)
        self.host = lab.hosts[2 + CUT]
        place = {"TFPS_PSERVERS": ",".join(f"{host.address}:7070" for host in hosts)}
        self.workers: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(lab.hosts[2:]):
            environment = {**place, "TFPS_RANK": str(rank)}
            script = [str(HERE / "steps.py")]
            self.workers.append(stack.enter_context(children.python(script, environment, popen=host.popen)))
        for worker in self.workers:
            assert children.answer(worker, ANSWER_S) == "under way\n"

    def cut_for(self, seconds: float) -> None:
        self.lab.plug(self.host, out=True)
        threading.Event().wait(seconds)  # how long is what the tests are about
        self.lab.plug(self.host)

    def end(self, rank: int) -> Json:
        """Tells a worker to end; what it says."""
        with contextlib.suppress(BrokenPipeError):
            children.tell(self.workers[rank], "end")
        return json.loads(children.answer(self.workers[rank], ANSWER_S))


@pytest.fixture
def cut() -> Iterator[Cut]:
    with Netlab(hosts=5, rate_mbit=1000) as lab, contextlib.ExitStack() as stack:
        yield Cut(lab, stack)


def test_the_others_go_on_without_a_host_that_is_cut_off_and_it_ends_by_name(cut: Cut) -> None:
    cut.cut_for(10.0)
    its = cut.end(CUT)
    assert "has been silent for" in its["error"]
    assert its["error"].startswith("PserverLostError: pserver 10.77.")
    assert cut.workers[CUT].wait(ANSWER_S) == 1
    for rank in (0, 2):
        said = cut.end(rank)
        assert said["longest_s"] <= 7.0, said
        assert CUT not in said["ranks"]
        assert cut.workers[rank].wait(ANSWER_S) == 0


def test_a_cut_of_3_s_heals_without_a_loss(cut: Cut) -> None:
    cut.cut_for(HEALS_S)
    threading.Event().wait(SILENT_S)  # by then a loss would be known
    assert cut.end(0)["ranks"] == [0, 1, 2]
    for rank in (CUT, 2):
        assert "error" not in cut.end(rank)
    assert [worker.wait(ANSWER_S) for worker in cut.workers] == [0, 0, 0]
