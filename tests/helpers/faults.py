"""Ends this process, a worker of a job, at a chosen point of a chosen step: `fail_at`."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import keras
from jobs import poll

from tfps import collectives
from tfps.keras_hooks import joining
from tfps.protos import tfps_pb2 as pb
from tfps.runtime.transfers import DeferredUpdate
from tfps.strategy.extended import Extended
from tfps.types import Argument, Function, Structure
from tfps.wire.control import Pserver
from tfps.wire.send_queue import Outgoing
from tfps.worker.bucket import Push, PushedBucket
from tfps.worker.client import PserverClient
from tfps.worker.pushes import Pushes
from tfps.worker.worker import Worker

Point = Literal[
    "before a push",
    "between slices",
    "after the last push",
    "in an update",
    "in an announcement",
    "in a declaration",
    "in the exchange of initial values",
    "in an evaluation",
    "in a save",
    "in an admission",
    "in a hand-over",
    "while it asks to join",
]
POINTS: tuple[Point, ...] = Point.__args__  # type: ignore[attr-defined]


def fail_at(
    step: int, point: Point, how: int | Callable[[], None] = signal.SIGKILL, pids: Sequence[int] = ()
) -> keras.callbacks.Callback:
    """Makes this process get the signal `how` there, or those with `pids`; returns a callback that `fit` may need.

    Or calls `how`.

    `step` counts from 0: of a gradient, of batches that are announced, of declarations (number 0 is joining), of
    batches of an evaluation, of saves, of calls that admit others (one for each pserver), of hand-overs to those who
    join (even: at the beginning, odd: when the position in the training has been told), or of a joiner's questions.
    """

    once, handing = iter([None]), threading.Event()

    def end() -> None:
        if next(once, "ended") == "ended":
            return
        if callable(how):
            how()
            return
        for pid in pids or [os.getpid()]:
            os.kill(pid, how)
        if how == signal.SIGKILL and not pids:
            threading.Event().wait()  # it is on its way

    at_call = functools.partial(_at_call, step=step, end=end)
    callback = keras.callbacks.Callback()
    if point == "in an evaluation":
        callback.on_test_batch_begin = lambda batch, logs=None: end() if batch == step else None
    elif point == "in an update":
        _replace(
            DeferredUpdate, "finish", lambda original, self, *rest: _if(self.round == step, end, original, self, *rest)
        )
    elif point == "in an announcement":
        at_call(collectives.AllGather, "push", only=lambda self, *_: self.spec.name == "batches")
    elif point == "in a declaration":
        at_call(PserverClient, "declare")
    elif point == "in the exchange of initial values":
        at_call(collectives.FixedBroadcast, "__call__")
    elif point == "in a save":
        at_call(Path, "replace", only=lambda path, *_: path.name.endswith("model.keras"))
    elif point == "in an admission":
        at_call(Pserver, "call", only=lambda _, name="", *rest: name == "Admit")
    elif point == "in a hand-over":
        if step % 2 == 0:
            _at_call(joining, "_hand_over", step=step // 2, end=end)
        else:  # variables of models are exchanged before, too
            _at_call(joining, "_hand_over", step=step // 2, end=handing.set)
            _at_call(Extended, "take_from_first_rank", step=0, end=end, only=lambda *_: handing.is_set())
    elif point == "while it asks to join":
        at_call(PserverClient, "ready")
    elif pids:
        _replace(PushedBucket, "frames", functools.partial(_while_pushing, step=step, point=point, end=end))
    else:
        _at_pushes(step, point, end)
    return callback


def _while_pushing(
    original: Function,
    bucket: PushedBucket,
    number: int,
    push: Push,
    *rest: Argument,
    step: int,
    point: Point,
    end: Callable[[], None],
) -> Iterator[tuple[int, Outgoing]]:
    """Calls `end` before or after the first slice of a step, or after the last one, and goes on."""
    here = is_gradient(bucket) and push.step == step
    for index, each in enumerate(original(bucket, number, push, *rest)):
        if here and index == int(point == "between slices") and point != "after the last push":
            end()
        yield each
    if here and point == "after the last push":
        end()


def _if(now: bool, end: Callable[[], None], original: Function, *arguments: Argument) -> Structure:
    if now:
        end()
    return original(*arguments)


def _replace(owner: Argument, name: str, instead: Function) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: instead(original, *arguments, **named))


def _at_call(
    owner: Argument, name: str, *, step: int, end: Callable[[], None], only: Callable[..., bool] | None = None
) -> None:
    calls = iter(range(step + 1))

    def instead(original: Function, *arguments: Argument, **named: Argument) -> Structure:
        if (only is None or only(*arguments)) and next(calls, None) == step:
            end()
        return original(*arguments, **named)

    _replace(owner, name, instead)


def is_gradient(bucket: PushedBucket) -> bool:
    return bucket.spec.kind == "sum" and not bucket.spec.occasional


def _at_pushes(step: int, point: Point, end: Callable[[], None]) -> None:
    """Ends before, between or after the slices of gradients of a step, when the pservers have those that were sent."""
    sent = 0
    made: list[Worker] = []  # all that this process has had
    workers: list[Worker] = []  # the one that it has now
    ending, ended = threading.Event(), threading.Event()

    def frames(
        original: Function, self: PushedBucket, number: int, push: Push, *rest: Argument
    ) -> Iterator[tuple[int, Outgoing]]:
        nonlocal sent
        here = is_gradient(self) and push.step == step
        if here and point == "before a push":
            end()
        if point == "after the last push" and ending.is_set() and is_gradient(self):
            ended.wait()  # it would have come later
        for each in original(self, number, push, *rest):
            if here and point == "between slices" and ending.is_set():
                continue  # it would have come later
            sent += 1
            yield each
            if here and point == "between slices":
                ending.set()

    def join(original: Function, self: Worker, *arguments: Argument) -> None:
        made.append(self)
        original(self, *arguments)

    def start_next(original: Function, self: Pushes, number: int, bucket: PushedBucket) -> None:
        nonlocal sent
        if not workers or workers[0].pushes is not self:  # it has other pservers now
            workers[:], sent = [each for each in made if each.pushes is self], 0
        original(self, number, bucket)
        gradients = [each for each in self.buckets if is_gradient(each)]
        if point == "after the last push" and gradients and all(each.steps > step for each in gradients):
            ending.set()
            ended.wait()  # else it might push a further step meanwhile; one that wakes up goes on

    def watch() -> None:
        ending.wait()
        (worker,) = workers

        def arrived() -> bool:
            if worker.failure is not None:  # a pserver is gone: nothing more arrives
                return True
            said = [p.call("Status", pb.StatusRequest(details=True), 5.0) for p in worker._pservers]
            return sum(m.received_slices for s in said for m in s.members if m.rank == worker.rank) == sent

        poll(arrived)
        end()
        ended.set()

    _replace(PushedBucket, "frames", frames)
    _replace(Worker, "_join", join)
    _replace(Pushes, "start_next", start_next)
    if point != "before a push":
        threading.Thread(target=watch, daemon=True).start()
