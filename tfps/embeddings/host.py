"""A table on the host side of graphs: messages of lookups and of gradients become requests to the owners of its rows.

Graphs count the steps of a table in a variable, which lookups read and gradients increase: so TensorFlow orders them,
in loops as well, and each message says its step.

Tested in tests/layers/test_embedding.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfps.embeddings.prefetch import Prefetcher
from tfps.errors import ConfigError, TfpsError, to_text
from tfps.exchange.codecs import Codec, Floats
from tfps.exchange.interface import BucketSpec, OnReply, Reply, Tables, Wait
from tfps.exchange.requests import Assign, Ids, Load, Lookup, RowUpdate, Save, SavedRows
from tfps.exchange.update_spec import StepScalars
from tfps.graph import ops as graph_ops
from tfps.graph.ops import HOST, answer
from tfps.graph.prefetch import batch_function, given_inputs, tensors_of
from tfps.graph.tf_private import ResourceVariable, ops, outer_graphs
from tfps.runtime.runtime import Runtime, indivisible
from tfps.runtime.transfers import UNDECLARED, Pull, Pushed, Transfer
from tfps.tables.initial import Initial
from tfps.tables.spec import TableSpec
from tfps.types import Function, Structure, Value, Variable

logger = logging.getLogger("tfps")
_NO_BYTES = np.empty(0, np.uint8)
_PRIORITY = 0  # a forward pass begins with its rows
_RUN = "_tfps_run_of_tables"  # of a graph: a number that differs at each run
_tables, _declarations = itertools.count(), itertools.count()
_traces = itertools.count()


@dataclass(eq=False, slots=True)
class _Trace:
    """The lookups of one step of one local replica in one graph, which may be in it several times."""

    number: int
    lookups: int = 0
    pushed: bool = False  # whether gradients of them are sent in the same run


class _Lookup(NamedTuple):
    """One lookup in a graph."""

    trace: int
    replica: int
    ids: tf.Tensor
    inputs: Sequence[tf.Tensor]  # the batch of its step
    data: tf.Tensor  # its rows


def _kept_on(graph: tf.Graph, name: str, make: Callable[[], Value]) -> Value:
    """What is kept on a graph itself: a table of its tensors would keep it alive."""
    if not hasattr(graph, name):
        setattr(graph, name, make())
    return getattr(graph, name)


@dataclass(eq=False, slots=True)
class _Came:
    """What has come of a step's gradients, by local replica."""

    parts: dict[int, tuple[Ids, Floats]] = field(default_factory=dict)
    scalars: bytes = b""


class Held:
    """While it lives, owners keep rows under its name."""

    def __init__(self, name: str) -> None:
        self.name = name


