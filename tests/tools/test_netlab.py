"""Hosts with a bandwidth of their own: network namespaces, made and shaped for real."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest

from tools import netlab, netlab_probe, netlab_system
from tools.netlab import Netlab, NetlabError, Rate

TOOLS = Path(netlab.__file__).parent
REASON = netlab.unavailable()
needs_labs = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# Runs on a host. Connects to a server on another, which tells whom it sees and how the host finds itself.
SERVER = """
import socket
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, (client, _) = server.accept()
    with connection:
        connection.sendall(client.encode())
"""
CLIENT = """
import os, socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 20) as connection:
    seen = connection.makefile().read()
print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), seen, os.getpid() == os.getpgid(0))
"""
# Owns a lab with a process in it, tells about both, and goes on until it is ended.
OWNER = """
import json, os, select, signal, sys
from subprocess import DEVNULL
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever starts the tests may have it ignored, as nohup does
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from tools.netlab import Netlab
with Netlab(hosts=2, rate_mbit=100) as lab:
    process = lab.hosts[1].popen(["sleep", "1000"], stdout=DEVNULL, stderr=DEVNULL)
    forked = os.fork()
    if forked == 0:
        sys.exit()
    os.waitpid(forked, 0)
    print(json.dumps([[host.namespace for host in lab.hosts], process.pid]), flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:  # a read that begins just after a signal never sees it
        pass
"""
# Tries to make a lab as a user that may not.
NOBODY = """
import os, netlab
if os.geteuid() == 0:
    os.setuid(65534)
print(netlab.unavailable())
with netlab.Netlab(hosts=1, rate_mbit=100):
    print("made")
"""


def traces(namespace: str) -> list[Path]:
    """All that a lab leaves behind while it exists, by the name of one of its namespaces."""
    lab = namespace.partition("-")[0]
    return [
        *netlab_system.NAMESPACES.glob(f"{lab}-*"),
        *netlab_system.CONFIGURATION.glob(f"{lab}-*"),
        *netlab_system.RUN.glob(f"{lab.removeprefix('netlab')}.json"),
    ]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may be busy with other tests: rates measured here are low, and it has many attempts."""
    monkeypatch.setattr(netlab, "ATTEMPTS", 20)


@contextlib.contextmanager
def watched(pid: int) -> Iterator[select.poll]:
    """A poll that has an event when the process has ended."""
    fd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        yield poll
    finally:
        os.close(fd)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return str(process.stdout.readline())


@needs_labs
def test_hosts_reach_each_other_under_their_names() -> None:
    with Netlab(hosts=3, rate_mbit=100) as lab:
        for client in lab.hosts:
            server = lab.hosts[(client.index + 1) % 3]
            serving = server.popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
            command = [sys.executable, "-c", CLIENT, server.name, line_of(serving).strip()]
            asking = client.popen(command, stdout=subprocess.PIPE, text=True)
            said, _ = asking.communicate(timeout=jobs.DEADLINE_S)
            serving.communicate(timeout=jobs.DEADLINE_S)
            assert said.split() == [client.name, client.address, client.address, "True"]


@needs_labs
def test_a_process_is_told_its_place_in_the_lab() -> None:
    with Netlab(hosts=2, rate_mbit=100) as lab:
        show = ["sh", "-c", "echo $NETLAB_HOST_INDEX $NETLAB_ADDRESSES $OWN"]
        process = lab.hosts[1].popen(show, env={**os.environ, "OWN": "own"}, stdout=subprocess.PIPE, text=True)
        said, _ = process.communicate(timeout=jobs.DEADLINE_S)
        assert said == f"1 {lab.hosts[0].address},{lab.hosts[1].address} own\n"


@needs_labs
def test_traffic_within_a_host_is_not_shaped() -> None:
    with Netlab(hosts=1, rate_mbit=10) as lab:
        (host,) = lab.hosts
        for address in ("127.0.0.1", host.address):
            flow = netlab_probe.Flow("within", host.popen, host.popen, address, rate_mbit=1000, queue_bytes=1e6)
            # At its best: a machine that is busy may let nothing through for a while.
            assert any(netlab_probe.measure([flow], window_s=0.2)[0] > 100 for _ in range(netlab.ATTEMPTS))


@pytest.mark.long
@needs_labs
def test_the_probe_finds_the_rates_also_after_a_change() -> None:
    with Netlab(hosts=2, rate_mbit=50) as lab:
        found = lab.probe()
        assert [(one.host, one.direction, one.wanted_mbit) for one in found] == [
            ("host0", "tx", 50),
            ("host1", "tx", 50),
            ("host0", "rx", 50),
            ("host1", "rx", 50),
        ]
        assert all(abs(one.payload_mbit / 47.82 - 1) <= netlab.TOLERANCE for one in found)
        lab.set_rate(20)
        assert all(abs(one.payload_mbit / 19.128 - 1) <= netlab.TOLERANCE for one in lab.probe())


@pytest.mark.long
@needs_labs
def test_each_host_and_direction_has_its_rate() -> None:
    with Netlab(hosts=2, rate_mbit=[30, Rate(tx_mbit=60, rx_mbit=20)]) as lab:
        found = {(one.host, one.direction): one.measured_mbit for one in lab.probe(together=False)}
        wanted = {("host0", "tx"): 30, ("host0", "rx"): 30, ("host1", "tx"): 60, ("host1", "rx"): 20}
        assert found == pytest.approx(wanted, rel=netlab.TOLERANCE)


@needs_labs
@pytest.mark.parametrize("direction", [pytest.param("tx", marks=pytest.mark.long), "rx"])
def test_the_probe_refuses_a_host_that_has_lost_its_shaping(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab, "ATTEMPTS", 2)
    monkeypatch.setattr(netlab, "TOLERANCE", 1.0)  # a busy machine makes the other host slower, but none much faster
    with Netlab(hosts=2, rate_mbit=50) as lab:
        namespace, device = lab.hosts[1].namespace, "eth0"
        if direction == "rx":
            namespace, device = namespace.replace("host1", "switch"), "port1"
        netlab_system.run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        with pytest.raises(
            NetlabError, match=f"host1 {direction}: wanted 50 Mbit/s, measured .*the shaping"
        ) as refused:
            lab.probe()
        assert "host0" not in str(refused.value)


@needs_labs
def test_the_probe_refuses_a_rate_that_the_machine_does_not_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab, "ATTEMPTS", 1)
    refusal = "host0 tx: wanted 100000 Mbit/s, measured .*a lower rate"
    with Netlab(hosts=1, rate_mbit=100_000) as lab, pytest.raises(NetlabError, match=refusal):
        lab.probe()


