"""What `Config.mode` says: when workers exchange what. Without numpy, for launchers.

Tested in tests/test_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tfps.errors import ConfigError
from tfps.types import Argument

Mode = Literal["sync", "async", "diloco", "local"]

#: In these modes workers train for themselves between two exchanges of parameters.
LOCAL_MODES: tuple[Mode, ...] = ("diloco", "local")

#: Modes in which a worker waits for no other within an epoch.
FREE_MODES: tuple[Mode, ...] = ("async", *LOCAL_MODES)

#: Settings that only some modes have.
_OF_MODES: dict[str, tuple[Mode, ...]] = {
    "staleness": ("async",),
    "delay_compensation": ("async",),
    "inner_steps": LOCAL_MODES,
    "fragments": LOCAL_MODES,
    "overlap_steps": LOCAL_MODES,
    "own_share": LOCAL_MODES,
    "outer_learning_rate": ("diloco",),
    "outer_momentum": ("diloco",),
}


def check_mode(values: Mapping[str, Argument], defaults: Mapping[str, Argument]) -> None:
    """Checks the settings that have to do with the mode.

    Args:
        values, defaults: of all fields of `Config`, by name.

    Raises:
        ConfigError: a value is out of range, or does not go with the mode.
    """
    mode = values["mode"]
    for name, modes in _OF_MODES.items():
        if values[name] != defaults[name] and mode not in modes:
            raise ConfigError(
                f"{name} is for mode={' and mode='.join(map(repr, modes))}, got {values[name]!r} with mode={mode!r}; "
                "leave it out, or choose that mode"
            )
    _check_ranges(values)
    if values["own_share"] != defaults["own_share"] and not values["overlap_steps"]:
        raise ConfigError(
            f"own_share is for overlap_steps above 0: else a worker goes on with the global parameters, got "
            f"{values['own_share']!r}"
        )
    if mode == "async" and values["update"] != "server":
        raise ConfigError(
            f"mode='async' needs update='server', which applies each gradient as it comes, got {values['update']!r}"
        )
    if mode in LOCAL_MODES and values["update"] != "worker":
        raise ConfigError(
            f"mode={mode!r} needs update='worker', as each worker trains for itself between exchanges, got "
            f"{values['update']!r}"
        )
    if mode == "async" and values["deterministic"]:
        raise ConfigError("deterministic goes with mode='sync', 'diloco' and 'local': in 'async' order is chance")


def _check_ranges(values: Mapping[str, Argument]) -> None:
    staleness = values["staleness"]
    if staleness is not None and (not _whole(staleness) or staleness < 0):
        raise ConfigError(f"staleness must be a number of steps from 0, or None (no limit), got {staleness!r}")
    for name, least in (("inner_steps", 1), ("fragments", 1), ("overlap_steps", 0)):
        if not _whole(values[name]) or values[name] < least:
            raise ConfigError(f"{name} must be a whole number from {least}, got {values[name]!r}")
    steps = values["inner_steps"]
    for name in ("fragments", "overlap_steps"):
        most = steps if name == "fragments" else steps - 1
        if values[name] > most:
            raise ConfigError(
                f"{name} must be at most {most} with inner_steps={steps}: each fragment is exchanged once in so many "
                f"steps, and comes back before it leaves again, got {values[name]}"
            )
    for name, below in (("own_share", 1.0), ("outer_momentum", 1.0), ("delay_compensation", None)):
        value = values[name]
        if not _number(value) or not 0 <= value < (float("inf") if below is None else below):
            limit = "" if below is None else f" and below {below:g}"
            raise ConfigError(f"{name} must be a number from 0 on{limit}, got {value!r}")
    rate = values["outer_learning_rate"]
    if not _number(rate) or not 0 < rate < float("inf"):
        raise ConfigError(f"outer_learning_rate must be a positive number, got {rate!r}")


def _whole(value: Argument) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Argument) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
