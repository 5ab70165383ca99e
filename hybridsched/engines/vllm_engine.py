"""The vLLM generation engine: AsyncLLM, with EngineCore in a process of its own, behind our engine interface.

Owns: the life cycle (start, sleep, staged wake, update), pausing, aborting, and the tasks that follow vLLM's requests.
Groups are vllm_groups.py, the processes vllm_core.py, options vllm_options.py, the other end of weights
vllm_weights.py, what vLLM's workers do for us vllm_worker.py.

Invariants: everything runs on the caller's event loop; a group's generate() always ends: with responses, or with the
error of the engine; new groups reach vLLM only while the engine is not paused; nothing cached under one weight version
is used under another (the version is part of every prefix-cache key); memory() is what the workers measured after the
last change of it. The death of EngineCore ends every call and is told to ``on_death`` once.

Draws: vLLM's generator starts anew with each request, so a continued response draws from a seed of its own; greedy
responses do not depend on interruptions at all.

Does not: tokenize, transport weights, or restart what died (the worker's agent does).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridsched.engines.base import EngineMemory, GenerationEngine, GroupRequest, PauseMode
from hybridsched.engines.vllm_core import Core
from hybridsched.engines.vllm_groups import Group, Stream, open_group
from hybridsched.engines.vllm_options import VllmOptions, engine_arguments
from hybridsched.engines.vllm_requests import follow, forced_logprobs
from hybridsched.engines.vllm_update import WeightUpdates
from hybridsched.errors import DataError, FaultError, HybridschedError, InternalError
from hybridsched.model import Response, TensorSpec, TokenArray, WeightVersion
from hybridsched.models.config import ModelConfig, weight_shapes
from hybridsched.models.hf_folder import load_config

_ABORT_LOOK_S = 0.05  #: between two requests to vLLM to abort what was on its way in
_ABORT_S = 20.0  #: after which an aborted request counts as lost in vLLM, and is left to it


class VllmEngine(GenerationEngine):
    """One replica."""

    name = "vllm"

    def __init__(
        self,
        model_path: str | Path,
        options: VllmOptions,
        *,
        device: str = "cpu",
        stop_token_ids: Iterable[int] = (),
        version: WeightVersion = WeightVersion(0, 0),
        on_death: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        """``stop_token_ids``: the model's own ends of sequence, unless a request sets ignore_eos.

        ``version`` is that of the weights in the folder. ``on_death`` is called on the event loop when EngineCore dies.
        """
        if options.max_num_seqs < 1 or options.kv_cache_tokens < 1:
            raise DataError(
                f"max_num_seqs ({options.max_num_seqs}) and kv_cache_tokens ({options.kv_cache_tokens}) must be at "
                "least 1"
            )
        self._path, self._options, self._device = Path(model_path), options, device
        self._stops, self._version = tuple(stop_token_ids), version
        self._on_death = on_death
        self._config: ModelConfig | None = None  # None until start
        self._core = Core(self._core_died)
        self._updates = WeightUpdates(self._core, ())  # of the model's tensors, once started
        self._memory = EngineMemory(0, 0)
        self._awake: set[str] = set()  # of "weights", "kv_cache"
        self._whole = False  # the resident weights are all of one version
        self._paused, self._closed = True, False
        self._open = asyncio.Event()  # set while requests may go to vLLM
        self._admit = asyncio.Event()  # set while new groups may begin (not set: those that are here are drained)
        self._admit.set()
        self._groups: dict[str, Group] = {}
        self._progress = 0

    # ---- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start vLLM with the model folder. Raises DataError, ConfigError or FaultError when it cannot be used."""
        if self._config is not None:
            raise InternalError(f"the engine for {self._path} was started twice")
        config = load_config(self._path)
        arguments = engine_arguments(self._path, config, self._options, self._device)
        await self._core.start(arguments, self._options, self._device)
        await self._core.call(self._core.llm.update_weight_version(str(self._version)))
        specs = [TensorSpec(name, shape, self._options.dtype) for name, shape in weight_shapes(config).items()]
        self._updates = WeightUpdates(self._core, specs)
        self._config, self._whole = config, True
        self._awake = {"weights", "kv_cache"}
        await self._measure()
        await self.resume()

    async def shutdown(self) -> None:
        """Running groups return partials, then EngineCore ends; later requests are refused. Idempotent."""
        self._paused = self._closed = True
        self._open.clear()
        if self._core.dead is None and self._core.llm is not None:
            await self.abort()
        self._end_all(FaultError("the engine was shut down"))
        await self._core.shutdown()
        self._updates.close()
        self._awake, self._whole = set(), False
        self._memory = EngineMemory(0, 0)

    async def sleep(self) -> None:
        """Free weights and KV cache. Raises InternalError while a group is running."""
        self._need_start("sleep")
        busy = [key for key, group in self._groups.items() if group.t_start]
        if busy:
            raise InternalError(f"sleep while {len(busy)} groups are running ({busy[0]}, ...); abort them first")
        self._paused, self._whole = True, False
        self._open.clear()
        self._updates.give_up()
        await self._core.call(self._core.llm.sleep(level=2, mode="abort"))
        self._awake = set()
        await self._measure()

    async def wake_weights(self) -> None:
        """Allocate the weights, all NaN. Raises InternalError when they are resident."""
        self._need_start("wake_weights")
        if "weights" in self._awake:
            raise InternalError("wake_weights while the weights are resident; sleep first")
        await self._core.call(self._core.llm.wake_up(["weights"]))
        await self._core.rpc("hs_poison")
        self._awake.add("weights")
        await self._measure()

    async def wake_kv(self) -> None:
        """Allocate the KV cache. Raises InternalError unless whole weights are resident."""
        self._need_whole("wake_kv")
        if "kv_cache" not in self._awake:
            await self._core.call(self._core.llm.wake_up(["kv_cache"]))  # vLLM may step again; nothing goes there yet
            self._awake.add("kv_cache")
            await self._measure()

    async def _measure(self) -> None:
        found = await self._core.rpc("hs_memory")
        self._memory = EngineMemory(sum(weights for weights, _ in found), sum(kv for _, kv in found))

    def _need_start(self, what: str) -> ModelConfig:
        """The configuration; InternalError before start, FaultError after a death."""
        if self._config is None:
            raise InternalError(f"{what} before start")
        if self._core.dead is not None:
            raise self._core.dead
        return self._config

    def _need_whole(self, what: str) -> None:
        """Resident weights of one version; InternalError otherwise."""
        self._need_start(what)
        if "weights" not in self._awake:
            raise InternalError(f"{what} while the weights are not resident; wake_weights and a weight update first")
        if not self._whole:
            raise InternalError(f"{what} while the weights are not whole; a weight update must finish first")

    def _core_died(self, error: Exception) -> None:
        self._paused = True
        self._open.clear()
        self._end_all(error)
        self._on_death(error)

    def _end_all(self, error: Exception) -> None:
        for group in list(self._groups.values()):
            group.fail(error)

    # ---- weights --------------------------------------------------------------------------------------------------

    async def begin_update(self, specs: Sequence[TensorSpec]) -> None:
        """See the base class. An update that was begun and never finished is given up. Raises WeightSyncError."""
        self._need_start("begin_update")
        if "weights" not in self._awake:
            raise InternalError("begin_update while the weights are not resident; wake_weights first")
        if not self._paused:
            raise InternalError("begin_update while the engine is generating; pause it first")
        self._whole = False
        await self._updates.begin(specs)

    async def load_bucket(self, tensors: Mapping[str, Any]) -> None:
        """Hand complete named tensors to vLLM's workers. Raises WeightSyncError for an unknown name or shape."""
        await self._updates.load(tensors)

    async def finish_update(self, version: WeightVersion, *, keep_kv: bool = False) -> None:
        """See the base class. Raises WeightSyncError naming the tensors that did not arrive."""
        await self._updates.finish(version)
        if "kv_cache" in self._awake:
            # Kept requests that keep their KV hold on to their blocks; all else is gone, for its key names a version.
            await self._core.call(self._core.llm.reset_prefix_cache(reset_running_requests=not keep_kv))
        if keep_kv:
            for stream in self._streams():
                if stream.request_id:
                    stream.kept_from.append(version)
        self._version, self._whole = version, True

    async def logprobs(self, sequences: Sequence[tuple[TokenArray, TokenArray]], temperature: float) -> list[Any]:
        """See the base class. Works while paused too; raises InternalError unless whole weights and KV are resident.

        Groups that a pause keeps are taken out of vLLM for it and put back by resume: their KV is computed again.
        """
        self._need_whole("logprobs")
        if "kv_cache" not in self._awake:
            raise InternalError("logprobs while the KV cache is not resident; wake_kv first")
        if any(not len(prompt) for prompt, _ in sequences):
            raise DataError("a prompt to teacher-force has no token")
        was_paused = self._paused
        await self.pause("keep")
        await self._recall()
        await self._core.call(self._core.llm.resume_generation())
        try:
            await self._core.rpc("hs_set_temperature", float(temperature or 1.0))
            return await self._core.call(forced_logprobs(self._core.llm, sequences, self._worked))
        finally:
            if self._core.dead is None:
                await self._core.rpc("hs_set_temperature", 1.0)
                await self._core.call(self._core.llm.pause_generation(mode="keep", clear_cache=False))
                if not was_paused:
                    await self.resume()

    # ---- groups ---------------------------------------------------------------------------------------------------

    async def generate(self, group: GroupRequest) -> tuple[Response, ...]:
        """See the base class. Raises DataError for a request that can never run, FaultError when vLLM failed."""
        config = self._need_start("generate")
        if self._closed:
            raise FaultError(f"group {group.key}: the engine was shut down")
        if group.key in self._groups:
            raise InternalError(f"group {group.key} is running already")
        limit = min(self._options.max_tokens, config.max_position_embeddings)
        entry = open_group(group, vocab_size=config.vocab_size, max_tokens=limit, stops=self._stops)
        if not entry.running:
            return tuple(entry.responses)
        self._groups[group.key] = entry
        for stream in list(entry.running.values()):
            stream.task = asyncio.get_running_loop().create_task(self._drive(stream), name=f"vllm {group.key}")
        try:
            return await entry.future
        finally:
            await self._clear(entry)

    async def _clear(self, group: Group) -> None:
        """Nothing of a group is left in vLLM, nor in the table (only a cancelled or failed one has anything left)."""
        tasks = [stream.task for stream in group.running.values() if stream.task is not None]
        for task in tasks:
            task.cancel()  # vLLM aborts the request of a follower that is cancelled
        self._groups.pop(group.request.key, None)
        group.returned.set()
        if tasks:
            await asyncio.wait(tasks, timeout=_ABORT_S)

    async def _drive(self, stream: Stream) -> None:
        """Let one response grow until it is finished or aborted, over as many vLLM requests as that takes."""
        group = stream.group
        try:
            while True:
                await self._turn(group)
                group.t_start = group.t_start or time.time()
                stream.recalled = False
                await follow(self._core.llm, stream, self._version, self._worked)
                if not stream.recalled or stream.finish.value != "aborted":
                    break
            group.record(stream)
        except asyncio.CancelledError:
            if not group.aborting:
                raise
            group.record(stream)
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits for the group must learn of it
            known = isinstance(error, HybridschedError)
            group.fail(self._core.dead or (error if known else FaultError(f"group {group.request.key}: vLLM: {error}")))

    async def _turn(self, group: Group) -> None:
        """Until requests of this group may go to vLLM. Not bounded: it may be paused for long; an abort cancels it."""
        while not (self._open.is_set() and (group.admitted or self._admit.is_set())):
            await (self._admit if self._open.is_set() else self._open).wait()
        group.admitted = True

    def _worked(self, tokens: int) -> None:
        self._progress += tokens

    async def abort(self, keys: Sequence[str] | None = None) -> None:
        """See the base class. Unknown keys are ignored (a group may have finished meanwhile)."""
        wanted = list(self._groups) if keys is None else keys
        groups = [self._groups[key] for key in dict.fromkeys(wanted) if key in self._groups]
        streams = [stream for group in groups for stream in group.running.values()]
        for stream in streams:
            stream.group.aborting, stream.recalled = True, False
        await self._withdraw(streams)
        for stream in streams:
            if stream.index in stream.group.running:  # cancelled before its task ran at all, so it records nothing
                stream.group.record(stream)
        for group in groups:
            await group.returned.wait()  # ends: its streams have

    async def _withdraw(self, streams: Sequence[Stream]) -> None:
        """End the vLLM requests of these streams; each has every token that was delivered.

        A request that was on its way into vLLM is not known there yet, so vLLM is asked until all are gone.
        """
        end = time.monotonic() + _ABORT_S
        for stream in streams:
            if not stream.request_id and stream.task is not None:
                stream.task.cancel()  # it waits for its turn
        tasks = {stream.task for stream in streams if stream.task is not None and not stream.recalled}
        waiting = {stream for stream in streams if stream.request_id}
        while waiting and self._core.dead is None:
            await self._core.call(self._core.llm.abort([stream.request_id for stream in waiting]))
            await asyncio.sleep(0 if time.monotonic() < end - _ABORT_S + _ABORT_LOOK_S else _ABORT_LOOK_S)
            waiting = {stream for stream in waiting if stream.request_id}
            if time.monotonic() > end:
                raise FaultError(f"vLLM did not end {len(waiting)} aborted requests within {_ABORT_S:g} s")
        if tasks and self._core.dead is None:
            await asyncio.wait(tasks, timeout=_ABORT_S)

    async def _recall(self) -> None:
        """Take everything out of a paused vLLM; it goes back at the resume with the tokens it has."""
        streams = [stream for stream in self._streams() if stream.request_id]
        for stream in streams:
            stream.recalled = True
        await self._withdraw(streams)

    def _streams(self) -> list[Stream]:
        return [stream for group in self._groups.values() for stream in group.running.values()]

    # ---- pausing --------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """See the base class. While paused already, only ``abort`` still does something."""
        self._need_start("pause")
        if mode == "wait" and not self._paused:
            await self._drain()
        was_paused, self._paused = self._paused, True
        self._open.clear()
        if mode == "abort":
            await self.abort()
        if not was_paused and "kv_cache" in self._awake:
            await self._core.call(self._core.llm.pause_generation(mode="keep", clear_cache=False))

    async def _drain(self) -> None:
        """Groups that are here finish; those that come meanwhile are held. A cancelled drain changes nothing."""
        self._admit.clear()
        groups = list(self._groups.values())
        try:
            for group in groups:
                group.admitted = True
            for group in groups:
                await group.returned.wait()  # not bounded: whoever drains has a deadline, and cancels
            self._open.clear()
        finally:
            self._admit.set()

    async def resume(self) -> None:
        """See the base class."""
        self._need_whole("resume")
        if "kv_cache" not in self._awake:
            raise InternalError("resume while the KV cache is not resident; wake_kv first")
        await self._core.call(self._core.llm.resume_generation())
        self._paused = False
        self._open.set()

    # ---- facts ----------------------------------------------------------------------------------------------------

    def memory(self) -> EngineMemory:
        """Bytes that vLLM's workers hold, as measured after the last change."""
        return self._memory

    @property
    def version(self) -> WeightVersion:
        """Version of the weights (of the last finished update)."""
        return self._version

    @property
    def progress(self) -> int:
        """Tokens sampled or teacher-forced since start."""
        return self._progress

    @property
    def pids(self) -> tuple[int, ...]:
        """vLLM's processes."""
        return tuple(self._core.pids)

    def unfinished(self, key: str) -> int:
        """See the base class."""
        return len(self._groups[key].running) if key in self._groups else 0

    def running_sequences(self) -> int:
        """Requests that vLLM has now."""
        return sum(bool(stream.request_id) for stream in self._streams())
