"""Worker: trains while workers die, stop, leave and join, and notes what it sees as it goes.

storm.py FOLDER TASK     TASK: what this process is to do and to suffer, as JSON of a `Task`
storm.py FOLDER plain    plain Keras, without the rows that the notes say were lost
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import faults
import keras
import lossy
import numpy as np
import tensorflow as tf
import training
from jobs import poll

import tfps
from tfps.input.batch_agreement import BatchAgreement, IteratorProgress
from tfps.recovery.pushing import Pushing
from tfps.types import Argument, Json, Model
from tfps.worker.bucket import Push, PushedBucket
from tfps.worker.worker import Worker

STEPS = 6  # of an epoch
FIRST_STAGE = 2  # epochs of the first call of `fit`, if there are two
EVERYBODY = {0, 1, 2}


class Task(NamedTuple):
    """What a process is to do, and what happens to it."""

    kind: str
    number: int  # of the processes that have had its rank
    not_before: int  # the epoch at whose end it may ask to join, if others had its rank before
    faults: list[tuple[int, faults.Point, int]]  # see faults.fail_at
    due: dict[str, list[int]]  # the ranks that may join at the end of an epoch, for which the others wait
    cut: bool  # what stops this process cuts off its host instead
    moves: list[tuple[int, int, str, int, int]]  # of pservers, after a step of an epoch: the others make them


class Story(keras.callbacks.Callback):
    """Tells where the training is, and waits at the ends of epochs for those that are to join."""

    def __init__(self, folder: Path, strategy: tfps.Strategy, task: Task) -> None:
        super().__init__()
        self._folder, self._strategy, self._due, self._moves = folder, strategy, task.due, task.moves
        self._staged = "staged" in task.kind

    def on_train_begin(self, logs: Argument = None) -> None:
        if self._strategy.extended.training.training > 1:
            self._wait(FIRST_STAGE - 1)

    def on_epoch_begin(self, epoch: int, logs: Argument = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Argument = None) -> None:
        for index, (epoch, step, *_) in enumerate(self._moves if self._strategy.rank == 0 else ()):
            if (self._epoch, batch) == (epoch, step):
                (self._folder / f"move{index}").touch()  # once, though this process may be stopped anywhere
                poll((self._folder / f"moved{index}").exists)

    def on_epoch_end(self, epoch: int, logs: Argument = None) -> None:
        (self._folder / f"end{epoch}").touch()
        if not self._staged or epoch != FIRST_STAGE - 1:  # else they join in the next call
            self._wait(epoch)

    def _wait(self, epoch: int) -> None:
        due, extended = set(self._due.get(str(epoch), ())), self._strategy.extended
        joining = extended.exchange.joining
        if due and self._strategy.rank == 0 and not joining.pending:
            poll(lambda: due.issubset(joining.joiners(extended.training.training)))


def note(folder: Path, rank: int, number: int) -> None:
    """From now on writes down who divides each batch, and whose pushes are in each slice of a gradient."""
    notes = (folder / f"rank{rank}-{number}.jsonl").open("a", buffering=1)  # a line is safe once it is written
    decision, take = BatchAgreement._decision, PushedBucket.take

    def noted_decision(
        self: BatchAgreement, progress: Argument, position: int, codes: Argument, ranks: Argument
    ) -> Argument:
        found = decision(self, progress, position, codes, ranks)
        pending = self.runtime.exchange.joining.pending
        is_one = position < STEPS  # a rank that has left an epoch does not deny that it has one batch more
        if found.all_have and is_one and not pending:  # what a joining worker tries out is its own business
            notes.write(json.dumps(["batch", progress.place, position, list(ranks)]) + "\n")
        return found

    def noted_take(self: PushedBucket, pserver: int, push: Push, header: Argument, *rest: Argument) -> Argument:
        found, ranks = take(self, pserver, push, header, *rest), rest[-1]
        if faults.is_gradient(self):
            where = self.cutting.slices[header.index]
            slice_ = [self.spec.name, list(self.spec.names), where.offset, where.nbytes]
            line = json.dumps(["slice", push.step, *slice_, sorted(ranks)]) + "\n"
            came[id(self), push.step].append(line)
        return found

    def noted_reply(self: Pushing, number: int, worker: Worker, push: Argument, reply: Argument) -> None:
        before = self._core.buckets[number].replies
        take_reply(self, number, worker, push, reply)
        if self._core.buckets[number].replies == before + 1:  # what a lost pserver has left unfinished does not count
            notes.writelines(came.pop((id(worker._buckets[number]), before), ()))

    came: dict[tuple[int, int], list[str]] = defaultdict(list)
    take_reply = Pushing._take
    BatchAgreement._decision = noted_decision  # type: ignore[method-assign]
    PushedBucket.take = noted_take  # type: ignore[method-assign,assignment]
    Pushing._take = noted_reply  # type: ignore[method-assign]


def end_late() -> None:
    """The end of the first epoch's data is known only when somebody waits for it, as on a busy machine."""
    ended, settle, waits, once = IteratorProgress.ended, BatchAgreement.settle, threading.Event(), iter([True])

    def late(self: IteratorProgress, error: str) -> None:
        if next(once, False):
            waits.wait(25.0)
        ended(self, error)

    def noted(self: BatchAgreement, timeout_s: float) -> bool:
        waits.set()
        return settle(self, timeout_s)

    IteratorProgress.ended, BatchAgreement.settle = late, noted  # type: ignore[method-assign]


def cut(folder: Path) -> None:
    """Asks the test to cut off this process' host, and waits until it is; it is plugged in again when `out` is gone."""
    (folder / f"cut{os.getpid()}").touch()
    poll((folder / f"out{os.getpid()}").exists)


