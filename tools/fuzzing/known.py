"""Faults of tfps that are known and not mended yet: features, by the names of `cases.features`, that are not drawn."""

from __future__ import annotations

# feature -> what is known of it. To be emptied when it is mended.
KNOWN: dict[str, str] = {
    "eager + accumulation": "several workers hang at a batch after one that exchanged nothing",
    "steps that reduce nothing + accumulation": "the same, in a loop of one's own",
}
