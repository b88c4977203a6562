"""Data-parallel training of Keras models through gRPC parameter servers.

Names load on first use, so that a pserver never imports TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tfps.version import __version__

if TYPE_CHECKING:
    from tfps import callbacks as callbacks
    from tfps.config import Config as Config
    from tfps.errors import (
        ClosedError as ClosedError,
    )
    from tfps.errors import (
        ConfigError as ConfigError,
    )
    from tfps.errors import (
        ConnectError as ConnectError,
    )
    from tfps.errors import (
        InterruptError as InterruptError,
    )
    from tfps.errors import (
        MismatchError as MismatchError,
    )
    from tfps.errors import (
        ProtocolError as ProtocolError,
    )
    from tfps.errors import (
        PserverLostError as PserverLostError,
    )
    from tfps.errors import (
        TfpsError as TfpsError,
    )
    from tfps.errors import (
        UnsupportedError as UnsupportedError,
    )
    from tfps.errors import (
        WaitTimeoutError as WaitTimeoutError,
    )
    from tfps.errors import (
        WorkerLostError as WorkerLostError,
    )
    from tfps.strategy.strategy import Strategy as Strategy

_ERRORS = (
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "InterruptError",
    "MismatchError",
    "ProtocolError",
    "PserverLostError",
    "TfpsError",
    "UnsupportedError",
    "WaitTimeoutError",
    "WorkerLostError",
)
_HOMES = {"Strategy": "tfps.strategy.strategy", "Config": "tfps.config", **dict.fromkeys(_ERRORS, "tfps.errors")}

_MODULES = ("callbacks",)

__all__ = ["Config", "Strategy", "__version__", "callbacks", *_ERRORS]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"tfps.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tfps' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
