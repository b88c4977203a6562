#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Several hosts on this machine, each with a bandwidth of its own: network namespaces on a bridge, shaped by tc.

    with Netlab(hosts=4, rate_mbit=1000.0) as lab:
        process = lab.hosts[0].popen([sys.executable, "train.py"])
        lab.probe()  # refuses a lab that does not deliver its rates

A rate is what the wire carries: whole Ethernet frames. Of 1000 Mbit/s, TCP delivers 956 Mbit/s of payload. Each host is
shaped in both directions, as by its network card and its port of a switch; its own loopback is not shaped.
Needs Linux, root, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from tools import netlab_loss
from tools.netlab_loss import Loss
from tools.netlab_probe import FRAME, MTU, Flow, Measurement, measure
from tools.netlab_system import (
    CONFIGURATION,
    ENDING_SIGNALS,
    KILL_S,
    NetlabError,
    claim,
    clean,
    remove,
    run,
    signals_held,
    tool,
    unavailable,
)

if TYPE_CHECKING:  # the lab needs nothing but Python
    from tfps.types import Argument

__all__ = ["Host", "Loss", "Measurement", "Netlab", "NetlabError", "Rate", "Rates", "clean", "unavailable"]

MAX_HOSTS = 250
MIN_MBIT, MAX_MBIT = 1, 100_000
TOLERANCE = 0.03
ATTEMPTS = 4  # a busy machine spoils some measurements

# After a pause, what this time carries passes at once. A virtual machine may stand still so long: 2 ms lost 5 to 20 %.
BURST_S = 0.01
QUEUE_S = 0.05  # less makes TCP collapse where several hosts send to one
MIN_BURST_BYTES = 4 * FRAME
MIN_QUEUE_BYTES = 128 * 1024

_ENTER = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'  # gethostname() gives the name that the hosts file has


@dataclass(frozen=True)
class Rate:
    """What one host may send (tx) and receive (rx), in Mbit/s on the wire."""

    tx_mbit: float
    rx_mbit: float

    def __post_init__(self) -> None:
        for name in ("tx_mbit", "rx_mbit"):
            if not MIN_MBIT <= getattr(self, name) <= MAX_MBIT:
                raise NetlabError(f"{name} must be from {MIN_MBIT} to {MAX_MBIT}, got {getattr(self, name)}")


Rates = float | Rate | Sequence[float | Rate]  # the same for all, or one per host; a number stands for both directions


