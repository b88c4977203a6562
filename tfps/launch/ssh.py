"""`tfps_launch --hosts a:4,b:4`: the job's processes on hosts that ssh reaches without asking anything."""

from __future__ import annotations

from dataclasses import dataclass

from tfps.launch.engine import Remote

# No question (it would hang), no terminal; a host that does not answer for a minute is lost.
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")


@dataclass(frozen=True)
class Ssh(Remote):
    """Starts processes with the installed OpenSSH.

    Args:
        program: ssh and its options.
    """

    program: tuple[str, ...] = ("ssh",)

    def reach(self, host: str, command: str) -> list[str]:
        return [*self.program, *_OPTIONS, *_ALIVE, host.strip("[]"), command]
