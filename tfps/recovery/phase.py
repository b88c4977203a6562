"""Where a worker is that goes on with other pservers.

Tested in tests/worker/test_lost_pservers.py.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """The stages that a worker passes through when a pserver is lost; docs/design.md has the picture."""

    RUNNING = "running"
    MEETING = "meeting"  # it looks for the other workers, and restores what pservers keep
    REPLAYING = "replaying"  # it goes on; the pservers do not have all that has been answered, yet
    ENDED = "ended"  # it has failed or was closed


# What may follow: anything ends, and a pserver may be lost at any time.
NEXT = {
    Phase.RUNNING: {Phase.MEETING, Phase.ENDED},
    Phase.MEETING: {Phase.MEETING, Phase.REPLAYING, Phase.RUNNING, Phase.ENDED},
    Phase.REPLAYING: {Phase.MEETING, Phase.RUNNING, Phase.ENDED},
    Phase.ENDED: {Phase.ENDED},
}
