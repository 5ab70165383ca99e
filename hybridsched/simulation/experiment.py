"""A published experiment as simulated runs: from assumptions to configurations, from runs to hours, and its bound.

Owns: the arms of the 32-GPU experiment (static 16+16, static 8+24, dynamic 16+16, the finer static 12+20), the two
numbers fitted to the static times, and the work-conservation bound. The runs are real ones under virtual time
(`SimulatedRun`); nothing here is a second model of the scheduler. Invariants: all arms of one setting draw the same
response lengths; the fit sees static times only.

One configured "GPU" is a block of GPUs that works as one: a tensor-parallel replica, or a data-parallel rank of the
trainer. Hours of a long run are steady-state seconds per cycle times the number of cycles; what the first cycles (empty
queue, cold start) cost more is left out of all arms alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybridsched.config import load_config
from hybridsched.config.schema import EmulatedConfig, RunConfig
from hybridsched.engines.emulated_draws import draw_length
from hybridsched.errors import InternalError
from hybridsched.simulation.world import SimulatedRun

#: A fit this close to both static times is left alone.
FIT_TOLERANCE = 0.004
#: A generation-bound time this far off is corrected before anything else is looked at.
FAR_OFF = 0.1


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything an arm needs but its split: the published setting, the assumptions, and the two fitted speeds.

    Speeds are of one block (8 GPUs), times in seconds, lengths in tokens.
    """

    n: int
    ppo_mini_batch_size: int
    trigger_parameter_sync_step: int
    staleness_threshold: float
    deactivate_ratio: float
    concurrent_samples_per_replica: int
    max_num_seqs: int
    max_prompt_length: int
    max_response_length: int
    kv_cache_tokens: int
    prompt_tokens: int
    cycles: float
    response_mean_tokens: float
    response_sigma: float
    decode_half_batch: float
    prefill_tokens_per_s: float
    hybrid_speed: float
    sync_s: float
    switch_s: float
    train_fixed_s: float
    train_efficiency: float
    generation_tokens_per_s: float  #: one replica with `sequences` running
    training_tokens_per_s: float  #: one block, without the fixed part of a step
    seed: int = 1

    @property
    def samples(self) -> int:
        """Samples of one sync cycle."""
        return self.ppo_mini_batch_size * self.trigger_parameter_sync_step

    @property
    def sequences(self) -> int:
        """Sequences of a replica that has all the samples admission gives it."""
        return self.concurrent_samples_per_replica * self.n

    def decode_s(self) -> tuple[float, float]:
        """(base, per running sequence) of a decode step, in seconds."""
        step = self.sequences / self.generation_tokens_per_s
        per_sequence = step / (self.decode_half_batch + self.sequences)
        return per_sequence * self.decode_half_batch, per_sequence

    def rate(self, batch: float) -> float:
        """Tokens per second of one replica with ``batch`` running sequences."""
        base, per_sequence = self.decode_s()
        return batch / (base + per_sequence * batch)

    def train_s(self, tokens: float, blocks: float) -> float:
        """Seconds of training on ``tokens`` of one cycle with ``blocks`` blocks, ranks perfectly balanced."""
        moving = tokens / (self.training_tokens_per_s * math.pow(blocks, self.train_efficiency))
        return self.trigger_parameter_sync_step * self.train_fixed_s + moving


@dataclass(frozen=True, slots=True)
class Arm:
    """How the blocks are split. ``parts``: a block is cut into so many (finer splits than 8 GPUs)."""

    name: str
    trainer: int
    rollout: int
    lending: bool = False
    compat: str = "none"
    policy: str = "default"
    parts: int = 1


