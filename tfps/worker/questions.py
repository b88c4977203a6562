"""What the classes have in common that ask pservers something beside a worker's pushes.

Tested in tests/worker/test_kept.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfps.wire.control import Pserver
from tfps.worker.bucket import PushedBucket
from tfps.worker.membership import Membership


class Questions:
    """Any thread. Blocks on the network.

    Args:
        buckets: all declared ones, by number; grows over time.
        timeout_s: of one call.
        check_open: raises why nothing can be asked any more, if so.
    """

    def __init__(
        self,
        pservers: Sequence[Pserver],
        membership: Membership,
        buckets: Sequence[PushedBucket],
        timeout_s: float,
        check_open: Callable[[], None],
    ) -> None:
        self._pservers, self._membership, self._buckets, self._timeout_s = pservers, membership, buckets, timeout_s
        self._check_open = check_open
