"""Data-parallel training of Keras models through gRPC parameter servers.

Names load on first use, so that a pserver never imports TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfps import callbacks, layers
    from tfps.config import Config
    from tfps.errors import (
        ClosedError,
        ConfigError,
        ConnectError,
        InterruptError,
        JoinError,
        MismatchError,
        NonFiniteError,
        ProtocolError,
        PserverLostError,
        TfpsError,
        UnsupportedError,
        WaitTimeoutError,
        WorkerLostError,
    )
    from tfps.strategy.strategy import Strategy

__version__ = "0.2.0.dev0"  # the only place: setup.py reads it without importing tfps

__all__ = [
    "ClosedError",
    "Config",
    "ConfigError",
    "ConnectError",
    "InterruptError",
    "JoinError",
    "MismatchError",
    "NonFiniteError",
    "ProtocolError",
    "PserverLostError",
    "Strategy",
    "TfpsError",
    "UnsupportedError",
    "WaitTimeoutError",
    "WorkerLostError",
    "__version__",
    "callbacks",
    "layers",
]

_HOMES = {"Strategy": "tfps.strategy.strategy", "Config": "tfps.config"}  # other names are errors


def __getattr__(name: str) -> object:
    importlib.import_module("tfps.errors").show_outlines()  # for whoever uses tfps: its own programs show all
    if name in ("callbacks", "layers"):
        return importlib.import_module(f"tfps.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'tfps' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "tfps.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
