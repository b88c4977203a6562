"""What is known to fail and not mended: features, by the names of `cases.features`, that are not drawn together."""

from __future__ import annotations

# features -> what is known of it. Faults of tfps leave when they are mended.
KNOWN: dict[str, str] = {
    "moving mean + rows that do not divide": "replicas with other parts of each step follow means of their own, which "
    "no weighting of the changes alone makes that of the whole batch",
}
