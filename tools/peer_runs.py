"""Runs one peer once: starts its roles on this machine or on the hosts of a lab, measures, ends them all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tfps.launch.supervisor import Command, Process, Supervisor
from tfps.launch.terminal import Console
from tfps.types import Argument, Json
from tools import peers
from tools.children import Peak, cpu_s, memory_bytes, switches, switches_between
from tools.netlab import Host
from tools.peer_workers.common import MARK, WORK_VARIABLE, Work
from tools.peers import PeerError

START_S = 120.0  # from the start of workers to the end of their warm-up, on a busy machine
STEP_S = 15.0  # the longest that a step may take on average
DRAIN_S = 60.0  # from the last timed step to all results
GRACE_S = 3.0
TAIL = 12
FIRST_PORT = 7000  # on hosts of a lab, where all ports are free
# Of this program's environment, what would tell the peers of another job, or send them through a proxy.
FOREIGN = re.compile(r"TF_CONFIG|(TFPS|DMLC|HOROVOD|MXNET|PS|OMP|NETLAB)_.*|(https?|all|no)_proxy", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where roles run: on the hosts of a lab, or all on this machine with a loopback address."""

    hosts: tuple[Host, ...] = ()

    def address(self, host: int) -> str:
        return self.hosts[host].address if self.hosts else "127.0.0.1"

    def name(self, host: int) -> str:
        return self.hosts[host].name if self.hosts else "localhost"

    @property
    def interface(self) -> str:
        return "eth0" if self.hosts else "lo"


@dataclass
class Role:
    """A started process and what it has said."""

    name: str
    process: Process | None = None
    lines: list[str] = field(default_factory=list)
    events: dict[str, dict[str, Json]] = field(default_factory=dict)

    def take(self, line: str) -> None:
        """A line of its output."""
        self.lines = [*self.lines[1 - TAIL :], line]
        if line.startswith(MARK):
            event = json.loads(line[len(MARK) :])
            self.events[event["event"]] = event


