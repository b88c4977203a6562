"""Turns terminal output (redraws, colours) into lines, and shows lines of several programs on one terminal.

A progress bar redraws one line with carriage returns and backspaces. To prefix lines without printing every redraw, we
have to follow that as a terminal would.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
import unicodedata
from collections.abc import Callable
from typing import BinaryIO, TextIO

MAX_LINE = 65536  # characters; longer lines are cut, so that a program without newlines cannot fill the memory

_MAX_STYLE = 100  # characters of colour sequences, for programs that never reset

_CSI = r"\x1b\[[0-?]*[ -/]*[@-~]"
_OSC = r"\x1b\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)"
_TOKEN = re.compile(
    rf"(?P<text>[^\x00-\x1f\x7f]+)|(?P<csi>{_CSI})|(?P<osc>{_OSC})|(?P<escape>\x1b[@-Z\\-_a-z0-9=>])|(?P<other>.)", re.S
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]{0,4096}\x1b?)?\Z")
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_RESET = "\x1b[0m"


class LineAssembler:
    """Follows one program's output as a terminal would, and returns lines once a newline finishes them.

    Understands carriage return, backspace, tabulator, "erase line" and colours; other control sequences (titles, cursor
    movement between lines) are dropped, because the lines of other programs stand in between. Not thread-safe.
    """

    def __init__(self) -> None:
        self._cells: list[tuple[str, str]] = []  # (colour sequences in force, character) per column
        self._cursor = 0
        self._style = ""
        self._rest = ""  # the beginning of an incomplete control sequence

    def feed(self, text: str) -> list[str]:
        """Takes the next piece of output, of any size, and returns the lines that it finished, without newlines."""
        text = self._rest + text
        cut = _UNFINISHED.search(text)
        self._rest = text[cut.start() :] if cut else ""
        finished: list[str] = []
        for token in _TOKEN.finditer(text, 0, cut.start() if cut else len(text)):
            value = token.group()
            if token.lastgroup == "text":
                self._put(value)
            elif token.lastgroup == "csi":
                self._control(value)
            elif value == "\n":
                finished.append(self._take())
            elif value == "\r":
                self._cursor = 0
            elif value == "\b":
                self._cursor = max(0, self._cursor - 1)
            elif value == "\t":
                self._put(" " * (8 - self._cursor % 8))
            if len(self._cells) > MAX_LINE:
                finished.append(self._take())
        return finished

    def partial(self) -> str:
        """The unfinished line as it stands now."""
        return _render(self._cells)

    def finish(self) -> list[str]:
        """Ends the output; returns the unfinished line, if not empty."""
        self._rest = ""
        return [line] if (line := self._take()) else []

    def _put(self, text: str) -> None:
        if self._cursor > len(self._cells):
            self._cells.extend([("", " ")] * (self._cursor - len(self._cells)))
        self._cells[self._cursor : self._cursor + len(text)] = [(self._style, char) for char in text]
        self._cursor += len(text)

    def _control(self, sequence: str) -> None:
        kind, argument = sequence[-1], sequence[2:-1]
        number = int(argument) if argument.isdigit() else 1
        if kind == "m":
            # "0" forgets everything before; a sequence that begins with it forgets and sets.
            reset = re.match(r"0*(;|\Z)", argument)
            kept = argument[reset.end() :] if reset else argument
            before = "" if reset or len(self._style) > _MAX_STYLE else self._style
            self._style = before + (f"\x1b[{kept}m" if kept else "")
        elif kind == "K" and argument in ("", "0"):
            del self._cells[self._cursor :]
        elif kind == "K":
            self._cells.clear() if argument == "2" else self._blank(self._cursor + 1)
        elif kind == "C":
            self._cursor = min(self._cursor + number, MAX_LINE)
        elif kind == "D":
            self._cursor = max(0, self._cursor - number)
        elif kind == "G":
            self._cursor = min(max(0, number - 1), MAX_LINE)

    def _blank(self, columns: int) -> None:
        columns = min(columns, len(self._cells))
        self._cells[:columns] = [("", " ")] * columns

    def _take(self) -> str:
        line = _render(self._cells)
        self._cells, self._cursor = [], 0
        return line


def _render(cells: list[tuple[str, str]]) -> str:
    end = len(cells)
    while end and cells[end - 1] == ("", " "):  # what a shorter redraw has blanked out
        end -= 1
    parts: list[str] = []
    before = ""
    for style, char in cells[:end]:
        if style != before:
            parts.append((_RESET if before else "") + style)
            before = style
        parts.append(char)
    return "".join(parts) + (_RESET if before else "")


def plain(line: str) -> str:
    """`line` without colours."""
    return _SGR.sub("", line)


def clip(line: str, columns: int) -> str:
    """The first `columns` columns of `line`, colours kept; a wrapped line could not be redrawn."""
    parts: list[str] = []
    used = position = 0
    while position < len(line):
        if sequence := _SGR.match(line, position):
            parts.append(sequence.group())
            position = sequence.end()
            continue
        char = line[position]
        wide = unicodedata.east_asian_width(char) in "WF"
        width = 0 if unicodedata.combining(char) else 2 if wide else 1
        if used + width > columns:
            return "".join(parts) + (_RESET if len(plain(line)) < len(line) else "")
        parts.append(char)
        used += width
        position += 1
    return line


def resize(fd: int, columns: int) -> None:
    """Says how wide a terminal is to whoever runs in it."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


