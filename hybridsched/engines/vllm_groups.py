"""Groups of the vLLM engine: one stream of tokens per unfinished response, and how streams become responses.

Owns: `Stream` (a response while it grows, over any number of vLLM requests) and `Group` (one generate() call).

Invariants: `Group.responses` has one entry per partial, in order, at all times; a stream holds every token that vLLM
has delivered, with its log-prob and version; nothing is ever taken away from it.

Does not: import vLLM, submit, abort or wait.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hybridsched.engines.base import GroupRequest
from hybridsched.engines.torch_sampler import draw_key
from hybridsched.errors import DataError, FaultError
from hybridsched.model import FinishReason, Response, VersionRun, WeightVersion

_SEED_BITS = 63  #: vLLM's seeds are signed 64-bit integers
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


@dataclass(eq=False, slots=True)
class Stream:
    """One response that is not finished."""

    group: Group
    index: int
    tokens: list[int]  #: of the response so far, the partial's included
    logprobs: list[float]
    runs: list[VersionRun]
    finish: FinishReason = FinishReason.ABORTED
    attempt: int = 0  #: vLLM requests so far
    request_id: str = ""  #: of the one that runs; "" between requests
    from_token: int = 0  #: tokens there were when it began
    recalled: bool = False  #: aborted by the engine itself, to be submitted again
    kept_from: list[WeightVersion] = field(default_factory=list)  #: versions it met with the KV of an older one
    task: asyncio.Task[None] | None = None

    def begin(self) -> tuple[list[int], int, int]:
        """The next vLLM request: token ids (prompt and response so far), new tokens at most, seed."""
        request = self.group.request
        self.attempt += 1
        self.request_id = f"{request.key}/{self.index}/{self.attempt}"
        self.from_token = len(self.tokens)
        self.kept_from.clear()
        ids = [*request.prompt_tokens.tolist(), *self.tokens]
        return ids, request.params.max_new_tokens - len(self.tokens), self._seed()

    def _seed(self) -> int:
        """vLLM's generator starts anew with every request, so where a response goes on is part of the seed."""
        request = self.group.request
        index = request.response_offset + self.index
        key = draw_key(request.params.seed, request.sample_uid, index)
        if self.tokens:
            key = draw_key(key, len(self.tokens), index)
        return key >> (64 - _SEED_BITS)

    def take(self, tokens: Sequence[int], logprobs: Sequence[Mapping[int, Any]]) -> None:
        """Tokens that arrived, with vLLM's log-prob entries of each. Raises FaultError when one is not finite."""
        found = [entry[token].logprob for token, entry in zip(tokens, logprobs, strict=True)]
        if not all(map(math.isfinite, found)):
            raise FaultError(
                f"group {self.group.request.key}: vLLM sampled from logits that are not finite, after "
                f"{len(self.tokens)} tokens: weights are missing or damaged; the replica has to be synced again"
            )
        self.tokens.extend(tokens)
        self.logprobs.extend(found)

    def end(self, reason: str | None, spans: Sequence[Any] | None, current: WeightVersion) -> None:
        """The vLLM request ended: ``spans`` say which version sampled which of its tokens (None: ``current``)."""
        self.finish = _FINISH.get(reason or "", FinishReason.ABORTED)
        self.request_id = ""
        new = len(self.tokens) - self.from_token
        found = [(parse_version(s.version, current), s.start, min(s.end, new)) for s in spans or ()]
        if not found and new:
            found = [(current, 0, new)]
        for version, start, stop in found:
            if stop > start:
                self._add_run(version, self.from_token + start, self.from_token + stop)

    def _add_run(self, version: WeightVersion, start: int, stop: int) -> None:
        kept = version in self.kept_from
        last = self.runs[-1] if self.runs else None
        if last is not None and (last.version, last.kept_kv, last.end) == (version, kept, start):
            self.runs[-1] = last._replace(end=stop)
        else:
            self.runs.append(VersionRun(version, start, stop, kept))


@dataclass(eq=False, slots=True)
class Group:
    """One generate() call."""

    request: GroupRequest
    stops: list[int]
    future: asyncio.Future[tuple[Response, ...]]
    responses: list[Response]
    running: dict[int, Stream] = field(default_factory=dict)  #: unfinished ones by index
    admitted: bool = False  #: its requests may go to vLLM (else a drain holds it)
    aborting: bool = False
    returned: asyncio.Event = field(default_factory=asyncio.Event)  #: generate() is returning
    t_start: float = 0.0  #: wall clock of the first submission, 0 before

    def record(self, stream: Stream) -> None:
        """Write what a stream has into its response; the last one completes the group."""
        before = self.responses[stream.index]
        mask = before.response_mask
        if mask is not None:
            mask = np.concatenate((mask, np.ones(len(stream.tokens) - mask.shape[0], np.uint8)))
        self.responses[stream.index] = replace(
            before,
            token_ids=np.array(stream.tokens, np.int32),
            logprobs=np.array(stream.logprobs, np.float32),
            version_runs=tuple(stream.runs),
            finish=stream.finish,
            response_mask=mask,
            t_start=before.t_start or self.t_start,
            t_end=time.time() if self.t_start else before.t_end,
        )
        del self.running[stream.index]
        if not self.running and not self.future.done():
            self.future.set_result(tuple(self.responses))

    def fail(self, error: Exception) -> None:
        """Let generate() raise."""
        if not self.future.done():
            self.future.set_exception(error)


def open_group(request: GroupRequest, *, vocab_size: int, max_tokens: int, stops: tuple[int, ...]) -> Group:
    """Check a request and turn its unfinished partials into streams.

    ``max_tokens``: prompt and response together. ``stops``: the model's own ends. Finished partials, and aborted ones
    without budget, are responses already. Raises DataError for a request that can never run.
    """
    prompt, params = np.asarray(request.prompt_tokens, np.int32), request.params
    if not prompt.shape[0] or int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        raise DataError(f"group {request.key}: its prompt is empty or has a token outside 0..{vocab_size - 1}")
    need = int(prompt.shape[0]) + params.max_new_tokens
    if need > max_tokens:
        raise DataError(
            f"group {request.key}: prompt plus max_new_tokens is {need}, at most {max_tokens} fit; raise "
            "data.max_prompt_length or data.max_response_length (and actor_rollout_ref.rollout.kv_cache_tokens)"
        )
    own = () if params.ignore_eos else stops
    group = Group(
        request,
        list(dict.fromkeys((*own, *params.stop_token_ids))),
        asyncio.get_running_loop().create_future(),
        list(request.partials),
    )
    for index, partial in enumerate(request.partials):
        if partial.finished:
            continue
        if partial.n_tokens >= params.max_new_tokens:
            group.responses[index] = replace(partial, finish=FinishReason.LENGTH)
            continue
        group.running[index] = Stream(
            group, index, partial.token_ids.tolist(), partial.logprobs.tolist(), list(partial.version_runs)
        )
    return group


def parse_version(label: str, current: WeightVersion) -> WeightVersion:
    """The version behind vLLM's label ("1.17"); ``current`` for vLLM's own "default"."""
    lineage, _, number = label.partition(".")
    return WeightVersion(int(lineage), int(number)) if lineage.isdigit() and number.isdigit() else current
