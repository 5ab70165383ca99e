"""The schema of run.yaml: every key, its type, default and meaning (the docstring under it is its documentation).

Sections and keys are those users of the peer know; `slurm`, `queue`, `weight_sync`, `reward`, `deadlines`, `runlog`,
`emulated`, `local` are ours. Everything is frozen; unknown keys are refused by the loader with the nearest right name.
Owns: the run's length, nodes and asynchrony, and `RunConfig`; the other sections live in `schema_learning` and
`schema_system` and are imported from here. Does not: relate keys to each other (`checks`) or compute (`derived`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hybridsched.config.schema_base import Section
from hybridsched.config.schema_learning import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgorithmConfig,
    DataConfig,
    FilterGroupsConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    OverlongBufferConfig,
    RewardConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    ValKwargs,
)
from hybridsched.config.schema_system import (
    ComponentConfig,
    DeadlinesConfig,
    EmulatedConfig,
    FaultsConfig,
    LocalConfig,
    QueueConfig,
    RunlogConfig,
    SlurmConfig,
    WeightSyncConfig,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "AsyncTrainingConfig",
    "ComponentConfig",
    "DataConfig",
    "DeadlinesConfig",
    "EmulatedConfig",
    "FaultsConfig",
    "FilterGroupsConfig",
    "LocalConfig",
    "LoggerName",
    "MegatronConfig",
    "ModelConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "QueueConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutNodesConfig",
    "RunConfig",
    "RunlogConfig",
    "Section",
    "SlurmConfig",
    "TrainerConfig",
    "ValKwargs",
    "WeightSyncConfig",
]

LoggerName = Literal["console", "tensorboard", "prometheus", "wandb_offline"]


class TrainerConfig(Section):
    """The trainer nodes and the run's length."""

    project_name: str = "hybridsched"
    """Used by loggers."""
    experiment_name: str = "run"
    """Name of the run; its folder is runs/NAME unless default_local_dir says otherwise."""
    nnodes: int = Field(1, ge=1)
    """Trainer nodes (a)."""
    n_gpus_per_node: int = Field(1, ge=1)
    """GPUs of a trainer node; in local mode a GPU is one CPU core."""
    total_epochs: int = Field(1, ge=1)
    """Passes over the training data."""
    total_training_steps: int | None = Field(None, ge=1)
    """Stop after this many sync cycles; null: by epochs or rollout.total_rollout_steps."""
    save_freq: int = Field(-1, ge=-1)
    """Checkpoint every N weight versions; -1 or 0: only at start and end."""
    test_freq: int = Field(-1, ge=-1)
    """Validate every N weight versions; -1 or 0: never in between."""
    val_before_train: bool = True
    """Validate before the first cycle."""
    val_at_end: bool = True
    """Validate after the last cycle."""
    max_actor_ckpt_to_keep: int = Field(2, ge=1)
    """Checkpoints kept; segments below the oldest are removed."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "disable"
    """auto: go on from the newest checkpoint in the run folder; `--resume` sets it."""
    resume_from_path: str | None = None
    """Checkpoint folder for resume_path."""
    default_local_dir: str | None = None
    """Folder of the run; null: runs/EXPERIMENT_NAME."""
    logger: list[LoggerName] = Field(default_factory=lambda: list[LoggerName](["console"]))
    """Mirrors of the run log."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and engines."""
    balance_batch: bool = True
    """Balance the tokens of data-parallel ranks."""
    seed: int = 0
    """Run seed: sampling, initial order, everything random."""


class RolloutNodesConfig(Section):
    """The rollout nodes and how generation meets a weight sync."""

    nnodes: int = Field(1, ge=0)
    """Rollout nodes (b); 0: colocated mode, hybrids only."""
    n_gpus_per_node: int = Field(1, ge=1)
    """GPUs of a rollout node."""
    total_rollout_steps: int | None = Field(None, ge=1)
    """Samples to generate at most; null: whole data x total_epochs."""
    sync_mode: Literal["abort", "keep", "wait"] = "abort"
    """What running responses do during a weight sync."""
    kv_on_sync: Literal["recompute", "keep"] = "recompute"
    """KV cache of kept responses after a weight sync."""
    agent: str | None = None
    """Multi-turn hook module:function. Not available yet."""


class AsyncTrainingConfig(Section):
    """Fully-async training and lending."""

    staleness_threshold: float = Field(0.1, ge=0)
    """Share of an extra sync cycle of samples that may be produced ahead."""
    trigger_parameter_sync_step: int = Field(4, ge=1)
    """K: collections per weight sync."""
    require_batches: int = Field(1, ge=1)
    """Mini-batches per collection: R = ppo_mini_batch_size x require_batches."""
    partial_rollout: bool = True
    """Continue aborted responses elsewhere; False: sync waits, deactivation drains, then regenerates."""
    use_trainer_do_validate: bool = False
    """Hybrids help validating."""
    use_dynamic_resource_scheduling: bool = False
    """Build hybrid replicas on the trainer's GPUs and lend them."""
    dynamic_schedule_policy: str = "default"
    """Name, path of a policies/*.yaml, module:Class, or path of a Python file."""
    dynamic_schedule_deactivate_ratio: float | None = Field(None, ge=0, le=1)
    """Initial ratio; null: what the policy file says (0.3 without one)."""
    dynamic_schedule_enable_rebalance: bool = True
    """Even the load after an activation."""
    dynamic_schedule_policy_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments for the policy."""
    concurrent_samples_per_replica: int = Field(16, ge=1)
    """Samples in flight per replica."""
    max_off_policy_threshold: int | None = Field(None, ge=0)
    """Largest age in weight versions at consumption; null: no bound per sample."""
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """drop: verdict stale. wait: a sample that would become too old is finished before the next sync."""
    compat: Literal["none", "peer"] = "none"
    """peer: two aborts per sync, 1 s polls, unclamped ratio (simulation of published runs)."""


class RunConfig(Section):
    """run.yaml."""

    launcher: Literal["local", "slurm"] = "local"
    """Where the run starts."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = Field(default_factory=ActorRolloutRefConfig)
    """Model, trainer, engine."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantages, filter, correction."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """Trainer nodes, length, checkpoints."""
    rollout: RolloutNodesConfig = Field(default_factory=RolloutNodesConfig)
    """Rollout nodes, sync mode."""
    async_training: AsyncTrainingConfig = Field(default_factory=AsyncTrainingConfig)
    """Fully-async training and lending."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Rewards."""
    queue: QueueConfig = Field(default_factory=QueueConfig)
    """Sample queue."""
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """Weight sync."""
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)
    """Bounded waits."""
    faults: FaultsConfig = Field(default_factory=FaultsConfig)
    """Restarts."""
    runlog: RunlogConfig = Field(default_factory=RunlogConfig)
    """Run log."""
    local: LocalConfig = Field(default_factory=LocalConfig)
    """Local launcher."""
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    """Slurm launcher."""
    emulated: EmulatedConfig = Field(default_factory=EmulatedConfig)
    """Emulated engine and trainer."""
