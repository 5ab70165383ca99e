"""One collection: waiting for R durable samples, in accept order, and training on them.

Owns: the wait (with its deadline, early flush and starvation cure), dropping stale rows, splitting a collection over
ranks, two-phase loading, and what happens to a damaged segment. Invariants: exactly the rows taken get a verdict or go
back; training starts only when every trainer GPU is the trainer's. Does not know the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridsched.config.derived import data_parallel_rank
from hybridsched.errors import DeadlineExceeded
from hybridsched.model import ReplicaKind, SampleRow, SegmentId, Verdict
from hybridsched.runtime import messages as m
from hybridsched.runtime.cycle_record import CollectionRecord, CycleRecord
from hybridsched.runtime.gather import outcomes
from hybridsched.runtime.lending import Lending
from hybridsched.runtime.parts import Parts
from hybridsched.scheduling.cycle import CollectionTarget, collection_target, step_wait_samples
from hybridsched.scheduling.lifecycle import ReplicaState
from hybridsched.scheduling.staleness import sample_age, too_old
from hybridsched.trainers.batching import partition_samples


class CutShort(Exception):
    """Nobody generates and samples are missing, but a weight sync brings a replica back."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a collection needs of the controller."""

    check: Callable[[], None]  #: raises what ends the cycle
    cycle: Callable[[], CycleRecord]
    status: Callable[[str], None]
    activity: Callable[[str], None]


