"""trigger_parameter_sync_step = 1 with staleness_threshold = 0 is the synchronous loop, token for token.

The reference below knows nothing of the runtime: generate R samples with the current weights, train on them in the
order the run trained them (the order of completion), repeat.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inprocess import InProcessRun, demo_config, demo_files

from hybridsched.config.derived import derive
from hybridsched.data.stream import PromptStream
from hybridsched.data.tokenizer import stop_token_ids
from hybridsched.engines.base import GroupRequest
from hybridsched.engines.torch_engine import TorchEngine
from hybridsched.model import Response, Sample, SamplingParams, WeightVersion
from hybridsched.rewards import resolve_reward, score_one
from hybridsched.runtime.workers.settings import torch_engine_options
from hybridsched.sample_queue.ledger import accepted_ref
from hybridsched.sample_queue.log import log_headers, read_chain
from hybridsched.sample_queue.store import FileSegmentStore
from hybridsched.trainers.base import TrainBatch, TrainerGroup
from hybridsched.trainers.torch_trainer import TorchTrainer

STEPS = 3
R = 4


def trained_samples(folder: Path) -> list[Sample]:
    """Every sample of a finished run, in the order it was trained."""
    queue = folder / "queue"
    accept, ledger = (log_headers(queue, name)[-1].incarnation for name in ("accept", "ledger"))
    rows = dict(accepted_ref(entry) for entry in read_chain(queue, "accept", accept))
    order = [e["uid"] for e in read_chain(queue, "ledger", ledger) if e["verdict"] == "trained"]
    store = FileSegmentStore(folder, "inprocess", "process-crash")
    return [store.read(rows[uid].segment, [rows[uid].row])[0] for uid in order]


async def synchronous_loop(run: InProcessRun, order: list[list[int]], scratch: Path) -> list[Sample]:
    """Generate, train, update, R samples at a time, in one thread."""
    config = run.config
    model = config.actor_rollout_ref.model.path
    assert model is not None
    derived = derive(config, len(run.prompts))
    stops = stop_token_ids(model, run.tokenizer)
    engine = TorchEngine(model, device="cpu", stop_token_ids=stops, **torch_engine_options(config, derived))
    trainer = TorchTrainer(config, device="cpu", scratch=scratch)
    trainer.start(TrainerGroup(0, 1, "", 60.0))
    await engine.start()
    reward = resolve_reward(config.reward.function, config.reward.kwargs)
    stream = PromptStream(run.prompts, shuffle=True, seed=config.data.seed, total_epochs=1)
    params = SamplingParams(n=8, max_new_tokens=128, stop_token_ids=stops, seed=config.trainer.seed)
    done: list[Sample] = []
    for step, uids in enumerate(order):
        version = WeightVersion(0, step)
        await engine.pause("abort")
        await engine.begin_update(trainer.weight_specs())
        await engine.load_bucket(dict(trainer.iter_weights()))
        await engine.finish_update(version)
        await engine.resume()
        trainer.begin_cycle(version)
        wanted = sorted(uids)
        groups = [
            GroupRequest(str(uid), uid, stream[uid].tokens, params, (Response.empty(),) * params.n) for uid in wanted
        ]
        answers = await asyncio.gather(*(engine.generate(group) for group in groups))
        samples: dict[int, Sample] = {}
        for uid, responses in zip(wanted, answers, strict=True):
            prompt = stream[uid]
            scored = tuple(
                r.with_reward(
                    score_one(
                        reward,
                        prompt.data_source,
                        run.tokenizer.decode(r.token_ids.tolist()),
                        prompt.ground_truth,
                        prompt.extra_info,
                    )
                )
                for r in responses
            )
            samples[uid] = Sample(uid, prompt.prompt_uid, prompt.tokens, scored)
        batch = [samples[uid] for uid in uids]
        trainer.train(TrainBatch((tuple(batch),), version, 0))
        done += batch
    await engine.shutdown()
    trainer.shutdown()
    return done


@pytest.mark.timeout(300)
def test_one_collection_per_sync_and_no_staleness_equals_the_synchronous_loop(tmp_path: Path) -> None:
    model, train = demo_files(tmp_path, steps=20, prompts=32)
    overrides: list[Any] = [
        "async_training.trigger_parameter_sync_step=1",
        "async_training.staleness_threshold=0",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={R}",
        f"trainer.total_training_steps={STEPS}",
        "queue.durability=process-crash",
    ]
    run = InProcessRun(demo_config(model, train, *overrides), tmp_path / "run")
    summary = run.start()
    assert summary.version.number == STEPS
    ours = trained_samples(tmp_path / "run")
    order = [[s.sample_uid for s in ours[i : i + R]] for i in range(0, len(ours), R)]
    reference = asyncio.run(synchronous_loop(run, order, tmp_path))
    assert [s.sample_uid for s in ours] == [s.sample_uid for s in reference]
    for mine, theirs in zip(ours, reference, strict=True):
        for a, b in zip(mine.responses, theirs.responses, strict=True):
            assert np.array_equal(a.token_ids, b.token_ids), f"sample {mine.sample_uid} differs"
            assert a.reward == b.reward
            assert np.abs(a.logprobs - b.logprobs).max(initial=0.0) < 1e-5
            assert {run_.version.number for run_ in a.version_runs} == {run_.version.number for run_ in b.version_runs}
