"""One group on the emulated engine: which response has which tokens, under which weight version.

Owns ``Run`` (the bookkeeping of a group between ``generate`` and its result) and the shared arrays its token views are
cut from. Invariant: the version runs of a response cover exactly its tokens, without gap, and adjacent runs differ.
Knows no time and no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from hybridsched.engines.base import GroupRequest
from hybridsched.engines.emulated_draws import budgeted
from hybridsched.errors import ConfigError
from hybridsched.model import FinishReason, LogprobArray, Response, TokenArray, VersionRun, WeightVersion

#: (seed, sample_uid, response index) -> tokens the response has without a budget.
LengthDraw = Callable[[int, int, int], int]


class _Zeros:
    """Tokens and log-probs of any length as read-only views of one shared array: no memory, no time."""

    def __init__(self) -> None:
        self._grow(1 << 16)

    def _grow(self, size: int) -> None:
        self._tokens: TokenArray = np.zeros(size, np.int32)
        self._logprobs: LogprobArray = np.zeros(size, np.float32)
        self._tokens.flags.writeable = False
        self._logprobs.flags.writeable = False

    def tokens(self, n: int) -> TokenArray:
        """int32 [n]."""
        if n > self._tokens.shape[0]:
            self._grow(1 << n.bit_length())
        return self._tokens[:n]

    def logprobs(self, n: int) -> LogprobArray:
        """float32 [n]."""
        if n > self._logprobs.shape[0]:
            self._grow(1 << n.bit_length())
        return self._logprobs[:n]


ZEROS = _Zeros()


class Run:
    """A group in work. Sequence j of the timing model stands for response ``slots[j]``."""

    __slots__ = (
        "_closed",
        "_kept",
        "_open_at",
        "began",
        "finish",
        "future",
        "group",
        "left",
        "lengths",
        "responses",
        "slots",
    )

    def __init__(self, group: GroupRequest, lengths: Sequence[int], finish: Sequence[FinishReason]) -> None:
        """lengths[i]: tokens response i will have in all; finish[i]: why it ends there."""
        self.group = group
        self.lengths = lengths
        self.finish = finish
        self.began = 0.0  # wall clock
        self.responses = list(group.partials)
        self.slots = [i for i, r in enumerate(group.partials) if not r.finished and lengths[i] > r.n_tokens]
        self.left = len(self.slots)
        self._closed = [r.version_runs for r in group.partials]
        self._open_at = [r.n_tokens for r in group.partials]  # first token under the resident version
        self._kept = [False] * len(group.partials)  # from there on on KV of an older version
        self.future: asyncio.Future[tuple[Response, ...]] = asyncio.get_running_loop().create_future()
        for i, r in enumerate(group.partials):
            if not r.finished and lengths[i] <= r.n_tokens:  # nothing is left of its budget
                self._set(i, r.n_tokens, r.version_runs, finish[i], r.t_end)

    @property
    def have(self) -> list[int]:
        """Tokens the partials of ``slots`` came with."""
        return [self.group.partials[i].n_tokens for i in self.slots]

    @property
    def remaining(self) -> list[int]:
        """Tokens to go of ``slots`` when the group came."""
        return [self.lengths[i] - self.group.partials[i].n_tokens for i in self.slots]

    def finished(self, slot: int, version: WeightVersion, wall: float) -> None:
        """Sequence ``slot`` produced its last token."""
        i = self.slots[slot]
        self._set(i, self.lengths[i], self._runs(i, self.lengths[i], version), self.finish[i], wall)
        self.left -= 1

    def broken_off(self, generated: Sequence[int], version: WeightVersion, wall: float) -> None:
        """The group ends here with ``generated[slot]`` new tokens each; finished responses stay as they are."""
        for i, partial, new in zip(self.slots, self.have, generated, strict=True):
            if not self.responses[i].finished and new:
                self._set(i, partial + new, self._runs(i, partial + new, version), FinishReason.ABORTED, wall)

    def new_version(self, old: WeightVersion, generated: Sequence[int], on_old_kv: Sequence[bool]) -> None:
        """Weights change: what was ``generated[slot]`` belongs to ``old``; ``on_old_kv`` marks what follows."""
        for i, partial, new, kept in zip(self.slots, self.have, generated, on_old_kv, strict=True):
            if not self.responses[i].finished:
                self._closed[i] = self._runs(i, partial + new, old)
                self._open_at[i] = partial + new
                self._kept[i] = kept

    def _runs(self, i: int, end: int, version: WeightVersion) -> tuple[VersionRun, ...]:
        """Version runs up to token ``end`` with the open one closed under ``version``."""
        closed, start, kept = self._closed[i], self._open_at[i], self._kept[i]
        if end == start:
            return closed
        if closed and closed[-1].version == version and closed[-1].kept_kv == kept:
            return (*closed[:-1], VersionRun(version, closed[-1].start, end, kept))
        return (*closed, VersionRun(version, start, end, kept))

    def _set(self, i: int, n: int, runs: tuple[VersionRun, ...], finish: FinishReason, wall: float) -> None:
        began = self.group.partials[i].t_start or self.began
        self.responses[i] = Response(ZEROS.tokens(n), ZEROS.logprobs(n), runs, finish, None, None, None, began, wall)


def plan_run(group: GroupRequest, draw: LengthDraw, kv_tokens: int) -> Run:
    """Draw the lengths of a group. Raises ConfigError when one sequence of it may outgrow a replica's KV budget."""
    params = group.params
    longest = group.prompt_tokens.shape[0] + params.max_new_tokens
    if longest > kv_tokens:
        raise ConfigError(
            f"actor_rollout_ref.rollout.kv_cache_tokens: a budget of {kv_tokens} tokens cannot hold one sequence of "
            f"{longest} (prompt + max_new_tokens); raise it or lower data.max_response_length"
        )
    first = group.response_offset
    ends = [budgeted(draw(params.seed, group.sample_uid, first + i), params) for i in range(len(group.partials))]
    return Run(group, [length for length, _ in ends], [reason for _, reason in ends])