class HostTable:
    """One table, for all graphs and eager code of a process.

    It is declared when it is trained or restored, by all ranks alike; before that rows have their initial values.
    """

    def __init__(
        self, runtime: Runtime, name: str, alike: str, dim: int, initial: Initial, seed: int, replicas: int
    ) -> None:
        self.runtime, self.name, self.alike, self.dim = runtime, name, alike, dim
        self._initial, self.seed, self.replicas = initial, seed, replicas
        self.spec: TableSpec | None = None  # once it is declared
        self.changed: Variable | None = None  # where ranks that agree on variables have `changes`
        self._changes = 0
        self._held: weakref.WeakValueDictionary[str, Held] = weakref.WeakValueDictionary()  # by name
        self._dropped: deque[str] = deque()  # names of what was held, and is not yet forgotten
        self._telling = threading.Lock()  # held while owners are told of both: a name may come again
        self.awaits = ""  # the files that its rows must come from first, as a model says that was loaded
        self.bucket = UNDECLARED
        self.codec: Codec | None = None
        self._trains: weakref.ref[tf.Graph] | None = None  # the graph that was traced last to train it
        self.number = next(_tables)
        self._lock = threading.Lock()  # guards the next two
        # The latest of each graph and replica.
        self._traced: weakref.WeakKeyDictionary[tf.Graph, dict[int, _Trace]] = weakref.WeakKeyDictionary()
        self._by_number: dict[int, _Trace] = {}
        self.bucket_spec = BucketSpec((name,), "gather", 0, "uint8", _PRIORITY)  # until it is declared
        self.prefetcher = Prefetcher(self._prefetch)
        self.pulls, self.pushes = _Lookups(self), _Gradients(self)
        for transfer in (self.pulls, self.pushes):
            runtime.adopt(transfer, None)
        with tf.init_scope(), tf.device(HOST):
            self.steps = [
                ResourceVariable(0, dtype=tf.int64, trainable=False, name="tfps_table_steps") for _ in range(replicas)
            ]

    def declare(self, spec: TableSpec) -> None:
        """Declares it, as every rank must, once, and again if it gets another optimizer: its slots begin anew then."""
        replaces = None
        if self.spec is not None:
            spec = dataclasses.replace(self.spec, update=spec.update)  # all else is as it was at first
            if self.spec == spec:
                return
            replaces = self.bucket
            self.runtime.finish()
        names, alike, text = (self.name,), (self.alike,), spec.text()
        bucket = BucketSpec(
            names, "table", 0, "float32", _PRIORITY, alike=alike, codec=self.codec, table=text, replaces=replaces
        )
        (number,) = self.runtime.buckets([(("table", self.number, next(_declarations)), bucket)])
        for transfer in (self.pulls, self.pushes):
            transfer.bucket, transfer.spec = number, bucket
        self.bucket_spec, self.bucket, self.spec = bucket, number, spec

    # Graphs

    def _trace(self, graph: tf.Graph, replica: int) -> _Trace:
        """The step that is being traced in `graph`, with one lookup more."""
        with self._lock:
            traced = self._traced.setdefault(graph, {})
            found = traced.get(replica)
            if found is None or found.pushed:
                found = traced[replica] = _Trace(next(_traces))
                self._by_number[found.number] = found
            found.lookups += 1
            return found

    def traced(self, number: int) -> _Trace:
        with self._lock:
            return self._by_number[number]

    def lookup(self, ids: tf.Tensor, replica: int) -> tf.Tensor:
        """Rows of `ids`, int64 [n], each once: float32 [n, dim]. In graphs and eagerly."""
        self.check_restored()
        if tf.executing_eagerly():
            rows: Floats = self.lookup_now(ids.numpy(), int(self.steps[replica]))
            return tf.constant(rows)
        graph = ops.get_default_graph()
        trace = self._trace(graph, replica)
        with tf.device(HOST):
            with tf.control_dependencies(None):
                run = _kept_on(graph, _RUN, graph_ops.graph_run)
            about = tf.stack([self.steps[replica].read_value(), tf.constant(trace.number, tf.int64), run])
            data, _ = graph_ops.pull(self.runtime.queue, self.pulls.id, graph_ops.to_raw(ids), graph_ops.to_raw(about))
            self._lookups_in(graph).append(_Lookup(trace.number, replica, ids, given_inputs(), data))
            rows = tf.reshape(graph_ops.from_raw(data, tf.float32), [-1, self.dim])
            return tf.ensure_shape(rows, [None, self.dim])

    def push(self, ids: tf.Tensor, gradients: tf.Tensor, scalars: tf.Tensor, replica: int) -> None:
        """Sends one replica's gradients, float32 [n, dim], of `ids`, int64 [n], each once, and the step's scalars."""
        if tf.executing_eagerly():
            packed = StepScalars(0, tuple(scalars.numpy().tolist())).pack()
            self._came(int(self.steps[replica]), replica, ids.numpy(), gradients.numpy(), packed, now=True)
            self.steps[replica].assign_add(1)
            return
        graphs = outer_graphs(ops.get_default_graph())
        with self._lock:
            traces = [found for graph in graphs if (found := self._traced.get(graph, {}).get(replica)) is not None]
            if len(traces) == 1:
                traces[0].pushed = True
                (graph,) = (each for each in graphs if each in self._traced)
                self._trains = weakref.ref(graph)
        with tf.device(HOST):
            counted = [tf.constant(replica, tf.int64), tf.size(scalars, tf.int64)]
            about = tf.concat(
                [tf.stack([self.steps[replica].read_value(), *counted]), tf.bitcast(scalars, tf.int64), ids], 0
            )
            run = tf.constant(0, tf.int64)
            # A gradient that does not depend on the rows would else be applied before they are read.
            # Their sizes: in a branch they are values of the graph around.
            lookups = [each for graph in graphs for each in self._lookups_in(graph) if each.replica == replica]
            with tf.control_dependencies([tf.size(each.data) for each in lookups]):
                sent = graph_ops.send(
                    self.runtime.queue, self.pushes.id, run, graph_ops.to_raw(gradients), graph_ops.to_raw(about)
                )
            with tf.control_dependencies([sent]):
                self.steps[replica].assign_add(1, read_value=False)

    def _lookups_in(self, graph: tf.Graph) -> list[_Lookup]:
        found: list[_Lookup] = _kept_on(graph, f"_tfps_lookups_{self.number}", list)
        return found

    # Prefetching

    def prefetch(self, batches: Sequence[Structure]) -> None:
        """Prefetches the rows of a batch that has just been staged, given its part for each local replica.

        It is of the graph that was traced last to train the table, or nothing comes of it.
        """
        graph = None if self._trains is None else self._trains()
        if graph is None or self.runtime.alone:
            return
        computed = _kept_on(graph, f"_tfps_prefetch_{self.number}", lambda: self._batch_functions(graph))
        found: list[Ids] = []
        try:
            for replica, of_batch, dtypes in computed:
                flat = tensors_of(batches[replica])
                if [each.dtype for each in flat] != dtypes:
                    return
                found += [each.numpy() for each in of_batch(*flat)]
        except Exception as error:  # the step will ask, and raise what is wrong with its ids
            logger.debug("tfps: rows of %s are not prefetched: %r", self.name, error)
            return
        rows = None if self.spec is None else self.spec.rows
        if rows is not None and any(len(each) and not 0 <= each.min() <= each.max() < rows for each in found):
            return  # the step says by the name of its layer which id there is not
        if found:
            self.prefetcher.staged(found)

    def _batch_functions(self, graph: tf.Graph) -> list[tuple[int, Function, list[tf.DType]]]:
        """Per replica what computes its ids from its batch, and the dtypes of that; empty if something else does."""
        lookups, made = self._lookups_in(graph), []
        for replica in range(self.replicas):
            own = [each for each in lookups if each.replica == replica]
            traces, inputs = {each.trace for each in own}, own[0].inputs if own else []
            # Not several steps in one graph, of which it is not known which batch is whose.
            of_batch = batch_function(inputs, [each.ids for each in own]) if len(traces) == 1 and inputs else None
            if of_batch is None:
                return []
            made.append((replica, of_batch, [each.dtype for each in inputs]))
        return made

    def _prefetch(self, ids: Ids, step: int) -> Wait | None:
        return self._tables.prefetch(Lookup(self.bucket, step, ids, trains=True))

    # Requests

    @property
    def _tables(self) -> Tables:
        return self.runtime.exchange.tables

    def initial_values(self, ids: Ids) -> Floats:
        return self._initial.values(self.seed, ids, self.dim)

    def lookup_now(self, ids: Ids, step: int) -> Floats:
        """Rows as all steps before `step` have left them, [n, dim]; on the calling thread."""
        if self.bucket == UNDECLARED:
            return self.initial_values(ids)
        self.runtime.finish()
        spans = self.runtime.spans
        begin_ns = spans.now()
        lookup = functools.partial(self._tables.lookup, Lookup(self.bucket, step, np.array(ids)))
        reply = self.runtime.reply_now(self.bucket, lookup)
        spans.looked_up(begin_ns, self.bucket, self.bucket_spec, step, len(ids), trains=False)
        return np.asarray(reply.sum).view(np.float32).reshape(-1, self.dim)

    @property
    def step(self) -> int:
        """How many steps this worker has taken."""
        return int(self.steps[0].numpy())

    def check_restored(self) -> None:
        """Raises ConfigError if the rows of a model that was loaded have not been restored."""
        if self.awaits:
            raise ConfigError(
                f"the rows of table {self.name!r} are not in the file that the model was loaded from, but beside it in "
                f"{self.awaits}: load it by keras.models.load_model(path) or model.load_weights(path), with the folder "
                "path + '.tables' beside the file"
            )

    def read_rows(self, ids: Ids) -> Floats:
        """The rows of `ids`, which may repeat, as this worker's steps have left them: float32 [n, dim]."""
        self.check_restored()
        unique, places = np.unique(ids, return_inverse=True)
        return self.lookup_now(unique, self.step)[places.reshape(-1)]

    def count(self) -> int:
        """How many rows there are."""
        return 0 if self.bucket == UNDECLARED else self._tables.save(Save(self.bucket, 0, "", "")).rows

    def save(self, folder: str, name: str, since: int | None = None) -> SavedRows:
        """Writes files; see `Save`. It must have been declared."""
        self.check_restored()
        self.runtime.finish()
        return self._tables.save(Save(self.bucket, self.step, folder, name, since))

    def load(
        self, folders: Sequence[str], name: str, identity: str, *, alone: bool = False, seed: str = ""
    ) -> SavedRows:
        """Replaces all rows; see `Load`. It must have been declared."""
        self.runtime.finish()
        found = self._tables.load(Load(self.bucket, self.step, folders, name, identity, alone, seed))
        self.awaits = ""
        self._count_change(alone)
        return found

    @property
    def changes(self) -> int:
        """How often all ranks have replaced rows, other than by training."""
        return self._changes if self.changed is None else int(self.changed.values[0].numpy())

    def _count_change(self, alone: bool = False) -> None:
        self.prefetcher.clear()
        if not alone:
            if self.changed is None:
                self._changes += 1
            else:
                self.changed.assign(self.changes + 1)

    def keep(self, moment: str) -> Held | None:
        """Has the owners keep the rows as they are now while the result lives; None: this rank sees others than a rank
        that has had them kept at the same `moment`. The owners forget them with a later request. It must have been
        declared.
        """
        self.check_restored()
        name = f"{self.changes}-{moment}"
        self.runtime.finish()
        with self._telling:
            if (held := self._held.get(name)) is None:
                if not self._tables.save(Save(self.bucket, self.step, "", name, remove=self._to_forget())).full:
                    return None
                held = self._held[name] = Held(name)
                weakref.finalize(held, self._dropped.append, name).atexit = False
            return held

    def go_back(self, name: str, seed: str = "") -> None:
        """All ids read as what is kept under `name`, or as initial values of a seed; slots stay. All ranks call it. It
        must have been declared.
        """
        self.load((), name, f"{name}/{seed}", seed=seed)

    def _to_forget(self) -> list[str]:
        names = list[str]()
        with contextlib.suppress(IndexError):
            while True:
                names.append(self._dropped.popleft())
        return names

    def forget(self) -> None:
        """Tells the owners what they need not keep any more, if anything. Any thread."""
        if self._dropped and self.bucket != UNDECLARED:
            with self._telling:
                self._tables.save(Save(self.bucket, 0, "", "", remove=self._to_forget()))

    def assign(self, ids: Ids, rows: Floats) -> None:
        """Replaces rows [n, dim] of `ids`, each once. It must have been declared."""
        self.runtime.finish()
        self._count_change()
        identity = f"{self.changes}/{zlib.crc32(rows.data, zlib.crc32(ids.data))}"
        self._tables.assign(Assign(self.bucket, self.step, ids, rows, identity))

    def _came(self, step: int, replica: int, ids: Ids, gradients: Floats, scalars: bytes, *, now: bool) -> None:
        """One replica's gradients of a step; the last of them sends all."""
        came = self.pushes.came.setdefault(step, _Came())
        came.parts[replica], came.scalars = (ids, gradients), scalars
        if len(came.parts) < self.replicas:
            return
        del self.pushes.came[step]
        ids, gradients = summed([came.parts[each] for each in sorted(came.parts)], self.dim)
        self.runtime.spans.added(self.bucket, self.bucket_spec, step, len(ids), in_graph=not now)
        apply = functools.partial(self._tables.apply, RowUpdate(self.bucket, step, ids, gradients, scalars))
        if now:
            with indivisible(self.runtime.exchange, self.name):
                self.runtime.finish()
                self.runtime.reply_now(self.bucket, apply)
        else:
            self.runtime.request(self.bucket_spec, apply, self.pushes.done)

    def align(self) -> None:
        """Counts steps as the exchange does, with nothing under way: when this worker takes part in a job under way."""
        self.prefetcher.clear()
        if self.bucket != UNDECLARED:
            for steps in self.steps:
                steps.assign(self.runtime.exchange.state.steps(self.bucket))