class Session:
    """The roles of one run."""

    def __init__(
        self, supervisor: Supervisor, place: Place, work: Work, python: Path, settings: Mapping[str, str]
    ) -> None:
        self._supervisor = supervisor
        self.place, self.work, self._python = place, work, python
        self._settings = settings
        self._roles: list[Role] = []
        self._ports = FIRST_PORT

    def start(self, name: str, host: int, module: str, *arguments: str, **variables: Argument) -> Role:
        """Starts `python -m module arguments` with more variables in its environment."""
        tools = Path(__file__).resolve().parent
        environment = {
            **{key: value for key, value in os.environ.items() if not FOREIGN.fullmatch(key)},
            "PYTHONPATH": f"{tools}{os.pathsep}{tools.parent}",
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "1",
            WORK_VARIABLE: self.work.to_json(),
            **self._settings,
            **{key: str(value) for key, value in variables.items()},
        }
        argv: Sequence[str] = [str(self._python), "-m", module, *arguments]
        if self.place.hosts:
            argv = self.place.hosts[host].argv(argv)
            environment = self.place.hosts[host].environment(environment)
        role = Role(name)
        role.process = self._supervisor.start(Command(name, argv, environment), on_line=role.take)
        self._roles.append(role)
        return role

    def port(self) -> int:
        """A free port: of all hosts of a lab, or of this machine."""
        if self.place.hosts:
            self._ports += 1
            return self._ports
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    def wait(self, until: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Waits for something that the roles do.

        Raises:
            PeerError: a role has ended, or the time is over; with the last lines of its output.
        """

        def ended() -> list[Role]:
            return [role for role in self._roles if role.process and role.process.ended]

        came = self._supervisor.wait(lambda: until() or bool(ended()), timeout_s)
        if until():
            return
        if not came:
            raise PeerError(f"{what} must come within {timeout_s:.0f} s, but did not; {_said(self._roles)}")
        # The others may say why: whoever ends first has often only seen somebody else go.
        self._supervisor.wait(lambda: len(ended()) == len(self._roles), GRACE_S)
        failed = [role for role in ended() if role.process and role.process.code != 0] or ended()
        how = ", ".join(f"{role.name} {role.process.describe_end()}" for role in failed if role.process)
        raise PeerError(f"{how} while waiting for {what}; {_said(failed)}")

    def cpu_s(self) -> float:
        """User and system time of all roles so far."""
        return sum(cpu_s(role.process.popen.pid) for role in self._roles if role.process)

    def memory_bytes(self) -> int:
        """What all roles have in memory."""
        return sum(memory_bytes(role.process.popen.pid) for role in list(self._roles) if role.process)

    def switches(self) -> dict[int, int]:
        """Voluntary switches of all threads of all roles so far."""
        threads: dict[int, int] = {}
        for role in self._roles:
            if role.process:
                threads |= switches(role.process.popen.pid)
        return threads


def _said(roles: Sequence[Role]) -> str:
    texts = []
    for role in roles:
        lines = [*role.lines, *(role.process.tail if role.process else [])]
        last = "\n".join(f"    {line[:300]}" for line in lines[-TAIL:] if line and not line.startswith(MARK))
        texts.append(f"{role.name} said last\n{last or '    nothing'}")
    return "\n".join(texts)


# The peers. Hosts of a lab: workers, then servers, then whoever coordinates.


def _alone(session: Session) -> list[Role]:
    return [session.start("worker 0", 0, "peer_workers.alone_worker")]


def _tfps(session: Session) -> list[Role]:
    place, work = session.place, session.work
    pservers = [
        session.start(
            f"pserver {index}",
            work.workers + index,
            "tfps.pserver.cli",
            *(
                "--host",
                place.address(work.workers + index),
                "--port",
                "0",
                "--workers",
                str(work.workers),
                "--insecure",
            ),
        )
        for index in range(work.servers)
    ]
    ready = re.compile(r"tfps_pserver ready at (\S+)")

    def addresses() -> list[str]:
        return [found[1] for role in pservers for line in role.lines if (found := ready.match(line))]

    session.wait(lambda: len(addresses()) == work.servers, START_S, "the addresses of the pservers")
    variables = {"TFPS_PSERVERS": ",".join(addresses()), "TFPS_WORKERS": work.workers}
    return [
        session.start(f"worker {rank}", rank, "peer_workers.tfps_worker", TFPS_RANK=rank, **variables)
        for rank in range(work.workers)
    ]


def _horovod(session: Session) -> list[Role]:
    place, workers = session.place, session.work.workers
    slots = [(place.name(rank), 1) for rank in range(workers)] if place.hosts else [("localhost", workers)]
    hosts = ",".join(f"{name}:{count}" for name, count in slots)
    rendezvous = session.start("rendezvous", 0, "peer_workers.horovod_rendezvous", hosts)
    session.wait(lambda: "ready" in rendezvous.events, START_S, "the port of Horovod's rendezvous")
    roles = []
    for rank in range(workers):
        variables = {
            "RANK": rank,
            "SIZE": workers,
            "LOCAL_RANK": 0 if place.hosts else rank,
            "LOCAL_SIZE": 1 if place.hosts else workers,
            "CROSS_RANK": rank if place.hosts else 0,
            "CROSS_SIZE": workers if place.hosts else 1,
            "HOSTNAME": place.name(rank),
            "GLOO_RENDEZVOUS_ADDR": place.address(0),
            "GLOO_RENDEZVOUS_PORT": rendezvous.events["ready"]["port"],
            "GLOO_IFACE": place.interface,
            "CONTROLLER": "gloo",
            "CPU_OPERATIONS": "gloo",
        }
        environment = {f"HOROVOD_{key}": value for key, value in variables.items()}
        roles.append(session.start(f"worker {rank}", rank, "peer_workers.horovod_worker", **environment))
    return roles


def _mxnet(session: Session, van: str = "zmq") -> list[Role]:
    place, work = session.place, session.work
    last = work.workers + work.servers
    variables = {
        "DMLC_PS_ROOT_URI": place.address(last),
        "DMLC_PS_ROOT_PORT": session.port(),
        "DMLC_NUM_SERVER": work.servers,
        "DMLC_NUM_WORKER": work.workers,
        "DMLC_INTERFACE": place.interface,
        "DMLC_PS_VAN_TYPE": van,
        "OMP_NUM_THREADS": 1,  # what it chooses for two cores; with 2 spinning threads slow it down much
    }
    roles = []
    for kind, first, count in (
        ("scheduler", last, 1),
        ("server", work.workers, work.servers),
        ("worker", 0, work.workers),
    ):
        for index in range(count):
            host = first + index
            environment = {**variables, "DMLC_ROLE": kind, "DMLC_NODE_HOST": place.address(host)}
            roles.append(session.start(f"{kind} {index}", host, "peer_workers.mxnet_worker", **environment))
    return roles[-work.workers :]


def _mxnet_p3(session: Session) -> list[Role]:
    return _mxnet(session, "p3")


def _mwms(session: Session) -> list[Role]:
    place, workers = session.place, session.work.workers
    cluster = {"worker": [f"{place.address(rank)}:{session.port()}" for rank in range(workers)]}
    return [
        session.start(f"worker {rank}", rank, "peer_workers.mwms_worker", TF_CONFIG=_tf_config(cluster, "worker", rank))
        for rank in range(workers)
    ]


def _tf_ps(session: Session) -> list[Role]:
    place, work = session.place, session.work
    layout = {"worker": work.workers, "ps": work.servers, "chief": 1}
    tasks = [(kind, index) for kind, count in layout.items() for index in range(count)]
    cluster: dict[str, list[str]] = {kind: [] for kind in layout}
    for host, (kind, _) in enumerate(tasks):
        cluster[kind].append(f"{place.address(host)}:{session.port()}")
    roles = [
        session.start(f"{kind} {index}", host, "peer_workers.tf_ps_worker", TF_CONFIG=_tf_config(cluster, kind, index))
        for host, (kind, index) in enumerate(tasks)
    ]
    return roles[-1:]


def _tf_config(cluster: Mapping[str, Json], kind: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@dataclass(frozen=True)
class Peer:
    """How to run a peer.

    Args:
        environment: of tools/peers.py; "": the one that runs this.
        start: starts all roles and returns those that report.
        sleeps: it can train layers that sleep; otherwise why not.
    """

    name: str
    environment: str
    start: Callable[[Session], list[Role]]
    sleeps: bool | str = True

    @property
    def absence(self) -> str | None:
        """Why it cannot run here; None if it can."""
        if not self.environment or peers.environment(self.environment).is_installed:
            return None
        return f"not installed: tools/peers.py install {self.environment}"

    @property
    def python(self) -> Path:
        return peers.environment(self.environment).interpreter if self.environment else Path(sys.executable)


_NO_REMOTE_PYTHON = "its workers run graphs without Python, and layers that sleep are Python"
PEERS = {
    peer.name: peer
    for peer in (
        Peer("alone", "", _alone),
        Peer("tfps", "", _tfps),
        Peer("horovod", "horovod", _horovod),
        Peer("mxnet", "mxnet", _mxnet),
        Peer("mxnet-p3", "mxnet", _mxnet_p3),
        Peer("mwms", "tensorflow", _mwms),
        Peer("tf-ps", "tensorflow", _tf_ps, _NO_REMOTE_PYTHON),
    )
}


def measure(
    name: str,
    place: Place,
    work: Work,
    settings: Mapping[str, str] | None = None,
    memory_period_s: float | None = None,
) -> dict[str, Json]:
    """Runs a peer once, with `settings` in its environment.

    Args:
        memory_period_s: how often to look at the memory of all roles, which slows them down; None: never.

    Returns:
        step_s: median seconds per step at rank 0; mean_s includes the updates that follow the last step.
        periods_s: seconds of each timed step, for each rank that reports.
        cpu_s: CPU seconds per step of all processes.
        switches: how often per step threads of all processes gave up their processor to wait.
        messages: that a worker sent and received per step, where its program counts them.
        load: of the machine, before.
        peak_bytes: the most memory that all roles had together, where `memory_period_s` is given.

    Raises:
        PeerError: it is not installed, a role failed or did not answer in time, or workers disagree on the weights.
    """
    peer = PEERS[name]
    if peer.absence is not None:
        raise PeerError(f"peer '{name}' is {peer.absence}")
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryFile("w+") as unread,
        Supervisor(Console(unread, unread), GRACE_S) as supervisor,
        contextlib.ExitStack() as stack,
    ):
        session = Session(supervisor, place, work, peer.python, settings or {})
        memory = stack.enter_context(Peak(session.memory_bytes, memory_period_s)) if memory_period_s else None
        reporting = peer.start(session)

        def says(event: str) -> bool:
            return any(event in role.events for role in reporting)  # rank 0; MXNet chooses itself who that is

        deadline_s = START_S + work.warmup_steps * STEP_S
        session.wait(lambda: says("warm"), deadline_s, f"the end of {work.warmup_steps} warm-up steps")
        cpu_s, threads = session.cpu_s(), session.switches()
        deadline_s = work.steps * STEP_S + DRAIN_S
        session.wait(lambda: says("done"), deadline_s, f"the end of {work.steps} timed steps")
        cpu_s = session.cpu_s() - cpu_s
        switched = switches_between(threads, session.switches())
        session.wait(lambda: all("result" in role.events for role in reporting), DRAIN_S, "the results of all workers")
    results = sorted((role.events["result"] for role in reporting), key=lambda result: int(result["rank"]))
    found = {"peer": name, "load": load, **figures(results, cpu_s, switched, work)}
    return {**found, "peak_bytes": memory.value} if memory else found


def figures(results: Sequence[Mapping[str, Json]], cpu_s: float, switched: int, work: Work) -> dict[str, Json]:
    """What the workers' results, in order of ranks, come to.

    Raises:
        PeerError: workers do not have the same weights at the end, so they have not trained together.
    """
    checksums = [result["checksum"] for result in results]
    if max(checksums) - min(checksums) > 1e-6 * max(abs(checksum) for checksum in checksums):
        raise PeerError(f"all workers must have the same weights at the end, got sums of their sizes {checksums}")
    first = results[0]
    steps = first.get("timed_steps", work.steps)
    found = {
        "step_s": statistics.median(first["periods_s"]),
        "mean_s": first["drained_s"] / steps,
        "cpu_s": cpu_s / steps,
        "switches": switched / steps,
        "periods_s": [result["periods_s"] for result in results],
        "loss": first["loss"],
    }
    if "messages" in first:
        found["messages"] = statistics.mean(result["messages"] for result in results)
    if work.layers:
        found["overslept_s"] = first["overslept_s"] / (work.warmup_steps + work.steps)
    return found
