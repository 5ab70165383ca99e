"""The plain torch generation engine: continuous batching, interruptible, with weights that can be taken away.

Owns: the life cycle (start, sleep, wake, update), pausing, aborting and the stepping task. Groups are torch_groups.py,
the batch torch_batch.py, the cache torch_kv.py, weights torch_weights.py and torch_update.py, draws torch_sampler.py.

Invariants: everything runs on the caller's event loop, one step at a time, with a turn for the loop after each step, so
between two awaits the state is whole; a group's generate() always ends: with responses, or with the step's error; an
engine steps only while weights and KV cache are resident and consistent; sequences start in the order of their groups.

Does not: use threads or processes, shard over GPUs, share prefixes between groups.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridsched.engines.base import EngineMemory, GenerationEngine, GroupRequest, PauseMode
from hybridsched.engines.torch_batch import Batch
from hybridsched.engines.torch_batch import Sequence as Running
from hybridsched.engines.torch_groups import Group, open_group
from hybridsched.engines.torch_kv import KVCache
from hybridsched.engines.torch_update import WeightUpdate
from hybridsched.engines.torch_weights import FusedWeights, teacher_force
from hybridsched.errors import DataError, FaultError, HybridschedError, InternalError
from hybridsched.model import Response, TensorSpec, TokenArray, WeightVersion
from hybridsched.models.hf_folder import load_config, read_weights
from hybridsched.models.qwen3 import ModelConfig

_FORCE_TOKENS = 4096  #: padded tokens of one teacher-forcing batch


class TorchEngine(GenerationEngine):
    """One replica on one device."""

    name = "torch"

    def __init__(
        self,
        model_path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_num_seqs: int,
        kv_cache_tokens: int,
        stop_token_ids: Iterable[int] = (),
        version: WeightVersion = WeightVersion(0, 0),
        threads: int = 1,
        yield_fn: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        """``stop_token_ids``: the model's own ends of sequence, unless a request sets ignore_eos.

        ``version`` is that of the weights in the folder; ``yield_fn(0)`` gives the loop a turn between steps.
        """
        if max_num_seqs < 1 or kv_cache_tokens < 1:
            raise DataError(f"max_num_seqs ({max_num_seqs}) and kv_cache_tokens ({kv_cache_tokens}) must be at least 1")
        self._path = Path(model_path)
        self._device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self._dtype, self._threads = dtype, threads
        self._max_num_seqs, self._kv_tokens = max_num_seqs, kv_cache_tokens
        self._stops = tuple(stop_token_ids)
        self._version, self._yield = version, yield_fn
        self._config: ModelConfig | None = None  # None until start
        self._weights: FusedWeights | None = None
        self._batch: Batch | None = None
        self._whole = False  # the resident weights are all of one version
        self._update: WeightUpdate | None = None
        self._paused, self._draining, self._closed = True, False, False
        self._groups: dict[str, Group] = {}
        self._waiting: deque[Running] = deque()
        self._held: list[Group] = []  # arrived while draining
        self._task: asyncio.Task[None] | None = None
        self._work_before = 0  # progress of batches that are gone

    # ---- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model folder. Raises DataError when it cannot be used."""
        if self._config is not None:
            raise InternalError(f"the engine for {self._path} was started twice")
        if self._device.type == "cpu":
            torch.set_num_threads(self._threads)
        config = load_config(self._path)
        weights = FusedWeights(config, self._dtype, self._device)
        read_weights(self._path, weights.named)
        weights.refresh()
        self._config, self._weights, self._whole = config, weights, True
        await self.wake_kv()
        await self.resume()

    async def shutdown(self) -> None:
        """Running groups return partials, then everything is freed; later requests are refused. Idempotent."""
        self._paused = self._closed = True
        await self.abort()
        await self._quiesce()
        self._free()

    async def sleep(self) -> None:
        """Free weights and KV cache. Raises InternalError while a group is running."""
        self._need_start("sleep")
        busy = [key for key, group in self._groups.items() if group.t_start]
        if busy:
            raise InternalError(f"sleep while {len(busy)} groups are running ({busy[0]}, ...); abort them first")
        self._paused = True
        await self._quiesce()
        self._free()

    async def wake_weights(self) -> None:
        """Allocate the weights, all NaN. Raises InternalError when they are resident."""
        config = self._need_start("wake_weights")
        if self._weights is not None:
            raise InternalError("wake_weights while the weights are resident; sleep first")
        self._weights = FusedWeights(config, self._dtype, self._device, fill=float("nan"))

    async def wake_kv(self) -> None:
        """Allocate the KV cache. Raises InternalError unless whole weights are resident."""
        weights = self._need_whole("wake_kv")
        if self._batch is None:
            cache = KVCache(weights.config, self._kv_tokens, self._max_num_seqs, weights.dtype, self._device)
            self._batch = Batch(weights, cache, self._version)

    def _free(self) -> None:
        """Drop every reference to weights and cache; the allocator gives large buffers back at once."""
        self._work_before = self.progress
        self._weights = self._batch = self._update = None
        self._whole = False
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _need_start(self, what: str) -> ModelConfig:
        """The configuration; InternalError before start."""
        if self._config is None:
            raise InternalError(f"{what} before start")
        return self._config

    def _need_whole(self, what: str) -> FusedWeights:
        """Resident weights of one version; InternalError otherwise."""
        self._need_start(what)
        if self._weights is None:
            raise InternalError(f"{what} while the weights are not resident; wake_weights and a weight update first")
        if not self._whole:
            raise InternalError(f"{what} while the weights are not whole; a weight update must finish first")
        return self._weights

    # ---- weights --------------------------------------------------------------------------------------------------

    async def begin_update(self, specs: Sequence[TensorSpec]) -> None:
        """See the base class. An update that was begun and never finished is given up. Raises WeightSyncError."""
        self._need_start("begin_update")
        if self._weights is None:
            raise InternalError("begin_update while the weights are not resident; wake_weights first")
        if not self._paused:
            raise InternalError("begin_update while the engine is generating; pause it first")
        self._update, self._whole = None, False
        self._update = WeightUpdate(self._weights, specs)

    async def load_bucket(self, tensors: Mapping[str, Any]) -> None:
        """Copy complete named tensors. Raises WeightSyncError for an unknown name or a wrong shape."""
        if self._update is None:
            raise InternalError("load_bucket without begin_update")
        self._update.load(tensors)

    def destination(self, name: str) -> torch.Tensor | None:
        """Where a tensor may be received in place. An update that fails afterwards leaves the engine paused."""
        return self._update.place(name) if self._update is not None else None

    async def finish_update(self, version: WeightVersion, *, keep_kv: bool = False) -> None:
        """See the base class. Raises WeightSyncError naming the tensors that did not arrive."""
        if self._update is None or self._weights is None:
            raise InternalError("finish_update without begin_update")
        self._update.finish()
        self._update, self._whole = None, True
        self._weights.refresh()
        if self._batch is not None:
            if keep_kv:
                self._batch.set_version(version)
            else:
                # They go on from what they have: admission prefills prompt and response again.
                self._waiting.extendleft(reversed(self._batch.detach_all()))
                self._batch.version = version
        self._version = version

    async def logprobs(self, sequences: Sequence[tuple[TokenArray, TokenArray]], temperature: float) -> list[Any]:
        """See the base class. Works while paused too; raises InternalError unless whole weights are resident."""
        out: list[Any] = [np.empty(0, np.float32)] * len(sequences)
        order = sorted(range(len(sequences)), key=lambda i: -sum(map(len, sequences[i])))
        while order:
            longest = max(1, sum(map(len, sequences[order[0]])))
            piece = order[: max(1, _FORCE_TOKENS // longest)]
            order = order[len(piece) :]
            weights = self._need_whole("logprobs")
            if any(not len(sequences[i][0]) for i in piece):
                raise DataError("a prompt to teacher-force has no token")
            for i, result in zip(
                piece, teacher_force(weights, [sequences[i] for i in piece], temperature), strict=True
            ):
                out[i] = result
            await self._yield(0)
        return out

    # ---- groups ---------------------------------------------------------------------------------------------------

    async def generate(self, group: GroupRequest) -> tuple[Response, ...]:
        """See the base class. Raises DataError for a request that can never run, FaultError when a step failed."""
        config = self._need_start("generate")
        if self._closed:
            raise FaultError(f"group {group.key}: the engine was shut down")
        if group.key in self._groups:
            raise InternalError(f"group {group.key} is running already")
        entry = open_group(group, config, self._kv_tokens, self._stops)
        if not entry.running:
            return tuple(entry.responses)
        self._groups[group.key] = entry
        if self._draining:
            self._held.append(entry)
        else:
            self._waiting.extend(entry.running.values())
        self._kick()
        try:
            return await entry.future
        finally:
            self._withdraw([entry])  # nothing is left of it unless this call was cancelled
            entry.returned.set()

    async def abort(self, keys: Sequence[str] | None = None) -> None:
        """See the base class. Unknown keys are ignored (a group may have finished meanwhile)."""
        wanted = list(self._groups) if keys is None else keys
        groups = [self._groups[key] for key in dict.fromkeys(wanted) if key in self._groups]
        self._withdraw(groups)
        for group in groups:
            group.complete()
        for group in groups:
            await group.returned.wait()  # ends: its future is done

    async def pause(self, mode: PauseMode) -> None:
        """See the base class. While paused already, only ``abort`` still does something."""
        if mode == "wait" and not self._paused:
            await self._drain()
        self._paused = True
        if mode == "abort":
            await self.abort()
        await self._quiesce()

    async def resume(self) -> None:
        """See the base class."""
        self._need_whole("resume")
        if self._batch is None:
            raise InternalError("resume while the KV cache is not resident; wake_kv first")
        self._paused = False
        self._kick()

    async def _drain(self) -> None:
        """Groups that are here finish; those that come meanwhile are held. A cancelled drain changes nothing."""
        self._draining = True
        try:
            for group in list(self._groups.values()):
                await group.returned.wait()
            self._paused = True
        finally:
            self._draining = False
            for entry in self._held:
                self._waiting.extend(entry.running.values())
            self._held.clear()
            self._kick()

    def _withdraw(self, groups: Sequence[Group]) -> None:
        """Take groups out of batch, queue and table; their unfinished responses become partials."""
        gone = {id(group) for group in groups if group.running}
        if gone:
            self._waiting = deque(s for s in self._waiting if id(s.owner) not in gone)
            self._held = [group for group in self._held if id(group) not in gone]
            active = [s for group in groups for s in group.running.values() if s.row >= 0]
            for sequence in sorted(active, key=lambda s: -s.row):
                assert self._batch is not None  # it has a row
                self._batch.detach(sequence)
        for group in groups:
            for index in group.running:
                group.record(index)
            group.running.clear()
            if self._groups.get(group.key) is group:
                del self._groups[group.key]
        self._kick()

    # ---- stepping -------------------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Start the stepping task if there is something to do."""
        if self._task is None and self._has_work():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="torch-engine")

    def _has_work(self) -> bool:
        return not self._paused and self._batch is not None and bool(self._waiting or len(self._batch))

    async def _run(self) -> None:
        """Step while there is work. Any error goes to every generate() that waits."""
        try:
            while self._has_work():
                self._step()
                await self._yield(0)
        except asyncio.CancelledError:
            self._fail(FaultError("the engine's stepping task was cancelled; the event loop is being closed"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must learn of it
            self._fail(error)
        finally:
            self._task = None

    def _step(self) -> None:
        """Admit, then one token for everyone."""
        batch = self._batch
        assert batch is not None  # _has_work
        now = time.time()
        for sequence in batch.admit(self._waiting):
            sequence.owner.started(now)
        if not len(batch):
            raise InternalError("the first waiting sequence does not fit into an empty batch")
        for sequence in batch.step():
            sequence.owner.finish(sequence)

    def _fail(self, error: Exception) -> None:
        """Everybody who waits gets the error; the engine is empty, and usable if the cause goes away."""
        for group in self._groups.values():
            if isinstance(error, HybridschedError):
                group.fail(error)
            else:
                fault = FaultError(f"a step of the torch engine failed: {type(error).__name__}: {error}")
                fault.__cause__ = error
                group.fail(fault)
        self._waiting.clear()
        self._held.clear()
        if self._batch is not None:
            self._batch.reset()

    async def _quiesce(self) -> None:
        """Paused, and no step under way: the task ends at its next turn."""
        while self._task is not None:
            await asyncio.wait({self._task})

    # ---- facts ----------------------------------------------------------------------------------------------------

    def memory(self) -> EngineMemory:
        """Bytes of the buffers now held."""
        weights = self._weights.nbytes if self._weights is not None else 0
        return EngineMemory(weights, self._batch.cache.nbytes if self._batch is not None else 0)

    @property
    def version(self) -> WeightVersion:
        """Version of the weights (of the last finished update)."""
        return self._version

    @property
    def progress(self) -> int:
        """Tokens sampled or prefilled since start."""
        return self._work_before + (self._batch.work if self._batch is not None else 0)

    def unfinished(self, key: str) -> int:
        """See the base class."""
        return len(self._groups[key].running) if key in self._groups else 0

    def running_sequences(self) -> int:
        """Rows of the batch."""
        return len(self._batch) if self._batch is not None else 0
