"""Notices steps that an error stopped halfway, so that nothing waits at a gate that will never open.

docs/design.md ("Steps that TensorFlow stops") says how that happens.

Tested in tests/strategy/test_stopped_steps.py and tests/runtime/test_transfers.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

from tfps.errors import TfpsError, to_text
from tfps.exchange.interface import Exchange
from tfps.graph.ops import Gate
from tfps.runtime.transfers import DeferredUpdate

_LOOK_S = 1.0  # interval between checks of the gates
_LOST_AFTER = 30  # checks without any message after which a closed gate is lost


class GateWatch:
    """Puts an error into closed gates: after a failure, or without `activity` (messages in flight and in total)."""

    def __init__(self, exchange: Exchange, activity: Callable[[], tuple[int, int]]) -> None:
        self._exchange, self._activity = exchange, activity
        self._gates: weakref.WeakSet[Gate] = weakref.WeakSet()
        self._stopped = False
        self._wake = threading.Event()  # set at failure and stop
        self._thread = threading.Thread(target=self._run, name="tfps-gates", daemon=True)
        self._thread.start()
        exchange.add_failure_listener(lambda error: self._wake.set())

    def add(self, gates: Sequence[Gate]) -> None:
        self._gates.update(gates)

    def gates(self) -> list[Gate]:
        return list(self._gates)

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        self._thread.join()

    def give_up(self, error: TfpsError) -> None:
        """Puts `error` into all closed gates."""
        for gate in self.gates():
            if gate.closed:
                gate.open(to_text(error))

    def _run(self) -> None:
        looks: weakref.WeakKeyDictionary[Gate, int] = weakref.WeakKeyDictionary()
        seen = -1
        while not self._stopped:
            self._wake.wait(_LOOK_S)
            failure = self._exchange.failure
            if failure is None:
                under_way, messages = self._activity()
                quiet, seen = under_way == 0 and messages == seen, messages
                closed = [gate for gate in self.gates() if gate.closed] if quiet else []
                looks = weakref.WeakKeyDictionary({gate: looks.get(gate, 0) + 1 for gate in closed})
                lost = [gate for gate, count in looks.items() if count >= _LOST_AFTER]
                if not lost:
                    continue
                failure = stopped_step(self._exchange.rank, lost[0].names[0])
                self._exchange.fail(failure)
            self.give_up(failure)
            threading.Event().wait(_LOOK_S)


class Rounds:
    """Detects steps that an error stopped between two sends. Pump thread only.

    Gates order the sends of a bucket: once a later step sends it, an earlier one that has sent others never will.
    """

    def __init__(self) -> None:
        self._missing: dict[int, set[DeferredUpdate]] = {}  # by graph run: the group's unsent transfers

    def skipped(self, graph_run: int, transfer: DeferredUpdate) -> bool:
        """Notes that `transfer` is sent; returns whether an earlier step has skipped its bucket."""
        for earlier, missing in self._missing.items():
            if earlier == graph_run:
                break
            if any(each.bucket == transfer.bucket for each in missing):
                return True
        if graph_run not in self._missing:
            self._missing[graph_run] = set(transfer.group)
        missing = self._missing[graph_run]
        missing.discard(transfer)
        if not missing:
            del self._missing[graph_run]
        return False


def stopped_step(rank: int, name: str) -> TfpsError:
    """Returns the error for a step that TensorFlow stopped before it sent the gradient of `name`."""
    return TfpsError(
        f"rank {rank}: a step was stopped by an error before it had sent the gradient of {name}; "
        "the variables may be half updated: restore a checkpoint under a new strategy"
    )