@needs_labs
def test_the_probe_refuses_a_host_that_gets_no_connection() -> None:
    with Netlab(hosts=1, rate_mbit=100) as lab:
        switch = lab.hosts[0].namespace.replace("host0", "switch")
        netlab_system.run("ip", "-n", switch, "addr", "flush", "dev", "eth0")
        with pytest.raises(NetlabError, match="host0 tx: the probe must get through, got error: "):
            lab.probe()


@pytest.mark.long
@needs_labs
def test_two_labs_do_not_disturb_each_other() -> None:
    with Netlab(hosts=1, rate_mbit=20) as second:
        with Netlab(hosts=1, rate_mbit=50) as first:
            assert first.hosts[0].address != second.hosts[0].address
            jobs.together(first.probe, second.probe)
        assert not traces(first.hosts[0].namespace)
        netlab.clean()
        second.probe()


@needs_labs
def test_an_exception_removes_the_lab_and_its_processes() -> None:
    class Expected(Exception):
        pass

    with pytest.raises(Expected), Netlab(hosts=1, rate_mbit=100) as lab:
        leader = lab.hosts[0].popen(
            ["sh", "-c", "setsid sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True
        )
        detached = int(line_of(leader))
        stack = contextlib.ExitStack()
        ends = stack.enter_context(watched(detached))
        assert len(traces(lab.hosts[0].namespace)) == 5
        raise Expected
    with stack:
        assert ends.poll(0)
    leader.communicate()
    assert leader.returncode == -signal.SIGKILL
    assert not traces(lab.hosts[0].namespace)


@needs_labs
@pytest.mark.parametrize("remover", ["clean", "next lab"])
def test_what_a_killed_owner_leaves_is_removed_later(remover: str) -> None:
    with jobs.python("-c", OWNER, PYTHONPATH=str(TOOLS)) as owner:
        namespaces, pid = json.loads(line_of(owner))
        with watched(pid) as ends:
            netlab.clean()
            assert len(traces(namespaces[0])) == 7  # it is not touched as long as its owner lives
            owner.kill()
            owner.wait(jobs.DEADLINE_S)
            if remover == "clean":
                netlab.clean()
            else:
                with Netlab(hosts=1, rate_mbit=100) as lab:
                    assert lab.hosts[0].namespace not in namespaces
            assert ends.poll(0)
    assert not traces(namespaces[0])


@needs_labs
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_owner_ended_by_a_signal_leaves_nothing(number: signal.Signals) -> None:
    with jobs.python("-c", OWNER, PYTHONPATH=str(TOOLS)) as owner:
        namespaces, pid = json.loads(line_of(owner))
        with watched(pid) as ends:
            owner.send_signal(number)
            owner.wait(jobs.DEADLINE_S)
            assert ends.poll(0)
    assert owner.returncode == (-number if number == signal.SIGINT else 128 + number)
    assert not traces(namespaces[0])


@needs_labs
def test_ctrl_c_of_the_program_leaves_nothing() -> None:
    command = ["run", "--hosts=2", "--", "sh", "-c", "echo $NETLAB_ADDRESSES $$; exec sleep 1000"]
    with jobs.python(str(TOOLS / "netlab.py"), *command) as program:
        said = [line_of(program).split() for _ in range(2)]
        assert {line[0] for line in said} == {"[host0]", "[host1]"}
        namespace = f"netlab{said[0][1].split('.')[2]}-host0"
        assert traces(namespace)
        with watched(int(said[0][2])) as first, watched(int(said[1][2])) as second:
            program.send_signal(signal.SIGINT)
            _, errors = program.communicate(timeout=jobs.DEADLINE_S)
            assert first.poll(0)
            assert second.poll(0)
    assert program.returncode == 128 + signal.SIGINT
    assert errors == "netlab: ended by SIGINT; all processes were ended\n"
    assert not traces(namespace)


@needs_labs
def test_the_program_ends_with_the_exit_code_of_the_first_failure() -> None:
    script = "echo $(hostname); test $NETLAB_HOST_INDEX = 0 && exec sleep 1000; exit 7"
    with jobs.python(str(TOOLS / "netlab.py"), "run", "--hosts=3", "--on=0,2", "--", "sh", "-c", script) as program:
        said, errors = program.communicate(timeout=jobs.DEADLINE_S)
    assert program.returncode == 7
    assert set(said.splitlines()) <= {"[host0] host0", "[host2] host2"}
    assert "[host2] host2" in said
    assert errors == "netlab: host2 ended with exit code 7; all processes were ended\n"


def test_without_root_it_refuses_and_says_why() -> None:
    with jobs.python("-c", NOBODY, PYTHONPATH=str(TOOLS)) as process:
        said, errors = process.communicate(timeout=jobs.DEADLINE_S)
    reason = said.strip()
    assert reason.startswith("netlab needs root to make network namespaces, this is user ")
    assert reason.endswith(": use sudo")
    assert errors.splitlines()[-1] == f"tools.netlab_system.NetlabError: {reason}"


@needs_labs
def test_without_its_programs_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ip").symlink_to(netlab_system.tool("ip"))
    monkeypatch.setattr(netlab_system, "_PATH", str(tmp_path))
    assert netlab.unavailable() == "netlab needs the program tc, which is not on PATH: install iproute2"


@pytest.mark.parametrize(
    ("hosts", "rate_mbit", "rule"),
    [
        (0, 100.0, "hosts must be from 1 to 250, got 0"),
        (2, 0.0, "tx_mbit must be from 1 to 100000, got 0.0"),
        (2, [100.0], r"rate_mbit must have one rate per host \(2\), got 1"),
        (2, float("nan"), "tx_mbit must be from 1 to 100000, got nan"),
    ],
)
def test_malformed_arguments_are_refused(hosts: int, rate_mbit: netlab.Rates, rule: str) -> None:
    with pytest.raises(NetlabError, match=rule):
        Netlab(hosts, rate_mbit)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["run", "--rate-mbit=fast", "--", "true"], "--rate-mbit: invalid"),
        (["run", "--on=2", "--", "true"], "--on must have hosts from 0 to 1, got 2"),
        (["run"], "the following arguments are required: COMMAND"),
    ],
)
def test_malformed_options_are_refused(arguments: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        netlab.main(arguments)
    assert rule in capsys.readouterr().err
