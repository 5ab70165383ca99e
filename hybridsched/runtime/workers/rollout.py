"""The rollout worker: runs leases on one engine, scores and seals finished samples, takes weights, sleeps and wakes.

Owns: running and parked leases of one replica and its segment writer. Invariants: a lease is running, parked, or gone,
never two of them; `LeaseParked` of every aborted lease is sent before the reply to the abort; a sample is told
*completed* before it is told *durable*, and only sealed rows are durable; nothing finished is dropped when the disk is
full. Does not decide who works on what: the controller does. Engine, clock, offload and services are handed in, so the
same class runs in a process and under virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace as m_replace

from hybridsched.engines.base import GenerationEngine, GroupRequest
from hybridsched.model import Response, Sample, Verdict
from hybridsched.rewards.scoring import overlong_penalty
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.plan import CONTROLLER
from hybridsched.runtime.workers.meter import DecodeMeter
from hybridsched.runtime.workers.sealing import Sealer, Writer

Scorer = Callable[[m.Lease, Sequence[Response]], Awaitable[list[tuple[float | None, str | None]]]]


class WeightReceiver(Protocol):
    """How weights reach the engine (gloo/nccl, shared memory, or emulated)."""

    async def receive(self, order: m.ReceiveWeights) -> m.SyncDone: ...
    async def read_handover(self, order: m.ReadHandover) -> m.SyncDone: ...
    def abort(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The part of the configuration this worker acts on."""

    agent: str
    min_responses: int
    reward_retries: int
    filter_groups: bool
    filter_metric: str
    seal_age_s: float
    space_retry_s: float
    beat_s: float
    overlong_buffer: int = 0  #: 0: no overlong shaping
    overlong_factor: float = 0.0


class _Run:
    """A lease in work."""

    def __init__(self, lease: m.Lease, started_s: float) -> None:
        self.lease = lease
        self.generating = True
        self.discard = False
        self.aborted = False  #: while its rewards were computed: responses to generate again are generated elsewhere
        self.parked: asyncio.Event = asyncio.Event()  # set when generation ended, one way or the other
        self.started_s = started_s


