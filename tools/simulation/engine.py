"""The discrete events: computing, queues, messages, sums, gates.

Time starts with the backward pass of the first step, at all workers. That moment, the turn from forward to backward, is
the one at which nothing can be under way: the forward pass has waited for all of the last step, and this step's
gradients do not exist yet. So a step is measured from turn to turn.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tools.model_profiles import Profile
from tools.simulation.plan import Piece, Plan, link_bytes, make_plan
from tools.simulation.rates import Array, ExactRates, Rates, SymmetricRates
from tools.simulation.settings import Cluster, Result, Settings, Span

_DONE = 1e-12  # of a message: what may be left of it through rounding
_SAME_S = 1e-12  # events so close together are one moment
_MAX_KNOWN_SHARES = 4096
_PUSH, _REPLY = 0, 1


@dataclass(slots=True)
class _Queue:
    """One direction of a stream: what waits, and the bytes on the way as far as the sender knows (tfps.send_queue)."""

    direction: int
    worker: int
    pserver: int
    latency_s: float
    heap: list[tuple[int, int, Piece]] = field(default_factory=list)
    current: Piece | None = None
    started_s: float = 0.0
    in_flight: int = 0
    unreceipted: int = 0


@dataclass(slots=True)
class _Worker:
    """A worker's state: `missing[b]` pieces of bucket b until its gate opens, `closed` gates."""

    number: int
    missing: list[int]
    step: int = 0
    factor: float = 1.0
    layer: int = 0  # of the forward pass, also while it waits
    waiting_since: float | None = None
    applied_s: float = 0.0  # when the thread that updates is free
    closed: set[int] = field(default_factory=set)
    turns: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # of each step
    computes: list[float] = field(default_factory=list)


def simulate(profile: Profile, cluster: Cluster, settings: Settings | None = None) -> Result:
    """Trains for `settings.warmup_steps` + `settings.steps` steps. Equal arguments give equal results.

    Raises:
        ConfigError: there are too many workers and pservers to simulate each of them, as jitter needs it.
    """
    return _Simulation(profile, cluster, settings or Settings()).run()


