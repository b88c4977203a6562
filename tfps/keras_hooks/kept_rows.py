"""What stands for the rows of a table among arrays of weights: the name of a moment at which they are kept.

Tested in tests/layers/test_copied_weights.py.
"""

from __future__ import annotations

import numpy as np

from tfps.types import Argument, Array, Json


class KeptRows(np.ndarray):
    """Zeros of the shape of what stands for a table, from `get_weights`; `set_weights` goes back to that moment.

    Copies say the same. What is computed from it, or comes out of a file, says nothing.

    Attributes:
        said: which moment of which table, as JSON has it; None: nothing.
        holder: keeps the rows of that moment, with other references to it.
    """

    said: Json | None
    holder: object

    @classmethod
    def of(cls, values: Array, said: Json, holder: object = None) -> KeptRows:
        made = values.view(cls)
        made.said, made.holder = said, holder
        return made

    def __array_finalize__(self, other: Argument) -> None:
        self.said = self.holder = None

    def copy(self, *args: Argument, **options: Argument) -> KeptRows:
        copied: Array = super().copy(*args, **options)
        return KeptRows.of(copied, self.said, self.holder)

    def __copy__(self) -> KeptRows:
        return self.copy()

    def __deepcopy__(self, memo: Argument = None) -> KeptRows:
        return self.copy()
