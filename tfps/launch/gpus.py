"""Divides the GPUs of a host among the workers on it."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Mapping, Sequence

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ASK_S = 20.0  # nvidia-smi starts slowly where the driver is not kept loaded


def share_of_gpus(environment: Mapping[str, str], among: tuple[int, int] | None) -> dict[str, str]:
    """Returns the variable that limits a worker to its share, empty if there is nothing to divide.

    Args:
        environment: may limit the host's GPUs already.
        among: the worker's place among those of its host, and their number; None: not a worker.
    """
    if among is None or among[1] == 1:
        return {}
    visible = visible_gpus(environment)
    return {_VARIABLE: ",".join(share(visible, *among))} if visible else {}


def share(gpus: Sequence[str], index: int, count: int) -> Sequence[str]:
    """Returns the GPUs of worker `index` of `count`: neighbors, as equal in number as can be, one at least.

    Fewer GPUs than workers are shared: each is used by several.
    """
    if len(gpus) < count:
        return [gpus[index % len(gpus)]]
    return gpus[index * len(gpus) // count : (index + 1) * len(gpus) // count]


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that a program with this environment would see, as CUDA_VISIBLE_DEVICES names them."""
    if (limited := environment.get(_VARIABLE)) is not None:
        return [name.strip() for name in limited.split(",") if name.strip() not in ("", "-1", "none")]
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    return [] if program is None else list(_listed(program))


@functools.cache
def _listed(program: str) -> tuple[str, ...]:
    try:
        found = subprocess.run(
            [program, "--query-gpu=uuid", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line.strip() for line in found.stdout.splitlines()]
    return tuple(line for line in lines if line.startswith("GPU-")) if found.returncode == 0 else ()
