"""The errors of tfps: a base class, and one class per situation that callers may handle differently."""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

_Error = TypeVar("_Error", bound=BaseException)
_TEXT = re.compile(r"tfps\.errors\.(\w+): (.*)", re.DOTALL)
_TRACEBACK = re.compile(r'^(Detected at node .*|\s*File ".*", line \d+, in .*)$', re.MULTILINE)
_IN_PART = re.compile(r"while converting \S*tfps_part_\w+")  # graph/parts.py
_NODE = re.compile(r"\{\{node ([^}]+)\}\}")
_IN_GRAPH = re.compile(r"\[(tfps\.errors\.\w+: .*)\]$", re.MULTILINE)  # as TensorFlow's Assert prints it, escaped


class TfpsError(Exception):
    """Base class of all tfps errors."""

    if not TYPE_CHECKING:
        # AutoGraph raises an error of a traced function anew, in its own class only if that has this constructor.
        __init__ = Exception.__init__


class ConfigError(TfpsError, ValueError):
    """A setting is malformed or out of range; the message names the field, the rule and the value received."""


class ConnectError(TfpsError):
    """A pserver cannot be reached, or does not accept this worker (version, number of workers, rank, job)."""


class MismatchError(TfpsError):
    """The workers disagree on what they train; the message names the first difference and each rank's value."""


class ProtocolError(TfpsError):
    """A message violates the protocol: truncated, of unknown type, or with a wrong size, key or step."""


class WaitTimeoutError(TfpsError, TimeoutError):
    """A wait timed out; the message says for what and for whom."""


class WorkerLostError(TfpsError):
    """Another worker died or left while this one still needs it; the message names its rank."""


class JoinError(TfpsError):
    """This worker cannot join the job under way: its training would not be the others', who go on without it."""

    @classmethod
    def because(cls, why: str) -> JoinError:
        """Its text says so first, and once."""
        return cls(f"{_CANNOT_JOIN}{why.removeprefix(_CANNOT_JOIN)}")


class InterruptError(TfpsError):
    """A worker was interrupted (Ctrl-C) during a collective operation; the message names it."""


class PserverLostError(TfpsError):
    """A pserver that served this worker has stopped or become unreachable."""


class NonFiniteError(TfpsError, ArithmeticError):
    """A gradient is not finite (`Config(on_nonfinite="raise")`); the message names the variable and the rank."""


class ClosedError(TfpsError):
    """The strategy (or the connection behind it) was closed before the operation."""


class UnsupportedError(TfpsError, NotImplementedError):
    """The program uses something that tfps does not support; the message names a workaround."""


# What a worker fails with that every other one would meet as well: it ends the job, also one that goes on without lost
# workers. All else is about one worker.
OF_JOB = (ConfigError, MismatchError, NonFiniteError, ProtocolError, UnsupportedError)
REFUSED = 76  # the exit code of a program that a JoinError ends: started again, it would be refused again

