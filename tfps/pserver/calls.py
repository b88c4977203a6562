"""What the calls and streams of a pserver share: their metadata, how they end, and replies to those that failed.

Tested in tests/pserver/test_server.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from google.protobuf.message import Message

from tfps.compression import NONE
from tfps.errors import ConnectError, TfpsError
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketKind, BucketSpec
from tfps.exchange.update_spec import UpdateSpec
from tfps.protos import tfps_pb2 as pb
from tfps.wire.control import PROTOCOL_VERSION, RANK_KEY, failure_of, reply_type


def until_broken(messages: Iterator[bytes]) -> Iterator[bytes]:
    """The messages of a stream, until it ends or breaks: gRPC raises then; stream_ended handles that."""
    with contextlib.suppress(Exception):
        yield from messages


def rank_of(metadata: dict[str, object]) -> int:
    """The rank that a stream is of.

    Raises:
        ConnectError: it is no number.
    """
    text = str(metadata.get(RANK_KEY, ""))
    if not text.isdigit():
        raise ConnectError(f"metadata {RANK_KEY} must be a number, got {text!r}")
    return int(text)


def spec_of(bucket: pb.Bucket) -> BucketSpec:
    """A declared bucket.

    Raises:
        ConfigError: a value is out of range.
    """
    return BucketSpec(
        names=tuple(bucket.names),
        kind=cast("BucketKind", bucket.kind),
        nbytes=bucket.nbytes,
        dtype=bucket.dtype,
        priority=bucket.priority,
        occasional=bucket.occasional,
        codec=codec_of(bucket.codec or NONE),
        update=UpdateSpec.parse(bucket.update) if bucket.update else None,
    )


def refusal(name: str, error: TfpsError) -> Message:
    """The reply to a control call that has failed."""
    version = {"protocol_version": PROTOCOL_VERSION} if name in ("Join", "Probe") else {}
    reply: Message = reply_type(name)(**({} if name == "Leave" else {"failure": failure_of(error)}), **version)
    return reply