class RolloutWorker:
    """One replica."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        engine: GenerationEngine,
        writer: Writer,
        score: Scorer,
        receiver: WeightReceiver,
        clock: Clock,
        offload: Callable[..., Awaitable[object]],
        rss_bytes: Callable[[], int],
        settings: RolloutSettings,
    ) -> None:
        self.name = name
        self._endpoint = endpoint
        self._engine = engine
        self._meter = DecodeMeter(engine, clock)
        self._sealer = Sealer(endpoint, writer, clock, offload, settings.seal_age_s, settings.space_retry_s)
        self._score = score
        self._receiver = receiver
        self._clock = clock
        self._offload = offload
        self._rss = rss_bytes
        self._settings = settings
        self._phase = "idle"
        self._runs: dict[int, _Run] = {}
        self._parked: dict[int, m.Lease] = {}
        self._told_unfinished: dict[int, int] = {}
        self.started = False  #: the engine is up
        handlers: tuple[tuple[type, Any], ...] = (
            (m.StartEngine, self._start),
            (m.Lease, self._lease),
            (m.Handoff, self._handoff),
            (m.DropParked, self._drop_parked),
            (m.AbortLeases, self._abort),
            (m.PauseGeneration, self._pause),
            (m.ResumeGeneration, self._resume),
            (m.Flush, self._flush),
            (m.SleepEngine, self._sleep),
            (m.WakeEngine, self._wake),
            (m.ReceiveWeights, self._receive),
            (m.ReadHandover, self._read_handover),
            (m.AbortSync, self._abort_sync),
            (m.Probe, self._probe),
        )
        for kind, handler in handlers:
            endpoint.on(kind, handler)

    async def run(self) -> None:
        """Beat and seal by age until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat_forever(), name=f"{self.name} beats")
            group.create_task(self._sealer.run(), name=f"{self.name} seals")

    async def drain(self, deadline_s: float) -> None:
        """Orderly end: abort what runs, seal what is finished, free the engine."""
        async with asyncio.timeout(deadline_s):
            if self.started:
                await self._engine.abort(None)
            await self._sealer.seal("drain")
            await self._engine.shutdown()

    # --- leases ---------------------------------------------------------------------------------------------------

    def _lease(self, lease: m.Lease, _src: str) -> None:
        run = _Run(lease, self._clock.now())
        self._runs[lease.lease] = run
        self._endpoint.spawn(self._run_lease(run), f"{self.name} lease {lease.lease}")

    async def _run_lease(self, run: _Run) -> None:
        lease = run.lease
        try:
            responses = await self._generate(run)
            if responses is not None:
                self._complete(run, responses)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - reported to the controller, which issues the sample again
            self._endpoint.tell(CONTROLLER, m.LeaseFailed(lease.lease, f"{type(error).__name__}: {error}"))
        finally:
            run.generating = False
            run.parked.set()
            self._runs.pop(lease.lease, None)
            self._told_unfinished.pop(lease.lease, None)

    async def _generate(self, run: _Run) -> tuple[Response, ...] | None:
        """All responses finished and scored, or None when parked."""
        lease = run.lease
        responses = lease.partials or (Response.empty(),) * lease.params.n
        retry = lease.retry
        while True:
            run.generating = True
            self._meter.enter(str(lease.lease), lease.prompt_tokens.shape[0], responses)
            responses = await self._engine.generate(
                GroupRequest(
                    key=str(lease.lease),
                    sample_uid=lease.sample_uid,
                    prompt_tokens=lease.prompt_tokens,
                    params=lease.params,
                    partials=responses,
                    response_offset=retry * lease.params.n,
                )
            )
            run.generating = False
            self._meter.leave(str(lease.lease))
            if any(not r.finished for r in responses):
                self._park(run, responses, retry)
                return None
            run.parked.set()
            responses = await self._scored(lease, responses)
            failed = [r for r in responses if r.failure is not None]
            if not failed or retry >= self._settings.reward_retries:
                return responses
            retry += 1
            responses = tuple(Response.empty() if r.failure is not None else r for r in responses)
            if run.aborted:
                self._park(run, responses, retry)
                return None
            run.parked.clear()

    def _park(self, run: _Run, responses: tuple[Response, ...], retry: int) -> None:
        if run.discard:
            responses = tuple(r if r.finished else Response.empty() for r in responses)
        lease = run.lease
        unfinished = sum(not r.finished for r in responses)
        tokens = sum(r.n_tokens for r in responses)
        self._parked[lease.lease] = m_replace(lease, partials=responses, retry=retry)
        self._endpoint.tell(CONTROLLER, m.LeaseParked(lease.lease, unfinished, tokens))

    async def _scored(self, lease: m.Lease, responses: tuple[Response, ...]) -> tuple[Response, ...]:
        todo = [i for i, r in enumerate(responses) if r.reward is None and r.failure is None]
        if not todo:
            return responses
        scores = await self._score(lease, [responses[i] for i in todo])
        out = list(responses)
        for index, (reward, failure) in zip(todo, scores, strict=True):
            if reward is not None and lease.purpose == "train":
                reward += self._overlong(out[index].n_tokens, lease.params.max_new_tokens)
            out[index] = out[index].with_reward(reward, failure)
        return tuple(out)

    def _overlong(self, n_tokens: int, budget: int) -> float:
        """Added to the reward: 0 without overlong shaping."""
        buffer = self._settings.overlong_buffer
        return overlong_penalty(n_tokens, budget, buffer, self._settings.overlong_factor) if buffer else 0.0

    def _complete(self, run: _Run, responses: tuple[Response, ...]) -> None:
        lease = run.lease
        verdict, reason = self._verdict(responses, lease)
        versions = [v.version for r in responses for v in r.version_runs] or [self._engine.version]
        self._endpoint.tell(
            CONTROLLER,
            m.SampleCompleted(
                lease=lease.lease,
                sample_uid=lease.sample_uid,
                verdict=verdict,
                rewards=[r.reward for r in responses],
                n_tokens=[r.n_tokens for r in responses],
                oldest=min(versions),
                newest=max(versions),
                reason=reason,
                generation_s=self._clock.now() - run.started_s,
                version_span=max(len({v.version for v in r.version_runs}) for r in responses),
                decode=self._meter.report(),
            ),
        )
        if verdict == "" and lease.purpose == "train":
            self._store(lease, responses)

    def _verdict(self, responses: tuple[Response, ...], lease: m.Lease) -> tuple[str, str]:
        rewards = [r.reward for r in responses if r.reward is not None]
        needed = min(self._settings.min_responses, lease.params.n)
        if len(rewards) < needed:
            why = next((r.failure for r in responses if r.failure), "no reward")
            return Verdict.FAILED.value, f"{len(rewards)} of {lease.params.n} responses have a reward: {why}"
        if self._settings.filter_groups and lease.purpose == "train":
            by_length = self._settings.filter_metric == "response_length"
            values = [float(r.n_tokens) for r in responses] if by_length else rewards
            if max(values) == min(values):
                return Verdict.FILTERED.value, f"{self._settings.filter_metric} is {values[0]:g} for all responses"
        return "", ""

    def _store(self, lease: m.Lease, responses: tuple[Response, ...]) -> None:
        self._sealer.add(
            Sample(
                sample_uid=lease.sample_uid,
                prompt_uid=lease.prompt_uid,
                prompt_tokens=lease.prompt_tokens,
                responses=responses,
                data_source=lease.data_source,
                ground_truth=lease.ground_truth,
                extra_info=lease.extra_info,
                epoch=lease.epoch,
                issue=lease.issue,
            )
        )

    # --- aborting and moving --------------------------------------------------------------------------------------

    def _handoff(self, order: m.Handoff, _src: str) -> None:
        parked = self._parked.pop(order.old_lease, None)
        if parked is None:
            self._endpoint.tell(CONTROLLER, m.LeaseLost(order.old_lease, order.lease))
            return
        moved = m_replace(parked, lease=order.lease)
        if order.dst == self.name:
            self._lease(moved, self.name)
        else:
            self._endpoint.tell(order.dst, moved)

    def _drop_parked(self, order: m.DropParked, _src: str) -> None:
        for lease in order.leases:
            self._parked.pop(lease, None)

    async def _abort(self, order: m.AbortLeases, _src: str) -> None:
        named = [run for key, run in self._runs.items() if order.leases is None or key in order.leases]
        wanted = [run for run in named if run.generating]
        for run in named:
            run.aborted = True
        if order.drain_s > 0:
            wanted = await self._drained(wanted, order.drain_s)
        for run in wanted:
            run.discard = order.discard
        if wanted:
            self._meter.stop()
            await self._engine.abort([str(run.lease.lease) for run in wanted])
        for run in wanted:
            await run.parked.wait()

    async def _drained(self, runs: list[_Run], drain_s: float) -> list[_Run]:
        """Wait for generations to end by themselves; returns those still running at the deadline."""
        try:
            async with asyncio.timeout(drain_s):
                for run in runs:
                    await run.parked.wait()
        except TimeoutError:
            return [run for run in runs if run.generating]
        return []

    async def _pause(self, order: m.PauseGeneration, _src: str) -> None:
        self._phase = "sync"
        running = [run for run in self._runs.values() if run.generating]
        if order.mode == "wait":
            try:
                async with asyncio.timeout(order.drain_s):
                    await self._engine.pause("wait")
                return
            except TimeoutError:
                running = [run for run in self._runs.values() if run.generating]
        for run in running:
            run.discard = order.discard
        self._meter.stop()
        await self._engine.pause("keep" if order.mode == "keep" else "abort")
        if order.mode != "keep":
            for run in running:
                await run.parked.wait()

    async def _resume(self, _order: m.ResumeGeneration, _src: str) -> None:
        await self._engine.resume()
        self._meter.skip()
        self._phase = "decode"

    # --- engine ---------------------------------------------------------------------------------------------------

    async def _start(self, _order: m.StartEngine, _src: str) -> m.MemoryReport:
        self._phase = "starting"
        await self._engine.start()
        self.started = True
        self._phase = "idle"
        return self._memory()

    async def _sleep(self, _order: m.SleepEngine, _src: str) -> m.MemoryReport:
        self._phase = "switch"
        before = self._rss()
        await self._sealer.seal("before sleep")
        await self._engine.sleep()
        self._phase = "asleep"
        report = self._memory()
        return m_replace(report, freed_bytes=before - report.rss_bytes)

    async def _wake(self, order: m.WakeEngine, _src: str) -> m.MemoryReport:
        self._phase = "switch"
        await (self._engine.wake_weights() if order.stage == "weights" else self._engine.wake_kv())
        return self._memory()

    def _memory(self) -> m.MemoryReport:
        held = self._engine.memory()
        return m.MemoryReport(held.weights_bytes, held.kv_bytes, self._rss())

    async def _receive(self, order: m.ReceiveWeights, _src: str) -> m.SyncDone:
        self._phase = "sync"
        return await self._receiver.receive(order)

    async def _read_handover(self, order: m.ReadHandover, _src: str) -> m.SyncDone:
        self._phase = "switch"
        return await self._receiver.read_handover(order)

    def _abort_sync(self, order: m.AbortSync, _src: str) -> None:
        self._receiver.abort(order.reason)

    async def _probe(self, order: m.Probe, _src: str) -> m.ProbeResult:
        return m.ProbeResult(await self._engine.logprobs(order.sequences, order.temperature))

    # --- segments -------------------------------------------------------------------------------------------------

    async def _flush(self, order: m.Flush, _src: str) -> None:
        await self._sealer.seal(order.reason)

    # --- beat -----------------------------------------------------------------------------------------------------

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.beat_s)
            self._meter.look()
            self._endpoint.tell(self._settings.agent, m.Beat(self._now_phase(), self._engine.progress, self._changed()))

    def _now_phase(self) -> str:
        if self._phase in ("decode", "idle"):
            return "decode" if any(run.generating for run in self._runs.values()) else "idle"
        return self._phase

    def _changed(self) -> dict[int, int]:
        """Unfinished responses per lease where the number changed since it was last told."""
        changed: dict[int, int] = {}
        for key, run in self._runs.items():
            count = self._engine.unfinished(str(key)) if run.generating else 0
            if self._told_unfinished.get(key, run.lease.params.n) != count:
                self._told_unfinished[key] = changed[key] = count
        return changed
