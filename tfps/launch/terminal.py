"""Turns terminal output (redraws, colours) into lines, and shows lines of several programs on one terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
from collections.abc import Callable
from typing import BinaryIO, TextIO

MAX_LINE = 65536  # characters; longer lines are cut, so that a program without newlines cannot fill the memory

_MAX_STYLE = 100  # characters of colour sequences, for programs that never reset
_RESET = "\x1b[0m"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"  # a wrapped line could not be redrawn
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
# All but colours, backspaces and tabs. An incomplete sequence at the end waits for its rest.
_DROPPED = re.compile(
    r"\x1b\[(?![0-9;:]*m)[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)"
    r"|\x1b(?!\[[0-9;:]*m)[@-Z\\-_a-z0-9=>]?|[\x00-\x07\x0b-\x1a\x1c-\x1f\x7f]"
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,4096}\x1b?)?\Z")


class LineAssembler:
    """Makes lines of one program's output, as they stand when a newline finishes them. Not thread-safe.

    A carriage return begins the line anew, a backspace takes back a character, colours last. Other control sequences
    (titles, movements of the cursor) are dropped: the lines of other programs stand in between.
    """

    def __init__(self) -> None:
        self._rest = ""  # an unfinished line, as it was written
        self._style = ""  # colour sequences in force where it begins

    def feed(self, text: str) -> list[str]:
        """Takes the next piece of output, of any size, and returns the lines that it finished, without newlines."""
        *finished, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > MAX_LINE:
            finished.append(self._rest)
            self._rest = ""
        lines = []
        for line in finished:
            shown, self._style = _shown(line, self._style)
            lines.append(shown)
        before, self._rest = _redrawn(self._rest)
        self._style = _style_after(self._style + before)
        return lines

    def partial(self) -> str:
        """The unfinished line as it stands now."""
        return _shown(_UNFINISHED.sub("", self._rest), self._style)[0]

    def finish(self) -> list[str]:
        """Ends the output; returns the unfinished line, if not empty."""
        line, self._rest = self.partial(), ""
        return [line] if line else []


def _redrawn(line: str) -> tuple[str, str]:
    """What is no longer seen of a line, and the rest. A carriage return at its end has not begun it anew yet."""
    end = len(line.rstrip("\r"))
    begin = line.rfind("\r", 0, end) + 1
    return line[:begin], line[begin:]


def _shown(line: str, style: str) -> tuple[str, str]:
    """A line as it is seen, with nothing in force at its end, and what was."""
    before, line = _redrawn(line)
    line = _DROPPED.sub("", line)
    if "\b" in line:
        kept: list[str] = []
        for part in re.findall(rf"{_SGR.pattern}|.", line, re.DOTALL):
            if part != "\b":
                kept.append(part)
            elif kept:
                kept.pop()
        line = "".join(kept)
    line = _style_after(style + before) + line.expandtabs().rstrip(" ")  # with spaces a shorter line hides a longer one
    after = _style_after(line)
    return (line + _RESET if after else line) if plain(line) else "", after


def _style_after(text: str) -> str:
    """The colour sequences that are in force after `text`."""
    found = ""
    for sequence in _SGR.findall(text):
        if reset := re.match(r"\x1b\[0*(m|;)", sequence):
            found = "" if reset[1] == "m" else sequence
        else:
            found += sequence
    return found if len(found) <= _MAX_STYLE else ""


def plain(line: str) -> str:
    """`line` without colours."""
    return _SGR.sub("", line)


class Console:
    """Shows the lines of several programs, each with its prefix: whole lines, one at a time.

    On a terminal one unfinished line (a progress bar) is kept alive below the others. Where there is no terminal, and
    in the `log`, only finished lines appear, without colours. What `hides` is true of does not. Not thread-safe.
    """

    def __init__(
        self, out: TextIO, err: TextIO, log: BinaryIO | None = None, hides: Callable[[str], object] = lambda line: False
    ) -> None:
        self._hides = hides
        self._streams = (out, err)
        is_dumb = os.environ.get("TERM", "") in ("", "dumb")
        self.redraws = (out.isatty() and not is_dumb, err.isatty() and not is_dumb)  # on terminals
        self._log = log
        self._live = ""  # the live line that is on the screen now
        self.muted = False  # once the reader is gone

    def fit(self, fd: int, prefix: str) -> None:
        """Makes a pty as wide as the terminal behind standard output (without one 80 columns) less the prefix."""
        columns = 80
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(self._streams[0].fileno()).columns or 80
        with contextlib.suppress(OSError):
            size = struct.pack("HHHH", 24, max(20, columns - len(prefix) - 1), 0, 0)
            fcntl.ioctl(fd, termios.TIOCSWINSZ, size)

    def write(self, prefix: str, colour: int, lines: list[str], *, error: bool = False) -> None:
        """Writes finished lines; `colour` is a terminal colour from 31 to 36 for the prefix."""
        lines = [line for line in lines if not self._hides(plain(line))]
        if not lines or self.muted:
            return
        if self._log is not None:
            self._log.write("".join(f"{prefix}{plain(line)}\n" for line in lines).encode(errors="replace"))
            self._log.flush()
        head = self._head(prefix, colour, error)
        live = self._live if self.redraws[error] else ""
        if live:
            self._put(False, "\r\x1b[K")
        self._put(error, "".join(f"{head}{line if self.redraws[error] else plain(line)}\n" for line in lines))
        if live:
            self._put(False, live)

    def say(self, line: str) -> None:
        """Writes a line of the launcher itself."""
        self.write("", 0, [f"tfps_launch: {line}"], error=True)

    def live(self, prefix: str, colour: int, line: str) -> None:
        """Shows an unfinished line below the others, replacing the one before; an empty one removes it."""
        if not self.redraws[0] or self.muted:
            return
        text = f"{_NO_WRAP}{self._head(prefix, colour, False)}{line}{_WRAP}" if line else ""
        if text != self._live:
            self._put(False, ("\r\x1b[K" if self._live else "") + text)
            self._live = text

    def _head(self, prefix: str, colour: int, error: bool) -> str:
        coloured = self.redraws[error] and not os.environ.get("NO_COLOR")
        return f"\x1b[{colour}m{prefix}{_RESET}" if coloured and prefix else prefix

    def _put(self, error: bool, text: str) -> None:
        stream = self._streams[error]
        stream.buffer.write(text.encode(stream.encoding or "utf-8", errors="replace"))
        stream.buffer.flush()
