"""The rollouter: admits prompts, leases them to READY replicas, moves partial responses, issues lost samples again.

Owns: which sample is where (in flight, parked, to be issued again) and the position in the prompt stream. Invariants:
a new prompt is admitted only inside the staleness window and the concurrency limit; every sample in flight has exactly
one lease; requests go to READY replicas only; a message under an old lease is ignored. It does not generate, train or
decide about lending. `pump()` is synchronous and idempotent: call it whenever something changed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence

from hybridsched.errors import FaultError
from hybridsched.model import Prompt, Purpose, SamplingParams, Verdict, WeightVersion
from hybridsched.runlog.base import EventSink
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.flights import FIRST, LEASE_TRIES, InFlight, Prompts, ValidationRun
from hybridsched.runtime.intake import Completed, Intake
from hybridsched.runtime.signal import Signal
from hybridsched.scheduling.load_balancer import LoadBalancer
from hybridsched.scheduling.staleness import Place, StalenessWindow


class Rollouter:
    """Who generates what."""

    def __init__(
        self,
        endpoint: Endpoint,
        prompts: Prompts,
        params: SamplingParams,
        intake: Intake,
        window: StalenessWindow,
        balancer: LoadBalancer,
        validation_balancer: LoadBalancer,
        clock: Clock,
        log: EventSink,
        changed: Signal,
        incarnation_of: Callable[[str], str],
        limit: int,
    ) -> None:
        self._endpoint = endpoint
        self._prompts = prompts
        self._params = params
        self._intake = intake
        self.window = window
        self.balancer = balancer
        self._validation_balancer = validation_balancer
        self._clock = clock
        self._log = log
        self._changed = changed
        self._incarnation_of = incarnation_of
        self._limit = min(limit, len(prompts))
        self._leases = itertools.count(1)
        self._position = 0
        self._skip: set[int] = set()  # positions ahead that need no issuing (after a resume or rollback)
        self._flights: dict[int, InFlight] = {}
        self._by_uid: dict[int, int] = {}  # training uid -> lease
        self._running = 0  # training samples on replicas now
        self._parked: dict[int, InFlight] = {}
        self._on_replica: dict[str, int] = {}
        self._again: deque[tuple[int, int]] = deque()  # (uid, issue)
        self.current_version: Callable[[], WeightVersion] = lambda: FIRST
        self.validation: ValidationRun | None = None
        self.reserve = self.reserve_new = 0  #: parked leases, places in the window kept back until lending is decided
        self.blocked: dict[str, str] = {}  #: replicas whose disk is full
        self.paused = ""  #: reason why nothing new is admitted
        self.generated = 0  #: samples completed since the last sync
        self.reissued = 0
        self.wasted_tokens = 0
        self.reprefill_tokens = 0
        self.moved = 0
        self.retry_s = 0.0  #: compat: peer: an aborted request rests so long
        self.admission_limit: Callable[[], int] | None = None  #: samples in flight, over all replicas
        self._failures: Counter[tuple[Purpose, int]] = Counter()  # leases of a sample that ended with an error
        self.on_verdict: Callable[[str, str], None] = lambda _verdict, _reason: None  #: of samples without a row
        self.on_active_change: Callable[[str, int, int], None] | None = None
        endpoint.on(m.LeaseParked, self._on_parked)
        endpoint.on(m.LeaseLost, self._on_lost)
        endpoint.on(m.LeaseFailed, self._on_failed)
        endpoint.on(m.SpaceReport, self._on_space)
        endpoint.on(m.Beat, self._on_beat)

    # --- what is there --------------------------------------------------------------------------------------------

    def in_flight(self) -> int:
        """Training samples admitted and neither completed nor lost."""
        return len(self._by_uid) + len(self._again)

    def running(self) -> int:
        """Training samples on replicas now (not parked)."""
        return self._running

    def parked(self) -> int:
        """Partial samples waiting for a replica."""
        return len(self._parked)

    def prompts_left(self) -> int:
        """Prompts that still have to be issued for the first time (on this lineage)."""
        while self._position < self._limit and (self._position in self._skip or self._intake.holds(self._position)):
            self._skip.discard(self._position)
            self._position += 1
        return max(0, self._limit - self._position - len(self._skip))

    def flights(self) -> list[InFlight]:
        """Everything in flight, by lease."""
        return list(self._flights.values())

    def on_replica(self, replica: str) -> int:
        """Leases running on one replica."""
        return self._on_replica.get(replica, 0)

    def waiting(self) -> list[int]:
        """Samples to be issued again."""
        return [uid for uid, _issue in self._again]

    def unfinished_uids(self) -> list[int]:
        """Training samples in flight, parked, or to be issued again."""
        return [*self._by_uid, *self.waiting()]

    def oldest_versions(self) -> dict[int, WeightVersion]:
        """Version under which each training sample in flight began."""
        return {f.uid: f.version for f in self._flights.values() if f.purpose is Purpose.TRAIN}

    # --- admission ------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Give work to replicas as long as rules and capacity allow: validation, parked, re-issued, new prompts."""
        self._pump_validation()
        while len(self._parked) > self.reserve and self._continue_one():
            pass
        while self._again and self._issue(*self._again[0]):
            self._again.popleft()
        if not self._again and not self.paused and not self.blocked:
            while self.window.room() > self.reserve_new and self.prompts_left() > 0 and self._issue_new():
                pass

    def _issue_new(self) -> bool:
        if self.admission_limit is not None and self.in_flight() >= self.admission_limit():
            return False
        uid = self._position
        replica = self.balancer.choose(None, self._params.n)
        if replica is None:
            return False
        self.window.admitted(uid)
        self._position += 1
        self._send_training(uid, replica, 0)
        return True

    def _issue(self, uid: int, issue: int) -> bool:
        if self._intake.holds(uid):  # a twin became durable meanwhile
            self._window_completed(uid)
            return True
        replica = self.balancer.choose(None, self._params.n)
        if replica is None:
            return False
        self._send_training(uid, replica, issue)
        return True

    def _send_training(self, uid: int, replica: str, issue: int) -> None:
        epoch = self._prompts.epoch_of(uid)
        self._send(self._prompts[uid], uid, Purpose.TRAIN, self._params, replica, issue, epoch)

    def _send(
        self, prompt: Prompt, uid: int, purpose: Purpose, params: SamplingParams, replica: str, issue: int, epoch: int
    ) -> None:
        lease, token = next(self._leases), self._balancer_of(purpose).acquire(replica, params.n)
        now = self._clock.now()
        flight = InFlight(lease, uid, purpose, replica, token, params.n, params.n, issue, admitted_at=now)
        flight.version = self.current_version()
        self._register(flight)
        self._endpoint.tell(
            replica,
            m.Lease(
                lease=lease,
                purpose=purpose.value,
                sample_uid=uid,
                prompt_uid=prompt.prompt_uid,
                prompt_tokens=prompt.tokens,
                params=params,
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
                epoch=epoch,
                issue=issue,
            ),
        )

    def _balancer_of(self, purpose: Purpose) -> LoadBalancer:
        return self.balancer if purpose is Purpose.TRAIN else self._validation_balancer

    def _window_completed(self, uid: int) -> None:
        if self.window.place(uid) is Place.IN_FLIGHT:
            self.window.completed(uid)

    # --- validation -----------------------------------------------------------------------------------------------

    def start_validation(self, prompts: Sequence[Prompt], params: SamplingParams) -> ValidationRun:
        """Samples outside window, queue and counts; they go first."""
        self.validation = ValidationRun(prompts, params)
        return self.validation

    def cancel_validation(self) -> None:
        """Forget what is still open (its replicas are told to drop it)."""
        for flight in [each for each in self.flights() if each.purpose is Purpose.VALIDATION]:
            self._forget(flight)
            self._endpoint.tell(flight.replica, m.DropParked([flight.lease]))
        self.validation = None

    def _pump_validation(self) -> None:
        run = self.validation
        while run is not None and run.waiting:
            if (replica := self._validation_balancer.choose(None, run.params.n)) is None:
                return
            index = run.take()
            self._send(run.prompts[index], index, Purpose.VALIDATION, run.params, replica, 0, 0)

    # --- moving ---------------------------------------------------------------------------------------------------

    def _continue_one(self) -> bool:
        flight = next(iter(self._parked.values()))
        if flight.retry_at > self._clock.now():  # they are parked in order: nobody behind it is due either
            return False
        balancer = self._balancer_of(flight.purpose)
        if (dst := balancer.choose(f"{flight.purpose.value}:{flight.uid}", flight.unfinished)) is None:
            return False
        old, holder = flight.lease, flight.replica
        del self._parked[old], self._flights[old]
        flight.lease, flight.token = next(self._leases), balancer.acquire(dst, flight.unfinished)
        flight.replica, flight.parked, flight.holder = dst, False, holder
        self._register(flight)
        self.reprefill_tokens += flight.tokens
        self.moved += holder != dst
        self._endpoint.tell(holder, m.Handoff(old, flight.lease, dst))
        return True

    def _on_parked(self, parked: m.LeaseParked, _src: str) -> None:
        flight = self._flights.get(parked.lease)
        if flight is None or flight.parked:
            return
        self._balancer_of(flight.purpose).release(flight.token)
        flight.parked, flight.unfinished, flight.tokens, flight.holder = True, parked.unfinished, parked.tokens, ""
        self._parked[flight.lease] = flight
        if self.retry_s:
            flight.retry_at = self._clock.now() + self.retry_s
            asyncio.get_running_loop().call_later(self.retry_s + 1e-6, self.pump)  # never a rounding error early
        self._count(flight, -1)
        self._changed.notify()

    def _on_lost(self, lost: m.LeaseLost, _src: str) -> None:
        if (flight := self._flights.get(lost.new_lease)) is not None:
            self._start_again(flight, "its partial responses are gone")
            self.pump()

    def _on_failed(self, failed: m.LeaseFailed, src: str) -> None:
        if (flight := self._flights.get(failed.lease)) is None:
            return
        self._log.event("fault", src, new="lease failed", reason=failed.reason, uid=flight.uid)
        self._failures[flight.purpose, flight.uid] += 1
        if self._failures[flight.purpose, flight.uid] < LEASE_TRIES or self._intake.holds(flight.uid):
            self._start_again(flight, failed.reason)
        elif flight.purpose is Purpose.VALIDATION:
            raise FaultError(f"validation sample {flight.uid} failed {LEASE_TRIES} times: {failed.reason}")
        else:
            self._forget(flight)
            self._verdict(flight.uid, Verdict.FAILED, f"no replica can generate it: {failed.reason}")
        self.pump()
        self._changed.notify()

    def _on_beat(self, beat: m.Beat, _src: str) -> None:
        for lease, unfinished in beat.unfinished.items():
            flight = self._flights.get(lease)
            if flight is not None and not flight.parked:
                flight.unfinished, flight.holder = unfinished, ""
                self._balancer_of(flight.purpose).update(flight.token, unfinished)

    def _on_space(self, report: m.SpaceReport, src: str) -> None:
        was = src in self.blocked
        if report.blocked:
            self.blocked[src] = report.text
        else:
            self.blocked.pop(src, None)
        if was != report.blocked:
            self._log.event("fault", src, new="disk full" if report.blocked else "space again", reason=report.text)
        self.pump()
        self._changed.notify()

    # --- completion and loss --------------------------------------------------------------------------------------

    def on_completed(self, done: m.SampleCompleted, src: str) -> InFlight | None:
        """End a flight; None when its lease is an old one (the row may still win if it becomes durable first)."""
        flight = self._flights.get(done.lease)
        if flight is None:
            self._log.event("lease", str(done.lease), new="ignored", reason=f"completed by {src} under an old lease")
            return None
        self._forget(flight)
        if flight.purpose is Purpose.VALIDATION:
            if self.validation is not None:
                self.validation.results[flight.uid] = done
            return flight
        self.generated += 1
        if done.verdict:
            self._verdict(done.sample_uid, Verdict(done.verdict), done.reason)
        else:
            self._window_completed(done.sample_uid)
            self._intake.on_completed(done.sample_uid, Completed(src, self._incarnation_of(src), sum(done.n_tokens)))
        return flight

    def _verdict(self, uid: int, verdict: Verdict, reason: str) -> None:
        """A sample ends without a row."""
        self.window.verdict(uid, verdict)
        self._intake.verdict(uid, verdict, reason=reason)
        self._log.event("sample", str(uid), new=verdict.value, reason=reason)
        self.on_verdict(verdict.value, reason)

    def on_durable(self, uids: Sequence[int]) -> None:
        """Rows of these uids are durable: whoever still generates a twin of them stops counting."""
        wanted = set(uids)
        for lease in [self._by_uid[uid] for uid in uids if uid in self._by_uid]:
            flight = self._flights[lease]
            self._forget(flight)
            self._window_completed(flight.uid)
            self._endpoint.tell(flight.replica, m.DropParked([lease]))
        for entry in [again for again in self._again if again[0] in wanted]:
            self._again.remove(entry)
            self._window_completed(entry[0])

    def replica_lost(self, replica: str, reason: str) -> int:
        """What ran, was parked or may still have to be handed over there starts again. Returns how many samples."""
        hit = [f for f in self._flights.values() if replica in (f.replica, f.holder)]
        for flight in hit:
            self._start_again(flight, f"{replica}: {reason}")
        self.blocked.pop(replica, None)
        return len(hit)

    def issue_again(self, uids: Sequence[int], reason: str) -> None:
        """Completed or accepted samples whose rows are lost are generated again."""
        for uid in uids:
            self.window.reissued(uid)
            self._again.append((uid, 1))
            self.reissued += 1
            self._log.event("sample", str(uid), new="reissued", reason=reason)

    def restart_at(self, position: int) -> None:
        """After a resume or rollback: go on from the lowest unfinished prompt, past what is done or under way."""
        self._position = position
        taken = {*self._by_uid, *self.waiting(), *self._intake.held_uids()}
        self._skip = {uid for uid in taken if position <= uid < self._limit}

    def forget_all(self, reason: str) -> None:
        """Rollback: drop flights whose samples are no longer wanted; the rest stays in flight."""
        for flight in self.flights():
            if flight.purpose is Purpose.TRAIN and self._intake.holds(flight.uid):
                self._forget(flight)
                self._endpoint.tell(flight.replica, m.DropParked([flight.lease]))
                self._log.event("lease", str(flight.lease), new="dropped", reason=reason)

    def _start_again(self, flight: InFlight, reason: str) -> None:
        self._forget(flight)
        if flight.purpose is Purpose.VALIDATION:
            if self.validation is not None:
                self.validation.again.append(flight.uid)
            return
        if self._intake.holds(flight.uid):
            self._window_completed(flight.uid)
            return
        self.wasted_tokens += flight.tokens
        self.reissued += 1
        self._again.append((flight.uid, flight.issue + 1))
        self._log.event("sample", str(flight.uid), new="reissued", reason=reason)

    def _forget(self, flight: InFlight) -> None:
        if self._flights.pop(flight.lease, None) is None:
            return
        self._parked.pop(flight.lease, None)
        self._balancer_of(flight.purpose).release(flight.token)
        if flight.purpose is Purpose.TRAIN:
            self._by_uid.pop(flight.uid, None)
        if not flight.parked:
            self._count(flight, -1)

    def _register(self, flight: InFlight) -> None:
        self._flights[flight.lease] = flight
        if flight.purpose is Purpose.TRAIN:
            self._by_uid[flight.uid] = flight.lease
        self._count(flight, +1)

    def _count(self, flight: InFlight, change: int) -> None:
        """Follow how long a sample and how many of them run, and the leases of each replica (activity, utilization)."""
        flight.moved(self._clock.now(), change > 0)
        if flight.purpose is Purpose.TRAIN:
            self._running += change
        now = self._on_replica[flight.replica] = self._on_replica.get(flight.replica, 0) + change
        if self.on_active_change is not None:
            self.on_active_change(flight.replica, now, self._running)
