"""What is simulated and what comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from tfps.errors import ConfigError
from tfps.types import Json

Policy = Literal["barrier", "overlap", "overlap_send_barrier", "slices", "priority"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Mode = Literal["auto", "exact", "symmetric"]

MAX_EXACT_STREAMS = 4096  # about 2 s per step; beyond it minutes


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts, links and what tfps itself costs. Worker i is on host i.

    Args:
        rate_gbit: of every host's link, in each direction, 10**9 bits per second.
        goodput: what part of the rate payload gets (headers of Ethernet, TCP and HTTP/2 take the rest).
        latency_s: one way, between hosts; inside a host 0.
        dedicated: pservers are on hosts of their own; else pserver i is on host i too.
        cpu_slice_s: CPU seconds to push and pull one slice, all four ends (worker and pserver, send and receive)
            together.
        cpu_gb_s: the same per 10**9 bytes. The defaults are measured (Python gRPC, a slice there and back).
        process_cores: what one process can use; Python's lock makes that about one.
        machine_cores: all processes share one machine with so many cores (network namespaces); None: they do not.
        apply_gb_s: seconds for a worker's update of 10**9 bytes; one bucket after the other.

    Raises:
        ConfigError: a value is out of range; the message names the field.
    """

    workers: int
    pservers: int
    rate_gbit: float
    goodput: float = 1.0
    latency_s: float = 50e-6
    dedicated: bool = False
    cpu_slice_s: float = 0.25e-3
    cpu_gb_s: float = 1.7
    process_cores: float = 1.0
    machine_cores: float | None = None
    apply_gb_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("workers", "pservers"):
            _check_whole(self, name, 1)
        for name in ("rate_gbit", "goodput", "process_cores"):
            _check_number(self, name, positive=True)
        if self.goodput > 1:
            raise ConfigError(f"goodput must be at most 1, got {self.goodput!r}")
        for name in ("latency_s", "cpu_slice_s", "cpu_gb_s", "apply_gb_s"):
            _check_number(self, name)
        if self.machine_cores is not None:
            _check_number(self, "machine_cores", positive=True)

    @property
    def bytes_per_s(self) -> float:
        """Payload that a link carries in one direction."""
        return self.rate_gbit * 1e9 / 8 * self.goodput

    @property
    def hosts(self) -> int:
        """How many there are."""
        return self.workers + self.pservers if self.dedicated else max(self.workers, self.pservers)

    def pserver_host(self, pserver: int) -> int:
        """Where a pserver is."""
        return self.workers + pserver if self.dedicated else pserver

    def remote_workers(self, pserver: int) -> int:
        """How many workers reach it through the network."""
        return self.workers - (not self.dedicated and pserver < self.workers)

    def end_s(self, nbytes: int) -> float:
        """CPU of one end to send or receive one slice."""
        return self.cpu_slice_s / 4 + self.cpu_gb_s * nbytes / 4e9


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients are exchanged, and how it is simulated.

    Args:
        policy: `"barrier"` sends when backward is complete and goes on when everything is back; `"overlap"` sends
            during backward, in the order of gradients, and goes on when everything is back (PaddlePaddle pull request
            10550); `"overlap_send_barrier"`: the same, but pservers reply when all pushes of all workers have arrived,
            the literal send barrier; `"slices"`: slices in the order of gradients, every layer waits for its own;
            `"priority"`: the same with the most urgent first, at workers and pservers: tfps.
        slice_bytes, window_bytes: as in tfps.Config; for slices and priority only. The window is per stream and
            direction.
        fuse: neighbours of up to one slice together become one bucket, as in tfps.
        first_bytes: limit of the first bucket, as in tfps.exchange.layout.bucket_limit.
        fuse_bytes: another limit for that than slice_bytes, as in tfps once it has tuned itself.
        split_parameters: barrier and overlaps cut variables from this size on into one piece per pserver.
        jitter: standard deviation of the factor on a worker's computing time, drawn per worker and step.
        mode: `"exact"` simulates every worker, `"symmetric"` one that stands for all, for large numbers; auto: exact up
            to 64 workers and 64 pservers. Symmetric is 0 to 8 % off (7 % too short to 8 % too long, mostly within 3 %).
        warmup_steps: not counted.
        steps: counted.
        trace: keep what happens as spans.

    Raises:
        ConfigError: a value is out of range; the message names the field.
    """

    policy: Policy = "priority"
    slice_bytes: int = 1024 * 1024
    window_bytes: int = 4 * 1024 * 1024
    fuse: bool = True
    fuse_bytes: int | None = None
    first_bytes: int = 64 * 1024
    split_parameters: int = 1_000_000
    jitter: float = 0.0
    seed: int = 0
    mode: Mode = "auto"
    warmup_steps: int = 1
    steps: int = 2
    trace: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(map(repr, POLICIES))}, got {self.policy!r}")
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {self.mode!r}")
        for name, least in (("slice_bytes", 4), ("window_bytes", 1), ("split_parameters", 1), ("steps", 1)):
            _check_whole(self, name, least)
        for name in ("warmup_steps", "seed"):
            _check_whole(self, name, 0)
        _check_number(self, "jitter")
        if self.jitter and self.mode == "symmetric":
            raise ConfigError(f"jitter must be 0 in mode 'symmetric', where all workers are one, got {self.jitter!r}")

    @property
    def barriers(self) -> bool:
        """Whether the forward pass waits for everything."""
        return self.policy in ("barrier", "overlap", "overlap_send_barrier")

    def exact(self, cluster: Cluster) -> bool:
        """Whether every worker is simulated.

        Raises:
            ConfigError: that would take too long.
        """
        streams = cluster.workers * cluster.pservers
        if self.mode == "symmetric" or (self.mode == "auto" and not self.jitter and streams > MAX_EXACT_STREAMS):
            return False
        if streams > MAX_EXACT_STREAMS:
            raise ConfigError(
                f"workers x pservers must be at most {MAX_EXACT_STREAMS} to simulate every worker, got {streams}: "
                "use mode 'symmetric' and no jitter"
            )
        return True


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. Seconds count from the start of the first backward pass.

    Attributes:
        process: `worker 0`, `pserver 1`.
        track: `compute`, or the stream and direction: `to pserver 1`, `to worker 0`.
        name: layer, or bucket and slice.
        args: step, bucket, slice, priority, nbytes.
    """

    process: str
    track: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Json]


