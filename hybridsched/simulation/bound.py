"""What no schedule can beat: a lower bound on the wall clock of a scenario, from known response lengths.

Owns `lower_bound` (clairvoyant) and `best_fixed_ratio` (the best of a policy that does not adapt, found by trying).

The bound relaxes everything but these facts, which hold for every policy:

    trainer     wall >= training + syncs + lent        lent: time in which trainer GPUs are away from the trainer
    work        standalone x (wall - syncs) + hybrid x (lent - k switches) >= work of the samples
    window      the samples admitted after the sync before them are complete before the last collection of a cycle is
                trained: standalone x (wall - syncs - last collections) + hybrid x (lent - k switches) >= their work
    switches    k activations, at most one a cycle, each costs wake + hand-over + sleep; while hybrids are lent nothing
                is trained, so all replicas together have no more than a window of samples to work on
    tails       of the S samples of a cycle no more than the staleness window allows were begun before its sync; the
                others are begun and completed within it, before its last collection: wall >= syncs + last collections
                + over all cycles, the time of the longest response of those others, alone on the fastest replica

Work is seconds of one replica of speed 1. A replica that advances its batch of n sequences by one token spends
decode_base + n x decode_per_seq. Samples are started while fewer than s a replica run, and b sequences fit into a
batch; so a sample costs at least

    slots       decode_base x (its longest response) / s + decode_per_seq x (all its tokens)
    sequences   decode_base x (all its tokens) / b       + decode_per_seq x (all its tokens)

Both accounts hold over any set of samples, wherever and in however many pieces they run; the bound is the larger of the
two. What hybrids were working on goes on at once on the replicas that stay, beyond s: in the slots account each
activation makes the s x hybrids samples for which that is worth most as cheap as on a replica with s x (all replicas /
those that stay) places. Each prompt is prefilled once, nothing is aborted, no slot is ever empty. Of the samples that
may be admitted, the cheapest are the trained ones. The smallest wall clock over k is the bound; it is not attainable in
general: at the end of every window slots do run empty, and every sync aborts what runs.

It does not know the future of real runs: lengths are those the emulated engine draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridsched.config.derived import Derived, derive
from hybridsched.config.schema import RunConfig
from hybridsched.engines.emulated_draws import draw_length
from hybridsched.simulation.scenario import Played, play, with_policy

#: Ratios that `best_fixed_ratio` tries.
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_PRECISION = 1e-9


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on wall clock in seconds, and the schedule of the relaxed problem that reaches it."""

    seconds: float
    activations: int
    lent_s: float
    limit: str  #: what binds: training, generation, window or tails

    @property
    def reason(self) -> str:
        """One line."""
        lending = f"{self.activations} activations, {self.lent_s:.0f} s lent" if self.activations else "no lending"
        return f"limited by {self.limit}, {lending}"


@dataclass(frozen=True, slots=True)
class _Needs:
    """The quantities of the module's docstring; work in seconds of one replica of speed 1."""

    training_s: float
    last_collections_s: float
    syncs_s: float
    work_s: float
    fresh_s: float
    crowded_s: float  #: what one activation may save in work, see slots
    crowded_once_s: float  #: the same by replicas that are lost
    tails_s: float
    window_s: float  #: most work one activation finds
    switch_s: float
    cycles: int
    hybrid: float
    standalone: tuple[tuple[float, float], ...]  #: (speed, second at which it is lost)


def lower_bound(
    config: RunConfig, trained: int, *, dropped: int = 0, lending: bool = True, crowding: bool = True
) -> Bound:
    """The bound for training ``trained`` samples with the GPUs of ``config``, whatever the policy.

    dropped: samples that were filtered, failed or stale on the way. lending False: hybrids stay asleep (static).
    crowding False: replicas never work on more than s samples each. Not a bound on every schedule then, but the nearer
    yardstick: crowding is a side effect of taking hybrids back, and no policy has come below this figure by it.
    """
    derived = derive(config)
    return max(
        (
            _bound(_needs(config, derived, trained, dropped, account, crowding), lending)
            for account in ("slots", "sequences")
        ),
        key=lambda bound: bound.seconds,
    )


