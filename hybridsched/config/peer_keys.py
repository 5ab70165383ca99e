"""Keys and values of the peer that mean nothing here, each with the sentence that says what to use instead.

Owns: two literal tables. A pattern ending in ``.*`` covers the key itself and everything below it; the longest matching
pattern wins. Invariant (tested): no entry shadows a key of our own schema, and no key a sentence recommends is unknown.
"""

from __future__ import annotations

_CRITIC = "there is no critic: algorithm.adv_estimator grpo, rloo or reinforce_plus_plus needs none; remove it"
_REWARD_MODEL = "reward models are not available yet: score with reward.function"
_LORA = "LoRA is not available yet: all parameters are trained; remove it"
_MTP = "multi-token prediction is not available yet; remove it"
_MULTIMODAL = "only text prompts are supported; remove it"
_FSDP = "not used: the torch trainer is data-parallel and offloads by itself while lending; for sharded models set actor_rollout_ref.actor.strategy: megatron"  # noqa: E501
_TOKEN_LEN = "micro-batches are packed by tokens: use actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_KL_REWARD = "the KL goes into the loss, not the reward: use actor_rollout_ref.actor.use_kl_loss and kl_loss_coef"
_VLLM_OPTION = "give engine options as actor_rollout_ref.rollout.engine_kwargs: {vllm: {...}}"
_RAY = "there is no Ray here: nodes come from Slurm or from launcher: local; remove it"
_PROFILE = "profilers are attached from outside; remove it"
_ALWAYS = "always so here; remove it"
_LENGTHS = "use data.max_prompt_length and data.max_response_length"
_CHECKPOINT_ENGINE = "use weight_sync.backend and weight_sync.bucket_bytes"
_MULTI_TURN = "multi-turn generation is not available yet (rollout.agent will be its hook); remove it"

