"""One weight update as the torch engine receives it.

Owns: the comparison of what is announced with what the model has, and the count of what arrived.

Invariants: a tensor is taken only under a name that was announced and only whole; `finish` passes only when every
tensor of the model arrived, or was asked for by its place, in this update.

Does not: transport anything, or touch the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridsched.engines.torch_weights import FusedWeights
from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec


class WeightUpdate:
    """Begun by its constructor; raises WeightSyncError with the difference when the specs do not fit the model."""

    def __init__(self, weights: FusedWeights, specs: Sequence[TensorSpec]) -> None:
        own, announced = {s.name: s for s in weights.specs}, {s.name: s for s in specs}
        problems = [f"missing {_some([n for n in own if n not in announced])}"] if own.keys() - announced.keys() else []
        if announced.keys() - own.keys():
            problems.append(f"not in this model {_some([n for n in announced if n not in own])}")
        for name in own.keys() & announced.keys():
            ours, theirs = own[name], announced[name]
            if tuple(theirs.shape) != ours.shape:
                problems.append(f"{name} has shape {tuple(theirs.shape)}, here it is {ours.shape}")
            if theirs.dtype != ours.dtype:
                problems.append(f"{name} is {theirs.dtype}, here it is {ours.dtype}")
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise WeightSyncError(
                f"the announced weights do not fit the engine's model: {'; '.join(problems[:8])}{more}. "
                "Trainer and engine must have the same model folder and dtype"
            )
        self._weights = weights
        self._arrived: set[str] = set()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def load(self, tensors: Mapping[str, Any]) -> None:
        """Copy complete tensors; the caller may reuse their memory afterwards. A repeated tensor replaces itself."""
        for name, tensor in tensors.items():
            target = self._weights.named.get(name)
            if target is None:
                raise WeightSyncError(f"tensor {name} was sent but does not belong to the engine's model")
            if tuple(tensor.shape) != tuple(target.shape):
                raise WeightSyncError(
                    f"tensor {name} was sent with shape {tuple(tensor.shape)}, the model needs {tuple(target.shape)}"
                )
            target.copy_(tensor)
            self._arrived.add(name)

    def place(self, name: str) -> torch.Tensor | None:
        """The model's own tensor of that name, to be written whole by the caller before `finish`."""
        target = self._weights.named.get(name)
        if target is not None:
            self._arrived.add(name)
        return target

    def finish(self) -> None:
        """Raise WeightSyncError unless every tensor of the model arrived."""
        missing = [spec.name for spec in self._weights.specs if spec.name not in self._arrived]
        if missing:
            raise WeightSyncError(
                f"{len(missing)} of {len(self._weights.specs)} tensors did not arrive: {_some(missing)}. "
                "The engine stays paused; repeat the whole sync"
            )


def _some(names: list[str], limit: int = 5) -> str:
    """The first few names, and how many more."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
