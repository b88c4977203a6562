"""Jobs on a Ray cluster: `run`, and `TensorflowConfig` for Ray Train.

Names load on first use: a pserver needs neither TensorFlow nor Ray Train. Nothing else in tfps imports ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tfps.errors import ConfigError

if TYPE_CHECKING:
    from tfps.ray.running import run as run
    from tfps.ray.train import TensorflowConfig as TensorflowConfig

_HOMES = {"TensorflowConfig": "tfps.ray.train", "run": "tfps.ray.running"}

__all__ = ["TensorflowConfig", "run"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tfps.ray' has no attribute {name!r}")
    try:
        import ray  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(f"tfps.ray.{name} needs Ray, which is not installed: pip install 'tfps[ray]'") from error
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