def _bound(needs: _Needs, lending: bool) -> Bound:
    colocated = not needs.standalone
    most = needs.cycles if (lending or colocated) and needs.hybrid > 0 else 0
    found = [_with_switches(needs, k) for k in range(1 if colocated else 0, most + 1)]
    return min(found, key=lambda bound: (bound.seconds, bound.activations))


def best_fixed_ratio(config: RunConfig, ratios: Sequence[float] = RATIOS) -> tuple[float, Played]:
    """The ratio under which `fixed_ratio` is fastest on this scenario, and its run. One simulation per ratio."""
    tried = []
    for ratio in ratios:
        fixed = with_policy(config, "fixed_ratio")
        training = fixed.async_training.model_copy(update={"dynamic_schedule_deactivate_ratio": ratio})
        fixed = fixed.model_copy(update={"async_training": training})
        tried.append((ratio, play(fixed, name=f"fixed_ratio {ratio:g}")))
    return min(tried, key=lambda pair: (pair[1].wall_clock_s, pair[0]))


def _needs(config: RunConfig, derived: Derived, trained: int, dropped: int, account: str, crowding: bool) -> _Needs:
    emulated, rollout = config.emulated, config.actor_rollout_ref.rollout
    cycle, collection = derived.step_required_samples, derived.required_samples
    cycles = math.ceil(trained / cycle)
    ahead = derived.max_required_samples - cycle
    admissible = trained + ahead + dropped
    if derived.total_samples is not None:
        admissible = max(trained, min(admissible, derived.total_samples))
    lengths = [_lengths(config, uid) for uid in range(admissible)]
    tokens = sorted(map(sum, lengths))
    samples = config.async_training.concurrent_samples_per_replica
    batch = derived.max_num_seqs if crowding else min(derived.max_num_seqs, samples * rollout.n)
    prompt_s = emulated.prompt_tokens / emulated.prefill_tokens_per_s

    def cost(responses: list[int]) -> float:
        steps = max(responses) / samples if account == "slots" else sum(responses) / batch
        return emulated.decode_base_s * steps + emulated.decode_per_seq_s * sum(responses) + prompt_s

    work = sorted(map(cost, lengths))
    saved = _crowded(config, derived, lengths if account == "slots" and crowding else [])
    fresh = max(0, trained - (cycles - 1) * ahead) if cycles else 0
    whole = trained // cycle
    last = _training_s(config, derived, tokens[: whole * collection])
    standalone = [f"standalone.{i}" for i in range(derived.n_standalone_replicas)]
    hybrids = [f"hybrid.{i}" for i in range(derived.n_hybrid_replicas)]
    speed, lost = emulated.replica_speed, emulated.worker_lost_at_s
    return _Needs(
        training_s=_training_s(config, derived, tokens[:trained]),
        last_collections_s=last,
        syncs_s=emulated.sync_s * (cycles + 1) if standalone else 0.0,
        work_s=math.fsum(work[:trained]),
        fresh_s=math.fsum(work[:fresh]),
        crowded_s=saved(samples * len(hybrids)),
        crowded_once_s=saved(samples * len(lost)),
        tails_s=_tails_s(config, derived, whole, dropped),
        window_s=math.fsum(work[-derived.max_required_samples :]),
        switch_s=emulated.wake_s + emulated.handover_s + emulated.sleep_s,
        cycles=cycles,
        hybrid=emulated.hybrid_speed * math.fsum(speed.get(name, 1.0) for name in hybrids),
        standalone=tuple((speed.get(name, 1.0), lost.get(name, math.inf)) for name in standalone),
    )


def _crowded(config: RunConfig, derived: Derived, lengths: Sequence[list[int]]) -> Callable[[int], float]:
    """Work that so many samples save when they run on top of the s of each replica that stays."""
    emulated, samples = config.emulated, config.async_training.concurrent_samples_per_replica
    stay = max(1, derived.n_standalone_replicas - len(emulated.worker_lost_at_s))
    crowd = samples * max(1.0, (derived.n_standalone_replicas + derived.n_hybrid_replicas) / stay)
    share = emulated.decode_base_s * (1.0 / samples - 1.0 / crowd)
    savings = sorted((share * max(one) for one in lengths), reverse=True)
    return lambda count: math.fsum(savings[:count])


