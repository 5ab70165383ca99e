"""Everything that follows from a configuration: limits, counts, sizes, budgets.

Owns: the arithmetic of DESIGN 2, 5 and 12, in one place. Invariant: pure; the same configuration gives the same values
in `--dry-run`, in the controller, in a worker and in the simulator. Does not: judge values (`checks` does) or look at
files; the number of training prompts is handed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hybridsched.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Derived:
    """Values every part of a run agrees on. Counts are samples (one prompt with its n responses) unless said."""

    required_samples: int  #: R: samples of one collection (ppo_mini_batch_size x require_batches)
    step_required_samples: int  #: S: samples of one sync cycle (R x trigger_parameter_sync_step)
    max_required_samples: int  #: window: in flight + queued + consumed since the last sync stay below this
    n_trainer_gpus: int
    n_rollout_gpus: int
    data_parallel_size: int  #: trainer ranks that get different samples
    gpus_per_replica: int
    n_standalone_replicas: int
    n_hybrid_replicas: int  #: 0 when hybrids are not built
    only_hybrid: bool  #: no rollout nodes: hybrids are all there is
    max_num_seqs: int  #: sequences running together in one replica
    kv_cache_tokens: int  #: KV budget of one replica, tokens
    concurrency_standalone: int  #: samples in flight at most with standalone replicas alone
    concurrency_with_hybrids: int  #: ... and with all hybrids lent
    min_responses: int  #: good responses a sample needs (reward.min_responses, never more than n)
    sync_mode: Literal["abort", "keep", "wait"]  #: what running responses do in a sync (partial_rollout false: wait)
    total_samples: int | None  #: samples that can be issued; None when the number of prompts is unknown
    total_cycles: int | None  #: sync cycles at most (filtered, failed and stale samples make it fewer)
    optimizer_steps: int | None  #: optimizer steps at most
    schedule_steps: int | None  #: optimizer steps the learning-rate schedule is laid out for
    warmup_steps: int | None  #: of these, warm-up
    run_folder: str  #: as written, relative to the folder the command runs in
    hybrid_memory_fraction: float  #: share of a trainer GPU a hybrid may use while lent
    standalone_memory_fraction: float  #: share of a rollout GPU a standalone replica may use


def derive(config: RunConfig, n_train_prompts: int | None = None) -> Derived:
    """Derived values of a configuration that passes `checks.check`.

    n_train_prompts: prompts of one epoch after filtering; None: unknown, except for the emulated engine without files,
    whose data set has emulated.dataset_size prompts.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    training, nodes = config.async_training, config.rollout
    required = actor.ppo_mini_batch_size * training.require_batches
    step_required = required * training.trigger_parameter_sync_step
    window = int(step_required * (1 + training.staleness_threshold))
    size = rollout.tensor_model_parallel_size
    standalone = nodes.nnodes * (nodes.n_gpus_per_node // size)
    only_hybrid = nodes.nnodes == 0
    hybrids_built = training.use_dynamic_resource_scheduling or only_hybrid
    hybrids = config.trainer.nnodes * (config.trainer.n_gpus_per_node // size) if hybrids_built else 0
    per_replica = training.concurrent_samples_per_replica
    sequences = rollout.max_num_seqs or per_replica * rollout.n
    length = config.data.max_prompt_length + config.data.max_response_length
    total, cycles, steps = _length(config, n_train_prompts, required, data_parallel_size(config))
    schedule = actor.optim.total_training_steps if actor.optim.total_training_steps != -1 else steps
    return Derived(
        required_samples=required,
        step_required_samples=step_required,
        max_required_samples=window,
        n_trainer_gpus=config.trainer.nnodes * config.trainer.n_gpus_per_node,
        n_rollout_gpus=nodes.nnodes * nodes.n_gpus_per_node,
        data_parallel_size=data_parallel_size(config),
        gpus_per_replica=size,
        n_standalone_replicas=standalone,
        n_hybrid_replicas=hybrids,
        only_hybrid=only_hybrid,
        max_num_seqs=sequences,
        kv_cache_tokens=rollout.kv_cache_tokens or sequences * length,
        concurrency_standalone=min(standalone * per_replica, window),
        concurrency_with_hybrids=min((standalone + hybrids) * per_replica, window),
        min_responses=min(config.reward.min_responses, rollout.n),
        sync_mode=nodes.sync_mode if training.partial_rollout else "wait",
        total_samples=total,
        total_cycles=cycles,
        optimizer_steps=steps,
        schedule_steps=schedule,
        warmup_steps=_warmup(config, schedule),
        run_folder=config.trainer.default_local_dir or f"runs/{config.trainer.experiment_name}",
        hybrid_memory_fraction=rollout.gpu_memory_utilization,
        standalone_memory_fraction=rollout.standalone_gpu_memory_utilization or rollout.gpu_memory_utilization,
    )


def data_parallel_size(config: RunConfig) -> int:
    """Trainer ranks that get different samples: all of them, or for Megatron all / (TP x PP x CP)."""
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if config.actor_rollout_ref.actor.strategy != "megatron":
        return gpus
    sizes = config.actor_rollout_ref.actor.megatron
    model = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size
    return max(1, gpus // model)


def data_parallel_rank(config: RunConfig, rank: int) -> int:
    """Which samples trainer rank ``rank`` gets: those of a data-parallel rank.

    Megatron numbers ranks TP first, then CP, DP, PP; ranks that differ only in TP, CP or PP share their samples.
    """
    if config.actor_rollout_ref.actor.strategy != "megatron":
        return rank
    sizes = config.actor_rollout_ref.actor.megatron
    inside = sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return rank // inside % data_parallel_size(config)


def collective_weights(config: RunConfig) -> bool:
    """Whether no trainer rank holds the whole model, so that all have to take part when weights are handed out."""
    if config.actor_rollout_ref.actor.strategy != "megatron":
        return False
    s = config.actor_rollout_ref.actor.megatron
    if s.weight_source == "megatron-bridge":
        return True
    experts = max(s.expert_model_parallel_size, s.expert_tensor_parallel_size or 1)
    return max(s.tensor_model_parallel_size, s.pipeline_model_parallel_size, experts) > 1


def _length(
    config: RunConfig, n_train_prompts: int | None, required: int, ranks: int
) -> tuple[int | None, int | None, int | None]:
    """(samples, cycles, optimizer steps), each an upper bound, None when unknown.

    The last short collection is trained when every data-parallel rank gets a sample, else it is surplus (DESIGN 6).
    """
    actor, training = config.actor_rollout_ref.actor, config.async_training
    prompts = n_train_prompts
    if prompts is None and actor.strategy == "emulated" and not config.data.train_files:
        prompts = config.emulated.dataset_size
    bounds = [] if prompts is None else [prompts * config.trainer.total_epochs]
    # Without the number of prompts, total_rollout_steps is a bound that the data may undercut: not a total.
    if bounds and config.rollout.total_rollout_steps is not None:
        bounds.append(config.rollout.total_rollout_steps)
    total = min(bounds) if bounds else None
    per_cycle = training.trigger_parameter_sync_step
    limit = config.trainer.total_training_steps
    if total is None:
        steps = None if limit is None else limit * per_cycle * training.require_batches * actor.ppo_epochs
        return None, limit, steps
    collections, rest = divmod(total, required)
    short = rest if rest >= ranks else 0
    if limit is not None and collections >= limit * per_cycle:
        collections, short = limit * per_cycle, 0
    cycles = math.ceil((collections + (short > 0)) / per_cycle)
    mini_batches = collections * training.require_batches + math.ceil(short / actor.ppo_mini_batch_size)
    return total, cycles, mini_batches * actor.ppo_epochs


def _warmup(config: RunConfig, schedule_steps: int | None) -> int | None:
    optim = config.actor_rollout_ref.actor.optim
    if optim.lr_warmup_steps != -1:
        return optim.lr_warmup_steps
    if optim.lr_warmup_steps_ratio == 0.0:
        return 0
    return None if schedule_steps is None else int(schedule_steps * optim.lr_warmup_steps_ratio)


def format_derived(config: RunConfig, derived: Derived) -> str:
    """A table for people: name, value, how it comes about."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    training, nodes, trainer = config.async_training, config.rollout, config.trainer
    sequence = config.data.max_prompt_length + config.data.max_response_length

    def known(value: int | None) -> str:
        return "known once the data is read" if value is None else f"{value:,}"

    hybrids = "colocated: no rollout nodes" if derived.only_hybrid else "lent by the policy"
    if derived.n_hybrid_replicas == 0:
        hybrids = "off: async_training.use_dynamic_resource_scheduling"
    seqs = "as configured" if rollout.max_num_seqs else f"{training.concurrent_samples_per_replica} x n={rollout.n}"
    budget = "as configured" if rollout.kv_cache_tokens else f"{derived.max_num_seqs} x {sequence} tokens"
    rows = [
        ("run folder", derived.run_folder, f"launcher {config.launcher}"),
        ("trainer", f"{actor.strategy}", f"engine {rollout.name}, policy {training.dynamic_schedule_policy}"),
        ("trainer GPUs", f"{derived.n_trainer_gpus:,}", f"{trainer.nnodes} nodes x {trainer.n_gpus_per_node}"),
        ("rollout GPUs", f"{derived.n_rollout_gpus:,}", f"{nodes.nnodes} nodes x {nodes.n_gpus_per_node}"),
        ("data-parallel size", f"{derived.data_parallel_size:,}", "trainer ranks with different samples"),
        ("standalone replicas", f"{derived.n_standalone_replicas:,}", f"{derived.gpus_per_replica} GPUs each"),
        ("hybrid replicas", f"{derived.n_hybrid_replicas:,}", hybrids),
        (
            "collection R",
            f"{derived.required_samples:,} samples",
            f"{actor.ppo_mini_batch_size} x {training.require_batches}",
        ),
        (
            "sync cycle S",
            f"{derived.step_required_samples:,} samples",
            f"R x {training.trigger_parameter_sync_step}",
        ),
        (
            "window",
            f"{derived.max_required_samples:,} samples",
            f"S x (1 + {training.staleness_threshold:g})",
        ),
        ("in flight, standalone", f"{derived.concurrency_standalone:,} samples", "at most the window"),
        ("in flight, with hybrids", f"{derived.concurrency_with_hybrids:,} samples", "at most the window"),
        ("sequences per replica", f"{derived.max_num_seqs:,}", seqs),
        ("KV cache per replica", f"{derived.kv_cache_tokens:,} tokens", budget),
        ("weight sync mode", derived.sync_mode, "running responses during a sync"),
        ("memory, hybrid", f"{derived.hybrid_memory_fraction:.0%}", "of a trainer GPU while lent"),
        ("memory, standalone", f"{derived.standalone_memory_fraction:.0%}", "of a rollout GPU"),
        ("samples in all", known(derived.total_samples), f"{trainer.total_epochs} epochs"),
        ("sync cycles", known(derived.total_cycles), "at most"),
        ("optimizer steps", known(derived.optimizer_steps), f"at most, warm-up {known(derived.warmup_steps)}"),
    ]
    names, values = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return "\n".join(f"{name:<{names}}  {value:<{values}}  {why}" for name, value, why in rows)
