"""NVIDIA's megatron-bridge as the converter of weights, where it is installed (`megatron.weight_source`).

Owns the same two directions as `WeightMap`, by calling the bridge: load a Hugging Face folder, walk through whole
tensors under Hugging Face names. The bridge decides the order of the walk; it is learnt once, at the start, because
receivers are told names and shapes before the first tensor.

Does not: use the bridge's own training loop, providers or model hub; the model is built by megatron_model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridsched.errors import ConfigError
from hybridsched.model import TensorSpec
from hybridsched.models import hf_folder
from hybridsched.models.config import ModelConfig


class BridgeWeights:
    """`WeightMap` by megatron-bridge. Collective: all ranks load and walk together."""

    gathers = True

    def __init__(self, model: nn.Module, config: ModelConfig, folder: Path) -> None:
        self.config = config
        self._model = model
        self._bridge = _auto_bridge().from_hf_pretrained(str(folder))
        self._specs: list[TensorSpec] = []

    def load(self, folder: Path) -> None:
        """Fill the model from the folder this was made for, and learn the order of the walk."""
        self._bridge.load_hf_weights([self._model])
        dtype = hf_folder.dtype_name(next(self._model.parameters()).dtype)
        self._specs = [TensorSpec(name, tuple(tensor.shape), dtype) for name, tensor in self._walk()]

    def specs(self) -> list[TensorSpec]:
        """Names, shapes and dtypes of what `gather` yields, in its order."""
        return self._specs

    def gather(self, tick: Callable[[], None] = lambda: None) -> BridgeWalk:
        """(Hugging Face name, whole tensor), on every rank. Collective."""
        return BridgeWalk(self._walk(), tick)

    def _walk(self) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            for name, tensor in self._bridge.export_hf_weights([self._model], cpu=False, show_progress=False):
                if name == "lm_head.weight" and self.config.tie_word_embeddings:
                    continue  # the same tensor as the embedding, which has been handed out
                yield name, tensor


class BridgeWalk(Iterator[tuple[str, Tensor]]):
    """One run through all tensors. ``close`` takes part in the rest, also when the walk has not begun."""

    def __init__(self, walk: Iterator[tuple[str, Tensor]], tick: Callable[[], None]) -> None:
        self._walk = walk
        self._tick = tick

    def __next__(self) -> tuple[str, Tensor]:
        found = next(self._walk)
        self._tick()
        return found

    def close(self) -> None:
        """Finish without results. Idempotent; does nothing after a failed step (the walk has ended with it)."""
        for _ in self._walk:
            self._tick()


def _auto_bridge() -> Any:
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ConfigError(
            "actor_rollout_ref.actor.megatron.weight_source is megatron-bridge, which cannot be imported here "
            f"({error}); install it (pip install megatron-bridge, Python 3.12 and CUDA only), or use builtin"
        ) from error
    return AutoBridge
