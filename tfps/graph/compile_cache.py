"""TensorFlow's cache on disk of what XLA has compiled (`Config.xla_cache`).

Tested in tests/graph/test_compile_cache.py.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from tfps.errors import ConfigError
from tfps.graph.tf_private import has_begun

logger = logging.getLogger("tfps")
_FLAGS, _FOLDER = "TF_XLA_FLAGS", "--tf_xla_persistent_cache_directory="


def use_cache(folder: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Has TensorFlow keep what XLA compiles in `folder`, by TF_XLA_FLAGS, which it reads before its first op.

    Raises:
        ConfigError: nothing can be written there, or the flags say something else.
    """
    path = str(Path(folder).expanduser().absolute())
    if re.search(r"\s", path):
        raise ConfigError(f"xla_cache must be a path without spaces, as it becomes part of {_FLAGS}, got '{path}'")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"xla_cache must be a folder in which this process can write, got '{path}': {error.strerror}; choose "
            "another one, or leave xla_cache (TFPS_XLA_CACHE) out"
        ) from error
    flags = environment.get(_FLAGS, "").strip()
    if flags and not flags.startswith("-"):
        raise ConfigError(
            f"xla_cache is added to the flags in {_FLAGS}, but that names a file, got '{flags}': write "
            f"{_FOLDER}{path} into that file, and leave xla_cache out"
        )
    if found := re.search(rf"{_FOLDER}(\S+)", flags):
        if found[1] != path:
            raise ConfigError(
                f"xla_cache must be the folder that {_FLAGS} has already, as a process has one such cache, got "
                f"'{path}' and '{found[1]}' there: give both the same, or only one"
            )
    elif has_begun():
        logger.warning(
            "tfps: xla_cache='%s' has no effect: TensorFlow reads %s before its first op, and this program has run one "
            "before tfps.Strategy; create the strategy first, or start the program with %s=%s%s (docs/xla.md)",
            path,
            _FLAGS,
            _FLAGS,
            _FOLDER,
            path,
        )
    else:
        environment[_FLAGS] = f"{flags} {_FOLDER}{path}".strip()
