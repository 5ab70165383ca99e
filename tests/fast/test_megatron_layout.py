"""The table between Hugging Face and Megatron: both directions, every family, every cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybridsched.models import megatron_layout as layout
from hybridsched.models.config import ModelConfig, weight_shapes
from hybridsched.models.model_sizes import size_problems

DENSE = ModelConfig(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    tie_word_embeddings=True,
)
FAMILIES = {
    "qwen3": DENSE,
    "qwen3 untied": replace(DENSE, tie_word_embeddings=False),
    "qwen2": replace(DENSE, qk_norm=False, attention_bias=True),
    "llama": replace(DENSE, qk_norm=False),
    "qwen3_moe": replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4, intermediate_size=1),
}


def drawn(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in weight_shapes(config).items()}


@pytest.fixture(params=FAMILIES)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return FAMILIES[request.param]


def test_every_tensor_belongs_to_exactly_one_parameter(config):
    assert sorted(weight_shapes(config)) == sorted(layout.hf_names(config))


def test_the_order_is_embedding_layers_norm_head(config):
    names = layout.hf_names(config)
    assert "model.embed_tokens.weight" == names[0]
    assert names[-1] == ("model.norm.weight" if config.tie_word_embeddings else "lm_head.weight")
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert sorted(layers) == layers


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fusing_and_splitting_is_exact(config, tp):
    tensors = drawn(config)
    for entry in layout.entries(config):
        parts = [tensors[name] for name in entry.hf]
        whole = layout.fuse(entry, parts, config, tp)
        assert layout.whole_shape(entry, config, weight_shapes(config), tp) == tuple(whole.shape)
        back = layout.split(entry, whole, config)
        assert all(torch.equal(a, b) and b.is_contiguous() for a, b in zip(parts, back, strict=True)), entry.hf


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sharing_out_and_gathering_is_exact(config, tp):
    tensors = drawn(config)
    for entry in layout.entries(config):
        whole = layout.fuse(entry, [tensors[name] for name in entry.hf], config, tp)
        pieces = [layout.shard(entry, whole, rank, tp) for rank in range(tp)]
        assert 1 == len({piece.shape for piece in pieces})
        if entry.split != "none":
            assert whole.numel() == sum(piece.numel() for piece in pieces)
        assert torch.equal(whole, layout.unshard(entry, pieces)), entry.hf


def test_qkv_rows_are_grouped_by_key_value_head():
    config = replace(DENSE, num_attention_heads=4, num_key_value_heads=2, head_dim=2, hidden_size=1)
    entry = next(e for e in layout.entries(config) if e.kind == "qkv")
    q, k, v = (torch.arange(n, dtype=torch.float32)[:, None] + base for n, base in ((8, 0), (4, 100), (4, 200)))
    fused = layout.fuse(entry, [q, k, v], config, 1)[:, 0].tolist()
    assert [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203] == fused
    first = layout.shard(entry, layout.fuse(entry, [q, k, v], config, 2), 0, 2)[:, 0].tolist()
    assert fused[:8] == first


def test_gate_and_up_are_shared_out_separately():
    entry = next(e for e in layout.entries(DENSE) if e.kind == "gate_up")
    whole = torch.arange(24, dtype=torch.float32)[:, None]
    assert [*range(6), *range(12, 18)] == layout.shard(entry, whole, 0, 2)[:, 0].tolist()


def test_an_odd_vocabulary_is_filled_up_and_cut_back():
    entry = next(layout.entries(DENSE))
    rows = torch.randn(13, 8)
    whole = layout.fuse(entry, [rows], DENSE, 4)
    assert (16, 8) == tuple(whole.shape)
    assert 0 == whole[13:].abs().sum()
    assert torch.equal(rows, layout.split(entry, whole, DENSE)[0])


def test_layers_go_to_stages_evenly_and_ends_to_the_ends():
    untied = FAMILIES["qwen3 untied"]
    stages = {entry.hf[0]: layout.stage_of(entry, untied, 2) for entry in layout.entries(untied)}
    assert 0 == stages["model.embed_tokens.weight"]
    assert [0, 0, 1, 1] == [stages[f"model.layers.{n}.input_layernorm.weight"] for n in range(4)]
    assert (1, 1) == (stages["model.norm.weight"], stages["lm_head.weight"])


def test_experts_go_to_ranks_in_order():
    config = FAMILIES["qwen3_moe"]
    places = {e.expert: layout.expert_place(e, config, 2) for e in layout.entries(config) if e.expert is not None}
    assert {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)} == places


def test_names_are_local_to_stage_and_expert_rank_and_of_either_implementation():
    config = FAMILIES["qwen3_moe"]
    entry = next(e for e in layout.entries(config) if e.layer == 3 and e.expert == 3 and e.kind == "gate_up")
    plain = "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"
    grouped = "decoder.layers.1.mlp.experts.linear_fc1.weight1"
    for name in (plain, grouped):
        assert name == layout.local_name(entry, config, 2, 2, frozenset([name, "other"]))
    with pytest.raises(KeyError, match=r"local_experts\.1\.linear_fc1\.weight or .*linear_fc1\.weight1"):
        layout.local_name(entry, config, 2, 2, frozenset(["other"]))


def test_fitting_sizes_have_no_problems(config):
    experts = 2 if config.num_experts else 1
    assert [] == size_problems(config, 1 if config.num_experts else 4, 4, experts)


@pytest.mark.parametrize(
    ("change", "sizes", "found"),
    [
        ({}, (3, 1, 1), "8 attention heads cannot be shared out to TP 3 -> use a divisor of 8"),
        ({}, (8, 1, 1), "4 key-value heads cannot be shared out to TP 8"),
        ({"intermediate_size": 9}, (2, 1, 1), "9 columns of the feed-forward layer"),
        ({}, (1, 3, 1), "4 layers cannot be shared out to PP 3 stages"),
        ({}, (1, 1, 2), "EP 2 needs a mixture of experts"),
        ({"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 4}, (1, 1, 2), "3 experts cannot be"),
        ({"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 4}, (2, 1, 1), "sequence parallelism"),
        ({"qk_norm": False, "attention_bias": True, "attention_out_bias": True}, (1, 1, 1), "use strategy: torch"),
    ],
)
def test_sizes_that_do_not_fit_are_named_with_a_cure(change, sizes, found):
    problems = size_problems(replace(DENSE, **change), *sizes)
    assert any(found in problem and "->" in problem for problem in problems), problems
