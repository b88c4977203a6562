"""The host side of the graph: takes messages of send ops, exchanges them, and applies the replies.

Thread "tfps-pump" moves messages from the TensorFlow queue into the exchange; threads "tfps-apply" run updates and
answer pulls. None blocks on the network; the exchange's receiver threads only hand replies over. In one process the
pump updates a step's only bucket itself.

Tested in tests/strategy/test_strategy.py, tests/strategy/test_stopped_steps.py and tests/runtime/test_interrupts.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar, cast

import numpy as np
import tensorflow as tf

from tfps.errors import ClosedError, InterruptError, TfpsError, WaitTimeoutError
from tfps.exchange.aggregate import pack_sparse, unpack_sparse
from tfps.exchange.interface import BucketSpec, Exchange, OnReply, Payload, Reply, as_bytes
from tfps.graph import tf_private
from tfps.graph.ops import HOST, MESSAGE, tensor_of
from tfps.graph.tf_private import stopped
from tfps.runtime.report import History, Report, Round, Stepping, make_report
from tfps.runtime.step_spans import StepSpans
from tfps.runtime.stopped_steps import GateWatch, Rounds, stopped_step
from tfps.runtime.transfers import DeferredUpdate, Pull, Transfer
from tfps.runtime.unanswered import Unanswered
from tfps.runtime.update_executor import UpdateExecutor
from tfps.threads import sheltered
from tfps.trace.capture import CapturedBucket
from tfps.trace.recorder import Recorder
from tfps.worker.client import PATIENCE_S

logger = logging.getLogger("tfps")
_TICK_S = 0.2
_NO_BYTES = np.empty(0, np.uint8)
_NO_TIMES = np.empty(0, np.float64)
_DRAINED = -1  # in place of a transfer's id: all messages before it have been started
_CLOSED = -2  # in place of a transfer's id: the queue of messages is about to be closed
_HISTORY_STEPS = 16
_T = TypeVar("_T")
Key = str | tuple[Hashable, ...]  # names one bucket of this process


def wait(done: threading.Event, timeout_s: float = float("inf")) -> bool:
    """Waits until `done` is set; returns False on timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not done.wait(max(min(_TICK_S, deadline_s - time.monotonic()), 0.0)):
        if stopped():
            raise KeyboardInterrupt
        if time.monotonic() >= deadline_s:
            return False
    return True


@contextlib.contextmanager
def indivisible(exchange: Exchange, what: str) -> Iterator[None]:
    """Marks a block in which this rank does `what` with the others; no rank can skip or repeat it alone.

    If the block is interrupted (Ctrl-C), it is unknown which ranks got its values, and to which of their next values
    those of a retry would be added: the job fails on all ranks. A single worker continues.
    """
    try:
        yield
    except TfpsError:
        raise
    except BaseException as error:
        if exchange.view.workers > 1:
            how = "interrupted (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"stopped by {error!r}"
            exchange.fail(
                InterruptError(
                    f"rank {exchange.rank} was {how} in the middle of an exchange with the other ranks ({what}); they "
                    "cannot know any more which values belong together: close() the strategy on every rank (or restart "
                    "the notebooks) and go on from a checkpoint with a new one"
                )
            )
        raise


