"""Training outside of the scope of a strategy with several workers: each of them would do it alone.

Tested in tests/integration/test_scopes.py.
"""

from __future__ import annotations

import logging
import weakref

from tfps.graph.patches import open_strategies
from tfps.types import Model, Optimizer

logger = logging.getLogger("tfps")
_said: weakref.WeakSet[Model | Optimizer] = weakref.WeakSet()


def say_if_alone(model: Model) -> None:
    """Warns, once per model, that a model without strategy is trained by every worker alone; it may be meant so."""
    if model in _said or not _has_others():
        return
    _said.add(model)
    logger.warning(
        "tfps: model %r is not in `with strategy.scope():`; every worker trains it alone. To train it together make it "
        "in the scope, with load_model and clone_model, too",
        model.name,
    )


def say_if_applied_alone(optimizer: Optimizer) -> None:
    """As `say_if_alone`, for a loop of a program's own; not if models have been named, which have optimizers."""
    if _said or not _has_others():
        return
    _said.add(optimizer)
    logger.warning(
        "tfps: the variables that optimizer %r trains are not in `with strategy.scope():`; every worker trains them "
        "alone. To train them together make models and optimizers in the scope",
        optimizer.name,
    )


def _has_others() -> bool:
    return any(strategy.num_workers > 1 for strategy in open_strategies)
