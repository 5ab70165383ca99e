"""``lookahead``: plays a few switch-back points forward with the measured numbers and takes the best.

At every sync it asks ``scheduling/outlook.py`` when a few cycles would end without lending, and with lending until this
or that many samples are queued; while hybrids are lent it asks again after each collection's worth of samples. The
numbers are those of the run: time samples need on a replica (running ones included), training time of a collection,
time of a sync and of a switch there and back, the staleness window, and the prompts that are left: it knows the end of
the data.

Cautious on purpose. What ``default`` would do is always among the plans, and another one must be better by ``margin``.
Each forecast is compared with what then happened: one that leans to one side is corrected (``pace``), and while it fits
badly, or nothing is measured yet, ``default`` answers.

Invariants: a decision looks at no more than ``2 x grid + 4`` plans of ``horizon`` cycles; the same context and state
give the same answer; every answer has a reason of one line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hybridsched.errors import ConfigError
from hybridsched.scheduling.outlook import Forecast, Outlook, play_forward, service_times
from hybridsched.scheduling.policies.default import DefaultDynamicSchedulePolicy
from hybridsched.scheduling.policy import DynamicScheduleContext, DynamicSchedulePolicyBase, register_policy

#: Completed samples before their times are trusted, in collections.
_ENOUGH_COLLECTIONS = 2
#: Weight of the newest forecast error.
_FORGET = 0.5
#: How fast the pace follows what forecasts missed, and how far from 1 it may go.
_PACE_GAIN, _PACE_LOW, _PACE_HIGH = 0.3, 0.8, 1.25
#: Plans that differ by less than this share are equally good.
_SAME = 0.002


@register_policy("lookahead")
class LookaheadDynamicSchedulePolicy(DynamicSchedulePolicyBase):
    """Model-predictive lending on top of ``default``.

    deactivate_ratio, only_hybrid: as ``default``, which answers until enough is measured. horizon: cycles played.
    grid: switch points tried per S samples. margin: how much better than ``default``'s a plan must be. max_error:
    relative forecast error (a running mean) above which ``default`` answers. Raises ConfigError for impossible values.
    """

    def __init__(
        self,
        deactivate_ratio: float = 0.3,
        only_hybrid: bool = False,
        *,
        horizon: int = 3,
        grid: int = 8,
        draws: int = 4,
        margin: float = 0.005,
        max_error: float = 0.3,
    ) -> None:
        for name, value, low in (("horizon", horizon, 1), ("grid", grid, 2), ("draws", draws, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"policy 'lookahead': {name} is {value!r}; it must be an integer from {low}")
        for name, share in (("margin", margin), ("max_error", max_error)):
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < math.inf:
                raise ConfigError(f"policy 'lookahead': {name} is {share!r}; it must be a number from 0")
        self.default = DefaultDynamicSchedulePolicy(deactivate_ratio, only_hybrid)
        self.only_hybrid = only_hybrid
        self.horizon, self.grid, self.draws = horizon, grid, draws
        self.margin, self.max_error = float(margin), float(max_error)
        self.target: int | None = None  # of the running cycle; None: default's
        self.planned_at: float | None = None
        self.expected_s: float | None = None  # length of the running cycle, sync to sync
        self.cycle_began_s: float | None = None
        self.error: float | None = None
        self.pace = 1.0  # samples take this many times what they were seen to take: corrects forecasts that lean

    @property
    def deactivate_ratio(self) -> float:
        """The ratio ``default`` has learned beside; for the run log."""
        return self.default.deactivate_ratio

    def should_activate_after_step(
        self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext
    ) -> bool:
        """True when some plan that lends ends earlier than not lending."""
        answer = self.default.should_activate_after_step(global_steps, is_hybrid_active, ctx)
        self._compare(ctx)
        self.target = self.planned_at = self.expected_s = None
        outlook, why = self._outlook(ctx, lent=False)
        if outlook is None:
            self.last_reason = f"{why}, as default: {self.default.last_reason}"
            return answer
        first = self.default.deactivate_wait_samples(ctx) if answer else None
        self.target, lend = self._plan(ctx, outlook, first)
        return lend

    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
        """False while more than one and a half collections are missing: it is asked again after the next one."""
        if not is_hybrid_active:
            self.last_reason = "no hybrid is lent"
            return False
        if self.target is None:
            return self.default.should_deactivate(global_steps, is_hybrid_active, ctx)
        self._again(ctx)
        missing = min(self.target, ctx.queue_size + ctx.in_flight + (ctx.window_room or 0)) - ctx.queue_size
        return missing <= 1.5 * ctx.required_samples

    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        """The switch point that was found best."""
        if self.target is None:
            samples = self.default.deactivate_wait_samples(ctx)
            self.last_reason = self.default.last_reason
            return samples
        self._again(ctx)
        return self.target

    def update_after_step(self, global_steps: int, ctx: DynamicScheduleContext) -> None:
        """``default`` learns beside."""
        self.default.update_after_step(global_steps, ctx)

    def request_rebalance(self, global_steps: int, ctx: DynamicScheduleContext) -> None:
        """Ask the rollouter to spread the requests over old and new replicas."""
        if self._rollouter is not None:
            self._rollouter.rebalance_requests()

    def lend_count(self, ctx: DynamicScheduleContext) -> int | None:
        """All, unless as many as the window has samples for do as well: the others then stay asleep."""
        if self.target is None or not ctx.samples_per_replica or ctx.window_room is None:
            return None
        samples = ctx.in_flight + ctx.window_room - ctx.standalone_replicas * ctx.samples_per_replica
        fewest = max(1, min(ctx.hybrid_replicas, math.ceil(samples / ctx.samples_per_replica)))
        outlook, _ = self._outlook(ctx, lent=False)
        if outlook is None or fewest == ctx.hybrid_replicas:
            return None
        some = play_forward(outlook, self.target, self.horizon, fewest * ctx.samples_per_replica, draws=self.draws)
        every = play_forward(outlook, self.target, self.horizon, draws=self.draws)
        return fewest if some.cost_s <= every.cost_s * (1.0 + _SAME) else None

    def state_dict(self) -> dict[str, Any]:
        """What was learned."""
        return {
            "default": self.default.state_dict(),
            "error": self.error,
            "pace": self.pace,
            "last_reason": self.last_reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo ``state_dict``. A cycle that was cut by a resume is not compared with its forecast."""
        self.default.load_state_dict(state["default"])
        self.error, self.pace, self.last_reason = state["error"], float(state["pace"]), state["last_reason"]
        self.target = self.planned_at = self.expected_s = self.cycle_began_s = None

    def _outlook(self, ctx: DynamicScheduleContext, *, lent: bool) -> tuple[Outlook | None, str]:
        """The situation, or None with the reason why there is no telling."""
        if self.only_hybrid or ctx.only_hybrid:
            return None, "no standalone replicas"
        if ctx.window_room is None or not ctx.samples_per_replica or not ctx.hybrid_replicas:
            return None, "nothing to plan with"
        if len(ctx.service_s) < _ENOUGH_COLLECTIONS * ctx.required_samples or not ctx.train_s:
            return None, "not enough measured yet"
        if self.error is not None and self.error > self.max_error:
            return None, f"forecasts were off by {self.error:.0%}"
        half = self.default.switch_cost.seconds / 2
        hybrids = (ctx.lent_replicas if lent else 0) or ctx.hybrid_replicas
        switched = bool(ctx.activations) if ctx.activations is not None else ctx.last_activate_duration_s > 0
        return (
            Outlook(
                collection=ctx.required_samples,
                collections=ctx.trigger_parameter_sync_step,
                window=ctx.queue_size + ctx.in_flight + ctx.window_room,
                queue=ctx.queue_size,
                served_s=tuple(ctx.served_s),
                service_s=tuple(self.pace * t for t in service_times(ctx.service_s, ctx.served_s)),
                places=ctx.standalone_replicas * ctx.samples_per_replica,
                hybrid_places=hybrids * ctx.samples_per_replica,
                train_s=sum(ctx.train_s) / len(ctx.train_s),
                sync_s=ctx.sync_s,
                activate_s=ctx.last_activate_duration_s if switched else half,
                deactivate_s=ctx.last_deactivate_duration_s if switched else half,
                prompts_left=ctx.remaining_samples,
                lent=lent,
                load=ctx.load,
                per_replica=ctx.samples_per_replica,
            ),
            "",
        )

    def _plan(self, ctx: DynamicScheduleContext, outlook: Outlook, first: int | None) -> tuple[int | None, bool]:
        """(switch point, lend) of the best plan; ``first`` is kept unless another one is better by the margin."""
        size = outlook.collection * outlook.collections
        step = max(1, size // self.grid)
        tried: dict[int | None, Forecast] = {}

        def try_all(targets: Iterable[int | None]) -> int | None:
            for target in targets:
                if target not in tried and (target is None or outlook.lent or target > outlook.queue):
                    tried[target] = play_forward(outlook, target, self.horizon, draws=self.draws)
            return min(tried, key=lambda target: tried[target].cost_s)

        coarse: list[int | None] = [first, *range(0, min(outlook.window, size + size // 4) + 1, step)]
        best = try_all(coarse if outlook.lent else [None, *coarse])
        if best is not None:
            best = try_all([max(0, best - step // 2), best + step // 2])
        if first in tried and tried[first].cost_s <= tried[best].cost_s * (1.0 + self.margin):
            best = first
        chosen = tried[best]
        began = self.cycle_began_s if outlook.lent and self.cycle_began_s is not None else ctx.now_s
        self.planned_at, self.expected_s = ctx.now_s, ctx.now_s - began + chosen.first_s
        self.last_reason = _say(best, tried, self.horizon)
        return (0 if best is None else best), best is not None

    def _again(self, ctx: DynamicScheduleContext) -> None:
        """Look again at the switch point of a lending that goes on."""
        if self.planned_at == ctx.now_s:
            self.last_reason = self.last_reason or f"switch back at {self.target} samples, as just found"
            return
        outlook, why = self._outlook(ctx, lent=True)
        if outlook is None:
            self.last_reason = f"{why}: switch back at {self.target} samples as planned"
            return
        self.target, _ = self._plan(ctx, outlook, self.target)

    def _compare(self, ctx: DynamicScheduleContext) -> None:
        """Take in how far the forecast of the cycle that ends now was off."""
        if self.expected_s is not None and self.cycle_began_s is not None:
            took = ctx.now_s - self.cycle_began_s
            if took > 0 and self.expected_s > 0:
                corrected = self.pace * (took / self.expected_s) ** _PACE_GAIN
                self.pace = min(_PACE_HIGH, max(_PACE_LOW, corrected))
                off = min(1.0, abs(self.expected_s - took) / took)
                self.error = off if self.error is None else (1 - _FORGET) * self.error + _FORGET * off
        elif self.error is not None:
            self.error *= 1 - _FORGET  # default answered: try again after a while
        self.cycle_began_s = ctx.now_s


def _say(best: int | None, tried: Mapping[int | None, Forecast], horizon: int) -> str:
    """One line: the best plan and its neighbours in cost."""
    others = sorted((f.cost_s, -1 if t is None else t) for t, f in tried.items() if t != best)[:2]
    named = ", ".join(f"{'no lending' if t < 0 else t} {cost:.1f} s" for cost, t in others)
    what = "no lending" if best is None else f"switch back at {best} samples"
    return f"{what}: {tried[best].cost_s:.1f} s for {horizon} cycles" + (f"; next best {named}" if named else "")
