"""Everything that decides, and the public policy API. Pure: no I/O, asyncio, clock or randomness.

What a policy file imports::

    from hybridsched.scheduling import DynamicScheduleContext, DynamicSchedulePolicyBase, register_policy
"""

from __future__ import annotations

from hybridsched.scheduling.policies import (
    DefaultDynamicSchedulePolicy,
    FixedRatioDynamicSchedulePolicy,
    LookaheadDynamicSchedulePolicy,
    StaticFullyAsyncPolicy,
)
from hybridsched.scheduling.policy import (
    DynamicScheduleContext,
    DynamicSchedulePolicyBase,
    build_policy,
    register_policy,
    registered_policies,
)

__all__ = [
    "DefaultDynamicSchedulePolicy",
    "DynamicScheduleContext",
    "DynamicSchedulePolicyBase",
    "FixedRatioDynamicSchedulePolicy",
    "LookaheadDynamicSchedulePolicy",
    "StaticFullyAsyncPolicy",
    "build_policy",
    "register_policy",
    "registered_policies",
]
