"""Finds the ops of tfps in a traced function: passed gates, sends, pulls, and what waits for what."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import tensorflow as tf

from tfps.errors import ConfigError, TfpsError
from tfps.graph.ops import CLOSE, PASS, PULL, SEND, Gate, before, called, needed, outside
from tfps.graph.tf_private import outer_graphs
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import UNDECLARED, DeferredUpdate, Transfer

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


def traced_function(graphs: Mapping[str, weakref.ref[tf.Graph]], name: str | None) -> tf.Graph:
    """Returns the graph named `name`, by default the last one traced."""
    traced = {each: graph for each, ref in graphs.items() if (graph := ref()) is not None}
    if not traced:
        raise TfpsError("there is nothing to draw before the first training step: no traced function sends gradients")
    if name is not None and name not in traced:
        raise ConfigError(f"function must be one of {', '.join(map(repr, traced))}, got {name!r}")
    return traced[name or list(traced)[-1]]


def picture(graph: tf.Graph, runtime: Runtime) -> Picture:
    """Returns the picture of the gates and buckets of `graph`, a function that sends.

    Includes reads of outer functions: the forward pass is there if `graph` is a branch of a tf.cond.
    """
    gates = {id(gate.handle): gate for gate in runtime.gate_watch.gates()}
    shown: dict[str, Gate] = {}  # by variable; of one local replica
    reads: list[Read] = []
    sent: dict[str, Sent] = {}  # the replicas of a worker send a bucket together
    for each in reversed(outer_graphs(graph)):
        for op, key, after in _walk(each, partial(_key, closed_for=_closed_for(each, gates, runtime))):
            if key and each is graph and (transfer := runtime.transfer(int(key.split()[1]))) is not None:
                others = tuple(sorted(after - {key}))
                known = sent.get(key)
                sent[key] = _sent(key, transfer, others, runtime) if known is None else known.also_after(others)
            elif called(op) == PASS and (gate := gates.get(id(outside(op.inputs[0])))) is not None:
                for name in gate.names:
                    read = Read(f"{name} {op.name}", _short(name), tuple(sorted(after)))
                    is_known = any(
                        other.variable == read.variable and (not after or other.after == read.after) for other in reads
                    )
                    if shown.setdefault(name, gate) is gate and not is_known:
                        reads.append(read)
    return Picture(
        function=graph.name,
        workers=runtime.exchange.view.workers,
        reads=[Read(read.key, read.variable, [key for key in read.after if key in sent]) for read in reads],
        sent=list(sent.values()),
    )


def _key(op: tf.Operation, closed_for: dict[str, str]) -> str:
    """Returns the key of the transfer that `op` sends, pulls or closes gates for; empty for other ops."""
    kind = called(op)
    if kind in (SEND, PULL):
        return f"transfer {tf.get_static_value(op.inputs[1])}"
    return closed_for.get(op.name, "")


def _closed_for(graph: tf.Graph, gates: dict[int, Gate], runtime: Runtime) -> dict[str, str]:
    """Maps the name of every close to the key of the send after it."""
    sends: dict[Gate, list[str]] = {}  # that close a gate, in order
    for op in graph.get_operations():
        if called(op) == SEND:
            key = _key(op, {})
            transfer = runtime.transfer(int(key.split()[1]))
            for gate in transfer.gates if isinstance(transfer, DeferredUpdate) else ():
                keys = sends.setdefault(gate, [])
                keys += [] if key in keys else [key]
    found = {}
    for op in graph.get_operations():
        closed = gates.get(id(outside(op.inputs[0]))) if called(op) == CLOSE else None
        if closed is not None and closed in sends:
            found[op.name] = sends[closed].pop(0) if len(sends[closed]) > 1 else sends[closed][0]
    return found


def _sent(key: str, transfer: Transfer, after: Sequence[str], runtime: Runtime) -> Sent:
    update = transfer if isinstance(transfer, DeferredUpdate) else None
    return Sent(
        key=key,
        name=transfer.spec.name,
        variables=list(dict.fromkeys(_short(name) for gate in update.gates for name in gate.names)) if update else [],
        kind=transfer.spec.kind,
        priority=transfer.spec.priority,
        nbytes=transfer.spec.nbytes,
        kept=update.kept if update else (),
        owners=runtime.exchange.info.owners(transfer.bucket) if transfer.bucket != UNDECLARED else (),
        after=after,
    )


def _walk(graph: tf.Graph, key_of: Callable[[tf.Operation], str]) -> Iterator[tuple[tf.Operation, str, frozenset[str]]]:
    """Yields the ops of `graph` that are not pruned, in creation order, with their key and the keys before them.

    These are the nearest keys before an op on all paths of data or control edges.
    """
    run = needed(graph)
    nearest: dict[str, frozenset[str]] = {}
    nothing: frozenset[str] = frozenset()
    for op in graph.get_operations():
        if op.name in run:
            after = nothing.union(*(nearest.get(earlier.name, nothing) for earlier in before(op)))
            key = key_of(op)
            yield op, key, after
            nearest[op.name] = frozenset([key]) if key else after


def _short(name: str) -> str:
    return name.removesuffix(":0")
