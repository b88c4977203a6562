"""Divides the GPUs of a host among the workers on it."""

from __future__ import annotations

import functools
import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from tfps.launch.job import LocalRank

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NAME = r"[0-9]+|(GPU|MIG)-\S+"
_LINE = re.compile(r"(?P<indent>\s*)(?:GPU|MIG) .*\(UUID:\s*(?P<uuid>(?:GPU|MIG)-[^)\s]+)\)")
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_ASK_S = 20.0  # nvidia-smi starts slowly where the driver is not kept loaded


def share_of_gpus(environment: Mapping[str, str], local_rank: LocalRank | None) -> dict[str, str]:
    """Returns the variables that limit a worker to its share, none if there is nothing to divide.

    Args:
        environment: may limit the host's GPUs already.
        local_rank: None: not a worker.
    """
    if local_rank is None or local_rank.workers == 1:
        return {}
    visible = visible_gpus(environment)
    if not visible:
        return {}
    variables = {_VARIABLE: ",".join(share(visible, *local_rank))}
    if len(visible) < local_rank.workers and _GROWTH not in environment:
        variables[_GROWTH] = "true"  # else the first of those that share a GPU would take all of its memory
    return variables


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
        names = (name.strip() for name in limited.split(","))
        # As CUDA reads it: what follows a name that stands for nothing is not visible either.
        return list(itertools.takewhile(lambda name: re.fullmatch(_NAME, name), names))
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    return [] if program is None else list(_listed(program))


@functools.cache
def _listed(program: str) -> tuple[str, ...]:
    try:
        found = subprocess.run(
            [program, "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(parse_list(found.stdout)) if found.returncode == 0 else ()


def parse_list(text: str) -> list[str]:
    """Returns the devices that `nvidia-smi -L` lists. Of a GPU that is split (MIG) only its parts can be used."""
    found: list[str] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        if match["indent"] and found and found[-1].startswith("GPU-"):
            found.pop()
        found.append(match["uuid"])
    return found
