"""What a client is told that asks what a worker would get here, without joining.

Tested in tests/pserver/test_measuring.py and tests/doctor/test_pserver.py.
"""

from __future__ import annotations

from collections.abc import Callable

from tfps.errors import ConnectError
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.guard import Rate
from tfps.version import __version__
from tfps.wire.control import PROTOCOL_VERSION
from tfps.wire.shared_memory import Attached, host

_PER_S, _BURST = 20.0, 200.0  # that are answered


class Probing:
    """Answers Probe; any thread.

    Args:
        workers, job: of the pserver.
    """

    def __init__(self, workers: int, job: str) -> None:
        self._workers, self._job = workers, job
        self._rate = Rate(_PER_S, _BURST)

    def reply(
        self, request: pb.ProbeRequest, data_port: int, attach: Callable[[pb.ProbeRequest], Attached | None]
    ) -> pb.ProbeReply:
        """Answers `request`.

        Args:
            attach: opens the client's memory, as for a worker that joins.

        Raises:
            ConnectError: there are too many such calls.
        """
        if wait_s := self._rate.take():
            raise ConnectError(f"too many clients probe this pserver at once; the next may in {wait_s:.2g} s")
        return pb.ProbeReply(
            protocol_version=PROTOCOL_VERSION,
            version=__version__,
            workers=self._workers,
            job=self._job,
            data_port=data_port,
            same_host=bool(request.memory.host) and request.memory.host == host(),
            shared_memory=attach(request) is not None,
        )
