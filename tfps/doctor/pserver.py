"""One pserver: whether it can be reached, would take a worker of this host, and how far away it is."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import grpc

from tfps.config import Config, Security
from tfps.doctor import bandwidth
from tfps.doctor.bandwidth import Bandwidth
from tfps.doctor.report import Check
from tfps.doctor.verdicts import clock, distance, of_version, stranger, unreached
from tfps.errors import ConfigError, ConnectError, PserverLostError, TfpsError
from tfps.launch.cluster_spec import Cluster
from tfps.protos import tfps_pb2 as pb
from tfps.wire import reach
from tfps.wire.clocks import compare
from tfps.wire.control import PROTOCOL_VERSION, Pserver, memory_message
from tfps.wire.measuring import SECONDS
from tfps.wire.reach import Unreached, split
from tfps.wire.shared_memory import Arena
from tfps.wire.status import JobStatus, status_of
from tfps.wire.tls import diagnose

_BUSY = ("joining", "running", "ending")


@dataclass(frozen=True, slots=True)
class Client:
    """A worker that would be started here.

    Args:
        cluster: number of workers and name of the job, if known.
        arena: memory to offer; None: none.
        timeout_s: for each answer.
    """

    config: Config
    security: Security
    cluster: Cluster
    arena: Arena | None
    timeout_s: float


class Visit:
    """The checks of one pserver: `look`, then `measure`, then `close`. Not thread-safe.

    Attributes:
        checks: what was found so far.
        busy: whether the pserver has a job.
    """

    def __init__(self, address: str, client: Client) -> None:
        self.address, self._client = address, client
        self.checks: list[Check] = []
        self.busy = False
        self._job: JobStatus | None = None
        self._pserver: Pserver | None = None
        self._data_port = 0  # through which slices would go; 0: through gRPC
        self._may_measure = False

    def look(self) -> None:
        """Everything that costs the pserver and the network next to nothing. Stops at what makes the rest pointless."""
        (host, port), timeout_s = split(self.address), self._client.timeout_s
        found = reach.resolve(host, port, timeout_s)
        if isinstance(found, Unreached):
            advice = f"{found.text}; correct the name, or use the IP address"
            self.checks.append(Check("address", "failed", "does not resolve", advice, found.problem))
            return
        self.checks.append(Check("address", "ok", ", ".join(found), values={"addresses": found}))
        reached = reach.connect(found, port, timeout_s)
        if isinstance(reached, Unreached):
            self.checks.append(unreached(reached, port))
            return
        self.checks.append(Check("port", "ok", "takes connections", values={"port": port}))
        reply = self._probe(host, port)
        if reply is None or self._pserver is None:
            return
        try:
            self._look_at_job(self._pserver, reply)
            shares = self._look_at_memory(reply)
            self._look_at_data_port(found, reply, shares)
            self._look_at_clock(self._pserver, reached.address, port)
            self._may_measure = not shares
        except TfpsError as error:
            advice = f"it answered at first, then no more: {error}"
            self.checks.append(Check("pserver", "failed", "answers no more", advice, "lost"))

    def measure(self, busy: bool, seconds: float = SECONDS) -> Bandwidth | None:
        """Fills both directions of the link for `seconds`, unless it is `busy`; the result becomes a check later."""
        if self._pserver is None or not self._may_measure:
            return None
        if busy:
            self.checks.append(bandwidth.of_job(self._job.members if self._job is not None else ()))
            return None
        try:
            found = bandwidth.measure(self._pserver, self._data_port, self._client.timeout_s, seconds)
        except (TfpsError, OSError) as error:
            found = bandwidth.failed(error)
        if isinstance(found, Bandwidth):
            return found
        with contextlib.suppress(TfpsError):
            if self._ask_for_job(self._pserver).state in _BUSY:  # it has begun meanwhile, and ended the measurement
                found = bandwidth.of_job(())
        self.checks.append(found)
        return None

    def close(self) -> None:
        if self._pserver is not None:
            self._pserver.close()

    def _probe(self, host: str, port: int) -> pb.ProbeReply | None:
        """Asks what a worker would get; None if there is no answer to go on with."""
        client = self._client
        try:
            self._pserver = Pserver(self.address, client.security)
        except ConfigError:  # among the checks of this host already
            return None
        request = pb.ProbeRequest()
        if client.arena is not None:
            offer = client.arena.offer
            request = pb.ProbeRequest(pid=offer.pid, memory=memory_message(offer))
        try:
            reply = self._pserver.call("Probe", request, client.timeout_s)
        except ConnectError as error:
            advice = str(error).removeprefix(f"pserver {self.address} ")
            text = "refuses the job token" if "job token" in advice else "refuses this host"
            problem = "token" if "job token" in advice else "refused"
            self.checks.append(Check("pserver", "failed", text, advice, problem))
        except PserverLostError as error:
            self.checks.append(self._why(error, host, port))
        except TfpsError as error:
            self.checks.append(Check("pserver", "failed", "refuses", str(error), "refused"))
        else:
            self.checks.append(of_version(reply.protocol_version, reply.version))
            return reply if reply.protocol_version == PROTOCOL_VERSION else None
        return None

    def _why(self, error: PserverLostError, host: str, port: int) -> Check:
        """Why Probe was not answered."""
        code = error.__cause__.code() if isinstance(error.__cause__, grpc.Call) else None
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return self._older(host, port)
        wrong = diagnose(self.address, self._client.security, self._client.timeout_s)
        if wrong:
            return Check("pserver", "failed", "TLS: the two ends do not agree", wrong, "tls")
        who, said = reach.who_answers(host, port, self._client.timeout_s)
        if self._client.security.tls_ca and wrong == "":
            who, said = "grpc", ""  # what it says is encrypted
        return stranger(who, said, str(error))

    def _older(self, host: str, port: int) -> Check:
        """A gRPC server without Probe: a pserver of another version, or something else."""
        with contextlib.suppress(TfpsError):
            if self._pserver is not None:
                return of_version(self._pserver.protocol_version(self._client.timeout_s), "")
        who, said = reach.who_answers(host, port, self._client.timeout_s)
        return stranger(*(("other", "HTTP/2 without tfps") if who == "grpc" else (who, said)), "")

    def _ask_for_job(self, pserver: Pserver) -> JobStatus:
        """Raises TfpsError if the pserver does not answer."""
        return status_of(pserver.call("Status", pb.StatusRequest(details=True), self._client.timeout_s)).job

    def _look_at_job(self, pserver: Pserver, reply: pb.ProbeReply) -> None:
        job = self._job = self._ask_for_job(pserver)
        self.busy = job.state in _BUSY
        cluster = self._client.cluster
        here = sum(member.state != "gone" for member in job.members)
        values = {"state": job.state, "workers": reply.workers, "members": here, "name": reply.job}
        if cluster.workers and cluster.workers != reply.workers:
            text = f"started for {reply.workers} workers, this host expects {cluster.workers}"
            advice = f"{text}: start pserver and workers with the same number (--workers, TFPS_WORKERS)"
            self.checks.append(Check("job", "failed", text, advice, "workers", values))
        elif reply.job and cluster.job != reply.job:
            text = f"serves only job {reply.job!r}"
            advice = f"{text}: a worker needs TFPS_JOB={reply.job}, here it is {cluster.job!r}"
            self.checks.append(Check("job", "failed" if cluster.job else "warning", text, advice, "name", values))
        elif job.state in ("running", "ending"):
            text = f"has a job ({job.state}, {here} of {reply.workers} workers)"
            advice = f"{text}: another one waits for its end, or needs pservers of its own"
            self.checks.append(Check("job", "warning", text, advice, "busy", values))
        else:
            text = f"{job.state}, {here} of {reply.workers} workers"
            if job.state == "failed":
                text = f"free; the last job failed: {job.reason}"
            self.checks.append(Check("job", "ok", text, values=values))

    def _look_at_memory(self, reply: pb.ProbeReply) -> bool:
        """Whether slices would pass through shared memory."""
        if not reply.same_host:
            return False
        values = {"shared": reply.shared_memory}
        if reply.shared_memory:
            self.checks.append(Check("shared memory", "ok", "on this host: slices bypass the network", values=values))
            return True
        advice = (
            "is on this host but may not open this process's memory, so slices go through sockets: run both as the "
            "same user, in one PID namespace (containers: --pid)"
        )
        self.checks.append(Check("shared memory", "warning", "not with this pserver", advice, "refused", values))
        return False

    def _look_at_data_port(self, addresses: list[str], reply: pb.ProbeReply, shares: bool) -> None:
        port, transport = reply.data_port, self._client.config.transport
        values = {"port": port or None}
        if not port or transport == "grpc" or shares:
            why = "not needed" if shares else "none with TLS" if not port else "not used: TFPS_TRANSPORT=grpc"
            self.checks.append(Check("data port", "skipped", why, values=values))
            return
        found = reach.connect(addresses, port, self._client.timeout_s)
        if not isinstance(found, Unreached):
            self._data_port = port
            self.checks.append(Check("data port", "ok", f"{port} takes connections", values=values))
            return
        advice = (
            f"data port {port}: {found.text}: open it between the hosts (tfps_pserver --data-port fixes its number)"
        )
        if transport == "tcp":
            self.checks.append(Check("data port", "failed", f"{port}: {found.text}", advice, found.problem, values))
        else:
            advice += "; until then slices go through gRPC, which takes several times the CPU per byte"
            self.checks.append(Check("data port", "warning", f"{port}: {found.text}", advice, found.problem, values))

    def _look_at_clock(self, pserver: Pserver, address: str, port: int) -> None:
        found = compare(pserver, time.monotonic_ns, self._client.timeout_s)
        network_s = reach.round_trip_s(address, port, self._client.timeout_s)
        self.checks.append(distance(found.round_trip_ns / 1e9, network_s))
        self.checks.append(clock(found))
