"""Deliberately broken workers: the positive controls of reward_parity.py. Never used by anything else.

Loaded through the test seam of worker processes (HYBRIDSCHED_TEST_BUILD=sabotage:NAME).
"""

from __future__ import annotations

from typing import Any

from hybridsched.config import load_config
from hybridsched.runtime.workers.build import build_worker


def shuffled_logprobs(spec: Any, config_path: str, context: Any, endpoint: Any, clock: Any, offload: Any) -> Any:
    """Log-probs of each response in another order: the importance ratio is rubbish."""
    from dataclasses import replace

    import numpy as np

    worker = build_worker(spec, load_config(config_path), context, endpoint, clock, offload)
    engine = getattr(worker, "_engine", None)
    if engine is not None:
        original = engine.generate
        chance = np.random.default_rng(0)

        async def generate(group: Any) -> Any:
            responses = await original(group)
            return tuple(replace(r, logprobs=chance.permutation(r.logprobs)) if r.finished else r for r in responses)

        engine.generate = generate
    return worker


def stale_weights(spec: Any, config_path: str, context: Any, endpoint: Any, clock: Any, offload: Any) -> Any:
    """Replicas take part in every sync but keep the weights of the first one under the new version's name."""
    worker = build_worker(spec, load_config(config_path), context, endpoint, clock, offload)
    engine = getattr(worker, "_engine", None)
    if engine is not None:
        original = engine.load_bucket
        first: dict[str, Any] = {}

        async def load_bucket(tensors: Any) -> None:
            for name, tensor in tensors.items():
                if name not in first:
                    first[name] = tensor.clone()
            await original({name: first[name] for name in tensors})

        engine.load_bucket = load_bucket
    return worker