@dataclass(frozen=True)
class Host:
    """One host of a lab. Its namespace is that of `ip netns`; its name resolves to its address on all hosts."""

    index: int
    name: str
    address: str
    namespace: str
    addresses: tuple[str, ...] = field(repr=False)  # of all hosts
    _processes: list[subprocess.Popen[str]] = field(repr=False, compare=False)

    def argv(self, command: Sequence[str]) -> list[str]:
        """What to execute so that `command` runs on this host, in the process itself."""
        tools = [tool("ip"), "netns", "exec", self.namespace, tool("unshare"), "--uts", "sh", "-c", _ENTER]
        return [*tools, self.name, *command]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` (default: our own environment) with the host's place in the lab."""
        place = {"NETLAB_HOST_INDEX": str(self.index), "NETLAB_ADDRESSES": ",".join(self.addresses)}
        return {**(os.environ if base is None else base), **place}

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Argument
    ) -> subprocess.Popen[str]:
        """Starts `command` on this host, in a session and process group of its own; it ends with the lab at the latest.

        Args:
            env: as of subprocess.Popen; NETLAB_HOST_INDEX and NETLAB_ADDRESSES are added.
            options: of subprocess.Popen.
        """
        process: subprocess.Popen[str] = subprocess.Popen(
            self.argv(command), env=self.environment(env), start_new_session=True, **options
        )
        self._processes.append(process)
        return process


class Netlab:
    """Hosts, made on entering the context and removed on leaving it.

    They are also removed when the program ends by an exception, SIGINT, SIGTERM or SIGHUP. Of a program that was
    killed, the next lab or `tools/netlab.py clean` removes them. Not for several threads at a time.

    Args:
        hosts: how many.
        rate_mbit: see Rates.
        min_burst_bytes: what passes unshaped after a pause, at least. From 64 KiB on, segments that TCP has joined pass
            whole, which saves most of the processor's time at low rates, where each packet would wake its receiver.

    Raises:
        NetlabError: an argument is out of range; on entering: there can be no labs here.
    """

    def __init__(self, hosts: int, rate_mbit: Rates, *, min_burst_bytes: int = MIN_BURST_BYTES) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise NetlabError(f"hosts must be from 1 to {MAX_HOSTS}, got {hosts}")
        if min_burst_bytes < MIN_BURST_BYTES:
            raise NetlabError(f"min_burst_bytes must be at least {MIN_BURST_BYTES}, got {min_burst_bytes}")
        self._rates = _per_host(rate_mbit, hosts)
        self._min_burst_bytes = min_burst_bytes
        self._number: int | None = None
        self._pid = 0
        self._handled: list[signal.Signals] = []
        self._processes: list[subprocess.Popen[str]] = []
        self.hosts: tuple[Host, ...] = ()

    def __enter__(self) -> Netlab:  # noqa: PYI034 (typing.Self is not in Python 3.10)
        if (reason := unavailable()) is not None:
            raise NetlabError(reason)
        self._pid = os.getpid()
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():
            self._handled = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
            for number in self._handled:
                signal.signal(number, _exit)
        try:
            with signals_held():
                self._number = claim()
            self._build(self._number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs on the hosts and removes them. Does nothing where that is done, or in a fork of the owner."""
        if os.getpid() != self._pid:
            return
        with signals_held():
            if self._number is not None:
                remove(self._number)
                self._number = None
            for process in self._processes:
                process.wait(KILL_S)
            self._processes.clear()
        for number in self._handled:
            if signal.getsignal(number) is _exit:
                signal.signal(number, signal.SIG_DFL)
        self._handled = []
        atexit.unregister(self.close)

    def set_rate(self, rate_mbit: Rates) -> None:
        """Changes the rates, also under traffic."""
        self._rates = _per_host(rate_mbit, len(self._rates))
        for host, rate in zip(self.hosts, self._rates, strict=True):
            self._shape(host, "eth0", rate.tx_mbit)
            self._shape(self._switch, f"port{host.index}", rate.rx_mbit)

    def plug(self, host: Host, *, out: bool = False) -> None:
        """Takes a host's port `out` of the switch, or puts it in again. The host sees that nothing comes, no more."""
        plug(self._switch.namespace, host.index, out=out)

    def separate(self, hosts: Sequence[Host]) -> None:
        """Cuts the network in two: `hosts` reach each other and nobody else, until they are plugged in again."""
        for host in hosts:
            _ip(self._switch, f"link set port{host.index} master apart")

    @contextlib.contextmanager
    def lossy(self, hosts: Sequence[Host], share: float, *, seed: int = 1) -> Iterator[Loss]:
        """Loses `share` of the packets in each direction of these hosts' links, at random; these are single frames.

        A process passes them on, up to about 100,000 per second on an idle core. When the context ends, the hosts are
        cut off.

        Raises:
            NetlabError: `share` is out of range.
        """
        if not 0.0 <= share <= 1.0:
            raise NetlabError(f"share must be from 0 to 1, got {share}")
        links = [(f"host{host.index}", f"line{host.index}") for host in hosts]
        for host, (near, far) in zip(hosts, links, strict=True):
            port = f"port{host.index}"  # the name stays that of what is in the switch: rates and cuts are about it
            run("tc", "-n", self._switch.namespace, *f"qdisc del dev {port} root".split())
            _ip(self._switch, f"link set {port} down nomaster")
            _ip(self._switch, f"link set {port} name {near}")
            _ip(self._switch, f"link add {port} mtu {MTU} type veth peer name {far} mtu {MTU}")
            _ip(self._switch, f"link set {port} master eth0 up")
            for device in (near, far):  # nothing but the process answers here
                _ip(self._switch, f"link set {device} arp off addrgenmode none up")
            self._shape(self._switch, port, self._rates[host.index].rx_mbit)
            netlab_loss.single_frames(host.popen, "eth0")
        netlab_loss.single_frames(self._switch.popen, *(f"port{host.index}" for host in hosts))
        with netlab_loss.lossy(self._switch.popen, links, share, seed) as loss:
            yield loss

    def _shape(self, host: Host, device: str, rate_mbit: float) -> None:
        burst, queue = self._burst_and_queue(rate_mbit)
        shaper = f"tbf rate {rate_mbit * 1e6:.0f}bit burst {burst:.0f} limit {queue:.0f}"
        run("tc", "-n", host.namespace, *f"qdisc replace dev {device} root {shaper}".split())

    def _burst_and_queue(self, rate_mbit: float) -> tuple[float, float]:
        """Bytes that pass unshaped after a pause, and bytes that wait before any are dropped."""
        bytes_per_s = rate_mbit * 1e6 / 8
        return max(self._min_burst_bytes, bytes_per_s * BURST_S), max(MIN_QUEUE_BYTES, bytes_per_s * QUEUE_S)

    def probe(self, *, window_s: float = 0.7, together: bool = True) -> list[Measurement]:
        """Measures what TCP gets through, for each host and direction, against the switch, which is not shaped.

        The hosts must be idle. `together`: all hosts at the same time, as in a training step, so that the machine has
        to carry the sum of all rates; otherwise one after the other.

        Raises:
            NetlabError: a rate is more than 3 % off; the message names host, direction, wanted and measured rate.
        """
        groups = [self.hosts] if together else [(host,) for host in self.hosts]
        return [
            measurement
            for direction in ("tx", "rx")
            for group in groups
            for measurement in self._measure_repeatedly(group, direction, window_s)
        ]

    def _measure_repeatedly(self, hosts: Sequence[Host], direction: str, window_s: float) -> list[Measurement]:
        best: list[Measurement] = []
        for _ in range(ATTEMPTS):
            found = self._measure(hosts, direction, window_s)
            best = [min(pair, key=lambda one: abs(one.deviation)) for pair in zip(best or found, found, strict=True)]
            off = [str(one) for one in best if abs(one.deviation) > TOLERANCE]
            if not off:
                return best
        raise NetlabError(
            f"rates must be within {TOLERANCE:.0%}, got at best of {ATTEMPTS} attempts {'; '.join(off)}. If less: use "
            "an idle or faster machine, or a lower rate; if more, the shaping has been removed: make a new lab"
        )

    def _measure(self, hosts: Sequence[Host], direction: str, window_s: float) -> list[Measurement]:
        wanted = [getattr(self._rates[host.index], f"{direction}_mbit") for host in hosts]
        flows = []
        for host, rate_mbit in zip(hosts, wanted, strict=True):
            sender, receiver = (host, self._switch) if direction == "tx" else (self._switch, host)
            name, queue_bytes = f"{host.name} {direction}", self._burst_and_queue(rate_mbit)[1]
            flows.append(Flow(name, sender.popen, receiver.popen, receiver.address, rate_mbit, queue_bytes))
        return [
            Measurement(host.name, direction, rate_mbit, payload_mbit)
            for host, rate_mbit, payload_mbit in zip(hosts, wanted, measure(flows, window_s), strict=True)
        ]

    def _build(self, number: int) -> None:
        addresses = tuple(f"10.77.{number}.{index + 1}" for index in range(len(self._rates)))

        def host(index: int, name: str, address: str) -> Host:
            return Host(index, name, address, f"netlab{number}-{name}", addresses, self._processes)

        # The bridge has a namespace too. So nothing of a lab can collide with what the machine has (addresses, routes,
        # firewall rules), nor with other labs.
        self._switch = host(-1, "switch", f"10.77.{number}.254")
        self.hosts = tuple(host(index, f"host{index}", address) for index, address in enumerate(addresses))
        everyone = (self._switch, *self.hosts)
        names = "".join(f"{one.address} {one.name}\n" for one in self.hosts)
        for one in everyone:
            directory = CONFIGURATION / one.namespace
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
            run("ip", "netns", "add", one.namespace)
            _ip(one, "link set lo up")
        for bridge in ("eth0", "apart"):
            _ip(self._switch, f"link add {bridge} type bridge mcast_snooping 0")
        _ip(self._switch, "link set apart up")
        for one in self.hosts:
            port = f"port{one.index}"
            _ip(self._switch, f"link add {port} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {one.namespace}")
            _ip(self._switch, f"link set {port} master eth0 up")
        for one in everyone:
            # The same everywhere, whatever the machine's defaults. Without saved metrics, what a connection has learnt
            # at one rate does not reach the next at another.
            settings = "echo 1 >/proc/sys/net/ipv4/tcp_timestamps && echo 1 >/proc/sys/net/ipv4/tcp_no_metrics_save"
            run("ip", "netns", "exec", one.namespace, "sh", "-c", settings)
            _ip(one, f"addr add {one.address}/24 dev eth0 noprefixroute")
            _ip(one, "link set eth0 up")
            _ip(one, f"route add 10.77.{number}.0/24 dev eth0 src {one.address} congctl cubic")
        self.set_rate(self._rates)


def plug(switch: str, index: int, *, out: bool) -> None:
    """See `Netlab.plug`; for a program on a host, given the namespace of the switch and the index of a host."""
    run("ip", "-n", switch, *f"link set port{index} {'nomaster' if out else 'master eth0'}".split())


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _per_host(rates: Rates, hosts: int) -> list[Rate]:
    each = list(rates) if isinstance(rates, Sequence) else [rates] * hosts
    if len(each) != hosts:
        raise NetlabError(f"rate_mbit must have one rate per host ({hosts}), got {len(each)}")
    return [rate if isinstance(rate, Rate) else Rate(rate, rate) for rate in each]


def _ip(host: Host, command: str) -> None:
    run("ip", "-n", host.namespace, *command.split())


def _run_command(lab: Netlab, options: argparse.Namespace) -> int:
    """Runs the command on the chosen hosts until all have ended well or one has not; the exit code."""
    from tfps.launch.supervisor import Command, Interrupted, Process, Supervisor
    from tfps.launch.terminal import Console

    if options.probe:
        lab.probe()
    failed: list[Process] = []
    try:
        with Supervisor(Console(sys.stdout, sys.stderr), options.grace) as supervisor:
            processes = [
                supervisor.start(
                    Command(host.name, host.argv(options.command), host.environment(), 31 + host.index % 6)
                )
                for host in lab.hosts
                if options.on is None or host.index in options.on
            ]

            def is_over() -> bool:
                failed[:] = [process for process in processes if process.ended and process.code != 0]
                return bool(failed) or all(process.ended for process in processes)

            supervisor.wait(is_over)
            if not failed:
                return 0
            code, message = failed[0].code or 1, f"{failed[0].command.name} {failed[0].describe_end()}"
    except Interrupted as interrupted:
        code, message = -interrupted.number, str(interrupted)
    print(f"netlab: {message}; all processes were ended", file=sys.stderr)
    return 128 - code if code < 0 else code


def _rates(text: str) -> list[float | Rate]:
    each = [[float(number) for number in item.split(":")] for item in text.split(",")]
    return [Rate(*numbers) if len(numbers) == 2 else numbers[0] for numbers in each]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="netlab.py",
        description="Makes hosts with a bandwidth of their own on this machine, as network namespaces. Needs root.",
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="run|probe|clean")
    lab = argparse.ArgumentParser(add_help=False)
    lab.add_argument("--hosts", type=int, default=2, metavar="N", help="how many hosts (default %(default)s)")
    lab.add_argument(
        "--rate-mbit",
        type=_rates,
        default=[1000.0],
        metavar="RATES",
        help="Mbit/s on the wire, headers included: one for all hosts or, with commas, one for each; TX:RX where they "
        "differ, as in 1000,100:1000 (default 1000)",
    )
    what = "runs a command on every host"
    run = commands.add_parser(
        "run",
        parents=[lab],
        help=what,
        description=f"{what.capitalize()}, with prefixed output. NETLAB_HOST_INDEX says which host it is (0 is the "
        "first), NETLAB_ADDRESSES has the addresses of all, with commas. If one fails, all are ended; its exit code is "
        "that of netlab.py.",
    )
    indices = "only on these hosts, as in 0,2"
    run.add_argument("--on", type=lambda text: [int(index) for index in text.split(",")], metavar="HOSTS", help=indices)
    run.add_argument("--probe", action="store_true", help="make sure first that the rates are delivered")
    grace = "how long processes may take to end when told to (default %(default)g)"
    run.add_argument("--grace", type=float, default=5.0, metavar="SECONDS", help=grace)
    run.add_argument("command", nargs="+", metavar="COMMAND", help="what to run, after --")
    what = "measures what TCP gets through, and fails if a rate is more than 3 %% off"
    probe = commands.add_parser("probe", parents=[lab], help=what, description=what.capitalize())
    one = "one host after the other instead of all at the same time, of which the machine has to carry the sum"
    probe.add_argument("--one-by-one", action="store_true", help=one)
    what = "removes the labs of programs that were killed"
    commands.add_parser("clean", help=what, description=what.capitalize())
    options = parser.parse_args(argv)
    wrong = [index for index in getattr(options, "on", None) or () if not 0 <= index < options.hosts]
    if wrong:
        parser.error(f"--on must have hosts from 0 to {options.hosts - 1}, got {wrong[0]}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    try:
        options = _parse(argv)
        if options.action == "clean":
            print(f"removed: {', '.join(clean()) or 'nothing'}")
            return 0
        rates = options.rate_mbit[0] if len(options.rate_mbit) == 1 else options.rate_mbit
        with Netlab(options.hosts, rates) as lab:
            if options.action == "run":
                return _run_command(lab, options)
            for measurement in lab.probe(together=not options.one_by_one):
                print(measurement)
            return 0
    except BrokenPipeError:  # nobody reads any more; Python would complain once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (NetlabError, OSError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