class Console:
    """Shows the lines of several programs, each with its prefix: whole lines, one at a time.

    On a terminal one unfinished line (a progress bar) is kept alive below the others. Where there is no terminal, and
    in the log, only finished lines appear, without colours. Not thread-safe.

    Args:
        out: where the programs' standard output goes.
        err: where their standard error goes.
        log: gets a copy of every finished line.
        hides: whether a line is not shown.
    """

    def __init__(
        self, out: TextIO, err: TextIO, log: BinaryIO | None = None, hides: Callable[[str], bool] = lambda line: False
    ) -> None:
        self._hides = hides
        self._streams = (out, err)
        self._redraws = (is_terminal(out), is_terminal(err))
        self._colours = tuple(redraws and not os.environ.get("NO_COLOR") for redraws in self._redraws)
        self._log = log
        self._live = ""  # the live line that is on the screen now
        self._muted = False

    @property
    def redraws(self) -> tuple[bool, bool]:
        """Whether (standard output, standard error) are terminals."""
        return self._redraws

    def columns(self) -> int:
        """Width of the terminal behind standard output; 80 without one."""
        try:
            return os.get_terminal_size(self._streams[0].fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def write(self, prefix: str, colour: int, lines: list[str], *, error: bool = False) -> None:
        """Writes finished lines; `colour` is a terminal colour from 31 to 36 for the prefix.

        Raises:
            BrokenPipeError: the reader is gone.
        """
        lines = [line for line in lines if not self._hides(plain(line))]
        if not lines or self._muted:
            return
        if self._log is not None:
            self._log.write("".join(f"{prefix}{plain(line)}\n" for line in lines).encode(errors="replace"))
            self._log.flush()
        head = f"\x1b[{colour}m{prefix}{_RESET}" if self._colours[error] and prefix else prefix
        body = lines if self._redraws[error] else [plain(line) for line in lines]
        text = "".join(f"{head}{line}\n" for line in body)
        if self._redraws[error] and self._live:
            live, self._live = self._live, ""
            self._put(False, "\r\x1b[K")
            self._put(error, text)
            self._put(False, live)
            self._live = live
        else:
            self._put(error, text)

    def live(self, prefix: str, colour: int, line: str) -> None:
        """Shows an unfinished line below the others, replacing the one before; an empty one removes it."""
        if not self._redraws[0] or self._muted:
            return
        text = f"{prefix}{line}" if line else ""
        if text:
            text = clip(text, self.columns() - 1)
            if self._colours[0]:
                text = f"\x1b[{colour}m{text[: len(prefix)]}{_RESET}{text[len(prefix) :]}"
        if text != self._live:
            self._put(False, ("\r\x1b[K" if self._live else "") + text)
            self._live = text

    def mute(self) -> None:
        """Stops writing: the reader is gone."""
        self._muted = True

    def _put(self, error: bool, text: str) -> None:
        stream = self._streams[error]
        stream.buffer.write(text.encode(stream.encoding or "utf-8", errors="replace"))
        stream.buffer.flush()
