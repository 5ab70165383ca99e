"""``default``: an adaptive deactivate ratio and a cost/benefit gate in front of every activation.

Rules (specification 3.1), S = samples of a sync cycle:

- take the hybrids back whenever they are lent, once int(S x ratio) completed samples are there;
- lend when gap = ratio x S - surplus is positive and gap x seconds-per-sample exceeds the measured switch cost;
- after a cycle that really waited for samples, ratio += clip(waited / S, 0.02, 0.1); after one that did not, -= 0.02.

What differs from the peer: the ratio stays in [min_ratio, 1] (its ratio sinks without floor, so that lending comes
dozens of starved cycles late), only complete activate+deactivate pairs enter the switch cost, and an update counts once
per weight version. Invariant: without standalone replicas ratio is 1, every sync activates, nothing adapts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridsched.errors import ConfigError
from hybridsched.scheduling.policies.ratio import RatioPolicyBase, checked_ratio
from hybridsched.scheduling.policies.switch_cost import SwitchCost
from hybridsched.scheduling.policy import DynamicScheduleContext, register_policy


def _checked_positive(key: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"policy 'default': {key} is {value!r}; it must be a finite number, 0 or more")
    return float(value)


@register_policy("default")
class DefaultDynamicSchedulePolicy(RatioPolicyBase):
    """Lend while training is starved, less so the less it waits.

    deactivate_ratio: initial ratio. only_hybrid: there are no standalone replicas. increase_min, increase_max,
    decrease: bounds of one step of the ratio. min_ratio: floor of the ratio. switch_history: pairs in the switch-cost
    mean. initial_switch_cost_s: cost before the first pair. initial_per_sample_s: waiting time per sample before the
    first measurement; large on purpose, so that the first decisions lend. compat_peer: no floor, as in published runs.
    Raises ConfigError for values that cannot be.
    """

    def __init__(
        self,
        deactivate_ratio: float = 0.3,
        only_hybrid: bool = False,
        *,
        increase_min: float = 0.02,
        increase_max: float = 0.1,
        decrease: float = 0.02,
        min_ratio: float = 0.0,
        switch_history: int = 3,
        initial_switch_cost_s: float = 10.0,
        initial_per_sample_s: float = 1000.0,
        compat_peer: bool = False,
    ) -> None:
        self.only_hybrid = only_hybrid
        self.min_ratio = checked_ratio("default", "min_ratio", min_ratio)
        self.increase_min = checked_ratio("default", "increase_min", increase_min)
        self.increase_max = checked_ratio("default", "increase_max", increase_max)
        self.decrease = checked_ratio("default", "decrease", decrease)
        if self.increase_min > self.increase_max:
            raise ConfigError(f"policy 'default': increase_min {increase_min} is above increase_max {increase_max}")
        if isinstance(switch_history, bool) or not isinstance(switch_history, int) or switch_history < 1:
            raise ConfigError(f"policy 'default': switch_history is {switch_history!r}; it must be an integer from 1")
        self.compat_peer = compat_peer
        ratio = checked_ratio("default", "deactivate_ratio", deactivate_ratio)
        self.deactivate_ratio = 1.0 if only_hybrid else max(ratio, self.min_ratio)
        self.per_sample_s = _checked_positive("initial_per_sample_s", initial_per_sample_s)
        self.switch_cost = SwitchCost(switch_history, _checked_positive("initial_switch_cost_s", initial_switch_cost_s))
        self.updated_version: int | None = None

    def should_activate_after_step(
        self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext
    ) -> bool:
        """True when the shortfall, in seconds of waiting, exceeds the cost of a switch there and back."""
        if self._alone(ctx):
            self.last_reason = "no standalone replicas: hybrids generate after every sync"
            return True
        self._measure(ctx)
        ratio, surplus = self._ratio(ctx), ctx.surplus
        gap = ratio * ctx.step_required_samples - surplus
        if gap <= 0:
            self.last_reason = f"surplus {surplus} covers ratio {ratio:.3f} x {ctx.step_required_samples}"
            return False
        benefit, cost = gap * self.per_sample_s, self.switch_cost.seconds
        lend = benefit > cost
        self.last_reason = (
            f"gap {gap:.1f} samples x {self.per_sample_s:.3g} s = {benefit:.3g} s "
            f"{'>' if lend else '<='} switch cost {cost:.3g} s"
        )
        return lend

    def update_after_step(self, global_steps: int, ctx: DynamicScheduleContext) -> None:
        """Adapt the ratio and take in the measured switches, once per version. Version 0 ended no cycle: no step."""
        if self.updated_version is not None and global_steps <= self.updated_version:
            return
        self.updated_version = global_steps
        self.switch_cost.observe(
            ctx.last_activate_duration_s, ctx.last_deactivate_duration_s, ctx.activations, ctx.deactivations
        )
        if global_steps <= 0 or self._alone(ctx):
            return
        self._measure(ctx)
        waited, size = ctx.total_wait_samples, ctx.step_required_samples
        if waited > 0:
            step = min(self.increase_max, max(self.increase_min, waited / size))
            self.deactivate_ratio = min(1.0, self.deactivate_ratio + step)
            self.last_reason = f"waited for {waited} of {size} samples: ratio +{step:.3f} = {self.deactivate_ratio:.3f}"
        else:
            lower = self.deactivate_ratio - self.decrease
            self.deactivate_ratio = lower if self.compat_peer else max(self.min_ratio, lower)
            self.last_reason = f"waited for no sample: ratio lowered to {self.deactivate_ratio:.3f}"

    def state_dict(self) -> dict[str, Any]:
        """What was learned; the knobs come from the configuration."""
        return {
            "deactivate_ratio": self.deactivate_ratio,
            "per_sample_s": self.per_sample_s,
            "switch_cost": self.switch_cost.state(),
            "updated_version": self.updated_version,
            "last_reason": self.last_reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo ``state_dict``. Without standalone replicas the ratio stays 1."""
        self.deactivate_ratio = 1.0 if self.only_hybrid else float(state["deactivate_ratio"])
        self.per_sample_s = float(state["per_sample_s"])
        self.switch_cost.load(state["switch_cost"])
        self.updated_version = state["updated_version"]
        self.last_reason = state["last_reason"]

    def _measure(self, ctx: DynamicScheduleContext) -> None:
        """Seconds per sample waited for; a cycle without real waiting leaves the last value."""
        samples, seconds = ctx.total_wait_samples, ctx.total_wait_s
        if samples > 0 and math.isfinite(seconds) and seconds > 0:
            self.per_sample_s = seconds / samples
