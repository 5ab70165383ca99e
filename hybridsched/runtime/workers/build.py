"""Builds the worker of a `WorkerSpec`: engine or trainer, queue, scorer and weight transport around the worker classes.

Owns the wiring, in two forms: `build_worker` inside a worker process, and `build_emulated_worker`, which needs no
process, file or torch and so also builds the workers of a simulation. Does not: start engines (the controller orders
that), run anything, or read configuration files.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from hybridsched.config.derived import Derived, derive
from hybridsched.config.schema import RunConfig
from hybridsched.engines.base import GenerationEngine
from hybridsched.engines.emulated import EmulatedEngine
from hybridsched.engines.emulated_draws import draw_rewards
from hybridsched.errors import ConfigError
from hybridsched.model import Response
from hybridsched.runtime import messages as m
from hybridsched.runtime.adapters.emulated_transport import EmulatedReceiver, EmulatedSender
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.plan import WorkerSpec
from hybridsched.runtime.workers import settings
from hybridsched.runtime.workers.rollout import RolloutWorker, Scorer, WeightReceiver
from hybridsched.runtime.workers.trainer import TrainerWorker
from hybridsched.sample_queue.base import SegmentStore
from hybridsched.sample_queue.writer import SegmentWriter
from hybridsched.trainers.emulated import EmulatedTrainer

Offload = Callable[..., Awaitable[Any]]
_PAGE = os.sysconf("SC_PAGE_SIZE")


def build_emulated_worker(
    spec: WorkerSpec,
    config: RunConfig,
    derived: Derived,
    endpoint: Endpoint,
    clock: Clock,
    offload: Offload,
    store: SegmentStore,
    incarnation: str,
    *,
    beat_s: float = settings.BEAT_S,
    checkpoints: MutableMapping[str, str] | None = None,
    rss_bytes: Callable[[], int] = lambda: 0,
) -> RolloutWorker | TrainerWorker:
    """A worker around an emulated engine or trainer.

    checkpoints: where the emulated trainer keeps its part (None: files). rss_bytes: 0 where memory is only emulated.
    """
    if spec.kind == "trainer":
        actor = config.actor_rollout_ref.actor
        return TrainerWorker(
            spec.worker,
            endpoint,
            EmulatedTrainer(config.emulated, ppo_epochs=actor.ppo_epochs, lr=actor.optim.lr, checkpoints=checkpoints),
            store,
            EmulatedSender(spec.worker, config.emulated, clock),
            clock,
            offload,
            rss_bytes,
            settings.trainer_settings(config, spec, beat_s=beat_s),
        )
    engine = EmulatedEngine(
        config.emulated,
        kind=settings.kind_of(spec),
        kv_tokens=derived.kv_cache_tokens,
        max_num_seqs=derived.max_num_seqs,
        wall=clock.wall,
    )
    return _rollout_worker(
        spec,
        config,
        derived,
        endpoint,
        engine,
        emulated_scorer(config),
        EmulatedReceiver(spec.worker, engine, clock),
        store,
        incarnation,
        clock,
        offload,
        rss_bytes,
        beat_s,
    )


def _rollout_worker(
    spec: WorkerSpec,
    config: RunConfig,
    derived: Derived,
    endpoint: Endpoint,
    engine: GenerationEngine,
    score: Scorer,
    receiver: WeightReceiver,
    store: SegmentStore,
    incarnation: str,
    clock: Clock,
    offload: Offload,
    rss_bytes: Callable[[], int],
    beat_s: float,
) -> RolloutWorker:
    writer = SegmentWriter(
        store,
        spec.worker,
        incarnation,
        seal_bytes=config.queue.seal_bytes,
        seal_samples=config.queue.seal_samples,
        seal_age_s=config.queue.seal_age_s,
        now=clock.now,
    )
    return RolloutWorker(
        spec.worker,
        endpoint,
        engine,
        writer,
        score,
        receiver,
        clock,
        offload,
        rss_bytes,
        settings.rollout_settings(config, derived, spec, beat_s=beat_s),
    )


# ------------------------------------------------------------------ scoring


def emulated_scorer(config: RunConfig) -> Scorer:
    """Draws rewards where responses mean nothing; no process, no time.

    A scorer is handed the responses still to score: all n at first, then only those that failed. Which ones these are
    follows from the draws themselves, so nothing is remembered and a lease may move between attempts.
    """

    async def score(lease: m.Lease, responses: Sequence[Response]) -> list[tuple[float | None, str | None]]:
        n = lease.params.n
        attempt, indices = 0, list(range(n))
        drawn = draw_rewards(config.emulated, lease.params.seed, lease.sample_uid, n)
        while len(indices) > len(responses) and attempt < config.reward.retries:
            indices = [i for i in indices if drawn[i] is None]
            attempt += 1
            drawn = draw_rewards(config.emulated, lease.params.seed, lease.sample_uid, n, attempt=attempt)
        if len(indices) != len(responses):  # not a set of failures these draws explain
            indices = list(range(len(responses)))
        chosen = [drawn[i] for i in indices]
        return [(reward, None if reward is not None else "emulated reward failure") for reward in chosen]

    return score
