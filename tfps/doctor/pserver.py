"""One pserver: whether it can be reached, would take a worker of this host, how far away and how fast it is."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import grpc

from tfps.config import Config, Security
from tfps.doctor.report import Check, warn_if
from tfps.errors import ConfigError, ConnectError, PserverLostError, TfpsError, WaitTimeoutError
from tfps.launch.cluster_spec import Cluster
from tfps.protos import tfps_pb2 as pb
from tfps.wire import reach
from tfps.wire.connection import introduce
from tfps.wire.control import PROTOCOL_VERSION, ClockOffset, Pserver, compare_clocks, memory_message, version_text
from tfps.wire.measuring import SECONDS, Direction, measure_connection, measure_grpc, purpose
from tfps.wire.reach import Answers, Unreached, split
from tfps.wire.send_queue import Throughput
from tfps.wire.shared_memory import Arena
from tfps.wire.tls import diagnose

_FAR_S = 0.02  # beyond this hosts are hardly in one data centre
_CLOCKS_S = 1.0  # by which times of day may differ
_AGAIN_S = 0.1  # between two attempts, while another client measures
_SLOW = 0.5  # of the median of all pservers
_MTU = (
    "calls are answered, but bulk data does not arrive. Look at the MTU of the path: ping -M do -s 1472 HOST gets no "
    "answer where it is below 1500"
)
_BUSY = ("joining", "running", "ending", "rendezvous", "restoring")


def unreached(found: Unreached, port: int) -> Check:
    """The check of a control port to which there is no connection."""
    advice = {
        "refused": f"nothing listens on port {port} there: is tfps_pserver running, with --port {port}? Without "
        "--token-file or TLS it listens on its own host only",
        "timeout": f"a firewall drops what goes to port {port} (open it between hosts), or there is no such host",
    }.get(found.problem, f"{found.text}: look at the address, the route and firewalls")
    return Check("port", "failed", f"{port}: {found.text}", advice, found.problem, {"port": port})


def stranger(who: Answers, said: str, error: str) -> Check:
    """The check of a port where no pserver answers."""
    text, advice = {
        "http": (
            "an HTTP server or a proxy answers",
            f"{said}: that is no pserver. Give the address of --port, not of a proxy or of --metrics-port",
        ),
        "data_port": ("that is a data port", "give the address of --port (7070 by default), not of --data-port"),
        "other": (
            "something else answers",
            f"what answers there is no pserver ({said}): correct the address, or go around the proxy",
        ),
        "closes": (
            "connections are closed at once",
            "connections are taken and closed: a proxy or load balancer without a pserver behind it, perhaps",
        ),
        "silent": (
            "takes connections and does not answer",
            "connections are taken, but nobody answers: the process there hangs, or a firewall or proxy holds them",
        ),
        "grpc": ("does not answer in time", f"gRPC is there, but the call failed: {error}"),
    }[who]
    return Check("pserver", "failed", text, advice, {"other": "stranger", "grpc": "lost"}.get(who, who))


def of_version(protocol: int, version: str) -> Check:
    """The check of the versions that a pserver tells."""
    values = {"protocol_version": protocol, "version": version}
    if protocol != PROTOCOL_VERSION:
        text = f"protocol version {protocol}, here {PROTOCOL_VERSION}"
        return Check("pserver", "failed", text, version_text(protocol, PROTOCOL_VERSION), "version", values)
    return Check("pserver", "ok", f"tfps {version}, protocol version {protocol}", values=values)


def distance(call_s: float, network_s: float | None) -> Check:
    """The check of round trips: of a call, and of the network alone if that is known."""
    shown_s = call_s if network_s is None else network_s
    text = f"{shown_s * 1e3:.2g} ms, a call {call_s * 1e3:.2g} ms"
    advice = f"a round trip takes {shown_s * 1e3:.0f} ms: workers and pservers belong into one data centre"
    values = {"call_s": call_s, "network_s": network_s}
    return warn_if("round trip", shown_s > _FAR_S, text, advice, "far", values)


def clock(found: ClockOffset) -> Check:
    """The check of the two hosts' clocks."""
    error_s, wall_s = found.error_ns / 1e9, found.wall_offset_ns / 1e9
    text = f"known within {error_s * 1e3:.2g} ms; times of day differ by {abs(wall_s):.2g} s"
    advice = f"times of day differ by {abs(wall_s):.3g} s, logs do not fit and certificates may seem invalid: use NTP"
    values = {"offset_s": found.offset_ns / 1e9, "error_s": error_s, "wall_offset_s": wall_s}
    return warn_if("clock", abs(wall_s) > _CLOCKS_S + error_s, text, advice, "differs", values)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Payload in each direction; 0.0 where too little came to say. `path`: "tcp" or "grpc"."""

    push_bytes_per_s: float
    pull_bytes_per_s: float
    path: str

    @property
    def least(self) -> float:
        return min(self.push_bytes_per_s, self.pull_bytes_per_s)

    @property
    def text(self) -> str:
        path = "data connection" if self.path == "tcp" else "gRPC"
        return f"push {mbit(self.push_bytes_per_s)}, pull {mbit(self.pull_bytes_per_s)} ({path})"


def mbit(bytes_per_s: float) -> str:
    """For people."""
    return f"{bytes_per_s * 8 / 1e6:.3g} Mbit/s" if bytes_per_s < 125e6 else f"{bytes_per_s * 8 / 1e9:.3g} Gbit/s"


def measure_bandwidth(
    pserver: Pserver,
    data_port: int,
    timeout_s: float,
    seconds: float = SECONDS,
    has_job: Callable[[], bool] = lambda: False,
) -> Bandwidth | Check:
    """Measures each direction for `seconds`, one after the other; over gRPC if `data_port` is 0.

    `timeout_s` is for an answer, and for other clients to end their measurement; a job, which the pserver `has_job`
    tells of, would not end meanwhile.
    """

    def measured(direction: Direction) -> float:
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                if not data_port:
                    return measure_grpc(pserver, direction, seconds).bytes_per_s
                connected = introduce(pserver.address, data_port, pserver.token, purpose(direction), 0, timeout_s)
                return measure_connection(connected, direction, seconds, timeout_s).bytes_per_s
            except WaitTimeoutError:
                if time.monotonic() >= end_s or has_job():
                    raise
                time.sleep(_AGAIN_S)

    try:
        return Bandwidth(measured("push"), measured("pull"), "tcp" if data_port else "grpc")
    except WaitTimeoutError as error:
        return Check("bandwidth", "skipped", f"not measured: {error}")
    except TimeoutError:
        return Check("bandwidth", "failed", "bulk data does not arrive", _MTU, "stalls")


def bandwidth_of_job(members: Sequence[pb.MemberStatus]) -> Check:
    """What the replies of a running job have shown, which is not disturbed."""
    rates = {
        member.rank: rate
        for member in members
        if not member.shared_memory and (rate := Throughput(member.busy_bytes, member.busy_s).bytes_per_s)
    }
    if not rates:
        return Check("bandwidth", "skipped", "not measured: there is a job")
    rank = min(rates, key=lambda each: rates[each])
    text = f"not measured: there is a job; its replies reach rank {rank}, the slowest, at {mbit(rates[rank])}"
    return Check("bandwidth", "skipped", text, values={"job_bytes_per_s": rates[rank], "rank": rank})


def compare_bandwidths(found: Mapping[str, Bandwidth]) -> dict[str, Check]:
    """One check per address; a pserver that is much slower than the others is a warning."""
    median = statistics.median_high([each.least for each in found.values()]) if found else 0.0

    def check(each: Bandwidth) -> Check:
        if each.least <= 0:
            advice = "too little arrived to say how fast the network is: measure again, on an idle host"
            return Check("bandwidth", "warning", each.text, advice, "unknown", asdict(each))
        rates = f"{mbit(each.least)}, while half of the pservers reach {mbit(median)}"
        advice = f"slow: {rates}: every step waits for the slowest"
        return warn_if("bandwidth", each.least < _SLOW * median, each.text, advice, "slow", asdict(each))

    return {address: check(each) for address, each in found.items()}


@dataclass(frozen=True, slots=True)
class Client:
    """A worker that would be started here; it waits for `timeout_s` for each answer."""

    config: Config
    security: Security
    cluster: Cluster
    arena: Arena | None
    timeout_s: float


class Visit:
    """The checks of one pserver: `look`, then `measure`, then `close`. Not thread-safe."""

    def __init__(self, address: str, client: Client) -> None:
        self.address, self._client = address, client
        self.checks: list[Check] = []
        self.busy = False  # the pserver has a job
        self._members: Sequence[pb.MemberStatus] = ()
        self._pserver: Pserver | None = None
        self._data_port = 0  # through which slices would go; 0: through gRPC
        self._may_measure = False

    def look(self) -> None:
        """Everything that costs the pserver and the network next to nothing. Stops at what makes the rest pointless."""
        self.checks += self._look()

    def _look(self) -> Iterator[Check]:
        (host, port), timeout_s = split(self.address), self._client.timeout_s
        found = reach.resolve(host, port, timeout_s)
        if isinstance(found, Unreached):
            advice = f"{found.text}; correct the name, or use the IP address"
            yield Check("address", "failed", "does not resolve", advice, found.problem)
            return
        yield Check("address", "ok", ", ".join(found), values={"addresses": found})
        reached = reach.connect(found, port, timeout_s)
        if isinstance(reached, Unreached):
            yield unreached(reached, port)
            return
        yield Check("port", "ok", "takes connections", values={"port": port})
        try:
            pserver = self._pserver = Pserver(self.address, self._client.security)
        except ConfigError:  # among the checks of this host already
            return
        reply = self._probe(pserver, host, port)
        if isinstance(reply, Check):
            yield reply
            return
        yield of_version(reply.protocol_version, reply.version)
        if reply.protocol_version != PROTOCOL_VERSION:
            return
        try:
            yield self._look_at_job(self._ask_for_job(pserver), reply)
            shares = reply.same_host and reply.shared_memory
            if reply.same_host:
                text = "on this host: slices bypass the network" if shares else "not with this pserver"
                advice = (
                    "is on this host but may not open this process's memory, so slices go through sockets: run both "
                    "as the same user, in one PID namespace (containers: --pid)"
                )
                yield warn_if("shared memory", not shares, text, advice, "refused", {"shared": shares})
            yield self._look_at_data_port(found, reply.data_port, shares)
            clocks = compare_clocks(pserver, time.monotonic_ns, timeout_s)
            yield distance(clocks.round_trip_ns / 1e9, reach.round_trip_s(reached.address, port, timeout_s))
            yield clock(clocks)
            self._may_measure = not shares
        except TfpsError as error:
            advice = f"it answered at first, then no more: {error}"
            yield Check("pserver", "failed", "answers no more", advice, "lost")

    def measure(self, busy: bool, seconds: float = SECONDS) -> Bandwidth | None:
        """Fills both directions of the link for `seconds`, unless it is `busy`; the result becomes a check later."""
        if self._pserver is None or not self._may_measure:
            return None
        if busy:
            self.checks.append(bandwidth_of_job(self._members))
            return None
        try:
            found = measure_bandwidth(self._pserver, self._data_port, self._client.timeout_s, seconds, self._has_job)
        except (TfpsError, OSError) as error:
            advice = f"the measurement broke: {error}; see the pserver's log"  # although small calls are answered
            found = Check("bandwidth", "warning", "broke", advice, "broken")
        if isinstance(found, Bandwidth):
            return found
        if self._has_job():  # it has begun meanwhile, and ended the measurement
            found = bandwidth_of_job(())
        self.checks.append(found)
        return None

    def _has_job(self) -> bool:
        with contextlib.suppress(TfpsError):
            return self._pserver is not None and self._ask_for_job(self._pserver).state in _BUSY
        return False

    def close(self) -> None:
        if self._pserver is not None:
            self._pserver.close()

    def _probe(self, pserver: Pserver, host: str, port: int) -> pb.ProbeReply | Check:
        """Asks what a worker would get."""
        request = pb.ProbeRequest()
        if self._client.arena is not None:
            offer = self._client.arena.offer
            request = pb.ProbeRequest(pid=offer.pid, memory=memory_message(offer))
        try:
            return pserver.call("Probe", request, self._client.timeout_s)
        except ConnectError as error:
            advice = str(error).removeprefix(f"pserver {self.address} ")
            if "job token" in advice:
                return Check("pserver", "failed", "refuses the job token", advice, "token")
            return Check("pserver", "failed", "refuses this host", advice, "refused")
        except PserverLostError as error:
            return self._why(error, host, port)
        except TfpsError as error:
            return Check("pserver", "failed", "refuses", str(error), "refused")

    def _why(self, error: PserverLostError, host: str, port: int) -> Check:
        """Why Probe was not answered."""
        security, timeout_s = self._client.security, self._client.timeout_s
        is_unknown = isinstance(error.__cause__, grpc.Call) and error.__cause__.code() is grpc.StatusCode.UNIMPLEMENTED
        wrong = None if is_unknown else diagnose(self.address, security, timeout_s)
        if wrong:
            return Check("pserver", "failed", "TLS: the two ends do not agree", wrong, "tls")
        who, said = reach.who_answers(host, port, timeout_s)
        if is_unknown and who == "grpc":
            who, said = "other", "HTTP/2 without tfps"
        elif security.tls_ca and wrong == "":
            who, said = "grpc", ""  # what it says is encrypted
        return stranger(who, said, str(error))

    def _ask_for_job(self, pserver: Pserver) -> pb.StatusReply:
        return pserver.call("Status", pb.StatusRequest(details=True), self._client.timeout_s)

    def _look_at_job(self, job: pb.StatusReply, reply: pb.ProbeReply) -> Check:
        self.busy, self._members, cluster = job.state in _BUSY, job.members, self._client.cluster
        here = sum(member.state != "departed" for member in job.members)
        values = {
            "state": job.state,
            "workers": reply.workers,
            "members": here,
            "name": reply.job,
            "generation": job.generation,
            "lost_workers": job.lost_workers,
            "joined_workers": job.joined_workers,
        }
        if cluster.workers and cluster.workers != reply.workers:
            text = f"started for {reply.workers} workers, this host expects {cluster.workers}"
            advice = f"{text}: start pserver and workers with the same number (--workers, TFPS_WORKERS)"
            return Check("job", "failed", text, advice, "workers", values)
        if reply.job and cluster.job != reply.job:
            text = f"serves only job {reply.job!r}"
            advice = f"{text}: a worker needs TFPS_JOB={reply.job}, here it is {cluster.job!r}"
            return Check("job", "failed" if cluster.job else "warning", text, advice, "name", values)
        if self.busy and job.state != "joining":
            text = f"has a job ({job.state}, {here} of {reply.workers} workers)"
            advice = f"{text}: another one waits for its end, or needs pservers of its own"
            if job.changes:
                text += f"; view {job.generation}, {len(job.present)} take part; latest change: {job.changes[-1]}"
                advice += f". {job.lost_workers} workers of it were lost and {job.joined_workers} have joined"
            return Check("job", "warning", text, advice, "busy", values)
        text = f"{job.state}, {here} of {reply.workers} workers"
        if job.state == "failed":
            text = f"free; the last job failed: {job.reason}"
        return Check("job", "ok", text, values=values)

    def _look_at_data_port(self, addresses: list[str], port: int, shares: bool) -> Check:
        transport, values = self._client.config.transport, {"port": port or None}
        if not port or transport == "grpc" or shares:
            why = "not needed" if shares else "none with TLS" if not port else "not used: TFPS_TRANSPORT=grpc"
            return Check("data port", "skipped", why, values=values)
        found = reach.connect(addresses, port, self._client.timeout_s)
        if not isinstance(found, Unreached):
            self._data_port = port
            return Check("data port", "ok", f"{port} takes connections", values=values)
        text = f"{port}: {found.text}"
        advice = f"data port {text}: open it between the hosts (tfps_pserver --data-port fixes its number)"
        if transport == "tcp":
            return Check("data port", "failed", text, advice, found.problem, values)
        advice += "; until then slices go through gRPC, which takes several times the CPU per byte"
        return Check("data port", "warning", text, advice, found.problem, values)
