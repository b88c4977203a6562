"""Does what the machine says (machine.py): meets other workers, makes sessions, restores what pservers keep.

See tfps/membership/decision.py for what workers agree on.

Tested in tests/worker/test_lost_pservers.py, tests/worker/test_lost_meanwhile.py and
tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from tfps.errors import OF_JOB, ConnectError, PserverLostError, TfpsError, WaitTimeoutError
from tfps.exchange.interface import Reply
from tfps.protos import tfps_pb2 as pb
from tfps.recovery import machine
from tfps.recovery.core import Core, ElasticBucket
from tfps.recovery.declarations import Declarations
from tfps.recovery.facets import ElasticPeers
from tfps.recovery.joining import ElasticJoining
from tfps.recovery.journal import Push, packed, unpacked
from tfps.recovery.machine import LATER, Effect, Event, Failed, Missed
from tfps.recovery.pushing import Pushing
from tfps.recovery.rendezvous import meet
from tfps.recovery.tables import ElasticTables
from tfps.recovery.workers import MOST_CONNECT_S, PAUSE_S, Workers
from tfps.worker.worker import Worker

logger = logging.getLogger("tfps")


class Reconfiguration:
    """One thread, which does one effect after the other; the others are the parts that have something to restore."""

    def __init__(
        self,
        core: Core,
        workers: Workers,
        declarations: Declarations,
        pushing: Pushing,
        tables: ElasticTables,
        peers: ElasticPeers,
        joining: ElasticJoining,
    ) -> None:
        self._core, self._workers, self._declarations = core, workers, declarations
        self._pushing, self._tables, self._peers, self._joining = pushing, tables, peers, joining
        self._first = core.worker.client.first_incarnation
        self._answered: list[tuple[Push, Reply]] = []  # by the session that was restored last
        self._thread = threading.Thread(target=self._run, name="tfps-recovery", daemon=True)
        self._thread.start()
        self._follow(core.recovery.session)

    def wait(self, timeout_s: float) -> None:
        """Waits for the thread, after the end: it may still join pservers, and leaves them then."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _follow(self, session: int) -> None:
        worker = self._core.sessions[session]
        worker.add_failure_listener(functools.partial(self._failed, session))
        worker.pushes.on_stable = functools.partial(self._core.forget_results, worker)

    def _failed(self, session: int, error: TfpsError) -> None:
        with self._core.changed:
            recoverable = session == self._core.recovery.session and self._core.goes_on(error)
        self._core.deliver(Failed(session, error, recoverable, time.monotonic()))

    def _run(self) -> None:
        to_do, ended = self._core.to_do, False
        while not (ended and to_do.empty()):
            if (item := to_do.get()) is None:
                ended = True
                continue
            try:
                self._do(item)
            except TfpsError as error:
                self._core.fail(error)
            except Exception as bug:  # else every push would wait for ever
                who = f"rank {self._core.rank}"
                self._core.fail(TfpsError(f"{who}: could not go on with other pservers: {bug!r}"))

    def _do(self, item: Event | Effect) -> None:
        core = self._core
        match item:
            case machine.Leave(session, reason):
                asks = "this worker asks again to join the job"
                meets = "the workers meet, to go on with the pservers that there are"
                logger.warning("tfps: %s; %s", reason, asks if core.is_joining else meets)
                threading.Thread(target=core.sessions[session].close, name="tfps-hang-up", daemon=True).start()
                for bucket in core.buckets:  # nothing that comes from now on counts
                    with bucket.lock:
                        bucket.worker = None
            case machine.Report() | machine.Connect() | machine.Write():
                try:
                    self._attempt(item)
                except TfpsError as error:
                    core.deliver(Missed(error, time.monotonic()))
            case machine.Use(session):
                self._use(session)
            case machine.Give(session, bucket):
                self._give(session, bucket)
            case machine.Reply():
                for push, reply in self._answered:
                    push.on_reply(reply)
            case machine.Drop():
                self._drop(item)
            case machine.Wait(error, waited_s, says):
                if says:
                    logger.warning("tfps: waits for a pserver; %.0f s so far: %s", waited_s, error)
                core.wait_over(PAUSE_S)
            case machine.Settle(address):
                threading.Thread(target=self._settle, args=[address], name="tfps-offered", daemon=True).start()
            case machine.Quit(session, error):
                if session in core.sessions:
                    core.sessions[session].fail(error)
            case machine.End():  # done by who told the machine
                pass
            case _:
                core.deliver(item)

    def _settle(self, address: str) -> None:
        """Waits until workers may go on with the pserver at `address`, too. On its own thread, as it takes long."""
        core, agreed = self._core, False
        self._workers.add_addresses([address])
        end_s = time.monotonic() + core.config.rejoin_timeout_s
        while not agreed and time.monotonic() < end_s and not core.wait_over(PAUSE_S):
            with contextlib.suppress(*LATER):
                agreed = self._agree_to_move(MOST_CONNECT_S)
        if agreed:
            with core.changed:
                session, known = core.recovery.session, address in core.worker.addresses
            core.deliver(machine.Settled(session, address, known))

    def _can_move(self) -> bool:
        """Whether workers have all that pservers keep, so that these may change."""
        ranks = self._core.view.ranks
        journals = [bucket.journal for bucket in self._core.buckets if bucket.journal is not None]
        return not self._core.paused and all(each.oldest in (None, ranks) for each in journals)

    def _agree_to_move(self, timeout_s: float) -> bool:
        """Whether the pservers may change now, for all workers."""
        with self._core.changed:
            worker = self._core.worker
        if self._can_move() and self._core.config.applies_each_push:  # ranks step apart: others may not have theirs yet
            worker.client.admit((), timeout_s)  # returns once all ranks have called it
        return self._can_move() and self._core.worker is worker

    # Other pservers

    def _attempt(self, effect: machine.Report | machine.Connect | machine.Write) -> None:
        """One step towards the next session. TfpsError: it has failed."""
        core, old = self._core, self._core.worker
        match effect:
            case machine.Report(generation, reason):
                core.deliver(machine.Decided(self._meet(old, generation, reason)))
            case machine.Connect(session, decision):
                if decision is None:
                    core.sessions[session] = self._workers.asking_again(old.rank)
                else:
                    core.sessions[session] = self._workers.resumed(decision, old, self._first)
                core.deliver(machine.Connected(session))
            case machine.Write(session, decision):
                self._write(session, old, decision)

    def _meet(self, old: Worker, generation: int | None, reason: str) -> pb.Decision:
        """Meets the others; those pservers that `old` has just waited for are not asked in the first attempt."""
        silent, old.silent_pservers = old.silent_pservers, set()
        report = self._report(old, old.view.generation if generation is None else generation, reason)
        about = old.client.uid, self._first, old.rank, old.client.started
        decision = meet(self._workers.addresses, self._workers.security, *about, report, silent)
        self._workers.add_addresses(decision.pservers)
        return decision

    def _write(self, session: int, old: Worker, decision: pb.Decision | None) -> None:
        """Restores what pservers keep, or declares again what a worker has that asked to join."""
        core, new = self._core, self._core.sessions[session]
        if decision is not None:
            self._answered = self._restore(new, old, decision)
        else:
            if not new.joining.pending:
                raise ConnectError("the job is not under way any more")
            for specs, details in self._declarations.tried:
                new.declare(specs, details)
            new.joining.tries_out, self._answered = self._joining.tries_out, []
        with core.changed:
            core.deliver(machine.Restored(session, self._to_replay()))
            if core.worker is new:
                self._declarations.count = new.client.declarations
                core.ended.difference_update(new.view.ranks)
                core.sessions = {number: each for number, each in core.sessions.items() if number >= session}

    def _report(self, old: Worker, generation: int, reason: str) -> pb.Report:
        view = old.view
        return pb.Report(
            generation=generation,
            ranks=view.ranks,
            lost=view.free.difference(self._joining.admitting),
            silent=old.presence.suspected,
            declarations=self._declarations.count,
            buckets=[_report(bucket, view.ranks) for bucket in self._core.buckets],
            reason=reason,
        )

    def _restore(self, new: Worker, old: Worker, decision: pb.Decision) -> list[tuple[Push, Reply]]:
        """Lets `new` go on where the replies of `old` have ended; returns pushes that are answered now."""
        decided, specs = list(decision.buckets), old.pushes.specs()
        results = {number: each for number, each in enumerate(decided) if each.HasField("giver")}
        declared = self._declarations
        ahead, (latest, details), lines = declared.count > decision.declarations, declared.latest, declared.lines
        lines = lines[: len(lines) - len(details)] if ahead and not latest else lines
        new.resume(specs[: len(decided)], [each.step - each.HasField("giver") for each in decided])
        for number, each in enumerate(decided):
            new.pushes.take_residual(number, old.pushes, each.step)
        self._write_parts(new, decision)
        for counter, numbers in self._peers.drawn.items():
            for number in numbers:
                new.follow(counter, number + 1)
        new.resume_lines(lines)  # from then on all ranks have written their parts
        found = self._exchange_results(new, results)
        lacking = {number for number in found if self._core.buckets[number].replies < decided[number].step}
        if ahead:
            new.declare(latest, details)  # the others do so now, again
        if self._core.quiesced and not lacking:
            new.peers.quiesce()
        new.joining.known = old.joining.known
        # Nothing fails from here on.
        answered = self._tables.drop_given(old)
        for number, last in found.items():
            bucket = self._core.buckets[number]
            with bucket.lock:
                bucket.replies = new.state.steps(number)
                if number in lacking:
                    push, bucket.last, self._core.quiesced = bucket.pushes.popleft(), last, False
                    answered.append((push, last))
                    if push.collects:
                        new.state.set_residual(number, np.asarray(last.sum).view(np.float32))
        with self._core.changed:
            self._core.ended.update(set(old.places).difference(old.view.ranks))
            self._joining.expected = list(decision.expected)
        return answered

    def _write_parts(self, new: Worker, decision: pb.Decision) -> None:
        """Gives `new`, which goes on as all have decided, this rank's part of what pservers keep."""
        for number, bucket in enumerate(self._core.buckets):  # others declare again those that not all have
            each = decision.buckets[number] if number < len(decision.buckets) else pb.BucketDecision()
            if bucket.unrecoverable:
                each = pb.BucketDecision(step=each.step, unrecoverable=True)
            bucket.unrecoverable = each.unrecoverable
            if (journal := bucket.journal) is not None:
                if journal.replay is None:  # ranks step apart: all go on with the number of the first
                    bucket.replies = each.step
                if journal.files is not None and each.folder and not each.unrecoverable:
                    journal.files.read(each.folder, new.tables.load(journal.files.load(each.step, each.folder)))
                for write in journal.resume(each, tuple(decision.ranks), bucket.pushes):
                    new.state.write(number, *write)
            bucket.begun = bucket.last_lookup

    def _to_replay(self) -> frozenset[int]:
        """The buckets of which pushes are given again, which wait from now on. Caller holds the core's lock."""
        core = self._core
        for bucket in core.buckets:
            bucket.needs_replay = (bucket.replay is not None and not core.is_joining) or (
                bucket.unrecoverable and bool(bucket.pushes)
            )
        return frozenset(number for number, bucket in enumerate(core.buckets) if bucket.needs_replay)

    def _use(self, session: int) -> None:
        core, new = self._core, self._core.sessions[session]
        self._follow(session)  # this may tell already that it has failed
        for number, bucket in enumerate(core.buckets):
            with bucket.lock:
                if core.recovery.session != session or core.phase.reconfigures:
                    return  # it has failed already: the next one gets all
                bucket.worker = new
                if not bucket.needs_replay:
                    try:
                        for push in list(bucket.pushes):
                            self._pushing.give(number, new, push)
                    except LATER:
                        if not core.is_lost(new):
                            raise
                    self._tables.give_lookups(number, new)
        if core.is_joining:
            return
        names = f"{'pserver' if len(new.addresses) == 1 else 'pservers'} {', '.join(new.addresses)}"
        logger.info("tfps: the job goes on with %d workers and %s", len(new.view.ranks), names)

    def _give(self, session: int, number: int) -> None:
        """Gives again what is kept of a bucket, each push when the one before has been answered.

        It needs nothing of this program, nor of others': all ranks have kept what they had pushed.
        """
        core, bucket = self._core, self._core.buckets[number]
        with bucket.lock:
            worker = core.worker
            if core.recovery.session != session or bucket.worker is not worker or core.over:
                return  # the next one gets all
            if bucket.pushes or bucket.lookups:
                core.check_there(number)
            if (replay := bucket.replay) is not None and replay.idle:
                self._pushing.give(number, worker, replay.next)
            if replay is not None and not (replay.all_given and replay.replies >= bucket.replies):
                return
            bucket.needs_replay = False
            self._tables.give_lookups(number, worker)
        core.deliver(machine.CaughtUp(session, number))

    def _drop(self, effect: machine.Drop) -> None:
        """Ends a session that is not used."""
        core, new = self._core, self._core.sessions.pop(effect.session)
        if effect.tells:
            error, meets = effect.error, PserverLostError(f"rank {core.rank} could not go on: {effect.error}")
            new.fail(error if isinstance(error, OF_JOB) else meets)
        elif core.failures.failure is not None:
            new.fail(core.failures.failure)
        new.close(core.closing_reason)

    def _exchange_results(self, new: Worker, results: Mapping[int, pb.BucketDecision]) -> dict[int, Reply]:
        """Gives and gets the last replies that some ranks lack; returns them, by bucket."""
        came = threading.Semaphore(0)
        replies: dict[int, Reply] = {}

        def take(number: int, reply: Reply) -> None:
            replies[number] = reply
            came.release()

        for number, result in results.items():
            own = packed(self._core.buckets[number].last) if result.giver == self._core.rank else None
            new.pushes.redeliver(number, result.giver, own, functools.partial(take, number))
        for _ in results:
            if not came.acquire(timeout=self._core.config.step_timeout_s):
                raise WaitTimeoutError("the last replies of other ranks have not come")
        for reply in replies.values():
            if reply.error is not None:
                raise reply.error
        return {number: unpacked(replies[number], result) for number, result in results.items()}


def _report(bucket: ElasticBucket, everybody: Sequence[int]) -> pb.BucketReport:
    """What this worker has of a bucket."""
    last = sorted(bucket.last.ranks)
    report = pb.BucketReport(step=bucket.replies, last=last if last != list(everybody) else ())
    if bucket.journal is not None:
        bucket.journal.report(report)
    return report
