"""Finds the ops of tfps in a traced function: passed gates, sends, pulls, and what waits for what."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import tensorflow as tf

from tfps.errors import ConfigError, TfpsError
from tfps.graph.ops import CLOSE, PASS, PULL, SEND, Gate, before, called, needed, outside
from tfps.graph.picture import Picture, Read, Sent
from tfps.graph.tf_private import outer_graphs
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import UNDECLARED, DeferredUpdate, Transfer


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