REFUSED_KEYS: dict[str, str] = {
    "critic.*": _CRITIC,
    "reward_model.*": _REWARD_MODEL,
    "reward_model.overlong_buffer.*": "use reward.overlong_buffer",
    "reward_model.reward_kwargs.*": "use reward.kwargs and reward.overlong_buffer",
    "reward_model.reward_manager": "use reward.function (and reward.overlong_buffer for DAPO)",
    "reward_model.reward_loop_module_path": "use reward.function",
    "reward_manager.*": "use reward.function (and reward.overlong_buffer for DAPO)",
    "custom_reward_function.*": "use reward.function: path.py:function and reward.kwargs",
    "ray_init.*": _RAY,
    "ray_kwargs.*": _RAY,
    "hydra.*": "there is no Hydra here: one YAML file plus key=value overrides; remove it",
    "defaults": "configurations are not composed from files: write the keys into this file; remove it",
    "global_profiler.*": _PROFILE,
    "transfer_queue.*": "samples go through the HDF5 queue: see the section queue",
    "distillation.*": "distillation is not available; remove it",
    # data
    "data.image_key": _MULTIMODAL,
    "data.video_key": _MULTIMODAL,
    "data.image_patch_size": _MULTIMODAL,
    "data.tokenizer": "use actor_rollout_ref.model.tokenizer_path",
    "data.val_batch_size": "validation takes all of data.val_files at once; remove it",
    "data.train_max_samples": "shorten the file, or use rollout.total_rollout_steps",
    "data.val_max_samples": "shorten the file",
    "data.validation_shuffle": "the held-out prompts keep their order; remove it",
    "data.dataloader_num_workers": "prompts are read by the controller; remove it",
    "data.filter_overlong_prompts_workers": "prompts are read by the controller; remove it",
    "data.return_raw_chat": _ALWAYS,
    "data.return_raw_input_ids": _ALWAYS,
    "data.return_full_prompt": _ALWAYS,
    "data.custom_cls.*": "write the prompts as JSONL or parquet: see data.train_files",
    "data.sampler.*": "the order is a shuffle by data.seed in each epoch; remove it",
    "data.datagen.*": "write the prompts as JSONL or parquet: see data.train_files",
    "data.trust_remote_code": "code from model or data folders is never run; remove it",
    "data.use_shm": "use a local path in data.train_files; remove it",
    "data.tool_config_path": _MULTI_TURN,
    # model
    "actor_rollout_ref.model.lora_rank": _LORA,
    "actor_rollout_ref.model.lora_alpha": _LORA,
    "actor_rollout_ref.model.lora_adapter_path": _LORA,
    "actor_rollout_ref.model.lora.*": _LORA,
    "actor_rollout_ref.model.target_modules": _LORA,
    "actor_rollout_ref.model.exclude_modules": _LORA,
    "actor_rollout_ref.model.mtp.*": _MTP,
    "actor_rollout_ref.model.use_remove_padding": _ALWAYS,
    "actor_rollout_ref.model.enable_gradient_checkpointing": "use actor_rollout_ref.actor.megatron.recompute",
    "actor_rollout_ref.model.enable_activation_offload": "use actor_rollout_ref.actor.megatron.recompute",
    "actor_rollout_ref.model.trust_remote_code": "code from model folders is never run; remove it",
    "actor_rollout_ref.model.external_lib": "code from model folders is never run; remove it",
    "actor_rollout_ref.model.override_config.*": "edit config.json in the model folder",
    "actor_rollout_ref.model.hf_config_path": "config.json is read from actor_rollout_ref.model.path",
    "actor_rollout_ref.model.custom_chat_template": "put the template into tokenizer_config.json of tokenizer_path",
    "actor_rollout_ref.model.use_shm": "use a local path in actor_rollout_ref.model.path; remove it",
    "actor_rollout_ref.model.use_liger": "not used; remove it",
    "actor_rollout_ref.model.use_fused_kernels": "not used; remove it",
    "actor_rollout_ref.model.fused_kernel_options.*": "not used; remove it",
    # actor
    "actor_rollout_ref.actor.fsdp_config.*": _FSDP,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "use actor_rollout_ref.actor.megatron.context_parallel_size",  # noqa: E501
    "actor_rollout_ref.actor.ppo_micro_batch_size": _TOKEN_LEN,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _TOKEN_LEN,
    "actor_rollout_ref.actor.use_dynamic_bsz": f"always so: {_TOKEN_LEN}",
    "actor_rollout_ref.actor.shuffle": "samples are trained in accepted order; remove it",
    "actor_rollout_ref.actor.data_loader_seed": "use trainer.seed",
    "actor_rollout_ref.actor.use_torch_compile": "not used; remove it",
    "actor_rollout_ref.actor.entropy_checkpointing": "not used; remove it",
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking": _ALWAYS,
    "actor_rollout_ref.actor.calculate_entropy": _ALWAYS,
    "actor_rollout_ref.actor.policy_loss.*": "the loss is the clipped PPO loss: use clip_ratio_low, clip_ratio_high and clip_ratio_c of actor_rollout_ref.actor",  # noqa: E501
    "actor_rollout_ref.actor.checkpoint.*": "checkpoints are always complete: use trainer.save_freq and trainer.max_actor_ckpt_to_keep",  # noqa: E501
    "actor_rollout_ref.actor.profiler.*": _PROFILE,
    "actor_rollout_ref.actor.router_replay.*": "router replay is not available yet; remove it",
    "actor_rollout_ref.actor.loss_scale_factor": "use actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.load_weight": _ALWAYS,
    "actor_rollout_ref.actor.optim.warmup_style": "use actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.lr_decay_style": "use actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.optim.min_lr": "use actor_rollout_ref.actor.optim.min_lr_ratio (a share of lr)",
    "actor_rollout_ref.actor.optim.clip_grad": "use actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.optim.num_cycles": "the cosine schedule is half a cycle; remove it",
    "actor_rollout_ref.actor.optim.optimizer": "the optimizer is AdamW; remove it",
    "actor_rollout_ref.actor.optim.optimizer_impl": "the optimizer is AdamW; remove it",
    "actor_rollout_ref.actor.optim.override_optimizer_config.*": "the optimizer is AdamW: use betas and weight_decay of actor_rollout_ref.actor.optim",  # noqa: E501
    "actor_rollout_ref.actor.megatron.param_offload": "parameters are offloaded exactly while hybrids are lent; remove it",  # noqa: E501
    "actor_rollout_ref.actor.megatron.grad_offload": "gradients are offloaded exactly while hybrids are lent; remove it",  # noqa: E501
    "actor_rollout_ref.actor.megatron.optimizer_offload": "optimizer state is offloaded exactly while hybrids are lent; remove it",  # noqa: E501
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size": "interleaved pipelines are not available; remove it",  # noqa: E501
    "actor_rollout_ref.actor.megatron.sequence_parallel": "not available yet; remove it (experts: use TP 1)",
    "actor_rollout_ref.actor.megatron.use_mbridge": "use actor_rollout_ref.actor.megatron.weight_source: megatron-bridge",  # noqa: E501
    "actor_rollout_ref.actor.megatron.vanilla_mbridge": "use actor_rollout_ref.actor.megatron.weight_source",
    "actor_rollout_ref.actor.megatron.use_dist_checkpointing": "weights start from actor_rollout_ref.model.path; remove it",  # noqa: E501
    "actor_rollout_ref.actor.megatron.dist_checkpointing_path": "weights start from actor_rollout_ref.model.path; remove it",  # noqa: E501
    "actor_rollout_ref.actor.megatron.override_transformer_config.*": "use actor_rollout_ref.actor.megatron.recompute; other overrides are not available",  # noqa: E501
    "actor_rollout_ref.actor.megatron.seed": "use trainer.seed",
    "actor_rollout_ref.ref.*": "the reference model is the frozen start model, built when actor_rollout_ref.actor.use_kl_loss is true; it has no settings of its own",  # noqa: E501
    # rollout engine
    "actor_rollout_ref.rollout.mode": "generation is always asynchronous; remove it",
    "actor_rollout_ref.rollout.nnodes": "use rollout.nnodes",
    "actor_rollout_ref.rollout.n_gpus_per_node": "use rollout.n_gpus_per_node",
    "actor_rollout_ref.rollout.prompt_length": _LENGTHS,
    "actor_rollout_ref.rollout.response_length": _LENGTHS,
    "actor_rollout_ref.rollout.max_model_len": f"it is the sum of prompt and response length: {_LENGTHS}",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": _TOKEN_LEN,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _TOKEN_LEN,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": f"always so: {_TOKEN_LEN}",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": _TOKEN_LEN,
    "actor_rollout_ref.rollout.do_sample": "training always samples; validation is greedy at val_kwargs.temperature 0",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "use actor_rollout_ref.rollout.val_kwargs.temperature (0 is greedy)",  # noqa: E501
    "actor_rollout_ref.rollout.enforce_eager": _VLLM_OPTION,
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": _VLLM_OPTION,
    "actor_rollout_ref.rollout.enable_chunked_prefill": _VLLM_OPTION,
    "actor_rollout_ref.rollout.enable_prefix_caching": _VLLM_OPTION,
    "actor_rollout_ref.rollout.max_num_batched_tokens": _VLLM_OPTION,
    "actor_rollout_ref.rollout.disable_log_stats": _VLLM_OPTION,
    "actor_rollout_ref.rollout.quantization": _VLLM_OPTION,
    "actor_rollout_ref.rollout.limit_images": _MULTIMODAL,
    "actor_rollout_ref.rollout.free_cache_engine": "a hybrid replica always gives its memory back; remove it",
    "actor_rollout_ref.rollout.load_format": "weights always come from the trainer at start; remove it",
    "actor_rollout_ref.rollout.layered_summon": "weights are streamed in buckets: use weight_sync.bucket_bytes",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "use weight_sync.bucket_bytes",
    "actor_rollout_ref.rollout.checkpoint_engine.*": _CHECKPOINT_ENGINE,
    "actor_rollout_ref.rollout.data_parallel_size": "every replica is one engine; more replicas come from rollout.nnodes",  # noqa: E501
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": "a replica has no pipeline: use actor_rollout_ref.rollout.tensor_model_parallel_size",  # noqa: E501
    "actor_rollout_ref.rollout.expert_parallel_size": _VLLM_OPTION,
    "actor_rollout_ref.rollout.multi_turn.*": _MULTI_TURN,
    "actor_rollout_ref.rollout.agent.*": _MULTI_TURN,
    "actor_rollout_ref.rollout.over_sample_rate": "use async_training.staleness_threshold",
    "actor_rollout_ref.rollout.seed": "use trainer.seed",
    "actor_rollout_ref.rollout.full_determinism": "draws never depend on routing: use trainer.seed",
    "actor_rollout_ref.rollout.skip_rollout": "use actor_rollout_ref.rollout.name: emulated to try the schedule without a model",  # noqa: E501
    "actor_rollout_ref.rollout.skip_tokenizer_init": _ALWAYS,
    "actor_rollout_ref.rollout.trace.*": "every sample's story is in the run log: hybridsched explain; remove it",
    "actor_rollout_ref.rollout.prometheus.*": "use trainer.logger: [prometheus]",
    "actor_rollout_ref.rollout.profiler.*": _PROFILE,
    "actor_rollout_ref.nccl_timeout": "use deadlines.sync_s and deadlines.train_s",
    # algorithm
    "algorithm.kl_ctrl.*": _KL_REWARD,
    "algorithm.use_kl_in_reward": _KL_REWARD,
    "algorithm.kl_penalty": "use actor_rollout_ref.actor.kl_loss_type",
    "algorithm.lam": _CRITIC,
    "algorithm.use_pf_ppo": "not available; remove it",
    "algorithm.pf_ppo.*": "not available; remove it",
    "algorithm.filter_groups.max_num_gen_batches": "filtered samples are replaced until the data ends; remove it",
    "algorithm.rollout_correction.rollout_token_veto_threshold": "use algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_is_batch_normalize": "not available; remove it",
    "algorithm.rollout_correction.loss_type": "the loss is the clipped PPO loss; remove it",
    "algorithm.rollout_correction.use_policy_gradient": "the loss is the clipped PPO loss; remove it",
    # trainer
    "trainer.critic_warmup": _CRITIC,
    "trainer.max_critic_ckpt_to_keep": _CRITIC,
    "trainer.esi_redundant_time": "use slurm.signal_before_end_s: the run checkpoints and requeues before its time limit",  # noqa: E501
    "trainer.val_only": "not available; remove it",
    "trainer.rollout_data_dir": "every sample stays in the queue files: hybridsched queue; remove it",
    "trainer.validation_data_dir": "validation results are in the run log; remove it",
    "trainer.log_val_generations": "validation results are in the run log; remove it",
    "trainer.default_hdfs_dir": "use a shared folder in trainer.default_local_dir",
    "trainer.remove_previous_ckpt_in_save": "use trainer.max_actor_ckpt_to_keep",
    "trainer.del_local_ckpt_after_load": "use trainer.max_actor_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout": _RAY,
    "trainer.use_legacy_worker_impl": _RAY,
    "trainer.use_v1": "the mode is always fully asynchronous with lending: see async_training",
    "trainer.v1.*": "use async_training: dynamic_schedule_policy and dynamic_schedule_deactivate_ratio",
    "trainer.npu_profile.*": _PROFILE,
    "trainer.profile_steps": _PROFILE,
    "trainer.controller_nsight_options.*": _PROFILE,
    "trainer.worker_nsight_options.*": _PROFILE,
    # rollout nodes
    "rollout.n": "use actor_rollout_ref.rollout.n",
    "rollout.test_freq": "use trainer.test_freq",
    # async_training
    "async_training.checkpoint_engine.*": _CHECKPOINT_ENGINE,
    "async_training.compute_prox_log_prob": "use algorithm.rollout_correction.bypass_mode: false",
    "async_training.use_rollout_log_probs": _ALWAYS,
    "async_training.parameter_sync_step": "use async_training.trigger_parameter_sync_step",
    "async_training.max_queue_size": "the queue holds what the window allows: use async_training.staleness_threshold",
}
"""Dotted key or pattern -> what to use instead."""