class Collector:
    """Takes and trains collections."""

    def __init__(self, parts: Parts, lending: Lending, hooks: Hooks) -> None:
        self.parts = parts
        self._s = parts.services
        self._config = parts.services.config
        self._d = parts.services.derived
        self._lending = lending
        self._hooks = hooks
        self._collection_id = 0

    # --- collecting -----------------------------------------------------------------------------------------------

    async def collect(self, record: CollectionRecord) -> tuple[list[SampleRow], CollectionTarget]:
        """The next R accepted rows (fewer at the end of data), in accept order."""
        parts = self.parts
        began = self._s.clock.now()
        record.wait_samples = step_wait_samples(self._d.required_samples, parts.intake.available())
        self._lending.note_wait_begin(record.wait_samples)
        self._hooks.activity("wait")
        self._hooks.status("collecting")
        flushed: set[int] = set()
        enough_at: float | None = None
        bound = self._config.deadlines.collect_s * self._config.deadlines.scale
        arrived, arrivals_at = parts.rollouter.generated, began
        while True:
            self._hooks.check()
            self._drop_stale()
            target = self._target()
            now = self._s.clock.now()
            if enough_at is None and parts.intake.available() >= target.samples:
                enough_at = now
            if len(parts.intake.queue) >= target.samples:
                break
            self._flush_missing(target.samples, flushed)
            if target.starved:
                self._cure_starvation(target)
            if parts.rollouter.generated != arrived:
                arrived, arrivals_at = parts.rollouter.generated, now
            left = arrivals_at + bound - now
            if left <= 0:
                raise DeadlineExceeded(
                    f"no sample arrived for {bound:g} s (deadlines.collect_s): {target.reason}; "
                    f"{parts.rollouter.in_flight()} in flight, ready replicas: {parts.pool.ready() or 'none'}, "
                    f"disk: {parts.rollouter.blocked or 'fine'}"
                )
            await parts.changed.wait(left)
        now = self._s.clock.now()
        record.wait_s += (enough_at or now) - began
        record.seal_wait_s += now - (enough_at or now)
        self._lending.note_wait_end((enough_at or now) - began)
        rows = parts.intake.take(target.samples)
        for row in rows:
            parts.window.taken(row.sample_uid)
        return rows, target

    def _target(self) -> CollectionTarget:
        parts = self.parts
        return collection_target(
            self._d.required_samples,
            parts.intake.available(),
            parts.rollouter.in_flight(),
            parts.rollouter.prompts_left(),
            parts.pool.n_ready,
        )

    def _cure_starvation(self, target: CollectionTarget) -> None:
        """No READY replica: a weight sync brings back who waits for weights, or hybrids where there is nobody else."""
        parts = self.parts
        waiting = parts.pool.names(ReplicaKind.STANDALONE, (ReplicaState.ASLEEP, ReplicaState.HELD))
        if any(parts.pool.is_up(name) for name in waiting):
            raise CutShort(f"{target.reason}; {', '.join(waiting)} wait for weights")
        alone = not parts.pool.names(ReplicaKind.STANDALONE)
        if alone and parts.resources.lendable() and not parts.resources.is_active:
            raise CutShort(f"{target.reason}; hybrids are all there is")

    def _flush_missing(self, need: int, flushed: set[int]) -> None:
        for replica, uids in self.parts.intake.missing(need).items():
            if not flushed.issuperset(uids):
                flushed.update(uids)
                self._s.endpoint.tell(replica, m.Flush("collection needs the rows"))

    async def flush_all(self, reason: str) -> None:
        """Everything finished is durable and announced when this returns (replicas that do not answer aside)."""
        up = [name for name in self.parts.pool.names() if self.parts.pool.is_up(name)]
        bound = self._config.deadlines.call_s * self._config.deadlines.scale
        calls = [
            self._s.endpoint.call(name, m.Flush(reason), m.Ok, deadline_s=bound, what="flushing samples") for name in up
        ]
        for name, result in zip(up, await outcomes(calls), strict=True):
            if isinstance(result, BaseException):
                self.parts.log.event("fault", name, new="not flushed", reason=str(result))

    def _drop_stale(self) -> None:
        """Strategy drop: accepted samples beyond max_off_policy_threshold get the verdict `stale`."""
        threshold = self._config.async_training.max_off_policy_threshold
        parts = self.parts
        if threshold is None or not parts.intake.queue:
            return
        stale = [r for r in parts.intake.queue if too_old(self._age(r), threshold)]
        if not stale:
            return
        gone = {row.sample_uid for row in stale}
        kept = [row for row in parts.intake.queue if row.sample_uid not in gone]
        parts.intake.queue.clear()
        parts.intake.queue.extend(kept)
        for row in stale:
            parts.window.verdict(row.sample_uid, Verdict.STALE)
            parts.intake.verdict(row.sample_uid, Verdict.STALE, row=row, age=self._age(row))
            self._hooks.cycle().verdicts["stale"] += 1
            parts.log.event("sample", str(row.sample_uid), new="stale", reason=f"age {self._age(row)} > {threshold}")
        parts.rollouter.pump()

    def _age(self, row: SampleRow) -> int:
        return sample_age(row.oldest, self.parts.version, self.parts.forks)

    # --- training -------------------------------------------------------------------------------------------------

    async def train(self, rows: list[SampleRow], record: CollectionRecord, index: int) -> bool:
        """Train on these rows. False: a segment was damaged; the collection is to be taken again."""
        parts, deadlines = self.parts, self._config.deadlines
        parts.resources.require_trainer()
        self._collection_id += 1
        ranks = parts.plan.of_kind("trainer")
        size = self._config.actor_rollout_ref.actor.ppo_mini_batch_size
        places = [data_parallel_rank(self._config, rank) for rank in range(len(ranks))]
        orders = split_rows(rows, size, places)
        began = self._s.clock.now()
        self._hooks.activity("train")
        self._hooks.status("training")
        loaded = await parts.trainers(
            [m.LoadCollection(self._collection_id, order) for order in orders],
            m.CollectionLoaded,
            deadlines.call_s * deadlines.scale,
            "loading a collection",
        )
        damaged = {segment: why for reply in loaded for segment, why in reply.damaged}
        if damaged:
            await self._damaged(rows, damaged)
            return False
        record.load_s += self._s.clock.now() - began
        order = m.TrainCollection(self._collection_id, parts.version, index)
        results = await parts.trainers([order] * len(ranks), m.Trained, deadlines.train_s * deadlines.scale, "training")
        self._lending.note_trained(self._s.clock.now() - began)
        result = results[0]
        record.timing_s, record.train = result.timing_s, result.metrics
        record.tokens, record.samples = sum(row.n_tokens for row in rows), len(rows)  # ranks may share samples
        for row in rows:
            age = self._age(row)
            self._hooks.cycle().ages.append(age)
            parts.intake.verdict(row.sample_uid, Verdict.TRAINED, row=row, age=age)
        parts.collections += 1
        parts.optimizer_steps = int(result.metrics.get("optimizer_steps", parts.optimizer_steps))
        parts.trained += len(rows)
        self._hooks.cycle().verdicts["trained"] += len(rows)
        await parts.settled()
        self._hooks.activity("wait")
        self._hooks.cycle().mq_size = parts.intake.available()
        self._s.check_owner()
        return True

    async def _damaged(self, rows: list[SampleRow], damaged: dict[Any, str]) -> None:
        """Quarantine, put the sound rows back, issue the lost samples again."""
        parts = self.parts
        names = {SegmentId(*segment): why for segment, why in damaged.items()}
        lost = [row.sample_uid for row in rows if row.ref.segment in names]
        sound = [row for row in rows if row.ref.segment not in names]
        for row in sound:
            parts.window.reissued(row.sample_uid)
            parts.window.completed(row.sample_uid)
        parts.intake.put_back(sound)
        for segment, why in names.items():
            lost += await parts.intake.quarantine(segment, why)
        parts.intake.unaccept(lost)
        parts.rollouter.issue_again(lost, "its segment is damaged")
        parts.rollouter.pump()


def split_rows(rows: Sequence[SampleRow], mini_batch: int, places: Sequence[int]) -> list[list[list[tuple[Any, int]]]]:
    """Per rank, per mini-batch: row references (segment, row). Balanced by tokens, deterministic.

    ``places``: the data-parallel rank of each rank. Ranks of the same place hold one model together: the same samples.
    """
    parts = max(places) + 1
    shares: list[list[list[tuple[Any, int]]]] = [[] for _ in range(parts)]
    for first in range(0, len(rows), mini_batch):
        mini = rows[first : first + mini_batch]
        for part, chosen in enumerate(partition_samples([row.n_tokens for row in mini], parts)):
            shares[part].append([(mini[i].ref.segment, mini[i].ref.row) for i in chosen])
    return [shares[place] for place in places]
