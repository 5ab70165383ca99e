"""From our settings to vLLM's: engine arguments, the environment of its processes, and the check of engine_kwargs.vllm.

Owns: which of vLLM's options hybridsched sets itself (and which key of ours sets them), the defaults that differ from
vLLM's, and the environment that makes vLLM start fast and alone. Importing this module does not import vLLM.

Invariants: an option of the user is passed on as it is, or refused by name before a model is loaded; the environment
is set before vLLM is imported, and only where the user has not set it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridsched.engines.vllm_plugin import ACTIVE_VARIABLE, BACKEND
from hybridsched.errors import ConfigError
from hybridsched.models.config import ModelConfig

_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_BLOCK = 32  #: tokens; the smallest KV block vLLM's CPU attention takes
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_ROLLOUT = "actor_rollout_ref.rollout"

#: Options that are not the user's to set here, with what is.
OWNED: Mapping[str, str] = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "dtype": f"{_ROLLOUT}.dtype",
    "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "max_num_seqs": f"{_ROLLOUT}.max_num_seqs",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "gpu_memory_utilization": f"{_ROLLOUT}.gpu_memory_utilization and standalone_gpu_memory_utilization",
    "kv_cache_memory_bytes": f"{_ROLLOUT}.kv_cache_tokens",
    "num_gpu_blocks_override": f"{_ROLLOUT}.kv_cache_tokens",
    "data_parallel_size": "rollout.nnodes (every replica is an engine of its own)",
    **dict.fromkeys(
        (
            "skip_tokenizer_init",
            "logprobs_mode",
            "weight_transfer_config",
            "worker_cls",
            "worker_extension_cls",
            "enable_sleep_mode",
            "disable_log_stats",
            "generation_config",
        ),
        "",
    ),
}


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What an engine is told. Lengths in tokens."""

    dtype: str
    max_num_seqs: int
    kv_cache_tokens: int  #: the replica's KV budget
    max_tokens: int  #: prompt and response together
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    fixed_kv: bool = False  #: on GPUs too the KV budget is that of kv_cache_tokens, not what the memory share leaves
    sleeps: bool = True  #: a hybrid: its memory can be given back
    threads: int = 1  #: compute threads of a CPU replica
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)


def set_environment(options: VllmOptions, device: str) -> None:
    """What vLLM and its processes find in their environment. Before vLLM is imported."""
    wanted = {
        ACTIVE_VARIABLE: "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # one token more than the model's context, which is never computed
    }
    if device == "cpu":
        wanted |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the agent has bound the worker's cores
            "OMP_NUM_THREADS": str(options.threads),
            "VLLM_CPU_CI_ENV": "1",  # no warm-up pass
            "TORCHDYNAMO_DISABLE": "1",  # no compiler at the first request
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        }
        if options.tensor_parallel_size == 1:
            wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker lives in EngineCore's process
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, and it would override the KV budget
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def engine_arguments(model: Path, config: ModelConfig, options: VllmOptions, device: str) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs. Raises ConfigError for a model or option that cannot work."""
    length = options.max_tokens + 1  # teacher forcing takes a whole sequence as prompt and samples one token more
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": length,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    if options.max_tokens > config.max_position_embeddings:
        raise ConfigError(
            f"data.max_prompt_length + data.max_response_length is {options.max_tokens}, but the context of {model} "
            f"ends at {config.max_position_embeddings}; lower one of them"
        )
    blocks = -(-options.kv_cache_tokens // _BLOCK) + options.max_num_seqs + 1
    blocks = max(blocks, -(-length // _BLOCK) + 1)
    if device == "cpu":
        if config.head_dim not in _CPU_HEAD_DIMS:
            raise ConfigError(
                f"vLLM on CPU cannot run {model}: its head_dim is {config.head_dim}, possible are "
                f"{', '.join(map(str, _CPU_HEAD_DIMS))}; use {_ROLLOUT}.name: torch, or another model"
            )
        arguments |= {
            "enforce_eager": True,
            "block_size": _BLOCK,
            "kv_cache_memory_bytes": blocks * _block_bytes(config, options),
            "worker_cls": "hybridsched.engines.vllm_cpu_worker.SleepingCPUWorker",
        }
    else:
        if options.fixed_kv:
            arguments["kv_cache_memory_bytes"] = blocks * _block_bytes(config, options)
        arguments |= {
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "enable_sleep_mode": options.sleeps,
            "worker_extension_cls": "hybridsched.engines.vllm_worker.WorkerCalls",
        }
    return arguments | dict(options.engine_kwargs)


def _block_bytes(config: ModelConfig, options: VllmOptions) -> int:
    heads = max(1, config.num_key_value_heads // options.tensor_parallel_size)
    return 2 * config.num_hidden_layers * _BLOCK * heads * config.head_dim * _ITEM[options.dtype]


def check_engine_kwargs(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ConfigError for the first option that vLLM does not know (with what was probably meant) or that is ours.

    ``known``: the fields of vLLM's AsyncEngineArgs.
    """
    for name in given:
        if name in OWNED:
            instead = f"; set {OWNED[name]}" if OWNED[name] else ": hybridsched needs it as it is"
            raise ConfigError(f"{_KEY}.{name} cannot be set here{instead}")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "see vLLM's engine arguments"
            raise ConfigError(f"{_KEY}.{name}: vLLM has no such option; {hint}")


def transfer_config() -> Any:
    """vLLM's WeightTransferConfig for our weight-transfer engine."""
    from vllm.config.weight_transfer import WeightTransferConfig

    return WeightTransferConfig(backend=BACKEND)
