"""``static_fully_async``: never lend. The baseline, and with hybrids only the classic colocated loop.

With standalone replicas: hybrids are taken back at once (waiting for 0 samples) and never lent again, as if lending
were switched off. Without any (``rollout.nnodes: 0``): they generate a whole cycle of samples after every sync, then
train it; anything else would leave nobody to generate.
"""

from __future__ import annotations

from hybridsched.scheduling.policy import DynamicScheduleContext, DynamicSchedulePolicyBase, register_policy


@register_policy("static_fully_async")
class StaticFullyAsyncPolicy(DynamicSchedulePolicyBase):
    """Trainer GPUs only train. deactivate_ratio is accepted and has no effect, so policies can be swapped by name."""

    def __init__(self, deactivate_ratio: float = 0.0, only_hybrid: bool = False) -> None:
        self.only_hybrid = only_hybrid

    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
        """Always, when they are lent."""
        self.last_reason = "hybrids are lent" if is_hybrid_active else "no hybrid is lent"
        return is_hybrid_active

    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        """0; without standalone replicas a whole cycle."""
        colocated = self.only_hybrid or ctx.only_hybrid
        self.last_reason = "colocated: one whole cycle" if colocated else "static: at once"
        return ctx.step_required_samples if colocated else 0

    def should_activate_after_step(
        self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext
    ) -> bool:
        """Never; without standalone replicas always."""
        colocated = self.only_hybrid or ctx.only_hybrid
        self.last_reason = "colocated: nobody else generates" if colocated else "static: hybrids are never lent"
        return colocated
