"""A cluster on this machine: pods are processes in network namespaces with DNS, files and users as in Kubernetes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kubelet import NAMESPACE, Pod

from tools.netlab import Host, Netlab, unavailable
from tools.netlab_system import CONFIGURATION, run, tool

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PATIENCE_S = 150.0
# What runs before the container's process: its own hostname, files of Secrets, mounts, a read-only root.
# Arguments: name, staged files, read-only or not, directory, then the command.
_START = """
set -e
echo "$1" >/proc/sys/kernel/hostname
mount -t tmpfs tmpfs /run
(cd "$2/secrets" && find . -mindepth 1 -type d) | while read -r folder; do mkdir -p "/$folder"; done
cp -a "$2/secrets/." /
while read -r folder target; do mkdir -p "$target" && mount --rbind "$folder" "$target"; done <"$2/mounts"
if [ "$3" = read-only ]; then mount -o remount,bind,ro /; fi
cd "$4"
shift 4
exec "$@"
"""


def reason_against() -> str | None:
    """Why there can be no such cluster here, or None."""
    if (reason := unavailable()) is not None:
        return reason
    return None if shutil.which(tool("setpriv")) else "needs the program setpriv: install util-linux"


def _opened(staged: Path) -> list[tuple[Path, Path]]:
    """Mounts (what, where) that let all users execute our Python, also below somebody's home directory."""
    needed = {Path(sys.base_prefix), Path(sys.prefix), ROOT}
    found: dict[Path, list[Path]] = {}
    for path in needed:
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & stat.S_IXOTH:
                found.setdefault(parent, []).append(path)
                break
    mounts = []
    for number, (private, paths) in enumerate(found.items()):
        instead = staged / f"open{number}"
        for path in paths:
            (instead / path.relative_to(private)).mkdir(parents=True)
            mounts.append((path, instead / path.relative_to(private)))
        mounts.append((instead, private))
    return mounts


