"""The receiving end of weights inside every vLLM worker process: buckets in shared memory become parameters.

Owns: `BucketTransferEngine`, which vLLM makes once per worker (vllm_plugin registers it), and the two ways to load:
in place, where the parameters are what the kernels compute from, and layer by layer through vLLM's reload where a
layer is transformed after loading (quantised, packed for oneDNN).

Invariants: every bucket is checked against its xxh3 checksum before a byte of it is loaded; a tensor that vLLM may
keep beyond the call is a copy, never a view of the bucket; an update that was given up leaves nothing behind that the
next one could count twice. All tensor-parallel ranks get complete tensors and cut out their own part.

Does not: talk to the trainer. The replica's process receives from it and hands on (vllm_buckets); so a broadcast can
be cut there at any time, while this process only ever waits for memory that is already there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hybridsched.engines.vllm_plugin import plain_linear
from hybridsched.errors import WeightSyncError


@dataclass
class BucketInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on before the first bucket."""


@dataclass
class BucketUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket: ``tensors`` are (name, dtype, shape, first byte) within the first ``nbytes`` of the file ``path``."""

    path: str
    nbytes: int
    checksum: int
    tensors: list[list[Any]]


class BucketTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's interface; ``self.model``, ``model_config``, ``device`` come from it."""

    init_info_cls = BucketInit
    update_info_cls = BucketUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun = False
        self._mapped: tuple[tuple[str, int, int], Any] | None = None  # the file as it was mapped, and its bytes
        self._in_place = self.model_config.quantization is None and (self.device.type != "cpu" or plain_linear())

    def init_transfer_engine(self, init_info: BucketInit) -> None:
        """Nothing to meet."""

    def start_weight_update(self) -> None:
        """Ready for buckets. An update that was begun before and not finished is given up."""
        if self._in_place:
            return
        if self._begun:
            finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)
        self._begun = True

    def receive_weights(self, update_info: BucketUpdate) -> None:
        """Load one bucket. Raises WeightSyncError when its bytes are not those that were written."""
        flat = self._map(update_info)
        found = xxhash.xxh3_64_intdigest(memoryview(flat.numpy()))
        if found != update_info.checksum:
            sums = f"xxh3 {update_info.checksum:016x} written, {found:016x} read"
            raise WeightSyncError(f"a bucket was damaged on its way into vLLM: {sums}")
        with torch.inference_mode():
            self.model.load_weights(self._tensors(flat, update_info))

    def finish_weight_update(self) -> None:
        """All buckets are in."""
        if not self._begun:
            return
        self._begun = False
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Let go of the shared memory."""
        self._mapped = None

    def _tensors(self, flat: Any, update: BucketUpdate) -> Iterator[tuple[str, Any]]:
        for name, dtype, shape, start in update.tensors:
            kind = getattr(torch, dtype)
            count = 1
            for length in shape:
                count *= length
            view = flat[start : start + count * kind.itemsize].view(kind).view(tuple(shape))
            yield name, view if self._in_place else view.clone()

    def _map(self, update: BucketUpdate) -> Any:
        """The bucket's bytes as a flat uint8 tensor. The file stays mapped for the next bucket."""
        fd = os.open(update.path, os.O_RDWR)
        try:
            info = os.fstat(fd)
            key = (update.path, info.st_ino, info.st_size)
            if self._mapped is None or self._mapped[0] != key:
                self._mapped = (key, torch.frombuffer(mmap.mmap(fd, info.st_size), dtype=torch.uint8))
        finally:
            os.close(fd)
        return self._mapped[1][: update.nbytes]


def repack_tied_head(model: Any) -> None:
    """A tied output layer shares its parameter with the embedding, so the reload thinks nothing was loaded for it and
    leaves its packed copy of the *old* weight in use. Pack it again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
