"""Relations between keys that no single key can tell: sizes that cannot be, settings that contradict each other.

Owns: every cross-check, each with its cure. Pure: nothing here looks at files or the machine (`paths` does; the number
of cores is handed in). Three kinds of answer: `check` (refused), `not_available` (right, but this release cannot run
it) and `notes` (runs, but probably not as meant).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybridsched.config.derived import data_parallel_size
from hybridsched.config.problems import Problem, problem
from hybridsched.config.schema import RunConfig

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_SLURM_TIME = re.compile(r"(\d+-\d{1,2}(:\d{1,2}){0,2}|\d+(:\d{1,2}){0,2}|UNLIMITED|INFINITE)")


def check(config: RunConfig, available_cores: int | None = None) -> list[str]:
    """What is wrong between the keys, each as ``key: what -> cure``; empty when nothing is.

    available_cores: also check that local mode has a core per GPU (None: do not).
    """
    found = find_problems(config)
    if available_cores is not None:
        found += list(_cores(config, available_cores))
    return [one.text() for one in found]


def find_problems(config: RunConfig) -> list[Problem]:
    """`check` with the keys of each problem, so that the loader can add file and line."""
    rules = (_engines, _sizes, _megatron, _sampling, _algorithm, _reward, _async, _trainer, _memory, _queue, _deadlines)
    return [found for rule in rules for found in rule(config)]


def check_cores(config: RunConfig, available_cores: int) -> list[str]:
    """Local mode: one core per GPU asked for, unless local.allow_oversubscribe."""
    return [one.text() for one in _cores(config, available_cores)]


def not_available(config: RunConfig) -> list[str]:
    """What the schema knows but this release cannot run yet; empty when it can run everything asked for."""
    missing: list[tuple[str, str]] = []
    if config.rollout.agent is not None:
        missing.append((f"rollout.agent={config.rollout.agent}", "remove it: responses are single-turn"))
    return [f"not available yet: {what}; {instead}" for what, instead in missing]


def notes(config: RunConfig) -> list[str]:
    """Settings that are allowed but do less than they say; for `--dry-run` and the log."""
    found: list[str] = []
    training, rollout, correction = config.async_training, config.rollout, config.algorithm.rollout_correction
    if not training.partial_rollout and rollout.sync_mode == "abort":
        found.append("async_training.partial_rollout: false makes weight syncs wait for running responses (sync_mode)")
    if rollout.kv_on_sync == "keep" and rollout.sync_mode != "keep":
        found.append(f"rollout.kv_on_sync: keep has no effect with rollout.sync_mode: {rollout.sync_mode}")
    if correction.bypass_mode and correction.rollout_is is not None:
        found.append("algorithm.rollout_correction.rollout_is has no effect with bypass_mode: true")
    if config.trainer.test_freq > 0 and not config.data.val_files:
        found.append("trainer.test_freq has no effect: data.val_files is empty")
    if config.actor_rollout_ref.actor.ppo_mini_batch_size < data_parallel_size(config):
        found.append(f"{_ACTOR}.ppo_mini_batch_size is smaller than the data-parallel size: some trainer ranks idle")
    if config.actor_rollout_ref.actor.strategy == "megatron":
        found += _megatron_notes(config)
    if rollout.nnodes == 0 and not training.use_dynamic_resource_scheduling:
        found.append("rollout.nnodes: 0 is colocated mode: hybrid replicas are built and lent in every cycle")
    return found


def _megatron_notes(config: RunConfig) -> list[str]:
    source = config.actor_rollout_ref.actor.megatron.weight_source
    if source == "builtin":
        return []
    return [f"{_ACTOR}.megatron.weight_source: {source}: needs {source}, not run by us"]


def _engines(config: RunConfig) -> Iterator[Problem]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    keys = f"{_ROLLOUT}.name {_ACTOR}.strategy"
    if (rollout.name == "emulated") != (actor.strategy == "emulated"):
        what = f"engine {rollout.name} cannot work with trainer {actor.strategy}"
        yield problem(keys, what, "emulate both or neither (an emulated side has no weights)")
    if actor.strategy != "emulated" or rollout.name != "emulated":
        if config.actor_rollout_ref.model.path is None:
            cure = "name a local Hugging Face folder (or set both engine and trainer to emulated)"
            yield problem("actor_rollout_ref.model.path", "is not set", cure)
        if not config.data.train_files:
            yield problem("data.train_files", "is empty", "name at least one JSONL or parquet file with prompts")
    if rollout.name == "torch" and rollout.tensor_model_parallel_size > 1:
        what = f"is {rollout.tensor_model_parallel_size}, but the torch engine uses one GPU per replica"
        yield problem(f"{_ROLLOUT}.tensor_model_parallel_size {_ROLLOUT}.name", what, "set it to 1, or use vllm")
    if config.weight_sync.backend == "nccl" and config.trainer.device == "cpu":
        yield problem("weight_sync.backend trainer.device", "nccl needs CUDA devices", "use auto or gloo")
    if actor.dtype != rollout.dtype and rollout.dtype == "float16":
        what = f"float16 cannot hold every value of a {actor.dtype} trainer"
        yield problem(f"{_ROLLOUT}.dtype {_ACTOR}.dtype", what, "use bfloat16 or float32")
    exact = actor.dtype == rollout.dtype == "float32"
    if config.weight_sync.verify == "probe" and not exact and config.weight_sync.probe_tolerance < 1e-2:
        what = (
            f"{config.weight_sync.probe_tolerance:g} cannot be met with trainer {actor.dtype}, engine {rollout.dtype}"
        )
        cure = "set it to 0.05 or more, or use float32 on both sides"
        yield problem(f"weight_sync.probe_tolerance {_ROLLOUT}.dtype {_ACTOR}.dtype", what, cure)


def _sizes(config: RunConfig) -> Iterator[Problem]:
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    hybrids = config.async_training.use_dynamic_resource_scheduling or config.rollout.nnodes == 0
    key = f"{_ROLLOUT}.tensor_model_parallel_size"
    places = [
        ("rollout", config.rollout.n_gpus_per_node, config.rollout.nnodes > 0),
        ("trainer", config.trainer.n_gpus_per_node, hybrids),
    ]
    for section, gpus, used in places:
        if used and gpus % size:
            what = f"{gpus} GPUs per {section} node cannot be split into replicas of {size} GPUs"
            yield problem(f"{section}.n_gpus_per_node {key}", what, f"make it a multiple of {key}")
    needs_hybrids = config.async_training.use_trainer_do_validate
    if needs_hybrids and not hybrids:
        cure = "set async_training.use_dynamic_resource_scheduling: true"
        yield problem("async_training.use_trainer_do_validate", "needs hybrid replicas, which are not built", cure)
    cores = config.local.cores
    if cores is not None and (len(set(cores)) != len(cores) or min(cores, default=0) < 0 or not cores):
        yield problem("local.cores", f"{cores} is not a list of distinct core numbers", "e.g. [0, 1], or null for all")


def _cores(config: RunConfig, available_cores: int) -> Iterator[Problem]:
    if config.launcher != "local" or config.local.allow_oversubscribe:
        return
    cores = len(config.local.cores) if config.local.cores is not None else available_cores
    trainer = config.trainer.nnodes * config.trainer.n_gpus_per_node
    rollout = config.rollout.nnodes * config.rollout.n_gpus_per_node
    if trainer + rollout > cores:
        what = f"asks for {trainer} + {rollout} GPUs (trainer + rollout), one core each, but there are {cores} cores"
        cure = "ask for fewer, or set local.allow_oversubscribe: true"
        yield problem("trainer.n_gpus_per_node rollout.n_gpus_per_node trainer.nnodes rollout.nnodes", what, cure)
    if config.local.cores is not None and len(config.local.cores) > available_cores:
        what = f"names {len(config.local.cores)} cores, but this process may use {available_cores}"
        yield problem("local.cores", what, "name fewer, or null for all")


def _megatron(config: RunConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    if actor.strategy != "megatron":
        return
    sizes, gpus = actor.megatron, config.trainer.nnodes * config.trainer.n_gpus_per_node
    tp, pp, cp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size, sizes.context_parallel_size
    ep, etp = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size or tp
    base = f"{_ACTOR}.megatron"
    if gpus % (tp * pp * cp):
        what = f"{gpus} trainer GPUs cannot be split into groups of TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp}"
        keys = " ".join(f"{base}.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
        yield problem(f"{keys} trainer.n_gpus_per_node", what, "make the product divide nnodes x n_gpus_per_node")
    elif config.trainer.n_gpus_per_node % tp:
        what = (
            f"TP {tp} does not fit into nodes of {config.trainer.n_gpus_per_node} GPUs; its ranks talk in every layer"
        )
        cure = "use a divisor of trainer.n_gpus_per_node; more nodes take pipeline or data parallelism"
        yield problem(f"{base}.tensor_model_parallel_size trainer.n_gpus_per_node", what, cure)
    if etp > tp:
        what = f"is {etp}, larger than TP {tp}: gradients of such experts would be mixed up"
        keys = f"{base}.expert_tensor_parallel_size {base}.tensor_model_parallel_size"
        yield problem(keys, what, "set it to null, and share experts out by expert_model_parallel_size")
    if gpus % (etp * ep * pp):
        what = f"{gpus} trainer GPUs cannot be split into expert groups of ETP {etp} x EP {ep} x PP {pp}"
        keys = f"{base}.expert_model_parallel_size {base}.expert_tensor_parallel_size"
        yield problem(f"{keys} trainer.n_gpus_per_node", what, "make the product divide nnodes x n_gpus_per_node")


def _sampling(config: RunConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    biased = [("top_p", rollout.top_p, rollout.top_p < 1), ("top_k", rollout.top_k, rollout.top_k > 0)]
    biased += [("min_p", rollout.min_p, rollout.min_p > 0)]
    for name, value, off in biased:
        if off and not rollout.allow_biased_logprobs:
            what = f"{value} samples from a cut distribution, whose log-probs are not those of the trained policy"
            neutral = {"top_p": "1.0", "top_k": "-1", "min_p": "0.0"}[name]
            cure = f"set it to {neutral}, or accept the bias with {_ROLLOUT}.allow_biased_logprobs: true"
            yield problem(f"{_ROLLOUT}.{name}", what, cure)
    for key, value in (
        (f"{_ROLLOUT}.top_k", rollout.top_k),
        (f"{_ROLLOUT}.val_kwargs.top_k", rollout.val_kwargs.top_k),
    ):
        if value == 0:
            yield problem(key, "0 would keep no token", "use -1 for off")
    length = config.data.max_prompt_length + config.data.max_response_length
    if rollout.kv_cache_tokens is not None and rollout.kv_cache_tokens < length:
        what = f"{rollout.kv_cache_tokens} tokens cannot hold one sequence of {length}"
        cure = "raise it to at least max_prompt_length + max_response_length, or null"
        yield problem(f"{_ROLLOUT}.kv_cache_tokens data.max_prompt_length data.max_response_length", what, cure)


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    actor, n, algorithm = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n, config.algorithm
    if algorithm.adv_estimator in ("grpo", "rloo") and n == 1:
        what = f"{algorithm.adv_estimator} compares the responses of one prompt and needs n > 1, but n is 1"
        cure = f"set {_ROLLOUT}.n to 2 or more, or use reinforce_plus_plus"
        yield problem(f"algorithm.adv_estimator {_ROLLOUT}.n", what, cure)
    if algorithm.filter_groups.enable and n == 1:
        what = "with one response per prompt every sample is equal to itself: all would be filtered"
        yield problem(
            f"algorithm.filter_groups.enable {_ROLLOUT}.n", what, f"set {_ROLLOUT}.n to 2 or more, or disable"
        )
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    keys = f"{_ACTOR}.clip_ratio_low {_ACTOR}.clip_ratio_high {_ACTOR}.clip_ratio"
    if low > 1:
        yield problem(keys, f"{low:g} puts the lower clip below a ratio of 0", "set it to at most 1, e.g. 0.2")
    elif low > high:
        what = f"the lower clip {low:g} is larger than the upper clip {high:g}"
        yield problem(keys, what, "set clip_ratio_low <= clip_ratio_high (both default to clip_ratio)")
    if not all(0 <= beta < 1 for beta in actor.optim.betas):
        yield problem(f"{_ACTOR}.optim.betas", f"{list(actor.optim.betas)} is outside [0, 1)", "e.g. [0.9, 0.999]")
    correction = algorithm.rollout_correction
    lower, upper = correction.rollout_rs_threshold_lower, correction.rollout_rs_threshold
    if lower is not None and lower >= upper:
        what = f"the lower rejection threshold {lower:g} is not below the upper {upper:g}"
        base = "algorithm.rollout_correction"
        keys = f"{base}.rollout_rs_threshold_lower {base}.rollout_rs_threshold"
        yield problem(keys, what, "lower it, or null for 1 / rollout_rs_threshold")


def _reward(config: RunConfig) -> Iterator[Problem]:
    reward, n = config.reward, config.actor_rollout_ref.rollout.n
    # The default of 2 is capped at n (derived.min_responses); more than that was meant and cannot be.
    if reward.min_responses > max(n, 2):
        what = f"needs {reward.min_responses} good responses, but a sample has only {n}"
        yield problem(f"reward.min_responses {_ROLLOUT}.n", what, f"set it to at most {_ROLLOUT}.n")
    estimator = config.algorithm.adv_estimator
    if estimator in ("grpo", "rloo") and n > 1 and reward.min_responses < 2:
        yield problem("reward.min_responses", f"{estimator} cannot use a sample with one good response", "set it to 2")
    buffer, longest = reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and not 1 <= buffer.len <= longest:
        cure = "set it between 1 and data.max_response_length"
        yield problem("reward.overlong_buffer.len", f"is {buffer.len}, the response budget is {longest}", cure)


def _async(config: RunConfig) -> Iterator[Problem]:
    training, nodes = config.async_training, config.rollout
    if training.max_off_policy_strategy == "wait" and training.max_off_policy_threshold is None:
        cure = "set async_training.max_off_policy_threshold, or use drop"
        keys = "async_training.max_off_policy_strategy async_training.max_off_policy_threshold"
        yield problem(keys, "wait needs an age to wait for, but the threshold is null", cure)
    if not training.partial_rollout and nodes.sync_mode == "keep":
        what = "keep gives a response tokens of two versions, which partial_rollout: false forbids"
        yield problem("rollout.sync_mode async_training.partial_rollout", what, "use rollout.sync_mode: wait")
    ranks = data_parallel_size(config)
    if nodes.total_rollout_steps is not None and nodes.total_rollout_steps < ranks:
        what = f"{nodes.total_rollout_steps} samples are fewer than {ranks} trainer ranks: nothing would be trained"
        cure = "raise it; one training update takes ppo_mini_batch_size x require_batches samples"
        yield problem("rollout.total_rollout_steps", what, cure)


def _trainer(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        cure = "name the checkpoint folder, or use trainer.resume_mode: auto"
        yield problem(
            "trainer.resume_from_path trainer.resume_mode", "is not set, but resume_mode is resume_path", cure
        )
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        what = f"would be ignored with trainer.resume_mode: {trainer.resume_mode}"
        yield problem("trainer.resume_from_path trainer.resume_mode", what, "set trainer.resume_mode: resume_path")
    name = trainer.experiment_name
    plain = name.strip() and name.isprintable() and "/" not in name and name not in (".", "..")
    if trainer.default_local_dir is None and not plain:
        cure = "use a plain name, or set trainer.default_local_dir"
        yield problem("trainer.experiment_name", f"{name!r} cannot name a folder under runs/", cure)
    if trainer.default_local_dir is not None and not trainer.default_local_dir.strip():
        yield problem("trainer.default_local_dir", "is empty", "name a folder, or null for runs/EXPERIMENT_NAME")
    if config.launcher == "slurm" and not _SLURM_TIME.fullmatch(config.slurm.time):
        yield problem("slurm.time", f"{config.slurm.time!r} is not a time limit", "e.g. 24:00:00 or 2-12:00:00")


def _memory(config: RunConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        return
    for name in ("gpu_memory_utilization", "standalone_gpu_memory_utilization"):
        share = getattr(rollout, name)
        if share is not None and share > 0.97:
            what = f"{share:g} leaves no room for the CUDA context and the weight buckets"
            yield problem(f"{_ROLLOUT}.{name}", what, "set it to 0.95 or less")


def _queue(config: RunConfig) -> Iterator[Problem]:
    queue = config.queue
    if 0 < queue.min_free_bytes < queue.seal_bytes:
        what = f"{queue.min_free_bytes} bytes of free space cannot hold the segment being sealed ({queue.seal_bytes})"
        yield problem(
            "queue.min_free_bytes queue.seal_bytes", what, "raise it to at least queue.seal_bytes, or 0 (off)"
        )
    for name in ("seal_age_s", "retry_s", "scan_s"):
        value, limit = getattr(queue, name), config.deadlines.collect_s * config.deadlines.scale
        if value >= limit:
            what = f"{value:g} s is not shorter than the deadline for waiting for samples ({limit:g} s)"
            yield problem(f"queue.{name} deadlines.collect_s", what, "lower it, or raise deadlines.collect_s")


def _deadlines(config: RunConfig) -> Iterator[Problem]:
    deadlines, emulated = config.deadlines, config.emulated
    if deadlines.bucket_s > deadlines.sync_s:
        what = f"one bucket may take {deadlines.bucket_s:g} s, but the whole sync only {deadlines.sync_s:g} s"
        yield problem("deadlines.bucket_s deadlines.sync_s", what, "set bucket_s <= sync_s")
    if config.actor_rollout_ref.actor.strategy != "emulated":
        return
    phases = [("wake_s", "switch_s"), ("sleep_s", "switch_s"), ("handover_s", "switch_s"), ("sync_s", "sync_s")]
    for name, limit_name in [*phases, ("train_fixed_s", "train_s"), ("decode_base_s", "decode_s")]:
        value, limit = getattr(emulated, name), getattr(deadlines, limit_name) * deadlines.scale
        if value >= limit:
            what = f"{value:g} s is not shorter than its deadline ({limit:g} s)"
            yield problem(f"emulated.{name} deadlines.{limit_name}", what, f"raise deadlines.{limit_name}")
