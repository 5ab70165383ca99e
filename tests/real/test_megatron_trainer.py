"""The Megatron trainer on CPU: every layout computes what transformers and the torch trainer compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_kit import MINIS, VERSION, VOCAB, job_config, require_megatron, run_job, stage, training_samples

from hybridsched.config.schema import RunConfig
from hybridsched.models import hf_folder
from hybridsched.models.qwen3 import ModelConfig, seeded_init
from hybridsched.trainers.base import TrainBatch, TrainerGroup
from hybridsched.trainers.torch_trainer import TorchTrainer

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TIED = ModelConfig(**SIZES, tie_word_embeddings=True)
MODELS = {
    "tied": TIED,
    "untied": replace(TIED, tie_word_embeddings=False),
    "qwen2": replace(TIED, qk_norm=False, attention_bias=True, head_dim=4),
    "llama": replace(TIED, qk_norm=False, tie_word_embeddings=False, rope_theta=5e5, head_dim=4),
}
FIRST = "checkpoint_before_the_first_step"
ALL = [
    "weights_equal_the_folder",
    "whole_vocabulary",
    "probe",
    "offload",
    "give_up_a_walk",
    FIRST,
    "train",
    "checkpoint",
]
LOOK = ["weights_equal_the_folder", "whole_vocabulary", "give_up_a_walk"]
PLAIN = {"use_distributed_optimizer": False}
DENSE = [
    ("one tied", "tied", {}, [*ALL, "refuse_poison", "full_disk", "damaged_shard"]),
    ("one untied", "untied", {}, LOOK),
    (
        "one llama",
        "llama",
        {"use_distributed_optimizer": False, "recompute": "selective"},
        [*LOOK, "train", "checkpoint"],
    ),
    ("one qwen2", "qwen2", {"recompute": "full"}, [*LOOK, "train"]),
    ("tp2 tied", "tied", {"tp": 2}, [*ALL, "refuse_poison", "full_disk"]),
    ("tp2 untied", "untied", {"tp": 2}, [*LOOK, "train", "checkpoint"]),
    ("pp2 tied", "tied", {"pp": 2}, [*ALL, "refuse_poison"]),
    ("pp2 untied", "untied", {"pp": 2, **PLAIN}, [*LOOK, "train"]),
    ("dp2 tied", "tied", {"dp": 2}, [*ALL, "refuse_poison"]),
    ("dp2 qwen2", "qwen2", {"dp": 2, **PLAIN}, [*LOOK, "train"]),
    ("cp2 tied", "tied", {"cp": 2}, [*ALL, "refuse_poison", "damaged_shard"]),
    ("cp2 qwen2", "qwen2", {"cp": 2, "recompute": "full"}, [*LOOK, "train"]),
    ("cp2 tp2 llama", "llama", {"cp": 2, "tp": 2}, [*LOOK, "train"]),
    ("tp2 pp2 tied", "tied", {"tp": 2, "pp": 2}, [*LOOK, "train"]),
    ("dp2 pp2 tied", "tied", {"dp": 2, "pp": 2}, [*LOOK, "train", "checkpoint"]),
    ("tp2 pp2 untied", "untied", {"tp": 2, "pp": 2}, LOOK),
]
EVERYTHING = [(f"{size}2 everything", {size: 2}) for size in ("tp", "pp", "dp", "cp")]
NAMES = [name for name, *_ in DENSE]
TRAINED = [name for name, _, _, checks in DENSE if "train" in checks]
SAVED = [name for name, _, _, checks in DENSE if "checkpoint" in checks]
SAVED += ["one bf16", "tp2 bf16", *(name for name, _ in EVERYTHING)]
POISONED = [name for name, _, _, checks in DENSE if "refuse_poison" in checks]
OFFLOADED = [name for name, _, _, checks in DENSE if "offload" in checks] + [name for name, _ in EVERYTHING]
KIND = {name: kind for name, kind, _, _ in DENSE}
EXPERTS = 4
MIXTURES = ["one moe", "ep2 moe", "pp2 moe"]
#: 11M parameters, 44 MB: what is freed stands out from what a process takes and gives back anyway.
LARGE = replace(MODELS["untied"], hidden_size=512, intermediate_size=1536, num_hidden_layers=4, head_dim=64)
MB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def megatron_is_installed() -> None:
    require_megatron()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small models of every family, norms and biases drawn too."""
    out = {}
    for name, config in MODELS.items():
        model = seeded_init(config, seed=3, std=0.3)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        out[name] = tmp_path_factory.mktemp(name)
        hf_folder.save_hf(model, out[name])
    out["large"] = tmp_path_factory.mktemp("large")
    hf_folder.save_hf(seeded_init(LARGE, seed=3), out["large"])
    out["moe"] = _mixture_of_experts(tmp_path_factory.mktemp("moe"))
    return out


