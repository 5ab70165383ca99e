"""Weights of the torch engine and the layer loop over them.

Owns: `FusedWeights`: one flat buffer with every parameter, laid out so that q, k, v and gate, up lie side by side (one
matrix product each) while each Hugging Face name is a view into it; `run_layers`, the decoder over flat token rows;
`teacher_force`.

Invariants: there is exactly one copy of the weights; dropping the object frees it at once; a fresh buffer can be filled
with NaN so that a tensor nobody sent cannot pass unseen; `refresh` must follow every change of the named tensors.

Does not: keep a KV cache or know what attention looks at: the caller hands in `attend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridsched.model import LogprobArray, TensorSpec, TokenArray
from hybridsched.models.hf_folder import weight_specs
from hybridsched.models.qwen3 import ModelConfig, empty_model, rms_norm, rope_tables, torch_dtype

_ALIGN = 64  #: elements; keeps every fused tensor on a cache line for any dtype
_HEAD_ROWS = 1024  #: rows of logits computed together when teacher forcing (vocab-wide, so the largest activation)

#: (layer, q [N, heads, hd], k [N, kv_heads, hd], v [N, kv_heads, hd]) -> [N, heads * hd]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Layer:
    """Fused tensors of one decoder layer (views into the flat buffer, but for ``qk_scale``)."""

    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    norm2: Tensor
    gate_up: Tensor
    down: Tensor
    qk_norm: Tensor | None  #: [2, hd], q's scale and k's
    qk_scale: Tensor | None = None  #: [heads + kv_heads, hd], built by refresh()


class FusedWeights:
    """All parameters of one model in one buffer."""

    def __init__(self, config: ModelConfig, dtype: str, device: torch.device, *, fill: float | None = None) -> None:
        """``fill``: value of every element (NaN before an update); None leaves the buffer uninitialised."""
        self.config = config
        self.dtype = torch_dtype(dtype)
        self.device = device
        self.specs: list[TensorSpec] = weight_specs(empty_model(config, dtype, "meta"))
        plan = _plan(config)
        size = sum(-(-rows * max(width, 1) // _ALIGN) * _ALIGN for _, rows, width in plan)
        self.flat = torch.empty(size, dtype=self.dtype, device=device)
        if fill is not None:
            self.flat.fill_(fill)
        self._fused: dict[str, Tensor] = {}
        start = 0
        for name, rows, width in plan:
            count = rows * max(width, 1)
            view = self.flat[start : start + count]
            self._fused[name] = view.view(rows, width) if width else view
            start += -(-count // _ALIGN) * _ALIGN
        self.named = self._named_views()
        self.layers = [self._layer(i) for i in range(config.num_hidden_layers)]
        self.embed, self.norm = self._fused["embed"], self._fused["norm"]
        self.head = self._fused.get("head", self.embed)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return int(self.flat.nbytes)

    def refresh(self) -> None:
        """Rebuild the small derived tensors after the named ones changed."""
        config = self.config
        for layer in self.layers:
            if layer.qk_norm is not None:
                counts = torch.tensor([config.num_attention_heads, config.num_key_value_heads], device=self.device)
                layer.qk_scale = layer.qk_norm.repeat_interleave(counts, dim=0)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [N, hidden]`` before the final norm to logits ``[N, vocab]`` of at least float32."""
        out = F.linear(rms_norm(hidden, self.norm, self.config.rms_norm_eps), self.head)
        return out if out.dtype == torch.float64 else out.float()

    def _layer(self, index: int) -> Layer:
        """The fused views of one layer."""
        get = {key.split(".", 1)[1]: t for key, t in self._fused.items() if key.startswith(f"{index}.")}
        return Layer(
            norm1=get["norm1"],
            qkv=get["qkv"],
            qkv_bias=get.get("qkv_bias"),
            out=get["out"],
            out_bias=get.get("out_bias"),
            norm2=get["norm2"],
            gate_up=get["gate_up"],
            down=get["down"],
            qk_norm=get.get("qk_norm"),
        )

    def _named_views(self) -> dict[str, Tensor]:
        """Hugging Face name -> view, in the order of ``specs``."""
        config = self.config
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        cuts = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
        inter = config.intermediate_size
        cuts |= {"gate_proj": (0, inter), "up_proj": (inter, 2 * inter)}
        out: dict[str, Tensor] = {}
        for spec in self.specs:
            parts = spec.name.split(".")
            if parts[1] != "layers":  # lm_head.weight, model.embed_tokens.weight, model.norm.weight
                out[spec.name] = self._fused[{"embed_tokens": "embed", "norm": "norm"}.get(parts[1], "head")]
                continue
            layer, module, kind = parts[2], parts[-2], parts[-1]
            if module in ("q_norm", "k_norm"):
                out[spec.name] = self._fused[f"{layer}.qk_norm"][("q_norm", "k_norm").index(module)]
            elif module in cuts:
                fused = "gate_up" if module in ("gate_proj", "up_proj") else "qkv"
                low, high = cuts[module]
                out[spec.name] = self._fused[f"{layer}.{fused}{'_bias' if kind == 'bias' else ''}"][low:high]
            else:
                own = {"o_proj": "out", "down_proj": "down", "input_layernorm": "norm1"}.get(module, "norm2")
                out[spec.name] = self._fused[f"{layer}.{own}{'_bias' if kind == 'bias' else ''}"]
        return out


