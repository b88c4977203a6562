"""Cuts a model into fragments that are exchanged in turn.

As in the strided pattern of Streaming DiLoCo (https://arxiv.org/abs/2501.18512): fragment p of P has layers p, p + P,
p + 2 P and so on, in order of creation. Layers of different sizes go to the fragment with the fewest bytes so far,
which is the same for equal ones.

Tested in tests/strategy/test_fragments.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tfps.errors import ConfigError


def cut(names: Sequence[str], sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Returns the places of the variables of each fragment, in order.

    Args:
        names: of all variables in order of creation; those of a layer have its name before the last `/`. A layer stays
            whole, unless there are fewer layers than fragments.
        sizes: in bytes.

    Raises:
        ConfigError: there are fewer variables than `parts`.
    """
    if parts > len(names):
        raise ConfigError(
            f"fragments must be at most the number of variables that an optimizer updates, {len(names)}, got {parts}"
        )
    places = range(len(names))
    units = [list(unit) for _, unit in itertools.groupby(places, key=lambda place: names[place].rpartition("/")[0])]
    if len(units) < parts:
        units = [[place] for place in places]
    fragments: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for position, unit in enumerate(units):
        empty = parts - sum(map(bool, fragments))
        last = len(units) - position == empty  # each fragment gets something, also beside a very large layer
        choice = min(range(parts), key=lambda part: (last and bool(fragments[part]), filled[part], part))
        fragments[choice] += unit
        filled[choice] += sum(sizes[place] for place in unit)
    return fragments
