"""How Hugging Face tensors lie inside Megatron Core's: one table, read in both directions. Torch, but no Megatron.

Owns: which Hugging Face tensors make up which Megatron parameter (`entries`, in the one order in which weights are
loaded, gathered and sent), how they are fused and split (`fuse`, `split`), and which piece tensor-, pipeline- and
expert-parallel ranks hold (`shard`, `unshard`, `stage_of`, `expert_place`).

Invariants: `split` inverts `fuse` and `unshard` inverts `shard`, bit for bit; every tensor of
`models.config.weight_shapes` belongs to exactly one entry; a tied head has no entry (the last pipeline stage holds a
copy of the embedding).

Does not: move anything between ranks (trainers/megatron_weights.py), or touch files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridsched.models.config import ModelConfig

Kind = Literal["copy", "qkv", "gate_up", "vocabulary"]
Split = Literal["none", "rows", "columns"]  #: what tensor-parallel ranks share out


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table. ``megatron``: possible names, of which a model has one (local or Transformer Engine)."""

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    kind: Kind
    split: Split


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter of the whole model. ``layer``, ``expert``: global numbers, None outside layers, experts.

    ``names``: possible names with ``{layer}`` and ``{expert}`` to be filled with the numbers local to the rank.
    """

    names: tuple[str, ...]
    hf: tuple[str, ...]
    kind: Kind
    split: Split
    layer: int | None = None
    expert: int | None = None
    last_stage: bool = False  #: final norm and head live on the last pipeline stage


_INPUT_NORM = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
_MLP_NORM = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
_ATTENTION = (
    Rule(_INPUT_NORM, ("input_layernorm.weight",), "copy", "none"),
    Rule(("self_attention.linear_qkv.weight",), tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv", "rows"),
    Rule(("self_attention.linear_qkv.bias",), tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv", "rows"),
    Rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",), "copy", "none"),
    Rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",), "copy", "none"),
    Rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), "copy", "columns"),
)
_POST_NORM = Rule(_MLP_NORM, ("post_attention_layernorm.weight",), "copy", "none")
_DENSE = (
    Rule(("mlp.linear_fc1.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up", "rows"),
    Rule(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), "copy", "columns"),
)
_ROUTER = Rule(("mlp.router.weight",), ("mlp.gate.weight",), "copy", "none")
_EXPERT = (
    Rule(
        ("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
        ("gate_proj.weight", "up_proj.weight"),
        "gate_up",
        "rows",
    ),
    Rule(
        ("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
        ("down_proj.weight",),
        "copy",
        "columns",
    ),
)
_QK_NORM = frozenset(("self_attn.q_norm.weight", "self_attn.k_norm.weight"))


def layer_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """The table of one layer of this family (without experts): Qwen3 has norms of q and k, Qwen2 biases of q, k, v."""
    rules = []
    for rule in _ATTENTION:
        if rule.hf[0].endswith(".bias") and not config.attention_bias:
            continue
        if rule.hf[0] in _QK_NORM and not config.qk_norm:
            continue
        rules.append(rule)
    return (*rules, _POST_NORM, *((_ROUTER,) if config.num_experts else _DENSE))


def entries(config: ModelConfig) -> Iterator[Entry]:
    """Every Megatron parameter of the model, embedding first, head last, layer by layer."""
    yield Entry(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), "vocabulary", "rows")
    for layer in range(config.num_hidden_layers):
        prefix, hf = "decoder.layers.{layer}.", f"model.layers.{layer}."
        for rule in layer_rules(config):
            yield _entry(rule, prefix, hf, layer, None)
        for expert in range(config.num_experts):
            for rule in _EXPERT:
                yield _entry(rule, prefix, f"{hf}mlp.experts.{expert}.", layer, expert)
    yield Entry(("decoder.final_layernorm.weight",), ("model.norm.weight",), "copy", "none", last_stage=True)
    if not config.tie_word_embeddings:
        yield Entry(("output_layer.weight",), ("lm_head.weight",), "vocabulary", "rows", last_stage=True)


def _entry(rule: Rule, prefix: str, hf: str, layer: int, expert: int | None) -> Entry:
    names, parts = tuple(prefix + name for name in rule.megatron), tuple(hf + name for name in rule.hf)
    return Entry(names, parts, rule.kind, rule.split, layer, expert)


def hf_names(config: ModelConfig) -> list[str]:
    """Hugging Face names in the order of `entries`: the order in which weights are sent and stored."""
    return [name for entry in entries(config) for name in entry.hf]


# -- one parameter, whole ---------------------------------------------------------------------------------------------


def padded_vocabulary(config: ModelConfig, tp: int) -> int:
    """Rows of the embedding: the vocabulary, filled up to a multiple of the tensor-parallel size."""
    return -(-config.vocab_size // tp) * tp


def fuse(entry: Entry, tensors: Sequence[Tensor], config: ModelConfig, tp: int) -> Tensor:
    """The Megatron parameter, whole, from its Hugging Face tensors (in the order of ``entry.hf``)."""
    if entry.kind == "qkv":
        groups = config.num_key_value_heads
        parts = [t.reshape(groups, t.shape[0] // groups, *t.shape[1:]) for t in tensors]
        return torch.cat(parts, dim=1).reshape(-1, *tensors[0].shape[1:])
    if entry.kind == "gate_up":
        return torch.cat(list(tensors), dim=0)
    if entry.kind == "vocabulary":
        missing = padded_vocabulary(config, tp) - tensors[0].shape[0]
        return torch.nn.functional.pad(tensors[0], (0, 0, 0, missing)) if missing else tensors[0]
    return tensors[0]


def split(entry: Entry, whole: Tensor, config: ModelConfig) -> list[Tensor]:
    """The Hugging Face tensors (contiguous) of a whole Megatron parameter. Inverse of `fuse`."""
    if entry.kind == "qkv":
        groups, size = config.num_key_value_heads, config.head_dim
        heads = config.num_attention_heads // groups
        blocks = whole.reshape(groups, heads + 2, size, *whole.shape[1:])
        parts = (blocks[:, :heads], blocks[:, heads], blocks[:, heads + 1])
        return [part.reshape(-1, *whole.shape[1:]).contiguous() for part in parts]
    if entry.kind == "gate_up":
        return [part.contiguous() for part in whole.chunk(2, dim=0)]
    if entry.kind == "vocabulary":
        return [whole[: config.vocab_size].contiguous()]
    return [whole.contiguous()]


def whole_shape(entry: Entry, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], tp: int) -> tuple[int, ...]:
    """Shape of the whole Megatron parameter (with the vocabulary's padding). ``shapes``: weight_shapes(config)."""
    first = shapes[entry.hf[0]]
    if entry.kind == "vocabulary":
        return (padded_vocabulary(config, tp), *first[1:])
    return (sum(shapes[name][0] for name in entry.hf), *first[1:])


# -- pieces of ranks --------------------------------------------------------------------------------------------------


def shard(entry: Entry, whole: Tensor, rank: int, size: int) -> Tensor:
    """What tensor-parallel rank ``rank`` of ``size`` holds. A fused gate and up are shared out separately."""
    if entry.split == "none" or size == 1:
        return whole
    if entry.kind == "gate_up":
        return torch.cat([half.chunk(size, dim=0)[rank] for half in whole.chunk(2, dim=0)], dim=0)
    return whole.chunk(size, dim=0 if entry.split == "rows" else 1)[rank].contiguous()


def unshard(entry: Entry, pieces: Sequence[Tensor]) -> Tensor:
    """The whole parameter from the pieces of all tensor-parallel ranks, in their order. Inverse of `shard`."""
    if entry.split == "none" or len(pieces) == 1:
        return pieces[0]
    if entry.kind == "gate_up":
        halves = [piece.chunk(2, dim=0) for piece in pieces]
        return torch.cat([half[side] for side in (0, 1) for half in halves], dim=0)
    return torch.cat(list(pieces), dim=0 if entry.split == "rows" else 1)


def stage_of(entry: Entry, config: ModelConfig, stages: int) -> int:
    """The pipeline stage that holds the parameter; layers are shared out evenly."""
    if entry.layer is not None:
        return entry.layer // (config.num_hidden_layers // stages)
    return stages - 1 if entry.last_stage else 0


def expert_place(entry: Entry, config: ModelConfig, ranks: int) -> tuple[int, int]:
    """(expert-parallel rank, number there) of an expert's parameter."""
    assert entry.expert is not None
    return divmod(entry.expert, config.num_experts // ranks)


def local_name(entry: Entry, config: ModelConfig, stages: int, expert_ranks: int, present: frozenset[str]) -> str:
    """The parameter's name on the rank that holds it; ``present``: the names the model there has.

    Raises KeyError when it has none of the possible ones.
    """
    layer = None if entry.layer is None else entry.layer % (config.num_hidden_layers // stages)
    expert = None if entry.expert is None else expert_place(entry, config, expert_ranks)[1]
    names = [name.format(layer=layer, expert=expert) for name in entry.names]
    for name in names:
        if name in present:
            return name
    raise KeyError(" or ".join(names))
