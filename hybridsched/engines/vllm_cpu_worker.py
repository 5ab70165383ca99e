"""vLLM's CPU worker with a sleep that is real (``worker_cls`` of our engine on CPU; vLLM's own ignores sleep there).

Owns: `SleepingCPUWorker`: sleep level 2 frees the storages of weights and KV cache, wake allocates them again, weights
filled with NaN so that a missed refill cannot pass unseen. Invariant: tensors keep their identity, so nothing in vLLM
notices. Needs plain linear layers (vllm_plugin): packed ones keep copies that cannot be freed. Does not: support level
1, which nobody asks for.
"""

from __future__ import annotations

import ctypes
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from hybridsched.engines.vllm_worker import ONES, WorkerCalls


class SleepingCPUWorker(WorkerCalls, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with sleep level 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sizes: dict[int, int] = {}  # bytes of a storage that is empty while asleep

    def sleep(self, level: int = 2) -> None:
        """Free weights and KV cache."""
        if level != 2:
            raise ValueError(f"sleep level {level} is not supported on CPU; hybridsched uses level 2")
        for tag in ("weights", "kv_cache"):
            for storage in self.hs_storages(tag):
                if storage.nbytes():
                    self._sizes[storage._cdata] = storage.nbytes()
                    storage.resize_(0)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed blocks below 32 MiB for itself
        if trim is not None:
            trim(0)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate what ``tags`` name (None: everything): weights NaN, KV cache zero."""
        for tag in tags or ("weights", "kv_cache"):
            for storage in self.hs_storages(tag):
                if not storage.nbytes():
                    storage.resize_(self._sizes[storage._cdata])
                    storage.fill_(ONES if tag == "weights" else 0)