@dataclass(frozen=True, slots=True)
class Result:
    """A simulated training.

    Attributes:
        step_s: mean of the counted steps, each from one start of backward to the next.
        step_times_s: each counted step.
        compute_s: forward and backward, without waiting; mean of workers and steps.
        wait_s: per step, how long a worker's forward pass waited at gates; mean of workers and steps.
        wire_s: per step, how long the first worker had messages under way.
        overlap: what part of wire_s did not delay the worker: 1 - wait_s / wire_s.
        tx_use, rx_use: per host, the part of the link's rate that payload took, in each direction.
        exact: whether every worker was simulated.
        spans: with Settings.trace.
    """

    step_s: float
    step_times_s: tuple[float, ...]
    compute_s: float
    wait_s: float
    wire_s: float
    overlap: float
    tx_use: tuple[float, ...]
    rx_use: tuple[float, ...]
    exact: bool
    spans: tuple[Span, ...] = ()


def _check_whole(thing: Cluster | Settings, name: str, least: int) -> None:
    value = getattr(thing, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number, at least {least}, got {value!r}")


def _check_number(thing: Cluster | Settings, name: str, positive: bool = False) -> None:
    value = getattr(thing, name)
    rule = "positive" if positive else "at least 0"
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    if not fits or (positive and not value):
        raise ConfigError(f"{name} must be a number, {rule}, got {value!r}")
