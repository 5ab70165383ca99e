"""Groups of the torch engine: from a request to sequences, and from sequences back to responses.

Owns: `Group` (one generate() call), the checks a request must pass, how a detached sequence becomes a Response.

Invariants: `responses` has one entry per partial, in order, at all times; `running` holds exactly the unfinished ones.

Does not: admit, step or wait.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

import numpy as np

from hybridsched.engines.base import GroupRequest
from hybridsched.engines.torch_batch import Sequence
from hybridsched.engines.torch_sampler import draw_key
from hybridsched.errors import DataError
from hybridsched.model import FinishReason, Response
from hybridsched.models.qwen3 import ModelConfig


@dataclass(eq=False, slots=True)
class Group:
    """One generate() call."""

    key: str
    future: asyncio.Future[tuple[Response, ...]]
    responses: list[Response]
    running: dict[int, Sequence] = field(default_factory=dict)  #: unfinished ones by index
    returned: asyncio.Event = field(default_factory=asyncio.Event)  #: generate() is returning
    t_start: float = 0.0  #: wall clock of the first admission, 0 before

    def started(self, now: float) -> None:
        """One of its sequences entered the batch."""
        self.t_start = self.t_start or now

    def record(self, index: int) -> None:
        """Write what a detached sequence has into its response."""
        sequence, before = self.running[index], self.responses[index]
        mask = before.response_mask
        if mask is not None:
            mask = np.concatenate((mask, np.ones(sequence.tokens.shape[0] - mask.shape[0], np.uint8)))
        self.responses[index] = replace(
            before,
            token_ids=sequence.tokens,
            logprobs=sequence.logprobs,
            version_runs=tuple(sequence.runs),
            finish=sequence.finish,
            response_mask=mask,
            t_start=before.t_start or self.t_start,
            t_end=time.time() if self.t_start else before.t_end,
        )

    def finish(self, sequence: Sequence) -> None:
        """A sequence reached its end; the last one completes the group."""
        index = next(i for i, s in self.running.items() if s is sequence)
        self.record(index)
        del self.running[index]
        if not self.running:
            self.complete()

    def complete(self) -> None:
        """Let generate() return the responses as they are."""
        if not self.future.done():
            self.future.set_result(tuple(self.responses))

    def fail(self, error: Exception) -> None:
        """Let generate() raise."""
        self.running.clear()
        if not self.future.done():
            self.future.set_exception(error)


def open_group(request: GroupRequest, config: ModelConfig, kv_tokens: int, stops: tuple[int, ...]) -> Group:
    """Check a request and turn its unfinished partials into sequences.

    ``stops``: the engine's own. Finished partials, and aborted ones without budget, are responses already.
    Raises DataError for a request that can never run.
    """
    prompt, params = np.asarray(request.prompt_tokens, np.int32), request.params
    if not prompt.shape[0] or int(prompt.min()) < 0 or int(prompt.max()) >= config.vocab_size:
        raise DataError(f"group {request.key}: its prompt is empty or has a token outside 0..{config.vocab_size - 1}")
    need = int(prompt.shape[0]) + params.max_new_tokens
    for limit, cure in (
        (kv_tokens, "raise actor_rollout_ref.rollout.kv_cache_tokens"),
        (config.max_position_embeddings, "lower data.max_response_length (the model's context ends there)"),
    ):
        if need > limit:
            raise DataError(f"group {request.key}: prompt plus max_new_tokens is {need}, at most {limit} fit; {cure}")
    stops = tuple(dict.fromkeys((() if params.ignore_eos else stops) + tuple(params.stop_token_ids)))
    group = Group(request.key, asyncio.get_running_loop().create_future(), list(request.partials))
    for index, partial in enumerate(request.partials):
        if partial.finished:
            continue
        if partial.n_tokens >= params.max_new_tokens:
            group.responses[index] = replace(partial, finish=FinishReason.LENGTH)
            continue
        group.running[index] = Sequence(
            owner=group,
            prompt=prompt,
            params=params,
            draw_key=draw_key(params.seed, request.sample_uid, request.response_offset + index),
            stops=stops,
            tokens=partial.token_ids,
            logprobs=partial.logprobs,
            runs=list(partial.version_runs),
        )
    return group
