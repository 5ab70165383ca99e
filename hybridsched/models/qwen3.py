"""The dense decoder family (Qwen3, Qwen2, Llama) in plain torch: modules and forward pass.

Owns: `CausalLM` (parameters named exactly as in Hugging Face files, so
that weights travel under one name everywhere), `seeded_init`.

Invariants: the module holds no buffers, so its parameters are its whole state; a tied head has no parameter of its own
(`lm_head.weight` exists only when untied); norms and rotary angles are computed in at least float32.

Does not: read or write files (hf_folder.py), keep a KV cache (engines/torch_batch.py has its own decode path over the
same parameters).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridsched.errors import DataError
from hybridsched.models.config import ModelConfig as ModelConfig  # its other home: whoever computes takes it from here


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, statistics in at least float32; dtype of ``x`` is kept."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)
    return normed if weight is None else normed * weight


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin ``[*positions.shape, head_dim]`` of the rotary angles (computed in float32, cast to ``dtype``)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to ``x [..., head_dim]``; cos and sin broadcast against it."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class RMSNorm(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """Norm with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as ``x``."""
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """Grouped-query causal self-attention with optional norm of queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        width, kv_width, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, config.hidden_size
        self.q_proj = nn.Linear(hidden, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, hidden, bias=config.attention_out_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [B, T, hidden]`` to the same shape; cos and sin ``[B or 1, 1, T, head_dim]``."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        if self.heads != self.kv_heads:
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).reshape(batch, length, -1)))


class MLP(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x [..., hidden]``."""
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class DecoderLayer(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """Pre-norm residual block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Same shape as ``x [B, T, hidden]``."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """Embeddings, layers, last norm: what Hugging Face files call ``model``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """The language model. ``named_parameters()`` yields Hugging Face names in a fixed order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.num_experts:
            raise DataError(
                "a mixture of experts (model_type qwen3_moe) cannot be computed by the torch engine and trainer; use "
                "actor_rollout_ref.actor.strategy: megatron and actor_rollout_ref.rollout.name: vllm"
            )
        self.config = config
        self.model = Decoder(config)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Last hidden state after the final norm: ``[B, T, hidden]`` in the model's dtype.

        tokens: int64 ``[B, T]``; positions: ``[T]`` or ``[B, T]``, default 0..T-1. Attention is causal by index.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        if positions.dim() == 1:
            positions = positions[None]
        x = self.model.embed_tokens(tokens)
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        cos, sin = cos[:, None], sin[:, None]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.model.norm(x))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` of ``hidden [..., hidden]``: float32 (float64 for a float64 model)."""
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        logits = F.linear(hidden, weight)
        return logits if logits.dtype == torch.float64 else logits.float()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits ``[B, T, vocab]``. Right padding is harmless: no position sees a later one."""
        return self.head(self.hidden(tokens, positions))


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype by its name without prefix; DataError for one the models cannot have."""
    known = {t: getattr(torch, t) for t in ("float32", "bfloat16", "float16", "float64")}
    if name not in known:
        raise DataError(f"dtype {name!r} is not one of {', '.join(known)}")
    return cast(torch.dtype, known[name])


def empty_model(config: ModelConfig, dtype: str = "float32", device: str | torch.device = "cpu") -> CausalLM:
    """A model with uninitialised storage (no time is spent on drawing weights that are overwritten)."""
    with torch.device("meta"):
        model = CausalLM(config).to(torch_dtype(dtype))
    return cast(CausalLM, model.to_empty(device=device))


def seeded_init(
    config: ModelConfig, seed: int, dtype: str = "float32", device: str | torch.device = "cpu", std: float = 0.02
) -> CausalLM:
    """A fresh model: matrices normal(0, std), norms one, biases zero; depends on (config, seed, std) only."""
    model = empty_model(config, dtype, device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
    return model
