"""What answers of a pserver, or their absence, mean. Decisions only, no I/O.

Tested in tests/doctor/test_pserver.py and tests/doctor/test_verdicts.py.
"""

from __future__ import annotations

from tfps.doctor.report import Check
from tfps.wire.clocks import Compared
from tfps.wire.control import PROTOCOL_VERSION, version_text
from tfps.wire.reach import Answers, Unreached

_FAR_S = 0.02  # beyond this hosts are hardly in one data centre
_CLOCKS_S = 1.0  # by which times of day may differ


def unreached(found: Unreached, port: int) -> Check:
    """The check of a control port to which there is no connection."""
    advice = f"{found.text}: look at the address, the route and firewalls"
    if found.problem == "refused":
        advice = (
            f"nothing listens on port {port} there: is tfps_pserver running, with --port {port}? Without --token-file "
            "or TLS it listens on its own host only"
        )
    elif found.problem == "timeout":
        advice = f"a firewall drops what goes to port {port} (open it between hosts), or there is no such host"
    return Check("port", "failed", f"{port}: {found.text}", advice, found.problem, {"port": port})


def stranger(who: Answers, said: str, error: str) -> Check:
    """The check of a port where no pserver answers."""
    lines = {
        "http": (
            "an HTTP server or a proxy answers",
            f"{said}: that is no pserver. Give the address of --port, not of a proxy or of --metrics-port",
            "http",
        ),
        "data_port": (
            "that is a data port",
            "give the address of --port (7070 by default), not of --data-port",
            "data_port",
        ),
        "other": (
            "something else answers",
            f"what answers there is no pserver ({said}): correct the address, or go around the proxy",
            "stranger",
        ),
        "closes": (
            "connections are closed at once",
            "connections are taken and closed: a proxy or load balancer without a pserver behind it, perhaps",
            "closes",
        ),
        "silent": (
            "takes connections and does not answer",
            "connections are taken, but nobody answers: the process there hangs, or a firewall or proxy holds them",
            "silent",
        ),
        "grpc": ("does not answer in time", f"gRPC is there, but the call failed: {error}", "lost"),
    }
    text, advice, problem = lines[who]
    return Check("pserver", "failed", text, advice, problem)


def of_version(protocol: int, version: str) -> Check:
    """The check of the versions that a pserver tells; `version` is "" if it is too old to tell."""
    values = {"protocol_version": protocol, "version": version or None}
    if protocol != PROTOCOL_VERSION:
        text = f"protocol version {protocol}, here {PROTOCOL_VERSION}"
        return Check("pserver", "failed", text, version_text(protocol, PROTOCOL_VERSION), "version", values)
    if not version:
        advice = "is of an older tfps, which can be checked no further: install the same version on all hosts"
        return Check("pserver", "warning", "an older tfps", advice, "old", values)
    return Check("pserver", "ok", f"tfps {version}, protocol version {protocol}", values=values)


def distance(call_s: float, network_s: float | None) -> Check:
    """The check of round trips: of a call, and of the network alone if that is known."""
    values = {"call_s": call_s, "network_s": network_s}
    shown_s = call_s if network_s is None else network_s
    text = f"{shown_s * 1e3:.2g} ms, a call {call_s * 1e3:.2g} ms"
    if shown_s <= _FAR_S:
        return Check("round trip", "ok", text, values=values)
    advice = f"a round trip takes {shown_s * 1e3:.0f} ms: workers and pservers belong into one data centre"
    return Check("round trip", "warning", text, advice, "far", values)


def clock(found: Compared) -> Check:
    """The check of the two hosts' clocks."""
    error_s = found.error_ns / 1e9
    wall_s = None if found.wall_offset_ns is None else found.wall_offset_ns / 1e9
    values = {"offset_s": found.offset_ns / 1e9, "error_s": error_s, "wall_offset_s": wall_s}
    text = f"known within {error_s * 1e3:.2g} ms"
    if wall_s is None:
        return Check("clock", "ok", text, values=values)
    text += f"; times of day differ by {abs(wall_s):.2g} s"
    if abs(wall_s) <= _CLOCKS_S + error_s:
        return Check("clock", "ok", text, values=values)
    advice = f"times of day differ by {abs(wall_s):.3g} s, logs do not fit and certificates may seem invalid: use NTP"
    return Check("clock", "warning", text, advice, "differs", values)
