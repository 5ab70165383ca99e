"""``fixed_ratio``: as ``default``, with a ratio that never changes and without the cost/benefit gate.

For ablations: whatever differs from ``default`` comes from adapting or from the gate (specification 3.3).
Invariant: deciding changes nothing in the policy but its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridsched.scheduling.policies.ratio import RatioPolicyBase, checked_ratio
from hybridsched.scheduling.policy import DynamicScheduleContext, register_policy


@register_policy("fixed_ratio")
class FixedRatioDynamicSchedulePolicy(RatioPolicyBase):
    """Lend whenever the queue holds less than ratio x S samples after a sync.

    deactivate_ratio: the ratio. only_hybrid: there are no standalone replicas (then ratio 1, always lent).
    Raises ConfigError for a ratio outside [0, 1].
    """

    def __init__(self, deactivate_ratio: float = 0.3, only_hybrid: bool = False) -> None:
        ratio = checked_ratio("fixed_ratio", "deactivate_ratio", deactivate_ratio)
        self.deactivate_ratio = 1.0 if only_hybrid else ratio
        self.only_hybrid = only_hybrid

    def should_activate_after_step(
        self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext
    ) -> bool:
        """True when the surplus is below ratio x S."""
        if self._alone(ctx):
            self.last_reason = "no standalone replicas: hybrids generate after every sync"
            return True
        gap = self.deactivate_ratio * ctx.step_required_samples - ctx.surplus
        self.last_reason = f"gap {gap:.1f} samples at ratio {self.deactivate_ratio:.3f}, surplus {ctx.surplus}"
        return gap > 0

    def state_dict(self) -> dict[str, Any]:
        """Nothing is learned, and the ratio comes from the configuration: only the last reason."""
        return {"last_reason": self.last_reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo ``state_dict``."""
        self.last_reason = state["last_reason"]
