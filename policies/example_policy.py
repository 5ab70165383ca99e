"""A complete custom policy, to copy. Use it with

    async_training:
      use_dynamic_resource_scheduling: true
      dynamic_schedule_policy: policies/example_policy.py
      dynamic_schedule_policy_kwargs: {target_queue: 0.5, patience: 2}

It keeps the queue near a target level: it lends when the queue has been below the target for ``patience`` cycles in a
row, lends only as many hybrids as the shortage is worth, and takes them back when the target is reached. Everything a
policy may define is here; only the three methods marked (required) must be.
"""

from __future__ import annotations

import math

from hybridsched.scheduling import DynamicScheduleContext, DynamicSchedulePolicyBase, register_policy


@register_policy("example")
class ExamplePolicy(DynamicSchedulePolicyBase):
    """Keep about ``target_queue`` x S samples in the queue.

    Arguments come from ``kwargs:`` of a policy YAML or from ``dynamic_schedule_policy_kwargs``. ``deactivate_ratio``
    and ``only_hybrid`` are offered by the framework to every policy that has arguments of these names.
    """

    def __init__(self, target_queue: float = 0.5, patience: int = 1, only_hybrid: bool = False) -> None:
        if not 0 < target_queue <= 1:
            raise ValueError(f"target_queue is {target_queue}; it must be above 0 and at most 1")
        self.target_queue = target_queue
        self.patience = patience
        self.only_hybrid = only_hybrid
        # Plain attributes are saved in checkpoints and restored on resume without further code.
        self.cycles_below = 0

    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
        """(required) Before each collection while hybrids are lent. False: go on lending, ask again later."""
        return is_hybrid_active

    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        """(required) Completed samples to wait for before the hybrids go back. The framework caps what cannot come."""
        samples = math.ceil(self.target_queue * ctx.step_required_samples)
        self.last_reason = f"target level {self.target_queue:.2f} = {samples} samples"  # shown in log and report
        return samples

    def should_activate_after_step(
        self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext
    ) -> bool:
        """(required) After each weight sync. True: lend for the next cycle."""
        if self.only_hybrid:
            return True
        # The current cycle is the one that `update_after_step` has not counted yet.
        below = self.cycles_below + 1 if self._missing(ctx) > 0 else 0
        self.last_reason = f"{self._missing(ctx):.0f} samples below target, {below} of {self.patience} cycles"
        return below >= self.patience

    def lend_count(self, ctx: DynamicScheduleContext) -> int | None:
        """Lend a share of the hybrids as large as the shortage; None would mean all of them."""
        share = self._missing(ctx) / (self.target_queue * ctx.step_required_samples)
        return math.ceil(min(1.0, max(0.0, share)) * ctx.hybrid_replicas)

    def request_rebalance(self, global_steps: int, ctx: DynamicScheduleContext) -> None:
        """After an activation. Without this call only new requests go to the hybrids."""
        if self._rollouter is not None:
            self._rollouter.rebalance_requests()

    def update_after_step(self, global_steps: int, ctx: DynamicScheduleContext) -> None:
        """At the end of each cycle."""
        self.cycles_below = self.cycles_below + 1 if self._missing(ctx) > 0 else 0

    def _missing(self, ctx: DynamicScheduleContext) -> float:
        surplus = ctx.total_generated_samples - ctx.expected_samples
        return self.target_queue * ctx.step_required_samples - surplus