def _plan(config: ModelConfig) -> list[tuple[str, int, int]]:
    """(name, rows, width) of the fused tensors; width 0 marks a vector."""
    hidden, inter, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, qkv = config.num_attention_heads * hd, (config.num_attention_heads + 2 * config.num_key_value_heads) * hd
    plan = [("embed", config.vocab_size, hidden), ("norm", hidden, 0)]
    if not config.tie_word_embeddings:
        plan.append(("head", config.vocab_size, hidden))
    for i in range(config.num_hidden_layers):
        plan += [(f"{i}.norm1", hidden, 0), (f"{i}.qkv", qkv, hidden), (f"{i}.out", hidden, q)]
        plan += [(f"{i}.norm2", hidden, 0), (f"{i}.gate_up", 2 * inter, hidden), (f"{i}.down", hidden, inter)]
        if config.attention_bias:
            plan.append((f"{i}.qkv_bias", qkv, 0))
        if config.attention_out_bias:
            plan.append((f"{i}.out_bias", hidden, 0))
        if config.qk_norm:
            plan.append((f"{i}.qk_norm", 2, hd))
    return plan


class RotaryTable:
    """cos and sin by position, grown on demand; the sign of the rotation is folded into sin."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._cos = self._sin = torch.empty(0, 1, config.head_dim, dtype=dtype, device=device)

    def reserve(self, length: int) -> None:
        """Make positions below ``length`` available."""
        if length <= self._cos.shape[0]:
            return
        positions = torch.arange(1 << (length - 1).bit_length(), device=self._device)
        cos, sin = rope_tables(positions, self._config.head_dim, self._config.rope_theta, self._dtype)
        sin[:, : self._config.head_dim // 2].neg_()
        self._cos, self._sin = cos[:, None], sin[:, None]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin ``[N, 1, head_dim]`` of positions ``[N]``."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def run_layers(weights: FusedWeights, tokens: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
    """The decoder layers over token rows ``[N]`` (int64): hidden ``[N, hidden]`` before the final norm.

    Rows are independent but for ``attend``, which gets rotated q and k and decides what each row sees.
    """
    config = weights.config
    heads, both, hd = (
        config.num_attention_heads,
        config.num_attention_heads + config.num_key_value_heads,
        config.head_dim,
    )
    eps, (cos, sin), half = config.rms_norm_eps, rotary, config.head_dim // 2
    x = weights.embed.index_select(0, tokens)
    for index, w in enumerate(weights.layers):
        qkv = F.linear(rms_norm(x, w.norm1, eps), w.qkv, w.qkv_bias).view(-1, both + config.num_key_value_heads, hd)
        qk = qkv[:, :both]
        if w.qk_scale is not None:
            qk = rms_norm(qk, None, eps) * w.qk_scale
        qk = torch.addcmul(qk * cos, qk.roll(half, -1), sin)
        seen = attend(index, qk[:, :heads], qk[:, heads:], qkv[:, both:])
        x = torch.addmm(x, seen, w.out.t())
        if w.out_bias is not None:
            x = x + w.out_bias
        gate, up = F.linear(rms_norm(x, w.norm2, eps), w.gate_up).chunk(2, dim=-1)
        x = torch.addmm(x, F.silu(gate) * up, w.down.t())
    return x


def causal_attend(batch: int, store: Callable[[int, Tensor, Tensor], None] | None = None) -> Attend:
    """Attention within ``batch`` right-padded sequences whose rows lie one after the other.

    ``store(layer, k, v)`` sees keys and values as ``[batch, T, kv_heads, hd]``.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(0, (batch, -1)) for t in (q, k, v))
        if store is not None:
            store(layer, k, v)
        share = q.shape[2] // k.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if share > 1:
            k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    return attend


@torch.inference_mode()  # type: ignore[untyped-decorator]
def teacher_force(
    weights: FusedWeights, pairs: Sequence[tuple[TokenArray, TokenArray]], temperature: float
) -> list[LogprobArray]:
    """Log-probs float32 ``[T]`` of each response under softmax(logits / temperature), given its prompt.

    The pairs are padded to one batch. Temperature 0 counts as 1, as in sampling.
    """
    lengths = [len(prompt) + len(response) for prompt, response in pairs]
    longest = max(lengths)
    padded = np.zeros((len(pairs), longest), np.int64)
    for row, (prompt, response) in enumerate(pairs):
        padded[row, : lengths[row]] = np.concatenate((prompt, response))
    # Row p - 1 predicts token p; all positions of interest, in one list over the flattened batch.
    wanted = np.concatenate(
        [row * longest + np.arange(len(prompt), lengths[row]) for row, (prompt, _) in enumerate(pairs)]
    )
    table = RotaryTable(weights.config, weights.dtype, weights.device)
    table.reserve(longest)
    tokens = torch.from_numpy(padded.reshape(-1)).to(weights.device)
    rotary = table.at(torch.arange(longest, device=weights.device).repeat(len(pairs)))
    hidden = run_layers(weights, tokens, rotary, causal_attend(len(pairs)))
    index = torch.from_numpy(wanted).to(weights.device)
    parts = [np.empty(0, np.float32)]
    for piece in index.split(_HEAD_ROWS):
        logp = torch.log_softmax(weights.logits(hidden[piece - 1]) / (temperature or 1.0), dim=-1)
        parts.append(logp.gather(1, tokens[piece][:, None])[:, 0].float().cpu().numpy())
    ends = np.cumsum([len(response) for _, response in pairs])
    return [part.astype(np.float32) for part in np.split(np.concatenate(parts), ends[:-1])]
