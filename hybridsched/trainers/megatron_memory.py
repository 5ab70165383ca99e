"""What of a Megatron trainer is parked, dropped or kept while its GPU is lent: whole storages instead of tensors.

Megatron lays parameters and gradients out in big buffers and hands out views, which own no storage of their own. Here
every storage is taken once, as a flat byte tensor that owns it, so that `ParkingLot` can free it: views are valid again
when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def whole_storages(tensors: Iterable[Tensor], taken: set[int]) -> list[Tensor]:
    """A flat uint8 tensor over each storage behind ``tensors`` that is not in ``taken`` yet (storage identities)."""
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata in taken or not storage.nbytes():
            continue
        taken.add(storage._cdata)
        found.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
    return found


class DroppedBuffers:
    """Buffers worth nothing while the trainer waits: freed without a copy, zeros when they return."""

    def __init__(self) -> None:
        self._dropped: list[tuple[Tensor, int]] = []

    def drop(self, storages: Iterable[Tensor]) -> int:
        """Free the storages (from `whole_storages`); returns bytes freed. Idempotent."""
        freed = 0
        for tensor in storages:
            size = tensor.untyped_storage().nbytes()
            if size:
                tensor.untyped_storage().resize_(0)
                self._dropped.append((tensor, size))
                freed += size
        return freed

    def restore(self) -> None:
        """Map them again, filled with zeros."""
        while self._dropped:
            tensor, size = self._dropped.pop()
            tensor.untyped_storage().resize_(size)
            tensor.zero_()
