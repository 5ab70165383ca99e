"""This rank's part of the model as Megatron Core sees it: configuration, layers, and the head applied to actions only.

Owns the translation of a model's config.json and of `actor_rollout_ref.actor.megatron` into Megatron's terms. With
Transformer Engine (GPUs) its fused layers are used, without it Megatron's own; parameters have the same meaning, and
`models.megatron_layout` knows both namings. Weights are left undrawn: they are loaded right after.

Does not: load weights, group ranks, or train.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridsched.config.schema import MegatronConfig
from hybridsched.errors import ConfigError
from hybridsched.models import megatron_layout
from hybridsched.models.config import ModelConfig
from hybridsched.models.model_sizes import size_problems
from hybridsched.models.qwen3 import torch_dtype
from hybridsched.trainers.context_parallel import GatheredAttention
from hybridsched.trainers.forward import PaddedRows
from hybridsched.trainers.megatron_groups import MegatronGroups


def require_sizes(config: ModelConfig, sizes: MegatronConfig) -> None:
    """Raise ConfigError, naming keys and cure, when the model cannot be cut into the configured sizes."""
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    problems = size_problems(config, tp, pp, sizes.expert_model_parallel_size)
    if problems:
        raise ConfigError(f"actor_rollout_ref.actor.megatron: {'; '.join(problems)}")


class PolicyModel:
    """One rank's GPTModel. ``chunk`` is what is called and trained: the model itself, or a data-parallel wrapper of it.

    On the last stage its output is logits [A, V / TP]: of the positions that predict actions, and nothing else.
    """

    def __init__(self, config: ModelConfig, groups: MegatronGroups, dtype: str, device: torch.device) -> None:
        self.config = config
        self.megatron_config = transformer_config(config, groups, torch_dtype(dtype), device)
        self.gpt: nn.Module = _gpt_model(config, self.megatron_config, groups, device)
        self.chunk: nn.Module = self.gpt
        self._last_stage = groups.last_stage
        self._sources: Tensor | None = None
        if self._last_stage:
            self.gpt.output_layer.register_forward_pre_hook(self._pick_actions, with_kwargs=True)

    def forward(self, rows: PaddedRows) -> Tensor:
        """Hidden states for the next stage [L, B, hidden], or on the last stage logits [A, V / TP]."""
        positions = torch.arange(rows.tokens.shape[1], device=rows.tokens.device).expand_as(rows.tokens)
        self._sources = rows.sources
        try:
            out: Tensor = self.chunk(input_ids=rows.tokens, position_ids=positions, attention_mask=None)
        finally:
            self._sources = None
        return out[0] if self._last_stage else out

    def _pick_actions(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the head: hidden [L, B, H] to [A, 1, H]."""
        hidden = args[0].transpose(0, 1).reshape(-1, args[0].shape[-1])
        return (hidden.index_select(0, self._sources)[:, None], *args[1:]), kwargs


def transformer_config(config: ModelConfig, groups: MegatronGroups, dtype: torch.dtype, device: torch.device) -> Any:
    """Megatron's TransformerConfig."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = groups.sizes
    options: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.attention_bias,
        "qk_layernorm": config.qk_norm,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": groups.tp,
        "pipeline_model_parallel_size": groups.pp,
        "context_parallel_size": groups.cp,
        "expert_model_parallel_size": groups.ep,
        "expert_tensor_parallel_size": groups.etp,
        "variable_seq_lengths": groups.pp > 1,
        "moe_token_dispatcher_type": "alltoall",  # asked for also without experts, where lengths vary
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
        # The loss comes with the normaliser of the whole mini-batch: gradients are summed and nothing is divided.
        "calculate_per_token_loss": True,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        **_recompute(sizes),
        **(_experts(config) if config.num_experts else {}),
    }
    return TransformerConfig(**options)


def _recompute(sizes: MegatronConfig) -> dict[str, Any]:
    if sizes.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if sizes.recompute == "selective" else {}


def _experts(config: ModelConfig) -> dict[str, Any]:
    """No auxiliary loss: the gradient is that of the policy loss alone, as with the torch trainer."""
    return {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        # Softmax of the chosen ones equals the chosen of the softmax, normalised.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": _transformer_engine(),
    }


def _transformer_engine() -> bool:
    """Whether Transformer Engine's layers can be used."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.models.gpt import gpt_layer_specs

    return bool(gpt_layer_specs.HAVE_TE)


def _gpt_model(config: ModelConfig, megatron: Any, groups: MegatronGroups, device: torch.device) -> Any:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    options: dict[str, Any] = {"num_experts": config.num_experts or None, "qk_layernorm": config.qk_norm}
    if _transformer_engine():
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=True, **options)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(moe_grouped_gemm=False, normalization="RMSNorm", **options)
        if groups.cp > 1:
            spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    model = GPTModel(
        config=megatron,
        transformer_layer_spec=spec,
        vocab_size=megatron_layout.padded_vocabulary(config, groups.tp),
        max_sequence_length=config.max_position_embeddings,
        pre_process=groups.first_stage,
        post_process=groups.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
    )
    _mark_shared_out(model)
    return model.to(device=device, dtype=megatron.params_dtype)  # Megatron's torch norms are always float32


def _mark_shared_out(model: nn.Module) -> None:
    """Tell which parameters are pieces: the gradient's norm counts these on every rank, the others once.

    Megatron says so itself only where it draws the weights, which is left out here.
    """
    from megatron.core import tensor_parallel

    cut = ((tensor_parallel.ColumnParallelLinear, 0), (tensor_parallel.VocabParallelEmbedding, 0))
    for kind, dimension in (*cut, (tensor_parallel.RowParallelLinear, 1)):
        for module in (module for module in model.modules() if isinstance(module, kind)):
            pieces = [module.weight, module.bias if dimension == 0 and hasattr(module, "bias") else None]
            for parameter in (piece for piece in pieces if piece is not None):
                parameter.tensor_model_parallel = True
                parameter.partition_dim = dimension
                parameter.partition_stride = 1
