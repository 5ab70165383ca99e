"""A real run in one process: torch engine and trainer, gloo, HDF5 segments; only processes and MPI are missing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybridsched.config import derive, load_config
from hybridsched.config.schema import RunConfig
from hybridsched.data.stream import PromptSet, PromptStream
from hybridsched.data.tokenizer import Tokenizer, stop_token_ids
from hybridsched.demo.make_data import make_data
from hybridsched.demo.warm_start import make_demo_model
from hybridsched.rewards import RewardFailure, resolve_reward, score_one
from hybridsched.runtime import messages as m
from hybridsched.runtime.adapters.chains import file_chains
from hybridsched.runtime.adapters.checkpoints import FileCheckpointStore
from hybridsched.runtime.clock import RealClock
from hybridsched.runtime.cycle_record import RunSummary
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.plan import WorkerSpec
from hybridsched.runtime.services import Services
from hybridsched.runtime.workers.build import build_worker
from hybridsched.runtime.workers.rollout import RolloutWorker
from hybridsched.runtime.workers.trainer import TrainerWorker
from hybridsched.sample_queue.store import FileSegmentStore
from hybridsched.simulation.runlog import MemoryRunLog
from hybridsched.simulation.world import SimulatedRun

DEMO = [
    "reward.function=count_on",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.optim.lr=5e-4",
    "async_training.trigger_parameter_sync_step=4",
    "async_training.staleness_threshold=0.5",
    "async_training.use_dynamic_resource_scheduling=true",
    "async_training.dynamic_schedule_deactivate_ratio=0.6",
    "async_training.concurrent_samples_per_replica=3",
    "data.max_prompt_length=16",
    "data.max_response_length=128",
    "queue.seal_age_s=0.5",
    "local.allow_oversubscribe=true",
]


def demo_files(folder: Path, *, steps: int = 20, prompts: int = 64) -> tuple[Path, Path]:
    """A small warm-started model and its data: (model folder, training file)."""
    make_demo_model(folder / "model", seed=0, steps=steps)
    made = make_data(folder / "data", n_train=prompts, n_val=16)
    return folder / "model", made["train.jsonl"]


def demo_config(model: Path, train: Path, *overrides: str) -> RunConfig:
    """The demo's configuration on these files."""
    files = [f"actor_rollout_ref.model.path={model}", f"data.train_files=[{train}]"]
    return load_config(None, [*DEMO, *files, *overrides])


class InlineRewards:
    """Scores in this process."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._function = resolve_reward(config.reward.function, config.reward.kwargs)
        self._tokenizer = tokenizer

    async def score(self, request: m.Envelope) -> m.Envelope:
        body = request.body
        assert isinstance(body, m.RewardRequest)
        rewards: list[tuple[float | None, str | None]] = []
        for tokens in body.responses:
            text = self._tokenizer.decode(tokens.tolist())
            try:
                score = score_one(self._function, body.data_source, text, body.ground_truth, body.extra_info)
                rewards.append((score, None))
            except RewardFailure as failure:
                rewards.append((None, failure.reason))
        return m.Envelope(request.dst, request.src, 0, True, m.RewardReply(rewards))

    async def close(self) -> None:
        return None


class InProcessRun(SimulatedRun):
    """The same wiring as a simulation, with real parts and real time."""

    def __init__(self, config: RunConfig, folder: Path, **kwargs: Any) -> None:
        super().__init__(config, beat_s=0.5, **kwargs)
        self.folder = folder
        self.clock = RealClock()  # type: ignore[assignment]
        self.log = MemoryRunLog(self.clock)
        model = config.actor_rollout_ref.model.path
        assert model is not None
        self.tokenizer = Tokenizer.from_folder(model)
        self.prompts = PromptSet.build(config.data, self.tokenizer)
        self.derived = derive(config, len(self.prompts))

    def start(self, *, resume: bool = False) -> RunSummary:
        """Run to the end in real time."""
        return asyncio.run(self.main(resume))

    async def main(self, resume: bool = False) -> RunSummary:
        if resume:
            self.checkpoints = FileCheckpointStore(self.folder)  # type: ignore[assignment]
        return await super().main(resume)

    def reward_pool(self) -> InlineRewards:
        return InlineRewards(self.config, self.tokenizer)

    def build_worker(self, spec: WorkerSpec, incarnation: str, endpoint: Endpoint) -> RolloutWorker | TrainerWorker:
        context = SimpleNamespace(
            run_folder=self.folder, run_id="inprocess", incarnation=incarnation, secret="secret", worker=spec.worker
        )
        return build_worker(spec, self.config, context, endpoint, self.clock, asyncio.to_thread, beat_s=0.5)

    def _services(self, endpoint: Endpoint) -> Services:
        config = self.config
        base = super()._services(endpoint)
        model = config.actor_rollout_ref.model.path
        assert model is not None
        return replace(
            base,
            run_id="inprocess",
            offload=asyncio.to_thread,
            store=FileSegmentStore(self.folder, "inprocess", config.queue.durability),
            chains=file_chains(self.folder, "inprocess", self.new_incarnation, config.queue.durability),
            checkpoints=FileCheckpointStore(self.folder),
            prompts=PromptStream(
                self.prompts,
                shuffle=config.data.shuffle,
                seed=config.data.seed,
                total_epochs=config.trainer.total_epochs,
                limit=self.derived.total_samples,
            ),
            stop_token_ids=stop_token_ids(model, self.tokenizer),
        )
