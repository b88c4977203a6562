"""A worker's place in its job.

Tested in tests/worker/test_joining.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Membership:
    """The first pserver's answer to Join, sent with every later call; all pservers of a job know it.

    Attributes:
        rank: this worker's number, from 0.
        workers: how many the job has.
        incarnation: tells this run of the job from others; members know it.
    """

    rank: int
    workers: int
    incarnation: str

    @property
    def run(self) -> str:
        """Tells this run from others as well, to anybody: the incarnation cannot be found out by it."""
        return hashlib.sha256(self.incarnation.encode()).hexdigest()[:16]
