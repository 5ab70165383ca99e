"""Builds the worker of a `WorkerSpec`: engine or trainer, queue, scorer and weight transport around the worker classes.

Owns the wiring, in two forms: `build_worker` inside a worker process, and `build_emulated_worker`, which needs no
process, file or torch and so also builds the workers of a simulation. Which real engine or trainer it is, `parts`
knows. Does not: start engines (the controller orders that), run anything, or read configuration files.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from hybridsched.config.derived import Derived, derive
from hybridsched.config.schema import RunConfig
from hybridsched.engines.base import GenerationEngine
from hybridsched.engines.emulated import EmulatedEngine
from hybridsched.engines.emulated_draws import draw_rewards
from hybridsched.model import Response
from hybridsched.runtime import messages as m
from hybridsched.runtime.adapters.emulated_transport import EmulatedReceiver, EmulatedSender
from hybridsched.runtime.adapters.transfer import TransportSettings
from hybridsched.runtime.clock import Clock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.plan import WorkerSpec
from hybridsched.runtime.workers import parts, settings
from hybridsched.runtime.workers.rollout import RolloutWorker, Scorer, WeightReceiver
from hybridsched.runtime.workers.trainer import TrainerWorker
from hybridsched.sample_queue.base import SegmentStore
from hybridsched.sample_queue.writer import SegmentWriter
from hybridsched.trainers.emulated import EmulatedTrainer

Offload = Callable[..., Awaitable[Any]]
_PAGE = os.sysconf("SC_PAGE_SIZE")


class WorkerContext(Protocol):
    """What building a worker needs of a RunContext."""

    @property
    def run_folder(self) -> str | Path: ...
    @property
    def run_id(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def secret(self) -> str: ...


def build_worker(
    spec: WorkerSpec,
    config: RunConfig,
    context: WorkerContext,
    endpoint: Endpoint,
    clock: Clock,
    offload: Offload,
    *,
    beat_s: float = settings.BEAT_S,
) -> RolloutWorker | TrainerWorker:
    """The worker of this process. Nothing is loaded yet.

    offload must be able to run two calls at once (a segment is sealed while weights arrive). Raises ConfigError for an
    engine or trainer that is not installed, RunFolderError for the folder of another run.
    """
    from hybridsched.sample_queue.store import FileSegmentStore  # HDF5; simulations never pay for it

    store = FileSegmentStore(Path(context.run_folder), context.run_id, config.queue.durability)
    if spec.kind != "trainer":
        store.clean_tmp(spec.worker)
    derived = derive(config)
    if config.actor_rollout_ref.rollout.name == "emulated":  # both sides are (config.checks)
        return build_emulated_worker(
            spec,
            config,
            derived,
            endpoint,
            clock,
            offload,
            store,
            context.incarnation,
            beat_s=beat_s,
            rss_bytes=rss_bytes,
        )
    if spec.kind == "trainer":
        return _trainer_worker(spec, config, context, endpoint, clock, offload, store, beat_s)
    return _replica_worker(spec, config, derived, context, endpoint, clock, offload, store, beat_s)


def _trainer_worker(
    spec: WorkerSpec,
    config: RunConfig,
    context: WorkerContext,
    endpoint: Endpoint,
    clock: Clock,
    offload: Offload,
    store: SegmentStore,
    beat_s: float,
) -> TrainerWorker:
    from hybridsched.runtime.adapters.weight_transport import GroupSender

    device = parts.device_of(config)
    transport = _transport(config, context, device)
    trainer = parts.make_trainer(config, device, transport.scratch)
    return TrainerWorker(
        spec.worker,
        endpoint,
        trainer,
        store,
        GroupSender(spec.worker, trainer, offload, transport),
        clock,
        offload,
        rss_bytes,
        settings.trainer_settings(config, spec, beat_s=beat_s),
    )


def _replica_worker(
    spec: WorkerSpec,
    config: RunConfig,
    derived: Derived,
    context: WorkerContext,
    endpoint: Endpoint,
    clock: Clock,
    offload: Offload,
    store: SegmentStore,
    beat_s: float,
) -> RolloutWorker:
    from hybridsched.runtime.adapters.weight_transport import GroupReceiver

    device = parts.device_of(config)

    def on_death(error: Exception) -> None:
        if endpoint.on_error is not None:  # ends this process; its agent starts another
            endpoint.on_error(error, "watching the engine's processes")

    engine = parts.make_engine(config, derived, spec, device, on_death)
    return _rollout_worker(
        spec,
        config,
        derived,
        endpoint,
        engine,
        agent_scorer(config, endpoint, settings.agent_of(spec)),
        GroupReceiver(spec.worker, engine, offload, _transport(config, context, device)),
        store,
        context.incarnation,
        clock,
        offload,
        tree_rss_bytes,
        beat_s,
    )


def _transport(config: RunConfig, context: WorkerContext, device: str) -> TransportSettings:
    return TransportSettings.of(
        config,
        run_id=context.run_id,
        secret=context.secret,
        device=device,
        hostname=socket.gethostname(),
        scratch=Path(tempfile.gettempdir()),
    )


def rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


def tree_rss_bytes() -> int:
    """Resident memory of this process and its children (an engine may live in them); shared pages count twice."""
    children = psutil.Process().children(recursive=True)
    total = rss_bytes()
    for child in children:
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


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
        speed=config.emulated.replica_speed.get(spec.worker, 1.0),
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


def agent_scorer(config: RunConfig, endpoint: Endpoint, agent: str) -> Scorer:
    """Asks the agent's reward pool. Whatever goes wrong on the way is a failure of each response, never a reward."""

    async def score(lease: m.Lease, responses: Sequence[Response]) -> list[tuple[float | None, str | None]]:
        n = len(responses)
        tokens = [response.token_ids for response in responses]
        request = m.RewardRequest(lease.data_source, lease.ground_truth, lease.extra_info, tokens)
        try:
            reply = await endpoint.call(
                agent,
                request,
                m.RewardReply,
                deadline_s=settings.reward_call_s(config, n),
                what=f"scoring sample {lease.sample_uid}",
            )
        except Exception as error:  # noqa: BLE001 - a sample that cannot be scored must not end the worker
            return [(None, f"not scored: {type(error).__name__}: {error}")] * n
        if len(reply.rewards) != n:
            return [(None, f"not scored: {len(reply.rewards)} rewards came back for {n} responses")] * n
        return reply.rewards

    return score


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
