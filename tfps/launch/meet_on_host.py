"""Processes of one job on one host find each other: rank 0 listens at a socket whose name they all can tell.

The name is not of a file: nothing is left of it when rank 0 ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import time
from pathlib import Path

from tfps.errors import ConnectError, WaitTimeoutError
from tfps.launch.own_pserver import Found, start_pserver
from tfps.launch.ranks import Ranks

_TRY_S = 0.1  # between two tries, and how long Ctrl-C may go unnoticed
_ANSWER_S = 5.0  # for a process that has connected to say its rank
_MAX_LINE_BYTES = 65536


def meet(ranks: Ranks, token_file: str, timeout_s: float) -> Found:
    """Starts a pserver (rank 0) or asks where it is.

    Raises:
        ConnectError: the pserver did not start, or another user listens there.
        WaitTimeoutError: others did not come in time.
    """
    name = socket_name(ranks)
    if ranks.rank == 0:
        return _tell(name, ranks, token_file, timeout_s)
    return _ask(name, ranks, timeout_s)


def socket_name(ranks: Ranks) -> str:
    """What rank 0 listens at, in the abstract namespace: no other job of this host and this network has it."""
    job = ranks.job if ranks.job.startswith("slurm-") else f"{ranks.job} {_started_by(ranks)}"
    return f"\0tfps-meeting-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:32]}"


def _started_by(ranks: Ranks) -> str:
    """The process that has started the ranks, or what did it on this host: the next above that has no rank itself."""
    process = os.getpid()
    while process > 1:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            variables = []  # another user's, hence none of the ranks
        if process != os.getpid() and f"{ranks.variable}={ranks.rank}".encode() not in variables:
            return f"{process} {status[19]}"  # the time of its start: numbers are given again
        process = int(status[1])
    return "0"


def _tell(name: str, ranks: Ranks, token_file: str, timeout_s: float) -> Found:
    missing = set(range(1, ranks.workers or 1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(name)
        except OSError as error:
            raise ConnectError(
                f"rank 0 of {ranks.source} cannot listen for the others, another process with rank 0 does: {error}"
            ) from None
        listener.listen(len(missing) + 8)  # first: the others may wait for the pserver in the queue
        found = Found.new(ranks.workers or 1, token_file)
        found = found.at(start_pserver(found, ranks.workers or 1, token_file, on_one_host=True))
        listener.settimeout(_TRY_S)
        deadline = time.monotonic() + timeout_s
        while missing:
            with contextlib.suppress(TimeoutError):
                _answer(listener, found, missing)
                continue
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"{len(missing)} of the {ranks.workers} processes of {ranks.source} did not create a tfps.Strategy "
                    f"within {timeout_s:g} s (connect_timeout_s): rank {', '.join(map(str, sorted(missing)))}"
                )
    return found


def _answer(listener: socket.socket, found: Found, missing: set[int]) -> None:
    connection, _ = listener.accept()
    with connection:
        if not _is_own(connection):
            return
        connection.settimeout(_ANSWER_S)
        with contextlib.suppress(OSError, ValueError):
            rank = int(_line(connection))
            connection.sendall(found.line())
            missing.discard(rank)


def _ask(name: str, ranks: Ranks, timeout_s: float) -> Found:
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(left)
            try:
                connection.connect(name)
                if not _is_own(connection):
                    raise ConnectError(f"another user of this host answers in the place of rank 0 of {ranks.source}")
                connection.sendall(f"{ranks.rank}\n".encode())
                if (line := _line(connection)).endswith(b"\n"):
                    return Found.from_line(line)
            except OSError:
                pass  # it does not listen yet, or has ended meanwhile
        time.sleep(_TRY_S)
    raise WaitTimeoutError(
        f"rank 0 of the {ranks.workers} processes of {ranks.source} did not create a tfps.Strategy within "
        f"{timeout_s:g} s (connect_timeout_s), this is rank {ranks.rank}; all of them must be on this host and see "
        "the same processes and network, as they do outside of containers"
    )


def _is_own(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def _line(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n") and len(received) < _MAX_LINE_BYTES:
        more = connection.recv(4096)
        if not more:
            break
        received += more
    return received
