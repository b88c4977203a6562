"""Finds the ops of tfps in a traced function: passed gates, sends, pulls, and what waits for what."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfps.errors import ConfigError, TfpsError
from tfps.graph.ops import CLOSE, PASS, PULL, SEND, Gate, before, called, in_order, needed, outside
from tfps.graph.tf_private import outer_graphs
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import UNDECLARED, DeferredUpdate, Transfer

_MANY = 6  # variables named per bucket
# Dark (urgent) to light, distinguishable without color vision.
_SHADES = ("#08519c", "#2171b5", "#4292c6", "#6baed6", "#9ecae1", "#c6dbef", "#deebf7")
_DARK = 3  # the first ones, which need white text
_WARNING = "#d55e00"
_quoted = functools.partial(json.dumps, ensure_ascii=False)  # what DOT escapes, JSON escapes alike
_ORANGE = f'color="{_WARNING}", penwidth=2'


@dataclass(frozen=True, slots=True)
class Read:
    """The first access to a variable in the step, or one that waits for an update within it."""

    key: str  # unique in the picture
    variable: str
    after: Sequence[str] = ()  # keys of the sends in the same step whose updates it waits for


@dataclass(frozen=True, slots=True)
class Sent:
    """A bucket that the step sends."""

    key: str  # unique in the picture
    name: str
    variables: Sequence[str]  # whose gates close and whose update follows; none for what the step waits for
    kind: str
    priority: int
    nbytes: int
    kept: Sequence[str] = ()  # names of values that the update reads as of the send
    owners: Sequence[int] = ()  # number of each slice's pserver; empty if nothing is sliced
    after: Sequence[str] = ()  # keys of the earlier sends in the same step that it waits for


@dataclass(frozen=True, slots=True)
class Picture:
    """One traced function: its reads in forward order and what it sends."""

    function: str
    workers: int
    reads: Sequence[Read] = ()
    sent: Sequence[Sent] = ()

    def dot(self) -> str:
        """Returns the picture in DOT, which `dot -Tsvg` draws; orange marks what makes a step wait."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        sent = sorted(self.sent, key=lambda each: each.priority)
        ids = {read.key: f"read{number}" for number, read in enumerate(self.reads)}
        ids |= {each.key: f"send{number}" for number, each in enumerate(sent)}
        first = {read.variable: ids[read.key] for read in reversed(self.reads)}
        names = [name.split("/") for name in dict.fromkeys(read.variable for read in self.reads)]
        model = len(names) > 1 and all(len(name) > 1 and name[0] == names[0][0] for name in names)
        prefix = f"{names[0][0]}/" if model else ""  # redundant if all names begin with it
        title = (
            f"{self.function}{f' of {names[0][0]}' if model else ''}: {len(self.reads)} reads, {len(sent)} buckets, "
            f"{_size(sum(each.nbytes for each in sent))} per step and direction\n"
            "reads, in the order of first use, each waiting at its own gate  →  gradients  →  sends (dark: urgent)  →  "
            "updates  →  reads of the next step"
        )
        yield "digraph tfps {"
        yield '  graph [rankdir=LR, ranksep=0.6, nodesep=0.12, labelloc=t, fontname="sans-serif", fontsize=12,'
        yield f"         label={_quoted(title)}];"
        yield '  node [shape=box, style="rounded,filled", fillcolor=white, fontname="sans-serif", fontsize=11];'
        yield '  edge [fontname="sans-serif", fontsize=9, color="#555555"];'
        for read in self.reads:
            again, style = ("again: ", f", {_ORANGE}") if read.after else ("", "")
            yield f"  {ids[read.key]} [label={_quoted(again + read.variable.removeprefix(prefix))}, shape=cds{style}];"
        for number, each in enumerate(sent):
            yield from self._nodes(number, each, prefix)
        yield from _column([ids[read.key] for read in self.reads if not read.after], "")
        yield from _column([f"gradient{number}" for number in range(len(sent))], "style=invis")
        for number, each in enumerate(sent):
            yield from (f"  {first[name]} -> gradient{number};" for name in each.variables if name in first)
            yield f"  gradient{number} -> send{number} -> update{number} [weight=10];"
        updated = [(number, name) for number, each in enumerate(sent) for name in each.variables]
        for place, (number, name) in enumerate(updated):
            label = _quoted(name.removeprefix(prefix))
            yield f'  next{place} [label={label}, shape=cds, style="filled,dashed"];'
            yield f'  update{number} -> next{place} [style=dashed, color="#2171b5"];'
        yield from _column([f"next{place}" for place in range(len(updated))], "style=invis")
        waits = f'{_ORANGE}, fontcolor="{_WARNING}", label="waits for"'
        for read in self.reads:
            for earlier in read.after:
                yield f"  {ids[earlier].replace('send', 'update')} -> {ids[read.key]} [{waits}];"
        for each in sent:
            for earlier in each.after:
                yield f"  {ids[earlier]} -> {ids[each.key]} [{waits}, constraint=false];"
        yield "}"

    def _nodes(self, number: int, each: Sent, prefix: str) -> Iterator[str]:
        priorities = sorted({other.priority for other in self.sent})
        shade = priorities.index(each.priority) * len(_SHADES) // len(priorities)
        style = f', fillcolor="{_SHADES[shade]}", fontcolor={"white" if shade < _DARK else "black"}'
        send = f"priority {each.priority}\nsend {_size(each.nbytes) if each.kind == 'sum' else 'rows'}"
        if each.owners:
            several, pservers = "s" if len(each.owners) > 1 else "", sorted(set(each.owners))
            where = f"pserver {pservers[0]}" if len(pservers) == 1 else f"{len(pservers)} pservers"
            send += f"\n{len(each.owners)} slice{several} on {where}"
        total = f"sum of {self.workers} workers" if self.workers > 1 else "back from the pserver"
        total = "rows of all workers" if each.kind == "gather" else total
        if each.variables:
            names = [name.removeprefix(prefix) for name in each.variables[:_MANY]]
            names += [f"and {len(each.variables) - _MANY} more"] if len(each.variables) > _MANY else []
            kept = ", ".join(each.kept) if len(each.kept) <= 3 else f"{len(each.kept)} values"
            kept = f"keep {kept}\n" if kept else ""
            texts = "\n".join(["gradient of", *names]), f"close gates\n{kept}{send}", f"{total}\nupdate, open gates"
            marked = ""
        else:
            texts = each.name, f"pull\n{send}", f"{total}\nused in this step"
            marked = f", {_ORANGE}"
        for kind, text, own in zip(("gradient", "send", "update"), texts, ("", style + marked, marked), strict=True):
            yield f"  {kind}{number} [label={_quoted(text)}{own}];"


