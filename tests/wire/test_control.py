"""Control calls: settings, failures, names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.config import Config, Security
from tfps.errors import ConfigError, MismatchError
from tfps.protos import tfps_pb2 as pb
from tfps.trace.recorder import RECORD, Recorder
from tfps.wire import control
from tfps.wire.control import (
    PROTOCOL_VERSION,
    SERVICE,
    config_of,
    failure_of,
    raise_failure,
    server_options,
    settings_of,
)

PROTO = Path(__file__).resolve().parent.parent.parent / "protos" / "tfps.proto"

configs = st.builds(
    Config,
    slice_bytes=st.just("auto") | st.integers(1, 2**26),
    window_bytes=st.just("auto") | st.integers(1, 2**40),
    policy=st.sampled_from(["priority", "fifo"]),
    placement=st.sampled_from(["balanced", "round_robin"]),
    deterministic=st.booleans(),
)


@given(config=configs)
def test_settings_cross_the_wire(config: Config) -> None:
    received = config_of(pb.Settings.FromString(settings_of(config).SerializeToString()))
    assert received == dataclasses.replace(
        config, slice_bytes=config.first_slice_bytes, window_bytes=config.first_window_bytes
    )


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="window_bytes must be positive, got 0"):
        config_of(pb.Settings(slice_bytes=1, policy="fifo", placement="balanced"))


def test_a_pserver_never_ends_a_connection_by_itself_as_calls_that_begin_just_then_would_fail() -> None:
    for security in (Security(), Security(token_file="file")):
        assert not [name for name, _ in server_options(security) if "max_connection_" in name]


def test_a_failure_in_a_reply_is_raised_as_its_class() -> None:
    raise_failure(pb.DeclareReply())
    with pytest.raises(MismatchError, match=r"^here: differs$"):
        raise_failure(pb.DeclareReply(failure=failure_of(MismatchError("differs"))), "here: ")


def test_the_generated_code_is_that_of_the_proto_file() -> None:
    source = PROTO.read_text()
    assert f"package {SERVICE.rpartition('.')[0]};" in source
    assert f"pservers, version {PROTOCOL_VERSION}." in source
    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        body = source.split(f"message {name} {{", 1)[1].split("}", 1)[0]
        for field in message.fields:
            assert f" {field.name} = {field.number};" in body
        assert len(re.findall(r"= \d+;", body)) == len(message.fields)
    assert source.count("\nmessage ") == len(pb.DESCRIPTOR.message_types_by_name)


def test_messages_of_a_capture_have_whole_records_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_RECORDS_BYTES", 2 * RECORD.itemsize)
    recorder = Recorder()
    recorder.start()
    for number in range(5):
        recorder.span("aggregate", number, number)
    parts = control.record_messages(recorder, number=7)
    assert [len(np.frombuffer(part.records, RECORD)) for part in parts] == [2, 2, 1]
    assert b"".join(part.records for part in parts) == recorder.records()
    (nothing,) = control.record_messages(Recorder(), number=7)
    assert (nothing.records, nothing.last, nothing.full, nothing.number) == (b"", True, False, 7)