class _Lookups(Pull):
    """Messages of lookups: ids, and the step and the trace that they belong to."""

    exchanges = False

    def __init__(self, table: HostTable) -> None:
        super().__init__(table.bucket_spec)
        self._table = table
        self._run = 0  # of the graph that has asked last,
        self._came: Counter[int] = Counter()  # and the lookups of it that have come, by trace
        self._step, self._attempt = -1, 0  # the last step, and how often it has begun again
        self._over = False  # whether all its lookups have come
        self._missed: Ids | None = None  # of one of its lookups, if there was any

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor) -> None:
        results, table = self.waiting.pop(), self._table
        try:
            ids = np.array(np.frombuffer(memoryview(data), np.int64))
            step, number, run = np.frombuffer(memoryview(indices), np.int64).tolist()
            if table.bucket == UNDECLARED:
                rows = table.initial_values(ids).reshape(-1).view(np.uint8)
                answer(results, ["", graph_run, tf.constant(rows), _NO_BYTES])
                return
            trains, complete = self._counted(step, number, run)
            spans = table.runtime.spans
            looked_up = functools.partial(
                spans.looked_up, spans.now(), table.bucket, self.spec, step, len(ids), trains=trains
            )
            request = Lookup(table.bucket, step, ids, trains, complete, self._attempt)
            self._look_up(request, functools.partial(self._finish, results, graph_run, looked_up))
        except TfpsError as error:
            answer(results, [to_text(error), np.int64(0), _NO_BYTES, _NO_BYTES])
            raise

    def _look_up(self, request: Lookup, finish: OnReply) -> None:
        runtime, tables, prefetcher = self._table.runtime, self._table._tables, self._table.prefetcher
        ids, step, complete = request.ids, request.step, request.complete
        wait = prefetcher.take(ids, step) if request.trains else None
        if wait is None:
            self._missed = ids if request.trains else self._missed
            runtime.request(self.spec, functools.partial(tables.lookup, request), finish)
        else:
            runtime.request(self.spec, wait, finish)
            if complete:
                told = dataclasses.replace(request, ids=ids[:0])
                runtime.request(self.spec, functools.partial(tables.lookup, told), lambda reply: None)
        if complete:
            missed, self._missed = self._missed, None
            prefetcher.began(step, missed)

    def _counted(self, step: int, number: int, run: int) -> tuple[bool, bool]:
        """Whether gradients of this lookup may follow in its run, and whether it is the last of all replicas."""
        trace = self._table.traced(number)
        if not trace.pushed:
            return False, False
        if step != self._step:
            self._step, self._attempt = step, 0
        elif self._over or run != self._run:
            self._attempt += 1
        if run != self._run:
            self._run, self._came, self._missed = run, Counter(), None
        self._over = False
        self._came[number] += 1
        done = [each for each, came in self._came.items() if came == self._table.traced(each).lookups]
        if len(done) < self._table.replicas:
            return True, False
        self._over = True
        for each in done:
            del self._came[each]  # the next step of this run, if it has several
        return True, True

    def _finish(self, results: tf.Tensor, graph_run: tf.Tensor, looked_up: Callable[[], None], reply: Reply) -> None:
        if reply.error is not None:
            answer(results, [to_text(reply.error), np.int64(0), _NO_BYTES, _NO_BYTES])
        else:
            looked_up()
            answer(results, ["", graph_run, graph_ops.tensor_of(np.asarray(reply.sum)), _NO_BYTES])

    def fail(self, error: TfpsError) -> None:
        """The graph has been told."""


