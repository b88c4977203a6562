"""The thread that goes on with other pservers: workers meet, restore what pservers keep, and begin the job anew.

See tfps/membership/regrouping.py for what they agree on.

Tested in tests/worker/test_lost_pservers.py, tests/worker/test_lost_meanwhile.py and
tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tfps.errors import ClosedError, ConnectError, PserverLostError, TfpsError, WaitTimeoutError
from tfps.exchange.interface import Reply
from tfps.protos import tfps_pb2 as pb
from tfps.recovery.core import LATER, Core
from tfps.recovery.declarations import Declarations
from tfps.recovery.facets import ElasticPeers
from tfps.recovery.joining import ElasticJoining
from tfps.recovery.journal import Push, packed, unpacked
from tfps.recovery.phase import Phase
from tfps.recovery.pushing import Pushing
from tfps.recovery.rendezvous import meet
from tfps.recovery.replay import Replaying
from tfps.recovery.tables import ElasticTables
from tfps.recovery.workers import MOST_CONNECT_S, PAUSE_S, Workers
from tfps.worker.worker import Worker

logger = logging.getLogger("tfps")
_SAID_S = 10.0  # between log lines of a wait


class Reconfiguration:
    """Takes each failure of a worker; the others are the parts that have something to restore."""

    def __init__(
        self,
        core: Core,
        workers: Workers,
        declarations: Declarations,
        replaying: Replaying,
        pushing: Pushing,
        tables: ElasticTables,
        peers: ElasticPeers,
        joining: ElasticJoining,
    ) -> None:
        self._core, self._workers, self._declarations, self._replaying = core, workers, declarations, replaying
        self._pushing, self._tables, self._peers, self._joining = pushing, tables, peers, joining
        self._first = core.worker.first_incarnation
        self._thread: threading.Thread | None = None  # the last one
        self.follow(core.worker)

    def follow(self, worker: Worker) -> None:
        """Goes on when `worker` fails."""
        worker.add_failure_listener(functools.partial(self.failed, worker))

    def offered(self, address: str) -> None:
        """Goes on with the pserver at `address`, too. On a thread of its own, as it tells the others."""

        def take() -> None:
            self._workers.add_addresses([address])
            end_s, agreed = time.monotonic() + self._core.config.rejoin_timeout_s, False
            while not agreed and time.monotonic() < end_s and not self._core.wait_over(PAUSE_S):
                with contextlib.suppress(*LATER):
                    agreed = self._agree_to_move(MOST_CONNECT_S)
            with self._core.changed:
                worker = self._core.worker
            if agreed and not (worker.joining.candidate or address in worker.addresses):
                worker.fail(PserverLostError(f"pserver {address} takes part from now on"))

        threading.Thread(target=take, name="tfps-offered", daemon=True).start()

    def failed(self, worker: Worker, error: TfpsError) -> None:
        """`worker` has failed: meets the others, or fails."""
        with self._core.changed:
            if worker is not self._core.worker:
                return
            goes_on, again = self._core.goes_on(error), self._ask_again if self._core.is_candidate else self._begin_anew
            if goes_on:
                self._core.enter(Phase.MEETING)
        if goes_on:
            arguments = [worker, again, error]
            self._thread = threading.Thread(target=self._go_on, args=arguments, name="tfps-regroup", daemon=True)
            self._thread.start()
        else:
            self._end(error)

    def _can_move(self) -> bool:
        """Whether workers have all that pservers keep, so that these may change."""
        ranks = self._core.view.ranks
        kept = [bucket.kept for bucket in self._core.buckets if bucket.kept is not None]
        return not self._core.paused and all(each.oldest in (None, ranks) for each in kept)

    def _agree_to_move(self, timeout_s: float) -> bool:
        """Whether the pservers may change now, for all workers."""
        with self._core.changed:
            worker = self._core.worker
        if self._can_move() and self._core.config.applies_each_push:  # ranks step apart: others may not have theirs yet
            worker.meet(timeout_s)
        return self._can_move() and self._core.worker is worker

    def wait(self, timeout_s: float) -> None:
        """Waits for the thread: it may still join pservers, and leaves them then."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _end(self, error: TfpsError) -> None:
        """Fails; answers what the worker that there is now does not."""
        self._core.failures.fail(error)
        self._core.answer(error)

    @contextlib.contextmanager
    def _trying(self, new: Worker) -> Iterator[None]:
        """Ends `new` if the block fails: the others meet again."""
        with self._core.changed:
            self._core.next = new
        try:
            if self._core.over:
                raise ClosedError("the exchange has ended")
            yield
        except BaseException as error:
            if self._core.failures.failure is not None:
                new.fail(self._core.failures.failure)
            elif not self._core.over and not new.joining.candidate:
                new.fail(PserverLostError(f"rank {self._core.rank} could not go on: {error}"))
            new.close(self._core.closing_reason)
            raise
        finally:
            with self._core.changed:
                if self._core.next is new:
                    self._core.next = None

    # Other pservers

    def _go_on(self, old: Worker, again: Callable[[Worker, str], None], error: TfpsError) -> None:
        """Goes on with other pservers; on its own thread."""
        try:
            threading.Thread(target=old.close, name="tfps-hang-up", daemon=True).start()
            self._core.to_replay.put(None)
            for bucket in self._core.buckets:  # nothing that comes from now on counts
                with bucket.lock:
                    bucket.worker = None
            again(old, str(error))
        except TfpsError as failure:
            self._end(failure)
        except Exception as bug:  # else every push would wait for ever
            self._end(TfpsError(f"rank {self._core.rank}: could not go on with other pservers: {bug!r}"))

    def _attempts(self, reason: str) -> Iterator[Callable[[TfpsError], None]]:
        """Attempts to go on, until the user's limit; each takes the error that it ended with."""
        limit_s, began_s = self._core.config.rejoin_timeout_s, time.monotonic()
        said_s = began_s

        def failed(error: TfpsError) -> None:
            nonlocal said_s
            now_s = time.monotonic()
            if now_s - began_s > limit_s:
                raise PserverLostError(
                    f"{reason}; the job could not go on with other pservers within {limit_s:.3g} s "
                    f"(rejoin_timeout_s): {error}"
                ) from error
            if now_s - said_s > _SAID_S:
                said_s = now_s
                logger.warning("tfps: waits for a pserver; %.0f s so far: %s", now_s - began_s, error)
            self._core.wait_over(PAUSE_S)

        while not self._core.over:
            yield failed

    def _begin_anew(self, old: Worker, reason: str) -> None:
        """Meets the others, and begins the job anew with them."""
        logger.warning("tfps: %s; the workers meet, to go on with the pservers that there are", reason)
        generation = old.view.generation
        silent = old.silent_pservers
        for failed in self._attempts(reason):
            try:
                report = self._report(old, generation, reason)
                about, not_asked, silent = (old.uid, self._first, old.rank, old.view.workers), silent, set()
                reply = meet(self._workers.addresses, self._workers.security, *about, report, not_asked)
                generation = reply.generation
                self._workers.add_addresses(reply.pservers)
                new = self._workers.resumed(reply, old, self._first)
                with self._trying(new):
                    answered = self._restore(new, old, reply)
                    self._go_on_with(new)
                names = f"{'pserver' if len(reply.pservers) == 1 else 'pservers'} {', '.join(reply.pservers)}"
                logger.info("tfps: the job goes on with %d workers and %s", len(new.view.ranks), names)
                for push, own in answered:
                    push.on_reply(own)
                return
            except LATER as error:
                failed(error)

    def _ask_again(self, old: Worker, reason: str) -> None:
        """Asks to join once more, as the pservers have changed before it took part."""
        logger.warning("tfps: %s; this worker asks again to join the job", reason)
        for failed in self._attempts(reason):
            try:
                new = self._workers.asking_again(self._core.rank)
                with self._trying(new):
                    if not new.joining.candidate:
                        raise ConnectError("the job is not under way any more")
                    for specs, details in self._declarations.tried:
                        new.declare(specs, details)
                    new.joining.tries_out = self._joining.tries_out
                    self._go_on_with(new)
                return
            except LATER as error:
                failed(error)

    def _report(self, old: Worker, generation: int, reason: str) -> pb.Report:
        view = old.view
        everybody = sorted(view.ranks)
        report = pb.Report(
            generation=generation,
            ranks=view.ranks,
            lost=set(range(view.workers)).difference(view.ranks, self._joining.admitting),
            silent=old.presence.silent,
            declarations=self._declarations.count,
            steps=[bucket.replies for bucket in self._core.buckets],
            results=[
                pb.Result(bucket=number, rank=self._core.rank, ranks=sorted(bucket.last.ranks))
                for number, bucket in enumerate(self._core.buckets)
                if sorted(bucket.last.ranks) != everybody
            ],
            reason=reason,
        )
        self._replaying.report(report)
        return report

    def _restore(self, new: Worker, old: Worker, reply: pb.RegroupReply) -> list[tuple[Push, Reply]]:
        """Lets `new` go on where the replies of `old` have ended; returns pushes that are answered now."""
        steps, specs = list(reply.steps), old.pushes.specs()
        results = {each.bucket: each for each in reply.results}
        declared = self._declarations
        ahead, (latest, details), lines = declared.count > reply.declarations, declared.latest, declared.lines
        lines = lines[: len(lines) - len(details)] if ahead and not latest else lines
        new.resume(specs[: len(steps)], [step - (n in results) for n, step in enumerate(steps)])
        for number, (bucket, step) in enumerate(zip(self._core.buckets, steps, strict=False)):
            new.take_residual(number, old, step)
            bucket.gone = bucket.gone or number in reply.gone
        self._replaying.restore(new, reply)
        for counter, known in self._peers.drawn.items():
            new.follow(counter, known)
        new.resume_lines(lines)  # from then on all ranks have written their parts
        found = self._exchange_results(new, results)
        if ahead:
            new.declare(latest, details)  # the others do so now, again
        if self._core.quiesced and not any(self._core.buckets[number].replies < steps[number] for number in found):
            new.peers.quiesce()
        new.knows_as(old)
        # Nothing fails from here on.
        answered = self._tables.drop_given()
        for number, last in found.items():
            bucket = self._core.buckets[number]
            with bucket.lock:
                lacked = bucket.replies < steps[number]
                bucket.replies = new.state.steps(number)
                if lacked:
                    push, bucket.last, self._core.quiesced = bucket.pushes.popleft(), last, False
                    answered.append((push, last))
                    if push.collects:
                        new.state.set_residual(number, np.asarray(last.sum).view(np.float32))
        with self._core.changed:
            self._core.ended.update(set(old.places).difference(old.view.ranks))
            self._joining.expected = list(reply.expected)
        return answered

    def _go_on_with(self, new: Worker) -> None:
        with self._core.changed:
            if self._core.over:
                raise ClosedError("the exchange has ended")
            self._core.worker, self._declarations.count = new, new.declarations
            behind = self._replaying.begin()
            self._core.ended.difference_update(new.view.ranks)
        self.follow(new)
        for number, bucket in enumerate(self._core.buckets):
            with bucket.lock:
                if self._core.phase is Phase.MEETING or self._core.worker is not new:
                    return  # it has failed already: the next one gets all
                bucket.worker = new
                for push in list(bucket.pushes) if number not in behind else ():
                    self._pushing.give(number, new, push)
                if number not in behind:
                    self._tables.give_asks(number, new)
        self._replaying.start(new, behind, self._pushing.give, self._tables.give_asks)

    def _exchange_results(self, new: Worker, results: Mapping[int, pb.Result]) -> dict[int, Reply]:
        """Gives and gets the last replies that some ranks lack; returns them, by bucket."""
        came = threading.Semaphore(0)
        replies: dict[int, Reply] = {}

        def take(number: int, reply: Reply) -> None:
            replies[number] = reply
            came.release()

        for number, result in results.items():
            own = packed(self._core.buckets[number].last) if result.rank == self._core.rank else None
            new.pushes.repeat(number, result.rank, own, functools.partial(take, number))
        for _ in results:
            if not came.acquire(timeout=self._core.config.step_timeout_s):
                raise WaitTimeoutError("the last replies of other ranks have not come")
        for reply in replies.values():
            if reply.error is not None:
                raise reply.error
        return {number: unpacked(replies[number], result) for number, result in results.items()}
