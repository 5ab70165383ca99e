"""What vLLM's worker processes do for hybridsched beyond vLLM: measured memory, weights that are surely not there,
teacher forcing at any temperature.

Owns: `WorkerCalls`, methods that our engine calls through collective_rpc; vLLM mixes them into its GPU workers
(``worker_extension_cls``), vllm_cpu_worker into the CPU worker. Invariants: bytes are counted per storage, once, and
are what is mapped now; names begin with hs_, which vLLM does not use. Does not: import vLLM before it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

ONES = 0xFF  #: a weight of all-ones bytes is NaN in every floating-point format


class WorkerCalls:
    """Mixed into a vLLM worker: uses its ``model_runner``."""

    model_runner: Any
    hs_temperature = 1.0

    def hs_memory(self) -> tuple[int, int]:
        """Bytes of weights and of KV cache that are mapped now on this worker's device."""
        if next(iter(self.hs_storages("weights")), None) is not None and _on_cuda(self):
            return _mapped_by_tag("weights"), _mapped_by_tag("kv_cache")
        return tuple(sum(s.nbytes() for s in self.hs_storages(tag)) for tag in ("weights", "kv_cache"))  # type: ignore[return-value]

    def hs_poison(self) -> None:
        """Fill the weights with NaN (fresh memory after a wake holds anything, perhaps even good weights)."""
        for storage in self.hs_storages("weights"):
            if storage.nbytes():
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(ONES)

    def hs_give_up_update(self) -> None:
        """Forget that a weight update was begun; the next one starts from its first tensor."""
        self._weight_update_active = False

    def hs_set_temperature(self, temperature: float) -> None:
        """Divide all logits by this from now on (teacher forcing: vLLM applies none to the prompt's log-probs)."""
        model = self.model_runner.model
        if self.hs_temperature == 1.0 and temperature != 1.0:
            original = model.compute_logits
            model.compute_logits = lambda *args, **kwargs: original(*args, **kwargs) / self.hs_temperature
        elif self.hs_temperature != 1.0 and temperature == 1.0:
            del model.compute_logits  # the class's own is there again
        self.hs_temperature = temperature

    def hs_storages(self, tag: str) -> Iterator[Any]:
        """Every storage behind the weights or the KV cache, once."""
        runner = self.model_runner
        tensors = runner.get_model().parameters() if tag == "weights" else _flat(runner.kv_caches)
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)


def _on_cuda(worker: Any) -> bool:
    return bool(worker.device.type == "cuda") and bool(worker.vllm_config.model_config.enable_sleep_mode)


def _mapped_by_tag(tag: str) -> int:
    """Bytes of vLLM's sleep allocator that are mapped under a tag (a sleeping parameter still has its address)."""
    from vllm.device_allocator.cumem import CuMemAllocator

    found = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(int(data.handle[1]) for data in found if data.tag == tag and not data.is_asleep)
