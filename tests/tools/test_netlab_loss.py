"""Links that lose packets: a share of single frames, at random, in both directions."""

from __future__ import annotations

import socket
import subprocess
import sys

import jobs
import pytest

from tools import netlab, netlab_loss
from tools.netlab import Host, Loss, Netlab, NetlabError
from tools.netlab_loss import Passed
from tools.netlab_probe import FRAME, MTU

REASON = netlab.unavailable()
needs_labs = pytest.mark.skipif(REASON is not None, reason=str(REASON))
NBYTES = 4_000_000

# Takes a connection, and tells what came through it.
TAKE = """
import hashlib, socket
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    with connection:
        print(hashlib.sha256(connection.makefile("rb").read()).hexdigest())
"""
GIVE = """
import hashlib, random, socket, sys
data = random.Random(1).randbytes(int(sys.argv[3]))
print(hashlib.sha256(data).hexdigest())
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as connection:
    connection.sendall(data)
"""


def run(host: Host, *command: str) -> subprocess.Popen[str]:
    return host.popen(command, stdout=subprocess.PIPE, text=True)


def sent_again(host: Host) -> int:
    """Segments that this host's TCP has sent more than once."""
    said, _ = run(host, "cat", "/proc/net/snmp").communicate(timeout=jobs.DEADLINE_S)
    names, values = (line.split() for line in said.splitlines() if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["RetransSegs"])


def transfer(sender: Host, receiver: Host) -> None:
    """All that one host sends comes to the other as it was."""
    taking = run(receiver, sys.executable, "-c", TAKE)
    assert taking.stdout is not None
    giving = run(sender, sys.executable, "-c", GIVE, receiver.name, taking.stdout.readline().strip(), str(NBYTES))
    sent, _ = giving.communicate(timeout=jobs.DEADLINE_S)
    received, _ = taking.communicate(timeout=jobs.DEADLINE_S)
    assert received == sent != ""


def transferred(loss: Loss, share: float, sender: Host, receiver: Host) -> Passed:
    loss.look(share)
    transfer(sender, receiver)
    return loss.look()


@needs_labs
def test_a_share_of_single_packets_is_lost_in_each_direction_and_tcp_sends_them_again() -> None:
    with Netlab(hosts=2, rate_mbit=500) as lab, lab.lossy(lab.hosts[:1], 0.0) as loss:
        for sender, receiver in (lab.hosts, reversed(lab.hosts)):
            undisturbed = transferred(loss, 0.0, sender, receiver)
            assert undisturbed.frames > NBYTES / MTU
            assert undisturbed.largest == FRAME
            assert (undisturbed.dropped, undisturbed.missed) == (0, 0)
            before = sent_again(sender)
            lossy = transferred(loss, 0.05, sender, receiver)
            assert 0.03 < lossy.dropped / lossy.frames < 0.07
            assert (lossy.largest, lossy.missed) == (FRAME, 0)
            assert sent_again(sender) - before > 0.02 * NBYTES / MTU


@needs_labs
def test_a_lossy_link_keeps_its_rate_and_can_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab, "ATTEMPTS", 20)  # the machine may be busy with other tests
    with Netlab(hosts=2, rate_mbit=20) as lab, lab.lossy(lab.hosts, 0.0) as loss:
        lab.probe()
        host = lab.hosts[0]
        lab.plug(host, out=True)
        ask = f"import socket\nsocket.create_connection(('{host.address}', 1), 0.5)"
        asking = lab.hosts[1].popen([sys.executable, "-c", ask], stderr=subprocess.PIPE, text=True)
        assert asking.communicate(timeout=jobs.DEADLINE_S)[1].rstrip().endswith("TimeoutError: timed out")
        lab.plug(host)
        transfer(*lab.hosts)
        assert loss.look().missed == 0


def test_a_share_that_is_none_is_refused() -> None:
    lab = Netlab(hosts=1, rate_mbit=100)
    with pytest.raises(NetlabError, match=r"share must be from 0 to 1, got 1\.5$"), lab.lossy(lab.hosts, 1.5):
        pass


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_with_the_same_seed_the_same_frames_of_a_direction_are_lost(share: float) -> None:
    def arrived(seed: str) -> list[int]:
        came, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        sink, goes = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with came, source, sink, goes:
            source.setblocking(False)
            goes.setblocking(False)
            direction, numbers = netlab_loss._Direction(source, sink, seed), list[int]()
            for number in range(3000):
                came.send(number.to_bytes(4, "big"))
                direction.pass_on(share)
                try:
                    numbers.append(int.from_bytes(goes.recv(4), "big"))
                except BlockingIOError:
                    continue
            assert (direction.frames, direction.dropped) == (3000, 3000 - len(numbers))
            return numbers

    first = arrived("1 port0")
    assert first == arrived("1 port0")
    assert abs(len(first) / 3000 - (1 - share)) < 0.02
    if 0.0 < share < 1.0:
        assert first != arrived("2 port0")
