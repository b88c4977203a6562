"""Where a program is in its training: which call of `fit`, which epoch, which iterator over the data.

Each rank keeps its own; a worker that joins takes over that of the others (training_state.py).

Tested in tests/elastic/test_joined.py.
"""

from __future__ import annotations

import dataclasses

from tfps.graph.patches import BaseStrategy
from tfps.keras_hooks.keras_private import begin_at
from tfps.types import Argument, Batches, Model

NEVER = 2**31  # an epoch that no training has


def agreement_of(strategy: BaseStrategy) -> Argument:
    """How its ranks agree on batches (`BatchAgreement`); None: nobody else takes any."""
    staging = strategy.extended.staging
    return None if staging is None else staging.agreement


@dataclasses.dataclass
class Position:
    """Of the training under way, or of the last one.

    Attributes:
        admits: whether workers may join the job during it.
        training: number of the call of `fit`, from 1; those within others do not count.
        epoch: number of the epoch, as callbacks get it.
        iterator: Keras' iterator over the epochs.
        begun_epochs: epochs that `iterator` has begun, also those of before this worker joined.
        skipped_steps: steps of the next epoch that others have taken.
        seen_steps: steps that others have taken of epochs before, which read the same iterator over the data.
        evaluation: number of the call of `evaluate`, from 1; those within a `fit` do not count.
        fitting: whether a call of `fit` is under way.
        just_joined: whether this worker has joined, and its first epoch has not begun.
        joins: who has joined, until the ranks have compared their states (joining.py).
    """

    admits: bool
    training: int = 0
    epoch: int = 0
    iterator: Batches = None
    begun_epochs: int = 0
    skipped_steps: int = 0
    seen_steps: int = 0
    evaluation: int = 0
    fitting: bool = False
    just_joined: bool = False
    joins: Argument = None
    _moved: Model = None  # whose `fit` begins at another epoch than it was told

    def begin_training(self) -> None:
        """A call of `fit` begins."""
        self.training += 1

    def begin(self, iterator: Batches) -> None:
        """A training begins that reads `iterator`."""
        self.iterator, self.begun_epochs = iterator, 0

    def begin_epoch(self, iterator: Batches) -> tuple[int, int]:
        """An epoch begins that reads `iterator`; returns its steps that are skipped, and those seen before."""
        if iterator is not self.iterator:
            return 0, 0
        skipped, seen = self.skipped_steps, self.seen_steps
        self.skipped_steps = self.seen_steps = 0
        self.begun_epochs += 1
        return skipped, seen

    def move(self, model: Model, epoch: int) -> None:
        """Makes the `fit` of `model` that is under way, and no later one, begin at `epoch`."""
        self._moved = model
        begin_at(model, epoch)

    def end(self) -> None:
        """The training ends."""
        self.joins = None
        if self._moved is not None:
            begin_at(self._moved, None)
            self._moved = None
