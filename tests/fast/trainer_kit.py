"""Small models, samples and trainers for the trainer tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hybridsched.config.schema import RunConfig
from hybridsched.model import FinishReason, Response, Sample, VersionRun, WeightVersion
from hybridsched.models import hf_folder
from hybridsched.models.qwen3 import ModelConfig, seeded_init
from hybridsched.trainers.base import TrainBatch, TrainerGroup
from hybridsched.trainers.torch_trainer import TorchTrainer

V0 = WeightVersion(0, 0)
TINY = ModelConfig(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
)


def write_model(folder: Path, config: ModelConfig = TINY) -> Path:
    hf_folder.save_hf(seeded_init(config, seed=3, std=0.3), folder)
    return folder


def response(
    tokens: list[int],
    reward: float | None = 1.0,
    logprob: float = -2.5,
    version: WeightVersion = V0,
    mask: list[int] | None = None,
) -> Response:
    return Response(
        np.array(tokens, np.int32),
        np.full(len(tokens), logprob, np.float32),
        (VersionRun(version, 0, len(tokens)),),
        FinishReason.STOP,
        None if mask is None else np.array(mask, np.uint8),
        reward,
        None if reward is not None else "reward function raised",
    )


def sample(uid: int, responses: list[Response], prompt: tuple[int, ...] = (1, 2, 3)) -> Sample:
    return Sample(uid, f"p{uid}", np.array(prompt, np.int32), tuple(responses))


def random_samples(count: int, seed: int = 0, n: int = 3, version: WeightVersion = V0) -> tuple[Sample, ...]:
    rng = np.random.default_rng(seed)
    out = []
    for uid in range(count):
        responses = [
            response(
                rng.integers(0, 13, int(rng.integers(2, 12))).tolist(),
                reward=float(rng.random()),
                logprob=-2.5 + 0.3 * float(rng.standard_normal()),
                version=version,
            )
            for _ in range(n)
        ]
        out.append(sample(uid, responses, tuple(rng.integers(0, 13, int(rng.integers(1, 5))).tolist())))
    return tuple(out)


def run_config(model: Path, actor: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    actor = {"optim": {"lr": 1e-2}, **(actor or {})}
    rollout = sections.pop("actor_rollout", {})
    return RunConfig.model_validate(
        {"actor_rollout_ref": {"model": {"path": str(model)}, "actor": actor, "rollout": rollout}, **sections}
    )


def started(config: RunConfig, scratch: Path) -> TorchTrainer:
    trainer = TorchTrainer(config, scratch=scratch, log=lambda text: None)
    trainer.start(TrainerGroup(0, 1, "", 20.0))
    trainer.begin_cycle(V0)
    return trainer


def batch(*mini_batches: tuple[Sample, ...], version: WeightVersion = V0) -> TrainBatch:
    return TrainBatch(tuple(mini_batches), version, 0)


def weights_of(trainer: TorchTrainer) -> dict[str, np.ndarray]:
    return {name: tensor.clone().numpy() for name, tensor in trainer.iter_weights()}
