"""Which versions are installed, and whether tfps supports them; imports none of them."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence

from tfps.doctor.report import Check
from tfps.version import __version__
from tfps.wire.control import PROTOCOL_VERSION

_DISTRIBUTION = "tfps"
_NEEDED = ("grpcio", "protobuf", "numpy")  # everywhere
_TENSORFLOW = ("tensorflow", "tensorflow-cpu")  # either of these
_LIMIT = re.compile(r"(>=|<=|==|!=|<|>)\s*([\w.]+)")
_NAME = re.compile(r"[\w.-]+")


def number(version: str) -> tuple[int, ...]:
    """The release part: 2.21.0rc1 -> (2, 21), the same as for 2.21, which is what ranges are about."""
    found = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in found[0].split(".")] if found else []
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def compare(version: str, limits: str) -> int:
    """-1 if `version` is older than `limits` (">=2.18,<2.22") allow, 1 if it is newer, else 0."""
    own = number(version)
    for operator, limit in _LIMIT.findall(limits):
        bound = number(limit)
        if (operator in (">=", "==") and own < bound) or (operator == ">" and own <= bound):
            return -1
        if (operator in ("<=", "==") and own > bound) or (operator == "<" and own >= bound):
            return 1
    return 0


def supported(requirements: Sequence[str]) -> dict[str, str]:
    """Distribution -> limits, from requirements as package metadata have them."""
    found: dict[str, str] = {}
    for requirement in requirements:
        plain = requirement.partition(";")[0]
        if (name := _NAME.match(plain)) is not None:
            found.setdefault(name[0].lower(), plain[name.end() :].strip(" ()"))
    return found


def checks(
    installed: Mapping[str, str] | None = None, limits: Mapping[str, str] | None = None, python: str | None = None
) -> list[Check]:
    """One check per distribution.

    Args:
        installed: distribution -> version; None: what is installed.
        limits: distribution -> supported versions, "python" too; None: as tfps was installed.
        python: version of Python; None: this one's.
    """
    known = _limits() if limits is None else limits
    found = _installed() if installed is None else installed
    lines = [_check("python", platform.python_version() if python is None else python, known.get("python", ""))]
    lines.append(
        Check(
            "tfps",
            "ok",
            f"{__version__}, protocol version {PROTOCOL_VERSION}",
            values={"version": __version__, "protocol_version": PROTOCOL_VERSION},
        )
    )
    lines += [_check(name, found.get(name, ""), known.get(name, "")) for name in _NEEDED]
    tensorflow = next((name for name in _TENSORFLOW if name in found), "")
    if not tensorflow:
        lines.append(
            Check("tensorflow", "skipped", "not installed: enough for pservers; workers need tfps[tensorflow]")
        )
        return lines
    lines.append(_check("tensorflow", found[tensorflow], known.get(tensorflow, "")))
    lines.append(_check("keras", found.get("keras", ""), known.get("keras", "")))
    return lines


def _check(name: str, version: str, limits: str) -> Check:
    values = {"version": version or None, "supported": limits or None}
    if not version:
        return Check(name, "failed", "not installed", f'pip install "{name}{limits}"', "missing", values)
    text = f"{version} (supported: {limits})" if limits else version
    if (side := compare(version, limits)) == 0:
        return Check(name, "ok", text, values=values)
    do = f"install Python {limits}" if name == "python" else f'pip install "{name}{limits}"'
    if side < 0:
        return Check(name, "failed", f"{text}: too old", f"{name} {version} is too old: {do}", "old", values)
    advice = f"{name} {version} is newer than what tfps was tested with; if it fails: {do}"
    return Check(name, "warning", f"{text}: not tested", advice, "new", values)


def _limits() -> dict[str, str]:
    """What tfps supports, as it was installed; empty if it runs from a folder that is not installed."""
    try:
        about = importlib.metadata.metadata(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {**supported(about.get_all("Requires-Dist") or []), "python": about["Requires-Python"] or ""}


def _installed() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in (*_NEEDED, *_TENSORFLOW, "keras"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
