"""Pulls in graphs, declared right before their first run, and only if their result is used.

During tracing it is unknown whether anything but a deferred update uses the result of `all_reduce`. When a function is
called, it and the functions it calls are fully traced: pulls that no output or stateful op of its graph needs are
pruned. The others are declared then, in tracing order, which is the same on all ranks; the messages of a run arrive in
any order.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import tensorflow as tf

from tfps.compression import LEAST_BYTES
from tfps.errors import TfpsError
from tfps.exchange.interface import BucketSpec
from tfps.graph import ops as graph_ops
from tfps.graph.patches import Patch
from tfps.graph.tf_private import ConcreteFunction, ops, outer_graphs
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import UNDECLARED, Pull
from tfps.types import Function, Structure

logger = logging.getLogger("tfps")
_NAME = "_tfps_pulls"


@dataclass(eq=False)
class _TracedPull:
    """A pull, the op that calls it, and the key of its bucket."""

    runtime: Runtime
    transfer: Pull
    key: tuple[Hashable, ...]
    op: tf.Operation


@dataclass(eq=False)
class _Pulls:
    """The pulls of one graph and of the functions it calls, in tracing order."""

    traced: dict[_TracedPull, None] = field(default_factory=dict)
    settled: bool = False  # whether those that the graph needs are declared

    def add(self, pulls: Iterable[_TracedPull]) -> None:
        self.traced.update(dict.fromkeys(pulls))
        self.settled = False


def pull(
    runtime: Runtime, key: tuple[Hashable, ...], spec: BucketSpec, data: tf.Tensor, indices: tf.Tensor
) -> list[tf.Tensor]:
    """In a graph under construction: sends `data` and waits for the reduced bytes, [data, indices], flat uint8.

    `key` is the same for the same call on every rank and in every retrace.
    """
    graph, transfer = ops.get_default_graph(), Pull(spec)
    runtime.adopt(transfer, graph)
    pulled = graph_ops.pull(runtime.queue, transfer.id, data, indices)
    around = _add(graph, [_TracedPull(runtime, transfer, ("pull", *key, spec), pulled[0].op)])
    transfer.declare = lambda: _declare_late(runtime, around(), spec.name)
    return pulled


def _add(graph: tf.Graph, pulls: Iterable[_TracedPull]) -> weakref.ref[_Pulls]:
    """Adds `pulls` to `graph` and its outer graphs; returns the pulls of the outermost."""
    found = _Pulls()
    for each in outer_graphs(graph):
        # On the graph itself: they hold ops of the graph, so a table would keep both alive forever.
        found = getattr(each, _NAME, None) or _Pulls()
        setattr(each, _NAME, found)
        found.add(pulls)
    return weakref.ref(found)


def _prepare(graph: tf.Graph) -> None:
    """Declares the pulls of the function `graph`, which runs next or is called in the graph under construction.

    Raises:
        TfpsError: a pull could not be declared.
    """
    pulls: _Pulls | None = getattr(graph, _NAME, None)
    if pulls is None or pulls.settled:
        return
    if not tf.executing_eagerly():  # a function may have been traced for another caller
        _add(ops.get_default_graph(), pulls.traced)
        return
    needed = {each: graph_ops.needed(each) for each in {one.op.graph for one in pulls.traced}}
    _declare([each for each in pulls.traced if each.op.name in needed[each.op.graph]])
    pulls.settled = True


def _declare(pulls: Iterable[_TracedPull]) -> None:
    new = [each for each in pulls if each.transfer.bucket == UNDECLARED]
    for runtime in dict.fromkeys(each.runtime for each in new):
        own = [each for each in new if each.runtime is runtime]
        buckets = runtime.buckets([(each.key, each.transfer.spec) for each in own])
        for each, bucket in zip(own, buckets, strict=True):
            each.transfer.bucket = bucket
            if runtime.compresses and each.transfer.spec.nbytes >= LEAST_BYTES:
                _say_uncompressed(each.transfer.spec.name)


@functools.cache
def _say_uncompressed(name: str) -> None:
    logger.warning(
        "tfps: %s is not compressed: the program computes with the sum, or it is no gradient of an optimizer",
        name,
    )


def _declare_late(runtime: Runtime, pulls: _Pulls | None, name: str) -> None:
    """Declares all pulls of a graph when `name`, which seemed unneeded, sends a message. Called by the pump thread.

    Its function is a dataset's, whose runs are invisible, or only a gradient needs its result. Other pulls of the graph
    may follow in a different order on each rank: they are declared together.
    """
    if pulls is None:
        raise TfpsError(f"the graph that reduces {name} is gone")
    _declare([each for each in pulls.traced if each.runtime is runtime])


def _prepare_first(original: Function) -> Function:
    def call(self: ConcreteFunction, *arguments: object, **named: object) -> Structure:
        _prepare(self.graph)
        return original(self, *arguments, **named)

    return call


PATCHES = (
    Patch(
        ConcreteFunction,
        "_call_flat",
        _prepare_first,
        "declares what a function sends right before it first runs: it is fully traced then, and no public hook lies "
        "between",
        "tests/updates/test_pulls.py",
    ),
)