STATIC_16_16 = Arm("static 16+16", 2, 2, compat="peer")
STATIC_8_24 = Arm("static 8+24", 1, 3, compat="peer")
DYNAMIC_PEER = Arm("dynamic 16+16, compat: peer", 2, 2, lending=True, compat="peer")
DYNAMIC_DEFAULT = Arm("dynamic 16+16, our default", 2, 2, lending=True)
STATIC_12_20 = Arm("static 12+20 (barred by 8-GPU replicas)", 3, 5, parts=2)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one simulated run says. Curves have one value per cycle."""

    seconds_per_cycle: float  #: steady state
    tokens_per_cycle: float  #: trained, steady state
    curves: Mapping[str, tuple[float, ...]]
    warmup: int = 0  #: cycles of the curves that are not steady state

    def hours(self, cycles: float) -> float:
        """Wall clock of a run of so many cycles."""
        return self.seconds_per_cycle * cycles / 3600.0


#: Names of the curves the method is known for -> metric.
CURVES = {
    "seconds per cycle": "perf/time_per_step",
    "queue size": "dynamic_resource/mq_size",
    "cluster utilization": "dynamic_resource/resource_utilization",
    "rollout utilization": "dynamic_resource/rollout_resource_utilization",
    "train utilization": "dynamic_resource/train_resource_utilization",
    "lending wait": "timing_s/wait_for_enough_samples",
}


def configuration(setting: Setting, arm: Arm, cycles: int) -> RunConfig:
    """The run of an arm, ``cycles`` cycles long."""
    base, per_sequence = setting.decode_s()
    parts = arm.parts
    overrides = {
        "actor_rollout_ref.actor.strategy": "emulated",
        "actor_rollout_ref.rollout.name": "emulated",
        "actor_rollout_ref.rollout.n": setting.n,
        "actor_rollout_ref.rollout.max_num_seqs": setting.max_num_seqs // parts,
        "actor_rollout_ref.rollout.kv_cache_tokens": setting.kv_cache_tokens // parts,
        "actor_rollout_ref.actor.ppo_mini_batch_size": setting.ppo_mini_batch_size,
        "async_training.trigger_parameter_sync_step": setting.trigger_parameter_sync_step,
        "async_training.staleness_threshold": setting.staleness_threshold,
        "async_training.concurrent_samples_per_replica": setting.concurrent_samples_per_replica // parts,
        "async_training.use_dynamic_resource_scheduling": str(arm.lending).lower(),
        "async_training.dynamic_schedule_policy": arm.policy,
        "async_training.compat": arm.compat,
        "data.max_prompt_length": setting.max_prompt_length,
        "data.max_response_length": setting.max_response_length,
        "trainer.nnodes": arm.trainer,
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": cycles,
        "trainer.seed": setting.seed,
        "trainer.save_freq": 0,
        "trainer.val_before_train": "false",
        "rollout.nnodes": arm.rollout,
        "rollout.n_gpus_per_node": 1,
        "emulated.prompt_tokens": setting.prompt_tokens,
        "emulated.response_mean_tokens": setting.response_mean_tokens,
        "emulated.response_sigma": setting.response_sigma,
        "emulated.dataset_size": 10 * setting.samples * cycles,
        "emulated.decode_base_s": base,
        "emulated.decode_per_seq_s": per_sequence * parts,
        "emulated.prefill_tokens_per_s": setting.prefill_tokens_per_s / parts,
        "emulated.hybrid_speed": setting.hybrid_speed,
        "emulated.sync_s": setting.sync_s,
        "emulated.wake_s": setting.switch_s / 4,
        "emulated.handover_s": setting.switch_s / 4,
        "emulated.sleep_s": setting.switch_s / 2,
        "emulated.train_tokens_per_s": setting.training_tokens_per_s / math.pow(parts, setting.train_efficiency),
        "emulated.train_fixed_s": setting.train_fixed_s,
        "emulated.train_efficiency": setting.train_efficiency,
        "queue.seal_age_s": 1.0,
        "queue.scan_s": 600.0,
        "deadlines.scale": 100.0,
        "local.allow_oversubscribe": "true",
    }
    if arm.lending:
        overrides["async_training.dynamic_schedule_deactivate_ratio"] = setting.deactivate_ratio
    return load_config(None, [f"{key}={value}" for key, value in overrides.items()])


def simulate(setting: Setting, arm: Arm, *, cycles: int, warmup: int) -> Outcome:
    """Run an arm; the first ``warmup`` of ``cycles`` cycles do not count as steady state."""
    if not 0 <= warmup < cycles:
        raise InternalError(f"{warmup} warm-up cycles of {cycles}")
    run = SimulatedRun(configuration(setting, arm, cycles), beat_s=240.0)
    run.run(limit_s=1e9)
    rows = [row for row in run.log.rows if CURVES["seconds per cycle"] in row.values]
    if len(rows) != cycles:
        raise InternalError(f"{arm.name}: {len(rows)} cycles were recorded, {cycles} were to be run")
    curves = {name: tuple(row.values[metric] for row in rows) for name, metric in CURVES.items()}
    tokens = [row.values["perf/total_num_tokens"] for row in rows[warmup:]]
    seconds = curves["seconds per cycle"][warmup:]
    return Outcome(sum(seconds) / len(seconds), sum(tokens) / len(tokens), curves, warmup)


@dataclass(frozen=True, slots=True)
class Fit:
    """A setting whose two speeds reproduce the two static times, and how well."""

    setting: Setting
    static_16_16: Outcome
    static_8_24: Outcome
    error_16_16: float  #: simulated / measured - 1
    error_8_24: float

    @property
    def worst(self) -> float:
        """The larger of the two errors."""
        return max(abs(self.error_16_16), abs(self.error_8_24))


def calibrate(setting: Setting, hours_16_16: float, hours_8_24: float, *, cycles: int, warmup: int, rounds: int) -> Fit:
    """Fit generation and training speed to the two static times; best of ``rounds`` rounds.

    16+16 waits for generation, so its time goes with the generation speed; 8+24 waits for training, so its time goes
    with the training speed. Each round scales both by what is still missing: close to Newton's step, as each time
    nearly inverts its speed.
    """
    tokens = cycle_tokens(setting)
    want_16, want_8 = (3600.0 * hours / setting.cycles for hours in (hours_16_16, hours_8_24))
    fixed = setting.sync_s + setting.trigger_parameter_sync_step * setting.train_fixed_s
    if fixed >= want_8:
        raise InternalError(f"fixed costs of {fixed:.0f} s leave nothing of a cycle of {want_8:.0f} s to be fitted")
    setting = replace(
        setting,
        generation_tokens_per_s=1.4 * tokens / 2 / want_16,
        training_tokens_per_s=1.04 * tokens / (want_8 - fixed),
    )
    best: Fit | None = None
    for turn in range(rounds):
        one = simulate(setting, STATIC_16_16, cycles=cycles, warmup=warmup)
        error = one.seconds_per_cycle / want_16 - 1
        if abs(error) > FAR_OFF and turn < rounds - 1:  # with such a generation 8+24 would say nothing about training
            setting = replace(setting, generation_tokens_per_s=setting.generation_tokens_per_s * (1 + error))
            continue
        two = simulate(setting, STATIC_8_24, cycles=cycles, warmup=warmup)
        fit = Fit(setting, one, two, error, two.seconds_per_cycle / want_8 - 1)
        if best is None or fit.worst < best.worst:
            best = fit
        if fit.worst < FIT_TOLERANCE:
            break
        setting = replace(
            setting,
            generation_tokens_per_s=setting.generation_tokens_per_s * (1 + fit.error_16_16),
            training_tokens_per_s=setting.training_tokens_per_s * (1 + fit.error_8_24),
        )
    assert best is not None
    return best


def cycle_tokens(setting: Setting, draws: int = 4096) -> float:
    """Expected tokens of one cycle, prompts included, cut at the budget."""
    emulated = EmulatedConfig(response_mean_tokens=setting.response_mean_tokens, response_sigma=setting.response_sigma)
    lengths = (
        min(draw_length(emulated, setting.seed, i // setting.n, i % setting.n), setting.max_response_length)
        for i in range(draws)
    )
    per_response = sum(lengths) / draws
    return setting.samples * (setting.n * per_response + setting.prompt_tokens)


def bound_s(setting: Setting, tokens: float) -> float:
    """Seconds per cycle no schedule of the 16+16 cluster can go below, whatever it knows.

    Work is conserved: training takes its time on all trainer blocks, with one switch there and back a cycle if hybrids
    generate at all; meanwhile standalone replicas decode with the fullest batch the engine takes, and with hybrids all
    four decode with as many sequences as admission allows; nobody waits for a tail, nothing is prefilled.
    """
    training = setting.train_s(tokens, 2)
    alone = 2 * setting.rate(setting.max_num_seqs)
    together = 2 * (1 + setting.hybrid_speed) * setting.rate(setting.sequences)
    without = max(tokens / alone, training) + setting.sync_s
    meanwhile = alone * (training + setting.switch_s)
    lent = max(0.0, tokens - meanwhile) / max(together, alone)
    return min(without, setting.sync_s + training + setting.switch_s + lent)


def conserved_s(fit: Fit) -> float:
    """Seconds per cycle if the generation of 16+16 at the efficiency it really had, and training, filled 32 GPUs.

    Not a bound (batches may be fuller than 16+16's): the usual yardstick, without any loss.
    """
    setting, one = fit.setting, fit.static_16_16
    busy = steady_mean(one, "rollout utilization")
    generation = 2 * busy * (one.seconds_per_cycle - setting.sync_s)
    return (generation + 2 * setting.train_s(one.tokens_per_cycle, 2) + 4 * setting.sync_s + 2 * setting.switch_s) / 4


def steady_mean(outcome: Outcome, curve: str) -> float:
    """Mean of a curve over the steady cycles."""
    values = outcome.curves[curve][outcome.warmup :]
    return sum(values) / len(values)


def picture(setting: Setting, outcomes: Mapping[str, Outcome]) -> dict[str, bool]:
    """What the publication says about its curves, and whether the runs say it too.

    The queue is looked at when a cycle's last collection has been trained; the staleness window then leaves room for
    staleness_threshold x samples of a cycle, queued and in flight together: the ceiling.
    """
    few, many, dynamic = (outcomes[arm.name] for arm in (STATIC_16_16, STATIC_8_24, DYNAMIC_PEER))
    ceiling = setting.staleness_threshold * setting.samples
    queue, cluster, rollout, train = (
        {"16": steady_mean(few, name), "8": steady_mean(many, name), "dynamic": steady_mean(dynamic, name)}
        for name in list(CURVES)[1:5]
    )
    return {
        f"16+16: queue near zero ({queue['16']:.1f} of {ceiling:.0f})": queue["16"] < 0.35 * ceiling,
        f"8+24: queue at capacity ({queue['8']:.1f} of {ceiling:.0f})": queue["8"] > 0.7 * ceiling,
        f"dynamic: queue in between ({queue['dynamic']:.1f})": queue["16"] < queue["dynamic"] < queue["8"],
        f"dynamic: highest cluster utilization ({cluster['dynamic']:.0%})": (
            cluster["dynamic"] > max(cluster["16"], cluster["8"])
        ),
        "rollout utilization: 16+16 pinned, 8+24 lowest": (
            rollout["8"] < rollout["dynamic"] <= rollout["16"] and rollout["16"] > 0.9
        ),
        "train utilization: 8+24 highest, 16+16 lowest": train["16"] < train["dynamic"] < train["8"],
    }
