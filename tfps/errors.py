"""The errors of tfps: one base class, one class per thing that a caller can react to differently."""

from __future__ import annotations

import ast
import contextlib
import re

_TEXT = re.compile(r"tfps\.errors\.(\w+): (.*)", re.DOTALL)
_IN_GRAPH = re.compile(r"\[(tfps\.errors\.\w+: .*)\]$", re.MULTILINE)  # as TensorFlow's Assert prints it, escaped


class TfpsError(Exception):
    """Base class of every error that tfps raises by itself."""


class ConfigError(TfpsError, ValueError):
    """A setting is malformed or out of range; the message names the field, the rule and what was received."""


class ConnectError(TfpsError):
    """A pserver cannot be reached, or does not accept this worker (version, number of workers, rank, job)."""


class MismatchError(TfpsError):
    """The workers do not agree on what they train; the message names the first difference and what each rank has."""


class ProtocolError(TfpsError):
    """A message that the protocol does not allow: truncated, of unknown type, of a wrong size, key or step."""


class WaitTimeoutError(TfpsError, TimeoutError):
    """A wait ended at its deadline; the message says for what and for whom it waited."""


class WorkerLostError(TfpsError):
    """Another worker died or left while this one still needs it; the message names its rank."""


class InterruptError(TfpsError):
    """A worker was interrupted (Ctrl-C) in the middle of something that all ranks do together; the message names it."""


class PserverLostError(TfpsError):
    """A pserver that served this worker stopped or cannot be reached any more."""


class ClosedError(TfpsError):
    """The strategy (or the connection behind it) was closed before the operation."""


class UnsupportedError(TfpsError, NotImplementedError):
    """The program asks for something that tfps does not support; the message names the way around."""


def to_text(error: TfpsError) -> str:
    """`error` as a text that ops of a graph can carry; see `from_text` and `in_graph_error`."""
    return f"tfps.errors.{type(error).__name__}: {error}"


def from_text(text: str) -> TfpsError | None:
    """The error that `to_text` made `text` of, None if it did not."""
    found = _TEXT.fullmatch(text)
    kind = globals().get(found[1]) if found else None
    return kind(found[2]) if found and isinstance(kind, type) and issubclass(kind, TfpsError) else None


def in_graph_error(message: str) -> TfpsError | None:
    """The error of tfps that an error of a graph with this message was raised for, if it was."""
    if (found := _IN_GRAPH.search(message)) is None:
        return None
    text = found[1]
    with contextlib.suppress(SyntaxError, ValueError):
        text = ast.literal_eval(f'"{text}"')
    return from_text(text)
