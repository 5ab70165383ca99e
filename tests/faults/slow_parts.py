"""Parts of a run that take their time, so that there is something to kill: a slow reward, a policy that alternates."""

from __future__ import annotations

import time
from typing import Any

from hybridsched.rewards.builtin import BUILTINS
from hybridsched.scheduling import DynamicScheduleContext, DynamicSchedulePolicyBase


def reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, seconds: float = 0
) -> Any:
    """count_on, after ``seconds``."""
    time.sleep(seconds)
    return BUILTINS["count_on"](
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )


class EverySecondCycle(DynamicSchedulePolicyBase):
    """Lends in even versions until all samples of the cycle are there, and not at all in odd ones."""

    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
        return True

    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        return ctx.step_required_samples

    def should_activate_after_step(
        self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext
    ) -> bool:
        return global_steps % 2 == 0
