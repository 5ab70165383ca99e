"""The small decisions of the training cycle (DESIGN 6): how long to wait, when to lend, when the data has ended.

Owns: what is reachable, what a policy's answers come to after they have been made harmless, how many samples a
collection waits for, and the end of the data. Every function is pure and total: for any answer of a policy (negative,
NaN, None, a string) there is a result with its reason, and every wait that follows from it can end.

Words: ``queue`` counts completed samples not yet taken for training, ``in_flight`` admitted ones not yet completed
(aborted partials that are parked count), ``prompts_left`` prompts not yet admitted (None: no end known).
Not here: state of any kind, and carrying anything out (``runtime/controller.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hybridsched.scheduling.policy import DynamicScheduleContext, DynamicSchedulePolicyBase


class Decision(NamedTuple):
    """Yes or no, and why."""

    go: bool
    reason: str


class Amount(NamedTuple):
    """A number of samples (or replicas), and why."""

    value: int
    reason: str


# -- what a policy is told


def expected_samples(step_required_samples: int, version: int) -> int:
    """S x max(1, version): what training has used by the sync that made ``version``.

    Derived from the version and nothing else, so a cycle in which nothing was generated cannot make it drift.
    """
    return step_required_samples * max(1, version)


def total_generated_samples(trained: int, usable: int) -> int:
    """trained + usable. ``usable``: completed, not trained yet, and neither filtered, failed nor stale."""
    return trained + usable


def step_wait_samples(required_samples: int, queue: int) -> int:
    """max(0, R - queue) at the start of a collection: samples it really has to wait for."""
    return max(0, required_samples - queue)


def buffer_samples(step_required_samples: int, staleness_threshold: float) -> int:
    """Samples that may be produced ahead of a cycle: int(S x staleness_threshold)."""
    return math.floor(step_required_samples * staleness_threshold + 1e-9)


# -- taking hybrids back


def reachable(queue: int, in_flight: int, window_room: int, prompts_left: int | None, ready_replicas: int) -> int:
    """Most samples that can be completed and unconsumed before anything is trained; 0 without a READY replica.

    queue + in flight + min(window room, prompts left).
    """
    if ready_replicas <= 0:
        return 0
    new = window_room if prompts_left is None else min(window_room, prompts_left)
    return max(0, queue) + max(0, in_flight) + max(0, new)


def sane_samples(answer: Any, step_required_samples: int) -> Amount:
    """A policy's number of samples as an integer from 0: floats are cut, infinity is a whole cycle, rubbish is 0."""
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        try:
            answer = float(answer)  # numpy scalars, 0-d tensors
        except (TypeError, ValueError):
            return Amount(0, f"policy answered {answer!r}, which is no number: 0")
    if math.isnan(answer):
        return Amount(0, "policy answered NaN: 0")
    if answer < 0:
        return Amount(0, f"policy answered {answer}, which is negative: 0")
    if math.isinf(answer):
        return Amount(step_required_samples, f"policy answered infinity: one cycle, {step_required_samples}")
    return Amount(int(answer), "")


def deactivate_target(
    answer: Any, reach: int, *, step_required_samples: int, only_hybrid: bool = False, policy_reason: str = ""
) -> Amount:
    """Completed and unconsumed samples to wait for before hybrids are taken back: min(policy, reachable).

    ``answer``: what ``deactivate_wait_samples`` returned. To be asked again whenever ``reachable`` may have shrunk (a
    verdict, a death, the end of the data); so for any answer the wait ends. Without standalone replicas every policy
    waits for a whole cycle, because after the deactivation nobody generates.
    """
    if only_hybrid:
        wanted, reason = step_required_samples, f"no standalone replicas: a whole cycle, {step_required_samples}"
    else:
        wanted, odd = sane_samples(answer, step_required_samples)
        reason = odd or policy_reason or f"policy wants {wanted}"
    if wanted > reach:
        return Amount(max(0, reach), f"{reason}; only {max(0, reach)} are reachable")
    return Amount(wanted, reason)


def deactivation_forced(
    *, window_room: int, prompts_left: int | None, lent_for_s: float, lending_s: float, lent_replicas: int
) -> Decision:
    """Must hybrids be taken back although the policy says to go on lending?"""
    if lent_replicas <= 0:
        return Decision(True, "tenancy: no lent hybrid is alive")
    if prompts_left == 0:
        return Decision(True, "tenancy: end of data, no prompt is left to admit")
    if window_room <= 0:
        return Decision(True, "tenancy: the staleness window is full, only training makes room")
    if lent_for_s >= lending_s:
        return Decision(True, f"tenancy: lent for {lent_for_s:.1f} s, deadlines.lending_s is {lending_s:.1f} s")
    return Decision(False, "")


def deactivate_decision(answer: Any, forced: Decision, policy_reason: str = "") -> Decision:
    """What ``should_deactivate`` comes to. None (a policy that forgot to return) takes the hybrids back."""
    if answer is None:
        return Decision(True, "policy answered nothing: hybrids go back")
    wants, odd = _truth(answer)
    if not wants and forced.go:
        return forced
    return Decision(wants, odd or policy_reason or ("policy: take back" if wants else "policy: keep lending"))