def _tails_s(config: RunConfig, derived: Derived, cycles: int, dropped: int) -> float:
    """Sum over whole cycles of the time of the longest response that has to be begun and completed within the cycle.

    Of the samples that may be begun in a cycle, those with the shortest longest responses.
    """
    emulated, size = config.emulated, derived.step_required_samples
    ahead = derived.max_required_samples - size
    speeds = [emulated.replica_speed.get(f"standalone.{i}", 1.0) for i in range(derived.n_standalone_replicas)]
    speeds += [
        emulated.hybrid_speed * emulated.replica_speed.get(f"hybrid.{i}", 1.0) for i in range(derived.n_hybrid_replicas)
    ]
    step = (emulated.decode_base_s + emulated.decode_per_seq_s) / max(speeds)
    total = 0.0
    for cycle in range(cycles):
        within = size if cycle == 0 else size - ahead
        if within > 0:
            candidates = range(cycle * size, (cycle + 1) * size + ahead + dropped)
            longest = sorted(max(_lengths(config, uid)) for uid in candidates)
            total += longest[within - 1] * step
    return total


def _lengths(config: RunConfig, uid: int) -> list[int]:
    """Tokens of each response of a sample."""
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_response_length
    if rollout.ignore_eos:
        return [longest] * rollout.n
    return [min(longest, draw_length(config.emulated, config.trainer.seed, uid, i)) for i in range(rollout.n)]


def _training_s(config: RunConfig, derived: Derived, tokens: Sequence[int]) -> float:
    """Least time of training on these samples: perfectly balanced ranks, whole mini-batches only."""
    emulated, actor = config.emulated, config.actor_rollout_ref.actor
    speed = emulated.train_tokens_per_s * derived.n_trainer_gpus**emulated.train_efficiency
    steps = len(tokens) // actor.ppo_mini_batch_size
    prompts = len(tokens) * config.actor_rollout_ref.rollout.n * emulated.prompt_tokens  # once per response
    moving = (sum(tokens) + prompts) / speed
    return float(actor.ppo_epochs * (steps * emulated.train_fixed_s + moving))


def _with_switches(needs: _Needs, k: int) -> Bound:
    """The smallest wall clock with ``k`` activations, by bisection: what is feasible stays so with more time."""
    tails = needs.syncs_s + needs.last_collections_s + needs.tails_s
    least = max(needs.training_s + needs.syncs_s + k * needs.switch_s, tails)
    low, high = least, max(least, 1.0)
    while not _feasible(needs, k, high):
        high *= 2.0
        if high > 1e15:
            return Bound(math.inf, k, 0.0, "generation")
    if _feasible(needs, k, low):
        return Bound(low, k, k * needs.switch_s, "tails" if low == tails else "training")
    while high - low > _PRECISION * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if _feasible(needs, k, middle) else (middle, high)
    limit = "generation" if not _enough(needs, k, low, 0.0, needs.work_s) else "window"
    return Bound(low, k, low - needs.training_s - needs.syncs_s if k else 0.0, limit)


def _feasible(needs: _Needs, k: int, wall: float) -> bool:
    return _enough(needs, k, wall, 0.0, needs.work_s) and _enough(
        needs, k, wall, needs.last_collections_s, needs.fresh_s
    )


def _enough(needs: _Needs, k: int, wall: float, without_s: float, work_s: float) -> bool:
    """Can the replicas do ``work_s`` in ``wall`` seconds, ``without_s`` (and the syncs) of which do not count?"""
    lent = wall - needs.training_s - needs.syncs_s
    if lent < 0:
        return False
    free = wall - needs.syncs_s - without_s
    # A replica that is lost may have done its work in any part of its life: no sync is taken off it.
    alone = math.fsum(speed * max(0.0, min(lost, free)) for speed, lost in needs.standalone)
    hybrid = 0.0
    if k:
        beside = math.fsum(speed for speed, lost in needs.standalone if lost == math.inf)
        enough = k * (needs.window_s + needs.hybrid * needs.switch_s) / (needs.hybrid + beside)
        useful = min(lent, enough)  # lending longer only makes all replicas wait before a full window
        hybrid = needs.hybrid * max(0.0, useful - k * needs.switch_s)
    saved = k * needs.crowded_s + needs.crowded_once_s
    return hybrid + alone >= (work_s - saved) * (1.0 - _PRECISION)
