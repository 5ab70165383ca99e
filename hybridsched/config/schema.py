"""The schema of run.yaml: every key, its type, default and meaning (the docstring under it is its documentation).

Sections and keys are those users of the peer know; `slurm`, `queue`, `weight_sync`, `reward`, `deadlines`, `runlog`,
`emulated`, `local` are ours. Everything is frozen; unknown keys are refused by the loader with the nearest right name.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: frozen, strict about names, documented by attribute docstrings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class DataConfig(Section):
    """Prompts and how they become tokens."""

    train_files: list[str] = Field(default_factory=list)
    """JSONL or parquet files with the training prompts."""
    val_files: list[str] = Field(default_factory=list)
    """JSONL or parquet files with the held-out prompts; empty: no validation."""
    prompt_key: str = "prompt"
    """Column with the chat messages (or one plain string)."""
    reward_fn_key: str = "data_source"
    """Column with the name of the data source."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt in tokens."""
    max_response_length: int = Field(512, ge=1)
    """Budget of new tokens of one response."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt longer than max_prompt_length (after filtering)."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than max_prompt_length instead of applying `truncation`."""
    shuffle: bool = True
    """Shuffle each epoch by `seed`."""
    seed: int = 1
    """Seed of the shuffling."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables for the chat template, e.g. {enable_thinking: false}."""
    max_malformed_fraction: float = Field(0.0, ge=0, le=1)
    """Refuse to start when more than this share of the rows is malformed."""
    gen_batch_size: Literal[1] = 1
    """Known from the peer; only 1 is possible in fully-async training."""
    train_batch_size: Literal[0] = 0
    """Known from the peer; only 0 is possible in fully-async training."""


class ModelConfig(Section):
    """The policy model."""

    path: str | None = None
    """Local Hugging Face folder (config.json, safetensors, tokenizer.json). A hub is never contacted."""
    tokenizer_path: str | None = None
    """Folder with tokenizer.json and tokenizer_config.json; null: the model's."""


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    lr_warmup_steps: int = Field(-1, ge=-1)
    """Linear warm-up in optimizer steps; -1: use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = Field(0.0, ge=0, le=1)
    """Warm-up as a share of all optimizer steps."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Shape after warm-up."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Floor of the cosine schedule as a share of lr."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay (not applied to norms)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW betas."""
    total_training_steps: int = Field(-1, ge=-1)
    """Optimizer steps the schedule is laid out for; -1: derived from data and epochs."""


class MegatronConfig(Section):
    """Sizes of Megatron Core's parallel groups."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """TP."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """PP."""
    context_parallel_size: int = Field(1, ge=1)
    """CP."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """EP."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """ETP; null: TP."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute."""
    weight_source: Literal["builtin", "megatron-bridge"] = "builtin"
    """Who converts between Hugging Face and Megatron names."""


class ActorConfig(Section):
    """The trainer."""

    strategy: Literal["torch", "megatron", "emulated"] = "torch"
    """Training engine."""
    ppo_mini_batch_size: int = Field(16, ge=1)
    """Samples (prompts) of one optimizer step."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over each collection."""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """Tokens of one micro-batch on one rank; a single longer response makes a micro-batch of its own."""
    clip_ratio: float = Field(0.2, ge=0)
    """PPO clip when clip_ratio_low/high are null."""
    clip_ratio_low: float | None = Field(None, ge=0)
    """Lower clip."""
    clip_ratio_high: float | None = Field(None, ge=0)
    """Upper clip."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual clip bound for negative advantages."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL to a frozen reference model to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Weight of that KL."""
    kl_loss_type: Literal["kl", "abs", "mse", "low_var_kl"] = "low_var_kl"
    """Estimator of that KL per token (k1, |k1|, k2, k3)."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses become one number."""
    grad_clip: float = Field(1.0, gt=0)
    """Global gradient norm clip."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter dtype of the trainer."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """Optimizer."""
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    """Used when strategy is megatron."""
    use_rollout_log_probs: Literal[True] = True
    """Known from the peer; always true in fully-async training."""


class ValKwargs(Section):
    """Sampling of validation responses."""

    n: int = Field(1, ge=1)
    """Responses per prompt; n > 1 gives mean@n and best@n."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus."""
    top_k: int = Field(-1, ge=-1)
    """-1: off."""


