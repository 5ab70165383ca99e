"""The controller: the training cycle of DESIGN.md section 6, on rank 0.

Owns: the order of things in a cycle (lend, collect, train, sync, decide), the weight version and its lineages, and
where the policy is asked. Invariants: every wait ends; a collection is trained only when every trainer GPU is the
trainer's; the policy's `update_after_step` runs once per version; metrics belong to the cycle that produced them.
What it orders is carried out by Rollouter, Intake, WeightSynchronizer, DynamicResourceController and Fleet.
"""

from __future__ import annotations

import asyncio

from hybridsched.errors import FaultError, Interrupted, RequeueRequested
from hybridsched.model import SegmentId, Verdict, WeightVersion
from hybridsched.runtime import messages as m
from hybridsched.runtime.collector import Collector, CutShort, Hooks
from hybridsched.runtime.cycle_record import CollectionRecord, CycleRecord, RunSummary, Static, metrics
from hybridsched.runtime.lending import Lending
from hybridsched.runtime.parts import Parts
from hybridsched.runtime.recovery import Recovery
from hybridsched.runtime.space import watch_space
from hybridsched.runtime.stall import StallWatch
from hybridsched.runtime.validation import Validation
from hybridsched.scheduling.cycle import end_of_data, last_collection_action


class Controller:
    """One run."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._s = parts.services
        self._config = parts.services.config
        self._d = parts.services.derived
        self._lending = Lending(parts)
        self._validation = Validation(parts)
        self._recovery = Recovery(parts)
        self._stall = StallWatch(self._d.step_required_samples, self._config.reward.max_failed_fraction)
        self._announced = 0  # segments
        self._collector = Collector(
            parts, self._lending, Hooks(self._check, lambda: self._cycle, self._status, self._activity)
        )
        self._cycles = 0
        self._began = 0.0
        self._cycle = CycleRecord(WeightVersion(0, 0), self._s.clock.now())
        self._static = Static(
            a=self._d.n_trainer_gpus,
            b=self._d.n_rollout_gpus,
            required_samples=self._d.required_samples,
            max_required_samples=self._d.max_required_samples,
            staleness_threshold=self._config.async_training.staleness_threshold,
            max_concurrent_samples=self._d.concurrency_with_hybrids,
        )
        self._s.endpoint.on(m.SampleCompleted, self._on_completed)
        self._s.endpoint.on(m.SegmentSealed, self._on_sealed)
        self.parts.rollouter.on_verdict = self._stall.without_row

    async def run(self, resume_from: str | None = None) -> RunSummary:
        """From start-up to the last checkpoint. Raises what ended the run otherwise."""
        parts = self.parts
        self._began = self._s.clock.now()
        spawn = self._s.endpoint.spawn  # what one of them raises ends the run (fail)
        background = [
            spawn(parts.fleet.watch(), "watching agents"),
            spawn(parts.intake.scribe(self._config.queue.retry_s), "scribe of accept log and ledger"),
            spawn(self._scan_forever(), "looking for unannounced segments"),
            spawn(self._measure_lag(), "measuring event-loop lag"),
            spawn(watch_space(parts), "watching free space"),
        ]
        try:
            await parts.fleet.start_engines()
            await parts.fleet.start_trainers(resume_from)
            if resume_from is not None:
                await self._recovery.restore(resume_from)
            reason = await self._loop()
            await self._close(reason)
            return self._summary(reason)
        except (Interrupted, RequeueRequested) as asked:
            await self._stop_orderly(str(asked))
            raise
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    def fail(self, error: BaseException, where: str) -> None:
        """A handler or task of the controller raised: the run ends with it, it is never swallowed."""
        self.parts.log.event("fault", "controller", new=type(error).__name__, reason=f"{where}: {error}")
        if self.parts.fleet.fatal is None:
            self.parts.fleet.fatal = error
        self.parts.changed.notify()

    async def _loop(self) -> str:
        """Cycle after cycle; a trainer group that goes down, wherever, is brought back from the last checkpoint."""
        step = self._open
        while True:
            try:
                reason = await step()
            except FaultError:
                down = self.parts.fleet.trainer_down is not None and self.parts.fleet.fatal is None
                if not down or not self._s.checkpoints.complete():
                    raise
                step = self._come_back
                continue
            if reason:
                return reason
            step = self._one_cycle

    async def _come_back(self) -> str:
        await self._recovery.trainer_group(self._cycle)
        await self._sync_point(checkpoint=False, bump=False)
        return ""

    # --- opening and closing --------------------------------------------------------------------------------------

    async def _open(self) -> str:
        """First sync, decision, activation. A resume validates again where that is due: a stop may have cut it off."""
        self._status("first weight sync")
        validate = self._config.trainer.val_before_train if self.parts.version.number == 0 else None
        await self._sync_point(checkpoint=self.parts.version == WeightVersion(0, 0), bump=False, validate=validate)
        return ""

    async def _close(self, reason: str) -> None:
        """The last short cycle is synced, validated and checkpointed; nothing is lent any more."""
        parts = self.parts
        if parts.resources.is_active:
            await parts.resources.deactivate("end of the run")
        await self._surplus()
        await parts.settled()
        parts.log.event("run", "run", new="finished", reason=reason)

    async def _stop_orderly(self, reason: str) -> None:
        """Checkpoint where we are: a begun cycle ends here as a version of its own, without a broadcast."""
        parts = self.parts
        parts.rollouter.paused = "the run stops"
        self._status("stopping")
        if parts.resources.is_active:
            await parts.resources.deactivate("the run stops")
        if self._cycle.collections:
            parts.version = WeightVersion(parts.version.lineage, parts.version.number + 1)
            parts.window.synced()
        if parts.version != self._recovery.saved:
            folder = await self._recovery.save_trainer(self._cycle)
            if folder is not None:
                await self._recovery.commit(folder, self._cycle)
        if self._cycle.collections:
            self._end_cycle(True)
        parts.log.event("run", "run", new="stopped", reason=reason)

    async def _surplus(self) -> None:
        """What is left over at the end gets its verdict, so that every sample that was issued has one."""
        parts = self.parts
        parts.rollouter.paused = "the run ends"
        await self._collector.flush_all("end of the run")
        parts.intake.closed = True
        await parts.settled()
        for row in list(parts.intake.queue):
            parts.intake.verdict(row.sample_uid, Verdict.SURPLUS, row=row)
        parts.intake.queue.clear()
        for uid in sorted({*parts.intake.completed, *parts.rollouter.unfinished_uids()}):
            parts.intake.verdict(uid, Verdict.SURPLUS, unfinished=True)

    # --- one cycle ------------------------------------------------------------------------------------------------

    async def _one_cycle(self) -> str:
        """K collections, one sync, one decision. Returns why the run is over, or ""."""
        parts = self.parts
        over = ""
        cut = ""
        for index in range(self._config.async_training.trigger_parameter_sync_step):
            self._stop_if_asked()
            record = CollectionRecord()
            began = self._s.clock.now()
            try:
                if parts.resources.is_active:
                    await self._take_back()
                over = await self._collect_and_train(record, index)
            except CutShort as why:
                cut = str(why)
            record.allocated_s = self._s.clock.now() - began - self._lending.wait_since(began)
            if record.samples:
                self._cycle.collections.append(record)
            if over or cut:
                break
        if cut:
            parts.log.event("cycle", str(parts.version), new="cut short", reason=cut)
        limit = self._config.trainer.total_training_steps
        if not over and limit is not None and parts.version.number + 1 >= limit:
            over = f"trainer.total_training_steps = {limit}"
        await self._sync_point(checkpoint=None, bump=True, last=bool(over))
        return over

    async def _take_back(self) -> None:
        self._status("lending")
        if self._d.only_hybrid and self._validation.running:
            await self._validation.finish(self._cycle)
        await self._lending.take_back(self._cycle)

    async def _collect_and_train(self, record: CollectionRecord, index: int) -> str:
        """Wait for R samples and train on them. Returns why the run is over, or ""."""
        parts = self.parts
        while True:
            rows, target = await self._collector.collect(record)
            if target.short and rows and last_collection_action(len(rows), self._d.data_parallel_size) == "surplus":
                for row in rows:
                    parts.window.verdict(row.sample_uid, Verdict.SURPLUS)
                    parts.intake.verdict(row.sample_uid, Verdict.SURPLUS, row=row)
                rows = []
            if not rows:
                return "end of data"
            if await self._collector.train(rows, record, index):
                break
        if end_of_data(parts.rollouter.prompts_left(), parts.rollouter.in_flight(), parts.intake.available()):
            return "end of data"
        return ""

    # --- sync, decision -------------------------------------------------------------------------------------------

    async def _sync_point(
        self, *, checkpoint: bool | None, bump: bool, last: bool = False, validate: bool | None = None
    ) -> None:
        """Weight sync, checkpoint, decision, metrics, validation. checkpoint None: when due."""
        parts, trainer = self.parts, self._config.trainer
        if self._validation.running:
            await self._validation.finish(self._cycle)
        if bump:
            await self._lending.wait_for_old(self._cycle)
            parts.version = WeightVersion(parts.version.lineage, parts.version.number + 1)
            parts.window.synced()
        self._status("weight sync")
        self._activity("sync")
        await self._lending.sync(self._cycle, last=last)
        await parts.trainers_same(
            m.BeginCycle(parts.version), m.Ok, self._config.deadlines.switch_s, "beginning a cycle"
        )
        self._activity("wait")
        number = parts.version.number
        due = last or (trainer.save_freq > 0 and number > 0 and number % trainer.save_freq == 0)
        folder = await self._recovery.save_trainer(self._cycle) if (due if checkpoint is None else checkpoint) else None
        await self._lending.decide(self._cycle, last=last)
        if folder is not None:
            await self._recovery.commit(folder, self._cycle)
        if validate is None:
            validate = (last and trainer.val_at_end) or (trainer.test_freq > 0 and number % trainer.test_freq == 0)
        if validate and self._s.validation_prompts:
            await self._validate(wait=last or number == 0 or self._d.only_hybrid)
        self._end_cycle(bump)

    async def _validate(self, *, wait: bool) -> None:
        """Validate on the version just synced; hybrids help where nobody else can, or where the user wants it."""
        resources = self.parts.resources
        helped = False
        if not resources.is_active and (self._d.only_hybrid or self._config.async_training.use_trainer_do_validate):
            helped = await resources.activate(self.parts.version, None, "validation", record=False)
        self._validation.start()
        if wait or helped:
            await self._validation.finish(self._cycle)
        if helped:
            await resources.deactivate("validation is done", record=False)

    def _end_cycle(self, counted: bool) -> None:
        parts = self.parts
        cycle = self._cycle
        cycle.ended = self._s.clock.now()
        cycle.u_rollout = parts.capacity.utilization(cycle.ended)
        cycle.rollout_active_s = parts.capacity.active_time_s(cycle.ended)
        parts.capacity.roll(cycle.ended)
        cycle.gpu_seconds = parts.tenancy.roll(cycle.ended)
        cycle.generated = parts.rollouter.generated
        if counted:
            self._cycles += 1
            values = metrics(cycle, self._static, parts.gauges())
            parts.log.metrics(parts.version.number, values)
            self._status("cycle done", values)
        parts.rollouter.generated = 0
        self._cycle = CycleRecord(parts.version, cycle.ended)
        self._lending.new_cycle()
        if self._s.audit is not None:
            self._s.audit()

    # --- events ---------------------------------------------------------------------------------------------------

    def _on_completed(self, done: m.SampleCompleted, src: str) -> None:
        parts = self.parts
        flight = parts.rollouter.on_completed(done, src)
        if flight is not None and flight.purpose.value == "train":
            if not done.verdict:
                self._stall.good()
            cycle = self._cycle
            cycle.generation_s.append(self._s.clock.now() - flight.admitted_at)
            parts.service_s.append(flight.served_s)
            parts.decode.append(done.decode)
            cycle.spans.append(done.version_span)
            cycle.note_decode(src.partition(".")[0], done.decode)
            cycle.rewards.extend(r for r in done.rewards if r is not None)
            cycle.lengths.extend(done.n_tokens)
            if done.verdict:
                cycle.verdicts[done.verdict] += 1
        parts.rollouter.pump()
        parts.changed.notify()

    def _on_sealed(self, sealed: m.SegmentSealed, _src: str) -> None:
        parts = self.parts
        segment = SegmentId(*sealed.segment)
        parts.log.event(
            "segment", str(segment), new="sealed", reason=sealed.reason, rows=len(sealed.rows), n_bytes=sealed.n_bytes
        )
        self._announced += 1
        parts.accept(segment, sealed.rows)
        parts.changed.notify()

    # --- watching -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self.parts.fleet.check()
        self._stop_if_asked()
        self._stall.check()

    def _stop_if_asked(self) -> None:
        kind = self._s.stop.kind
        if kind == "stop":
            raise Interrupted("stopped as asked; everything finished is on disk, go on with --resume")
        if kind == "requeue":
            raise RequeueRequested("time limit or preemption")

    async def _scan_forever(self) -> None:
        """Directory listing as fallback for lost announcements: only after a while without one."""
        while True:
            announced = self._announced
            await asyncio.sleep(self._config.queue.scan_s)
            waiting = self.parts.intake.completed or self.parts.rollouter.in_flight()
            if waiting and announced == self._announced:
                await self.parts.find_unannounced(None)

    async def _measure_lag(self) -> None:
        period = self._s.beat_s
        while True:
            before = self._s.clock.now()
            await asyncio.sleep(period)
            lag = self._s.clock.now() - before - period
            self._cycle.lag_s = max(self._cycle.lag_s, lag)
            if lag > 1.0:
                self.parts.log.event("fault", "controller", new="event loop lag", reason=f"{lag:.2f} s")

    # --- telling --------------------------------------------------------------------------------------------------

    def _activity(self, what: str) -> None:
        if self.parts.resources.is_active:
            return
        for w in self.parts.plan.of_kind("trainer"):
            self.parts.log.event("activity", w.worker, new=what)

    def _status(self, phase: str, values: dict[str, float] | None = None) -> None:
        parts = self.parts
        self._s.on_status(
            {
                "phase": phase,
                "version": parts.version.number,
                "queue": parts.intake.available(),
                "in_flight": parts.rollouter.in_flight(),
                "tenant": "hybrid" if parts.resources.is_active else "trainer",
                "trained": parts.trained,
                "decision": self._lending.last_decision,
                "elapsed_s": self._s.clock.now() - self._began,
                "metrics": values or {},
            }
        )

    def _summary(self, reason: str) -> RunSummary:
        parts = self.parts
        return RunSummary(
            version=parts.version,
            cycles=self._cycles,
            trained=parts.trained,
            activations=parts.resources.activations,
            deactivations=parts.resources.deactivations,
            skipped_syncs=self._lending.skipped_syncs,
            wall_clock_s=self._s.clock.now() - self._began,
            reason=reason,
        )
