"""What the parts of a `Job` share on one pserver: its members, its slices, the queues to workers, and how it ends.

Tested in tests/pserver/test_job.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from tfps.config import Config
from tfps.errors import PserverLostError, TfpsError, WorkerLostError
from tfps.exchange.interface import BATCHES
from tfps.membership.members import State
from tfps.membership.roster import Roster
from tfps.membership.view import View
from tfps.pserver.counters import ErrorCounts
from tfps.pserver.recording import Recording
from tfps.pserver.shard import Shard
from tfps.pserver.slices import Answer, Late
from tfps.trace.recorder import Recorder
from tfps.wire import frames
from tfps.wire.control import PULL
from tfps.wire.frames import Header
from tfps.wire.send_queue import Encoding, Outgoing, SendQueue, put_in_all
from tfps.wire.shared_memory import Attached

logger = logging.getLogger("tfps")
EVERY_RANK = "every rank must call fit, evaluate and the like; `rank == 0` is for printing and saving"
_SHOWN = 1000  # characters of an error in the log


class JobState:
    """Any thread. A failure ends the job for all members: calls raise it from then on."""

    def __init__(
        self,
        view: View,
        name: str,
        recorder: Recorder,
        errors: ErrorCounts,
        max_memory: int,
        tell: Callable[[str], object],
    ) -> None:
        self.recorder, self.errors, self.max_memory, self.tell = recorder, errors, max_memory, tell
        self.recording = Recording(recorder)
        self.changed = threading.Condition()  # guards all below; notified when a waiting declare may go on
        self.roster = Roster(view, name)
        self.shard = Shard(Config(), view, 0, recorder, max_memory)  # replaced when the first worker joins
        self.queues: dict[int, SendQueue] = {}
        self.memory: dict[int, Attached] = {}  # of the members that share theirs
        self.ends: dict[int, Callable[[], object]] = {}  # end the push streams
        self.failure: TfpsError | None = None
        self.some_departed = False  # whether any member has departed

    @property
    def over(self) -> bool:
        """Whether it has failed or all its members have left."""
        with self.changed:
            return self.failure is not None or self.roster.over

    def fail(self, error: TfpsError) -> None:
        """Fails the job: every member's streams end with `error`. Only the first error counts."""
        with self.changed:
            if self.failure is not None:
                return
            self.failure = error
            self.errors.add("job", error)
            if self.roster.members and not self.roster.over:
                moves = self.shard.config.outlives_pservers and isinstance(error, PserverLostError)
                what = "ends here, to go on with other pservers" if moves else f"has failed: {type(error).__name__}"
                self.log(f"{what}: {error}")
                self.tell("job moves" if moves else "job fails")
            self.shard.buckets = []
            self.changed.notify_all()
        self.recording.fail(error)
        for queue in list(self.queues.values()):
            queue.fail(error)
        self.end_lone_streams()

    def end_lone_streams(self) -> None:
        """Ends push streams without a pull stream, of members that have departed or whose job has failed."""
        with self.changed:
            over = [
                rank
                for rank in self.ends
                if PULL not in (member := self.roster.members[rank]).streams
                and (self.failure is not None or member.state is State.DEPARTED)
            ]
            ends = [self.ends.pop(rank) for rank in over]
        for end in ends:
            end()

    def log(self, what: str) -> None:
        names = (member.applicant.job for member in self.roster.members.values())
        name = next((f"job {name!r}" for name in names if name), "job")
        line = f"{name} {what}"
        logger.info("%s", "".join(each if each.isprintable() else " " for each in line[:_SHOWN]))

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def fail_left(self, late: Late, bucket: str) -> None:
        member = self.roster.members[late.rank]
        why = f"its data ended earlier or its script ended; give every worker the same number of batches: {EVERY_RANK}"
        if member.reason:
            why = f"it ended with {member.reason}"
        what = " (how many batches each rank has left)" if bucket == BATCHES else ""
        which = f"step {late.step} of bucket '{bucket}'{what}, for which others wait"
        self.fail(WorkerLostError(f"{member} left before {which}: {why}"))

    def announce(self, header: Header, payload: bytes = b"") -> None:
        """Sends a frame outside the windows to all workers."""
        frame = frames.encode(header, payload)
        for queue in self.queues.values():
            queue.put_urgent(frame)

    def send(self, answers: Collection[Answer]) -> None:
        for ranks, header, payload, target in answers:
            queues = [self.queues[rank] for rank in ranks if rank in self.queues]
            if not queues:
                continue  # lost meanwhile
            if isinstance(payload, Encoding):
                for queue in queues:
                    queue.put([Outgoing(header, payload.nbytes, encoding=payload)])
            elif target is not None:
                queues[0].put([Outgoing(header, target.place.nbytes, payload, target=target)])
            elif payload is not None:
                put_in_all(queues, [(header, payload)])

    def tell_set(self, number: int, ranks: Collection[int]) -> None:
        """Tells all workers what a number in replies means: called within a slice's lock, so it takes no other."""
        frame = frames.encode_ranks(number, ranks)
        for queue in list(self.queues.values()):
            queue.put_urgent(frame)
