"""Whether a model can be cut into tensor-, pipeline- and expert-parallel pieces. No torch, no Megatron.

Owns `size_problems`, for the start of a run and again where the model is built.
"""

from __future__ import annotations

from hybridsched.models.config import ModelConfig


def size_problems(config: ModelConfig, tp: int, pp: int, ep: int) -> list[str]:
    """Why the model cannot be cut into such pieces, each as ``what -> cure``; empty when it can."""
    found = []
    for what, value in (
        ("attention heads", config.num_attention_heads),
        ("key-value heads", config.num_key_value_heads),
        ("columns of the feed-forward layer", config.moe_intermediate_size or config.intermediate_size),
    ):
        if value % tp:
            found.append(f"{value} {what} cannot be shared out to TP {tp} -> use a divisor of {value}")
    if config.num_hidden_layers % pp:
        layers = config.num_hidden_layers
        found.append(f"{layers} layers cannot be shared out to PP {pp} stages -> use a divisor of {layers}")
    if ep > 1 and not config.num_experts:
        found.append(f"EP {ep} needs a mixture of experts, the model is dense -> set expert_model_parallel_size: 1")
    elif config.num_experts % ep:
        found.append(f"{config.num_experts} experts cannot be shared out to EP {ep} -> use a divisor")
    if config.num_experts and tp > 1:
        found.append(
            f"a mixture of experts with TP {tp} needs sequence parallelism, which is not available -> set "
            "tensor_model_parallel_size: 1 and share out experts (expert_model_parallel_size) and layers instead"
        )
    if config.attention_out_bias:
        found.append(
            "a bias in the attention's output projection has no place in Megatron's layer -> use strategy: torch"
        )
    return found