class RolloutConfig(Section):
    """The generation engine, under actor_rollout_ref."""

    name: Literal["torch", "vllm", "emulated"] = "torch"
    """Generation engine."""
    n: int = Field(8, ge=1)
    """Responses per prompt."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probs are of this temperature on both sides."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Refused below 1 unless allow_biased_logprobs."""
    top_k: int = Field(-1, ge=-1)
    """Refused unless -1 or allow_biased_logprobs."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Refused above 0 unless allow_biased_logprobs."""
    allow_biased_logprobs: bool = False
    """Accept samplers whose log-probs are not those of the trained distribution."""
    tensor_model_parallel_size: int = Field(1, ge=1)
    """GPUs of one replica."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of a trainer GPU a hybrid replica may use while lent."""
    standalone_gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of a rollout GPU; null: gpu_memory_utilization."""
    max_num_seqs: int | None = Field(None, ge=1)
    """Sequences running together in one replica; null: concurrent_samples_per_replica x n."""
    kv_cache_tokens: int | None = Field(None, ge=1)
    """KV budget of one replica in tokens; null: max_num_seqs x (max_prompt_length + max_response_length)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Weights of the engine."""
    calculate_log_probs: Literal[True] = True
    """Known from the peer; always true in fully-async training."""
    engine_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Extra engine options by engine name, e.g. {vllm: {enforce_eager: true}}."""
    val_kwargs: ValKwargs = Field(default_factory=ValKwargs)
    """Sampling in validation."""


class ActorRolloutRefConfig(Section):
    """Model, trainer and engine."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy model."""
    actor: ActorConfig = Field(default_factory=ActorConfig)
    """The trainer."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """The generation engine."""
    hybrid_engine: Literal[False] = False
    """Known from the peer; only false is possible in fully-async training."""


class FilterGroupsConfig(Section):
    """Drop samples that teach nothing."""

    enable: bool = False
    """Give samples whose metric is equal over all responses the verdict `filtered`."""
    metric: Literal["reward", "response_length"] = "reward"
    """What is compared."""


class RolloutCorrectionConfig(Section):
    """Correction of the gap between the policy that sampled and the policy that is trained."""

    bypass_mode: bool = True
    """True: ratio = pi / pi_rollout. False (decoupled): pi_prox = weights at the start of the cycle."""
    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights min(pi_prox / pi_rollout, threshold) in decoupled mode, per token or per sequence."""
    rollout_is_threshold: float = Field(2.0, gt=0)
    """Upper bound of the importance weight."""
    rollout_rs: Literal["token", "sequence"] | None = None
    """Rejection: mask tokens or sequences whose weight is outside the thresholds."""
    rollout_rs_threshold: float = Field(4.0, gt=0)
    """Upper rejection threshold."""
    rollout_rs_threshold_lower: float | None = Field(None, gt=0)
    """Lower rejection threshold; null: 1 / rollout_rs_threshold."""


class AlgorithmConfig(Section):
    """Advantages and their inputs."""

    adv_estimator: Literal["grpo", "reinforce_plus_plus", "rloo"] = "grpo"
    """How rewards become advantages."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of reinforce_plus_plus."""
    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    """Group filter."""
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    """Off-policy correction."""


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
    logger: list[Literal["console", "tensorboard", "prometheus", "wandb_offline"]] = Field(
        default_factory=lambda: ["console"]
    )
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