_CANNOT_JOIN = "this worker cannot join the job under way, which goes on without it: "
_INNER = (str(Path(__file__).parent), str(Path(concurrent.futures.__file__).parent))  # folders
_FAULT, _SAVING = "_tfps_fault", "_tfps_saving"  # mark errors
_MOST = 400  # characters of an error in a message to other ranks


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yields `error` and what it was raised from, each once."""
    to_see, seen = [error], list[BaseException]()
    while to_see:
        if (each := to_see.pop()) not in seen:
            seen.append(each)
            yield each
            to_see += filter(None, (each.__cause__, each.__context__))


@contextlib.contextmanager
def saving(path: object) -> Iterator[None]:
    """What saves a model to `path`, as another worker would in its place: what fails in it is an error of the job."""
    try:
        yield
    except Exception as error:
        setattr(error, _SAVING, str(path))
        raise


def for_others(error: BaseException) -> TfpsError | None:
    """Returns as what others are to know `error`, which ends a worker's program; None: it is this worker's own.

    It is an error of the job, or the refusal of a worker that joins.
    """
    for each in chain(error):
        if isinstance(each, (*OF_JOB, JoinError)):
            return each
        if path := getattr(each, _SAVING, ""):
            return ConfigError(f"could not save to {path}: {in_a_line(each)}")
    return None


def in_a_line(error: BaseException) -> str:
    """Returns what `error` is and says, for messages to other ranks: the middle of a long text is left out.

    So are the tracebacks with which errors of TensorFlow's graphs begin.
    """
    text = _TRACEBACK.sub("", str(error))
    text = " ".join(f"{type(error).__name__}: {text}".split()).removesuffix(":")
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"


def outlined(error: _Error) -> _Error:
    """Returns `error` without those frames of its traceback that are tfps' own: a message says what users need.

    All stay of an error that is a fault of tfps (tfps raised it, and it is neither a TfpsError nor TensorFlow's), and
    all of every error after `tf.debugging.disable_traceback_filtering()`.
    """
    debugging = getattr(sys.modules.get("tensorflow"), "debugging", None)
    if debugging is not None and not debugging.is_traceback_filtering_enabled():
        return error
    frames, inner, trace = list[TracebackType](), False, error.__traceback__
    while trace is not None:
        if not (inner := trace.tb_frame.f_code.co_filename.startswith(_INNER)):
            frames.append(trace)
        trace = trace.tb_next
    # Decided where it is seen first: on its way out Keras leaves out frames, those that raised it among them.
    known = isinstance(error, TfpsError) or type(error).__module__.startswith("tensorflow.")
    if vars(error).setdefault(_FAULT, inner and not known):
        return error
    outline: TracebackType | None = None
    for frame in reversed(frames):
        outline = TracebackType(outline, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(outline)


@functools.cache
def show_outlines() -> None:
    """Has the tracebacks of errors that end a program shown without frames of tfps, once per process.

    After a JoinError the exit code is `REFUSED`.
    """
    show = sys.excepthook

    def show_outline(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        seen = list(map(outlined, chain(error)))  # what it was raised from is shown, too
        show(kind, error, error.__traceback__)
        if any(isinstance(each, JoinError) for each in seen):
            raise SystemExit(REFUSED)  # which Python takes for the exit code

    sys.excepthook = show_outline


def to_text(error: TfpsError) -> str:
    """Returns `error` as text that graph ops can carry; see `from_text` and `in_graph_error`."""
    return f"tfps.errors.{type(error).__name__}: {error}"


def from_text(text: str) -> TfpsError | None:
    """Returns the error that `to_text` turned into `text`, None for any other text."""
    found = _TEXT.fullmatch(text)
    kind = globals().get(found[1]) if found else None
    return kind(found[2]) if found and isinstance(kind, type) and issubclass(kind, TfpsError) else None


def in_part_error(message: str) -> TfpsError | None:
    """Returns the error for a part of a step that XLA cannot compile, as TensorFlow's `message` says; None if none."""
    if _IN_PART.search(message) is None:
        return None
    where = _NODE.search(message)
    lines = [line.strip() for line in message.splitlines()]
    known = ("", "Graph execution error:", "<stack traces unavailable>")
    why = next((line for line in lines if line not in known and not line.startswith("Detected at node")), "")
    return UnsupportedError(
        f"XLA cannot compile a part of the step{f', at {where[1]}' if where else ''}: {why} Plain Keras with "
        "jit_compile=True cannot either, as a rule. Use jit_compile=False (docs/xla.md)"
    )


def in_graph_error(message: str) -> TfpsError | None:
    """Returns the tfps error behind a graph error with this message, None if there is none."""
    if (found := _IN_GRAPH.search(message)) is None:
        return None
    text = found[1]
    with contextlib.suppress(SyntaxError, ValueError):
        text = ast.literal_eval(f'"{text}"')
    return from_text(text)
