"""How a job goes on whose workers have lost a pserver: they meet and agree. Values only: no I/O, no locks.

A job in mode "sync" that updates on the workers keeps nothing on its pservers but rounds under way. So its workers
begin it anew, with the pservers that they reach, at the round that each bucket is in. Where some workers have the
result of a round and others do not, one of those gives it to these: so no round has two results.

Tested in tests/membership/test_regrouping.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tfps.errors import PserverLostError, WorkerLostError


@dataclass(frozen=True, slots=True)
class Result:
    """The last reply of a bucket, which `rank` has, and whose pushes are in it."""

    rank: int
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What pservers had before a step, in parts."""

    ranks: Sequence[int]  # who have the parts, as far as the worker knows; of step 0: whose pushes came since
    part: bool = False  # whether the worker has its own
    folder: str | None = None  # of a table: where its files are; empty: the worker does not know
    assigned: int = 0  # of a table: how often all ranks have replaced rows in this step


@dataclass(frozen=True, slots=True)
class Newest:
    """What a worker has of a bucket that pservers update in mode "async": the parameters, and a part of the slots."""

    assigned: int  # how often all ranks have assigned values together
    slots: bool = False  # whether it has any
    ranks: Sequence[int] = ()  # who have the parts of the snapshot of the slots
    snapshot_assigned: int = 0  # as `assigned`, before the snapshot
    reads: int = 0  # at barriers, where it gets what all will have
    folder: str | None = None  # of a table: where the files of its last snapshot are; empty: the worker does not know
    saved: int = 0  # of a table: how many steps are in these


@dataclass(frozen=True, slots=True)
class Report:
    """What one worker knows of its job when it has lost a pserver."""

    generation: int  # of its view
    ranks: Collection[int]  # who takes part
    lost: Collection[int] = ()  # who was lost since the job began with these pservers
    silent: Collection[int] = ()  # of those, who may be alive
    reached: Sequence[str] = ()  # addresses of pservers that answer
    refused: Collection[str] = ()  # of those on whose hosts none is running
    unreached: Collection[str] = ()  # of those that do not answer
    declarations: int = 0
    steps: Sequence[int] = ()  # of each bucket, how many replies have come
    results: Mapping[int, Sequence[int]] = field(
        default_factory=dict
    )  # whose pushes are in a bucket's last, if not all
    reason: str = ""
    # Of buckets that pservers update, the worker's snapshots by their steps.
    snapshots: Mapping[int, Mapping[int, Snapshot]] = field(default_factory=dict)
    newest: Mapping[int, Newest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Regrouped:
    """With what the job goes on."""

    generation: int
    ranks: Sequence[int]
    pservers: Sequence[str]  # their addresses
    declarations: int  # that all have
    # Of each bucket of these, how many replies the first has had, or the step of the snapshot that it begins with.
    steps: Sequence[int]
    results: Mapping[int, Result]  # of buckets whose last reply some lack: who gives it to them
    reason: str
    expected: Sequence[int]  # who took part, as somebody knew
    gone: Sequence[int] = ()  # buckets whose state nobody has any more
    newest: Mapping[int, int] = field(default_factory=dict)  # of buckets of which some have read more: who has
    folders: Mapping[int, str] = field(default_factory=dict)  # of tables: the files of the snapshot


def conclude(reports: Mapping[int, Report], waited: bool, known: bool = True) -> Regrouped | None:
    """What workers that meet agree on, given their `reports` by rank; None: others may still come.

    `waited`: they have had their time. `known`: they meet at a pserver that was one of the job's. PserverLostError:
    there is no pserver that all reach. WorkerLostError: others may go on elsewhere, as these workers are too few. Who
    has come and was lost, as others say, does not take part.
    """
    lost = set().union(*(report.lost for report in reports.values()))
    expected = set().union(*(report.ranks for report in reports.values())) - lost
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
    common = min(len(report.steps) for report in here)
    steps = [max(report.steps[bucket] for report in here) for bucket in range(common)]
    results, gone, newest, folders = {}, [], dict[int, int](), dict[int, str]()
    for bucket, step in enumerate(steps):
        if any(bucket in report.snapshots for report in here):
            snapshot = _snapshot(bucket, present, here)
            if snapshot is None:
                gone.append(bucket)
            else:
                steps[bucket], folders[bucket] = snapshot
        elif any(bucket in report.newest for report in here):
            held = [report.newest.get(bucket, Newest(0)) for report in here]
            folders[bucket] = max(held, key=lambda each: each.saved).folder or ""
            gone += [] if _is_whole(held, present, lost | expected.difference(present)) else [bucket]
            reads = [each.reads for each in held]
            if len(set(reads)) > 1:
                newest[bucket] = present[reads.index(max(reads))]
        elif any(report.steps[bucket] < step for report in here):
            first = next(rank for rank in present if reports[rank].steps[bucket] == step)
            results[bucket] = Result(first, reports[first].results.get(bucket, sorted(reports[first].ranks)))
    generation = max(report.generation for report in here) + 1
    declarations = min(report.declarations for report in here)
    reason = here[0].reason
    return Regrouped(
        generation, present, pservers, declarations, steps, results, reason, sorted(expected), gone, newest, folders
    )


def _is_whole(held: Sequence[Newest], present: Sequence[int], absent: Collection[int]) -> bool:
    """Whether what `present` have makes a whole, without `absent`. A table without a snapshot is as it was declared."""
    assigned = held[0].assigned
    if any(each.assigned != assigned for each in held):
        return False  # parameters of some are those from before
    if any(each.folder is not None for each in held):
        return any(each.folder for each in held) or (assigned == 0 and not absent)
    has_slots = assigned > 0 and held[0].slots  # before the first values, pservers keep nothing
    return not has_slots or all(
        tuple(each.ranks) == tuple(present) and each.snapshot_assigned == assigned for each in held
    )


def _snapshot(bucket: int, present: Sequence[int], here: Sequence[Report]) -> tuple[int, str] | None:
    """The step and the folder, if any, of the last snapshot from which `present` can go on; None: there is none.

    All parts are needed, or the files of a table, and all pushes since then.
    """
    held = [report.snapshots.get(bucket, {}) for report in here]
    for step in sorted(set(held[0]).intersection(*held[1:]), reverse=True):
        each = [snapshots[step] for snapshots in held]
        named = {tuple(snapshot.ranks) for snapshot in each if snapshot.ranks}
        ranks = set(next(iter(named), ()))
        began = all(report.steps[bucket] == step for report in here)  # nobody needs an earlier push
        have = {rank for rank, snapshot in zip(present, each, strict=True) if snapshot.part}
        if len({snapshot.assigned for snapshot in each}) > 1:
            return None  # what some have put there is not in what others know
        folder = next((snapshot.folder for snapshot in each if snapshot.folder), "")
        is_table = any(snapshot.folder is not None for snapshot in each)
        if is_table and not folder and (step or each[0].assigned):
            continue
        if len(named) <= 1 and (ranks == set(present) or began) and (step == 0 or (ranks and ranks <= have)):
            return step, folder
    return None


def _check_majority(present: Sequence[int], expected: Collection[int], here: Sequence[Report], known: bool) -> None:
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


def check_present(rank: int, regrouped: Regrouped) -> None:
    """Raises WorkerLostError if `rank` does not take part any more."""
    if rank not in regrouped.ranks:
        raise WorkerLostError(
            f"the other workers went on without this one, with other pservers ({regrouped.reason}): rank {rank} did "
            "not come in time, or was lost before"
        )
