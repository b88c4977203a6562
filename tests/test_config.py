"""Settings validate themselves; the environment is read in one place and explicit arguments win."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Literal

import pytest

import tfps
from tfps.config import Config, Launch, Security, TraceRequest, check_address, unknown_variables, with_variables
from tfps.types import Argument, Options, Value

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slice_bytes", 0, "slice_bytes must be positive, got 0"),
        ("slice_bytes", 1.5, "slice_bytes must be a whole number of bytes or 'auto', got 1.5"),
        ("slice_bytes", 2**27, "slice_bytes must be at most 67108864 .* got 134217728"),
        ("window_bytes", -1, "window_bytes must be positive, got -1"),
        ("window_bytes", True, "window_bytes must be a whole number of bytes or 'auto', got True"),
        ("policy", "lifo", "policy must be one of 'priority', 'fifo', got 'lifo'"),
        ("placement", "random", "placement must be one of 'balanced', 'round_robin', got 'random'"),
        ("compression", "gzip", "compression must be one of 'none', 'bfloat16', .*'topk:0.01', got 'gzip'"),
        ("compression", "", "compression must be one of .* got ''"),
        ("compression", 8, "compression must be a text or a mapping of patterns of names to codecs, got 8"),
        ("compression", {"*": 8}, "compression must be a text or a mapping .* got {'\\*': 8}"),
        ("compression", "int8,onebit", r"compression must name one codec for all other variables \('\*'\), got 'int8"),
        ("compression", {"a,b": "int8"}, "a pattern of names in compression must have .* got 'a,b'"),
        ("compression", "=int8", "a pattern of names in compression must have characters, .* got ''"),
        ("compression", "topk", "topk must name the fraction that is sent, above 0 and at most 0.5, .* got 'topk'"),
        ("compression", "topk:0.6", "topk must name the fraction .* got 'topk:0.6'"),
        ("compression", "*/bias=topk:x", "topk must name the fraction .* got 'topk:x'"),
        ("update", "pserver", "update must be one of 'worker', 'server', got 'pserver'"),
        ("mode", "hogwild", "mode must be one of 'sync', 'async', 'diloco', 'local', got 'hogwild'"),
        ("quorum", 0.5, "quorum is for mode='diloco' and mode='local', got 0.5 with mode='sync'; leave it out"),
        ("staleness", 4, "staleness is for mode='async', got 4 with mode='sync'; leave it out"),
        ("inner_steps", 4, "inner_steps is for mode='diloco' and mode='local', got 4 with mode='sync'"),
        ("mode", "async", "mode='async' needs update='server', .* got 'worker'"),
        ("snapshot_steps", 0, "snapshot_steps must be a number of steps from 1, or None .*, got 0"),
        ("snapshot_steps", 4, "snapshot_steps is for min_workers with update='server', or .* min_workers=None"),
        ("deterministic", 1, "deterministic must be True or False, got 1"),
        ("staging_depth", 1, "staging_depth must be 0 .* or a whole number from 2, got 1"),
        ("staging_depth", True, "staging_depth must be 0 .* or a whole number from 2, got True"),
        ("check_every", -1, "check_every must be 0 .never. or a positive number of steps, got -1"),
        ("check_every", True, "check_every must be 0 .never. or a positive number of steps, got True"),
        ("connect_timeout_s", 0, "connect_timeout_s must be a positive number of seconds, got 0"),
        ("step_timeout_s", float("inf"), "step_timeout_s must be a positive number of seconds, got inf"),
        ("token_file", None, "token_file must be the path of a file, a string, got None"),
        ("tls_ca", b"ca", "tls_ca must be the path of a file, a string, got b'ca'"),
        ("step_timeout_s", float("nan"), "step_timeout_s must be a positive number of seconds, got nan"),
    ],
)
def test_a_bad_value_is_refused_by_field_rule_and_received(field: str, value: Value, message: str) -> None:
    with pytest.raises(tfps.ConfigError, match=message):
        tfps.Config(**{field: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "async", "staleness": -1}, "staleness must be a number of steps from 0, or None .no limit., got -1"),
        ({"mode": "async", "staleness": True}, "staleness must be a number of steps from 0, .* got True"),
        ({"mode": "async", "delay_compensation": -0.1}, "delay_compensation must be a number from 0 on, got -0.1"),
        ({"mode": "async", "deterministic": True}, "deterministic goes with mode='sync'"),
        ({"mode": "async", "outer_momentum": 0.5}, "outer_momentum is for mode='diloco', got 0.5 with mode='async'"),
        ({"mode": "diloco", "update": "server"}, "mode='diloco' needs update='worker', .* got 'server'"),
        ({"mode": "diloco", "inner_steps": 0}, "inner_steps must be a whole number from 1, got 0"),
        ({"mode": "diloco", "inner_steps": 4, "fragments": 5}, "fragments must be at most 4 with inner_steps=4: .* 5"),
        ({"mode": "local", "inner_steps": 4, "overlap_steps": 4}, "overlap_steps must be at most 3 with inner_steps=4"),
        ({"mode": "local", "outer_learning_rate": 1.0}, "outer_learning_rate is for mode='diloco', got 1.0"),
        ({"mode": "local", "quorum": 0}, "quorum must be a share of the workers above 0, at most 1, got 0"),
        ({"mode": "local", "quorum": 1.5}, "quorum must be a share of the workers above 0, at most 1, got 1.5"),
        ({"mode": "local", "quorum": 0.5, "grace_s": -1.0}, "grace_s must be a number of seconds from 0, got -1.0"),
        ({"mode": "local", "grace_s": 1.0}, "grace_s is for a quorum below 1: .* got 1.0"),
        ({"mode": "diloco", "min_workers": 1, "snapshot_steps": 1, "quorum": 0.5}, "snapshot_steps .* quorum=0.5"),
        ({"mode": "sync", "max_workers": 4}, "max_workers is for mode='sync' with min_workers, .* min_workers=None"),
        ({"mode": "sync", "min_workers": 4, "max_workers": 3}, "which it must not be below, got max_workers=3, min_w"),
        ({"mode": "diloco", "min_workers": 1, "max_workers": 4}, "max_workers is for mode='sync' .* and mode='diloco'"),
        (
            {"mode": "sync", "min_workers": 1, "max_workers": 10**6},
            "max_workers must be .* from 1 to 4096, .* got 1",
        ),
        ({"mode": "sync", "min_workers": 1, "snapshot_folder": "/s"}, "snapshot_folder is for snapshot_steps: .*='/s'"),
        ({"mode": "sync", "snapshot_steps": 1, "snapshot_folder": "/s"}, "snapshot_folder is for min_workers .*=None"),
        ({"mode": "async", "snapshot_steps": 1, "snapshot_folder": "/s"}, "snapshot_steps is for min_workers .*=None"),
        ({"mode": "diloco", "own_share": 0.2}, "own_share is for overlap_steps above 0: .* got 0.2"),
        ({"mode": "diloco", "own_share": 1.0}, "own_share must be a number from 0 on and below 1, got 1.0"),
        ({"mode": "diloco", "outer_momentum": float("nan")}, "outer_momentum must be a number .* got nan"),
        ({"mode": "diloco", "outer_learning_rate": 0}, "outer_learning_rate must be a positive number, got 0"),
    ],
)
def test_settings_of_modes_are_checked_together(values: dict[str, Argument], message: str) -> None:
    update = "server" if values["mode"] == "async" else "worker"
    with pytest.raises(tfps.ConfigError, match=message):
        tfps.Config(**{"update": update, **values})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("compresion", "tfps.Config has no argument 'compresion'; did you mean 'compression'?"),
        ("sliceBytes", "tfps.Config has no argument 'sliceBytes'; did you mean 'slice_bytes'?"),
        ("workers", "tfps.Config has no argument 'workers'; it has slice_bytes, .*, tls_key$"),
    ],
)
def test_a_field_that_there_is_not_is_refused_with_the_one_that_was_meant(name: str, message: str) -> None:
    given: Options = {name: 1}
    for make in (tfps.Config, functools.partial(dataclasses.replace, tfps.Config())):
        with pytest.raises(tfps.ConfigError, match=message):
            make(**given)


def test_explicit_arguments_win_over_the_environment_and_that_over_defaults() -> None:
    environment = {
        "TFPS_SLICE_BYTES": "1000",
        "TFPS_POLICY": "fifo",
        "TFPS_TRANSPORT": "grpc",
        "TFPS_DETERMINISTIC": "yes",
        "TFPS_STEP_TIMEOUT_S": "2.5",
    }
    config = tfps.Config.from_environment(environment, slice_bytes=2000)
    own = {"slice_bytes": 2000, "policy": "fifo", "transport": "grpc", "deterministic": True, "step_timeout_s": 2.5}
    assert config == tfps.Config(**own)  # type: ignore[arg-type]


def test_compression_has_one_spelling_and_exceptions_by_names() -> None:
    config = tfps.Config(compression={"*/bias": "none", "*": "topk:0.010", "embed*": "bfloat16"})
    assert config.compression == "topk:0.01,*/bias=none,embed*=bfloat16"
    assert config == tfps.Config.from_environment({"TFPS_COMPRESSION": " topk:1e-2 , */bias = none,embed*=bfloat16"})
    codec = config.compression_rules.codec
    names = ["dense/kernel", "dense/bias", "embedding/table", "model/embedding/bias", "model/embed/table", "unembed"]
    assert [codec(n) for n in names] == ["topk:0.01", "none", "bfloat16", "none", "bfloat16", "topk:0.01"]
    assert tfps.Config(compression={"bias": "int8"}).compression_rules.codec("model/dense/bias") == "int8"
    assert tfps.Config(compression="head/*=int8").compression_rules.codec("body/kernel") == "none"
    assert tfps.Config().compression == "none"
    assert dataclasses.replace(config, slice_bytes=64).compression == config.compression


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TFPS_SLICE_BYTES", "1 MB", "environment variable TFPS_SLICE_BYTES must be a whole number, got '1 MB'"),
        ("TFPS_DETERMINISTIC", "maybe", "environment variable TFPS_DETERMINISTIC must be 0 or 1, got 'maybe'"),
        ("TFPS_STEP_TIMEOUT_S", "soon", "environment variable TFPS_STEP_TIMEOUT_S must be a number, got 'soon'"),
        ("TFPS_POLICY", "lifo", "policy must be one of"),
    ],
)
def test_a_malformed_variable_is_refused_by_name(name: str, value: str, message: str) -> None:
    with pytest.raises(tfps.ConfigError, match=message):
        tfps.Config.from_environment({name: value})


def test_each_file_of_the_settings_wins_over_its_variable() -> None:
    environment = {"TFPS_TOKEN_FILE": "token ", "TFPS_TLS_CA": "ca", "TFPS_TLS_CERT": "cert", "TFPS_TLS_KEY": "key"}
    assert Security.of_worker(tfps.Config(), environment) == Security("token", "ca", "cert", "key")
    config = tfps.Config(token_file="own", tls_cert="c", tls_key="k")
    assert Security.of_worker(config, environment) == Security("own", "ca", "c", "k")
    assert Security.of_worker(config, {"TFPS_TLS_CA": "ca"}) == Security("own", "ca", "c", "k")
    assert Security.of_worker(tfps.Config(), {}) == Security()
    assert Security.from_environment(environment, token_file=None, insecure=True).insecure


def test_paths_are_no_variables_that_nobody_knows() -> None:
    assert (
        unknown_variables({"TFPS_TOKEN_FILE": "a", "TFPS_TLS_CA": "b", "TFPS_TLS_CERT": "c", "TFPS_TLS_KEY": "d"}) == []
    )


def test_the_launchers_variables_are_read() -> None:
    environment = {"TFPS_PSERVERS": "a:1, b:2", "TFPS_RANK": "1", "TFPS_WORKERS": "2", "TFPS_JOB": "j"}
    assert Launch.from_environment(environment) == Launch(("a:1", "b:2"), 1, 2, "j")
    assert Launch.from_environment({}) == Launch()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TFPS_RANK": "x"}, "TFPS_RANK must be a whole number, got 'x'"),
        ({"TFPS_RANK": "-1"}, "TFPS_RANK must be at least 0, got -1"),
        ({"TFPS_WORKERS": "0"}, "TFPS_WORKERS must be at least 1, got 0"),
    ],
)
def test_contradictions_of_the_launchers_variables_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(tfps.ConfigError, match=message):
        Launch.from_environment(environment)


@pytest.mark.parametrize(
    "address", ["host", "host:", ":7070", "host:port", "host:0", "host:65536", "host:²", "", None, 7070]
)
def test_an_address_must_be_host_and_port(address: Argument) -> None:
    with pytest.raises(tfps.ConfigError, match="'host:port'"):
        check_address(address)


@pytest.mark.parametrize("host", ["a..b", ".", "x" * 64 + ".example", "a b", "a\0b"])
def test_an_address_whose_host_no_resolver_takes_is_refused_by_name(host: str) -> None:
    with pytest.raises(tfps.ConfigError, match="a host must be a name or an IP address") as caught:
        check_address(f"{host}:7070")
    assert repr(host) in str(caught.value)
    assert repr(f"{host}:7070") in str(caught.value)


@pytest.mark.parametrize("host", ["a.b.", "münchen.example", "[fe80::1%eth0]", "10.0.0.1", "with_underscore"])
def test_other_hosts_are_left_to_the_resolver(host: str) -> None:
    assert check_address(f"{host}:7070") == f"{host}:7070"


def test_a_trace_is_asked_for_with_a_directory_and_two_steps() -> None:
    assert TraceRequest.from_environment({}) is None
    asked = TraceRequest.from_environment({"TFPS_TRACE": "gs://bucket:80/logs:10-20"})
    assert asked == TraceRequest("gs://bucket:80/logs", 10, 20)


@pytest.mark.parametrize("text", ["logs", "logs:10", ":1-2", "logs:a-b", "logs:-1-2", "10-20"])
def test_a_malformed_request_for_a_trace_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(tfps.ConfigError, match="TFPS_TRACE must be DIRECTORY:FIRST-LAST such as logs:10-20, got "):
        TraceRequest.from_environment({"TFPS_TRACE": text})


def test_a_trace_ends_after_its_beginning() -> None:
    with pytest.raises(tfps.ConfigError, match=r"TFPS_TRACE must be the first and the last, .* got \(20, 10\)"):
        TraceRequest.from_environment({"TFPS_TRACE": "logs:20-10"})


def test_a_variable_that_nobody_reads_is_named_with_the_nearest_that_somebody_does() -> None:
    (line,) = unknown_variables({"TFPS_SLICE_BYTE": "1", "TFPS_RANK": "0", "TFPS_TRACE": "", "HOME": ""})
    assert "TFPS_SLICE_BYTE is unknown to tfps" in line
    assert line.endswith("did you mean TFPS_SLICE_BYTES?")


def test_variables_fill_what_a_config_of_the_program_leaves_at_its_default_and_others_are_named() -> None:
    environment = {
        "TFPS_MIN_WORKERS": "1",
        "TFPS_SLICE_BYTES": "auto",
        "TFPS_COMPRESSION": " int8 ",
        "TFPS_TOKEN_FILE": "token",
        "TFPS_MODE": "",
        "TFPS_CHECK_EVERY": "50",
        "TFPS_STEP_TIMEOUT_S": "600",
    }
    config, lines = with_variables(tfps.Config(compression="int8", check_every=7), environment)
    assert config == tfps.Config(compression="int8", check_every=7, min_workers=1)
    assert lines == [
        "the environment variable TFPS_CHECK_EVERY=50 has no effect: the program's config has check_every=7"
    ]
    del environment["TFPS_MODE"]
    assert with_variables(tfps.Config(), environment)[0] == dataclasses.replace(
        tfps.Config.from_environment(environment), token_file=tfps.Config().token_file
    )
    with pytest.raises(tfps.ConfigError, match="TFPS_MIN_WORKERS must be a whole number, got 'few'"):
        with_variables(tfps.Config(), {"TFPS_MIN_WORKERS": "few"})


def test_every_variable_that_tfps_reads_or_sets_is_known() -> None:
    known = [f"TFPS_{field.name.upper()}" for field in dataclasses.fields(tfps.Config)]
    for path in [*(ROOT / "tfps").rglob("*.py"), *(ROOT / "tools").rglob("*")]:
        if path.suffix in (".py", ".sh"):
            known += re.findall(r"\bTFPS_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    assert unknown_variables(dict.fromkeys(known, "")) == []


def test_what_kubernetes_sets_for_a_service_called_tfps_is_left_alone() -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_7070_TCP", "PORT_7070_TCP_ADDR"]
    names += [f"PSERVER_{name}" for name in names]
    assert unknown_variables({f"TFPS_{name}": "" for name in names}) == []


def test_an_ipv6_address_without_brackets_is_refused_with_what_to_write() -> None:
    with pytest.raises(tfps.ConfigError, match=r"got '::1:7070'; write '\[::1\]:7070'"):
        check_address("::1:7070")
    assert check_address("[::1]:7070") == "[::1]:7070"


@pytest.mark.parametrize(
    ("slice_bytes", "one_host", "limits"),
    [
        ("auto", False, (2**16, 2**20)),
        ("auto", True, (2**23, 2**23)),
        (1024, False, (1024, 1024)),
        (2**18, False, (2**16, 2**18)),
        (2**18, True, (2**18, 2**18)),
    ],
)
def test_the_first_bucket_is_small_where_a_network_is_to_be_hidden(
    slice_bytes: int | Literal["auto"], one_host: bool, limits: tuple[int, int]
) -> None:
    assert Config(slice_bytes=slice_bytes).bucket_limits(one_host) == limits
