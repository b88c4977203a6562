"""How many parameters Keras counts: those of a table are its rows, not what stands for it.

Tested in tests/layers/test_copied_weights.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfps.embeddings.variable import TableVariable
from tfps.exchange.codecs import ITEM_BYTES
from tfps.keras_hooks.hooks import replaces
from tfps.keras_hooks.keras_private import summary_utils
from tfps.types import Function, Variable

_TEST = "tests/layers/test_copied_weights.py"


@replaces(summary_utils, "count_params", _TEST)
def _count(original: Function, weights: Sequence[Variable]) -> int:
    """Counts the rows of tables: of one for any id those that there are."""
    others, tables = _apart(weights)
    return int(original(others)) + sum(each.parameters for each in tables)


@replaces(summary_utils, "weight_memory_size", _TEST, "as `count_params`")
def _memory(original: Function, weights: Sequence[Variable]) -> float:
    others, tables = _apart(weights)
    return float(original(others)) + sum(
        ITEM_BYTES * each.parameters for each in {id(one): one for one in tables}.values()
    )


def _apart(weights: Sequence[Variable]) -> tuple[list[Variable], list[TableVariable]]:
    others = [each for each in weights if not isinstance(each, TableVariable)]
    return others, [each for each in weights if isinstance(each, TableVariable)]
