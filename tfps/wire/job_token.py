"""The job token: a secret that the workers and pservers of a job share, read from a file."""

from __future__ import annotations

import hmac
import logging
import os
import stat
from pathlib import Path

from tfps.errors import ConfigError

logger = logging.getLogger("tfps")
TOKEN_KEY = "tfps-token"  # metadata of every call
MIN_TOKEN_BYTES, MAX_TOKEN_BYTES = 16, 256
_warned_of: set[str] = set()  # files that others may read: a worker reads its token once per pserver


class JobToken:
    """A token of visible ASCII characters, or "" for none. Neither `str`, `repr` nor error messages show it."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "", where: str = "a job token") -> None:
        size = len(text)
        if text and not MIN_TOKEN_BYTES <= size <= MAX_TOKEN_BYTES:
            raise ConfigError(
                f"{where} must have {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} characters, got {size}; "
                "`openssl rand -hex 32` makes a good one"
            )
        if not all("!" <= character <= "~" for character in text):
            raise ConfigError(f"{where} must have visible ASCII characters only, without spaces; got others")
        self._text = text

    @classmethod
    def read(cls, path: str) -> JobToken:
        """The token in the file at `path`, without white space around it; "" gives no token."""
        if not path:
            return cls()
        try:
            with Path(path).open("rb") as file:
                status = os.fstat(file.fileno())
                content = file.read(2 * MAX_TOKEN_BYTES)
        except OSError as error:
            raise ConfigError(f"token_file '{path}' cannot be read: {_why_unreadable(path, error)}") from None
        if is_open_to_others(status) and path not in _warned_of:
            _warned_of.add(path)
            logger.warning(
                "tfps: token_file '%s' may be read by other users of this host: `chmod 600 '%s'`, and make a new token "
                "if others may have read it",
                path,
                path,
            )
        token = cls(content.decode("ascii", "replace").strip(), f"the job token in '{path}'")
        if not token:
            raise ConfigError(f"token_file '{path}' must contain a job token, got an empty file")
        return token

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return "JobToken(...)" if self._text else "JobToken()"

    def reveal(self) -> bytes:
        """The token itself, to be sent."""
        return self._text.encode()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call carries."""
        return ((TOKEN_KEY, self._text),) if self._text else ()

    def refusal(self, received: bytes) -> str | None:
        """What to tell a client that sent `received` (b"": no token); None if it fits. Takes the same time for all."""
        if hmac.compare_digest(received, self._text.encode()):
            return None
        if not self._text:
            return (
                "was started without a job token, but this client has one: start the pserver with --token-file, or "
                "unset TFPS_TOKEN_FILE (token_file) here"
            )
        if not received:
            return (
                "wants a job token, this client sent none: set TFPS_TOKEN_FILE (or token_file, --token-file) to its "
                "file; a job of tfps_launch has one that nobody can name, unless it was started with --token-file"
            )
        return (
            "has another job token than this client: TFPS_TOKEN_FILE (or token_file, --token-file) must name a file "
            "with the same content on both"
        )


def _why_unreadable(path: str, error: OSError) -> str:
    """Why, and what to do."""
    file, advice = Path(path), ""
    if isinstance(error, IsADirectoryError):
        advice = f"; name the file in that folder, such as '{file / 'token'}'"
    elif isinstance(error, FileNotFoundError) and not file.parent.is_dir():
        advice = f"; its folder '{file.parent}' does not exist on this host: correct the path, or make the folder"
    elif isinstance(error, FileNotFoundError):
        advice = f"; `(umask 077; openssl rand -hex 32 > '{path}')` makes one, and all of a job need the same"
    elif isinstance(error, PermissionError):
        advice = "; it must belong to the user who runs tfps"
    return (error.strerror or str(error)) + advice


def is_open_to_others(status: os.stat_result) -> bool:
    """Whether others than those whom a file of a job token is for may use it."""
    # Somebody else's file is there for its group: a Secret of Kubernetes is root's.
    own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    return stat.S_ISREG(status.st_mode) and bool(status.st_mode & (0o077 if own else 0o007))
