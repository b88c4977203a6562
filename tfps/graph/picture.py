"""Draws a step in Graphviz DOT: reads behind gates, sends by priority, updates.

Tested in tests/updates/test_graph_view.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

_MANY = 6  # variables named per bucket
# Dark (urgent) to light, distinguishable without color vision.
_SHADES = ("#08519c", "#2171b5", "#4292c6", "#6baed6", "#9ecae1", "#c6dbef", "#deebf7")
_DARK = 3  # the first ones, which need white text
_WARNING = "#d55e00"


@dataclass(frozen=True, slots=True)
class Read:
    """The first access to a variable in the step, or one that waits for an update within it.

    Args:
        key: unique in the picture.
        after: keys of the sends in the same step whose updates it waits for.
    """

    key: str
    variable: str
    after: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Sent:
    """A bucket that the step sends.

    Args:
        key: unique in the picture.
        variables: variables whose gates close and whose update follows; none for a reduction that the step waits for.
        kept: names of values that the update reads as of the send.
        owners: number of each slice's pserver; empty if nothing is sliced.
        after: keys of the earlier sends in the same step that it waits for.
    """

    key: str
    name: str
    variables: Sequence[str]
    kind: str
    priority: int
    nbytes: int
    kept: Sequence[str] = ()
    owners: Sequence[int] = ()
    after: Sequence[str] = ()

    def also_after(self, keys: Sequence[str]) -> Sent:
        """Returns a copy that also comes after `keys`."""
        return replace(self, after=tuple(sorted({*self.after, *keys})))


@dataclass(frozen=True, slots=True)
class Picture:
    """One traced function: its reads in forward order and what it sends."""

    function: str
    workers: int
    reads: Sequence[Read] = field(default_factory=list)
    sent: Sequence[Sent] = field(default_factory=list)

    def dot(self) -> str:
        """Returns the picture in DOT; `dot -Tsvg` draws it.

        From left to right: reads in the order of first use, gradients, sends (the most urgent on top), updates, and the
        reads of the next step. Orange marks what makes a step wait.
        """
        return "\n".join(_Writer(self).lines()) + "\n"


class _Writer:
    """Writes one picture."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._sent = sorted(picture.sent, key=lambda each: each.priority)
        self._ids = {read.key: f"read{number}" for number, read in enumerate(picture.reads)}
        self._ids |= {each.key: f"send{number}" for number, each in enumerate(self._sent)}
        self._first: dict[str, str] = {}  # id of the first read of a variable
        for read in picture.reads:
            self._first.setdefault(read.variable, self._ids[read.key])
        names = [name.split("/") for name in self._first]
        model = len(names) > 1 and all(len(name) > 1 and name[0] == names[0][0] for name in names)
        self._prefix = f"{names[0][0]}/" if model else ""  # redundant if all names begin with it

    def lines(self) -> Iterator[str]:
        yield "digraph tfps {"
        yield '  graph [rankdir=LR, ranksep=0.6, nodesep=0.12, labelloc=t, fontname="sans-serif", fontsize=12,'
        yield f"         label={_quoted(self._title())}];"
        yield '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif", fontsize=11];'
        yield '  edge [fontname="sans-serif", fontsize=9, color="#555555"];'
        for read in self._picture.reads:
            style = f', color="{_WARNING}", penwidth=2' if read.after else ""
            text = f"{'again: ' if read.after else ''}{self._short(read.variable)}"
            yield f"  {self._ids[read.key]} [label={_quoted(text)}, shape=cds{style}];"
        for number, each in enumerate(self._sent):
            yield from self._nodes(number, each)
        yield from _column([self._ids[read.key] for read in self._picture.reads if not read.after], "")
        yield from _column([f"gradient{number}" for number in range(len(self._sent))], "style=invis")
        for number, each in enumerate(self._sent):
            for name in each.variables:
                if name in self._first:
                    yield f"  {self._first[name]} -> gradient{number};"
            yield f"  gradient{number} -> send{number} -> update{number} [weight=10];"
        updated = [(number, name) for number, each in enumerate(self._sent) for name in each.variables]
        for place, (number, name) in enumerate(updated):
            yield f'  next{place} [label={_quoted(self._short(name))}, shape=cds, style="filled,dashed"];'
            yield f'  update{number} -> next{place} [style=dashed, color="#2171b5"];'
        yield from _column([f"next{place}" for place in range(len(updated))], "style=invis")
        waits = f'color="{_WARNING}", penwidth=2, fontcolor="{_WARNING}", label="waits for"'
        for read in self._picture.reads:
            for earlier in read.after:
                yield f"  {self._ids[earlier].replace('send', 'update')} -> {self._ids[read.key]} [{waits}];"
        for each in self._sent:
            for earlier in each.after:
                yield f"  {self._ids[earlier]} -> {self._ids[each.key]} [{waits}, constraint=false];"
        yield "}"

    def _title(self) -> str:
        sent, nbytes = len(self._sent), sum(each.nbytes for each in self._sent)
        of = f" of {self._prefix.rstrip('/')}" if self._prefix else ""
        reads = len(self._picture.reads)
        return (
            f"{self._picture.function}{of}: {reads} reads, {sent} buckets, {_size(nbytes)} per step and direction\n"
            "reads, in the order of first use, each waiting at its own gate  →  gradients  →  sends (dark: urgent)  →  "
            "updates  →  reads of the next step"
        )

    def _short(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _nodes(self, number: int, each: Sent) -> Iterator[str]:
        priorities = sorted({other.priority for other in self._sent})
        shade = priorities.index(each.priority) * len(_SHADES) // len(priorities)
        colours = f'fillcolor="{_SHADES[shade]}", fontcolor={"white" if shade < _DARK else "black"}'
        size = _size(each.nbytes) if each.kind == "sum" else "rows"
        send = [f"priority {each.priority}", f"send {size}{_slices(each.owners)}"]
        total = f"sum of {self._picture.workers} workers" if self._picture.workers > 1 else "back from the pserver"
        if each.kind == "gather":
            total = "rows of all workers"
        names, rest = [self._short(name) for name in each.variables[:_MANY]], each.variables[_MANY:]
        if rest:
            names.append(f"and {len(rest)} more")
        if each.variables:
            kept = [f"keep {_listed(each.kept)}"] if each.kept else []
            texts = ["gradient of", *names], ["close gates", *kept, *send], [total, "update, open gates"]
            marked = ""
        else:
            texts = [each.name], ["pull", *send], [total, "used in this step"]
            marked = f', color="{_WARNING}", penwidth=2'
        styles = "", f", {colours}{marked}", marked
        for kind, text, style in zip(("gradient", "send", "update"), texts, styles, strict=True):
            yield f"  {kind}{number} [label={_quoted(chr(10).join(text))}{style}];"


def _column(nodes: Sequence[str], style: str) -> list[str]:
    """Puts nodes below each other in this order."""
    if not nodes:
        return []
    same = "  { rank=same; " + "; ".join(nodes) + "; }"
    return [same, f"  {' -> '.join(nodes)} [{style}];"] if len(nodes) > 1 else [same]


def _slices(owners: Sequence[int]) -> str:
    if not owners:
        return ""
    pservers = sorted(set(owners))
    where = f"pserver {pservers[0]}" if len(pservers) == 1 else f"{len(pservers)} pservers"
    return f"\n{len(owners)} slice{'s' if len(owners) > 1 else ''} on {where}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} values"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if nbytes < 999.5 else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"
