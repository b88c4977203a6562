"""What `Config.compression` says: which codec for which variable's gradients. Without numpy, for launchers.

The codecs themselves are in tfps/exchange/codecs.py.

Tested in tests/test_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from tfps.errors import ConfigError

NONE = "none"
PLAIN_CODECS = (NONE, "bfloat16", "float16", "int8", "onebit")
TOP_K = "topk"
MOST_KEPT = 0.5  # of a slice: a number that is kept takes twice its bytes

#: A smaller bucket travels as it is. At 1 Gbit/s 16 KiB take 0.13 ms, about what handling its message takes anyway; and
#: what is that small alone are biases and scales, where an error counts most.
LEAST_BYTES = 16 * 1024


class Rules(NamedTuple):
    """Which codec for which variable; `exceptions`: pairs of a pattern and a codec; the first that matches counts."""

    default: str = NONE
    exceptions: tuple[tuple[str, str], ...] = ()

    def codec(self, name: str) -> str:
        """The codec for the variable `name`. A pattern matches all of it, or its end from a "/" on."""
        for pattern, codec in self.exceptions:
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"*/{pattern}"):
                return codec
        return self.default

    @property
    def codecs(self) -> set[str]:
        """All that occur."""
        return {self.default, *(codec for _, codec in self.exceptions)}

    def __str__(self) -> str:
        return ",".join([self.default, *(f"{pattern}={codec}" for pattern, codec in self.exceptions)])


def kept_fraction(codec: str) -> float | None:
    """The fraction in "topk:0.01"; None for other codecs."""
    name, colon, text = codec.partition(":")
    if name != TOP_K:
        return None
    try:
        fraction = float(text) if colon else 0.0
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= MOST_KEPT:
        raise ConfigError(
            f"compression with {TOP_K} must name the fraction that is sent, above 0 and at most {MOST_KEPT}, such as "
            f"'{TOP_K}:0.01', got {codec!r}"
        )
    return fraction


def parse(value: object) -> Rules:
    """Reads `Config.compression`: a codec ("int8"), or one and exceptions, as a text or as a mapping.

    `"int8,bias=none"` and `{"*": "int8", "bias": "none"}` are the same.
    """
    if isinstance(value, str):
        parts = [part.strip().rpartition("=") for part in value.split(",")]
        pairs = [(pattern.strip() if equals else "*", codec.strip()) for pattern, equals, codec in parts]
    elif isinstance(value, Mapping) and all(isinstance(each, str) for pair in value.items() for each in pair):
        pairs = list(value.items())
    else:
        raise ConfigError(f"compression must be a text or a mapping of patterns of names to codecs, got {value!r}")
    defaults = [codec for pattern, codec in pairs if pattern == "*"]
    if len(defaults) > 1:
        raise ConfigError(f"compression must name one codec for all other variables ('*'), got {value!r}")
    for pattern, _ in pairs:
        if not pattern or "," in pattern or "=" in pattern:
            raise ConfigError(
                f"a pattern of names in compression must have characters, but neither ',' nor '=', got {pattern!r}"
            )
    exceptions = tuple((pattern, _checked(codec)) for pattern, codec in pairs if pattern != "*")
    return Rules(_checked(defaults[0]) if defaults else NONE, exceptions)


def _checked(codec: str) -> str:
    """`codec` in its one spelling."""
    fraction = kept_fraction(codec)
    if fraction is not None:
        return f"{TOP_K}:{fraction:g}"
    if codec not in PLAIN_CODECS:
        known = ", ".join(map(repr, (*PLAIN_CODECS, f"{TOP_K}:0.01")))
        raise ConfigError(f"compression must be one of {known}, got {codec!r}")
    return codec
