"""Weight updates of the vLLM engine, from the side of the replica's process.

Owns: `WeightUpdates`: what was announced, what has arrived, and the memory in which buckets reach vLLM's workers.

Invariants: `finish` passes only when every tensor of the model arrived since `begin`; vLLM is told of at most one
update at a time, and one that was given up is undone there before the next. Does not: know pauses, caches or sleep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridsched.engines.announced import check_announced, check_arrived
from hybridsched.engines.vllm_buckets import BucketBox
from hybridsched.engines.vllm_core import Core
from hybridsched.errors import FaultError, InternalError, WeightSyncError
from hybridsched.model import TensorSpec, WeightVersion


class WeightUpdates:
    """All updates of one engine, one after the other. ``specs``: the tensors of its model."""

    def __init__(self, core: Core, specs: Sequence[TensorSpec]) -> None:
        self._core = core
        self._specs = {spec.name: spec for spec in specs}
        self._box = BucketBox()
        self._arrived: set[str] | None = None  # names of the update under way
        self._begun = False  # vLLM's workers think that an update is under way

    async def begin(self, specs: Sequence[TensorSpec]) -> None:
        """Raises WeightSyncError with the difference when ``specs`` are not those of the model."""
        self._arrived = None
        check_announced(list(self._specs.values()), specs)
        if self._begun:
            await self._core.rpc("hs_give_up_update")
        self._begun = True
        await self._core.call(self._core.llm.start_weight_update())
        self._arrived = set()

    async def load(self, tensors: Mapping[str, Any]) -> None:
        """Hand one bucket of complete tensors to vLLM's workers; their memory may be reused afterwards.

        Raises WeightSyncError for an unknown name or shape, and for what vLLM does not take.
        """
        if self._arrived is None:
            raise InternalError("load_bucket without begin_update")
        for name, tensor in tensors.items():
            spec = self._specs.get(name)
            if spec is None:
                raise WeightSyncError(f"tensor {name} was sent but does not belong to the engine's model")
            if tuple(tensor.shape) != spec.shape:
                raise WeightSyncError(
                    f"tensor {name} was sent with shape {tuple(tensor.shape)}, the model needs {spec.shape}"
                )
        arrived, self._arrived = self._arrived, None  # back only when the workers have it
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=self._box.fill(tensors))
        try:
            await self._core.call(self._core.llm.update_weights(request))
        except FaultError as error:
            raise self._core.dead or WeightSyncError(f"vLLM did not load a bucket: {error}") from error
        self._arrived = arrived | tensors.keys()

    async def finish(self, version: WeightVersion) -> None:
        """All is there: vLLM's tokens carry ``version`` from now on. Raises WeightSyncError naming what is missing."""
        if self._arrived is None:
            raise InternalError("finish_update without begin_update")
        check_arrived(list(self._specs.values()), self._arrived)
        await self._core.call(self._core.llm.finish_weight_update(str(version)))
        self._arrived, self._begun = None, False

    def give_up(self) -> None:
        """Nothing of the update under way counts any more."""
        self._arrived = None

    def close(self) -> None:
        """Give the shared memory back."""
        self.give_up()
        self._box.close()
