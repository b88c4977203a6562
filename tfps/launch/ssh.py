"""`tfps_launch --hosts a:4,b:4`: the job's processes on hosts that ssh reaches without asking anything."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from tfps.launch.engine import Remote

_FAILED = 255  # what ssh reports of itself

_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),  # a question would hang
    *("-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),  # a host that is silent for a minute is lost
    *("-o", "ControlMaster=no"),  # a connection that is shared already is used, but no process shares its own
    *("-o", "ClearAllForwardings=yes"),  # the ports would be taken after the first process
)


@dataclass(frozen=True)
class Ssh(Remote):
    """Starts processes with the installed OpenSSH.

    Args:
        program: ssh and its options, which win over ours.
    """

    program: tuple[str, ...] = ("ssh",)

    def reach(self, host: str, command: str) -> list[str]:
        return [*self.program, *_OPTIONS, host.strip("[]"), command]

    def explain(self, host: str, code: int, answered: bool) -> str:
        if code != _FAILED:
            return super().explain(host, code, answered)
        if answered:
            return f"ssh says so when it loses {host}"
        return f"`{shlex.join([*self.program, host.strip('[]'), 'true'])}` must work without a question"
