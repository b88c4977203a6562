"""This host: versions, settings, token and certificates, GPUs, open files, memory, memory to share."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from tfps import __version__
from tfps.config import Config, Security, unknown_variables
from tfps.doctor.report import Check, warn_if
from tfps.errors import ConfigError
from tfps.types import Json
from tfps.wire.connection import IN_C
from tfps.wire.control import PROTOCOL_VERSION, Pserver
from tfps.wire.job_token import JobToken, is_open_to_others
from tfps.wire.shared_memory import Arena, machine_bytes

_NEEDED = ("grpcio", "protobuf", "numpy")  # everywhere
_TENSORFLOW = ("tensorflow", "tensorflow-cpu")  # either of these
_NOWHERE = "127.0.0.1:1"  # a channel connects when it is used, which this one is not
IMPORT_S = 120.0  # for TensorFlow to be imported on a busy machine
_ASK = """
import json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
names = [device.name for device in tf.config.list_physical_devices("GPU")]
print(json.dumps({"gpus": len(names), "version": tf.__version__, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}))
"""
_FILES, _FILES_PER_PEER = 128, 4  # that a process opens by itself, and for each worker or pserver
_USUAL_FILES = 1024
GIB = 2**30
# Of version 2 and of version 1: limit, what is used, statistics, and which of these are pages that the system can drop.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def side_of(version: str, limits: SpecifierSet) -> int:
    """-1 if `version` is older than `limits` allow, 1 if newer (or no version), else 0. 2.22.0rc1 is as 2.22.0."""
    try:
        own = Version(version).base_version
    except InvalidVersion:
        return 1
    outside = [each.operator for each in limits if own not in each]
    return 0 if not outside else -1 if outside[0] in (">=", ">", "==", "~=") else 1


def versions(
    installed: Mapping[str, str] | None = None, limits: Mapping[str, str] | None = None, python: str = ""
) -> list[Check]:
    """One check per distribution: its version, by default what is installed, and what of it tfps supports."""
    known = _limits() if limits is None else limits
    found = _installed() if installed is None else installed
    own = {"version": __version__, "protocol_version": PROTOCOL_VERSION}
    lines = [
        _check("python", python or platform.python_version(), known.get("python", "")),
        Check("tfps", "ok", f"{__version__}, protocol version {PROTOCOL_VERSION}", values=own),
        *(_check(name, found.get(name, ""), known.get(name, "")) for name in _NEEDED),
    ]
    tensorflow = next((name for name in _TENSORFLOW if name in found), "")
    if not tensorflow:
        text = "not installed: enough for pservers; workers need tfps[tensorflow]"
        return [*lines, Check("tensorflow", "skipped", text)]
    lines.append(_check("tensorflow", found[tensorflow], known.get(tensorflow, "")))
    return [*lines, _check("keras", found.get("keras", ""), known.get("keras", ""))]


def _check(name: str, version: str, limits: str) -> Check:
    values = {"version": version or None, "supported": limits or None}
    if not version:
        return Check(name, "failed", "not installed", f'pip install "{name}{limits}"', "missing", values)
    text = f"{version} (supported: {limits})" if limits else version
    do = f"install Python {limits}" if name == "python" else f'pip install "{name}{limits}"'
    if (side := side_of(version, SpecifierSet(limits))) < 0:
        return Check(name, "failed", f"{text}: too old", f"{name} {version} is too old: {do}", "old", values)
    advice = f"{name} {version} is newer than what tfps was tested with; if it fails: {do}"
    return warn_if(name, side > 0, f"{text}: not tested" if side > 0 else text, advice, "new", values)


def supported(requirements: Sequence[str]) -> dict[str, str]:
    """Distribution -> limits, from requirements as package metadata have them."""
    found = [Requirement(each) for each in requirements]
    return {each.name.lower(): str(each.specifier) for each in reversed(found)}  # the first of a name wins


def _limits() -> dict[str, str]:
    """What tfps supports, as it was installed; empty if it runs from a folder that is not installed."""
    try:
        about = importlib.metadata.metadata("tfps")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {**supported(about.get_all("Requires-Dist") or []), "python": about["Requires-Python"] or ""}


def _installed() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in (*_NEEDED, *_TENSORFLOW, "keras"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def settings(environment: Mapping[str, str]) -> tuple[Config, Check]:
    """The settings in `TFPS_...` variables; the defaults if they are malformed."""
    try:
        config = Config.from_environment(environment)
    except ConfigError as error:
        return Config(), Check("settings", "failed", "malformed", str(error), "malformed")
    if unknown := unknown_variables(environment):
        text = f"{len(unknown)} unknown variable{'s' * (len(unknown) > 1)}"
        return config, Check("settings", "warning", text, "; ".join(unknown), "unknown")
    return config, Check("settings", "ok", "as a worker would take them")


def token(security: Security) -> Check:
    """The file with the job token: whether it can be used, and who else may read it."""
    path = security.token_file
    if not path:
        return Check("token", "ok", "none", values={"path": None})
    values = {"path": path}
    try:
        status = Path(path).stat()
        JobToken.read(path)
    except (ConfigError, OSError) as error:
        text = str(error) if isinstance(error, ConfigError) else f"token_file '{path}' cannot be read: {error.strerror}"
        return Check("token", "failed", "cannot be used", text, "unusable", values)
    is_open = is_open_to_others(status)
    text = f"{path} has mode {stat.S_IMODE(status.st_mode):04o}: others may use it" if is_open else path
    return warn_if("token", is_open, text, f"chmod 600 '{path}', the job token", "readable", values)


def tls(security: Security) -> Check:
    """Whether TLS is on, and its files can be used."""
    if not security.tls_ca:
        return Check("tls", "ok", "off", values={"on": False})
    try:
        Pserver(_NOWHERE, replace(security, token_file="")).close()
    except ConfigError as error:
        return Check("tls", "failed", "files cannot be used", str(error), "unusable", {"on": True})
    own = "with a certificate" if security.tls_cert else "without a certificate"
    return Check("tls", "ok", f"on, {own} of this host: slices go through gRPC", values={"on": True})


def ask_tensorflow(program: str = _ASK) -> subprocess.Popen[str]:
    """Asks TensorFlow for GPUs meanwhile: importing it takes seconds."""
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace",
    )  # fmt: skip


def gpus(count: int, asked: subprocess.Popen[str] | None = None, timeout_s: float = IMPORT_S) -> Check:
    """The `count` GPUs that the driver would show to a worker, and what TensorFlow sees of them, if it is `asked`."""
    values: dict[str, Json] = {"visible": count, "seen_by_tensorflow": None}
    if asked is None:
        return Check("gpus", "ok", str(count or "none"), values=values)
    end_s = time.monotonic() + timeout_s
    while True:
        try:  # in short waits, between which Python notices Ctrl-C that has come to another thread
            output, errors = asked.communicate(timeout=min(max(end_s - time.monotonic(), 0.0), 0.5))
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() < end_s:
                continue
        asked.kill()
        advice = f"TensorFlow could not be imported within {timeout_s:.0f} s: try python -c 'import tensorflow'"
        return Check("gpus", "warning", "TensorFlow does not answer", advice, "slow", values)
    try:  # the last line is the answer: programs that are started with Python may print something, too
        seen = json.loads(output.strip().splitlines()[-1])
        values["seen_by_tensorflow"] = number = int(seen["gpus"])
    except (IndexError, KeyError, TypeError, ValueError):
        last = (errors.strip() or "no message").splitlines()[-1][:200]
        return Check("gpus", "failed", "TensorFlow fails", f"TensorFlow cannot be imported: {last}", "import", values)
    if number or not count:
        return Check("gpus", "ok", f"{number} seen by TensorFlow" if number else "none", values=values)
    what = f"CUDA_VISIBLE_DEVICES={seen['visible']!r}" if seen["visible"] is not None else "its CUDA libraries"
    advice = (
        f"TensorFlow sees none of the {count} GPUs of this host: look at {what}; "
        "pip install 'tensorflow[and-cuda]' brings the libraries"
    )
    return Check("gpus", "warning", f"none of {count} seen by TensorFlow", advice, "unseen", values)


def open_files(peers: int, limit: int | None = None) -> Check:
    """Whether a process that talks to `peers` may open enough files; without `limit` by that of this process."""
    if limit is None:
        with contextlib.suppress(ImportError):  # Windows
            import resource

            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            limit = None if soft == resource.RLIM_INFINITY else soft
    if limit is None:
        return Check("open files", "skipped", "this system has no such limit")
    least = _FILES + _FILES_PER_PEER * peers
    values = {"limit": limit, "least": least}
    if limit < least:
        enough = max(_USUAL_FILES, 1 << (least - 1).bit_length())
        advice = f"a process may open {limit} files and needs {least} for {peers} peers: ulimit -n {enough}"
        return Check("open files", "failed", f"{limit}, needs {least}", advice, "low", values)
    advice = f"a process may open {limit} files only, which data pipelines often exceed: ulimit -n {_USUAL_FILES}"
    return warn_if("open files", limit < _USUAL_FILES, f"{limit}", advice, "low", values)


def memory() -> Check:
    """How much this host, or its container, has and has left."""
    total, left = machine_bytes(), available_bytes()
    values = {"total_bytes": total, "available_bytes": left}
    if left is None:
        return Check("memory", "ok", f"{total / GIB:.1f} GiB", values=values)
    text = f"{left / GIB:.1f} of {total / GIB:.1f} GiB free"
    advice = f"only {left / GIB:.1f} GiB of memory is free; TensorFlow alone takes about half a GiB: end other work"
    return warn_if("memory", left < GIB, text, advice, "low", values)


def shared_memory(config: Config) -> Check:
    """Whether this host has memory to share with pservers on it."""
    if not config.shared_memory:
        return Check("shared memory", "skipped", "turned off: TFPS_SHARED_MEMORY=0", values={"usable": False})
    why = "the system gives none"
    try:
        with contextlib.closing(Arena()) as arena:
            if arena.allocate(1) is not None:
                return Check("shared memory", "ok", "this host has it", values={"usable": True})
    except OSError as error:
        why = str(error)
    advice = f"slices to pservers on this host go through sockets, at about twice the CPU: no memory to share ({why})"
    return Check("shared memory", "warning", "not here", advice, "none", {"usable": False})


def sockets() -> Check:
    """Whether C code sends and receives slices, which takes less of the processors (docs/transport.md)."""
    text = "C code sends and receives" if IN_C else "Python code sends and receives"
    advice = "slices between hosts take up to a third more CPU without C code: install a C compiler, then tfps again"
    return warn_if("sockets", not IN_C, text, advice, "slow", {"c": IN_C})


def available_bytes() -> int | None:
    """What is left of the machine's memory, or of its container's if that is less; None if the system does not tell."""
    found = [] if (left := container_available_bytes(Path("/sys/fs/cgroup"))) is None else [left]
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        found.append(int(text.partition("MemAvailable:")[2].split()[0]) * 1024)
    return min(found, default=None)


def container_available_bytes(cgroup: Path) -> int | None:
    """What is left below the limit of a container; None: it has none. Cached files count as free, as for a kubelet."""
    for limit, used, statistics, droppable in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            most, taken = (int((cgroup / file).read_text(encoding="utf-8")) for file in (limit, used))
            with contextlib.suppress(OSError, ValueError):
                lines = (cgroup / statistics).read_text(encoding="utf-8").splitlines()
                taken -= next((int(line.split()[1]) for line in lines if line.startswith(f"{droppable} ")), 0)
            return max(most - max(taken, 0), 0)
    return None
