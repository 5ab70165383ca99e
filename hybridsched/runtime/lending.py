"""When the policy is asked, what it is told, and what its answers come to (DESIGN.md section 6, steps 1, 3, 4, 5).

Owns: the policy's context, waiting while hybrids are lent, the decision after a sync, and rebalancing. Invariants: for
any answer of any policy every wait ends (targets are capped by what is reachable and re-evaluated on every change);
every decision is an event with its reason; `update_after_step` runs once per version.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

from hybridsched.model import Purpose, ReplicaKind, WeightVersion
from hybridsched.runtime import messages as m
from hybridsched.runtime.cycle_record import CycleRecord
from hybridsched.runtime.flights import leases_to_move
from hybridsched.runtime.parts import Parts
from hybridsched.scheduling.cycle import (
    Decision,
    activate_decision,
    ask,
    ask_lend_count,
    buffer_samples,
    deactivate_decision,
    deactivate_target,
    deactivation_forced,
    expected_samples,
    reachable,
)
from hybridsched.scheduling.load import fit_load
from hybridsched.scheduling.policy import DynamicScheduleContext
from hybridsched.scheduling.staleness import due_before_sync

#: compat: peer: period at which it looks whether enough samples are there.
PEER_POLL_S = 1.0


class RebalanceIntent:
    """What a policy sees as ``self._rollouter``: it notes the wish, the controller carries it out."""

    def __init__(self) -> None:
        self.wanted = False

    def rebalance_requests(self) -> None:
        """Spread requests anew. Returns at once."""
        self.wanted = True


class Lending:
    """The policy in the loop."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts
        self._s = parts.services
        self._config = parts.services.config
        self._d = parts.services.derived
        self._policy = parts.services.policy
        self._intent = RebalanceIntent()
        self._policy._rollouter = self._intent
        self._peer = self._config.async_training.compat == "peer"
        self._wait_times: list[float] = []
        self._wait_samples: list[int] = []
        self._waits: list[tuple[float, float]] = []
        self._train_s: deque[float] = deque(maxlen=self._config.async_training.trigger_parameter_sync_step)
        self._sync_s = 0.0
        self._lent_at = 0.0
        self._updated: WeightVersion | None = None
        self.skipped_syncs = 0
        self.last_decision = ""

    # --- what the policy is told ----------------------------------------------------------------------------------

    def note_wait_begin(self, samples: int) -> None:
        """A collection begins and really has to wait for so many samples."""
        self._wait_samples.append(samples)

    def note_wait_end(self, seconds: float) -> None:
        """... and had to wait so long (sealing excluded)."""
        self._wait_times.append(seconds)

    def note_trained(self, seconds: float) -> None:
        """A collection was loaded and trained on in so long."""
        self._train_s.append(seconds)

    def new_cycle(self) -> None:
        """A cycle ended."""
        self._wait_times, self._wait_samples, self._waits = [], [], []

    def wait_since(self, t: float) -> float:
        """Seconds of lending that began at or after ``t``."""
        return sum(seconds for began, seconds in self._waits if began >= t)

    def context(self) -> DynamicScheduleContext:
        """Fresh numbers for the policy."""
        p, d = self._p, self._d
        number = p.version.number
        available = p.intake.available()
        resources, now = p.resources, p.clock.now()
        return DynamicScheduleContext(
            required_samples=d.required_samples,
            trigger_parameter_sync_step=self._config.async_training.trigger_parameter_sync_step,
            # Whole cycles count as trained even when one was cut short: the surplus is the queue, and cannot drift.
            total_generated_samples=d.step_required_samples * number + available,
            expected_samples=expected_samples(d.step_required_samples, number),
            buffer_samples=buffer_samples(d.step_required_samples, self._config.async_training.staleness_threshold),
            step_wait_times=list(self._wait_times),
            step_wait_samples=list(self._wait_samples),
            only_hybrid=d.only_hybrid,
            last_activate_duration_s=resources.last_activate_s,
            last_deactivate_duration_s=resources.last_deactivate_s,
            activations=resources.activations,
            deactivations=resources.deactivations,
            remaining_samples=p.rollouter.prompts_left(),
            queue_size=available,
            in_flight=p.rollouter.in_flight(),
            hybrid_replicas=len(resources.lendable()) + len(resources.lent),
            standalone_replicas=len(p.pool.ready(ReplicaKind.STANDALONE)),
            weight_version=number,
            now_s=now,
            window_room=p.window.room(),
            lent_replicas=len(p.pool.ready(ReplicaKind.HYBRID)),
            samples_per_replica=self._config.async_training.concurrent_samples_per_replica,
            service_s=list(p.service_s),
            served_s=[f.served(now) for f in p.rollouter.flights() if f.purpose is Purpose.TRAIN],
            train_s=list(self._train_s),
            sync_s=self._sync_s,
            load=fit_load(p.service_s, p.decode, d.max_num_seqs),
        )

    # --- while hybrids are lent -----------------------------------------------------------------------------------

    async def take_back(self, cycle: CycleRecord) -> None:
        """Wait as long as the policy wants (and can be satisfied), then take the hybrids back."""
        p = self._p
        began = p.clock.now()
        decision = await self._keep_lending()
        if not decision.reason.startswith("tenancy"):
            reason = await self._wait_for_enough()
        else:
            reason = decision.reason
        waited = p.clock.now() - began
        cycle.wait_for_enough_s += waited
        self._waits.append((began, waited))
        before = p.clock.now()
        await p.resources.deactivate(reason)
        cycle.deactivate_s += p.clock.now() - before

    async def _keep_lending(self) -> Decision:
        """Ask should_deactivate before the collection and after each R newly generated samples."""
        p = self._p
        while True:
            answer, why = ask(
                lambda: self._policy.should_deactivate(p.version.number, True, self.context()), True, self._policy
            )
            decision = deactivate_decision(answer, self._forced(), why)
            self._note("deactivate", decision)
            if decision.go:
                return decision
            asked_at, generated = p.clock.now(), p.rollouter.generated
            while p.rollouter.generated - generated < self._d.required_samples:
                p.fleet.check()
                if self._forced().go:
                    break
                if not await p.changed.wait(self._left_s()):
                    break
            if p.clock.now() == asked_at and p.rollouter.generated == generated and not self._forced().go:
                await p.changed.wait(self._left_s())

    async def _wait_for_enough(self) -> str:
        """Wait until completed-and-unconsumed reaches the target; returns the reason of the deactivation."""
        p = self._p
        began = p.clock.now()
        ctx = self.context()
        answer, why = ask(
            lambda: self._policy.deactivate_wait_samples(ctx), self._d.step_required_samples, self._policy
        )
        while True:
            p.fleet.check()
            reach = reachable(
                p.intake.available(),
                p.rollouter.in_flight(),
                p.window.room(),
                p.rollouter.prompts_left(),
                p.pool.n_ready,
            )
            target = deactivate_target(
                answer,
                reach,
                step_required_samples=self._d.step_required_samples,
                only_hybrid=self._d.only_hybrid,
                policy_reason=why,
            )
            if p.intake.available() >= target.value:
                await self._poll(began)
                return f"{p.intake.available()} of {target.value} samples are there ({target.reason})"
            if self._left_s() <= 0 or not await p.changed.wait(self._left_s()):
                return f"tenancy: deadlines.lending_s, {p.intake.available()} of {target.value} samples are there"

    async def _poll(self, began: float) -> None:
        """compat: peer: enough samples are noticed only at the next poll, whole periods after ``began``."""
        waited = self._p.clock.now() - began
        if self._peer and waited > 0:
            await asyncio.sleep(math.ceil(waited / PEER_POLL_S) * PEER_POLL_S - waited)

    def _forced(self) -> Decision:
        p = self._p
        lending_s = self._config.deadlines.lending_s * self._config.deadlines.scale
        return deactivation_forced(
            window_room=p.window.room() + p.rollouter.in_flight(),
            prompts_left=p.rollouter.prompts_left() + p.rollouter.in_flight(),
            lent_for_s=p.clock.now() - self._lent_at,
            lending_s=lending_s,
            lent_replicas=len(p.pool.ready(ReplicaKind.HYBRID)),
        )

    def _left_s(self) -> float:
        lending_s = self._config.deadlines.lending_s * self._config.deadlines.scale
        return max(0.0, self._lent_at + lending_s - self._p.clock.now())

    # --- at the sync ----------------------------------------------------------------------------------------------

    async def wait_for_old(self, cycle: CycleRecord) -> None:
        """Strategy wait: samples one more sync would make too old are finished first, within drain_s."""
        training = self._config.async_training
        if training.max_off_policy_strategy != "wait" or training.max_off_policy_threshold is None:
            return
        p = self._p
        deadline = p.clock.now() + self._config.deadlines.drain_s * self._config.deadlines.scale
        oldest = p.rollouter.oldest_versions()
        due = due_before_sync(oldest, p.version, p.forks, training.max_off_policy_threshold)
        while not set(due).isdisjoint(p.rollouter.unfinished_uids()):
            left = deadline - p.clock.now()
            p.fleet.check()
            if left <= 0 or not p.pool.ready() or not await p.changed.wait(left):
                break
        cycle.verdicts["waited_for_age"] += len(due)

    async def sync(self, cycle: CycleRecord, *, last: bool) -> None:
        """Broadcast the current version to standalone replicas; admission rests meanwhile."""
        p = self._p
        p.rollouter.paused = "weight sync"
        cycle.sync = await p.synchronizer.sync(p.version)
        self._sync_s = cycle.sync.seconds
        if last:
            p.rollouter.paused = "end of the run"
        elif not self._peer:
            p.rollouter.paused = ""

    async def decide(self, cycle: CycleRecord, *, last: bool) -> None:
        """Ask whether to lend, lend, rebalance, let the policy learn."""
        p = self._p
        ctx = self.context()
        answer, why = ask(
            lambda: self._policy.should_activate_after_step(p.version.number, False, ctx), False, self._policy
        )
        decision = activate_decision(
            answer,
            hybrids=len(p.resources.lendable()),
            in_flight=p.rollouter.in_flight(),
            window_room=p.window.room(),
            prompts_left=0 if last else p.rollouter.prompts_left(),
            only_hybrid=self._d.only_hybrid,
            policy_reason=why,
        )
        if last:
            decision = Decision(False, "end of the run")
        self._note("activate", decision)
        if decision.go:
            await self._lend(cycle, ctx, decision.reason)
        elif self._d.n_hybrid_replicas and not last:
            self.skipped_syncs += 1
            p.log.event("sync", str(p.version), new="second sync skipped", reason=decision.reason)
        p.rollouter.reserve = p.rollouter.reserve_new = 0
        if self._peer and not last:
            p.rollouter.paused = ""  # the peer starts new samples only after hybrids have joined
        p.rollouter.pump()
        if self._updated != p.version:
            self._updated = p.version
            number = p.version.number
            ask(lambda: self._policy.update_after_step(number, self.context()), None, self._policy)

    async def _lend(self, cycle: CycleRecord, ctx: DynamicScheduleContext, reason: str) -> None:
        p = self._p
        count = ask_lend_count(self._policy, ctx)
        before = p.clock.now()
        self._lent_at = before
        cycle.activated = await p.resources.activate(p.version, count.value, f"{reason}; {count.reason}")
        cycle.activate_s = p.clock.now() - before
        self._lent_at = p.clock.now()
        cycle.lent = len(p.resources.lent)
        cycle.lent_share = cycle.lent / max(1, self._d.n_hybrid_replicas)
        if cycle.activated and self._config.async_training.dynamic_schedule_enable_rebalance:
            ask(lambda: self._policy.request_rebalance(p.version.number, self.context()), None, self._policy)
        p.rollouter.reserve = p.rollouter.reserve_new = 0
        if self._intent.wanted:
            self._intent.wanted = False
            await self._rebalance()

    async def _rebalance(self) -> None:
        """Even the load: after an abort it is even already; with kept requests only enough leases are moved."""
        p = self._p
        p.balancer.clear_sticky()
        if self._d.sync_mode == "abort" and not self._peer:
            p.rollouter.pump()
            p.log.event("switch", "pool", new="rebalanced", reason="parked requests go to the least loaded")
            return
        victims = leases_to_move(p.rollouter.flights(), p.balancer, everything=self._peer)
        p.log.event("switch", "pool", new="rebalanced", reason=f"{sum(map(len, victims.values()))} leases moved")
        bound = self._config.deadlines.call_s * self._config.deadlines.scale
        for replica, leases in victims.items():
            order = m.AbortLeases(leases)
            try:
                await self._s.endpoint.call(replica, order, m.Ok, deadline_s=bound, what="rebalancing")
            except Exception as error:  # noqa: BLE001 - moving load is optional; the death itself is handled elsewhere
                p.log.event("fault", replica, new="rebalance failed", reason=str(error))
        p.rollouter.pump()

    def _note(self, question: str, decision: Decision) -> None:
        p = self._p
        self.last_decision = f"{question}: {'yes' if decision.go else 'no'} ({decision.reason})"
        detail: dict[str, Any] = {
            "version": p.version.number,
            "queue": p.intake.available(),
            "in_flight": p.rollouter.in_flight(),
            "window_room": p.window.room(),
        }
        ratio = getattr(self._policy, "deactivate_ratio", None)
        if isinstance(ratio, int | float):
            detail["ratio"] = float(ratio)
        p.log.event("decision", question, new="yes" if decision.go else "no", reason=decision.reason, **detail)
