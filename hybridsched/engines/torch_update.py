"""One weight update as the torch engine receives it.

Owns: the count of what arrived, and the copies.

Invariants: a tensor is taken only under a name that was announced and only whole; `finish` passes only when every
tensor of the model arrived, or was asked for by its place, in this update.

Does not: transport anything, or touch the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridsched.engines.announced import check_announced, check_arrived
from hybridsched.engines.torch_weights import FusedWeights
from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec


class WeightUpdate:
    """Begun by its constructor; raises WeightSyncError with the difference when the specs do not fit the model."""

    def __init__(self, weights: FusedWeights, specs: Sequence[TensorSpec]) -> None:
        check_announced(weights.specs, specs)
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
        check_arrived(self._weights.specs, self._arrived)
