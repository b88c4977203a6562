from __future__ import annotations

import numpy as np

from tfps.embeddings.prefetch import Prefetcher
from tfps.exchange.interface import OnReply
from tfps.exchange.requests import Ids


class Asked:
    """A request, as an exchange has them."""

    def __init__(self, ids: Ids, step: int) -> None:
        self.ids, self.step = ids, step

    def __call__(self, on_reply: OnReply) -> None:
        raise NotImplementedError


class Recorded:
    """What was asked for ahead."""

    def __init__(self) -> None:
        self.requests: list[Asked] = []
        self.ahead = Prefetcher(self._prefetch)

    def _prefetch(self, ids: Ids, step: int) -> Asked:
        self.requests.append(Asked(ids, step))
        return self.requests[-1]

    def asked(self) -> list[tuple[int, list[int]]]:
        found = [(each.step, each.ids.tolist()) for each in self.requests]
        self.requests.clear()
        return found


def of(*ids: int) -> Ids:
    return np.array(ids, np.int64)


def test_the_next_batch_is_asked_for_when_a_step_has_all_its_lookups() -> None:
    recorded = Recorded()
    ahead = recorded.ahead
    ahead.staged([of(1), of(2)])
    ahead.staged([of(3), of(4)])
    assert recorded.asked() == []
    assert ahead.take(of(1), 0) is None
    ahead.began(0, of(1))
    assert recorded.asked() == [(1, [3]), (1, [4])]
    for ids in (of(4), of(3)):
        request = ahead.take(ids, 1)
        assert isinstance(request, Asked)
        assert request.ids.tolist() == ids.tolist()
    assert ahead.take(of(3), 1) is None  # each once
    ahead.began(1, None)
    assert recorded.asked() == []
    ahead.staged([of(5)])  # it comes late
    assert recorded.asked() == [(2, [5])]


def test_a_step_that_was_prefetched_wrongly_asks_by_itself_and_the_next_is_prefetched_again() -> None:
    recorded = Recorded()
    ahead = recorded.ahead
    ahead.began(0, of(9))
    ahead.staged([of(1)])
    assert recorded.asked() == [(1, [1])]
    ahead.staged([of(2)])
    ahead.staged([of(3)])
    ahead.staged([of(4)])
    assert ahead.take(of(1), 2) is None  # of another step
    assert ahead.take(of(3), 1) is None
    ahead.began(1, of(3))
    assert recorded.asked() == [(2, [4])]


def test_batches_of_other_loops_do_not_count() -> None:
    recorded = Recorded()
    ahead = recorded.ahead
    for other in range(100, 103):
        ahead.staged([of(other)])
    ahead.began(0, of(1))
    assert recorded.asked() == []
    for own in range(20):
        ahead.staged([of(own)])
    ahead.began(1, of(18))
    assert recorded.asked() == [(2, [19])]


def test_nothing_that_was_asked_for_before_rows_were_replaced_is_used() -> None:
    recorded = Recorded()
    ahead = recorded.ahead
    ahead.staged([of(1)])
    ahead.began(0, None)
    ahead.clear()
    assert ahead.take(of(1), 1) is None
    ahead.staged([of(2)])
    assert recorded.asked() == [(1, [1])]