def _column(nodes: Sequence[str], style: str) -> list[str]:
    if not nodes:
        return []
    same = "  { rank=same; " + "; ".join(nodes) + "; }"
    return [same, f"  {' -> '.join(nodes)} [{style}];"] if len(nodes) > 1 else [same]


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if nbytes < 999.5 else f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"


def picture(graphs: Mapping[str, weakref.ref[tf.Graph]], name: str | None, runtime: Runtime) -> Picture:
    """Returns the picture of the one of `graphs` with this name, by default of the last traced."""
    traced = {each: graph for each, ref in graphs.items() if (graph := ref()) is not None}
    if not traced:
        raise TfpsError("there is nothing to draw before the first training step: no traced function sends gradients")
    if name is not None and name not in traced:
        raise ConfigError(f"function must be one of {', '.join(map(repr, traced))}, got {name!r}")
    graph = traced[name or list(traced)[-1]]
    gates = {id(gate.handle): gate for gate in runtime.gate_watch.gates()}
    shown: dict[str, Gate] = {}  # by variable; of one local replica
    reads: list[Read] = []
    sent: dict[int, Sent] = {}  # by id of the transfer; the replicas of a worker send a bucket together
    nothing: frozenset[int] = frozenset()
    for each in reversed(outer_graphs(graph)):  # reads of a forward pass may lie around a branch of a tf.cond
        transfers, run = _transfers(each, gates, runtime), needed(each)
        nearest: dict[str, frozenset[int]] = {}  # transfers right before an op, on all paths of data or control edges
        for op in in_order(each):
            if op.name not in run:
                continue  # pruned
            before_it = nothing.union(*(nearest.get(earlier.name, nothing) for earlier in before(op)))
            number = transfers.get(op.name)
            nearest[op.name] = before_it if number is None else frozenset([number])
            after = sorted(str(earlier) for earlier in before_it if earlier in sent)
            if number is not None and each is graph and (transfer := runtime.transfer(number)) is not None:
                known = sent[number].after if number in sent else ()
                sent[number] = _sent(str(number), transfer, sorted({*known, *after} - {str(number)}), runtime)
            elif called(op) == PASS and (gate := gates.get(id(outside(op.inputs[0])))) is not None:
                for name in gate.names:
                    read = Read(f"{name} {op.name}", name.removesuffix(":0"), after)
                    same = (other for other in reads if other.variable == read.variable)
                    is_known = any(not after or other.after == after for other in same)
                    if shown.setdefault(name, gate) is gate and not is_known:
                        reads.append(read)
    return Picture(graph.name, len(runtime.exchange.view.ranks), reads, list(sent.values()))


def _transfers(graph: tf.Graph, gates: dict[int, Gate], runtime: Runtime) -> dict[str, int]:
    """Returns the id of the transfer that an op sends, pulls or closes gates for, by the op's name."""
    found: dict[str, int] = {}
    sends: dict[Gate, list[int]] = {}  # that close a gate, in order
    for op in graph.get_operations():
        if called(op) in (SEND, PULL):
            found[op.name] = identity = int(tf.get_static_value(op.inputs[1]))
            transfer = runtime.transfer(identity) if called(op) == SEND else None
            for gate in transfer.gates if isinstance(transfer, DeferredUpdate) else ():
                if identity not in sends.setdefault(gate, []):
                    sends[gate].append(identity)
    for op in graph.get_operations():
        closed = gates.get(id(outside(op.inputs[0]))) if called(op) == CLOSE else None
        if closed is not None and closed in sends:
            found[op.name] = sends[closed].pop(0) if len(sends[closed]) > 1 else sends[closed][0]
    return found


def _sent(key: str, transfer: Transfer, after: Sequence[str], runtime: Runtime) -> Sent:
    update = transfer if isinstance(transfer, DeferredUpdate) else None
    names = [name.removesuffix(":0") for gate in update.gates for name in gate.names] if update else []
    return Sent(
        key=key,
        name=transfer.spec.name,
        variables=list(dict.fromkeys(names)),
        kind=transfer.spec.kind,
        priority=transfer.spec.priority,
        nbytes=transfer.spec.nbytes,
        kept=update.kept if update else (),
        owners=runtime.exchange.info.owners(transfer.bucket) if transfer.bucket != UNDECLARED else (),
        after=after,
    )
