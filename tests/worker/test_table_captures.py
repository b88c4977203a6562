"""What captures of real jobs have of tables: questions for rows, how long they were held back, and gradients."""

from __future__ import annotations

import jobs
from jobs import Cluster
from table_jobs import DIM, added, asked, declared, described, ids_of

from tfps.trace.capture import FIRST_LOOKUP, NONE, Capture, Span
from tfps.trace.recorder import Recorder

ROWS = described(rows=100)  # of two pservers, the first has those of even ids


def test_a_capture_has_each_question_until_its_last_answer_and_whose_gradients_were_waited_for(
    cluster: Cluster,
) -> None:
    servers = [cluster.pserver(2, recorder=Recorder()) for _ in range(2)]
    recorders = [Recorder() for _ in range(2)]
    addresses = [server.address for server in servers]
    first, second = workers = jobs.together(
        *(lambda rank=rank: cluster.worker(addresses, rank, recorder=recorders[rank]) for rank in range(2))
    )
    jobs.declare(workers, declared("user", ROWS))
    first.captures.start()
    jobs.poll(lambda: recorders[1].enabled)
    asked(first, 0, ids_of(0, 1), 0).wait()
    asked(second, 0, ids_of(2, 3, 6), 0).wait()
    ahead = asked(first, 0, ids_of(0, 4, 5), 1)
    jobs.poll(lambda: [server.status().tables[0].early_rows for server in servers] == [1, 1])
    added(second, 0, ids_of(2, 3, 6), 0)
    jobs.poll(lambda: all(server.status().open_slices == 1 for server in servers))
    added(first, 0, ids_of(0, 1), 0)
    ahead.wait()
    asked(second, 0, ids_of(2), 1).wait()  # the other pserver is told that no more will come
    capture = first.captures.stop([], "run", (), {})

    assert capture.tables == {0}
    sums = {span.pserver: span for span in capture.spans if span.kind == "aggregate"}
    for pserver, came in sums.items():
        gradients = {span.rank: span for span in of(capture, "wire", pserver, step=0) if not capture.is_lookup(span)}
        assert (came.begin_ns, came.rank, came.slice) == (gradients[1].end_ns, 0, NONE)
        assert came.end_ns >= gradients[0].end_ns
        assert came.nbytes == 4 * DIM * (3 - pserver)
    # The first pserver has row 4 at once and row 0, of which there are gradients, later; the second has row 5 at once.
    for pserver, answers, rows in ((0, 2, 2), (1, 1, 1)):
        (question,) = of(capture, "wire", pserver, step=1, rank=0)
        (held,) = of(capture, "held", pserver, step=1, rank=0)
        queued, replies = (of(capture, kind, pserver, step=1, rank=0) for kind in ("reply_queued", "reply_wire"))
        assert {question.slice, held.slice, *(one.slice for one in replies)} == {question.slice}
        assert question.slice >= FIRST_LOOKUP
        assert (held.begin_ns, held.nbytes) == (question.end_ns, 4 * DIM * rows)
        assert held.end_ns <= queued[-1].begin_ns
        assert [one.begin_ns for one in replies] == [one.end_ns for one in queued]
        assert all(one.begin_ns < one.end_ns for one in replies)
        assert queued[0].begin_ns < sums[pserver].end_ns
        assert (len(replies), held.end_ns >= sums[pserver].end_ns) == (answers, answers == 2)
    (told,) = of(capture, "wire", 1, step=1, rank=1)
    assert capture.is_lookup(told)
    assert not of(capture, "held", 1, step=1, rank=1)


def of(capture: Capture, kind: str, pserver: int, step: int, rank: int | None = None) -> list[Span]:
    return [
        span
        for span in capture.spans
        if (span.kind, span.pserver, span.step) == (kind, pserver, step) and rank in (None, span.rank)
    ]
