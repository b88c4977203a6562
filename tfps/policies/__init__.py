"""The policy of each mode: the one place that knows all of them.

Tested in tests/policies/test_policy.py.
"""

from __future__ import annotations

from tfps.policies.asynchronous import Asynchronous
from tfps.policies.diloco import DiLoCo, LocalSGD
from tfps.policies.policy import Policy

POLICIES: dict[str, type[Policy]] = {"sync": Policy, "async": Asynchronous, "diloco": DiLoCo, "local": LocalSGD}
