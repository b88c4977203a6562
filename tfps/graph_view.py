"""Finds in a traced function what tfps has put there: gates that are passed, sends, pulls, and what waits for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfps.graph_ops import Gate
from tfps.picture import Picture, Read, Sent
from tfps.runtime import DeferredUpdate, Runtime, Transfer
from tfps.tf_private import outer_graphs

_PASS, _SEND, _PULL = "tfps_pass_gate", "tfps_send", "tfps_pull"


def picture(graph: tf.Graph, runtime: Runtime) -> Picture:
    """What the function `graph`, in which sends were built, does with gates and buckets.

    Reads are also those of the functions around it: of a branch of a tf.cond, the forward pass is there.
    """
    gates = {id(gate.handle): gate for gate in runtime.gates()}
    shown: dict[str, Gate] = {}  # by variable; of one local replica
    reads: list[Read] = []
    sent: dict[str, Sent] = {}  # the replicas of a worker send a bucket together
    for each in reversed(outer_graphs(graph)):

        def key_of(op: Any) -> str:
            """What `op` is called in the picture; empty if it is not in it."""
            kind = _called(op)
            if kind in (_SEND, _PULL):
                return f"transfer {tf.get_static_value(op.inputs[1 if kind == _SEND else 2])}"
            gate = gates.get(id(_outermost(op.inputs[0]))) if kind == _PASS else None
            if gate is None or shown.setdefault(gate.name, gate) is not gate:
                return ""
            return f"{gate.name} {op.name}"

        for op, key, after in _walk(each, key_of):
            if _called(op) == _PASS:
                name = _short(gates[id(_outermost(op.inputs[0]))].name)
                reads.append(Read(key, name, tuple(sorted(after))))
            elif each is graph and (transfer := runtime.transfer(int(key.split()[1]))) is not None:
                sent.setdefault(key, _sent(key, transfer, after, runtime))
    drawn = {read.key for read in reads} | set(sent)
    return Picture(
        function=graph.name,
        workers=runtime.exchange.workers,
        reads=[Read(r.key, r.variable, [key for key in r.after if key in drawn]) for r in reads],
        sent=list(sent.values()),
    )


def _sent(key: str, transfer: Transfer, after: set[str], runtime: Runtime) -> Sent:
    update = transfer if isinstance(transfer, DeferredUpdate) else None
    return Sent(
        key=key,
        name=transfer.spec.name,
        variables=list(dict.fromkeys(_short(gate.name) for gate in update.gates)) if update else [],
        kind=transfer.spec.kind,
        priority=transfer.spec.priority,
        nbytes=transfer.spec.nbytes,
        kept=update.kept if update else (),
        owners=runtime.exchange.owners(transfer.bucket),
        after=[other for other in sorted(after) if other.startswith("transfer ") and other != key],
    )


def _walk(graph: tf.Graph, key_of: Callable[[Any], str]) -> list[tuple[Any, str, set[str]]]:
    """The ops of `graph` that have a key and are not pruned, with the keys that each comes after, in order of creation.

    An op comes after those that are nearest before it on any path of data or control edges.
    """
    operations = graph.get_operations()
    needed = {op.name for op in [*(output.op for output in graph.outputs), *graph.control_outputs]}
    for op in reversed(operations):
        if op.name in needed:
            needed.update(before.name for before in _before(op))
    nearest: dict[str, frozenset[str]] = {}
    nothing: frozenset[str] = frozenset()
    found = []
    for op in operations:
        if op.name in needed:
            after = nothing.union(*(nearest.get(before.name, nothing) for before in _before(op)))
            if key := key_of(op):
                found.append((op, key, set(after)))
                after = frozenset([key])
            nearest[op.name] = after
    return found


def _before(op: Any) -> list[Any]:
    return [*(each.op for each in op.inputs), *op.control_inputs]


def _called(op: Any) -> str:
    """The name that the function which `op` calls was written with; empty for other ops."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return ""
    name: str = op.get_attr("f").name
    return name.removeprefix("__inference_").rpartition("_")[0]


def _outermost(tensor: Any) -> Any:
    """What `tensor` is a capture of, through all functions around its own."""
    while hasattr(tensor, "graph") and hasattr(tensor.graph, "captures"):
        outer = [external for external, internal in tensor.graph.captures if internal.name == tensor.name]
        if not outer:
            return tensor
        tensor = outer[0]
    return tensor


def _short(name: str) -> str:
    return name.removesuffix(":0")
