"""Settings of a tfps job; the only module that reads environment variables."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar, get_args

from tfps.compression import Rules, parse
from tfps.errors import ConfigError
from tfps.types import Argument, Options

Mode = Literal["sync", "async", "diloco", "local"]
Policy = Literal["priority", "fifo"]
Placement = Literal["balanced", "round_robin"]
Transport = Literal["auto", "tcp", "grpc"]
Update = Literal["worker", "server"]
OnNonfinite = Literal["pass", "skip", "raise"]
Auto = Literal["auto"]
Xla = Literal["off", "auto", "on"]

MAX_SLICE_BYTES = 64 * 2**20  # one gRPC message; beyond this nothing overlaps
# Initial sizes if tuned: small, so that even a small model fills the window; only then can bandwidth be measured.
FIRST_SLICE_BYTES, FIRST_WINDOW_BYTES = 128 * 1024, 512 * 1024
_MOST_WORKERS = 4096  # each step looks for who of them has not come
_SIZES = ("slice_bytes", "window_bytes", "xla_part_bytes")  # in bytes, or "auto"
_FILES = ("token_file", "tls_ca", "tls_cert", "tls_key")
_LOCAL_MODES: tuple[Mode, ...] = ("diloco", "local")  # workers train for themselves between two exchanges
_OF_MODES: dict[str, tuple[Mode, ...]] = {  # settings that only some modes have
    "staleness": ("async",),
    "delay_compensation": ("async",),
    "inner_steps": _LOCAL_MODES,
    "fragments": _LOCAL_MODES,
    "overlap_steps": _LOCAL_MODES,
    "own_share": _LOCAL_MODES,
    "quorum": _LOCAL_MODES,
    "grace_s": _LOCAL_MODES,
    "outer_learning_rate": ("diloco",),
    "outer_momentum": ("diloco",),
}
# Up to which small variables are fused if slices are tuned; where a network is to be hidden the first ones are smaller.
BUCKET_BYTES, LOCAL_BUCKET_BYTES, FIRST_BUCKET_BYTES = 2**20, 2**23, 64 * 1024
# Sizes with update="server": slices keep what they have, so they are not tuned.
_STATE_SLICE_BYTES, _STATE_WINDOW_BYTES = 512 * 1024, 2 * 2**20

_Given = ParamSpec("_Given")
_Class = TypeVar("_Class", bound=type)


def checks_names(what: str) -> Callable[[Callable[_Given, None]], Callable[_Given, None]]:
    """For an `__init__`: an argument that it does not take is refused with the one that was meant.

    Args:
        what: what programs call to get there: "tfps.Strategy".
    """

    def decorate(init: Callable[_Given, None]) -> Callable[_Given, None]:
        _, *known = inspect.signature(init).parameters  # without self

        @functools.wraps(init)
        def checked(*args: _Given.args, **given: _Given.kwargs) -> None:
            for name, value in given.items():
                if name not in known:
                    raise ConfigError(_unknown_argument(what, known, name, value))
            init(*args, **given)

        return checked

    return decorate


def _unknown_argument(what: str, known: Sequence[str], name: str, value: object) -> str:
    fields = [field.name for field in dataclasses.fields(Config)]
    nearest, *_ = [*difflib.get_close_matches(name, dict.fromkeys([*known, *fields]), 1, 0.8), ""]
    if nearest and nearest not in known:
        meant = f"tfps.Strategy(config=tfps.Config({nearest}={value!r}))"
        if name == nearest:
            return f"{name} is a field of tfps.Config: write {meant}"
        return f"{what} has no argument {name!r}; did you mean {meant}?"
    if nearest:
        return f"{what} has no argument {name!r}; did you mean {nearest!r}?"
    return f"{what} has no argument {name!r}; it has {', '.join(known)}"


def _checks_names(config: _Class) -> _Class:
    """Decorates `Config`, whose `__init__` dataclasses write."""
    type.__setattr__(config, "__init__", checks_names("tfps.Config")(vars(config)["__init__"]))
    return config


@_checks_names
@dataclass(frozen=True)
class Config:
    """How gradients are cut, ordered and exchanged. All workers of a job must have equal values.

    Args:
        slice_bytes: maximum slice size in bytes. Smaller slices come back sooner, each costs CPU.
            `"auto"` measures during the first steps, then chooses one size for all workers.
        window_bytes: over gRPC, bytes in flight (sent, not acknowledged) per pserver and direction; one slice may
            exceed it. Small windows keep the queue before an urgent slice short, large ones fill long links. `"auto"`
            as above.
        policy: `"priority"` sends what the forward pass needs first (P3, https://anandj.in/wp-content/uploads/sysml.pdf);
            `"fifo"` sends in the order in which the backward pass produces gradients.
        placement: which pserver owns a slice: `"balanced"` by bytes, or `"round_robin"`.
        deterministic: sum in rank order, so runs repeat bitwise; costs pserver memory (one slice per worker).
        update: where the optimizer runs: `"worker"`, or `"server"`: on the pservers, which then hold its slots; Keras'
            elementwise optimizers only (docs/update_on_server.md). Slices of `"auto"` then have 512 KiB.
        mode: when workers exchange (docs/modes.md). `"sync"`: all gradients of a step are summed. `"async"`: pservers
            apply each worker's gradient as it comes; needs `update="server"`. `"diloco"` and `"local"`: workers train
            for themselves and exchange the change of their parameters every `inner_steps` steps; pservers apply its
            mean with Nesterov momentum ("diloco", https://arxiv.org/abs/2311.08105), or take it as it is ("local").
        staleness: with "async", how many steps a worker may be ahead of the slowest; None: any number.
        delay_compensation: with "async", the factor lambda of DC-ASGD (https://arxiv.org/abs/1609.08326), 0: off.
        inner_steps: with "diloco" and "local", steps from one exchange of a variable to the next.
        fragments: with "diloco" and "local", parts of the model that are exchanged in turn, spread over `inner_steps`
            (Streaming DiLoCo, https://arxiv.org/abs/2501.18512).
        overlap_steps: with "diloco" and "local", steps that a worker goes on with before it takes what comes back.
        own_share: with `overlap_steps`, weight of the worker's own parameters in the mixture it then goes on with; the
            rest is the global parameters'.
        outer_learning_rate: with "diloco", of the pservers' optimizer.
        outer_momentum: the same.
        quorum: with "diloco" and "local", the share of the workers that an exchange waits for, above 0; 1: all. Changes
            of others count in the next one, weighted by their steps (https://arxiv.org/abs/2604.21428).
        grace_s: with a quorum, seconds that an exchange then waits for others.
        staging_depth: input batches staged on each device while it computes: 0, or at least 2 (one is copied while
            the other waits). 0 leaves input to TensorFlow; several workers must agree on the end of the data, so they
            still stage one batch.
        shared_memory: slices to and from pservers on the same host (Linux) use shared memory. False sends them through
            sockets, to measure those. Workers may differ in it.
        transport: carries slices to and from pservers on other hosts: `"tcp"` is a separate connection to the
            pserver's data port, `"grpc"` the streams of the control connection, at several times the CPU per byte.
            `"auto"` uses TCP, or gRPC if the data port is unreachable. Workers may differ in it.
        compression: codec of gradients and of what comes back on the wire: `"none"`, `"bfloat16"`, `"float16"`,
            `"int8"`, `"topk:0.01"` (the largest hundredth), `"onebit"`; the last three with error feedback. With
            exceptions by names of variables, `{"*": "int8", "bias": "none"}` or `"int8,bias=none"`. See
            docs/compression.md.
        check_every: interval in steps at which workers compare values that must be equal: each weight once per
            interval; learning rate and step counter of each step, all together once per interval; the first batch of
            an iterator and one per interval, where all ranks make the same; everything when an epoch ends. 0: never.
        min_workers: with how many workers training goes on when others are lost (docs/faults.md); None: the loss of a
            worker ends the job. With it, in mode "sync" with updates on the worker, training survives pservers as well.
        max_workers: with `min_workers` and mode "sync", how many workers the job may have: others than those that it is
            started with may join it while it trains (docs/faults.md); None: no more.
        snapshot_steps: with `min_workers` and `update="server"`, after how many steps workers take a snapshot of what
            pservers keep, each of a part; they keep their gradients since then, and training survives the loss of
            pservers. None: it does not. Each step more costs the memory of a gradient (docs/faults.md). With "diloco"
            and "local": after how many exchanges. With "async" workers keep no gradients, but the latest parameters,
            and a snapshot of slots alone.
        snapshot_folder: with `snapshot_steps`, for models with tables (docs/recommenders.md): where pservers write
            snapshots of these, a folder that all of them reach. Else a lost pserver ends such a job.
        rejoin_timeout_s: seconds that training waits for others to join when fewer than `min_workers` are left, or for
            a pserver to come back when none is left; and that one who joins waits until the others let it take part.
        on_nonfinite: what happens to a step whose gradients have, summed, a number that is not finite (NaN, infinity).
            `"pass"`: it is applied. `"skip"`: no worker applies it, and a log line names the variable and the rank.
            `"raise"`: all workers raise that instead. The last two wait for all gradients of a step before any is sent
            (docs/contract.md, "Gradients that are not finite").
        xla: what XLA compiles, in parts between sends and gates (docs/xla.md): `"auto"`: models with
            `jit_compile=True`; `"on"`: all but models with `jit_compile=False`, also what a program's own loop gives to
            `strategy.run`; `"off"`: nothing. Workers may differ in it.
        xla_part_bytes: bytes of gradients in one such part. Smaller parts leave and begin earlier, each costs compile
            time. `"auto"`: an eighth of all, from 4 MiB.
        xla_cache: a folder on this host in which TensorFlow keeps what XLA has compiled, so that a worker that starts
            again, or joins, starts sooner. For the first strategy of a process, created before TensorFlow runs any op.
        connect_timeout_s: seconds to wait for pservers to answer and for all workers to join.
        step_timeout_s: seconds one exchange may take before the step fails with an error that names missing ranks.
        token_file: path of the file with the job token, if the pservers were started with one.
        tls_ca: path of the certificates (PEM) that the pservers' must be signed by. Turns TLS on.
        tls_cert: path of this worker's certificate (PEM), if the pservers ask for one.
        tls_key: path of its key (PEM).

    Raises:
        ConfigError: a value is out of range; the message names the field.
    """

    slice_bytes: int | Auto = "auto"
    window_bytes: int | Auto = "auto"
    policy: Policy = "priority"
    placement: Placement = "balanced"
    deterministic: bool = False
    update: Update = "worker"
    mode: Mode = "sync"
    staleness: int | None = None
    delay_compensation: float = 0.0
    inner_steps: int = 50
    fragments: int = 1
    overlap_steps: int = 0
    own_share: float = 0.5
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.9
    quorum: float = 1.0
    grace_s: float = 5.0
    staging_depth: int = 2
    shared_memory: bool = True
    transport: Transport = "auto"
    compression: str | Mapping[str, str] = "none"
    check_every: int = 100
    min_workers: int | None = None
    max_workers: int | None = None
    snapshot_steps: int | None = None
    snapshot_folder: str = ""
    rejoin_timeout_s: float = 3600.0
    on_nonfinite: OnNonfinite = "pass"
    xla: Xla = "auto"
    xla_part_bytes: int | Auto = "auto"
    xla_cache: str = ""
    connect_timeout_s: float = 60.0
    step_timeout_s: float = 600.0
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def elastic(self) -> bool:
        """Whether the job goes on when workers are lost."""
        return self.min_workers is not None

    @property
    def outlives_pservers(self) -> bool:
        """Whether workers go on with other pservers when one is lost: they must have what it keeps."""
        keeps_nothing = (self.mode, self.update) == ("sync", "worker")
        return self.elastic and (keeps_nothing or self.snapshot_steps is not None)

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value != "auto" and not is_whole(value):
                raise ConfigError(f"{name} must be a whole number of bytes or 'auto', got {value!r}")
            if value != "auto" and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value}")
        if self.slice_bytes != "auto" and self.slice_bytes > MAX_SLICE_BYTES:
            raise ConfigError(f"slice_bytes must be at most {MAX_SLICE_BYTES} (64 MiB), got {self.slice_bytes}")
        for name, fits, rule in _FIELDS:
            if not fits(getattr(self, name)):
                raise ConfigError(f"{name} must be {rule}, got {getattr(self, name)!r}")
        object.__setattr__(self, "compression", str(parse(self.compression)))  # one spelling of each
        steps = self.inner_steps
        for name, most in (("fragments", steps), ("overlap_steps", steps - 1)):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{name} must be at most {most} with inner_steps={steps}: each fragment is exchanged once in so "
                    f"many steps, and comes back before it leaves again, got {getattr(self, name)}"
                )
        self._check_mode()

    def _check_mode(self) -> None:
        mode, update = self.mode, self.update
        for name, modes in _OF_MODES.items():
            if mode not in modes and getattr(self, name) != getattr(Config, name):
                raise ConfigError(
                    f"{name} is for mode={' and mode='.join(map(repr, modes))}, got {getattr(self, name)!r} with "
                    f"mode={mode!r}; leave it out, or choose that mode"
                )
        if self.own_share != Config.own_share and not self.overlap_steps:
            raise ConfigError(
                f"own_share is for overlap_steps above 0: else a worker goes on with the global parameters, got "
                f"{self.own_share!r}"
            )
        if self.grace_s != Config.grace_s and self.quorum == 1:
            raise ConfigError(f"grace_s is for a quorum below 1: else all are waited for, got {self.grace_s!r}")
        least, most = self.min_workers, self.max_workers
        if most is not None and (least is None or most < least or not self.steps_together):
            raise ConfigError(
                f"max_workers is for mode='sync' with min_workers, which it must not be below, got max_workers={most}, "
                f"min_workers={least} and mode={mode!r}"
            )
        if self.snapshot_folder and self.snapshot_steps is None:
            raise ConfigError(
                f"snapshot_folder is for snapshot_steps: give both, got snapshot_folder={self.snapshot_folder!r} alone"
            )
        if self.snapshot_folder and (mode, update) == ("sync", "worker"):
            if not self.elastic or self.quorum != 1:
                raise ConfigError(
                    f"snapshot_folder is for min_workers without a quorum, got min_workers={self.min_workers!r} and "
                    f"quorum={self.quorum!r}"
                )
        elif self.snapshot_steps is not None:
            keeps = mode in _LOCAL_MODES or update == "server"
            if not keeps or (self.elastic, self.compression, self.quorum) != (True, "none", 1):
                raise ConfigError(
                    "snapshot_steps is for min_workers with update='server', or with mode='diloco' or 'local', without "
                    f"compression or quorum, got min_workers={self.min_workers!r}, mode={mode!r}, update={update!r}, "
                    f"compression={self.compression!r} and quorum={self.quorum!r}"
                )
        if mode == "async" and update != "server":
            raise ConfigError(
                f"mode='async' needs update='server', which applies each gradient as it comes, got {update!r}"
            )
        if mode in _LOCAL_MODES and update != "worker":
            raise ConfigError(
                f"mode={mode!r} needs update='worker', as each worker trains for itself between exchanges, got "
                f"{update!r}"
            )
        if mode == "async" and self.deterministic:
            raise ConfigError("deterministic goes with mode='sync', 'diloco' and 'local': in 'async' order is chance")

    @property
    def _keeps_state(self) -> bool:
        """Whether pservers keep parameters: their slices are not tuned."""
        return self.update == "server" or self.mode in _LOCAL_MODES

    @property
    def applies_each_push(self) -> bool:
        """Whether pservers apply each gradient by itself, as it comes, instead of the sum of all."""
        return self.mode == "async"

    @property
    def steps_together(self) -> bool:
        """Whether all workers take each step together, and a worker can join a job under way between two of them."""
        return self.mode == "sync"

    @property
    def compression_rules(self) -> Rules:
        """`compression`, read."""
        return parse(self.compression)

    @property
    def first_slice_bytes(self) -> int:
        """Slice size before tuning."""
        first = _STATE_SLICE_BYTES if self._keeps_state else FIRST_SLICE_BYTES
        return first if self.slice_bytes == "auto" else self.slice_bytes

    def bucket_limits(self, one_host: bool) -> tuple[int, int]:
        """Sizes up to which small variables are fused: into a step's first bucket, and into any.

        On `one_host` there is next to no wait to hide, and each bucket costs 0.7 ms of CPU on a worker.
        """
        if self.slice_bytes == "auto":
            most = LOCAL_BUCKET_BYTES if one_host else BUCKET_BYTES
        else:
            most = self.slice_bytes
        return most if one_host else min(FIRST_BUCKET_BYTES, most), most

    @property
    def first_window_bytes(self) -> int:
        """Window size before tuning."""
        first = _STATE_WINDOW_BYTES if self._keeps_state else FIRST_WINDOW_BYTES
        return first if self.window_bytes == "auto" else self.window_bytes

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, **explicit: Argument) -> Config:
        """Returns the defaults, overridden by `TFPS_<FIELD>` variables, overridden by `explicit` arguments.

        Raises:
            ConfigError: a variable cannot be parsed as its field's type, or the value is out of range.
        """
        values: Options = {}
        for field in dataclasses.fields(cls):
            name = f"TFPS_{field.name.upper()}"
            if name in environment:
                values[field.name] = _parsed(field.name, environment[name], field.default)
        return cls(**{**values, **explicit})


def is_whole(value: Argument) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Argument) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_positive(value: Argument) -> bool:
    return _is_number(value) and 0 < value < float("inf")


def _whole(least: int, *, optional: bool = False) -> Callable[[Argument], bool]:
    return lambda value: (optional and value is None) or (is_whole(value) and value >= least)


def _of(kind: type) -> Callable[[Argument], bool]:
    return lambda value: isinstance(value, kind)


def _below(limit: float) -> Callable[[Argument], bool]:
    return lambda value: _is_number(value) and 0 <= value < limit


def _known(choices: object) -> str:
    return ", ".join(map(repr, get_args(choices)))


def _one_of(choices: object) -> Callable[[Argument], bool]:
    return get_args(choices).__contains__


# Field, whether a value fits, what it must be. What fields must be together is in `Config.__post_init__`.
_FIELDS: tuple[tuple[str, Callable[[Argument], bool], str], ...] = (
    ("policy", _one_of(Policy), f"one of {_known(Policy)}"),
    ("placement", _one_of(Placement), f"one of {_known(Placement)}"),
    ("transport", _one_of(Transport), f"one of {_known(Transport)}"),
    ("update", _one_of(Update), f"one of {_known(Update)}"),
    ("mode", _one_of(Mode), f"one of {_known(Mode)}"),
    ("xla", _one_of(Xla), f"one of {_known(Xla)}"),
    ("xla_cache", _of(str), "the path of a folder, or '' (no cache)"),
    ("on_nonfinite", _one_of(OnNonfinite), f"one of {_known(OnNonfinite)}"),
    ("deterministic", _of(bool), "True or False"),
    ("shared_memory", _of(bool), "True or False"),
    ("staleness", _whole(0, optional=True), "a number of steps from 0, or None (no limit)"),
    ("inner_steps", _whole(1), "a whole number from 1"),
    ("fragments", _whole(1), "a whole number from 1"),
    ("overlap_steps", _whole(0), "a whole number from 0"),
    ("own_share", _below(1.0), "a number from 0 on and below 1"),
    ("outer_momentum", _below(1.0), "a number from 0 on and below 1"),
    ("delay_compensation", _below(float("inf")), "a number from 0 on"),
    ("outer_learning_rate", _is_positive, "a positive number"),
    ("quorum", lambda value: _is_number(value) and 0 < value <= 1, "a share of the workers above 0, at most 1"),
    ("grace_s", _below(float("inf")), "a number of seconds from 0"),
    ("staging_depth", lambda value: value != 1 and _whole(0)(value), "0 (off) or a whole number from 2"),
    ("min_workers", _whole(1, optional=True), "a number of workers from 1, or None (all are needed)"),
    (
        "max_workers",
        lambda value: _whole(1, optional=True)(value) and (value or 0) <= _MOST_WORKERS,
        f"a number of workers from 1 to {_MOST_WORKERS}, or None (no more than at the start)",
    ),
    ("snapshot_steps", _whole(1, optional=True), "a number of steps from 1, or None (no snapshots)"),
    ("check_every", _whole(0), "0 (never) or a positive number of steps"),
    ("rejoin_timeout_s", _is_positive, "a positive number of seconds"),
    ("connect_timeout_s", _is_positive, "a positive number of seconds"),
    ("step_timeout_s", _is_positive, "a positive number of seconds"),
    ("token_file", _of(str), "the path of a file, a string"),
    ("tls_ca", _of(str), "the path of a file, a string"),
    ("tls_cert", _of(str), "the path of a file, a string"),
    ("tls_key", _of(str), "the path of a file, a string"),
)


def _parsed(field: str, text: str, default: Argument) -> Argument:
    """Reads the variable of a field of Config."""
    size = field in _SIZES and text.strip() != "auto"
    # None stands for no number.
    return _parse(f"TFPS_{field.upper()}", text, 0 if size or default is None else default)


def _parse(name: str, text: str, default: Argument) -> Argument:
    """Reads `text` as the type of `default`."""
    if isinstance(default, bool):
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.strip().lower() not in known:
            raise ConfigError(f"environment variable {name} must be 0 or 1, got {text!r}")
        return known[text.strip().lower()]
    try:
        return type(default)(text.strip())
    except ValueError:
        what = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(f"environment variable {name} must be {what}, got {text!r}") from None


@dataclass(frozen=True)
class Security:
    """Whom a worker or a pserver talks to. Has paths of files, never what is in them.

    A worker without `tls_ca` and a pserver without a certificate do not use TLS; a pserver without `tls_ca` asks
    workers for no certificate.
    """

    token_file: str = ""  # the job token, which all workers and pservers of a job share
    tls_ca: str = ""  # certificates that the other end's must be signed by
    tls_cert: str = ""  # this process's
    tls_key: str = ""
    insecure: bool = False  # a pserver may serve other hosts without a job token and without TLS

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            missing, given = ("tls_key", "tls_cert") if self.tls_cert else ("tls_cert", "tls_key")
            raise ConfigError(f"tls_cert and tls_key must be given together, got {given} without {missing}")

    @classmethod
    def of_worker(cls, config: Config, environment: Mapping[str, str] = os.environ) -> Security:
        """What `config` says; else, file by file, `TFPS_TOKEN_FILE`, `TFPS_TLS_CA`, `TFPS_TLS_CERT`, `TFPS_TLS_KEY`.

        A program with settings of its own need not know where a launcher has put them.
        """
        security = cls.from_environment(environment, **{name: getattr(config, name) for name in _FILES})
        if security.tls_cert and not security.tls_ca:
            raise ConfigError(
                "tls_cert of a worker must come with tls_ca, which its pservers' certificates are checked by, got none"
            )
        if security.tls_ca and config.transport == "tcp":
            raise ConfigError(
                'transport must be "auto" or "grpc" with TLS (tls_ca is set), got "tcp": data connections are not '
                "encrypted"
            )
        return security

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ, *, insecure: bool = False, **explicit: str | None
    ) -> Security:
        """The paths in `explicit`; for those that are empty, the variables above."""
        known = {name: explicit.get(name) or environment.get(f"TFPS_{name.upper()}", "").strip() for name in _FILES}
        return cls(**known, insecure=insecure)


@dataclass(frozen=True)
class Launch:
    """Settings that `tfps_launch` (or another launcher) passes to a worker in environment variables."""

    pservers: tuple[str, ...] = ()  # TFPS_PSERVERS: host:port, separated by commas
    rank: int | None = None  # TFPS_RANK
    workers: int | None = None  # TFPS_WORKERS
    job: str = ""  # TFPS_JOB

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """Reads the variables above."""
        pservers = tuple(part.strip() for part in environment.get("TFPS_PSERVERS", "").split(",") if part.strip())
        numbers: list[int | None] = []
        for name, least in (("TFPS_RANK", 0), ("TFPS_WORKERS", 1)):
            numbers.append(_parse(name, environment[name], 0) if name in environment else None)
            if (number := numbers[-1]) is not None and number < least:
                raise ConfigError(f"environment variable {name} must be at least {least}, got {number}")
        rank, workers = numbers
        return cls(pservers, rank, workers, environment.get("TFPS_JOB", ""))


@dataclass(frozen=True)
class TraceRequest:
    """The capture that `TFPS_TRACE` requests from an unchanged program."""

    log_dir: str  # that `tensorboard --logdir` gets
    first: int  # training step, counted from 0
    last: int  # included

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> TraceRequest | None:
        """Reads `TFPS_TRACE=DIRECTORY:FIRST-LAST`; returns None if it is not set."""
        text = environment.get("TFPS_TRACE", "")
        if not text:
            return None
        found = re.fullmatch(r"(.+):(\d+)-(\d+)", text)
        if found is None:
            raise ConfigError(
                f"environment variable TFPS_TRACE must be DIRECTORY:FIRST-LAST such as logs:10-20, got {text!r}"
            )
        return cls(found[1], *check_steps("environment variable TFPS_TRACE", (int(found[2]), int(found[3]))))


_OTHERS = ("PSERVERS", "RANK", "WORKERS", "JOB", "TRACE", "PEERS_HOME", "PEER_WORK")  # the last two: for tools/
# Variables that Kubernetes sets in every container for a service named "tfps" or "tfps-...".
_OF_A_SERVICE = re.compile(r"TFPS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)")


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns a line for each unknown `TFPS_...` variable, such as a misspelled setting."""
    known = [f"TFPS_{name}" for name in (*(field.name.upper() for field in dataclasses.fields(Config)), *_OTHERS)]
    lines = []
    for name in sorted(environment):
        if name.startswith("TFPS_") and name not in known and not _OF_A_SERVICE.fullmatch(name):
            (nearest,) = difflib.get_close_matches(name, known, 1, 0.0)
            lines.append(f"the environment variable {name} is unknown to tfps and ignored; did you mean {nearest}?")
    return lines


def clusters_by_itself(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether TF_XLA_FLAGS has TensorFlow choose what XLA compiles."""
    found = re.search(r"--tf_xla_auto_jit=(\S+)", environment.get("TF_XLA_FLAGS", ""))
    return found is not None and found[1] not in ("0", "-1")


def with_variables(config: Config, environment: Mapping[str, str] = os.environ) -> tuple[Config, list[str]]:
    """Fills what a program's own `config` leaves at its default from `TFPS_<FIELD>` variables, as a launcher sets them.

    Returns it with a line for each variable of a setting that it has otherwise.

    Raises:
        ConfigError: a variable cannot be parsed, or its value does not go with `config`.
    """
    filled, lines = dict[str, Argument](), list[str]()
    for field in dataclasses.fields(Config):
        name, own = f"TFPS_{field.name.upper()}", getattr(config, field.name)
        if field.name in _FILES or not (text := environment.get(name, "")):
            continue  # see Security.of_worker
        value = _parsed(field.name, str(parse(text)) if field.name == "compression" else text, field.default)
        if own == field.default:
            filled[field.name] = value
        elif value != own:
            lines.append(
                f"the environment variable {name}={text} has no effect: the program's config has {field.name}={own!r}"
            )
    return dataclasses.replace(config, **filled), lines


def check_steps(what: str, steps: object) -> tuple[int, int]:
    """Returns `steps` if it is a pair of first and last step, else raises an error that begins with `what`."""
    numbers = list(steps) if isinstance(steps, (tuple, list)) else []
    if len(numbers) != 2 or not all(map(is_whole, numbers)) or not 0 <= numbers[0] <= numbers[1]:
        raise ConfigError(
            f"{what} must be the first and the last, both included and counted from 0, such as (10, 20), got {steps!r}"
        )
    return numbers[0], numbers[1]


def check_address(address: str) -> str:
    """Returns `address` if it is `host:port`, else raises an error that says what is wrong."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"a pserver address must be 'host:port' with a port from 1 to 65535, got {address!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(
            f"an IPv6 address must be in brackets, so that its port is known, got {address!r}; write '[{host}]:{port}'"
        )
    check_host_name(host, f" in {address!r}")
    return address


def check_host_name(host: str, where: str = "") -> str:
    """Returns `host` if it could be one: what could not raises another error in each place that looks it up."""
    try:
        host.strip("[]").encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"a host must be a name or an IP address, got {host!r}{where}: {error}") from None
    if not host.isprintable() or " " in host:
        raise ConfigError(f"a host must be a name or an IP address without spaces, got {host!r}{where}")
    return host
