"""Faults of tfps that are known and not mended yet: features, by the names of `cases.features`, that are not drawn."""

from __future__ import annotations

# feature -> what is known of it. To be emptied when it is mended.
KNOWN: dict[str, str] = {
    "rows that do not divide": "parts of a batch that are not equally large are weighed wrongly",
    "replica without rows": "NaN where a replica has no rows",
    "checkpoint every 2 batches": "ModelCheckpoint(save_freq=2) saves in the middle of an epoch",
    "guide": "a train_step that returns the nested results of compiled metrics",
    "outside": "compile() after fit outside of the scope",
    "interrupted": "Ctrl-C within fit, then the same call again",
    "eager + accumulation": "all ranks hang at a step that exchanges, after one that did not",
    "Loop + accumulation": "the same in a loop of one's own",
    "masked loss": "a mask divides each replica's loss by its own number of valid steps",
}
