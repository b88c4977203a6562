"""Faults of tfps that are known and not mended yet: features, by the names of `cases.features`, that are not drawn."""

from __future__ import annotations

# feature -> what is known of it. To be emptied when it is mended.
KNOWN: dict[str, str] = {}
