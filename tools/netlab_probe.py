"""What links deliver to TCP: the measurement behind `Netlab.probe`, by a fresh process at each end of each link."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tools.netlab_system import NetlabError

# tc counts frames with their Ethernet headers, also of a GSO packet, which it takes for the frames that it will become.
# Of the 14 + 1500 bytes of a frame, Ethernet takes 14, IPv4 20, TCP 20 and its timestamps 12.
MTU = 1500
FRAME = 14 + MTU
PAYLOAD = (FRAME - 66) / FRAME

CONNECT_S = 10.0
WARM_UP_S = 0.4  # slow start, and what the token buckets have saved up
MIN_BUFFER, MAX_BUFFER = 256 * 1024, 16 * 1024 * 1024
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33  # for root: beyond the limits in /proc/sys/net/core
_TCP_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info, 8 bytes

Start = Callable[..., "subprocess.Popen[str]"]  # as subprocess.Popen, on one host


@dataclass(frozen=True)
class Flow:
    """What to send from where to where, through a queue of `queue_bytes`."""

    name: str
    sender: Start
    receiver: Start
    address: str  # of the receiver
    rate_mbit: float
    queue_bytes: float

    @property
    def buffer_bytes(self) -> int:
        # So much that the kernels go on by themselves while a busy machine keeps the processes waiting.
        return int(min(MAX_BUFFER, max(MIN_BUFFER, self.rate_mbit * 1e6 / 8 * 0.25)))

    @property
    def window_bytes(self) -> int:
        # No more than the queue holds: behind a lost segment bytes arrive late, and then many at once.
        return int(0.75 * self.queue_bytes)


@dataclass(frozen=True)
class Measurement:
    """What the probe found for one direction ("tx" or "rx") of one host. Rates are on the wire, headers included."""

    host: str
    direction: str
    wanted_mbit: float
    payload_mbit: float

    @property
    def measured_mbit(self) -> float:
        return self.payload_mbit / PAYLOAD

    @property
    def deviation(self) -> float:
        """Of the measured rate from the wanted one, as a part of that."""
        return self.measured_mbit / self.wanted_mbit - 1

    def __str__(self) -> str:
        return (
            f"{self.host} {self.direction}: wanted {self.wanted_mbit:g} Mbit/s, measured {self.measured_mbit:.5g} "
            f"({self.deviation:+.1%}), payload {self.payload_mbit:.5g}"
        )


def measure(flows: Sequence[Flow], window_s: float) -> list[float]:
    """Mbit/s of payload of each flow, of all in the same `window_s` seconds.

    Raises:
        NetlabError: a flow gets no connection.
    """
    with ExitStack() as stack:
        receivers = [
            _start(stack, flow.receiver, "receive", flow.address, flow.buffer_bytes, flow.window_bytes)
            for flow in flows
        ]
        for flow, receiver in zip(flows, receivers, strict=True):
            _start(stack, flow.sender, "send", flow.address, flow.buffer_bytes, _answer(flow, receiver))
        for flow, receiver in zip(flows, receivers, strict=True):
            _answer(flow, receiver)
        start = time.monotonic() + WARM_UP_S
        for receiver in receivers:
            with contextlib.suppress(BrokenPipeError):  # seen below, as a missing answer
                print(start, start + window_s, file=receiver.stdin, flush=True)
        return [float(_answer(flow, receiver)) for flow, receiver in zip(flows, receivers, strict=True)]


def _start(stack: ExitStack, start: Start, *arguments: object) -> subprocess.Popen[str]:
    argv = [sys.executable, str(Path(__file__).resolve()), *map(str, arguments)]
    process = start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def _answer(flow: Flow, process: subprocess.Popen[str]) -> str:
    """Its next line. It comes in time, or its end: all that the process waits for has a deadline."""
    line = process.stdout.readline().strip() if process.stdout is not None else ""
    if not line or line.startswith("error"):
        raise NetlabError(f"{flow.name}: the probe must get through, got {line or 'no answer'}: make a new lab")
    return str(line)


def send(address: str, buffer_bytes: str, port: str) -> None:
    """Sends until the receiver has closed the connection."""
    data = bytes(256 * 1024)
    with contextlib.suppress(OSError), socket.create_connection((address, int(port)), CONNECT_S) as connection:
        connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, int(buffer_bytes))
        connection.settimeout(None)
        while True:
            connection.sendall(data)


def receive(address: str, buffer_bytes: str, window_bytes: str) -> None:
    """Tells its port, then that the sender is there; is told when to start and end; tells Mbit/s of payload."""
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(CONNECT_S)
            server.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, int(buffer_bytes))
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, int(window_bytes))
            print(server.getsockname()[1], flush=True)
            connection, _ = server.accept()
    except OSError as error:
        print(f"error: {error}", flush=True)
        return
    with connection:
        connection.settimeout(0.05)
        print("connected", flush=True)
        start, end = (float(word) for word in sys.stdin.readline().split())
        (started, before), (ended, after) = (_received_until(connection, moment) for moment in (start, end))
    print((after - before) * 8 / 1e6 / (ended - started), flush=True)


def _received_until(connection: socket.socket, moment: float) -> tuple[float, int]:
    """Reads until then; the time that it has become, and the bytes that have arrived since the connection began."""
    scratch = bytearray(1024 * 1024)
    while time.monotonic() < moment:
        with contextlib.suppress(TimeoutError):
            connection.recv_into(scratch, 0, socket.MSG_TRUNC)  # drops the bytes, which takes less time than a copy
    # The kernel's count: the process may be late with reading.
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES_RECEIVED + 8)
    return time.monotonic(), struct.unpack_from("=Q", info, _TCP_BYTES_RECEIVED)[0]


if __name__ == "__main__":
    # Ahead of what else uses the machine's cores: this measures the links, not who gets to run.
    with contextlib.suppress(PermissionError):
        os.nice(-20)
    {"send": send, "receive": receive}[sys.argv[1]](*sys.argv[2:])
