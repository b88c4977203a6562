"""Tables of every message that tfps can raise, in the places that docs/troubleshooting.md has for them.

tools/site_hooks.py puts them there when the site is built, below the advice that is written by hand. A place is:

    <!-- messages: ConnectError: no answer within | is not a tfps pserver | tfps/wire/tls.py -->

It names a class and, between bars, parts of its messages (regular expressions) or modules and folders that make them. A
message goes to the first place of its class that names a part of it, else to the first that names its module. A place
without either takes what is left: every class needs one, so that a new message always finds a place, if only the
general one. Prefer modules: they hold for messages that are still to come.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.messages import ROOT, Message

_PLACE = re.compile(r"<!-- messages: (\w+)(?::\s(.+?))? -->\n", re.DOTALL)


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
    return _PLACE.sub(lambda _: _table(held[next(left)]), page)


def _table(texts: list[str]) -> str:
    rows = "".join(f"| {_code(text)} |\n" for text in sorted(texts, key=lambda text: text.strip("…'- ").lower()))
    return f"| message |\n|---|\n{rows}" if rows else ""


def _code(text: str) -> str:
    text = " ".join(text.replace("|", "\\|").split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"