class ComponentConfig(Section):
    """Slurm request of one heterogeneous component."""

    partition: str | None = None
    """Partition."""
    account: str | None = None
    """Account."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Node features."""
    reservation: str | None = None
    """Reservation."""
    cpus_per_task: int | None = Field(None, ge=1)
    """Cores of a node agent and its workers."""
    mem: str | None = None
    """Memory per node, e.g. 480G."""
    exclusive: bool = False
    """Whole nodes."""
    gres: str | None = None
    """Spelling of the GPU request when the site needs its own."""
    extra: dict[str, str] = Field(default_factory=dict)
    """Further #SBATCH options."""


class SlurmConfig(Section):
    """Submission. Not available yet in this release."""

    site: str = "generic"
    """Site profile: name in slurm/sites, or path."""
    time: str = "24:00:00"
    """Time limit."""
    job_name: str | None = None
    """Null: the experiment's name."""
    trainer: ComponentConfig = Field(default_factory=ComponentConfig)
    """Component 0."""
    rollout: ComponentConfig = Field(default_factory=ComponentConfig)
    """Component 1."""
    signal_before_end_s: int = Field(300, ge=1)
    """Warning before the time limit."""


class LocalConfig(Section):
    """launcher: local (one machine, mpiexec)."""

    cores: list[int] | None = None
    """Cores to use; null: all this process may use."""
    allow_oversubscribe: bool = False
    """Share cores when fewer are there than GPUs asked for."""
    threads_per_worker: int = Field(1, ge=1)
    """Compute threads of a worker."""


class QueueConfig(Section):
    """The sample queue on the shared filesystem."""

    seal_bytes: int = Field(16 << 20, ge=1)
    """Seal a segment at this many payload bytes."""
    seal_samples: int = Field(64, ge=1)
    """... or at this many samples."""
    seal_age_s: float = Field(5.0, gt=0)
    """... or when its first sample is this old."""
    durability: Literal["host-crash", "process-crash"] = "host-crash"
    """host-crash: fsync file and folder."""
    min_free_bytes: int = Field(64 << 20, ge=0)
    """Admission stops below this much free space."""
    retry_s: float = Field(2.0, gt=0)
    """Pause between attempts while the disk is full."""
    scan_s: float = Field(5.0, gt=0)
    """Fallback discovery by directory listing."""


class WeightSyncConfig(Section):
    """Trainer to replicas."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on CUDA, gloo otherwise."""
    bucket_bytes: int = Field(16 << 20, ge=1024)
    """Size of a transfer bucket."""
    attempts: int = Field(3, ge=1)
    """Attempts of one sync before the run ends."""
    interface: str | None = None
    """Network interface; null: chosen from the peer's address."""
    verify: Literal["off", "checksum", "probe"] = "checksum"
    """probe: also teacher-force a probe set in trainer and receivers after every sync."""
    probe_count: int = Field(4, ge=1)
    """Sequences of the probe set."""
    probe_tolerance: float = Field(1e-4, gt=0)
    """Largest accepted log-prob difference (fp32)."""


class OverlongBufferConfig(Section):
    """Soft punishment of overlong responses (DAPO)."""

    enable: bool = False
    """Switch."""
    len: int = Field(0, ge=0)
    """Tokens before max_response_length in which the penalty grows."""
    penalty_factor: float = Field(1.0, ge=0)
    """Penalty at the full length."""


class RewardConfig(Section):
    """Scoring of responses."""

    function: str = "exact_match"
    """Built-in name (exact_match, numeric_match, count_on) or module:function or path.py:function."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments for the function."""
    workers: int = Field(1, ge=1)
    """Reward processes per node."""
    timeout_s: float = Field(30.0, gt=0)
    """For one response."""
    retries: int = Field(1, ge=0)
    """Regenerations of a response whose reward failed."""
    min_responses: int = Field(2, ge=1)
    """A sample with fewer good responses is `failed` (never more than n)."""
    max_failed_fraction: float = Field(0.5, gt=0, le=1)
    """The run stops when more of the last 200 samples failed."""
    overlong_buffer: OverlongBufferConfig = Field(default_factory=OverlongBufferConfig)
    """Overlong shaping."""


