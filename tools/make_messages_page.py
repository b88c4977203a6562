#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Puts every message that tfps can raise into docs/troubleshooting.md, below the advice for it.

The page is written by hand, except for the tables between these two comments, which this program fills:

    <!-- messages: ConnectError: no answer within | is not a tfps pserver | tfps/wire/tls.py -->
    <!-- end -->

The first one names a class and, between bars, parts of its messages (regular expressions) or modules and folders that
make them. A message goes to the first place of its class that names a part of it, else to the first that names its
module. A place without either takes what is left: every class needs one, so that a new message always finds a place, if
only the general one. Prefer modules: they hold for messages that are still to come. `--check` writes nothing and fails
unless the page is up to date.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tools.messages import ROOT, Message, error_classes, messages

PAGE = ROOT / "docs" / "troubleshooting.md"
PROGRAM = "tools/make_messages_page.py"
_PLACE = re.compile(r"<!-- messages: (\w+)(?::\s(.+?))? -->\n.*?<!-- end -->\n", re.DOTALL)


class PageError(Exception):
    """The page cannot be made; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where messages of a class belong; `parts` empty: those that belong nowhere else."""

    kind: str
    parts: tuple[str, ...]

    @property
    def modules(self) -> list[str]:
        """Those of its parts that are modules or folders."""
        return [part for part in self.parts if part.startswith("tfps/")]

    def takes(self, message: Message) -> bool:
        """Whether one of its messages has a part that this place names."""
        return message.kind == self.kind and any(re.search(part, message.text) for part in self.parts)

    def takes_module(self, message: Message) -> bool:
        """Whether one of its messages is made where this place says."""
        return message.kind == self.kind and message.path.startswith(tuple(self.modules))


def places(page: str) -> list[Place]:
    """Of a page, in order."""
    return [
        Place(found[1], tuple(filter(None, " ".join((found[2] or "").split()).split(" | "))))
        for found in _PLACE.finditer(page)
    ]


def fill(page: str, known: Sequence[Message], classes: Sequence[str]) -> str:
    """The page with every message in its place.

    Raises:
        PageError: a class has no heading or no place for the rest of its messages, or a place names an unknown class,
            a module that is not there, or parts that no message has.
    """
    found = places(page)
    for kind in classes:
        if f"\n## {kind}\n" not in page:
            raise PageError(f"there must be a heading '## {kind}'")
        if Place(kind, ()) not in found:
            raise PageError(f"there must be a place for the rest of {kind}: <!-- messages: {kind} -->")
    held: dict[Place, list[str]] = {place: [] for place in found}
    if len(held) < len(found):
        raise PageError("every place must differ from the others")
    for message in known:
        fits = [each for each in found if each.takes(message)] + [each for each in found if each.takes_module(message)]
        held[next(iter(fits), Place(message.kind, ()))].append(message.text)
    for place in found:
        if place.kind not in classes:
            raise PageError(f"a place must name a class of tfps/errors.py, got {place.kind}")
        if gone := [module for module in place.modules if not (ROOT / module).exists()]:
            raise PageError(f"a place must name modules that there are, got {gone[0]}")
        if place.parts and not held[place]:
            raise PageError(f"a message of {place.kind} must have one of {' | '.join(place.parts)}, none has")
    left = iter(found)
    return _PLACE.sub(lambda there: _table(there[0], held[next(left)]), page)


def _table(place: str, texts: list[str]) -> str:
    first = place.partition(" -->")[0] + " -->"
    rows = "".join(f"| {_code(text)} |\n" for text in sorted(texts, key=lambda text: text.strip("…'- ").lower()))
    return f"{first}\n\n| message |\n|---|\n{rows}\n<!-- end -->\n" if rows else f"{first}\n<!-- end -->\n"


def _code(text: str) -> str:
    text = " ".join(text.replace("|", "\\|").split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail unless the page is up to date")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(arguments)
    before = options.page.read_text(encoding="utf-8")
    try:
        after = fill(before, messages(), error_classes())
    except PageError as error:
        sys.exit(f"{PROGRAM}: {options.page}: {error}")
    if before != after and options.check:
        sys.exit(f"{PROGRAM}: {options.page} must be up to date; run {PROGRAM} and commit the result")
    if before != after:
        options.page.write_text(after, encoding="utf-8")
    print(f"{PROGRAM}: {'up to date' if before == after else f'wrote {options.page}'}")


if __name__ == "__main__":
    main()