class DeclaredBuckets:
    """Declares each key once. Thread-safe."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._declaring = threading.Lock()  # guards writes to all below
        self._ids: dict[Key, int] = {}
        self._declared: dict[int, tuple[Key, BucketSpec]] = {}  # by id
        self._later: list[tuple[Key, BucketSpec]] = []  # to declare with the next new ones
        # Called before occasional ones are declared, and by `Runtime.exchange_now` for all but those of updates.
        self.before: Callable[[BucketSpec], None] | None = None

    def ids(self, buckets: Sequence[tuple[Key, BucketSpec]], details: Sequence[str] = ()) -> list[int]:
        """Returns the ids of `buckets`, pairs of a key and the spec to declare if the key is new.

        May be interrupted (Ctrl-C) on any rank and called again: either all ranks have declared the new keys, and the
        next call knows them, or none has.
        """

        def declare(stop: threading.Event) -> None:
            with self._declaring:
                # They may be among the later ones.
                new = {key: spec for key, spec in dict([*self._later, *buckets]).items() if key not in self._ids}
                if not any(key in new for key, _ in buckets):
                    return  # declared by an interrupted call that has only just ended
                ids = self._exchange.declare(list(new.values()), details, stop)
                self._declared.update(zip(ids, new.items(), strict=True))
                self._ids.update(zip(new, ids, strict=True))
                self._later.clear()

        if new := [spec for key, spec in buckets if key not in self._ids]:
            for spec in new:
                if spec.occasional and self.before is not None:
                    self.before(spec)
            sheltered(declare, wait)
        return [self._ids[key] for key, _ in buckets]

    def later(self, key: Key, spec: BucketSpec) -> None:
        """Declares a bucket together with the next new ones, so it costs no extra wait."""
        with self._declaring:
            self._later.append((key, spec))

    def has(self, key: Key) -> bool:
        return key in self._ids

    def numbers(self) -> list[int]:
        return list(self._declared)

    def spec(self, bucket: int) -> BucketSpec:
        return self._declared[bucket][1]

    def known(self) -> list[CapturedBucket]:
        """Returns all buckets by id, as a capture describes them."""
        return [
            CapturedBucket(spec.name, spec.names if key[0] == "update" else (), spec.priority, spec.nbytes)
            for _, (key, spec) in sorted(dict(self._declared).items())
        ]


class Runtime:
    """Runs the transfers of one strategy over `exchange`; owns it and closes it."""

    def __init__(self, exchange: Exchange, recorder: Recorder, wait_s: float) -> None:
        self.exchange, self.recorder, self.wait_s = exchange, recorder, wait_s
        self.spans = StepSpans(recorder, exchange.rank)
        # The ranks whose values others take, in this order if some are lost; the same on all ranks.
        self.sources: Sequence[int] = range(exchange.view.workers)
        self.source = 0  # the one whose values were taken last
        with tf.init_scope(), tf.device(HOST):
            self._messages = tf.queue.FIFOQueue(1_000_000, MESSAGE, name="tfps_send")
            self.queue = self._messages.queue_ref  # receives the messages of send ops
            self._no_indices = tf.constant(_NO_BYTES)  # once: an eager constant takes 0.03 ms
        self._transfers: dict[int, Transfer] = {}  # by id
        self._retired: list[int] = []
        self._ids = itertools.count()
        self.transfer = self._transfers.get  # by id; None: its graph is gone
        self.declared = DeclaredBuckets(exchange)
        self.buckets, self.declare_later = self.declared.ids, self.declared.later
        self.alone = exchange.info.embedded  # one worker and no network: exchanged data comes back unchanged
        self._progress = threading.Condition()  # truth: _under_way or _mark has changed
        self.unanswered = Unanswered()  # what graphs have pushed
        self._closing = False
        self._closed = threading.Event()  # no message can be put any more
        self._marks = itertools.count(1)
        self._mark = 0  # the last mark that the pump thread has reached; guarded by _progress
        self._pushed: Counter[int] = Counter()  # rounds of each bucket; guarded by _progress
        self.compresses = False  # whether any gradients may be compressed; see compressing.py
        self.skipped_steps = 0  # see nonfinite.py
        self.used = False  # whether anything ran under a strategy: a step, or a reduction outside of it
        self._rounds = Rounds()
        self._history: dict[int, deque[Round]] = {}  # last steps of updates, by bucket; the update executor writes
        self._shared: dict[type, object] = {}
        self.abandon_capture: Callable[[], None] | None = None  # that a callback records in `fit`
        self._messages_seen = 0  # pump thread writes
        self._exchanged = self._exchanged_now = 0  # exchanges by messages (pump thread), and by `exchange_now`
        self.before_close: list[Callable[[], None]] = []  # called when it begins to close
        self._starting = False  # whether the pump works on a message; what pservers need may block it for long
        self._under_way = 0  # messages whose transfer has not finished; guarded by _progress
        self.gate_watch = GateWatch(exchange, self._activity)
        exchange.add_failure_listener(self._failed)
        self._replies = UpdateExecutor(_on_host)
        self._pump_thread = threading.Thread(target=_on_host, args=(self._pump,), name="tfps-pump", daemon=True)
        self._pump_thread.start()

    def shared(self, kind: type[_T], make: Callable[[], _T]) -> _T:
        """Returns what all strategies of this runtime share of this kind; `make` makes it once."""
        if kind not in self._shared:
            self._shared[kind] = make()
        return cast(_T, self._shared[kind])

    @property
    def exchanges(self) -> int:
        """Number of exchanges that the program has requested so far. Exact on the pump thread."""
        return self._exchanged + self._exchanged_now

    def update_buckets(self) -> int:
        """Returns the number of buckets that deferred updates use."""
        return len({transfer.bucket for transfer in self._transfers.values() if isinstance(transfer, DeferredUpdate)})

    def report(self, stepping: Stepping) -> Report:
        histories = [History.of(self.declared.spec(b), tuple(rounds)) for b, rounds in list(self._history.items())]
        info = self.exchange.info
        sizes, tables = (info.slice_bytes, info.window_bytes), list(self.spans.tables.values())
        report = make_report(histories, info.links(), *sizes, stepping, tables, self.exchange.rank)
        return dataclasses.replace(report, skipped_steps=self.skipped_steps)

    def adopt(self, transfer: Transfer, graph: tf.Graph | None) -> None:
        """Registers `transfer` under a new id until `graph` and all enclosing graphs are gone (None: forever)."""
        transfer.id = next(self._ids)
        self._transfers[transfer.id] = transfer
        graphs = [] if graph is None else tf_private.outer_graphs(graph)
        alive = itertools.count(len(graphs) - 1, -1)
        retired, identity = self._retired, transfer.id

        def gone() -> None:
            if next(alive) == 0:
                retired.append(identity)

        for each in graphs:
            weakref.finalize(each, gone).atexit = False

    def exchange_now(
        self,
        bucket: int,
        payload: Payload | None,
        tick: Callable[[float], object] | None = None,
        step_scalars: bytes = b"",
    ) -> Reply:
        """Pushes and waits for the reply on the calling thread; `tick` periodically gets the received fraction. If it
        returns true the wait begins anew.
        """
        spec = self.declared.spec(bucket)
        with indivisible(self.exchange, spec.name):
            if self.declared.before is not None and not spec.update:
                self.declared.before(spec)
            self._exchanged_now += 1
            begin, step = self.spans.now(), self.next_round(bucket)
            push = functools.partial(self.exchange.push, bucket, payload, step_scalars=step_scalars)
            reply = self.reply_now(bucket, lambda on_reply: push(on_reply=on_reply), tick)
            if self.recorder.enabled:
                self.spans.ready(begin, bucket, spec, step, len(as_bytes(payload) or b""))
                self.spans.waited(begin, self.spans.now(), bucket, spec, step)
            return reply

    def reply_now(
        self, bucket: int, begin: Callable[[OnReply], None], tick: Callable[[float], object] | None = None
    ) -> Reply:
        """Begins what has one reply, about a bucket, and waits for that on the calling thread; see `exchange_now`."""
        done, replies = threading.Event(), list[Reply]()

        def on_reply(reply: Reply) -> None:
            replies.append(reply)
            done.set()

        begin(on_reply)
        deadline_s = time.monotonic() + self.wait_s * 2  # the exchange fails earlier and says why
        while not wait(done, _TICK_S if tick else self.wait_s) and time.monotonic() < deadline_s:
            if self.exchange.paused or (tick is not None and tick(self.exchange.info.progress(bucket))):
                deadline_s = time.monotonic() + self.wait_s * 2
        if not replies:
            raise WaitTimeoutError(
                f"no reply for bucket '{self.declared.spec(bucket).name}' within {self.wait_s * 2:.0f} s"
            )
        if replies[0].error is not None:
            raise replies[0].error
        return replies[0]

    def next_round(self, bucket: int) -> int:
        """Counts a round of `bucket`, and returns its number."""
        with self._progress:
            self._pushed[bucket] += 1
            return self._pushed[bucket] - 1

    def align(self) -> None:
        """Counts rounds as the exchange does, whose numbers are the same on all ranks."""
        with self._progress:
            for bucket in self.declared.numbers():
                self._pushed[bucket] = self.exchange.state.steps(bucket)

    def close(self, *, drain: bool = True, reason: str = "") -> None:
        """Finishes pending exchanges, which other workers need too, ends the threads and leaves the job for `reason`.

        Without `drain`, pending exchanges fail with ClosedError.
        """
        with self._progress:
            if self._closing:
                return
            self._closing = True
        with tf_private.eagerly():  # the collector may call this while a program builds a graph
            for callback in self.before_close:
                callback()
            if drain and not self.settle(PATIENCE_S):
                logger.warning("tfps: leaves once the other workers have finished their last step")
                self.settle(self.wait_s)
            self.exchange.close(reason)
            self._tell_pump(_CLOSED)  # TensorFlow would log a warning for the dequeue that the close cancels
            self._messages.close(cancel_pending_enqueues=True)
            self._closed.set()
            self._pump_thread.join()  # all its pushes are answered now: no reply is still to come
            self._replies.close()
            self.gate_watch.stop()
            self.gate_watch.give_up(ClosedError("the strategy was closed before the gradient had come back"))

    def settle(self, timeout_s: float) -> bool:
        """Waits until all that was sent is applied or the exchange fails; False on timeout. Nothing may be sent."""
        mark = next(self._marks)
        self._tell_pump(_DRAINED, mark)

        def done() -> bool:
            return self.exchange.failure is not None or (self._mark >= mark and self._under_way == 0)

        with self._progress:
            while not (found := self._progress.wait_for(done, timeout_s)) and self.exchange.paused:
                pass
            return found

    def finish(self) -> None:
        """Waits until all that was sent is applied, or the exchange fails; else WaitTimeoutError. See `settle`."""
        timeout_s = 2 * self.wait_s  # the exchange fails earlier and says why
        if not self.settle(timeout_s):
            raise WaitTimeoutError(f"updates under way did not end within {timeout_s:.0f} s")

    def _tell_pump(self, what: int, mark: int = 0) -> None:
        with tf_private.eagerly(), tf.device(HOST):
            self._messages.enqueue([np.int64(what), np.int64(mark), _NO_BYTES, _NO_BYTES, _NO_TIMES, self.queue])

    def _pump(self) -> None:
        dequeue = tf.raw_ops.QueueDequeueV2
        while not (self._closed.is_set() and int(self._messages.size()) == 0):
            identity, graph_run, *message, results = dequeue(handle=self.queue, component_types=MESSAGE)
            if int(identity) == _CLOSED:
                self._closed.wait()
                continue
            if int(identity) == _DRAINED:
                with self._progress:
                    self._mark = int(graph_run)
                    self._progress.notify_all()
                continue
            self._messages_seen += 1
            transfer = self._transfers[int(identity)]
            self._exchanged += transfer.exchanges
            if isinstance(transfer, Pull):
                transfer.waiting.append(results)
            self._starting = True
            try:
                self._start(transfer, graph_run, *message)
            except Exception as error:  # this thread must survive: everything depends on it
                self._break(transfer, error)
            self._starting = False
            del transfer, message
            if self._retired:
                idle = int(self._messages.size()) == 0
                while idle and self._retired:  # their graphs are gone: no more messages can come
                    self._transfers.pop(self._retired.pop(), None)

    def _break(self, transfer: Transfer, error: Exception) -> None:
        """Fails the job and `transfer` because of an error on this rank."""
        own = self._own_error(transfer.spec, error)
        self.exchange.fail(own)
        transfer.fail(own)

    def _own_error(self, spec: BucketSpec, error: Exception) -> TfpsError:
        if isinstance(error, TfpsError):
            return error
        return TfpsError(f"rank {self.exchange.rank}: the exchange of {spec.name} failed: {error}")

    def _start(self, transfer: Transfer, graph_run: tf.Tensor, *message: tf.Tensor) -> None:
        if (collected := transfer.collect(graph_run, *message)) is None:
            return
        number, data, indices = collected
        payload: Payload | None = memoryview(data)
        if transfer.spec.kind == "gather":
            payload = pack_sparse(memoryview(indices), payload)
        elif transfer.spec.nbytes and not data.shape[0]:  # a replica without rows contributes nothing
            payload = data = None
        update = transfer if isinstance(transfer, DeferredUpdate) else None
        if update is not None and self._rounds.skipped(number, update):
            raise stopped_step(self.exchange.rank, transfer.spec.name)
        done = self.spans.done.get(transfer.bucket)
        step = self.push(transfer, payload, graph_run, data)
        if update is not None:
            if self.recorder.enabled:
                self.spans.sent(update, step, number, len(payload or b""), done)
            if update.reports_step:
                self.spans.count()

    def push(
        self, transfer: Transfer, payload: Payload | None, graph_run: int | tf.Tensor = 0, data: tf.Tensor | None = None
    ) -> int:
        """Pushes `payload` (`data` as a tensor) and returns the bucket's round; `transfer.finish` or `fail` follows."""

        def finish(reply: Reply) -> None:
            if reply.error is not None:
                transfer.fail(reply.error)
                return
            begin, transfer.round = self.spans.now(), step
            try:
                if transfer.spec.kind == "sum":
                    summed = data if reply.sum is returned else tensor_of(reply.sum)
                    transfer.finish(graph_run, summed, self._no_indices)
                else:
                    indices, gathered = unpack_sparse((reply.parts or {}).values())
                    transfer.finish(graph_run, tf.constant(gathered), tf.constant(indices))
            except Exception as error:  # neither its readers nor other workers may wait forever
                self._break(transfer, error)
            if isinstance(transfer, DeferredUpdate):
                history = self._history.setdefault(transfer.bucket, deque(maxlen=_HISTORY_STEPS))
                history.append(Round(ready_s, time.monotonic()))
            end = self.spans.now()
            self.spans.done[transfer.bucket] = step, end
            if self.recorder.enabled:
                self.spans.updated(begin, end, transfer, step)

        returned = payload
        if not (self.exchange.info.embedded or self.exchange.joining.pending):  # else it comes back: reuse its tensor
            returned = data = None  # freed once it has been sent
        ready_s = time.monotonic()
        step = self.next_round(transfer.bucket)
        number = self.unanswered.begin()
        answered = functools.partial(self.unanswered.answered, number)
        # Nothing can be more urgent, and its reply is there at once.
        at_once = self.alone and isinstance(transfer, DeferredUpdate) and len(transfer.group) == 1
        self.submit(transfer.bucket, payload, finish, transfer.step_scalars, answered, at_once=at_once)
        return step

    def submit(
        self,
        bucket: int,
        payload: Payload | None,
        finish: OnReply,
        step_scalars: bytes = b"",
        answered: Callable[[], object] = lambda: None,
        *,
        at_once: bool = False,
    ) -> None:
        """Pushes `payload`; calls `answered` when there is a reply, with which the update executor calls `finish`.

        `at_once`: whoever brings the reply does so, without a change of threads.
        """

        def begin(on_reply: OnReply) -> None:
            self.exchange.push(bucket, payload, on_reply, step_scalars=step_scalars)

        self.request(self.declared.spec(bucket), begin, finish, answered, at_once=at_once)

    def request(
        self,
        spec: BucketSpec,
        begin: Callable[[OnReply], None],
        finish: OnReply,
        answered: Callable[[], object] = lambda: None,
        *,
        at_once: bool = False,
    ) -> None:
        """Begins what has one reply, about a bucket; see `submit`."""

        def apply(reply: Reply) -> None:
            try:
                finish(reply)
            except Exception as error:  # other workers may not wait forever
                self.exchange.fail(self._own_error(spec, error))
            with self._progress:
                self._under_way -= 1
                self._progress.notify_all()

        def on_reply(reply: Reply) -> None:
            try:
                answered()
            finally:
                if at_once:
                    apply(reply)
                else:
                    self._replies.add(spec.priority, functools.partial(apply, reply))

        with self._progress:
            self._under_way += 1
        try:
            begin(on_reply)
        except TfpsError:
            answered()
            with self._progress:
                self._under_way -= 1
            raise

    def _activity(self) -> tuple[int, int]:
        """Returns the number of messages in flight and in total."""
        with self._progress:
            return self._under_way + self._starting, self._messages_seen

    def _failed(self, error: TfpsError) -> None:
        with self._progress:
            self._progress.notify_all()
        logger.error("tfps: training stopped: %s", error)


def _on_host(work: Callable[[], None]) -> None:
    with tf.device(HOST):
        work()
