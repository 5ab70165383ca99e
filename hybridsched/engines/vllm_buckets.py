"""Buckets of weights on their way from a replica's process into vLLM's: one piece of anonymous shared memory.

Owns: `BucketBox`, memory behind a memfd that vLLM's workers open through /proc while this process lives, so nothing
has a name that a crash could leave behind. Invariants: a bucket is written only after the one before was loaded (the
caller waits for vLLM's answer); the tensors may be reused as soon as `fill` returns. Does not: send anything.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from hybridsched.errors import WeightSyncError

_ALIGN = 64  #: bytes; any dtype can be viewed there


class BucketBox:
    """Shared memory that grows to the largest bucket."""

    def __init__(self) -> None:
        self._fd = -1
        self._flat: Any = None

    def fill(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Copy complete tensors in; returns what vllm_weights.BucketUpdate is made of.

        Raises WeightSyncError when there is no memory for them.
        """
        layout: list[list[Any]] = []
        used = 0
        for name, tensor in tensors.items():
            layout.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), used])
            used += -(-tensor.nbytes // _ALIGN) * _ALIGN
        self._reserve(used)
        for (_, _, shape, start), tensor in zip(layout, tensors.values(), strict=True):
            place = self._flat[start : start + tensor.nbytes].view(tensor.dtype).view(tuple(shape))
            place.copy_(tensor)
        flat = self._flat[:used]
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._fd}",
            "nbytes": used,
            "checksum": xxhash.xxh3_64_intdigest(memoryview(flat.numpy())),
            "tensors": layout,
        }

    def close(self) -> None:
        """Give the memory back; it lives on while a vLLM worker maps it. Idempotent."""
        self._flat = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserve(self, nbytes: int) -> None:
        if self._flat is not None and nbytes <= self._flat.numel():
            return
        self.close()
        size = max(nbytes, mmap.PAGESIZE)
        fd = os.memfd_create("hybridsched-vllm-bucket", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)  # a full memory is an error here, never a SIGBUS in the middle of a copy
        except OSError as error:
            os.close(fd)
            raise WeightSyncError(
                f"no shared memory for a bucket of {size / 2**20:.1f} MiB: {error.strerror}; "
                "lower weight_sync.bucket_bytes or free memory"
            ) from error
        self._fd = fd
        self._flat = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
