"""The policy of each mode: the one place that knows all of them.

Tested in tests/policies/test_policy.py.
"""

from __future__ import annotations

from tfps.config import Config
from tfps.policies.asynchronous import Asynchronous
from tfps.policies.diloco import DiLoCo, LocalSGD
from tfps.policies.policy import Policy
from tfps.runtime.runtime import Runtime

POLICIES: dict[str, type[Policy]] = {"sync": Policy, "async": Asynchronous, "diloco": DiLoCo, "local": LocalSGD}


def policy_of(config: Config, runtime: Runtime) -> Policy:
    """Returns the policy that `config` asks for."""
    return POLICIES[config.mode](runtime, config)
