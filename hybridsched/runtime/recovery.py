"""Checkpoints and coming back: resume of a run, and restart of the trainer group in place.

Owns: writing a checkpoint in two parts (trainer first, controller's part and publication after the decision), garbage
collection below the oldest resumable checkpoint, and restoring: a new lineage at the checkpoint's fork, both logs
forked at its positions, every durable row whose uid is not done queued again in accept order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridsched.errors import NoSpace, QueueError
from hybridsched.model import SampleRow, SegmentId, WeightVersion
from hybridsched.runtime import messages as m
from hybridsched.runtime.checkpoints import ControllerState, LogPosition
from hybridsched.runtime.cycle_record import CycleRecord
from hybridsched.runtime.frontier import Frontier
from hybridsched.runtime.parts import Parts
from hybridsched.sample_queue.ledger import accepted_ref


class Recovery:
    """Saving and restoring."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._s = parts.services
        self._config = parts.services.config
        self.saved: WeightVersion | None = None  #: of the newest checkpoint written by this process

    # --- saving ---------------------------------------------------------------------------------------------------

    async def save_trainer(self, cycle: CycleRecord) -> str | None:
        """The trainer's part, while its parameters are on the GPU. None when the disk is full (an event says so)."""
        p = self._p
        began = p.clock.now()
        folder: str = await self._s.offload(self._s.checkpoints.begin, p.version)
        try:
            await p.trainers_same(
                m.SaveCheckpoint(folder), m.Ok, self._config.deadlines.checkpoint_s, "writing a checkpoint"
            )
        except (NoSpace, QueueError) as error:
            await self._s.offload(self._s.checkpoints.discard, folder)
            p.log.event("fault", "checkpoint", new="not written", reason=str(error))
            return None
        cycle.save_s += p.clock.now() - began
        return folder

    async def commit(self, folder: str, cycle: CycleRecord) -> None:
        """Add the controller's part, publish, prune old ones, collect garbage below the oldest."""
        p = self._p
        began = p.clock.now()
        await p.settled()
        state = self._state()
        self._s.check_owner()
        try:
            ref = await self._s.offload(self._s.checkpoints.commit, folder, state)
        except (NoSpace, QueueError) as error:
            await self._s.offload(self._s.checkpoints.discard, folder)
            p.log.event("fault", "checkpoint", new="not written", reason=str(error))
            return
        self.saved = p.version
        p.log.event("checkpoint", str(p.version), new="written", reason=ref.folder)
        keep = self._config.trainer.max_actor_ckpt_to_keep
        left = await self._s.offload(self._s.checkpoints.prune, keep)
        await self._collect_garbage(left[0].folder if left else None)
        cycle.save_s += p.clock.now() - began

    def _state(self) -> ControllerState:
        p = self._p
        return ControllerState(
            run_id=self._s.run_id,
            version=p.version,
            forks=dict(p.forks),
            collections=p.collections,
            optimizer_steps=p.optimizer_steps,
            frontier_lowest=p.intake.frontier.lowest,
            frontier_above=p.intake.frontier.above,
            accept_log=LogPosition(p.incarnation, p.intake.accept_log.position),
            ledger=LogPosition(p.incarnation, p.intake.ledger.position),
            policy=type(self._s.policy).__name__,
            policy_state=self._s.policy.state_dict(),
            counts={
                "trained": p.trained,
                "activations": p.resources.activations,
                "deactivations": p.resources.deactivations,
                **{f"verdict_{k}": v for k, v in p.intake.counts.items()},
            },
            clock_s=p.clock.now(),
        )

    async def _collect_garbage(self, oldest: str | None) -> None:
        if oldest is None:
            return
        p = self._p
        state = await self._s.offload(self._s.checkpoints.load, oldest)
        if state.ledger.incarnation != p.incarnation:
            return  # positions of an older incarnation: its segments wait for the next checkpoint
        gone = p.intake.removable(state.ledger.position)
        if gone:
            freed = await self._s.offload(p.intake.store.remove, gone)
            p.intake.forget(gone)
            p.log.event("segment", "queue", new="collected", reason=f"{len(gone)} segments, {freed} bytes")

    # --- restoring ------------------------------------------------------------------------------------------------

    async def restore(self, folder: str) -> None:
        """The trainer is restored already; bring the controller to the checkpoint, on a new lineage."""
        p = self._p
        state: ControllerState = await self._s.offload(self._s.checkpoints.load, folder)
        rows = await self._all_rows()
        self._open_lineage(state, rows)
        p.collections, p.optimizer_steps = state.collections, state.optimizer_steps
        p.trained = state.counts.get("trained", 0)
        self._s.policy.load_state_dict(state.policy_state)
        p.incarnation = self._s.chains.new_incarnation()
        accepted = await self._accepted_chain(state)
        p.intake.accept_log, p.intake.ledger = p.open_chains(state.accept_log, state.ledger)
        p.intake.frontier = Frontier(state.frontier_lowest, state.frontier_above)
        queued = p.intake.restore(rows, [accepted_ref(entry)[1] for entry in accepted], state.accept_log.position)
        p.rollouter.forget_all("its sample is durable")
        p.rollouter.restart_at(state.frontier_lowest)
        p.window.restored(
            in_flight=[f.uid for f in p.rollouter.flights() if f.purpose.value == "train"] + p.rollouter.waiting(),
            queued=[*p.intake.waiting_uids(), *p.intake.completed],
        )
        p.synchronizer.forget_group()
        p.log.event(
            "run",
            "run",
            new="restored",
            reason=f"checkpoint {folder}",
            version=list(p.version),
            queued=queued,
            frontier=state.frontier_lowest,
        )

    def _open_lineage(self, state: ControllerState, rows: Mapping[SegmentId, Sequence[SampleRow]]) -> None:
        """A number no token on disk or in flight carries. Lineages that left no checkpoint were rolled back to here."""
        p, number = self._p, state.version.number
        seen = [row.newest.lineage for segment_rows in rows.values() for row in segment_rows]
        lineage = max([*state.forks, *p.forks, *seen, state.version.lineage]) + 1
        dead = dict.fromkeys(range(lineage), number)
        p.forks = {**dead, **p.forks, **state.forks, lineage: number}
        p.version = WeightVersion(lineage, number)

    async def _accepted_chain(self, state: ControllerState) -> list[dict[str, Any]]:
        """Order of acceptance: the checkpoint's chain, and what its incarnation accepted after it."""
        entries = await self._s.offload(self._s.chains.read, "accept", state.accept_log.incarnation)
        return list(entries)

    async def _all_rows(self) -> dict[SegmentId, Sequence[SampleRow]]:
        rows: dict[SegmentId, Sequence[SampleRow]] = {}
        for segment in await self._s.offload(self._p.intake.store.list):
            try:
                info = await self._s.offload(self._p.intake.store.info, segment)
            except QueueError as error:
                await self._p.intake.quarantine(segment, str(error))
                continue
            rows[segment] = info.rows
        return rows

    async def trainer_group(self, cycle: CycleRecord) -> None:
        """A trainer worker died: hybrids back to sleep, the group restarts from the last checkpoint, a new lineage."""
        p = self._p
        reason = p.fleet.trainer_down or "unknown"
        began = p.clock.now()
        p.log.event("fault", "trainer", new="group down", reason=reason)
        p.rollouter.paused = "the trainer group restarts"
        if p.resources.is_active:
            await p.resources.deactivate(f"trainer died: {reason}", load_trainer=False)
        p.resources.trainer_restarted()
        refs = await self._s.offload(self._s.checkpoints.complete)
        folder = refs[-1].folder
        await p.fleet.restart_trainers(folder)
        await p.settled()
        await self.restore(folder)
        cycle.began = p.clock.now()
        p.log.event("fault", "trainer", new="group restarted", reason=reason, seconds=p.clock.now() - began)
