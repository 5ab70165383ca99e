"""The running batch of the torch engine: admission, prefill, one decode step for all rows at once.

Owns: `Sequence` (one response being generated), `Batch` (rows 0..n-1 are active, always compact).

Invariants: the host arrays and the KV row of a sequence move together; a row's cache holds prompt + response but for
the last token, which is the next one to be fed, so prompts, partials and running sequences all go through one path;
nothing in `step` loops over sequences except those that just finished.

Does not: know groups, futures or pausing (torch_engine.py does); never waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hybridsched.engines.torch_kv import KVCache
from hybridsched.engines.torch_sampler import Truncation, sample_tokens, uniforms
from hybridsched.engines.torch_weights import FusedWeights, RotaryTable, causal_attend, run_layers
from hybridsched.errors import FaultError
from hybridsched.model import FinishReason, LogprobArray, SamplingParams, TokenArray, VersionRun, WeightVersion

PREFILL_TOKENS = 4096  #: of one step; keeps the event loop turning and the activations small


@dataclass(eq=False, slots=True)
class Sequence:
    """One response: what it has, and how it goes on. ``tokens`` and ``logprobs`` are current only while detached."""

    owner: Any  #: its group; sequences of one owner share their prompt
    prompt: TokenArray
    params: SamplingParams
    draw_key: int
    stops: tuple[int, ...]
    tokens: TokenArray
    logprobs: LogprobArray
    runs: list[VersionRun] = field(default_factory=list)
    row: int = -1  #: in the batch, -1 while detached
    run_start: int = 0  #: first token that is in no run yet
    kept_kv: bool = False  #: its cache was computed by older weights
    finish: FinishReason = FinishReason.ABORTED

    @property
    def need(self) -> int:
        """Cache tokens in the worst case."""
        return int(self.prompt.shape[0]) + self.params.max_new_tokens

    def close_run(self, version: WeightVersion, end: int) -> None:
        """Tokens since the last run, up to ``end``, were sampled under ``version``."""
        if end > self.run_start:
            last = self.runs[-1] if self.runs else None
            if last and last.end == self.run_start and (last.version, last.kept_kv) == (version, self.kept_kv):
                self.runs[-1] = last._replace(end=end)
            else:
                self.runs.append(VersionRun(version, self.run_start, end, self.kept_kv))
            self.run_start = end


class _Rows:
    """Host arrays, one entry per row. ``wide`` ones have a second dimension that grows on demand."""

    def __init__(self, rows: int) -> None:
        self.token = np.zeros(rows, np.int64)  #: next token to feed
        self.position = np.zeros(rows, np.int64)  #: its position = tokens in the cache
        self.count = np.zeros(rows, np.int64)  #: response tokens so far
        self.limit = np.zeros(rows, np.int64)  #: response budget
        self.key = np.zeros(rows, np.uint64)
        self.temperature = np.ones(rows, np.float64)
        self.top_k = np.zeros(rows, np.int64)
        self.top_p = np.ones(rows, np.float64)
        self.min_p = np.zeros(rows, np.float64)
        self.stops = np.full((rows, 1), -1, np.int64)
        self.tokens = np.zeros((rows, 1), np.int32)  #: the response
        self.logprobs = np.zeros((rows, 1), np.float32)

    def widen(self, response: int, stops: int) -> None:
        """Make room for responses and stop lists of these lengths."""
        for name, width, fill in (("tokens", response, 0), ("logprobs", response, 0), ("stops", stops, -1)):
            old = getattr(self, name)
            if old.shape[1] < width:
                new = np.full((old.shape[0], width), fill, old.dtype)
                new[:, : old.shape[1]] = old
                setattr(self, name, new)

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for array in vars(self).values():
            array[target] = array[source]


class Batch:
    """Sequences running together over one KV cache."""

    def __init__(self, weights: FusedWeights, cache: KVCache, version: WeightVersion) -> None:
        self.weights, self.cache, self.version = weights, cache, version
        self.sequences: list[Sequence] = []
        self.work = 0  #: tokens prefilled or sampled
        self._rows = _Rows(cache.max_rows)
        self._rotary = RotaryTable(weights.config, weights.dtype, weights.device)
        self._blocked: Sequence | None = None  # did not fit; asked again after the next detach
        self._settings: tuple[Tensor, Truncation | None, bool] | None = None  # of the sampler; None: the set changed

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def reserved_tokens(self) -> int:
        """Cache tokens promised to running sequences."""
        return len(self.sequences) * self.cache.stride

    # ---- who runs -------------------------------------------------------------------------------------------------

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def admit(self, waiting: deque[Sequence]) -> list[Sequence]:
        """Move sequences from the left of ``waiting`` into the batch, in order, as far as rows and budget go.

        At most PREFILL_TOKENS tokens are prefilled (one longer context is admitted alone). Returns the admitted ones.
        """
        if not waiting or waiting[0] is self._blocked:
            return []
        jobs: list[tuple[int, TokenArray]] = []
        copies: list[tuple[int, int, int]] = []
        # Owners whose prompt is in the cache already, computed by the present weights.
        shared: dict[Any, int] = {s.owner: s.row for s in self.sequences if not s.kept_kv}
        settled = len(self.sequences)
        longest = int(self._rows.position[:settled].max(initial=0))
        need, cost = max((s.need for s in self.sequences), default=0), 0
        while waiting:
            sequence = waiting[0]
            need = max(need, sequence.need)
            if not self.cache.fits(len(self.sequences) + 1, need):
                self._blocked = sequence
                break
            context = np.concatenate((sequence.prompt, sequence.tokens))[:-1]
            source = None if sequence.tokens.shape[0] else shared.get(sequence.owner)
            if source is None and jobs and cost + context.shape[0] > PREFILL_TOKENS:
                break
            # Rows of this very call have nothing in the cache yet: only the settled ones have to be moved.
            self.cache.make_room(len(self.sequences) + 1, need, settled, longest)
            waiting.popleft()
            row = self._attach(sequence)
            if source is not None:
                copies.append((source, row, context.shape[0]))
            else:
                jobs.append((row, context))
                cost += context.shape[0]
                shared.setdefault(sequence.owner, row)
        self._prefill([job for job in jobs if job[1].shape[0]])
        for source, row, length in copies:
            self.cache.move(source, row, length)
        return self.sequences[settled:]

    def detach(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch; it keeps what it has. The last row moves into the gap."""
        row, last = sequence.row, len(self.sequences) - 1
        count = int(self._rows.count[row])
        sequence.tokens = self._rows.tokens[row, :count].copy()
        sequence.logprobs = self._rows.logprobs[row, :count].copy()
        sequence.close_run(self.version, count)
        sequence.row, sequence.kept_kv = -1, False
        if row != last:
            self._rows.move(last, row)
            self.cache.move(last, row, int(self._rows.position[row]))
            self.sequences[row] = self.sequences[last]
            self.sequences[row].row = row
        self.sequences.pop()
        self._settings = self._blocked = None

    def detach_all(self) -> list[Sequence]:
        """Empty the batch."""
        out = list(self.sequences)
        for sequence in reversed(out):  # from the last row down nothing has to move
            self.detach(sequence)
        return out

    def set_version(self, version: WeightVersion) -> None:
        """Weights changed while the cache was kept: running sequences go on under ``version``."""
        for sequence in self.sequences:
            sequence.close_run(self.version, int(self._rows.count[sequence.row]))
            sequence.kept_kv = True
        self.version = version

    def reset(self) -> None:
        """After a fault: no sequence, a clean cache."""
        for sequence in self.sequences:
            sequence.row = -1
        self.sequences.clear()
        self._settings = self._blocked = None
        self.cache.zero()

    # ---- one step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def step(self) -> list[Sequence]:
        """One token for every row. Returns the sequences that finished, detached.

        Raises FaultError when the logits are not finite.
        """
        n, r = len(self.sequences), self._rows
        positions = self._to_device(r.position[:n])
        longest = int(r.position[:n].max())
        self._rotary.reserve(longest + 1)
        attend = self.cache.decode_attend(n, positions, longest)
        hidden = run_layers(self.weights, self._to_device(r.token[:n]), self._rotary.at(positions), attend)
        temperature, truncation, any_greedy = self._settings or self._sampler_settings()
        u = self._to_device(uniforms(r.key[:n], r.count[:n])[:, None])
        drawn, logprob = sample_tokens(self.weights.logits(hidden), temperature, u, truncation, any_greedy)
        tokens, logprobs = drawn.cpu().numpy(), logprob.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise FaultError(
                f"the model's logits are not finite under weight version {self.version}: its weights hold NaN or "
                "infinity (a tensor missed in the last update, or a diverged training)"
            )
        rows = np.arange(n)
        r.tokens[rows, r.count[:n]] = tokens
        r.logprobs[rows, r.count[:n]] = logprobs
        r.token[:n] = tokens
        r.position[:n] += 1
        r.count[:n] += 1
        self.work += n
        stopped = (tokens[:, None] == r.stops[:n]).any(axis=1)
        finished = np.flatnonzero(stopped | (r.count[:n] >= r.limit[:n]))
        out = [self.sequences[row] for row in finished]
        for sequence in reversed(out):  # from the last row down: what moves into a gap is never itself finished
            sequence.finish = FinishReason.STOP if stopped[sequence.row] else FinishReason.LENGTH
            self.detach(sequence)
        return out

    def _attach(self, sequence: Sequence) -> int:
        """Give a sequence the next row; its context is prefilled later."""
        row, r, params = len(self.sequences), self._rows, sequence.params
        count = int(sequence.tokens.shape[0])
        r.widen(params.max_new_tokens, len(sequence.stops))
        r.token[row] = sequence.tokens[-1] if count else sequence.prompt[-1]
        r.position[row] = sequence.prompt.shape[0] + count - 1
        r.count[row], r.limit[row], r.key[row] = count, params.max_new_tokens, sequence.draw_key
        r.temperature[row], r.top_p[row], r.min_p[row] = params.temperature, params.top_p, params.min_p
        r.top_k[row] = params.top_k if params.top_k > 0 else self.weights.config.vocab_size
        r.stops[row] = -1
        r.stops[row, : len(sequence.stops)] = sequence.stops
        r.tokens[row, :count], r.logprobs[row, :count] = sequence.tokens, sequence.logprobs
        sequence.row, sequence.run_start = row, count
        self.sequences.append(sequence)
        self._settings = None
        return row

    def _prefill(self, jobs: list[tuple[int, TokenArray]]) -> None:
        """Compute the cache of (row, context) pairs, padded together in pieces of similar length."""
        jobs = sorted(jobs, key=lambda job: -job[1].shape[0])
        while jobs:
            length = jobs[0][1].shape[0]
            piece = jobs[: max(1, PREFILL_TOKENS // length)]
            jobs = jobs[len(piece) :]
            padded = np.zeros((len(piece), length), np.int64)
            for i, (_, context) in enumerate(piece):
                padded[i, : context.shape[0]] = context
            rows = self._to_device(np.array([row for row, _ in piece]))
            self._rotary.reserve(length)
            positions = torch.arange(length, device=self.weights.device).repeat(len(piece))
            attend = causal_attend(len(piece), self.cache.store(rows))
            run_layers(self.weights, self._to_device(padded.reshape(-1)), self._rotary.at(positions), attend)
            self.work += sum(context.shape[0] for _, context in piece)

    def _sampler_settings(self) -> tuple[Tensor, Truncation | None, bool]:
        """Tensors of the sampler for the present set of rows."""
        n, r = len(self.sequences), self._rows
        vocab = self.weights.config.vocab_size
        truncated = bool(((r.top_k[:n] < vocab) | (r.top_p[:n] < 1.0) | (r.min_p[:n] > 0.0)).any())
        limits = (
            Truncation(*(self._to_device(a[:n].copy()) for a in (r.top_k, r.top_p, r.min_p))) if truncated else None
        )
        temperature = self._to_device(r.temperature[:n, None].copy())
        if self.weights.dtype != torch.float64:
            temperature = temperature.float()
        self._settings = (temperature, limits, bool((r.temperature[:n] <= 0).any()))
        return self._settings

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        """A tensor on the engine's device (sharing memory where that is the host)."""
        return torch.from_numpy(array).to(self.weights.device)
