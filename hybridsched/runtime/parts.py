"""The controller's parts, built once and wired together: who is told when something changes.

Owns: the weight version, its lineages and the run's counters; construction order; the callbacks between parts. No
decisions here: `controller.py`, `lending.py`, `recovery.py` and `validation.py` work with these parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from hybridsched.config.derived import collective_weights
from hybridsched.model import ReplicaKind, SampleRow, SamplingParams, SegmentId, Tenant, TokenArray, WeightVersion
from hybridsched.runtime import messages as m
from hybridsched.runtime.checkpoints import LogPosition
from hybridsched.runtime.fleet import Fleet, FleetSettings
from hybridsched.runtime.frontier import Frontier
from hybridsched.runtime.gather import all_or_raise
from hybridsched.runtime.intake import Intake
from hybridsched.runtime.pool import Pool
from hybridsched.runtime.resource_controller import DynamicResourceController, SwitchSettings
from hybridsched.runtime.rollouter import Rollouter
from hybridsched.runtime.services import Services
from hybridsched.runtime.signal import Signal
from hybridsched.runtime.synchronizer import SyncSettings, WeightSynchronizer
from hybridsched.sample_queue.base import ChainedLog
from hybridsched.scheduling.lifecycle import ReplicaState
from hybridsched.scheduling.load_balancer import LoadBalancer
from hybridsched.scheduling.staleness import StalenessWindow
from hybridsched.scheduling.utilization import CapacityIntegral, TenancyIntegral, rollout_capacity

R = TypeVar("R")

#: Completed samples whose time on replicas policies are told.
SERVICE_HISTORY = 256

#: compat: peer: seconds an aborted request sleeps before its client sends it again.
PEER_RETRY_S = 1.0


class Parts:
    """Everything the controller works with."""

    def __init__(self, services: Services) -> None:
        self.services = services
        config, derived = services.config, services.derived
        self.plan = services.plan
        self.log = services.log
        self.clock = services.clock
        self.changed = Signal()
        self.version = WeightVersion(0, 0)
        self.forks: dict[int, int] = {0: 0}
        self.collections = 0
        self.optimizer_steps = 0
        self.trained = 0
        self.service_s: deque[float] = deque(maxlen=SERVICE_HISTORY)
        self.decode: deque[dict[int, tuple[float, float, float, float]]] = deque(maxlen=SERVICE_HISTORY)
        self._s = config.async_training.concurrent_samples_per_replica
        self._n = config.actor_rollout_ref.rollout.n
        self.incarnation = services.chains.new_incarnation()
        self.window = StalenessWindow(derived.max_required_samples)
        capacity = self._s * self._n
        self._peer = config.async_training.compat == "peer"
        # What is started is bounded in total (DESIGN 5.1), not what a replica holds: partial responses of one that
        # leaves go on elsewhere at once, and the engine's own batch limit queues what does not fit yet.
        self.balancer = LoadBalancer(max_samples=None)
        val_n = config.actor_rollout_ref.rollout.val_kwargs.n
        self.validation_balancer = LoadBalancer(max_samples=max(1, capacity // val_n))
        self.pool = Pool(services.plan, (self.balancer, self.validation_balancer), capacity, services.log)
        accept_log, ledger = self.open_chains(None, None)
        self.intake = Intake(
            services.store,
            accept_log,
            ledger,
            Frontier(),
            services.offload,
            services.log,
            self.changed,
            describe=lambda uid: (services.prompts[uid].prompt_uid, services.prompts.epoch_of(uid)),
            when=lambda: (self.version, self.collections),
        )
        self.rollouter = self._build_rollouter(derived.total_samples)
        self.resources = self._build_resources()
        self.synchronizer = self._build_synchronizer()
        self.fleet = self._build_fleet()
        self.fleet.resources = self.resources
        now = services.clock.now()
        self.capacity = CapacityIntegral(now)
        self.tenancy = TenancyIntegral(now)
        for worker in services.plan.of_kind("trainer"):
            self.tenancy.switch(now, worker.worker, Tenant.TRAINER)
        self._activity: dict[str, str] = {}
        self.rollouter.current_version = lambda: self.version
        self.rollouter.on_active_change = self._on_active_change
        self.rollouter.admission_limit = self._concurrency
        if self._peer:
            self.rollouter.retry_s = PEER_RETRY_S
        self.pool.on_ready_change = self._on_ready_change
        self.resources.on_tenancy = self._on_tenancy

    def open_chains(self, accept: LogPosition | None, ledger: LogPosition | None) -> tuple[ChainedLog, ChainedLog]:
        """New files of both logs for this incarnation, forked at these positions."""
        chains = self.services.chains
        return chains.open("accept", self.incarnation, accept), chains.open("ledger", self.incarnation, ledger)

    # --- construction ---------------------------------------------------------------------------------------------

    def sampling_params(self) -> SamplingParams:
        """Of training samples."""
        config = self.services.config
        rollout = config.actor_rollout_ref.rollout
        return SamplingParams(
            n=rollout.n,
            max_new_tokens=config.data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop_token_ids=() if rollout.ignore_eos else self.services.stop_token_ids,
            ignore_eos=rollout.ignore_eos,
            seed=config.trainer.seed,
        )

    def _build_rollouter(self, limit: int | None) -> Rollouter:
        s = self.services
        return Rollouter(
            s.endpoint,
            s.prompts,
            self.sampling_params(),
            self.intake,
            self.window,
            self.balancer,
            self.validation_balancer,
            s.clock,
            s.log,
            self.changed,
            self.pool.incarnation_of,
            limit if limit is not None else len(s.prompts),
        )

    def _build_resources(self) -> DynamicResourceController:
        s, deadlines = self.services, self.services.config.deadlines
        settings = SwitchSettings(
            switch_s=deadlines.switch_s * deadlines.scale,
            start_s=deadlines.start_s * deadlines.scale,
            drain_s=deadlines.drain_s * deadlines.scale,
            partial_rollout=s.config.async_training.partial_rollout,
            sharded=self._sharded_trainers(),
        )
        return DynamicResourceController(
            s.endpoint, s.plan, self.pool, s.clock, s.log, settings, self._kill, self._on_capacity
        )

    def _build_synchronizer(self) -> WeightSynchronizer:
        s, deadlines = self.services, self.services.config.deadlines
        sync = s.config.weight_sync
        settings = SyncSettings(
            mode=s.derived.sync_mode,
            keep_kv=s.config.rollout.kv_on_sync == "keep",
            partial_rollout=s.config.async_training.partial_rollout,
            attempts=sync.attempts,
            verify_probe=sync.verify == "probe",
            probe_tolerance=sync.probe_tolerance,
            temperature=s.config.actor_rollout_ref.rollout.temperature,
            call_s=deadlines.call_s * deadlines.scale,
            sync_s=deadlines.sync_s * deadlines.scale,
            drain_s=deadlines.drain_s * deadlines.scale,
            double_abort=s.config.async_training.compat == "peer",
            sharded=self._sharded_trainers(),
        )
        made = WeightSynchronizer(s.endpoint, self.pool, s.clock, s.log, settings, self._kill, self._on_sync_resumed)
        if settings.verify_probe:
            made.probe_set = self._probe_set(sync.probe_count)
        return made

    def _sharded_trainers(self) -> tuple[str, ...]:
        """Trainers that have to take part whenever one of them hands out weights; empty where each holds them all."""
        if not collective_weights(self.services.config):
            return ()
        return tuple(w.worker for w in self.plan.of_kind("trainer"))

    def _probe_set(self, count: int) -> list[tuple[TokenArray, TokenArray]]:
        """Fixed sequences for the truth test: prompts, each followed by the tokens of the next ones as its response."""
        prompts = [self.services.prompts[i].tokens for i in range(min(len(self.services.prompts), 4 * count))]
        budget = min(32, self.services.config.data.max_response_length)
        return [
            (prompts[i], np.concatenate(prompts[i + 1 :] + prompts[: i + 1])[:budget].astype(np.int32))
            for i in range(min(count, len(prompts)))
        ]

    def _build_fleet(self) -> Fleet:
        s, deadlines = self.services, self.services.config.deadlines
        settings = FleetSettings(
            start_s=deadlines.start_s * deadlines.scale,
            silence_s=deadlines.agent_silence_s * deadlines.scale,
            beat_s=s.beat_s,
            trainer_restarts=s.config.faults.trainer_restarts,
        )
        return Fleet(s.endpoint, s.plan, self.pool, s.clock, s.log, settings, self.changed, self._on_replica_lost)

    # --- calls to the trainer group -------------------------------------------------------------------------------

    async def trainers(self, orders: Sequence[m.AnyMessage], reply: type[R], deadline_s: float, what: str) -> list[R]:
        """One order per rank; all replies, or what a rank raised."""
        ranks = self.plan.of_kind("trainer")
        calls = [
            self.services.endpoint.call(w.worker, order, reply, deadline_s=deadline_s, what=what)
            for w, order in zip(ranks, orders, strict=True)
        ]
        return await all_or_raise(calls)

    async def trainers_same(self, order: m.AnyMessage, reply: type[R], deadline_s: float, what: str) -> list[R]:
        """The same order to every rank; ``deadline_s`` before scaling."""
        ranks = len(self.plan.of_kind("trainer"))
        bound = deadline_s * self.services.config.deadlines.scale
        return await self.trainers([order] * ranks, reply, bound, what)

    # --- samples --------------------------------------------------------------------------------------------------

    def accept(self, segment: SegmentId, rows: Sequence[SampleRow]) -> int:
        """Durable rows: new ones are accepted, leases of their twins end."""
        fresh = self.intake.on_sealed(segment, rows)
        self.rollouter.on_durable([row.sample_uid for row in rows])
        for uid in fresh:
            self.window.found(uid)
        self.rollouter.pump()
        return len(fresh)

    async def find_unannounced(self, producer: str | None) -> None:
        """Sealed segments nobody announced (lost message, dead producer)."""
        for info in await self.intake.unannounced(producer):
            self.log.event("segment", str(info.segment), new="found", reason="not announced")
            self.accept(info.segment, info.rows)
        self.changed.notify()

    async def settled(self) -> None:
        """Both logs hold everything given so far."""
        deadlines = self.services.config.deadlines
        await self.intake.settled(deadlines.call_s * deadlines.scale, deadlines.collect_s * deadlines.scale)

    # --- callbacks ------------------------------------------------------------------------------------------------

    def _kill(self, worker: str, reason: str) -> None:
        self.fleet.kill(worker, reason)

    def _on_capacity(self) -> None:
        """Routing changed (activation, deactivation): give out work."""
        self.rollouter.pump()
        self.changed.notify()

    def _on_sync_resumed(self) -> None:
        """Standalone replicas hold the weights: they go on, but only with their share of what hybrids could do too."""
        if self._peer:  # requests retry at once on what is there; new samples wait until everything else is done
            self._on_capacity()
            return
        lendable, rollouter = len(self.resources.lendable()), self.rollouter
        everybody = max(1, lendable + self.pool.n_ready)
        rollouter.reserve = rollouter.parked() * lendable // everybody
        room = self.window.room()
        new = min(room, rollouter.prompts_left())
        rollouter.reserve_new = room - new + new * lendable // everybody
        self.rollouter.paused = ""
        self._on_capacity()

    def _on_replica_lost(self, replica: str, incarnation: str, reason: str) -> None:
        """A replica died: first take what it sealed, then issue the rest again."""
        self.services.endpoint.spawn(self._recover_replica(replica, incarnation, reason), f"recovery of {replica}")

    async def _recover_replica(self, replica: str, incarnation: str, reason: str) -> None:
        await self.find_unannounced(replica)
        again = self.intake.lost_with(replica, incarnation)
        self.rollouter.issue_again(again, f"{replica} died before they were durable")
        started = self.rollouter.replica_lost(replica, reason)
        self.log.event("fault", replica, new="recovered", reason=reason, reissued=len(again), restarted=started)
        self.rollouter.pump()
        self.changed.notify()

    def _on_active_change(self, replica: str, leases: int, running: int) -> None:
        self._observe(running)
        if replica in self.pool and self.pool[replica].state is ReplicaState.READY:
            self._set_activity(replica, "rollout" if leases else "idle")

    def _on_ready_change(self, replica: str) -> None:
        self._observe(self.rollouter.running())
        if self.pool[replica].state is ReplicaState.READY:
            self._set_activity(replica, "rollout" if self.rollouter.on_replica(replica) else "idle")
        else:
            self._activity.pop(replica, None)  # the pool logs what it does instead

    def _observe(self, running: int) -> None:
        self.capacity.observe(self.clock.now(), running, self._concurrency())

    def _concurrency(self) -> int:
        """Samples that may run together on what is READY."""
        return rollout_capacity(self.pool.n_ready, self._s, self.services.derived.max_required_samples)

    def _set_activity(self, replica: str, what: str) -> None:
        if self._activity.get(replica) != what:
            self._activity[replica] = what
            self.log.event("activity", replica, new=what)

    def _on_tenancy(self, trainer: str, tenant: Tenant) -> None:
        self.tenancy.switch(self.clock.now(), trainer, tenant)

    # --- numbers --------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Snapshots for the metrics of a cycle."""
        counts = self.intake.counts
        policy = self.services.policy
        ratio = getattr(policy, "deactivate_ratio", None)
        out = {
            "fully_async/count/total_generated_samples": float(self.trained + self.intake.available()),
            "fully_async/count/staleness_samples": float(self.window.in_flight + self.window.queued),
            "fully_async/count/dropped_stale_samples": float(counts["stale"]),
            "fully_async/count/current_param_version": float(self.version.number),
            "fully_async/monitor/active_tasks_size": float(self.rollouter.running()),
            "fully_async/monitor/queue/pending_queue_size": float(self.rollouter.parked()),
            "fully_async/monitor/queue/mq_queue_size": float(self.intake.available()),
            "dynamic_resource/activations": float(self.resources.activations),
            "dynamic_resource/deactivations": float(self.resources.deactivations),
            "dynamic_resource/switch_cost_s": self.resources.last_activate_s + self.resources.last_deactivate_s,
            "samples/reissued_total": float(self.rollouter.reissued),
            "samples/twins_total": float(counts["twin"]),
            "samples/moved_total": float(self.rollouter.moved),
            "tokens/wasted_total": float(self.rollouter.wasted_tokens),
            "tokens/reprefilled_total": float(self.rollouter.reprefill_tokens),
            "faults/worker_deaths_total": float(self.fleet.deaths),
            "fully_async/monitor/ready_standalone": float(len(self.pool.ready(ReplicaKind.STANDALONE))),
        }
        if isinstance(ratio, int | float):
            out["dynamic_resource/deactivate_ratio"] = float(ratio)
        for name, load in self.balancer.loads().items():
            out[f"replica/{name}/unfinished"] = float(load.unfinished)
        return out
