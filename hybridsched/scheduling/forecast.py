"""The timing model of one replica: when does each of its sequences finish, given what runs beside it?

Owns ``ReplicaModel``, a pure event-driven model of an inference engine with continuous batching. The emulated engine
lives on it (simulation, tests) and the ``lookahead`` policy plays candidate decisions forward on copies of it.

The model
  - All running sequences advance together, one token a step. A step takes ``(decode_base_s + decode_per_seq_s x n) /
    speed`` seconds with n running sequences. Progress is fluid: between steps a sequence stands at a fraction of a
    token, and a partial response has the floor of it.
  - Prefill runs at ``prefill_tokens_per_s x speed`` and goes first: while any is due, nobody decodes. A group's prompt
    is prefilled once, and again only if none of its sequences was running meanwhile; what a continued response
    already has (``context``) is prefilled per sequence. That is the price of an abort.
  - KV cache: a sequence is admitted when its *final* length (context plus remaining, plus the prompt for the first of
    its group) fits into what is left of ``kv_tokens``, and fewer than ``max_num_seqs`` run. Others wait, first in
    first out, none overtakes. Reserving the final length is why nothing is ever preempted here. An engine that
    admits on present length runs more sequences at first and pays with preemptions later.

Why it is cheap: a sequence that joined at progress P with L tokens to go ends at progress P + L whatever happens to
the step time in between, so ends are a heap over progress, and time is the integral of the step time over progress.
Each event costs O(log n); reserved KV, work done and resident tokens are running sums.

Invariants: time never goes back; tokens are conserved (what ``remove`` returns plus what is left is what was added);
0 <= kv_used <= kv_tokens; 0 <= running <= max_num_seqs.

It does not draw lengths, know weights or samples, or read a clock. Simplification: prefill that is due for a removed
group is not refunded unless the replica becomes empty.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hybridsched.errors import InternalError

#: Fraction of a token by which accumulated rounding may leave a whole one short.
_TOKEN_EPS = 1e-6
_WAITING = -1.0
_DONE = -2.0
_COMPACT_ABOVE = 64


class Finished(NamedTuple):
    """Sequence number ``seq`` of group ``key`` produced its last token at time ``at``."""

    key: str
    seq: int
    at: float


class _Group:
    """One lease on the replica. ``joined[i]`` is the progress at admission, or _WAITING or _DONE."""

    __slots__ = ("context", "dead", "joined", "key", "open", "prompt", "remaining", "running")

    def __init__(self, key: str, prompt: int, remaining: list[int], context: list[int]) -> None:
        self.key = key
        self.prompt = prompt
        self.remaining = remaining
        self.context = context
        self.joined = [_WAITING] * len(remaining)
        self.open = len(remaining)
        self.running = 0
        self.dead = False

    def copy(self) -> _Group:
        twin = _Group(self.key, self.prompt, self.remaining, self.context)  # both lists are never changed
        twin.joined = self.joined.copy()
        twin.open, twin.running, twin.dead = self.open, self.running, self.dead
        return twin


class ReplicaModel:
    """One replica in time. Every method that takes ``now`` first plays all events up to it; ``now`` must not fall."""

    def __init__(
        self,
        *,
        decode_base_s: float,
        decode_per_seq_s: float,
        prefill_tokens_per_s: float,
        kv_tokens: int,
        max_num_seqs: int,
        speed: float = 1.0,
        now: float = 0.0,
    ) -> None:
        """decode_*: seconds of a step at speed 1; kv_tokens: KV budget. Raises ValueError for impossible numbers."""
        if not (decode_base_s >= 0 and decode_per_seq_s >= 0 and prefill_tokens_per_s > 0 and speed > 0):
            raise ValueError(
                "a replica needs decode times >= 0, a prefill rate > 0 and a speed > 0, got "
                f"{decode_base_s=}, {decode_per_seq_s=}, {prefill_tokens_per_s=}, {speed=}"
            )
        if kv_tokens < 1 or max_num_seqs < 1:
            raise ValueError(f"a replica needs room for at least one sequence, got {kv_tokens=}, {max_num_seqs=}")
        self._base_s = decode_base_s
        self._per_seq_s = decode_per_seq_s
        self._prefill_rate = prefill_tokens_per_s
        self._kv_tokens = kv_tokens
        self._max_seqs = max_num_seqs
        self._speed = speed
        self._now = now
        self._paused = False
        self._progress = 0.0  # decode steps since the beginning
        self._prefill_due = 0.0  # tokens
        self._work = 0.0  # tokens decoded and prefilled
        self._groups: dict[str, _Group] = {}
        self._ends: list[tuple[float, int, _Group, int]] = []  # heap of (progress at the end, serial, group, index)
        self._dead_ends = 0
        self._serial = 0
        self._queue: deque[tuple[_Group, int]] = deque()
        self._running = 0
        self._waiting = 0
        self._kv_used = 0
        self._resident0 = 0.0  # resident KV tokens = _resident0 + running x progress
        self._finished: list[Finished] = []

    @property
    def now(self) -> float:
        """Time up to which the model has been played."""
        return self._now

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return self._running

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place."""
        return self._waiting

    @property
    def kv_used(self) -> int:
        """Reserved KV tokens."""
        return self._kv_used

    @property
    def kv_tokens(self) -> int:
        """KV budget in tokens."""
        return self._kv_tokens

    @property
    def paused(self) -> bool:
        """True between pause and resume."""
        return self._paused

    @property
    def speed(self) -> float:
        """Factor on decode and prefill."""
        return self._speed

    def step_s(self) -> float:
        """Seconds of a decode step with what runs now."""
        return (self._base_s + self._per_seq_s * self._running) / self._speed

    def unfinished(self, key: str) -> int:
        """Sequences of a group that have not finished (0 when unknown)."""
        group = self._groups.get(key)
        return 0 if group is None else group.open

    def generated(self, key: str) -> list[int]:
        """Tokens each sequence of a group has produced since it was added, as of the last ``now``."""
        group = self._group(key)
        return [self._tokens(group, i) for i in range(len(group.remaining))]

    def in_batch(self, key: str) -> list[bool]:
        """Which sequences of a group are running, as of the last ``now``."""
        return [joined >= 0 for joined in self._group(key).joined]

    def resident_tokens(self) -> float:
        """KV tokens really filled: prompts, contexts and what was decoded of everything running."""
        return self._resident0 + self._running * self._progress

    def work(self, now: float) -> float:
        """Tokens decoded and prefilled up to ``now``, without playing events (exact up to the next one)."""
        if self._paused or not self._running:
            return self._work
        elapsed = max(0.0, min(now, self.next_event_time()) - self._now)
        rate = self._prefill_rate * self._speed
        prefill_s = self._prefill_due / rate
        if elapsed < prefill_s:
            return self._work + elapsed * rate
        step = self.step_s()
        steps = (elapsed - prefill_s) / step if step > 0 else 0.0
        return self._work + self._prefill_due + steps * self._running

    def next_event_time(self) -> float:
        """Absolute time of the next finish if nothing is added or removed before; inf when nothing moves."""
        if self._paused or not self._running:
            return math.inf
        ends = self._ends
        while ends[0][2].dead:
            heapq.heappop(ends)
            self._dead_ends -= 1
        prefill_s = self._prefill_due / (self._prefill_rate * self._speed)
        return self._now + prefill_s + max(0.0, ends[0][0] - self._progress) * self.step_s()

    def advance(self, now: float) -> list[Finished]:
        """Play up to and including ``now``; returns what finished since the last call, in order."""
        self._play(now)
        finished, self._finished = self._finished, []
        return finished

    def add(
        self, key: str, *, prompt_tokens: int, remaining: Sequence[int], context: Sequence[int], now: float
    ) -> None:
        """Take a group: ``remaining[i]`` (>= 1) tokens to produce after ``context[i]`` tokens it already has.

        Raises ValueError for a group that is known, is empty, has a length that cannot be, or has a sequence that can
        never fit into the KV budget; nothing is changed then.
        """
        if key in self._groups:
            raise ValueError(f"group {key!r} is on this replica already")
        if not remaining or len(remaining) != len(context) or min(remaining) < 1 or min(context) < 0:
            raise ValueError(f"group {key!r}: impossible lengths, remaining={remaining}, context={context}")
        longest = prompt_tokens + max(map(int.__add__, remaining, context))
        if longest > self._kv_tokens:
            raise ValueError(
                f"group {key!r}: a sequence of {longest} tokens never fits into a KV budget of {self._kv_tokens}"
            )
        self._play(now)
        group = _Group(key, prompt_tokens, list(remaining), list(context))
        self._groups[key] = group
        self._queue.extend((group, i) for i in range(len(remaining)))
        self._waiting += len(remaining)
        self._admit()

    def remove(self, key: str, now: float) -> list[int]:
        """Abort a group: tokens each of its sequences produced since ``add``. Its finishes are no longer reported.

        Raises InternalError when the group is not here (unknown, or all its sequences had finished).
        """
        self._play(now)
        group = self._group(key)
        generated = [self._tokens(group, i) for i in range(len(group.remaining))]
        self._drop(group)
        self._admit()
        return generated

    def abort(self, now: float) -> dict[str, list[int]]:
        """Abort all groups, in the order they came; see ``remove``."""
        self._play(now)
        generated = {key: self.generated(key) for key in self._groups}
        for group in list(self._groups.values()):
            self._drop(group)
        return generated

    def pause(self, now: float) -> None:
        """Stop stepping and admitting. Running sequences stay where they are."""
        self._play(now)
        self._paused = True

    def resume(self, now: float, *, recompute_kv: bool = False) -> None:
        """Step again; with ``recompute_kv`` everything resident is prefilled anew first."""
        self._play(now)
        if recompute_kv:
            self._prefill_due = max(0.0, self.resident_tokens())
        self._paused = False
        self._admit()

    def set_speed(self, speed: float, now: float) -> None:
        """Change the speed from ``now`` on. Raises ValueError unless positive."""
        if not speed > 0:
            raise ValueError(f"speed must be > 0, got {speed}")
        self._play(now)
        self._speed = speed

    def copy(self) -> ReplicaModel:
        """An independent model in the same state, to play a candidate forward. O(sequences)."""
        twin = object.__new__(ReplicaModel)
        twin.__dict__.update(self.__dict__)
        groups = {id(group): group.copy() for group in self._groups.values()}
        twin._groups = {key: groups[id(group)] for key, group in self._groups.items()}
        live = [entry for entry in self._ends if not entry[2].dead]
        twin._ends = [(end, serial, groups[id(group)], i) for end, serial, group, i in live]
        heapq.heapify(twin._ends)
        twin._dead_ends = 0
        twin._queue = deque((groups[id(group)], i) for group, i in self._queue if not group.dead)
        twin._finished = self._finished.copy()
        return twin

    def _group(self, key: str) -> _Group:
        group = self._groups.get(key)
        if group is None:
            raise InternalError(f"group {key!r} is not on this replica at {self._now:.6f} s")
        return group

    def _tokens(self, group: _Group, i: int) -> int:
        joined = group.joined[i]
        if joined == _WAITING:
            return 0
        if joined == _DONE:
            return group.remaining[i]
        return min(group.remaining[i] - 1, math.floor(self._progress - joined + _TOKEN_EPS))

    def _play(self, now: float) -> None:
        """Process every finish due by ``now``, then move to ``now``."""
        if now < self._now:
            raise InternalError(f"replica model asked to go back from {self._now!r} to {now!r} s")
        due = self.next_event_time()
        while due <= now:
            self._finish(due)
            due = self.next_event_time()
        if self._running and not self._paused:
            self._drift(now - self._now)
        self._now = now

    def _drift(self, elapsed: float) -> None:
        """Let time pass in which nothing finishes."""
        if elapsed <= 0:
            return
        rate = self._prefill_rate * self._speed
        prefilled = min(self._prefill_due, elapsed * rate)
        self._prefill_due -= prefilled
        self._work += prefilled
        decode_s = elapsed - prefilled / rate
        if self._prefill_due > 0 or decode_s <= 0:
            return
        step = self.step_s()
        left = max(0.0, self._ends[0][0] - self._progress)  # the head is alive: next_event_time saw to it
        steps = min(left, decode_s / step) if step > 0 else 0.0
        self._progress += steps
        self._work += steps * self._running

    def _finish(self, due: float) -> None:
        """Jump to the next finish and take everything that ends there out of the batch."""
        ends = self._ends
        end = max(ends[0][0], self._progress)
        self._work += self._prefill_due + (end - self._progress) * self._running
        self._prefill_due = 0.0
        self._progress = end
        self._now = due
        while ends and (ends[0][0] <= end or ends[0][2].dead):
            _, _, group, i = heapq.heappop(ends)
            if group.dead:
                self._dead_ends -= 1
                continue
            self._leave(group, i)
            group.joined[i] = _DONE
            group.open -= 1
            self._finished.append(Finished(group.key, i, due))
            if not group.open:
                del self._groups[group.key]
        self._admit()

    def _admit(self) -> None:
        """Let waiting sequences join the batch, first come first served."""
        queue = self._queue
        while queue and not self._paused and self._running < self._max_seqs:
            group, i = queue[0]
            if group.dead:
                queue.popleft()
                continue
            prefill = group.context[i] if group.running else group.context[i] + group.prompt
            if self._kv_used + prefill + group.remaining[i] > self._kv_tokens:
                return
            queue.popleft()
            self._waiting -= 1
            self._running += 1
            group.running += 1
            group.joined[i] = self._progress
            self._kv_used += prefill + group.remaining[i]
            self._prefill_due += prefill
            self._resident0 += prefill - self._progress
            self._serial += 1
            heapq.heappush(self._ends, (self._progress + group.remaining[i], self._serial, group, i))

    def _leave(self, group: _Group, i: int) -> None:
        """A running sequence leaves the batch: its KV, and with the last of the group the prompt's, is free."""
        self._running -= 1
        group.running -= 1
        kept = group.context[i] if group.running else group.context[i] + group.prompt
        self._kv_used -= kept + group.remaining[i]
        self._resident0 -= kept - group.joined[i]
        if not self._running:
            self._prefill_due = 0.0
            self._resident0 = 0.0

    def _drop(self, group: _Group) -> None:
        """Forget a group that is not done."""
        for i, joined in enumerate(group.joined):
            if joined == _WAITING:
                self._waiting -= 1
            elif joined != _DONE:
                self._leave(group, i)
                self._dead_ends += 1
        group.dead = True
        del self._groups[group.key]
        self._finished = [f for f in self._finished if f.key != group.key]
        if self._dead_ends > _COMPACT_ABOVE and self._dead_ends * 2 > len(self._ends):
            self._ends = [entry for entry in self._ends if not entry[2].dead]
            heapq.heapify(self._ends)
            self._dead_ends = 0