def compiled(kind: str) -> Model:
    model = lossy.build_with_table() if "table" in kind else lossy.build()
    model.compile(lossy.OPTIMIZERS["adam" if "adam" in kind else "sgd"](), lossy.LOSS, metrics=["accuracy"])
    return model


def weights_of(model: Model) -> list[np.ndarray]:
    """Those of its table last: its rows."""
    rows = lossy.rows_of(model)
    return [*model.layers[-1].get_weights(), *rows] if rows else model.get_weights()


def train(folder: Path, task: Task) -> None:
    rank, epochs = int(os.environ["TFPS_RANK"]), int(os.environ["EPOCHS"])
    note(folder, rank, task.number)
    if "late" in task.kind and task.number == 0:
        end_late()
    callbacks = [
        faults.fail_at(step, point, functools.partial(cut, folder) if task.cut and how == signal.SIGSTOP else how)
        for step, point, how in task.faults
    ]
    if task.number:  # no earlier: others might take it in the middle of an epoch, and wait at the end in vain
        poll((folder / f"end{task.not_before}").exists)
    strategy = tfps.Strategy()
    with strategy.scope():
        model = compiled(task.kind)
    x, y = training.digits(lossy.SAMPLES)
    more: dict[str, Argument] = {"epochs": epochs, "verbose": 0}
    more["callbacks"] = [Story(folder, strategy, task), *callbacks]
    if "validation" in task.kind:
        more |= {"validation_data": training.digits(60), "validation_batch_size": 13}
    arrays: dict[str, Argument] = {"x": x, "y": y, "batch_size": lossy.BATCH, "shuffle": False}
    data = arrays if "arrays" in task.kind else {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(lossy.BATCH)}
    if "staged" in task.kind:
        model.fit(**data, **{**more, "epochs": FIRST_STAGE})
        more["initial_epoch"] = FIRST_STAGE
    history = model.fit(**data, **more).history
    found = {"weights": weights_of(model), "ranks": strategy._runtime.exchange.places, "history": history}
    strategy.close()
    (folder / f"rank{rank}-{task.number}.pickle").write_bytes(pickle.dumps(found))


def noted(folder: Path) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, str, int, int], list[int]], Json]:
    """What the processes have seen, which must be the same for all.

    By batch (iterator, position): who divides it. By slice (step, bucket, offset, bytes): whose pushes are in it. By
    bucket: the names of its variables. Who ends together with a pserver may have seen a round that the others then do
    without it: that is its last one, and theirs counts.
    """
    batches: dict[tuple[int, int], list[int]] = {}
    slices: dict[tuple[int, str, int, int], list[int]] = {}
    names: dict[str, list[str]] = {}
    files = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))]
    files.sort(key=_last_step, reverse=True)  # who has seen most comes first
    pservers_end, end = any(folder.glob("moved*")), _last_step(files[0])
    for said in files:
        last = _last_step(said)
        for what, *each in said:
            if what == "batch":
                place, position, ranks = each
                before = batches.setdefault((place, position), ranks)
            else:
                step, bucket, names[bucket], offset, nbytes, ranks = each
                before = slices.setdefault((step, bucket, offset, nbytes), ranks)
                if pservers_end and step == last < end:
                    continue
            assert before == ranks, f"somebody has {ranks} for {each}, who has seen more has {before}"
    return batches, slices, names


def _last_step(said: list[Json]) -> int:
    """Of the slices in what a process has noted."""
    return max((each[1] for each in said if each[0] == "slice"), default=-1)


def plain(folder: Path) -> None:
    batches, slices, names = noted(folder)
    kind = (folder / "kind").read_text()
    x, y = training.digits(lossy.SAMPLES)
    steps = [batch for _ in range(lossy.EPOCHS) for batch in lossy.batches(x, y)]
    of_bucket: dict[tuple[int, str], list[tuple[int, int, list[int]]]] = defaultdict(list)
    for (step, bucket, offset, nbytes), ranks in slices.items():
        of_bucket[step, bucket].append((offset, nbytes, ranks))
    for step in range(len(steps)):
        for bucket in names:  # each byte once: no slice is missing, none comes twice
            ends = [0]
            for offset, nbytes, _ in sorted(of_bucket[step, bucket]):
                assert offset == ends[-1], (step, bucket, of_bucket[step, bucket])
                ends.append(offset + nbytes)
            assert ends[-1] == max(o + n for s, b, o, n in slices if b == bucket)

    def lacking(number: int, each: int, bucket: str) -> Iterator[tuple[int, int]]:
        return ((offset, nbytes) for offset, nbytes, ranks in of_bucket[number, bucket] if each not in ranks)

    divided = [ranks for _, ranks in sorted(batches.items())]
    if "table" in kind:  # nothing is missing
        model = compiled(kind)
        model.fit(x, y, batch_size=lossy.BATCH, epochs=lossy.EPOCHS, shuffle=False, verbose=0)
        weights = weights_of(model)
    else:
        weights = lossy.without("adam" if "adam" in kind else "sgd", steps, divided, names, lacking)
    (folder / "plain.pickle").write_bytes(pickle.dumps(weights))
    assert {step for step, *_ in slices} == set(range(len(steps)))
    lost = {(step, rank) for (step, *_), ranks in slices.items() for rank in divided[step] if rank not in ranks}
    (folder / "summary.json").write_text(json.dumps({"divided": divided, "lost": sorted(lost)}))


if __name__ == "__main__":
    if sys.argv[2] == "plain":
        plain(Path(sys.argv[1]))
    else:
        train(Path(sys.argv[1]), Task(*json.loads(sys.argv[2])))