class DeadlinesConfig(Section):
    """Every bounded wait, in seconds; all are multiplied by `scale`."""

    scale: float = Field(1.0, gt=0)
    """Factor for slow machines."""
    start_s: float = Field(600.0, gt=0)
    """All workers up and weights loaded."""
    agent_silence_s: float = Field(30.0, gt=0)
    """A node agent (or the controller) unheard of for this long is lost."""
    decode_s: float = Field(120.0, gt=0)
    """A generating worker without a new token."""
    train_s: float = Field(1800.0, gt=0)
    """A training worker without a finished micro-batch."""
    call_s: float = Field(60.0, gt=0)
    """Small control calls (abort, resume, flush)."""
    switch_s: float = Field(120.0, gt=0)
    """One phase of activation or deactivation."""
    sync_s: float = Field(300.0, gt=0)
    """One attempt of a weight sync."""
    bucket_s: float = Field(60.0, gt=0)
    """One bucket of a weight sync."""
    drain_s: float = Field(60.0, gt=0)
    """Draining where aborting is not allowed."""
    lending_s: float = Field(3600.0, gt=0)
    """Hybrids active without a deactivation."""
    collect_s: float = Field(3600.0, gt=0)
    """Waiting for samples without one arriving."""
    checkpoint_s: float = Field(600.0, gt=0)
    """Writing or reading a checkpoint."""
    validate_s: float = Field(1800.0, gt=0)
    """One validation."""
    stop_s: float = Field(20.0, gt=0)
    """Orderly stop before processes are killed."""


class FaultsConfig(Section):
    """How much may go wrong before the run gives up."""

    worker_restarts: int = Field(5, ge=0)
    """Restarts of one worker per attempt."""
    trainer_restarts: int = Field(3, ge=0)
    """Restarts of the trainer group per attempt."""
    attempts: int = Field(3, ge=1)
    """Starts of the job step by the launch loop."""
    backoff_s: float = Field(1.0, ge=0)
    """First pause between attempts; doubles."""


class RunlogConfig(Section):
    """The HDF5 log of the run."""

    flush_s: float = Field(10.0, gt=0)
    """How often the open file is rewritten."""
    rows_per_file: int = Field(4096, ge=16)
    """Rows before a file is sealed."""


class EmulatedConfig(Section):
    """Timing models of the emulated engine and trainer (tests, simulation)."""

    prompt_tokens: int = Field(64, ge=1)
    """Length of generated prompts."""
    response_mean_tokens: float = Field(512.0, gt=0)
    """Mean response length."""
    response_sigma: float = Field(0.8, ge=0)
    """Sigma of the log-normal response length; 0: constant."""
    decode_base_s: float = Field(0.02, ge=0)
    """Time of one decode step with an empty batch."""
    decode_per_seq_s: float = Field(0.0001, ge=0)
    """More time per running sequence."""
    prefill_tokens_per_s: float = Field(20000.0, gt=0)
    """Prefill and re-prefill speed."""
    hybrid_speed: float = Field(1.0, gt=0)
    """Speed of a hybrid replica relative to a standalone one."""
    wake_s: float = Field(1.0, ge=0)
    """Waking a hybrid."""
    sleep_s: float = Field(1.0, ge=0)
    """Putting a hybrid to sleep."""
    sync_s: float = Field(1.0, ge=0)
    """Weight broadcast."""
    handover_s: float = Field(0.5, ge=0)
    """Same-node hand-over."""
    train_tokens_per_s: float = Field(20000.0, gt=0)
    """Training speed of one GPU."""
    train_fixed_s: float = Field(0.5, ge=0)
    """Fixed time of one optimizer step."""
    train_efficiency: float = Field(1.0, gt=0, le=1)
    """Scaling efficiency over trainer GPUs."""
    reward_equal_fraction: float = Field(0.0, ge=0, le=1)
    """Share of samples whose rewards are all equal (for the group filter)."""
    reward_failed_fraction: float = Field(0.0, ge=0, le=1)
    """Share of responses whose reward fails."""
    dataset_size: int = Field(1_000_000, ge=0)
    """Prompts in one epoch when no files are given."""


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
