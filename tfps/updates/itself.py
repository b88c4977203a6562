"""Variables that update themselves: an optimizer hands their gradients over, and keeps nothing of them.

Tested in tests/layers/test_optimizers.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfps.types import Optimizer, Value, Variable


class UpdatesItself:
    """What an optimizer knows of such a variable. `optimizer`: its own; None: whichever is given."""

    path: str
    optimizer: Optimizer | None

    def declare(self, optimizer: Optimizer) -> None:
        """Says how it is updated, before any update."""

    def apply(self, gradient: Value, optimizer: Optimizer) -> None:
        """Takes this replica's gradient, once declared."""


def others(variables: Sequence[Variable]) -> list[Variable]:
    """`variables` without such ones: what optimizers keep slots for."""
    return [each for each in variables if not isinstance(each, UpdatesItself)]
