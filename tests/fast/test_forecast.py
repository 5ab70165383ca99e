"""The replica timing model: hand-worked numbers, a step-by-step reference, and conservation under any history."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybridsched.errors import InternalError
from hybridsched.scheduling.forecast import Finished, ReplicaModel


def replica(
    *, base: float = 1.0, per_seq: float = 0.0, prefill: float = math.inf, kv: int = 10**9, seqs: int = 1000
) -> ReplicaModel:
    return ReplicaModel(
        decode_base_s=base, decode_per_seq_s=per_seq, prefill_tokens_per_s=prefill, kv_tokens=kv, max_num_seqs=seqs
    )


def add(model: ReplicaModel, key: str, remaining: list[int], now: float = 0.0, **more: object) -> None:
    context = more.get("context", [0] * len(remaining))
    model.add(key, prompt_tokens=int(str(more.get("prompt", 0))), remaining=remaining, context=context, now=now)  # type: ignore[arg-type]


def play_out(model: ReplicaModel) -> list[Finished]:
    finished = []
    while model.next_event_time() < math.inf:
        finished += model.advance(model.next_event_time())
    return finished


def test_one_sequence_takes_its_length_in_steps() -> None:
    model = replica(base=0.5, per_seq=0.25)
    add(model, "a", [4])
    assert model.next_event_time() == 3.0
    assert model.advance(3.0) == [Finished("a", 0, 3.0)]
    assert (model.next_event_time(), model.running, model.kv_used) == (math.inf, 0, 0)


def test_a_step_slows_with_the_batch_and_quickens_when_sequences_end() -> None:
    model = replica(base=1.0, per_seq=1.0)
    add(model, "a", [2, 4])
    # two steps of 3 s with two running, then two of 2 s with one
    assert play_out(model) == [Finished("a", 0, 6.0), Finished("a", 1, 10.0)]


def test_a_newcomer_delays_what_runs() -> None:
    model = replica(base=1.0, per_seq=1.0)
    add(model, "a", [5])
    add(model, "b", [10], now=4.0)  # a has done 2 of 5; three more steps of 3 s
    assert model.advance(13.0) == [Finished("a", 0, 13.0)]
    assert model.next_event_time() == 13.0 + 7 * 2.0


def test_the_prompt_is_prefilled_once_a_group_and_stops_decoding() -> None:
    model = replica(prefill=100.0)
    add(model, "a", [3, 3], prompt=200)
    assert play_out(model) == [Finished("a", 0, 5.0), Finished("a", 1, 5.0)]  # 2 s of prefill, 3 steps
    add(model, "b", [10], now=5.0)
    add(model, "c", [1], now=10.0, prompt=100)
    assert play_out(model) == [Finished("c", 0, 12.0), Finished("b", 0, 16.0)]


def test_a_continued_response_pays_for_the_context_it_brings() -> None:
    model = replica(prefill=100.0)
    add(model, "a", [3, 3], prompt=100, context=[50, 150])
    assert {f.at for f in play_out(model)} == {3.0 + 3.0}


def test_kv_budget_admits_first_come_first_served_and_nobody_overtakes() -> None:
    model = replica(kv=100)
    add(model, "a", [60])
    add(model, "b", [50])
    add(model, "c", [10])  # would fit, but b is before it
    assert (model.running, model.waiting, model.kv_used) == (1, 2, 60)
    assert play_out(model) == [Finished("a", 0, 60.0), Finished("c", 0, 70.0), Finished("b", 0, 110.0)]


def test_kv_of_a_shared_prompt_counts_once_while_one_of_its_sequences_runs() -> None:
    model = replica(kv=100)
    add(model, "a", [10, 20], prompt=50)
    assert model.kv_used == 80
    model.advance(10.0)
    assert model.kv_used == 70
    model.advance(20.0)
    assert model.kv_used == 0


def test_no_more_than_max_num_seqs_run_together() -> None:
    model = replica(seqs=2)
    add(model, "a", [5, 5, 5, 5, 5])
    assert (model.running, model.waiting) == (2, 3)
    assert [f.at for f in play_out(model)] == [5.0, 5.0, 10.0, 10.0, 15.0]


def test_remove_returns_whole_tokens_done_and_frees_the_place() -> None:
    model = replica(seqs=2)
    add(model, "a", [2, 9])
    add(model, "b", [5])
    model.advance(2.0)
    assert model.remove("a", 4.7) == [2, 4]
    assert (model.running, model.unfinished("a"), model.unfinished("b")) == (1, 0, 1)
    assert model.next_event_time() == 7.0
    with pytest.raises(InternalError, match="group 'a' is not on this replica"):
        model.remove("a", 5.0)


def test_abort_returns_everything_in_order_of_arrival() -> None:
    model = replica(seqs=2)
    add(model, "z", [5, 5])
    add(model, "a", [5])
    assert model.abort(3.5) == {"z": [3, 3], "a": [0]}
    assert (model.running, model.waiting, model.kv_used, model.next_event_time()) == (0, 0, 0, math.inf)


def test_a_finish_on_the_very_instant_of_an_abort_counts_as_finished() -> None:
    model = replica()
    add(model, "a", [3, 4])
    assert model.remove("a", 3.0) == [3, 3]
    assert model.advance(3.0) == []


def test_pause_stops_time_for_sequences_and_resume_goes_on() -> None:
    model = replica()
    add(model, "a", [4])
    model.pause(1.5)
    assert model.next_event_time() == math.inf
    add(model, "b", [1], now=3.0)
    assert (model.running, model.waiting) == (1, 1)
    model.resume(10.0)
    assert play_out(model) == [Finished("b", 0, 11.0), Finished("a", 0, 12.5)]


def test_resume_with_recomputed_kv_prefills_all_that_is_resident() -> None:
    model = replica(prefill=10.0)
    add(model, "a", [100, 100], prompt=50, context=[20, 0])  # 70 tokens: 7 s of prefill
    model.pause(17.0)  # ten steps: 50 + 20 + 2 x 10 resident
    assert model.resident_tokens() == pytest.approx(90.0)
    model.resume(20.0, recompute_kv=True)
    assert model.next_event_time() == pytest.approx(20.0 + 9.0 + 90.0)


def test_speed_scales_decode_and_prefill_from_its_moment_on() -> None:
    model = replica(prefill=10.0)
    add(model, "a", [10], prompt=20)
    model.set_speed(0.5, 1.0)  # half of the 2 s prefill is left: 2 s; then ten steps of 2 s
    assert model.next_event_time() == 23.0
    model.set_speed(2.0, 13.0)  # five of ten steps are left
    assert model.next_event_time() == 15.5


def test_zero_cost_engine_finishes_at_once() -> None:
    model = replica(base=0.0)
    add(model, "a", [5, 7], now=2.0)
    assert model.advance(2.0) == [Finished("a", 0, 2.0), Finished("a", 1, 2.0)]


def test_work_counts_decoded_and_prefilled_tokens_between_events_too() -> None:
    model = replica(prefill=10.0)
    add(model, "a", [10, 10], prompt=20)
    assert [model.work(t) for t in (0.0, 1.0, 2.0, 3.5, 12.0)] == pytest.approx([0, 10, 20, 23, 40])
    model.advance(12.0)
    assert model.work(100.0) == pytest.approx(40)


def test_a_copy_goes_its_own_way() -> None:
    model = replica(seqs=2)
    add(model, "a", [3, 5, 7])
    model.advance(1.0)
    twin = model.copy()
    twin.remove("a", 2.0)
    add(twin, "b", [1], now=2.0)
    assert [f.at for f in play_out(twin)] == [3.0]
    assert (model.now, model.running, model.waiting, model.unfinished("a")) == (1.0, 2, 1, 3)
    assert [f.at for f in play_out(model)] == [3.0, 5.0, 10.0]


@pytest.mark.parametrize(
    ("remaining", "context", "complaint"),
    [
        ([], [], "impossible lengths"),
        ([0], [0], "impossible lengths"),
        ([1], [-1], "impossible lengths"),
        ([1, 1], [0], "impossible lengths"),
        ([60], [41], "101 tokens never fits into a KV budget of 100"),
    ],
)
def test_a_group_that_cannot_be_is_refused_and_changes_nothing(
    remaining: list[int], context: list[int], complaint: str
) -> None:
    model = replica(kv=100)
    with pytest.raises(ValueError, match=complaint):
        add(model, "a", remaining, context=context)
    assert (model.unfinished("a"), model.waiting, model.next_event_time()) == (0, 0, math.inf)


def test_a_group_twice_is_refused() -> None:
    model = replica()
    add(model, "a", [1])
    with pytest.raises(ValueError, match="already"):
        add(model, "a", [1])


def test_time_does_not_go_back() -> None:
    model = replica()
    model.advance(2.0)
    with pytest.raises(InternalError, match="go back"):
        model.advance(1.0)


def test_impossible_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="decode times"):
        replica(base=math.nan)
    with pytest.raises(ValueError, match="room for at least one"):
        replica(kv=0)


def test_cost_of_an_event_hardly_grows_with_the_batch() -> None:
    """Counts heap comparisons instead of seconds: 64x the batch may cost the logarithm more, not 64x."""

    class Counted(float):
        calls = 0

        def __lt__(self, other: float) -> bool:
            Counted.calls += 1
            return float.__lt__(self, other)

        def __add__(self, other: float) -> Counted:
            return Counted(float(self) + float(other))

    def per_event(n: int) -> float:
        model = replica(seqs=10**6)
        model._progress = Counted(0.0)
        add(model, "a", [1 + (i * 7919) % 100_003 for i in range(n)])
        Counted.calls = 0
        play_out(model)
        return Counted.calls / n

    assert per_event(64 * 64) < 4 * per_event(64)


# --- references -------------------------------------------------------------------------------------------------


def step_by_step(
    groups: list[tuple[int, list[int], list[int]]], *, base: float, per_seq: float, prefill: float, kv: int, seqs: int
) -> dict[tuple[int, int], float]:
    """Everything arrives at time 0; every decode step is taken one by one."""
    waiting = deque((g, i) for g, (_, remaining, _) in enumerate(groups) for i in range(len(remaining)))
    left: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], float] = {}
    now, used = 0.0, 0
    while waiting or left:
        while waiting and len(left) < seqs:
            g, i = waiting[0]
            prompt, remaining, context = groups[g]
            shared = any(h == g for h, _ in left)
            need = context[i] + (0 if shared else prompt)
            if used + need + remaining[i] > kv:
                break
            waiting.popleft()
            left[g, i] = remaining[i]
            used += need + remaining[i]
            now += need / prefill
        now += base + per_seq * len(left)
        for key in list(left):
            left[key] -= 1
            if left[key] == 0:
                del left[key]
                g, i = key
                prompt, remaining, context = groups[g]
                used -= remaining[i] + context[i] + (0 if any(h == g for h, _ in left) else prompt)
                ends[key] = now
    return ends


LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), LENGTHS), min_size=1, max_size=5),
    st.sampled_from([0.5, 1.0, 0.25]),
    st.sampled_from([0.0, 0.125, 1.0]),
    st.sampled_from([4.0, 16.0]),
    st.integers(26, 90),
    st.integers(1, 6),
)
def test_equals_the_step_by_step_reference(
    drawn: list[tuple[int, list[tuple[int, int]]]], base: float, per_seq: float, prefill: float, kv: int, seqs: int
) -> None:
    groups = [(prompt, [r for r, _ in lengths], [c for _, c in lengths]) for prompt, lengths in drawn]
    model = replica(base=base, per_seq=per_seq, prefill=prefill, kv=kv, seqs=seqs)
    for g, (prompt, remaining, context) in enumerate(groups):
        add(model, str(g), remaining, prompt=prompt, context=context)
    found = {(int(f.key), f.seq): f.at for f in play_out(model)}
    assert found == pytest.approx(
        step_by_step(groups, base=base, per_seq=per_seq, prefill=prefill, kv=kv, seqs=seqs), abs=1e-6
    )


@dataclass
class NaiveSequence:
    prompt: int
    remaining: int
    context: int
    done: float = 0.0
    state: str = "waiting"


@dataclass
class NaiveReplica:
    """Fluid as the model, but every sequence carries its own progress: O(n) an event, nothing clever."""

    base: float
    per_seq: float
    prefill: float
    kv: int
    seqs: int
    now: float = 0.0
    due: float = 0.0
    speed: float = 1.0
    paused: bool = False
    sequences: dict[tuple[str, int], NaiveSequence] = field(default_factory=dict)
    ends: dict[tuple[str, int], float] = field(default_factory=dict)

    def running(self) -> dict[tuple[str, int], NaiveSequence]:
        return {k: s for k, s in self.sequences.items() if s.state == "running"}

    def used(self) -> int:
        prompts = {k[0]: s.prompt for k, s in self.running().items()}
        return sum(prompts.values()) + sum(s.context + s.remaining for s in self.running().values())

    def admit(self) -> None:
        for key, s in self.sequences.items():
            if s.state != "waiting":
                continue
            need = s.context + (0 if any(k[0] == key[0] for k in self.running()) else s.prompt)
            if self.paused or len(self.running()) >= self.seqs or self.used() + need + s.remaining > self.kv:
                return
            s.state = "running"
            self.due += need

    def play(self, now: float) -> None:
        while True:
            running = self.running()
            if not running or self.paused:
                break
            step = (self.base + self.per_seq * len(running)) / self.speed
            first = min(s.remaining - s.done for s in running.values())
            at = self.now + self.due / (self.prefill * self.speed) + first * step
            if at > now + 1e-9:
                prefilled = min(self.due, (now - self.now) * self.prefill * self.speed)
                self.due -= prefilled
                decode_s = now - self.now - prefilled / (self.prefill * self.speed)
                for s in running.values():
                    s.done += max(0.0, decode_s) / step
                break
            self.now, self.due = at, 0.0
            for key, s in running.items():
                s.done += first
                if s.done >= s.remaining - 1e-9:
                    s.state = "done"
                    self.ends[key] = at
            if not self.running():
                self.due = 0.0
            self.admit()
        self.now = now


class ReplicaMachine(RuleBasedStateMachine):
    """Any history of adds, removals, pauses and speeds gives the same as the naive replica."""

    def __init__(self) -> None:
        super().__init__()
        self.model = replica(base=0.5, per_seq=0.125, prefill=8.0, kv=64, seqs=4)
        self.naive = NaiveReplica(base=0.5, per_seq=0.125, prefill=8.0, kv=64, seqs=4)
        self.now = 0.0
        self.serial = 0
        self.added: dict[str, list[int]] = {}
        self.ends: dict[tuple[str, int], float] = {}
        self.work = 0.0

    def take(self) -> None:
        for f in self.model.advance(self.now):
            self.ends[f.key, f.seq] = f.at
        self.naive.play(self.now)

    @rule(prompt=st.integers(0, 8), lengths=LENGTHS)
    def add(self, prompt: int, lengths: list[tuple[int, int]]) -> None:
        self.take()
        key = f"g{self.serial}"
        self.serial += 1
        self.added[key] = [r for r, _ in lengths]
        add(self.model, key, self.added[key], now=self.now, prompt=prompt, context=[c for _, c in lengths])
        for i, (r, c) in enumerate(lengths):
            self.naive.sequences[key, i] = NaiveSequence(prompt, r, c)
        self.naive.admit()

    @rule(seconds=st.integers(0, 80))
    def wait(self, seconds: int) -> None:
        self.now += seconds / 8
        self.take()

    @precondition(lambda self: any(self.model.unfinished(key) for key in self.added))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.take()
        key = data.draw(st.sampled_from([key for key in self.added if self.model.unfinished(key)]))
        generated = self.model.remove(key, self.now)
        for i, tokens in enumerate(generated):
            s = self.naive.sequences.pop((key, i))
            expected = s.remaining if s.state == "done" else min(s.remaining - 1, math.floor(s.done + 1e-6))
            assert tokens == expected
            assert (tokens == s.remaining) == ((key, i) in self.ends)
        del self.added[key]
        if not self.naive.running():
            self.naive.due = 0.0
        self.naive.admit()

    @rule(on=st.booleans(), recompute=st.booleans())
    def pause_or_resume(self, on: bool, recompute: bool) -> None:
        self.take()
        if on:
            self.model.pause(self.now)
            self.naive.paused = True
        else:
            self.model.resume(self.now, recompute_kv=recompute)
            running = self.naive.running()
            if recompute:
                prompts = {k[0]: s.prompt for k, s in running.items()}
                self.naive.due = sum(prompts.values()) + sum(s.context + s.done for s in running.values())
            self.naive.paused = False
            self.naive.admit()

    @rule(speed=st.sampled_from([0.5, 1.0, 2.0]))
    def change_speed(self, speed: float) -> None:
        self.take()
        self.model.set_speed(speed, self.now)
        self.naive.speed = speed

    @invariant()
    def same_batch_and_budget(self) -> None:
        running = self.naive.running()
        assert (self.model.running, self.model.kv_used) == (len(running), self.naive.used())
        assert 0 <= self.model.kv_used <= 64
        assert self.model.waiting == sum(s.state == "waiting" for s in self.naive.sequences.values())
        assert self.model.next_event_time() >= self.now

    @invariant()
    def same_ends(self) -> None:
        assert self.ends == pytest.approx(self.naive.ends, abs=1e-6)

    @invariant()
    def tokens_are_conserved(self) -> None:
        for key, remaining in self.added.items():
            if not self.model.unfinished(key):
                assert all((key, i) in self.ends for i in range(len(remaining)))
                continue
            for i, (length, done) in enumerate(zip(remaining, self.model.generated(key), strict=True)):
                assert 0 <= done <= length
                assert (done == length) == ((key, i) in self.ends)

    @invariant()
    def work_never_shrinks(self) -> None:
        work = self.model.work(self.now)
        assert work >= self.work - 1e-6
        self.work = work


TestReplicaMachine = ReplicaMachine.TestCase
TestReplicaMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
