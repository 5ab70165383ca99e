"""What the policies with a deactivate ratio share: hybrids are taken back once int(S x ratio) samples are there.

Owns the ratio's meaning and its check. Invariant: without standalone replicas the ratio counts as 1.
Does not: decide when to lend, or change the ratio (``default`` and ``fixed_ratio`` do, or do not).
"""

from __future__ import annotations

from hybridsched.errors import ConfigError
from hybridsched.scheduling.policy import DynamicScheduleContext, DynamicSchedulePolicyBase


def checked_ratio(policy: str, key: str, value: float) -> float:
    """``value`` as float. Raises ConfigError unless it is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"policy {policy!r}: {key} is {value!r}; it must be a number from 0 to 1")
    return float(value)


class RatioPolicyBase(DynamicSchedulePolicyBase):
    """Base of policies that wait for a share of the sync cycle's samples; S = samples of a sync cycle."""

    deactivate_ratio: float
    only_hybrid: bool

    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
        """Always, when they are lent."""
        self.last_reason = "hybrids are lent" if is_hybrid_active else "no hybrid is lent"
        return is_hybrid_active

    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        """int(S x ratio)."""
        ratio = self._ratio(ctx)
        samples = int(ctx.step_required_samples * ratio)
        self.last_reason = f"ratio {ratio:.3f} x {ctx.step_required_samples} = {samples} samples"
        return samples

    def request_rebalance(self, global_steps: int, ctx: DynamicScheduleContext) -> None:
        """Ask the rollouter to spread the requests over old and new replicas."""
        if self._rollouter is not None:
            self._rollouter.rebalance_requests()

    def _alone(self, ctx: DynamicScheduleContext) -> bool:
        return self.only_hybrid or ctx.only_hybrid

    def _ratio(self, ctx: DynamicScheduleContext) -> float:
        return 1.0 if self._alone(ctx) else self.deactivate_ratio