def _mixture_of_experts(folder: Path) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        **SIZES,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        initializer_range=0.3,
        tie_word_embeddings=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answers(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What every rank of every layout said, by layout: three jobs, of one, two and four ranks."""
    folder = tmp_path_factory.mktemp("jobs")
    stages: dict[int, list[dict[str, Any]]] = {}
    for name, kind, sizes, checks in DENSE:
        config = job_config(models[kind], sizes)
        world = config["trainer"]["n_gpus_per_node"]
        stages.setdefault(world, []).append(stage(folder, name, config, checks))
    for name, sizes in EVERYTHING:
        config = everything(job_config(models["untied"], sizes))
        stages[2].append(stage(folder, name, config, ["train", "offload", "checkpoint"]))
    for name, sizes in (("one bf16", {}), ("tp2 bf16", {"tp": 2})):
        config = job_config(models["tied"], sizes, dtype="bfloat16", optim={"lr": 1e-3})
        stages[config["trainer"]["n_gpus_per_node"]].append(stage(folder, name, config, ["train", "checkpoint"]))
    experts = ["weights_equal_the_folder", "whole_vocabulary", "train", "checkpoint"]
    for name, sizes in (("one moe", {}), ("ep2 moe", {"ep": 2, "dp": 2}), ("pp2 moe", {"pp": 2})):
        config = job_config(models["moe"], sizes)
        world = config["trainer"]["n_gpus_per_node"]
        stages[world].append(stage(folder, name, config, experts))
    for name, sizes in (("one large", {}), ("tp2 large", {"tp": 2})):
        config = job_config(models["large"], sizes)
        stages[config["trainer"]["n_gpus_per_node"]].append(stage(folder, name, config, ["memory"]))
    for name, kind, sizes, source in RESUMED:
        config = job_config(models[kind], sizes)
        extra = {"checkpoint": str(folder / source / "checkpoint")}
        stages[config["trainer"]["n_gpus_per_node"]].append(stage(folder, name, config, ["resume"], **extra))
    for name, kind, sizes, source in NOT_RESUMED:
        extra = {"checkpoint": str(folder / source / "checkpoint")}
        stages[1].append(stage(folder, name, job_config(models[kind], sizes), ["resume_refused"], **extra))
    out: dict[str, list[dict[str, Any]]] = {}
    for world in (2, 1, 4):  # two before one: ranks resume from the checkpoints of two
        ranks = run_job(folder / f"world{world}", stages[world])
        for name in ranks[0]:
            out[name] = [rank[name] for rank in ranks]
    return out


def everything(config: dict[str, Any]) -> dict[str, Any]:
    """A loss with all of its terms: reference model, entropy, decoupled correction with its snapshot, two epochs."""
    actor = config["actor_rollout_ref"]["actor"]
    actor |= {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01, "ppo_epochs": 2}
    actor |= {"loss_agg_mode": "seq-mean-token-mean", "ppo_max_token_len_per_gpu": 40}
    config["actor_rollout_ref"]["rollout"] = {"temperature": 0.8}
    config["algorithm"]["rollout_correction"] = {"bypass_mode": False, "rollout_is": "token", "rollout_rs": "token"}
    return config


#: (stage, model, sizes, stage whose checkpoint it resumes from)
RESUMED: list[tuple[str, str, dict[str, Any], str]] = [
    ("pp2 from tp2", "untied", {"pp": 2}, "tp2 untied"),
    ("tp2 from pp2", "tied", {"tp": 2}, "pp2 tied"),
    ("dp2 from tp2", "tied", {"dp": 2}, "tp2 tied"),
    ("one from dp2", "tied", {}, "dp2 tied"),
]
NOT_RESUMED: list[tuple[str, str, dict[str, Any], str]] = [
    ("one from ep2", "moe", {}, "ep2 moe"),
    ("plain from dp2", "tied", PLAIN, "dp2 tied"),
    ("one from a torch checkpoint", "tied", {}, "nowhere"),
]


def _reference_logprobs(folder: Path) -> np.ndarray:
    """transformers: log-probs of the whole vocabulary after every prefix, [L, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = np.random.default_rng(5).integers(0, VOCAB, 12)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0].float()
    return torch.log_softmax(logits, dim=-1).numpy()


@pytest.fixture(scope="module")
def torch_training(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same three collections with the torch trainer, by model."""
    configs = {kind: job_config(models[kind], {}) for kind in MODELS}
    configs["everything"] = everything(job_config(models["untied"], {}))
    configs["bf16"] = job_config(models["tied"], {}, dtype="bfloat16", optim={"lr": 1e-3})
    out = {}
    for kind, config in configs.items():
        config["actor_rollout_ref"]["actor"]["strategy"] = "torch"
        scratch = tmp_path_factory.mktemp("scratch")
        trainer = TorchTrainer(RunConfig.model_validate(config), scratch=scratch, log=lambda text: None)
        trainer.start(TrainerGroup(0, 1, "", 20.0))
        trainer.begin_cycle(VERSION)
        metrics = []
        for step in range(3):
            minis = tuple(tuple(training_samples(step, number)) for number in range(MINIS))
            metrics.append(trainer.train(TrainBatch(minis, VERSION, step)).metrics)
        weights = {name: tensor.clone().float().numpy() for name, tensor in trainer.iter_weights()}
        out[kind] = {"metrics": metrics, "weights": weights}
        trainer.shutdown()
    return out


def require_close(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """Equal to 5e-5, but for a few values in a thousand: Adam turns a gradient of nearly nothing into a whole step."""
    assert set(expected) == set(found)
    apart = np.concatenate([np.abs(value - found[name]).ravel() for name, value in expected.items()])
    assert np.mean(apart > 5e-5) < 3e-3
    assert apart.max() < 2e-2


@pytest.mark.parametrize("name", [*NAMES, *MIXTURES])
def test_weights_go_in_and_come_out_bit_for_bit(answers, name):
    for rank in answers[name]:
        found = rank["weights_equal_the_folder"]
        assert found["names"]
        assert [] == found["different"] == found["missing"]
        assert found["as_promised"]


@pytest.mark.parametrize("name", [*NAMES, *MIXTURES])
def test_every_rank_computes_the_distributions_of_transformers(answers, models, name):
    expected = _reference_logprobs(models[KIND.get(name, "moe")])
    for rank in answers[name]:
        assert np.abs(expected - rank["whole_vocabulary"]).max() < 1e-4


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_that_of_the_torch_trainer(answers, torch_training, name):
    expected = torch_training[KIND[name]]
    for rank in answers[name]:
        for ours, theirs in zip(rank["train"]["metrics"], expected["metrics"], strict=True):
            assert set(theirs) == set(ours)
            assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-5)
            for key in ("actor/loss", "actor/pg_loss", "actor/entropy"):
                assert abs(theirs[key] - ours[key]) < 1e-5, key
        require_close(expected["weights"], rank["train"]["weights"])


@pytest.mark.parametrize("name", [name for name, _ in EVERYTHING])
def test_reference_entropy_correction_and_epochs_are_those_of_the_torch_trainer(answers, torch_training, name):
    expected = torch_training["everything"]
    assert expected["metrics"][0]["actor/kl_loss"] > 0
    assert expected["metrics"][0]["rollout_corr/rejected_fraction"] > 0
    for rank in answers[name]:
        for ours, theirs in zip(rank["train"]["metrics"], expected["metrics"], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-3, abs=2e-5)
        require_close(expected["weights"], rank["train"]["weights"])


@pytest.mark.parametrize("name", ["one bf16", "tp2 bf16"])
def test_half_precision_training_is_close_to_the_torch_trainers(answers, torch_training, name):
    expected = torch_training["bf16"]
    for rank in answers[name]:
        for ours, theirs in zip(rank["train"]["metrics"], expected["metrics"], strict=True):
            assert theirs["actor/loss"] == pytest.approx(ours["actor/loss"], abs=2e-2)
            assert theirs["actor/grad_norm"] == pytest.approx(ours["actor/grad_norm"], rel=0.1)
        for key, value in expected["weights"].items():
            assert np.allclose(value, rank["train"]["weights"][key], rtol=0.02, atol=1e-2), key


def test_sharing_experts_out_changes_nothing(answers):
    one = answers["one moe"][0]["train"]
    for name in MIXTURES[1:]:
        for rank in answers[name]:
            for ours, theirs in zip(rank["train"]["metrics"], one["metrics"], strict=True):
                assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-5)
            require_close(one["weights"], rank["train"]["weights"])


@pytest.mark.parametrize("name", TRAINED)
def test_all_ranks_hold_the_same_model_after_training(answers, name):
    first = answers[name][0]["train"]["weights"]
    for rank in answers[name][1:]:
        assert all(np.array_equal(first[key], rank["train"]["weights"][key]) for key in first)


def test_progress_grows_with_micro_batches(answers):
    assert answers["pp2 tied"][1]["train"]["progress"] > 3 * MINIS


@pytest.mark.parametrize("name", NAMES)
def test_a_walk_given_up_leaves_the_next_one_whole(answers, name):
    assert all(rank["give_up_a_walk"] for rank in answers[name])


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloading_frees_state_then_parameters_and_brings_the_same_bits_back(answers, name):
    for rank in answers[name]:
        found = rank["offload"]
        assert min(found["freed"]) > 0
        assert [True, True] == found["same"]
        assert "parameters are offloaded" in found["refused"]


@pytest.mark.parametrize("name", ["one large", "tp2 large"])
def test_offloaded_memory_is_really_given_back_to_the_system(answers, name):
    for rank in answers[name]:
        found = rank["memory"]
        state, parameters = found["freed_state"], found["freed_parameters"]
        assert min(state, parameters) > 20 * MB
        assert state > 2.9 * parameters  # gradients and two moments
        assert found["trained"] - found["without_state"] > 0.8 * state
        assert found["without_state"] - found["without_parameters"] > 0.8 * parameters
        assert found["back"] - found["without_parameters"] == pytest.approx(state + parameters, rel=0.2)


@pytest.mark.parametrize("name", ["one large", "tp2 large"])
def test_handing_out_and_writing_weights_needs_a_few_tensors_and_no_second_model(answers, name):
    for rank in answers[name]:
        found = rank["memory"]
        bound = 6 * found["largest"] + 4 * MB
        assert bound < 0.6 * len(answers[name]) * found["freed_parameters"]
        assert found["peak_of_handing_out"] < bound
        assert found["growth_by_walks"] < bound


@pytest.mark.parametrize("name", [*SAVED, *MIXTURES])
def test_a_checkpoint_brings_everything_back_bit_for_bit(answers, name):
    for rank in answers[name]:
        found = rank["checkpoint"]
        assert found["moved"]
        assert found["restored"]
        assert found["repeated"]
        first, second = found["metrics"]
        assert first == second


@pytest.mark.parametrize("name", [name for name, _, _, checks in DENSE if FIRST in checks])
def test_a_run_can_go_back_to_before_its_first_step(answers, name):
    assert all(rank[FIRST] for rank in answers[name])


@pytest.mark.parametrize("name", [*SAVED, *MIXTURES])
def test_a_checkpoint_holds_the_model_as_a_hugging_face_folder(answers, name):
    assert answers[name][0]["checkpoint"]["exported"]


@pytest.mark.parametrize(("name", "source"), [(name, source) for name, _, _, source in RESUMED])
def test_a_checkpoint_resumes_under_other_sizes(answers, name, source):
    written = answers[source][0]["checkpoint"]
    for rank in answers[name]:
        found = rank["resume"]
        assert all(np.array_equal(value, found["restored"][key]) for key, value in written["saved"].items())
        # The optimizer state came along: the next step is the one the writer took.
        assert written["metrics"][0] == pytest.approx(found["metrics"], rel=1e-4, abs=1e-5)
        require_close(written["moved_weights"], found["moved_weights"])


@pytest.mark.parametrize("name", ["one tied", "tp2 tied"])
def test_a_full_disk_fails_the_checkpoint_on_every_rank_and_harms_nothing(answers, name):
    for rank in answers[name]:
        assert "cannot be written" in rank["full_disk"]["said"]
        assert "free space" in rank["full_disk"]["said"]
        assert rank["full_disk"]["works_again"]


@pytest.mark.parametrize("name", ["one tied", "cp2 tied"])
def test_a_damaged_checkpoint_is_named_on_every_rank_with_the_cure(answers, name):
    for rank in answers[name]:
        assert "megatron cannot be read" in rank["damaged_shard"]
        assert "resume from an older checkpoint" in rank["damaged_shard"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("one from ep2", "expert_model_parallel_size was 2"),
        ("plain from dp2", "use_distributed_optimizer was true"),
        ("one from a torch checkpoint", "no checkpoint of the Megatron trainer"),
    ],
)
def test_a_checkpoint_that_cannot_be_taken_over_is_refused_with_its_reason(answers, name, says):
    assert says in answers[name][0]["resume_refused"]


@pytest.mark.parametrize("name", POISONED)
def test_a_non_finite_loss_is_refused_on_every_rank_naming_the_sample(answers, name):
    for rank in answers[name]:
        found = rank["refuse_poison"]
        assert "was not taken" in found["error"]
        assert "1102" in found["error"]
        assert found["unchanged"]


def test_a_dead_peer_is_noticed_within_the_groups_bound(models, tmp_path):
    config = job_config(models["tied"], {"tp": 2})
    ranks = run_job(tmp_path, [stage(tmp_path, "tp2", config, ["lose_a_peer"], group_s=15.0)], dies=1)
    assert "another trainer process probably died" in ranks[0]["tp2"]["lose_a_peer"]