class _Simulation:
    def __init__(self, profile: Profile, cluster: Cluster, settings: Settings) -> None:
        self._profile, self._cluster, self._settings = profile, cluster, settings
        self._exact = settings.exact(cluster)
        self._plan: Plan = make_plan(profile, cluster, settings)
        self._buckets_of = [
            [b for b, members in enumerate(self._plan.layers) if layer in members]
            for layer in range(len(profile.layers))
        ]
        if settings.barriers:
            self._buckets_of[0] = list(range(len(self._plan.layers)))
        self._by_priority = settings.policy == "priority"
        self._window = float("inf") if settings.barriers else settings.window_bytes
        count = cluster.workers if self._exact else 1
        shape = (2, count, cluster.pservers)
        self._workers = [_Worker(number, [0] * len(self._plan.layers)) for number in range(count)]
        self._randoms = [random.Random(f"{settings.seed} {number}") for number in range(count)]
        self._rates: Rates = ExactRates(cluster) if self._exact else SymmetricRates(cluster)
        self._known_shares: dict[bytes, Array] = {}
        self._queues = [
            _Queue(direction, worker, pserver, self._latency(worker, pserver))
            for direction, worker, pserver in itertools.product(*map(range, shape))
        ]
        self._left = np.full(len(self._queues), np.inf)  # bytes of each queue's current message
        self._eps = np.zeros(len(self._queues))
        self._cost = np.zeros(shape)
        self._active = np.zeros(shape, bool)
        self._speed: Array = np.ones(len(self._queues))
        self._changed = True
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._arrived: dict[int, int] = {}  # pushes of a piece that its pserver has
        self._held: list[Piece] = []  # sums that the send barrier keeps back
        self._pieces = sum(map(len, self._plan.pieces))
        self._wire_s = 0.0
        self._wire_at_turn: list[float] = []
        self._spans: list[Span] = []

    def run(self) -> Result:
        """All events until the last counted step's turn."""
        last = self._settings.warmup_steps + self._settings.steps
        for worker in self._workers:
            self._turn(worker)
        while any(len(worker.turns) <= last for worker in self._workers):
            self._advance()
            while self._events and self._events[0][0] <= self._now + _SAME_S:
                heapq.heappop(self._events)[2]()
        return self._result()

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    # Messages under way

    def _advance(self) -> None:
        """To the next event or the end of the next message, whichever comes first."""
        if self._changed:
            self._speed = self._shares()
            self._changed = False
        durations = self._left / self._speed
        duration = float(durations.min())
        until = self._events[0][0] if self._events else float("inf")
        busy = bool(self._active[:, 0, :].any())
        if self._now + duration < until:
            ended = np.flatnonzero(self._left - self._speed * duration <= self._eps)
        else:
            duration = max(until - self._now, 0.0)
            ended = np.flatnonzero(self._left - self._speed * duration <= self._eps)
        self._now += duration
        self._left -= self._speed * duration
        if busy:
            self._wire_s += duration
        for number in ended:
            self._sent(int(number))

    def _shares(self) -> Array:
        key = self._active.tobytes() + self._cost.tobytes()
        if (known := self._known_shares.get(key)) is None:
            if len(self._known_shares) >= _MAX_KNOWN_SHARES:
                self._known_shares.clear()
            known = self._known_shares[key] = self._rates(self._active, self._cost).reshape(-1)
        return known

    def _latency(self, worker: int, pserver: int) -> float:
        cluster = self._cluster
        local = cluster.pserver_host(pserver) == worker if self._exact else not cluster.remote_workers(pserver)
        return 0.0 if local else cluster.latency_s

    def _put(self, number: int, piece: Piece) -> None:
        priority = piece.bucket if self._by_priority else 0
        heapq.heappush(self._queues[number].heap, (priority, next(self._numbers), piece))

    def _take(self, number: int) -> None:
        """Begins with the next message if the window allows it."""
        queue = self._queues[number]
        if queue.current is not None or not queue.heap or queue.in_flight >= self._window:
            return
        piece = heapq.heappop(queue.heap)[2]
        queue.current, queue.started_s = piece, self._now
        queue.in_flight += piece.nbytes
        self._left[number], self._eps[number] = piece.nbytes, piece.nbytes * _DONE
        self._active.reshape(-1)[number] = True
        self._cost.reshape(-1)[number] = self._cluster.end_s(piece.nbytes) / piece.nbytes
        self._changed = True

    def _sent(self, number: int) -> None:
        queue = self._queues[number]
        piece = queue.current
        if piece is None:
            raise RuntimeError(f"stream {number} has ended a message without one")
        queue.current = None
        self._left[number] = np.inf
        self._active.reshape(-1)[number] = False
        self._cost.reshape(-1)[number] = 0.0
        self._changed = True
        self._note_message(queue, piece)
        self._at(self._now + self._delay(queue, piece), lambda: self._received(number, piece))
        self._take(number)

    def _delay(self, queue: _Queue, piece: Piece) -> float:
        """From the end of a message's longest stage to its arrival.

        Sender, wire and receiver work on successive messages at once, which the shares have accounted for; one message
        passes them one after the other.
        """
        end_s = self._cluster.end_s(piece.nbytes)
        wire_s = piece.nbytes / self._cluster.bytes_per_s if self._is_wired(queue) else 0.0
        return queue.latency_s + 2 * end_s + wire_s - max(end_s, wire_s)

    def _is_wired(self, queue: _Queue) -> bool:
        if self._exact:
            return self._cluster.pserver_host(queue.pserver) != queue.worker
        return self._cluster.remote_workers(queue.pserver) > 0

    def _received(self, number: int, piece: Piece) -> None:
        queue = self._queues[number]
        queue.unreceipted += piece.nbytes
        if self._window < float("inf") and 2 * queue.unreceipted >= self._window:
            nbytes, queue.unreceipted = queue.unreceipted, 0
            self._at(self._now + queue.latency_s, lambda: self._receipt(number, nbytes))
        if queue.direction == _PUSH:
            self._push_arrived(piece)
        else:
            self._reply_arrived(self._workers[queue.worker], piece)

    def _receipt(self, number: int, nbytes: int) -> None:
        self._queues[number].in_flight -= nbytes
        self._take(number)

    # Pservers

    def _push_arrived(self, piece: Piece) -> None:
        arrived = self._arrived[piece.number] = self._arrived.get(piece.number, 0) + 1
        if arrived < len(self._workers):
            return
        del self._arrived[piece.number]
        self._held.append(piece)
        if self._settings.policy == "overlap_send_barrier" and len(self._held) < self._pieces:
            return
        held, self._held = self._held, []
        for summed in held:
            for worker in self._workers:
                self._put(self._number(_REPLY, worker.number, summed.owner), summed)
        for owner in sorted({summed.owner for summed in held}):
            for worker in self._workers:
                self._take(self._number(_REPLY, worker.number, owner))

    def _number(self, direction: int, worker: int, pserver: int) -> int:
        return (direction * len(self._workers) + worker) * self._cluster.pservers + pserver

    # Workers

    def _turn(self, worker: _Worker) -> None:
        """Forward is over; backward begins."""
        worker.turns.append(self._now)
        if worker.number == 0:
            self._wire_at_turn.append(self._wire_s)
        worker.waits.append(0.0)
        worker.computes.append(0.0)
        worker.step = len(worker.turns) - 1
        jitter = self._settings.jitter
        worker.factor = max(1 + jitter * self._randoms[worker.number].gauss(0, 1), 0.0) if jitter else 1.0
        worker.closed = set(range(len(self._plan.layers)))
        at, release = self._now, {members[0]: b for b, members in enumerate(self._plan.layers)}
        due = []
        for number in reversed(range(len(self._profile.layers))):
            layer = self._profile.layers[number]
            end = at + layer.backward_s * worker.factor
            worker.computes[-1] += layer.backward_s * worker.factor
            self._note_compute(worker, f"backward {layer.name}", at, end)
            at = end
            if number in release:
                due.append((end, release[number]))
        for when, bucket in due:
            when = at if self._settings.policy == "barrier" else when
            self._at(when, lambda bucket=bucket: self._push(worker, bucket))  # type: ignore[misc]
        self._at(at, lambda: self._forward(worker, 0))

    def _push(self, worker: _Worker, bucket: int) -> None:
        pieces = self._plan.pieces[bucket]
        worker.missing[bucket] = len(pieces)
        for piece in pieces:
            self._put(self._number(_PUSH, worker.number, piece.owner), piece)
        for owner in sorted({piece.owner for piece in pieces}):
            self._take(self._number(_PUSH, worker.number, owner))

    def _reply_arrived(self, worker: _Worker, piece: Piece) -> None:
        worker.missing[piece.bucket] -= 1
        if worker.missing[piece.bucket]:
            return
        nbytes = sum(part.nbytes for part in self._plan.pieces[piece.bucket])
        worker.applied_s = max(worker.applied_s, self._now) + self._cluster.apply_gb_s * nbytes / 1e9
        if worker.applied_s > self._now:
            self._at(worker.applied_s, lambda: self._open(worker, piece.bucket))
        else:
            self._open(worker, piece.bucket)

    def _open(self, worker: _Worker, bucket: int) -> None:
        worker.closed.discard(bucket)
        if worker.waiting_since is not None:
            self._forward(worker, worker.layer)

    def _forward(self, worker: _Worker, number: int) -> None:
        """Begins with a layer, or waits at its gate."""
        if number == len(self._profile.layers):
            self._turn(worker)
            return
        worker.layer = number
        if any(bucket in worker.closed for bucket in self._buckets_of[number]):
            if worker.waiting_since is None:
                worker.waiting_since = self._now
            return
        layer = self._profile.layers[number]
        if worker.waiting_since is not None:
            worker.waits[-1] += self._now - worker.waiting_since
            self._note_compute(worker, f"wait for {layer.name}", worker.waiting_since, self._now)
            worker.waiting_since = None
        end = self._now + layer.forward_s * worker.factor
        worker.computes[-1] += layer.forward_s * worker.factor
        self._note_compute(worker, f"forward {layer.name}", self._now, end)
        self._at(end, lambda: self._forward(worker, number + 1))

    # What comes out

    def _note_compute(self, worker: _Worker, name: str, start: float, end: float) -> None:
        if self._settings.trace and end > start:
            self._spans.append(Span(f"worker {worker.number}", "compute", name, start, end, {"step": worker.step}))

    def _note_message(self, queue: _Queue, piece: Piece) -> None:
        if not self._settings.trace:
            return
        if queue.direction == _PUSH:
            process, track, verb = f"worker {queue.worker}", f"to pserver {queue.pserver}", "push"
        else:
            process, track, verb = f"pserver {queue.pserver}", f"to worker {queue.worker}", "reply"
        args = {
            "step": self._workers[queue.worker].step,
            "bucket": piece.bucket,
            "slice": piece.index,
            "priority": piece.bucket,
            "nbytes": piece.nbytes,
        }
        name = f"{verb} {piece.bucket}.{piece.index}"
        self._spans.append(Span(process, track, name, queue.started_s, self._now, args))

    def _result(self) -> Result:
        first, count = self._settings.warmup_steps, self._settings.steps
        # The last worker's turn: then all that earlier steps have sent has arrived.
        turns = [max(worker.turns[step] for worker in self._workers) for step in range(first + count + 1)]
        times = [end - start for start, end in itertools.pairwise(turns[first:])]
        step_s = (turns[-1] - turns[first]) / count

        def mean(values: list[list[float]]) -> float:
            return sum(sum(own[first : first + count]) for own in values) / (count * len(values))

        wait_s = mean([worker.waits for worker in self._workers])
        wire_s = (self._wire_at_turn[first + count] - self._wire_at_turn[first]) / count
        tx, rx = link_bytes(self._cluster, self._plan.bytes_per_pserver(self._cluster.pservers))
        capacity = step_s * self._cluster.bytes_per_s
        return Result(
            step_s=step_s,
            step_times_s=tuple(times),
            compute_s=mean([worker.computes for worker in self._workers]),
            wait_s=wait_s,
            wire_s=wire_s,
            overlap=max(0.0, 1 - wait_s / wire_s) if wire_s else 1.0,
            tx_use=tuple(nbytes / capacity for nbytes in tx),
            rx_use=tuple(nbytes / capacity for nbytes in rx),
            exact=self._exact,
            spans=tuple(self._spans),
        )
