"""The built-in policies. Importing this package registers all of them."""

from __future__ import annotations

from hybridsched.scheduling.policies.default import DefaultDynamicSchedulePolicy
from hybridsched.scheduling.policies.fixed_ratio import FixedRatioDynamicSchedulePolicy
from hybridsched.scheduling.policies.lookahead import LookaheadDynamicSchedulePolicy
from hybridsched.scheduling.policies.static_fully_async import StaticFullyAsyncPolicy

__all__ = [
    "DefaultDynamicSchedulePolicy",
    "FixedRatioDynamicSchedulePolicy",
    "LookaheadDynamicSchedulePolicy",
    "StaticFullyAsyncPolicy",
]
