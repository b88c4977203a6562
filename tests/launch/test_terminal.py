"""What becomes of terminal output: lines, and one live line."""

from __future__ import annotations

import io
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from tfps.launch.terminal import MAX_LINE, Console, LineAssembler, plain


def shown(text: str) -> list[str]:
    assembler = LineAssembler()
    return [*assembler.feed(text), *assembler.finish()]


def test_lines_come_out_when_their_newline_has_arrived() -> None:
    assembler = LineAssembler()
    assert assembler.feed("one\ntw") == ["one"]
    assert assembler.partial() == "tw"
    assert assembler.feed("o\n\n") == ["two", ""]
    assert assembler.finish() == []


def test_output_that_ends_without_a_newline_is_shown() -> None:
    assert shown("a\nlast words") == ["a", "last words"]


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("10%\r50%\r100%\n", "100%"),
        ("abc\rX\n", "X"),
        ("abc\b\bX\n", "aX"),
        ("abc\r\n", "abc"),
        ("long line\rshort\x1b[K\n", "short"),
        ("long line\rshort    \n", "short"),
        ("\b\b\babc\n", "abc"),
        ("a\tb\n", "a       b"),
        ("abc\x1b[2K\rd\n", "d"),
        ("\x1b[31mabc\rX\n", "\x1b[31mX\x1b[0m"),
        ("\x1b]0;a title\x07text\n", "text"),
        ("\x1b[2J\x1b[10;1Htext\n", "text"),
        ("\x1b[>4;2mtext\x1b[?25l\x1b7\n", "text"),
        ("\x1b[31mred\x1b[0m plain\n", "\x1b[31mred\x1b[0m plain"),
        ("\x1b[1m\x1b[32mx\n", "\x1b[1m\x1b[32mx\x1b[0m"),
        ("\x1b[31mred\x1b[0;1mbold\x1b[m\n", "\x1b[31mred\x1b[0;1mbold\x1b[m"),
    ],
)
def test_of_redraws_the_last_is_the_line(written: str, seen: str) -> None:
    assert shown(written) == [seen]


def test_a_colour_lasts_until_it_is_reset() -> None:
    assert shown("\x1b[31mred\nstill\x1b[0m\nplain\n") == ["\x1b[31mred\x1b[0m", "\x1b[31mstill\x1b[0m", "plain"]


def test_a_keras_progress_bar_is_one_line_with_its_last_state() -> None:
    keras = pytest.importorskip("keras")
    writer = io.StringIO()
    stdout, sys.stdout = sys.stdout, writer
    try:
        bar = keras.utils.Progbar(3, interval=0)
        for step in (1, 2, 3):
            bar.update(step, [("loss", 0.5)])
    finally:
        sys.stdout = stdout
    lines = [plain(line) for line in shown(writer.getvalue())]
    assert len([line for line in lines if line]) == 1 or "posix" not in sys.modules
    assert lines[-1].startswith("3/3 ")
    assert lines[-1].endswith("loss: 0.5000")


@hypothesis.given(st.text(alphabet="ab\n\r\b\t\x1b[]0;31mKGé━\x07", max_size=60), st.data())
def test_the_result_does_not_depend_on_where_reads_cut_the_output(text: str, data: st.DataObject) -> None:
    assembler = LineAssembler()
    lines: list[str] = []
    position = 0
    while position < len(text):
        end = data.draw(st.integers(position + 1, len(text)))
        lines += assembler.feed(text[position:end])
        position = end
    assert lines == LineAssembler().feed(text)


def test_a_program_without_newlines_cannot_fill_the_memory() -> None:
    assembler = LineAssembler()
    lines = [line for _ in range(5) for line in assembler.feed("x" * MAX_LINE)]
    assert len(lines) >= 2
    assert len("".join(lines)) + len(assembler.partial()) == 5 * MAX_LINE


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal, and shows what it would look like."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        written = self.buffer
        if not isinstance(written, io.BytesIO):
            raise TypeError(type(written))
        return written.getvalue().decode()

    def screen(self) -> list[str]:
        return [plain(line) for line in shown(self.text())]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_lines_of_others_appear_above_the_live_line(terminal: Terminal) -> None:
    console = Console(terminal, terminal)
    console.live("[a] ", 32, "10%")
    console.write("[b] ", 33, ["hello"])
    console.live("[a] ", 32, "20%")
    console.write("[b] ", 33, ["world"], error=True)
    assert terminal.screen() == ["[b] hello", "[b] world", "[a] 20%"]
    console.live("[a] ", 32, "")
    console.write("[a] ", 32, ["100%"])
    assert terminal.screen() == ["[b] hello", "[b] world", "[a] 100%"]


def test_a_live_line_never_wraps(terminal: Terminal) -> None:
    console = Console(terminal, terminal)
    console.live("[a] ", 32, "x" * 500)
    assert terminal.text().startswith("\x1b[?7l")  # the terminal cuts it
    assert terminal.text().endswith("\x1b[?7h")


def test_without_a_terminal_there_are_no_colours_and_no_live_lines() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(stream, stream)
    console.live("[a] ", 32, "10%")
    console.write("[a] ", 32, ["\x1b[32m100%\x1b[0m"])
    stream.seek(0)
    assert stream.read() == "[a] 100%\n"


def test_no_color_is_respected_for_prefixes(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(terminal, terminal)
    console.write("[a] ", 32, ["text"])
    assert terminal.text() == "[a] text\n"


def test_the_log_gets_finished_lines_without_colours(terminal: Terminal) -> None:
    log = io.BytesIO()
    console = Console(terminal, terminal, log)
    console.live("[a] ", 32, "10%")
    console.write("[a] ", 32, ["\x1b[32m100%\x1b[0m"])
    assert log.getvalue() == b"[a] 100%\n"
    assert "\x1b[32m100%" in terminal.text()
