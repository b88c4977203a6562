"""Memory of its own for one array, which grows without a copy and takes no memory where nothing was written.

Tested in tests/tables/test_index.py.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np

from tfps.types import Array, DType

_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # what is never written to must not count as promised memory
_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)


class Region:
    """An array [items, width], or [items] without `width`, zero at first.

    Where it grows the kernel moves page tables, not pages. Nobody may keep `array` or `records` over a `grow`: then the
    numbers have to be copied, and the old memory remains until they let go.

    `sparse`: few of the items may ever be written, so that huge pages would waste memory.
    """

    def __init__(self, dtype: DType | type, items: int, width: int | None = None, *, sparse: bool = False) -> None:
        self._dtype, self._width, self._sparse = np.dtype(dtype), width, sparse
        self._item_bytes = self._dtype.itemsize * (width or 1)
        self.items = items
        self._map = self._mapped(items)
        self._view()

    def _mapped(self, items: int) -> mmap.mmap:
        size = max(items * self._item_bytes, mmap.PAGESIZE)
        try:
            found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except (OSError, OverflowError, ValueError) as error:
            raise self._no_memory(items) from error
        if self._sparse and _NO_HUGE_PAGES is not None:
            try:
                found.madvise(_NO_HUGE_PAGES)
            except OSError:  # the kernel has none
                self._sparse = False
        return found

    def _no_memory(self, items: int) -> MemoryError:
        return MemoryError(f"no memory for {items} items of {self._item_bytes} bytes")

    def _view(self) -> None:
        #: All items.
        self.array: Array = np.frombuffer(self._map, self._dtype, self.items * (self._width or 1))
        if self._width is not None:
            self.array = self.array.reshape(self.items, self._width)
        #: The same, each item as one value, which NumPy's `put` copies fastest.
        self.records: Array = np.frombuffer(self._map, np.dtype((np.void, self._item_bytes)), self.items)

    def grow(self, items: int) -> None:
        """Makes room for `items`; the new ones are zero. Raises MemoryError, and then nothing has changed."""
        if items <= self.items:
            return
        del self.array, self.records
        try:
            self._map.resize(max(items * self._item_bytes, mmap.PAGESIZE))
            self.items = items
        except (BufferError, SystemError):  # someone holds a view, or the system cannot
            larger = self._mapped(items)
            used = self.items * self._item_bytes
            np.frombuffer(larger, np.uint8)[:used] = np.frombuffer(self._map, np.uint8)[:used]
            self._map, self.items = larger, items
        except (OSError, OverflowError, ValueError) as error:
            raise self._no_memory(items) from error
        finally:
            self._view()

    def put(self, positions: Array, values: Array) -> None:
        """Writes `values`, an item for each position; the positions are unique."""
        values = np.ascontiguousarray(values, self._dtype)
        np.put(self.records, positions, values.reshape(-1).view(self.records.dtype), mode="clip")