REFUSED_VALUES: dict[tuple[str, str], str] = {
    ("actor_rollout_ref.actor.strategy", "fsdp"): "use torch (data-parallel) or megatron (sharded)",
    ("actor_rollout_ref.actor.strategy", "fsdp2"): "use torch (data-parallel) or megatron (sharded)",
    ("actor_rollout_ref.actor.strategy", "veomni"): "use torch (data-parallel) or megatron (sharded)",
    ("actor_rollout_ref.rollout.name", "sglang"): "use vllm, torch or emulated",
    ("actor_rollout_ref.rollout.name", "trtllm"): "use vllm, torch or emulated",
    ("actor_rollout_ref.rollout.name", "hf"): "use torch",
    ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum-norm"): "use seq-mean-token-sum",
    ("algorithm.adv_estimator", "gae"): "gae needs a critic, which is not available: use grpo or reinforce_plus_plus",
    ("algorithm.adv_estimator", "remax"): "use rloo (also a baseline from the same policy)",
    ("algorithm.adv_estimator", "reinforce_plus_plus_baseline"): "use rloo or grpo",
    ("algorithm.filter_groups.metric", "acc"): "use reward",
    ("algorithm.filter_groups.metric", "score"): "use reward",
    ("algorithm.filter_groups.metric", "seq_reward"): "use reward",
    ("algorithm.filter_groups.metric", "seq_final_reward"): "use reward",
    ("trainer.logger", "wandb"): "use wandb_offline, and sync it afterwards: nothing contacts the network here",
    ("trainer.logger", "swanlab"): "use tensorboard or wandb_offline",
    ("trainer.logger", "mlflow"): "use tensorboard or wandb_offline",
    ("trainer.device", "npu"): "use cuda or cpu",
    ("trainer.device", "gpu"): "use cuda",
    ("weight_sync.backend", "hccl"): "use nccl or gloo",
}
"""(key, value) -> what to use instead."""


def refusal(path: tuple[str, ...]) -> str | None:
    """The sentence for a refused key of the peer, by its longest matching pattern; None when there is none."""
    name = ".".join(path)
    if name in REFUSED_KEYS:
        return REFUSED_KEYS[name]
    for end in range(len(path), 0, -1):
        sentence = REFUSED_KEYS.get(".".join(path[:end]) + ".*")
        if sentence is not None:
            return sentence
    return None


def has_finer(path: tuple[str, ...]) -> bool:
    """True when the table has an entry of its own for something below ``path``."""
    prefix = ".".join(path) + "."
    return any(pattern.startswith(prefix) and pattern != f"{prefix}*" for pattern in REFUSED_KEYS)
