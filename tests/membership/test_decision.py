"""What workers agree on that have lost a pserver."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfps.errors import PserverLostError, WorkerLostError
from tfps.membership.decision import check_present, decide
from tfps.protos import tfps_pb2 as pb
from tfps.protos.tfps_pb2 import Latest, Report, Snapshot
from tfps.types import Argument

HERE, THERE, DEAD = "here:1", "there:1", "dead:1"
SEES = Report(generation=4, ranks={0, 1, 2}, reached=(HERE,), refused=(DEAD,), reason="pserver dead:1: it ended")


def of(report: Report, **changes: Argument) -> Report:
    made = Report()
    made.CopyFrom(report)
    for name in changes:
        made.ClearField(name)
    made.MergeFrom(Report(**changes))
    return made


def at(*steps: int) -> list[pb.BucketReport]:
    """Buckets of which so many replies have come."""
    return [pb.BucketReport(step=step) for step in steps]


def agreed(reports: dict[int, Report], waited: bool = False) -> pb.Decision:
    found = decide(reports, waited)
    assert found is not None
    return found


def test_all_who_take_part_come_or_have_had_their_time() -> None:
    two = {0: SEES, 2: SEES}
    assert decide(two, waited=False) is None
    assert agreed(two, waited=True).ranks == [0, 2]
    assert agreed({**two, 1: SEES}).ranks == [0, 1, 2]
    assert agreed({**two, 1: SEES}).generation == 5
    assert agreed({0: SEES, 2: of(SEES, ranks={0, 2}, lost={1}, generation=5)}).ranks == [0, 2]


def test_who_was_lost_or_comes_too_late_is_told() -> None:
    found = agreed({0: of(SEES, ranks={0, 2}, lost={1}), 1: SEES, 2: SEES})
    assert found.ranks == [0, 2]
    check_present(2, found)
    with pytest.raises(WorkerLostError, match=r"went on without this one.*dead:1: it ended.*rank 1 did not come"):
        check_present(1, found)


def test_the_pservers_are_those_that_some_reach_and_none_misses() -> None:
    new = of(SEES, reached=(HERE, THERE))
    assert agreed({0: SEES, 1: new, 2: new}).pservers == [HERE, THERE]
    cut = of(SEES, unreached=(THERE,))
    assert agreed({0: new, 1: cut, 2: new}).pservers == [HERE]
    with pytest.raises(PserverLostError, match="no pserver answers all workers"):
        decide({0: cut, 1: of(SEES, reached=(THERE,), unreached=(HERE,)), 2: SEES}, waited=True)


@pytest.mark.parametrize(
    ("here", "silent", "goes_on"),
    [({0, 1}, set(), True), ({2}, set(), False), ({0}, {1}, True), ({1}, {0}, False), ({1, 2}, {0}, True)],
)
def test_where_a_pserver_may_be_with_others_only_more_than_half_go_on(
    here: set[int], silent: set[int], goes_on: bool
) -> None:
    ranks = {0, 1, 2} if not silent else here
    lost = {0, 1, 2} - ranks
    report = of(SEES, unreached=(THERE,), ranks=ranks, lost=lost, silent=silent)
    reports = dict.fromkeys(here, report)
    if goes_on:
        assert agreed(reports, waited=True).ranks == sorted(here)
    else:
        with pytest.raises(WorkerLostError, match="only more than half of the workers go on"):
            decide(reports, waited=True)
    # Elsewhere there is no pserver: nobody else can go on.
    assert agreed({rank: of(report, unreached=()) for rank in here}, waited=True).ranks == sorted(here)


def test_where_buckets_are_and_who_gives_a_result_to_those_that_lack_it() -> None:
    found = agreed(
        {
            0: of(SEES, buckets=at(3, 7, 0), declarations=5),
            1: of(SEES, buckets=[pb.BucketReport(step=4, last=[0, 1]), *at(7, 0, 0)], declarations=6),
            2: of(SEES, buckets=at(4, 6, 0), declarations=5),
        }
    )
    assert found.declarations == 5
    assert list(found.buckets) == [
        pb.BucketDecision(step=4, giver=1, last=[0, 1]),
        pb.BucketDecision(step=7, giver=0, last=[0, 1, 2]),
        pb.BucketDecision(step=0),
    ]


def _sides() -> st.SearchStrategy[tuple[list[set[int]], list[int]]]:
    """How a cut divides workers, and on which side each of three pservers is."""
    return st.integers(1, 5).flatmap(
        lambda workers: st.tuples(
            st.lists(st.booleans(), min_size=workers, max_size=workers).map(
                lambda left: [
                    {rank for rank in range(workers) if left[rank]},
                    {rank for rank in range(workers) if not left[rank]},
                ]
            ),
            st.lists(st.integers(0, 1), min_size=3, max_size=3),
        )
    )


@given(_sides(), st.booleans())
def test_of_a_network_cut_in_two_at_most_one_side_goes_on(cut: tuple[list[set[int]], list[int]], noticed: bool) -> None:
    """Whether the others have been noticed to be silent before, or not."""
    sides, places = cut
    workers = sum(map(len, sides))
    going_on = []
    for number, here in enumerate(sides):
        if not here or number not in places:
            continue  # nobody, or no pserver: it does not go on
        there = set(range(workers)) - here
        report = of(
            SEES,
            ranks=here if noticed else set(range(workers)),
            lost=there if noticed else set(),
            silent=there if noticed else set(),
            reached=tuple(f"p:{index}" for index, place in enumerate(places) if place == number),
            unreached=tuple(f"p:{index}" for index, place in enumerate(places) if place != number),
            refused=(),
        )
        with contextlib.suppress(WorkerLostError):
            going_on.append(agreed(dict.fromkeys(here, report), waited=True))
    assert len(going_on) <= 1
    if len(set(places)) == 2 and len(sides[0]) != len(sides[1]):
        larger = max(sides, key=len)
        assert [set(found.ranks) for found in going_on] == [larger]


def slots(assigned: int, ranks: Sequence[int], before: int) -> Latest:
    return Latest(assigned=assigned, slots=True, ranks=ranks, snapshot_assigned=before)


@pytest.mark.parametrize(
    ("others", "of_the_last", "goes_on"),
    [
        (Latest(assigned=0), Latest(assigned=0), True),  # nobody has values yet
        (slots(2, [0, 1, 2], 2), slots(2, [0, 1, 2], 2), True),
        (Latest(assigned=2), Latest(assigned=2), True),  # no slots
        (Latest(assigned=2), Latest(assigned=1), False),  # it has parameters from before all assigned others
        (slots(2, [0, 1, 2], 2), slots(2, [0, 1, 2], 1), False),  # slots
        (slots(2, [0, 1, 2], 2), slots(2, [0, 1], 2), False),  # its part is another one
        (slots(2, [0, 1, 3], 2), slots(2, [0, 1, 3], 2), False),  # who has not come has a part
        (Latest(assigned=1, slots=True), Latest(assigned=1, slots=True), False),  # there is no snapshot yet
    ],
)
def test_in_mode_async_all_parts_have_to_be_of_the_same_values(
    others: Latest, of_the_last: Latest, goes_on: bool
) -> None:
    held = [pb.BucketReport(step=4 + rank, latest=others) for rank in (0, 1)]
    held.append(pb.BucketReport(step=3, latest=of_the_last))
    found = agreed({rank: of(SEES, buckets=[each]) for rank, each in enumerate(held)})
    assert list(found.buckets) == [pb.BucketDecision(step=5, unrecoverable=not goes_on)]


Held = dict[int, Snapshot]  # by step
ALL = Snapshot(ranks=[0, 1, 2], part=True)
TWO = Snapshot(ranks=[0, 1], part=True)
NOTHING = Snapshot()


def snapshots(held: Held) -> list[Snapshot]:
    return [Snapshot(step=step, ranks=each.ranks, part=each.part) for step, each in held.items()]


def begins(*held: Held, steps: tuple[int, ...], ranks: frozenset[int] = frozenset({0, 1, 2})) -> int | None:
    """The step of the snapshot from which ranks 0, 1, ... go on that hold these and have had so many replies."""
    reports = {
        rank: of(SEES, ranks=ranks, buckets=[pb.BucketReport(step=step, snapshots=snapshots(each))])
        for rank, each, step in zip(sorted(ranks), held, steps, strict=True)
    }
    (found,) = agreed(reports).buckets
    return None if found.unrecoverable else found.step


def test_a_bucket_that_pservers_update_goes_on_from_the_last_snapshot_that_all_have() -> None:
    before, after = {3: ALL}, {3: ALL, 6: ALL}
    assert begins(before, before, before, steps=(5, 5, 6)) == 3
    assert begins(after, before, after, steps=(6, 6, 6)) == 3
    assert begins(after, after, {6: ALL}, steps=(6, 6, 7)) == 6
    assert begins({3: ALL}, {6: ALL}, {6: ALL}, steps=(6, 7, 7)) is None


LEFT = frozenset({0, 1})


def test_before_the_first_snapshot_all_pushes_are_there() -> None:
    pushed = Snapshot(ranks=[0, 1, 2])
    assert begins({0: NOTHING}, {0: NOTHING}, {0: pushed}, steps=(0, 0, 1)) == 0
    assert begins({0: NOTHING}, {0: NOTHING}, steps=(0, 0), ranks=LEFT) == 0
    assert begins({0: pushed}, {0: pushed}, steps=(1, 1), ranks=LEFT) is None  # the third's are gone


def test_parts_and_pushes_of_who_is_lost_are_gone() -> None:
    assert begins({3: ALL}, {3: ALL}, steps=(4, 4), ranks=LEFT) is None
    assert begins({3: ALL}, {3: ALL}, steps=(3, 3), ranks=LEFT) is None
    assert begins({3: ALL, 5: TWO}, {3: ALL, 5: TWO}, steps=(5, 5), ranks=LEFT) == 5


def test_who_has_joined_has_no_part_and_no_push_before() -> None:
    assert begins({4: TWO}, {4: TWO}, {4: NOTHING}, steps=(4, 4, 4)) == 4
    assert begins({4: TWO}, {4: TWO}, {4: NOTHING}, steps=(5, 4, 4)) is None
    assert begins({4: ALL}, {4: ALL}, {4: NOTHING}, steps=(4, 4, 4)) is None  # another one had its number


def test_parts_that_were_cut_differently_are_no_snapshot() -> None:
    assert begins({4: TWO}, {4: ALL}, {4: NOTHING}, steps=(4, 4, 4)) is None


def files(*held: Latest, ranks: frozenset[int] = frozenset({0, 1, 2})) -> str | None:
    """The files with which a table goes on of which ranks 0, 1, ... know this; None: nobody knows them."""
    buckets = [pb.BucketReport(step=4, latest=each) for each in held]
    reports = {rank: of(SEES, ranks=ranks, buckets=[each]) for rank, each in enumerate(buckets)}
    (found,) = agreed(reports, waited=True).buckets
    return None if found.unrecoverable else found.folder


def test_in_mode_async_a_table_goes_on_with_the_newest_files() -> None:
    unknown, old, new = (
        Latest(assigned=1, folder=folder, saved=saved) for folder, saved in (("", 0), ("3", 3), ("7", 7))
    )
    assert files(unknown, old, new) == "7"
    assert files(old, unknown, unknown) == "3"
    assert files(unknown, unknown, unknown) is None
    assert files(old, old, Latest(assigned=0, folder="3", saved=3)) is None  # it has not replaced rows yet


def test_before_the_first_files_a_table_is_as_it_was_declared() -> None:
    nothing = Latest(assigned=0, folder="", saved=0)
    assert files(nothing, nothing, nothing) == ""
    assert files(nothing, nothing, ranks=LEFT) == ""
    assert files(nothing, nothing) is None  # the third may have had some written