class _Gradients(Transfer):
    """Messages with gradients: rows, and the step, the replica, the step's scalars and the ids."""

    exchanges = False

    def __init__(self, table: HostTable) -> None:
        super().__init__(UNDECLARED, table.bucket_spec)
        self._table = table
        self.came: dict[int, _Came] = {}  # by step

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor) -> Pushed | None:
        about = np.frombuffer(memoryview(indices), np.int64)
        step, replica, count = about[:3].tolist()
        scalars = StepScalars(0, tuple(about[3 : 3 + count].view(np.float64).tolist())).pack()
        ids = np.array(about[3 + count :])
        gradients = np.frombuffer(memoryview(data), np.float32).reshape(len(ids), self._table.dim)
        self._table._came(step, replica, ids, gradients, scalars, now=False)
        return None

    def done(self, reply: Reply) -> None:
        """All ranks' gradients have been applied, or the exchange has failed, which others say."""


def summed(parts: Sequence[tuple[Ids, Floats]], dim: int) -> tuple[Ids, Floats]:
    """The sum by id of what several replicas have, added in their order; of one as it is."""
    if len(parts) == 1:
        return parts[0]
    ids = np.unique(np.concatenate([ids for ids, _ in parts]))
    total = np.zeros((len(ids), dim), np.float32)
    for own, gradients in parts:
        total[np.searchsorted(ids, own)] += gradients
    return ids, total
