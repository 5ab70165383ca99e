"""The dense decoder and its folder format, held against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hybridsched.errors import DataError, InternalError
from hybridsched.model import TensorSpec
from hybridsched.models.config import weight_shapes
from hybridsched.models.folder_check import check_model
from hybridsched.models.hf_folder import (
    TensorReader,
    load_config,
    load_hf,
    named_weights,
    save_hf,
    save_weights,
    weight_specs,
)
from hybridsched.models.qwen3 import CausalLM, ModelConfig, seeded_init

TINY = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=5000.0,
    tie_word_embeddings=True,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_ids=(2,),
    pad_token_id=0,
)
QWEN2 = {"qk_norm": False, "attention_bias": True, "head_dim": 8, "tie_word_embeddings": False}
LLAMA = {"qk_norm": False, "tie_word_embeddings": False}
FAMILIES = {
    "qwen3-tied": {},
    "qwen3-untied": {"tie_word_embeddings": False},
    "qwen3-bias": {"attention_bias": True, "attention_out_bias": True},
    "qwen2": QWEN2,
    "llama": LLAMA,
}


def tiny(**changes: object) -> ModelConfig:
    return ModelConfig(**{**{f: getattr(TINY, f) for f in TINY.__slots__}, **changes})


def noisy(config: ModelConfig, seed: int = 0) -> CausalLM:
    """A model in which every parameter matters: biases and norms are not at their trivial start."""
    model = seeded_init(config, seed, std=0.2)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(batch: int = 3, length: int = 17) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_here_and_loaded_by_transformers_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    ours = noisy(tiny(**FAMILIES[family]))
    save_hf(ours, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-4)
    assert theirs.config.model_type == family.split("-")[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_by_transformers_and_loaded_here_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    save_hf(noisy(tiny(**FAMILIES[family])), tmp_path / "a")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    assert (tmp_path / "b" / "model.safetensors.index.json").is_file()
    ours = load_hf(tmp_path / "b")
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=0, atol=1e-4)


def test_round_trip_through_a_folder_keeps_config_and_every_bit(tmp_path: Path) -> None:
    model = noisy(TINY)
    save_hf(model, tmp_path)
    again = load_hf(tmp_path)
    assert again.config == TINY
    assert {n: t.tolist() for n, t in named_weights(again)} == {n: t.tolist() for n, t in named_weights(model)}


@pytest.mark.parametrize("family", FAMILIES)
def test_config_survives_its_hugging_face_form(family: str) -> None:
    config = tiny(**FAMILIES[family], eos_token_ids=(2, 3))
    assert config == ModelConfig.from_hf(config.to_hf())


def test_right_padding_changes_nothing_before_it() -> None:
    model, ids = noisy(TINY), tokens(1, 12)
    padded = torch.cat((ids, torch.zeros(1, 5, dtype=torch.int64)), dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(padded)[:, :12], model(ids), rtol=0, atol=1e-5)


def test_explicit_positions_shift_the_rotary_angles_only_relatively() -> None:
    model, ids = noisy(TINY), tokens(1, 12)
    with torch.no_grad():
        shifted = model(ids, torch.arange(20, 32))
        torch.testing.assert_close(shifted, model(ids), rtol=0, atol=1e-3)
        assert not torch.allclose(model(ids, torch.arange(0, 24, 2)), model(ids), atol=1e-3)


def test_seeded_init_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = seeded_init(TINY, 5)
    torch.manual_seed(2)
    same, other = seeded_init(TINY, 5), seeded_init(TINY, 6)
    weights = [m.model.layers[0].mlp.up_proj.weight for m in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_specs_use_hugging_face_names_and_a_tied_head_has_none() -> None:
    specs = weight_specs(seeded_init(TINY, 0, dtype="bfloat16"))
    assert specs[0] == TensorSpec("model.embed_tokens.weight", (64, 32), "bfloat16")
    names = {s.name for s in specs}
    assert "model.layers.1.self_attn.k_norm.weight" in names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in {s.name for s in weight_specs(seeded_init(tiny(tie_word_embeddings=False), 0))}


def test_float64_model_keeps_float64_logits_and_bfloat16_gives_float32() -> None:
    dtypes = {d: seeded_init(TINY, 0, dtype=d)(tokens(1, 3)).dtype for d in ("float64", "bfloat16")}
    assert dtypes == {"float64": torch.float64, "bfloat16": torch.float32}


def test_transformers_5_rope_parameters_are_read() -> None:
    raw = TINY.to_hf()
    del raw["rope_theta"]
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 123.0}
    assert ModelConfig.from_hf(raw).rope_theta == 123.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mixtral"}, "qwen3, qwen2, llama"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"use_sliding_window": True}, "sliding"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"vocab_size": "many"}, "wrong type"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(change: dict[str, object], says: str) -> None:
    with pytest.raises(DataError, match=says):
        ModelConfig.from_hf({**TINY.to_hf(), **change})


def test_extra_files_are_copied_along(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tokenizer.json").write_text("{}")
    save_hf(seeded_init(TINY, 0), tmp_path / "out", extra_files_from=tmp_path / "src")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def damage(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if how == "no config":
        config.unlink()
    elif how == "bad json":
        config.write_text("{")
    elif how == "no weights":
        weights.unlink()
    elif how == "torn weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "wrong shape":
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 65}))
    elif how == "missing tensor":
        config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))
    elif how == "extra tensor":
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 1}))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no config", "config.json.*missing"),
        ("bad json", "config.json.*JSON"),
        ("no weights", "neither model.safetensors"),
        ("torn weights", "model.safetensors.*damaged"),
        ("wrong shape", "shape"),
        ("missing tensor", "lm_head.weight"),
        ("extra tensor", "model.layers.1.*does not belong"),
    ],
)
def test_a_damaged_folder_is_refused_naming_file_and_cure(how: str, says: str, tmp_path: Path) -> None:
    save_hf(seeded_init(TINY, 0), tmp_path)
    damage(tmp_path, how)
    with pytest.raises(DataError, match=says):
        load_hf(tmp_path)


def test_a_missing_folder_and_a_missing_shard_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such model folder"):
        load_config(tmp_path / "nowhere")
    save_hf(seeded_init(TINY, 0), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(DataError, match=r"gone.safetensors.*missing"):
        load_hf(tmp_path)


# -- mixtures of experts ----------------------------------------------------------------------------------------------

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "tie_word_embeddings": False}


def test_a_mixture_of_experts_is_described_as_transformers_describes_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(vocab_size=64, num_hidden_layers=2, **sizes, **MOE)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    ours = check_model(tmp_path)
    assert ("qwen3_moe", 4, 2, 8) == (
        ours.model_type,
        ours.num_experts,
        ours.num_experts_per_tok,
        ours.moe_intermediate_size,
    )
    back = transformers.Qwen3MoeConfig(**ours.to_hf())
    assert (4, 2, 8, ours.norm_topk_prob) == (
        back.num_experts,
        back.num_experts_per_tok,
        back.moe_intermediate_size,
        back.norm_topk_prob,
    )
    assert ours == ModelConfig.from_hf(ours.to_hf())


def test_torch_refuses_a_mixture_of_experts_and_says_what_can(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"qwen3_moe.*strategy: megatron.*rollout\.name: vllm"):
        CausalLM(tiny(**MOE))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, it must be between 1 and num_experts"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"mlp_only_layers": [1]}, "dense layers between mixtures of experts"),
        ({"decoder_sparse_step": 2}, "dense layers between mixtures of experts"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_by_name(change: dict[str, object], says: str) -> None:
    with pytest.raises(DataError, match=says):
        ModelConfig.from_hf({**tiny(**MOE).to_hf(), **change})


# -- tensor by tensor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_written_as_they_come_are_an_ordinary_safetensors_file(dtype: str, tmp_path: Path) -> None:
    model = noisy(TINY).to(getattr(torch, dtype))
    alive = 0

    def one_by_one():
        nonlocal alive
        for name, tensor in named_weights(model):
            alive += 1
            yield name, tensor.clone()

    save_weights(TINY, weight_specs(model), one_by_one(), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert alive == len(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in named_weights(model))


def test_tensors_out_of_order_are_not_written(tmp_path: Path) -> None:
    model = noisy(TINY)
    with pytest.raises(InternalError, match=r"came where \('model\.embed_tokens\.weight', .* was due"):
        save_weights(TINY, weight_specs(model), reversed(list(named_weights(model))), tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_tensors_are_read_one_by_one(tmp_path: Path) -> None:
    model = noisy(TINY)
    save_hf(model, tmp_path)
    with TensorReader(tmp_path, weight_shapes(TINY)) as reader:
        assert all(torch.equal(tensor, reader.read(name)) for name, tensor in named_weights(model))


def test_a_folder_that_lacks_a_tensor_or_has_another_shape_is_refused(tmp_path: Path) -> None:
    save_hf(noisy(TINY), tmp_path)
    shapes = weight_shapes(TINY)
    with pytest.raises(DataError, match=r"lm_head\.weight not in its safetensors files"):
        TensorReader(tmp_path, {**shapes, "lm_head.weight": (64, 32)}).__enter__()
    wider = {**shapes, "model.norm.weight": (33,)}
    with TensorReader(tmp_path, wider) as reader, pytest.raises(DataError, match=r"shape \(32,\), config.json says"):
        reader.read("model.norm.weight")
