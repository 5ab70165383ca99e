"""A rollout worker whose rewards fail while it is told to stop: what has to be generated again is parked."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from hybridsched.model import FinishReason, Response, SamplingParams, WeightVersion
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import RealClock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.workers.rollout import RolloutSettings, RolloutWorker

HANGS_S = 60.0  # a bound that only a hang reaches


class Engine:
    """Finishes whatever is not finished, at once; counts what it was asked for."""

    version = WeightVersion(0, 0)
    progress = 0

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.aborted: list[Any] = []

    async def generate(self, request: Any) -> tuple[Response, ...]:
        self.asked.append(request)
        fresh = Response(np.array([5], np.int32), np.zeros(1, np.float32), (), FinishReason.STOP)
        return tuple(part if part.finished else fresh for part in request.partials)

    async def abort(self, keys: Any) -> None:
        self.aborted.append(keys)

    def running_sequences(self) -> int:
        """None is left running."""
        return 0

    def unfinished(self, key: str) -> int:
        """None is left running."""
        return 0


class Writer:
    """Takes samples and never seals."""

    pending = 0

    def add(self, sample: Any) -> None:
        """Nothing is due."""

    def due(self, now: float) -> str | None:
        """Never."""
        return None


@pytest.mark.parametrize("which", [None, [1], [2]])
def test_a_lease_whose_reward_fails_after_an_abort_is_parked_not_generated(which: list[int] | None) -> None:
    """An engine that was told to stop must not begin again behind the back of whoever puts it to sleep."""

    async def main() -> None:
        sent: list[Any] = []
        scoring, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def score(_lease: m.Lease, responses: Any) -> list[tuple[float | None, str | None]]:
            scoring.set()
            await go_on.wait()
            return [(None, "boom")] + [(1.0, None)] * (len(responses) - 1)

        def post(envelope: m.Envelope) -> None:
            sent.append(envelope.body)
            ended.set()

        endpoint, engine = Endpoint("hybrid.0", post), Engine()
        chosen = RolloutSettings("agent.0", 1, 1, False, "seq_reward", 60.0, 1.0, 1.0)
        parts = cast(Any, (engine, Writer(), score, None, RealClock(), asyncio.to_thread, lambda: 0, chosen))
        worker = RolloutWorker("hybrid.0", endpoint, *parts)
        prompt = np.array([1, 2], np.int32)
        worker._lease(m.Lease(1, "train", 7, "p7", prompt, SamplingParams(n=2, max_new_tokens=4)), "controller")
        async with asyncio.timeout(HANGS_S):
            await scoring.wait()
            await worker._abort(m.AbortLeases(which), "controller")
            assert [] == engine.aborted  # nothing was generating
            go_on.set()
            await ended.wait()
        kinds = [type(message).__name__ for message in sent]
        if which == [2]:  # somebody else's
            assert (["SampleCompleted"], 2) == (kinds, len(engine.asked))
            assert "" == sent[0].verdict
        else:
            assert (["LeaseParked"], 1) == (kinds, len(engine.asked))
            assert (1, 1) == (sent[0].lease, sent[0].unfinished)
            partials = worker._parked[1].partials
            assert [False, True] == [part.finished for part in partials]
            assert (1, 1.0) == (worker._parked[1].retry, partials[1].reward)
        await endpoint.close()

    asyncio.run(main())
