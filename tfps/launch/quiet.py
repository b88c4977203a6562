"""Keeps TensorFlow's notes about itself, which each worker would repeat, out of what `tfps_launch` shows.

They are shown if the user has set TF_CPP_MIN_LOG_LEVEL to any value. Tested in tests/launch/test_cli.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
QUIET = {_LEVEL: "2"}  # errors only; by default for all processes

# TensorFlow writes these before it reads the level.
_NOTE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|I0000 .*\] oneDNN custom operations are on\."
)


def is_note(line: str) -> bool:
    """Whether `line` says nothing but how TensorFlow was built."""
    return _NOTE.match(line) is not None


def wanted(variables: Iterable[str]) -> bool:
    """Whether the user wants TensorFlow's notes; `variables`: those that are set, NAME or NAME=VALUE."""
    return any(each.partition("=")[0] == _LEVEL for each in variables)