# -- lending


def activate_decision(
    answer: Any,
    *,
    hybrids: int,
    in_flight: int,
    window_room: int,
    prompts_left: int | None,
    only_hybrid: bool = False,
    policy_reason: str = "",
) -> Decision:
    """What ``should_activate_after_step`` comes to.

    Never when nothing is left to generate (no prompt that fits the window, nothing in flight) or no hybrid is alive;
    always, whatever the policy says, when there are no standalone replicas.
    """
    if hybrids <= 0:
        return Decision(False, "no hybrid replica is alive")
    if in_flight <= 0 and prompts_left == 0:
        return Decision(False, "end of data: nothing is left to generate")
    if in_flight <= 0 and window_room <= 0:
        return Decision(False, "the staleness window is full of completed samples: nothing to generate before training")
    if only_hybrid:
        return Decision(True, "no standalone replicas: hybrids generate after every sync")
    wants, odd = _truth(answer)
    return Decision(wants, odd or policy_reason or ("policy: lend" if wants else "policy: do not lend"))


def lend_count(answer: Any, hybrids: int) -> Amount:
    """How many of ``hybrids`` to lend: the policy's answer within [0, hybrids]; None or rubbish: all."""
    if answer is None:
        return Amount(hybrids, f"all {hybrids}")
    try:
        k = float(answer)
    except (TypeError, ValueError):
        k = math.nan
    if math.isnan(k):
        return Amount(hybrids, f"policy answered {answer!r}, which is no count: all {hybrids}")
    kept = int(min(float(hybrids), max(0.0, k)))
    return Amount(kept, f"{kept} of {hybrids}" + ("" if kept == k else f" (policy answered {answer})"))


# -- collecting


@dataclass(frozen=True, slots=True)
class CollectionTarget:
    """How many completed samples to wait for.

    samples: take once the queue holds this many (0: there is nothing to come). short: fewer than R, the data ends here.
    starved: nobody generates and the queue does not suffice, so waiting alone never ends: lend, or wait for a restart.
    """

    samples: int
    short: bool
    starved: bool
    reason: str


def collection_target(
    required_samples: int, queue: int, in_flight: int, prompts_left: int | None, ready_replicas: int
) -> CollectionTarget:
    """R, or what is left of the data; to be asked again on every verdict, death and end of data.

    The staleness window is no bound here: a cycle takes at most S, the window holds at least S, and samples that end
    otherwise give their place back.
    """
    left = max(0, queue) + max(0, in_flight) + max(0, prompts_left or 0)
    obtainable = required_samples if prompts_left is None else left
    samples = min(required_samples, obtainable)
    short = samples < required_samples
    starved = ready_replicas <= 0 and queue < samples
    if starved:
        reason = f"{queue} of {samples} samples are there and no replica is READY"
    elif short:
        reason = f"end of data: {samples} of {required_samples} samples are left"
    else:
        reason = f"one collection: {samples} samples"
    return CollectionTarget(samples, short, starved, reason)


def nothing_to_generate(prompts_left: int | None, in_flight: int) -> bool:
    """True when every prompt has been admitted and completed (or given up)."""
    return prompts_left is not None and prompts_left <= 0 and in_flight <= 0


def end_of_data(prompts_left: int | None, in_flight: int, queue: int) -> bool:
    """True when nothing is left to generate and nothing to train."""
    return nothing_to_generate(prompts_left, in_flight) and queue <= 0


def last_collection_action(samples: int, dp_size: int) -> Literal["train", "surplus"]:
    """What becomes of the last, short collection: trained if every data-parallel rank gets a sample."""
    return "train" if samples >= max(1, dp_size) else "surplus"


# -- asking a policy


def ask(question: Callable[[], Any], fallback: Any, policy: DynamicSchedulePolicyBase) -> tuple[Any, str]:
    """A policy's answer and its reason; an exception in it becomes ``fallback`` with the exception as the reason.

    The reason is empty when the policy gave none for this very decision.
    """
    policy.last_reason = ""
    try:
        answer = question()
    except Exception as error:  # noqa: BLE001 - foreign code: whatever it raises must not end the run
        return fallback, f"policy raised {type(error).__name__}: {error}"
    return answer, str(policy.last_reason or "")


def ask_lend_count(policy: DynamicSchedulePolicyBase, ctx: DynamicScheduleContext) -> Amount:
    """``policy.lend_count`` made harmless."""
    answer, reason = ask(lambda: policy.lend_count(ctx), None, policy)
    amount = lend_count(answer, ctx.hybrid_replicas)
    return Amount(amount.value, f"{amount.reason}; {reason}") if reason else amount


def _truth(answer: Any) -> tuple[bool, str]:
    """``bool(answer)``; False with a reason for something that has no truth (an array of several)."""
    if answer is None:
        return False, "policy answered nothing: no"
    try:
        return bool(answer), ""
    except (TypeError, ValueError) as error:
        return False, f"policy answered {type(answer).__name__}, which is neither true nor false ({error}): no"
