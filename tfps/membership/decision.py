"""How a job goes on whose workers have lost a pserver: they meet, and this decides. Values only: no I/O, no locks.

A job in mode "sync" that updates on the workers keeps nothing on its pservers but rounds under way. So its workers
begin it anew, with the pservers that they reach, at the round that each bucket is in. Where some workers have the
result of a round and others do not, one of those gives it to these: so no round has two results.

A worker says what it knows by a `Report`; all get the same `Decision`. Both are messages (protos/tfps.proto), with one
part for each bucket.

Tested in tests/membership/test_decision.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfps.errors import PserverLostError, WorkerLostError
from tfps.protos import tfps_pb2 as pb


def decide(reports: Mapping[int, pb.Report], waited: bool, known: bool = True) -> pb.Decision | None:
    """What workers that meet agree on, given their `reports` by rank; None: others may still come.

    `waited`: they have had their time. `known`: they meet at a pserver that was one of the job's. PserverLostError:
    there is no pserver that all reach. WorkerLostError: others may go on elsewhere, as these workers are too few. Who
    has come and was lost, as others say, does not take part.
    """
    lost = set[int]().union(*(report.lost for report in reports.values()))
    expected = set[int]().union(*(report.ranks for report in reports.values())) - lost
    present = sorted(expected.intersection(reports))
    if len(present) < max(len(expected), 1) and not waited:
        return None
    if not present:
        raise WorkerLostError(f"ranks {sorted(reports)} were all lost, as others of them say: none can go on")
    here = [reports[rank] for rank in present]
    _check_majority(present, expected, here, known)
    bad = {address for report in here for address in (*report.refused, *report.unreached)}
    pservers = [
        address for address in dict.fromkeys(a for report in here for a in report.reached) if address not in bad
    ]
    if not pservers:
        raise PserverLostError(f"no pserver answers all workers: {here[0].reason}")
    absent = lost | expected.difference(present)
    return pb.Decision(
        generation=max(report.generation for report in here) + 1,
        ranks=present,
        pservers=pservers,
        declarations=min(report.declarations for report in here),
        buckets=[
            _bucket(held, present, absent, [sorted(report.ranks) for report in here])
            for held in zip(*(report.buckets for report in here), strict=False)  # those that all have
        ],
        reason=here[0].reason,
        expected=sorted(expected),
    )


def _bucket(
    held: Sequence[pb.BucketReport], present: Sequence[int], absent: Collection[int], views: Sequence[Sequence[int]]
) -> pb.BucketDecision:
    """Where a bucket goes on of which `present` have this."""
    step = max(each.step for each in held)
    if any(each.snapshots for each in held):
        if (snapshot := _snapshot(present, held)) is None:
            return pb.BucketDecision(step=step, unrecoverable=True)
        return pb.BucketDecision(step=snapshot[0], folder=snapshot[1])
    if any(each.HasField("latest") for each in held):
        latest = [each.latest for each in held]
        reads = [each.reads for each in latest]
        return pb.BucketDecision(
            step=step,
            unrecoverable=not _is_complete(latest, present, absent),
            latest=present[reads.index(max(reads))] if len(set(reads)) > 1 else None,
            folder=max(latest, key=lambda each: each.saved).folder,
        )
    steps = [each.step for each in held]
    if min(steps) == step:
        return pb.BucketDecision(step=step)
    donor = steps.index(step)
    return pb.BucketDecision(step=step, giver=present[donor], last=held[donor].last or views[donor])


def _is_complete(held: Sequence[pb.Latest], present: Sequence[int], absent: Collection[int]) -> bool:
    """Whether what `present` have is complete, without `absent`. A table without a snapshot is as it was declared."""
    assigned = held[0].assigned
    if any(each.assigned != assigned for each in held):
        return False  # parameters of some are those from before
    if any(each.HasField("folder") for each in held):
        return any(each.folder for each in held) or (assigned == 0 and not absent)
    has_slots = assigned > 0 and held[0].slots  # before the first values, pservers keep nothing
    return not has_slots or all(
        list(each.ranks) == list(present) and each.snapshot_assigned == assigned for each in held
    )


def _snapshot(present: Sequence[int], here: Sequence[pb.BucketReport]) -> tuple[int, str] | None:
    """The step and the folder, if any, of the last snapshot from which `present` can go on; None: there is none.

    All parts are needed, or the files of a table, and all pushes since then.
    """
    held = [{snapshot.step: snapshot for snapshot in report.snapshots} for report in here]
    for step in sorted(set(held[0]).intersection(*held[1:]), reverse=True):
        each = [snapshots[step] for snapshots in held]
        named = {tuple(snapshot.ranks) for snapshot in each if snapshot.ranks}
        ranks = set(next(iter(named), ()))
        began = all(report.step == step for report in here)  # nobody needs an earlier push
        have = {rank for rank, snapshot in zip(present, each, strict=True) if snapshot.part}
        if len({snapshot.assigned for snapshot in each}) > 1:
            return None  # what some have put there is not in what others know
        folder = next((snapshot.folder for snapshot in each if snapshot.folder), "")
        is_table = any(snapshot.HasField("folder") for snapshot in each)
        if is_table and not folder and (step or each[0].assigned):
            continue
        if len(named) <= 1 and (ranks == set(present) or began) and (step == 0 or (ranks and ranks <= have)):
            return step, folder
    return None


def _check_majority(present: Sequence[int], expected: Collection[int], here: Sequence[pb.Report], known: bool) -> None:
    """Raises WorkerLostError if others may be alive and go on with a pserver that does not answer here.

    More than half may go on; of an even number, half if the lowest rank is among them, and they meet at a pserver that
    has been the job's: one that was started again may be on the other side for others.
    """
    answers = {address for report in here for address in (*report.reached, *report.refused)}
    if known and answers.issuperset(address for report in here for address in report.unreached):
        return  # others have no pserver
    everybody = sorted({*expected, *(rank for report in here for rank in report.silent)})
    half = 2 * len(present) == len(everybody) and known and everybody[0] in present
    if not half and 2 * len(present) <= len(everybody):
        missing = ", ".join(f"{rank}" for rank in everybody if rank not in present)
        raise WorkerLostError(
            f"{here[0].reason}; ranks {', '.join(map(str, present))} reach each other, but ranks {missing} may go on "
            "elsewhere, with a pserver that does not answer here: only more than half of the workers go on"
        )


def check_present(rank: int, decision: pb.Decision) -> None:
    """Raises WorkerLostError if `rank` does not take part any more."""
    if rank not in decision.ranks:
        raise WorkerLostError(
            f"the other workers went on without this one, with other pservers ({decision.reason}): rank {rank} did "
            "not come in time, or was lost before"
        )
