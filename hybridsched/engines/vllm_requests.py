"""Single requests to AsyncLLM: following one response as it grows, and teacher forcing.

Owns: how our sampling parameters become vLLM's and what of vLLM's answers is kept. Invariants: token in, token out (no
text); the salt of a request's prefix-cache keys names its weight version. Does not: decide when (vllm_engine does).
vLLM is imported by the time anything here is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np

from hybridsched.engines.vllm_groups import Stream
from hybridsched.model import LogprobArray, TokenArray, WeightVersion

_counter = iter(range(1 << 62))


async def follow(llm: Any, stream: Stream, version: WeightVersion, worked: Callable[[int], None]) -> None:
    """Run a stream's next vLLM request to its end; ``worked`` counts the tokens that arrive.

    The stream has every token that arrived, also when this is cancelled.
    """
    ids, budget, seed = stream.begin()
    reason, spans, ended = "abort", None, False
    answers = llm.generate(_prompt(ids, version), _sampling(stream, budget, seed), stream.request_id)
    try:
        async with aclosing(answers):  # whatever ends this ends the request too
            async for answer in answers:
                output = answer.outputs[0]
                stream.take(output.token_ids, output.logprobs or ())
                worked(len(output.token_ids))
                reason, spans = output.finish_reason, output.weight_versions
        ended = True
    finally:
        stream.end(reason if ended else "abort", spans, version)


async def forced_logprobs(
    llm: Any, sequences: Sequence[tuple[TokenArray, TokenArray]], worked: Callable[[int], None]
) -> list[LogprobArray]:
    """Log-probs float32 ``[T]`` of each response given its prompt, at whatever temperature the workers apply."""

    async def one(prompt: TokenArray, response: TokenArray) -> LogprobArray:
        if not len(response):
            return np.empty(0, np.float32)
        from vllm import SamplingParams

        ids = [*prompt.tolist(), *response.tolist()]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        found: Any = None
        async for answer in llm.generate(_prompt(ids, None), params, f"force/{next(_counter)}"):
            found = answer.prompt_logprobs
        worked(len(ids))
        start = len(prompt)
        return np.array([found[i][ids[i]].logprob for i in range(start, len(ids))], np.float32)

    return list(await asyncio.gather(*(one(prompt, response) for prompt, response in sequences)))


def _prompt(ids: list[int], version: WeightVersion | None) -> Any:
    from vllm.inputs import tokens_input

    salt = None if version is None else str(version)
    return tokens_input(ids, cache_salt=salt)


def _sampling(stream: Stream, budget: int, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = stream.group.request.params
    return SamplingParams(
        max_tokens=budget,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k if params.top_k > 0 else 0,
        min_p=params.min_p,
        seed=seed,
        logprobs=0,
        stop_token_ids=stream.group.stops,
        ignore_eos=True,  # the model's own ends are among the stops, unless the request ignores them
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
