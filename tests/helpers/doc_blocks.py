"""The blocks of code in README.md and docs/, and what the comments before them say.

<!-- not run: REASON -->    the block is not run; it is still parsed
<!-- file: NAME -->         the block is a file that later ones use
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What README.md, which has no room for comments, shows and no test can run.
_OF_README = {"tools/demo.sh": "installs, and runs all tests"}
_BLOCK = re.compile(
    r"^(?:<!-- (?P<what>not run|file): (?P<said>.+?) -->\n+)?(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One of them.

    Args:
        page: its file.
        line: of its first line, from 1.
        language: as written, "" if none is.
        reason: why it is not run; "" if it is.
        file: what it is to be written to; "" if it is to be run.
    """

    page: Path
    line: int
    language: str
    text: str
    reason: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def without_blocks(page: Path) -> str:
    """The text of a page between its blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str = "") -> list[Block]:
    """Of one page, in order; only those of a language, if one is given."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        code = textwrap.dedent(match["text"])
        reason = match["said"] if match["what"] == "not run" else ""
        if page.name == "README.md":
            reason = next((why for part, why in _OF_README.items() if part in code), "")
        line = text.count("\n", 0, match.start("text")) + 1
        file = match["said"] if match["what"] == "file" else ""
        found.append(Block(page, line, match["language"], code, reason, file))
    return [block for block in found if language in ("", block.language)]
