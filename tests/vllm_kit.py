"""Small models and engines for the vLLM tests; skips where vLLM is not installed, except in CI.

vLLM is imported once per test session; each engine is then forked from it in about two seconds.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridsched.engines.base import GroupRequest
from hybridsched.engines.vllm_engine import VllmEngine
from hybridsched.engines.vllm_options import VllmOptions
from hybridsched.model import Response, SamplingParams, WeightVersion
from hybridsched.models.hf_folder import named_weights, weight_specs
from hybridsched.models.qwen3 import CausalLM, ModelConfig

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    tie_word_embeddings=True,
    max_position_embeddings=256,
)
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)
EMPTY = Response.empty()
HANGS_S = 120.0  # a bound that only a hang reaches
OPTIONS = VllmOptions("float32", max_num_seqs=16, kv_cache_tokens=16 * 200, max_tokens=200)


def need_vllm() -> None:
    """Skip the test, with what to install; in CI it has to run."""
    if importlib.util.find_spec("vllm") is None and not os.environ.get("CI"):
        pytest.skip("vLLM is not installed: make venv-engines")


def prompt(seed: int = 0, length: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, CONFIG.vocab_size, length).astype(np.int32)


def request(
    uid: int = 0, n: int = 2, length: int = 7, partials: tuple[Response, ...] = (), **params: Any
) -> GroupRequest:
    settings = SamplingParams(**{"n": n, "max_new_tokens": 100, "seed": 3, "temperature": 0.0, **params})
    return GroupRequest(f"g{uid}", uid, prompt(uid, length), settings, partials or (EMPTY,) * n)


def tokens(responses: tuple[Response, ...]) -> list[list[int]]:
    return [r.token_ids.tolist() for r in responses]


def play(path: Path, act: Callable[[VllmEngine], Awaitable[Any]], version: WeightVersion = V0, **options: Any) -> Any:
    """Run ``act`` with a started engine, under a deadline (a hang is a failure)."""

    async def main() -> Any:
        engine = VllmEngine(path, replace(OPTIONS, **options), version=version)
        await asyncio.wait_for(engine.start(), HANGS_S)
        try:
            return await asyncio.wait_for(act(engine), HANGS_S)
        finally:
            await asyncio.wait_for(engine.shutdown(), HANGS_S)

    return asyncio.run(main())


async def progressed(engine: VllmEngine, amount: int) -> None:
    """Wait until the engine did ``amount`` more tokens of work."""
    goal = engine.progress + amount
    while engine.progress < goal:  # noqa: ASYNC110 - the engine's own steps are what is waited for
        await asyncio.sleep(0.001)


async def refill(engine: VllmEngine, model: CausalLM, version: WeightVersion, **options: bool) -> None:
    await engine.begin_update(weight_specs(model))
    for name, tensor in named_weights(model):
        await engine.load_bucket({name: tensor})
    await engine.finish_update(version, **options)


def forced(model: CausalLM, group: GroupRequest, response: Response, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of a response by the plain model."""
    ids = torch.from_numpy(np.concatenate((group.prompt_tokens, response.token_ids)).astype(np.int64))[None]
    with torch.no_grad():
        logp = torch.log_softmax(model(ids)[0] / (temperature or 1.0), dim=-1)
    start = len(group.prompt_tokens)
    return logp[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()
