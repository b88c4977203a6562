"""Sends the result of a round to all ranks.

Tested in tests/pserver/test_job.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tfps.exchange.layout import cut
from tfps.pserver.owned_slice import Answer, Taken
from tfps.wire.frames import LAST, Header, Kind
from tfps.wire.send_queue import Outgoing, SendQueue, put_in_all


def reply(
    queues: Mapping[int, SendQueue], push: Header, result: memoryview, gather: bool, taken: Taken, piece_bytes: int
) -> None:
    """Sends the `result` completed by `push`, of a gather or a sum, to all ranks."""
    if gather:
        reply_gather(queues.values(), push, result, piece_bytes)
    else:
        reply_sum(queues, push, result, taken)


def reply_sum(queues: Mapping[int, SendQueue], push: Header, result: memoryview, taken: Taken) -> None:
    """Sends the sum completed by `push` to all ranks, to some of them into shared memory."""
    header = Header(Kind.REPLY, taken.flags, push.bucket, push.index, push.priority, push.step)
    others: list[SendQueue] = []
    for rank, queue in queues.items():
        if (encoding := taken.encoding) is not None:
            queue.put([Outgoing(header, encoding.nbytes, encoding=encoding)])
        elif (target := taken.targets.get(rank)) is not None:
            queue.put([Outgoing(header, len(result), result, target=target)])
        else:
            others.append(queue)
    put_in_all(others, [(header, result)])


def reply_each(queues: Mapping[int, SendQueue], answers: Iterable[Answer]) -> None:
    """Sends each answer to its rank alone."""
    for rank, (_, flags, bucket, index, priority, step, _), nbytes, payload, target in answers:
        header = Header(Kind.REPLY, flags, bucket, index, priority, step)
        if payload is None or target is not None:
            queues[rank].put([Outgoing(header, nbytes, payload, target=target)])
        else:
            put_in_all([queues[rank]], [(header, payload)])


def reply_gather(queues: Iterable[SendQueue], push: Header, result: memoryview, piece_bytes: int) -> None:
    """Sends the gather completed by `push` to all ranks, in pieces of `piece_bytes`."""
    pieces = cut(len(result), piece_bytes)
    parts: list[tuple[Header, memoryview]] = []
    for index, piece in enumerate(pieces):
        flags = LAST if index == len(pieces) - 1 else 0
        header = Header(Kind.REPLY, flags, push.bucket, index, push.priority, push.step)
        parts.append((header, result[piece.offset : piece.offset + piece.nbytes]))
    put_in_all(queues, parts)
