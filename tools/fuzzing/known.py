"""What is known to fail and not mended: features, by the names of `cases.features`, that are not drawn together."""

from __future__ import annotations

# features -> what is known of it. Faults of tfps leave when they are mended.
KNOWN: dict[str, str] = {}
