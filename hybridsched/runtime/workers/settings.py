"""From the configuration to what workers and their agent are told. Pure: the same in a process and under virtual time.

Owns: `RolloutSettings`, `TrainerSettings`, engine arguments and the deadlines per phase, all with
``deadlines.scale`` applied. Does not: look at files or devices, or build anything (`build` does).
"""

from __future__ import annotations

from typing import Any

from hybridsched.config.derived import Derived
from hybridsched.config.schema import RunConfig
from hybridsched.engines.vllm_options import VllmOptions
from hybridsched.model import ReplicaKind
from hybridsched.runtime.plan import WorkerSpec
from hybridsched.runtime.workers.rollout import RolloutSettings
from hybridsched.runtime.workers.trainer import TrainerSettings

BEAT_S = 0.5  #: real time between two beats of a worker

#: Calls of one sync attempt that each may take deadlines.sync_s: open, transfer, truth test.
_CALLS_PER_ATTEMPT = 3
#: Orders during which a hybrid stays in phase "switch", each bounded by deadlines.switch_s: wake weights, take weights,
#: (the trainer drops its parameters), map KV, resume, and falling asleep again when the activation is undone.
_ORDERS_PER_SWITCH = 6


def agent_of(spec: WorkerSpec) -> str:
    """Name of the agent a worker belongs to."""
    return f"agent.{spec.node}"


def kind_of(spec: WorkerSpec) -> ReplicaKind:
    """Which kind of replica a rollout worker is."""
    return ReplicaKind(spec.kind)


def rollout_settings(
    config: RunConfig, derived: Derived, spec: WorkerSpec, *, beat_s: float = BEAT_S
) -> RolloutSettings:
    """What a rollout worker acts on."""
    overlong = config.reward.overlong_buffer
    return RolloutSettings(
        agent=agent_of(spec),
        min_responses=derived.min_responses,
        reward_retries=config.reward.retries,
        filter_groups=config.algorithm.filter_groups.enable,
        filter_metric=config.algorithm.filter_groups.metric,
        seal_age_s=config.queue.seal_age_s,
        space_retry_s=config.queue.retry_s,
        beat_s=beat_s,
        overlong_buffer=overlong.len if overlong.enable else 0,
        overlong_factor=overlong.penalty_factor if overlong.enable else 0.0,
    )


def trainer_settings(config: RunConfig, spec: WorkerSpec, *, beat_s: float = BEAT_S) -> TrainerSettings:
    """What a trainer worker acts on. The group's timeout covers the longest a rank may rightly wait for another."""
    bounds = config.deadlines
    longest = max(bounds.train_s, bounds.checkpoint_s, bounds.start_s)
    return TrainerSettings(agent=agent_of(spec), beat_s=beat_s, group_timeout_s=longest * bounds.scale)


def torch_engine_options(config: RunConfig, derived: Derived) -> dict[str, Any]:
    """Keyword arguments of TorchEngine, but for device and stop tokens (they need the machine and files)."""
    return {
        "dtype": config.actor_rollout_ref.rollout.dtype,
        "max_num_seqs": derived.max_num_seqs,
        "kv_cache_tokens": derived.kv_cache_tokens,
        "threads": config.local.threads_per_worker,
        **config.actor_rollout_ref.rollout.engine_kwargs.get("torch", {}),
    }


def vllm_options(config: RunConfig, derived: Derived, spec: WorkerSpec) -> VllmOptions:
    """What VllmEngine is told, but for model and device."""
    rollout, hybrid = config.actor_rollout_ref.rollout, kind_of(spec) is ReplicaKind.HYBRID
    return VllmOptions(
        dtype=rollout.dtype,
        max_num_seqs=derived.max_num_seqs,
        kv_cache_tokens=derived.kv_cache_tokens,
        max_tokens=config.data.max_prompt_length + config.data.max_response_length,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=derived.hybrid_memory_fraction if hybrid else derived.standalone_memory_fraction,
        fixed_kv=rollout.kv_cache_tokens is not None,
        sleeps=hybrid,
        threads=config.local.threads_per_worker,
        engine_kwargs=rollout.engine_kwargs.get("vllm", {}),
    )


def phase_deadlines(config: RunConfig) -> dict[str, float]:
    """Seconds a worker may stay in a phase without progress before its agent kills it. ``asleep`` has no limit.

    These are the last line: the controller's own deadlines (which know what they wait for) end first, so the limits of
    phases that span several of its calls are the sums of those calls.
    """
    d = config.deadlines
    seconds = {
        "starting": d.start_s,
        "decode": d.decode_s,
        "idle": d.agent_silence_s,  # idle is judged by silence, not by progress
        "sync": config.weight_sync.attempts * _CALLS_PER_ATTEMPT * d.sync_s + d.drain_s + 2 * d.call_s,
        "switch": _ORDERS_PER_SWITCH * d.switch_s + d.drain_s,
        "train": d.train_s,
        "checkpoint": d.checkpoint_s + d.call_s,
        "shutdown": d.stop_s,
    }
    return {phase: bound * d.scale for phase, bound in seconds.items()}


def reward_queue_s(config: RunConfig) -> float:
    """How long a response may wait for a free reward process: as long as the run waits for a sample."""
    return config.deadlines.collect_s * config.deadlines.scale


def reward_call_s(config: RunConfig, n_responses: int) -> float:
    """Bound of one RewardRequest: the wait for a process, every response timing out with a new process after it."""
    d = config.deadlines
    return reward_queue_s(config) + n_responses * config.reward.timeout_s + (d.start_s + d.call_s) * d.scale
