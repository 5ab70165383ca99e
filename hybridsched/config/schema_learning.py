"""Sections of run.yaml about learning: `data`, `actor_rollout_ref`, `algorithm`, `reward`.

The docstring under a key is its documentation. Import these names from `hybridsched.config.schema`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from hybridsched.config.schema_base import Section


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

    @field_validator("train_files", "val_files", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: Any) -> Any:
        """Users of the peer write a single file without brackets."""
        return [value] if isinstance(value, str) else value


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
    """TP: ranks that share every matrix; at most a node."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """PP: stages that share the layers evenly."""
    context_parallel_size: int = Field(1, ge=1)
    """CP: ranks that share long sequences."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """EP: data-parallel ranks that share the experts of a mixture."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """ETP: ranks that share every expert; null: TP."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks; a checkpoint resumes only under the same choice."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, those of attention, or whole layers."""
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
    ignore_eos: bool = False
    """Every response uses its whole budget (speed measurements: equal work in every run)."""
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
