"""An engine without a model: it takes the time a GPU replica would take, and gives tokens that mean nothing.

Owns ``EmulatedEngine``. Timing comes from ``scheduling.forecast.ReplicaModel``, lengths from ``emulated_draws``, and
time is the event loop's, virtual or real. Everything it gives is labelled: ``name`` is "emulated", all tokens and
log-probs are zero. It does not move weights: ``finish_update`` takes the time of a sync (standalone) or hand-over
(hybrid), and what is announced in ``begin_update`` may be nothing at all.

Invariants
  - The length of a response depends on (seed, sample_uid, response index) only; aborting and continuing anywhere
    changes no length, and ``version_runs`` cover exactly the tokens, each run under the version that was resident.
  - One timer a replica, whatever runs on it; a response costs a few microseconds.
  - The guards of a real engine hold: no work while weights or KV cache are not resident or not refilled after a wake.

Faults for tests (``fault``): die, hang, slow, heal.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hybridsched.config.schema import EmulatedConfig
from hybridsched.engines.base import EngineMemory, GenerationEngine, GroupRequest, PauseMode
from hybridsched.engines.emulated_draws import draw_length
from hybridsched.engines.emulated_run import ZEROS, LengthDraw, Run, plan_run
from hybridsched.errors import InternalError, WeightSyncError, WorkerDied
from hybridsched.model import ReplicaKind, Response, TensorSpec, TokenArray, WeightVersion
from hybridsched.scheduling.forecast import ReplicaModel
from hybridsched.trainers.emulated import EMULATED_SPECS

FaultKind = Literal["die", "hang", "slow", "heal"]


class EmulatedEngine(GenerationEngine):
    """One replica in time. ``start`` binds it to the running event loop."""

    name = "emulated"

    def __init__(
        self,
        config: EmulatedConfig,
        *,
        kind: ReplicaKind,
        kv_tokens: int,
        max_num_seqs: int,
        wall: Callable[[], float],
        lengths: LengthDraw | None = None,
        weights_bytes: int = 1 << 30,
        kv_bytes_per_token: int = 1 << 17,
        version: WeightVersion = WeightVersion(0, 0),
        speed: float = 1.0,
    ) -> None:
        """kv_tokens: this replica's own KV budget; wall: seconds since the epoch (for t_start and t_end).

        lengths: not the log-normal. weights_bytes, kv_bytes_per_token: what ``memory`` reports. speed: of this replica.
        """
        self._config = config
        self._kind = kind
        self._kv_tokens = kv_tokens
        self._max_num_seqs = max_num_seqs
        self._wall = wall
        self._draw = lengths or (lambda seed, uid, index: draw_length(config, seed, uid, index))
        self._bytes = EngineMemory(weights_bytes, kv_tokens * kv_bytes_per_token)
        self._version = version
        self._speed = speed * (config.hybrid_speed if kind is ReplicaKind.HYBRID else 1.0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._model: ReplicaModel | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._runs: dict[str, Run] = {}
        self._held: list[Run] = []
        self._weights = self._kv = self._filled = False
        self._paused = True
        self._draining = False
        self._recompute = False
        self._update: dict[str, bool] | None = None  # tensor name -> arrived, between begin_update and finish_update
        self._dead = ""
        self._hung: asyncio.Event | None = None

    async def start(self) -> None:
        """Ready at once: loading an emulated model takes no time."""
        await self._gate()
        if self._model is not None:
            raise InternalError("the emulated engine was started twice")
        self._loop = asyncio.get_running_loop()
        config = self._config
        self._model = ReplicaModel(
            decode_base_s=config.decode_base_s,
            decode_per_seq_s=config.decode_per_seq_s,
            prefill_tokens_per_s=config.prefill_tokens_per_s,
            kv_tokens=self._kv_tokens,
            max_num_seqs=self._max_num_seqs,
            speed=self._speed,
            now=self._loop.time(),
        )
        self._weights = self._kv = self._filled = True
        self._paused = False

    async def shutdown(self) -> None:
        """End what runs (as an abort) and release everything. Idempotent; works on a dead engine too."""
        if self._model is not None and not self._dead:
            await self.abort(None)
        self._disarm()
        self._weights = self._kv = self._filled = False
        self._paused = True

    async def generate(self, group: GroupRequest) -> tuple[Response, ...]:
        """See GenerationEngine. Raises InternalError (not resident), ConfigError (KV budget too small), WorkerDied."""
        if self._dead or self._hung is not None:
            await self._gate()
        self._require_resident("generate")
        if group.key in self._runs:
            raise InternalError(f"group {group.key!r} is running already; keys are unique among running groups")
        run = plan_run(group, self._draw, self._kv_tokens)
        if not run.left:
            return tuple(run.responses)
        self._runs[group.key] = run
        if self._paused or self._draining:
            self._held.append(run)
        else:
            self._play()
            self._enter(run)
            self._arm()
        try:
            return await run.future
        finally:
            if run.future.cancelled():  # the caller gave up
                self._play()
                if run.left:
                    self._take_out(run)
            del self._runs[group.key]

    async def abort(self, keys: Sequence[str] | None = None) -> None:
        """See GenerationEngine. Keys that are not running (any more) are ignored."""
        await self._gate()
        self._play()
        runs = list(self._runs.values()) if keys is None else [self._runs[k] for k in keys if k in self._runs]
        for run in runs:
            if not run.future.done():
                run.broken_off(self._take_out(run), self._version, self._wall())
                run.future.set_result(tuple(run.responses))
        self._arm()
        while any(self._runs.get(run.group.key) is run for run in runs):  # noqa: ASYNC110 - ends with the next round:
            await asyncio.sleep(0)  # every future is resolved, so each generate() is about to return

    async def pause(self, mode: PauseMode) -> None:
        """See GenerationEngine. A ``wait`` that is cancelled leaves the engine running."""
        await self._gate()
        model = self._play()
        if mode == "wait":
            model = await self._drain()
        self._paused = True
        model.pause(model.now)
        if mode == "abort":
            await self.abort(None)
        self._arm()

    async def resume(self) -> None:
        """See GenerationEngine."""
        await self._gate()
        self._require_resident("resume")
        if self._update is not None:
            raise InternalError("resume in the middle of a weight update: the weights are of two versions")
        self._paused = False
        model = self._play()
        model.resume(model.now, recompute_kv=self._recompute)
        self._recompute = False
        self._let_in()

    async def sleep(self) -> None:
        """See GenerationEngine. Takes ``sleep_s``."""
        await self._gate()
        if self._runs:
            raise InternalError(
                f"sleep with {len(self._runs)} groups on the engine ({', '.join(self._runs)}): abort first"
            )
        self._paused = True
        self._filled = False
        model = self._play()
        model.pause(model.now)
        await self._spend(self._config.sleep_s)
        self._weights = self._kv = False

    async def wake_weights(self) -> None:
        """See GenerationEngine. Takes ``wake_s``, the whole cost of waking."""
        await self._gate()
        if self._weights:
            raise InternalError("wake_weights on an engine that is not asleep")
        await self._spend(self._config.wake_s)
        self._weights = True
        self._filled = False

    async def wake_kv(self) -> None:
        """See GenerationEngine. Takes no time of its own."""
        await self._gate()
        if not self._weights or not self._filled:
            raise InternalError("wake_kv before the weights were refilled: they are NaN until finish_update")
        self._kv = True

    async def begin_update(self, specs: Sequence[TensorSpec]) -> None:
        """``specs``: EMULATED_SPECS, or nothing when no weights travel. Raises WeightSyncError for anything else."""
        await self._gate()
        if not self._weights or not self._paused:
            raise InternalError(f"begin_update on an engine that is {'not paused' if self._weights else 'asleep'}")
        if specs and tuple(specs) != EMULATED_SPECS:
            raise WeightSyncError(f"the emulated engine takes {EMULATED_SPECS} or nothing, was offered {tuple(specs)}")
        self._update = dict.fromkeys((spec.name for spec in specs), False)

    async def load_bucket(self, tensors: Mapping[str, Any]) -> None:
        """Note that they came. Raises WeightSyncError for a tensor that was not announced."""
        await self._gate()
        if self._update is None:
            raise InternalError("load_bucket outside begin_update ... finish_update")
        for name in tensors:
            if name not in self._update:
                raise WeightSyncError(f"tensor {name!r} was not announced; announced: {list(self._update)}")
            self._update[name] = True

    async def finish_update(self, version: WeightVersion, *, keep_kv: bool = False) -> None:
        """See GenerationEngine. Takes ``sync_s`` (standalone) or ``handover_s`` (hybrid). Raises WeightSyncError."""
        await self._gate()
        if self._update is None:
            raise InternalError("finish_update without begin_update")
        missing = [name for name, arrived in self._update.items() if not arrived]
        if missing:
            raise WeightSyncError(f"version {version}: tensors did not arrive: {missing}")
        hybrid = self._kind is ReplicaKind.HYBRID
        await self._spend(self._config.handover_s if hybrid else self._config.sync_s)
        self._update = None
        model = self._play()
        for run in self._runs.values():
            if not run.future.done() and run not in self._held:
                generated, in_batch = model.generated(run.group.key), model.in_batch(run.group.key)
                run.new_version(self._version, generated, [keep_kv and has_kv for has_kv in in_batch])
        self._recompute = self._recompute or not keep_kv
        self._version = version
        self._filled = True

    async def logprobs(self, sequences: Sequence[tuple[TokenArray, TokenArray]], temperature: float) -> list[Any]:
        """Zeros, as the emulated trainer gives."""
        await self._gate()
        if not self._weights or not self._filled:
            raise InternalError("logprobs before the weights were refilled: they are NaN until finish_update")
        return [ZEROS.logprobs(response.shape[0]) for _, response in sequences]

    def memory(self) -> EngineMemory:
        """The configured sizes of what is mapped."""
        return EngineMemory(self._bytes.weights_bytes if self._weights else 0, self._bytes.kv_bytes if self._kv else 0)

    @property
    def version(self) -> WeightVersion:
        """Version of the resident weights."""
        return self._version

    @property
    def progress(self) -> int:
        """Emulated tokens decoded and prefilled; stands still when hung or dead."""
        return 0 if self._model is None else int(self._model.work(self._now()))

    def unfinished(self, key: str) -> int:
        """Unfinished responses of a running group."""
        run = self._runs.get(key)
        return 0 if run is None or run.future.done() else run.left

    def running_sequences(self) -> int:
        """Sequences in the emulated batch."""
        return 0 if self._model is None else self._model.running

    def fault(self, kind: FaultKind, factor: float = 1.0) -> None:
        """Break on purpose (simulation tests).

        die: everything running and every later call raises WorkerDied. hang: nothing moves and every call waits
        until ``heal`` (callers have deadlines). slow: run at ``factor`` x the configured speed. heal: undo hang, slow.
        """
        model = self._play()
        if kind == "slow":
            model.set_speed(self._speed * factor, model.now)
        elif kind == "hang":
            self._hung = self._hung or asyncio.Event()
            model.pause(model.now)
        elif kind == "die":
            self._dead = f"emulated engine died at {model.now:.3f} s on the loop's clock (injected)"
            model.abort(model.now)
            for run in self._runs.values():
                if not run.future.done():
                    run.future.set_exception(WorkerDied(self._dead))
                    run.future.exception()  # seen: a caller that is being cancelled will not look
            self._held.clear()
        else:
            model.set_speed(self._speed, model.now)
            if self._hung is not None:
                self._hung.set()
                self._hung = None
                if not self._paused:
                    model.resume(model.now)
        self._arm()

    async def _gate(self) -> None:
        if self._hung is not None:
            await self._hung.wait()
        if self._dead:
            raise WorkerDied(self._dead)

    async def _spend(self, seconds: float) -> None:
        """Take time, and stick or die in it if that happens meanwhile."""
        await asyncio.sleep(seconds)
        await self._gate()

    def _now(self) -> float:
        if self._loop is None:
            raise InternalError("the emulated engine was used before start()")
        return self._loop.time()

    def _require_resident(self, what: str) -> None:
        if not (self._weights and self._filled and self._kv):
            if not self._weights:
                why = "it is asleep" if self._model is not None else "it was not started"
            elif not self._filled:
                why = "its weights were not refilled since the wake (or it falls asleep): they are NaN"
            else:
                why = "its KV cache is not mapped: wake_kv first"
            raise InternalError(f"{what} on an emulated {self._kind.value} replica that cannot run: {why}")

    def _enter(self, run: Run) -> None:
        """Hand a group to the timing model."""
        assert self._model is not None
        prompt = run.group.prompt_tokens.shape[0]
        run.began = self._wall()
        self._model.add(
            run.group.key, prompt_tokens=prompt, remaining=run.remaining, context=run.have, now=self._model.now
        )

    def _let_in(self) -> None:
        """Start what came while paused or draining."""
        self._play()
        held, self._held = self._held, []
        for run in held:
            self._enter(run)
        self._arm()

    async def _drain(self) -> ReplicaModel:
        """Hold newcomers and wait until what runs has finished."""
        waiting = [run.future for run in self._runs.values() if run not in self._held]
        self._draining = True
        self._arm()
        try:
            if waiting:
                await asyncio.wait(waiting)
        except BaseException:
            self._draining = False
            self._let_in()
            raise
        self._draining = False
        await self._gate()
        return self._play()

    def _take_out(self, run: Run) -> list[int]:
        """End a group that is not finished; tokens each of its slots produced here."""
        if run in self._held:
            self._held.remove(run)
            return [0] * len(run.slots)
        assert self._model is not None
        return self._model.remove(run.group.key, self._model.now)

    def _play(self) -> ReplicaModel:
        """Bring the model to now and hand out what finished.

        What follows in the same step uses ``model.now``: a real clock has moved on, and a finish must not slip in.
        """
        now = self._now()
        model = self._model
        assert model is not None
        for key, slot, _ in model.advance(now):
            run = self._runs[key]
            run.finished(slot, self._version, self._wall())
            if not run.left and not run.future.done():
                run.future.set_result(tuple(run.responses))
        return model

    def _arm(self) -> None:
        """Have the timer fire no later than the next finish. A timer set too early only costs one look."""
        assert self._model is not None and self._loop is not None
        due = self._model.next_event_time()
        if due == math.inf:
            self._disarm()
        elif self._timer is None or due < self._timer.when():
            self._disarm()
            self._timer = self._loop.call_at(due, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._play()
        self._arm()