def _privileges(user: int) -> tuple[str, ...]:
    """What to begin a command with, so that it runs as `user` without any capability."""
    ids = (f"--reuid={user}", f"--regid={user}", "--clear-groups")
    return (tool("setpriv"), *ids, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")


class Cluster(contextlib.ExitStack):
    """Nodes of one pod each, and a DNS server. `image` is the folder in which pods run; all users may read it.

    Args:
        nodes: how many pods there can be, counting those that have ended.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="tfps-pods-")))
        self.folder.chmod(0o755)
        self.image = self._folder("image")
        for name, command in (("python", ""), ("tfps_pserver", " -m tfps.pserver.cli")):
            program = self._folder("image/bin") / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable}{command} "$@"\n')
            program.chmod(0o755)
        self._names_file = self.folder / "names.json"
        self._names: dict[str, str] = {}
        self._lab = Netlab(nodes + 1, 1000.0, min_burst_bytes=64 * 1024)
        self.running: list[Running] = []

    def __enter__(self) -> Cluster:  # noqa: PYI034 (typing.Self is not in Python 3.10)
        self.enter_context(self._lab)
        self._dns, *self._free = self._lab.hosts
        self.rename()
        serving = self._dns.popen(
            [sys.executable, str(HERE / "cluster_dns.py"), self._dns.address, str(self._names_file)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.callback(_close, serving)
        assert serving.stdout is not None
        assert serving.stdout.readline() == "ready\n"
        for host in self._free:
            domains = f"{NAMESPACE}.svc.cluster.local svc.cluster.local cluster.local"
            text = f"search {domains}\nnameserver {self._dns.address}\noptions ndots:5\n"
            (CONFIGURATION / host.namespace / "resolv.conf").write_text(text)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for each in self.running:
            each.process.kill()
            each.process.wait()
            if kind is not None:
                print(f"--- {each.pod.name} ended with {each.process.returncode}:\n{each.log()}")
        super().__exit__(kind, error, traceback)

    def _folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        return folder

    def claim(self, name: str) -> Path:
        """The content of a volume claim, which all users may write."""
        folder = self._folder(f"claims/{name}")
        folder.chmod(0o777)
        return folder

    def rename(self, **addresses: str | None) -> None:
        """Changes what names of the cluster's DNS mean; None: nothing any more."""
        self._names = {name: to for name, to in {**self._names, **addresses}.items() if to is not None}
        new = self._names_file.with_suffix(".new")
        new.write_text(json.dumps(self._names))
        new.replace(self._names_file)

    def start(self, pod: Pod, *, known: bool = True) -> Running:
        """Starts a pod on a node of its own; `known`: DNS knows it at once."""
        host = self._free.pop(0)
        if known and pod.dns_name:
            self.rename(**{pod.dns_name: host.address})
        staged = self._folder(f"staged/{host.name}")
        self._stage(pod, staged)
        user = pod.spec["securityContext"]["runAsUser"]
        read_only = "read-only" if pod.container["securityContext"].get("readOnlyRootFilesystem") else "writable"
        image = {
            "PATH": f"{self.image / 'bin'}{os.pathsep}{os.defpath}",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": "/",
            "HOSTNAME": pod.name,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
        }
        env = [tool("env"), "-i", *(f"{name}={value}" for name, value in {**image, **pod.env}.items())]
        # Process 1 is the container's, or that which holds the namespace that the pod's containers share.
        alone = [tool("unshare"), "--pid", "--fork", "--kill-child", "--mount-proc"]
        held = ["sh", "-c", '"$@" & wait $!', "sh"] if pod.spec.get("shareProcessNamespace") else []
        start = [*alone, *held, "sh", "-c", _START, "sh", pod.name, str(staged), read_only, str(self.image)]
        output = (staged / "log").open("w")
        with output:
            command = [*start, *_privileges(user), *env, *pod.argv]
            process = host.popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
        self.running.append(Running(pod, host, process, staged / "log"))
        return self.running[-1]

    def _stage(self, pod: Pod, staged: Path) -> None:
        """Files of Secrets as a kubelet makes them: links, so that all change at once; with a fsGroup of that group."""
        group = pod.spec["securityContext"].get("fsGroup")
        modes = {each["name"]: each["secret"]["defaultMode"] for each in pod.spec["volumes"] if "secret" in each}
        names = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
        for path, files in pod.mounts.items():
            folder = staged / "secrets" / path.lstrip("/")
            (folder / "..data").mkdir(parents=True)
            for name, content in files.items():
                file = folder / "..data" / name
                file.write_text(content)
                os.chown(file, 0, group or 0)
                file.chmod(modes[names[path]] | (0o440 if group else 0))
                (folder / name).symlink_to(f"..data/{name}")
        mounts = [*_opened(staged), *((self.claim(claim), Path(path)) for path, claim in pod.claims.items())]
        (staged / "mounts").write_text("".join(f"{what} {where}\n" for what, where in mounts))


class Running:
    """A pod that has been started."""

    def __init__(self, pod: Pod, host: Host, process: subprocess.Popen[str], log: Path) -> None:
        self.pod, self.host, self.process, self._log = pod, host, process, log

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Ends the pod, and its address goes with it."""
        self.process.kill()
        self.process.wait()
        run("ip", "-n", self.host.namespace, "link", "set", "eth0", "down")

    def terminate(self) -> None:
        """Sends SIGTERM to the container's process, as a kubelet does first."""
        process = self.process.pid
        for _ in range(1 + bool(self.pod.spec.get("shareProcessNamespace"))):
            (process,) = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        os.kill(process, signal.SIGTERM)

    def get(self, port: int, path: str) -> tuple[int, str]:
        """Status and content that the pod's node gets over HTTP."""
        program = (
            "import http.client, sys\n"
            f"connection = http.client.HTTPConnection({self.host.address!r}, {port}, timeout=20)\n"
            f"connection.request('GET', {path!r})\n"
            "answer = connection.getresponse()\n"
            "print(answer.status, answer.read().decode())"
        )
        command = self.host.argv([sys.executable, "-c", program])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        status, _, content = done.stdout.partition(" ")
        return (int(status), content) if done.returncode == 0 else (0, done.stderr)


def _close(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def wait(until: Callable[[], bool], what: str, alive: Sequence[Running] = ()) -> None:
    """Returns as soon as `until` says so; `alive` must not end before.

    Raises:
        TimeoutError: it does not within PATIENCE_S.
    """
    tick = threading.Event()
    for _ in range(int(PATIENCE_S * 20)):
        if until():
            return
        for each in alive:
            assert each.process.poll() is None, f"{each.pod.name} has ended before {what}"
        tick.wait(0.05)
    raise TimeoutError(f"waited in vain for {what}")


def values(files: Mapping[str, str]) -> dict[str, str]:
    """name -> content of files, as a Secret made of them."""
    return {name: Path(path).read_text() for name, path in files.items()}
