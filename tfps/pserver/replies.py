"""Sends the result of a round to all ranks.

Tested in tests/pserver/test_job.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tfps.exchange.slicing import cut
from tfps.pserver.owned_slice import Taken
from tfps.wire import frames
from tfps.wire.frames import LAST, Header, Kind
from tfps.wire.send_queue import Outgoing, SendQueue


def reply_sum(queues: Mapping[int, SendQueue], push: Header, result: memoryview, taken: Taken) -> None:
    """Sends the sum completed by `push` to all ranks: into shared memory, or in one frame for all others."""
    header = Header(Kind.REPLY, 0, push.bucket, push.index, push.priority, push.step)
    frame = frames.encode(header, result) if taken.blank is None else taken.blank.finish(header)
    content = memoryview(frame)[frames.HEADER_BYTES :]
    for rank, queue in queues.items():
        if (target := taken.targets.get(rank)) is None:
            queue.put([Outgoing(header, len(content), frame=frame)])
        else:
            queue.put([Outgoing(header, len(content), content, target=target)])


def reply_gather(queues: Iterable[SendQueue], push: Header, result: memoryview, piece_bytes: int) -> None:
    """Sends the gather completed by `push` to all ranks, in pieces of `piece_bytes`."""
    pieces = cut(len(result), piece_bytes)
    items = []
    for index, piece in enumerate(pieces):
        flags = LAST if index == len(pieces) - 1 else 0
        header = Header(Kind.REPLY, flags, push.bucket, index, push.priority, push.step)
        frame = frames.encode(header, result[piece.offset : piece.offset + piece.nbytes])  # once for all ranks
        items.append(Outgoing(header, piece.nbytes, frame=frame))
    for queue in queues:
        queue.put(items)
