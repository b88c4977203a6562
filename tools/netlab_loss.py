"""Links that lose packets: a process passes Ethernet frames from device to device, and drops some of them at random.

`Netlab.lossy` puts it between hosts and the switch. Both ends see whole frames with their checksums, so what is dropped
is what a wire loses, and TCP sends it again. The frames of a direction that are dropped have the same numbers with the
same seed.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools import children

ANSWER_S = 60.0

# Of <linux/if_packet.h>, <asm/socket.h>, <linux/sockios.h> and <linux/ethtool.h>.
_ETH_P_ALL, _SOL_PACKET, _PACKET_STATISTICS, _PACKET_IGNORE_OUTGOING = 3, 263, 6, 23
_SO_RCVBUFFORCE, _SIOCETHTOOL = 33, 0x8946
_ETHTOOL_STXCSUM, _ETHTOOL_STSO, _ETHTOOL_SGSO = 0x17, 0x1F, 0x24
_QUEUE_BYTES = 64 * 1024 * 1024  # while a busy machine keeps this process waiting
_IN_TURN = 64  # frames of one direction before the next gets its turn


@dataclass(frozen=True)
class Passed:
    """What came in the time since the last look, over all links and in both directions."""

    frames: int
    dropped: int  # of these, by chance
    missed: int  # that came too fast, or could not be passed on
    largest: int  # bytes of a frame


class Loss:
    """Links that lose packets at present."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def look(self, share: float | None = None) -> Passed:
        """What was passed on since the last look; from now on `share` of the frames is dropped, if it is given."""
        children.tell(self._process, json.dumps(share))
        return Passed(**json.loads(children.answer(self._process, ANSWER_S)))


@contextlib.contextmanager
def lossy(start: children.Start, links: Sequence[tuple[str, str]], share: float, seed: int) -> Iterator[Loss]:
    """Connects the two devices of each link, which are where `start` starts processes."""
    command = [str(Path(__file__)), "pass", str(seed), *(device for link in links for device in link)]
    with children.python(command, popen=start) as process:
        loss = Loss(process)
        loss.look(share)
        yield loss


def single_frames(start: children.Start, *devices: str) -> None:
    """Lets devices send frames as they are on a wire: not several segments as one, with a checksum still to come."""
    with children.python([str(Path(__file__)), "single", *devices], popen=start) as process:
        children.answer(process, ANSWER_S)


def _set_single(*devices: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for device in devices:
            for feature in (_ETHTOOL_STXCSUM, _ETHTOOL_STSO, _ETHTOOL_SGSO):
                off = array.array("I", [feature, 0])
                fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), off.buffer_info()[0]))
    print("done", flush=True)


class _Direction:
    """From one device to another."""

    def __init__(self, source: socket.socket, sink: socket.socket, seed: str) -> None:
        self._source, self._sink = source, sink
        self._random = random.Random(seed)
        self._buffer = memoryview(bytearray(2**16 + 256))
        self.frames = self.dropped = self.missed = self.largest = 0

    def pass_on(self, share: float) -> None:
        """What there is, up to a bound."""
        for _ in range(_IN_TURN):
            try:
                nbytes = self._source.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENETDOWN:  # said once; then there is nothing until it is up again
                    raise
                return
            self.frames, self.largest = self.frames + 1, max(self.largest, nbytes)
            if self._random.random() < share:
                self.dropped += 1
                continue
            try:
                self._sink.send(self._buffer[:nbytes])
            except OSError:
                self.missed += 1

    def take(self) -> Passed:
        """The counts, which begin anew."""
        _, lost = struct.unpack("II", self._source.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        passed = Passed(self.frames, self.dropped, self.missed + lost, self.largest)
        self.frames = self.dropped = self.missed = self.largest = 0
        return passed


def _open(device: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _QUEUE_BYTES)
    opened.bind((device, _ETH_P_ALL))
    opened.setblocking(False)
    return opened


def _pass(seed: str, *devices: str) -> None:
    """Passes on until stdin ends. A line of it is the new share, or null; each is answered with what was passed on."""
    with contextlib.suppress(PermissionError):
        os.nice(-20)  # this stands for a wire, which does not wait for a core
    poll = select.epoll()
    poll.register(sys.stdin, select.EPOLLIN)
    directions: dict[int, _Direction] = {}
    for first, second in zip(devices[::2], devices[1::2], strict=True):
        near, far = _open(first), _open(second)
        for source, sink, name in ((near, far, first), (far, near, second)):
            directions[source.fileno()] = _Direction(source, sink, f"{seed} {name}")
            poll.register(source, select.EPOLLIN)
    share = 0.0
    while True:
        for number, _ in poll.poll():
            if number in directions:
                directions[number].pass_on(share)
                continue
            if not (line := sys.stdin.readline()):
                return
            taken = [each.take() for each in directions.values()]
            frames, dropped, missed = (
                sum(getattr(each, name) for each in taken) for name in ("frames", "dropped", "missed")
            )
            print(json.dumps(asdict(Passed(frames, dropped, missed, max(each.largest for each in taken)))), flush=True)
            if (new := json.loads(line)) is not None:
                share = new


if __name__ == "__main__":
    if sys.argv[1] == "pass":
        _pass(*sys.argv[2:])
    else:
        _set_single(*sys.argv[2:])
