"""The emulated trainer: its formula in hand-worked numbers, labelled metrics, checkpoints that restore all counters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridsched.config.schema import EmulatedConfig
from hybridsched.errors import DataError, InternalError, RunFolderError
from hybridsched.model import FinishReason, Response, Sample, WeightVersion
from hybridsched.simulation.clock import run_virtual
from hybridsched.trainers.base import TrainBatch, Trainer, TrainerGroup
from hybridsched.trainers.emulated import CHECKPOINT_FILE, EMULATED_SPECS, EmulatedTrainer

CONFIG = EmulatedConfig(train_tokens_per_s=100.0, train_fixed_s=2.0)
V3 = WeightVersion(1, 3)


def sample(uid: int, tokens: int = 40, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> Sample:
    responses = tuple(
        Response(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), (), FinishReason.STOP, reward=r)
        for r in rewards
    )
    return Sample(uid, f"p{uid}", np.zeros(10, np.int32), responses)  # 100 tokens as the trainer sees it


def batch(*sizes: int) -> TrainBatch:
    uid = iter(range(1000))
    return TrainBatch(tuple(tuple(sample(next(uid)) for _ in range(n)) for n in sizes), WeightVersion(0, 0), 0)


def trainer(ranks: int = 1, rank: int = 0, config: EmulatedConfig = CONFIG, **more: Any) -> EmulatedTrainer:
    made = EmulatedTrainer(config, **more)
    made.start(TrainerGroup(rank, ranks, "emulated:0", 10.0))
    return made


@pytest.mark.parametrize(
    ("ranks", "efficiency", "epochs", "sizes", "seconds"),
    [
        (1, 1.0, 1, (4,), 2.0 + 4.0),
        (1, 1.0, 1, (4, 2), 2 * 2.0 + 6.0),
        (4, 1.0, 1, (4,), 2.0 + 4.0),  # this rank's own tokens: four ranks do four times as many in that time
        (4, 0.5, 1, (4,), 2.0 + 4.0 * 2.0),
        (1, 1.0, 3, (4,), 3 * (2.0 + 4.0)),
        (2, 1.0, 1, (0,), 2.0),  # a rank without samples takes part in the step
    ],
)
def test_training_takes_the_time_of_the_formula(
    ranks: int, efficiency: float, epochs: int, sizes: tuple[int, ...], seconds: float
) -> None:
    config = CONFIG.model_copy(update={"train_efficiency": efficiency})

    async def main() -> tuple[float, float]:
        result = await trainer(ranks, config=config, ppo_epochs=epochs).aio.train(batch(*sizes))
        return asyncio.get_running_loop().time(), result.timing_s["update_actor"]

    assert run_virtual(main()) == (seconds, seconds)


def test_metrics_are_of_the_samples_and_labelled() -> None:
    async def main() -> Any:
        made = trainer(lr=0.5, ppo_epochs=2)
        await made.aio.train(batch(1))
        return await made.aio.train(batch(3, 1))

    result = run_virtual(main())
    expected = {"emulated": 1.0, "critic/rewards/mean": 0.5, "response_length/mean": 40.0, "actor/lr": 0.5}
    assert {key: result.metrics[key] for key in expected} == expected
    assert (result.metrics["optimizer_steps"], result.n_tokens) == (2.0 + 4.0, 400)


def test_the_synchronous_form_refuses_and_says_what_to_call() -> None:
    with pytest.raises(InternalError, match=r"await trainer\.aio\.train"):
        trainer().train(batch(1))


def test_aio_has_every_method_of_a_trainer() -> None:
    methods = {name for name in Trainer.__abstractmethods__ if name != "progress"}
    aio = trainer().aio
    assert {name for name in methods if asyncio.iscoroutinefunction(getattr(aio, name, None))} == methods


def test_progress_grows_while_a_collection_is_in_work_and_stays_when_it_is_broken_off() -> None:
    async def main() -> list[int]:
        made = trainer()
        base = made.progress
        task = asyncio.create_task(made.aio.train(batch(4)))  # 400 tokens in 6 s
        seen = []
        for _ in range(3):
            await asyncio.sleep(1.5)
            seen.append(made.progress - base)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(10)
        assert made.optimizer_steps == 0
        return [*seen, made.progress - base]

    assert run_virtual(main()) == [100, 200, 300, 300]


def test_a_sample_without_reward_is_named() -> None:
    bad = TrainBatch(((sample(7, rewards=(None, None)),),), WeightVersion(0, 0), 0)
    with pytest.raises(DataError, match="sample 7"):
        run_virtual(trainer().aio.train(bad))


def test_offload_counts_bytes_once_and_training_needs_them_back() -> None:
    made = trainer(parameter_bytes=10, optimizer_bytes=60)
    assert [made.offload(keep_parameters=True), made.offload(keep_parameters=True)] == [60, 0]
    assert made.offload(keep_parameters=False) == 10
    with pytest.raises(InternalError, match="optimizer"):
        run_virtual(made.aio.train(batch(1)))
    made.onload()
    assert run_virtual(made.aio.train(batch(1))).n_tokens == 100


def trained(made: EmulatedTrainer) -> EmulatedTrainer:
    made.begin_cycle(V3)
    run_virtual(made.aio.train(batch(2, 2)))
    return made


def restored(made: EmulatedTrainer) -> tuple[WeightVersion, int, dict[str, float]]:
    metrics = run_virtual(made.aio.train(batch(1))).metrics
    return made.version, made.optimizer_steps, metrics


def test_a_checkpoint_in_a_file_restores_every_counter(tmp_path: Path) -> None:
    made = trained(trainer())
    made.save_checkpoint(tmp_path)
    assert json.loads((tmp_path / CHECKPOINT_FILE).read_text())["emulated"] is True
    fresh = trainer()
    fresh.load_checkpoint(tmp_path)
    assert restored(fresh) == restored(made)
    assert restored(fresh)[0] == V3


def test_checkpoints_in_memory_need_no_file_system(tmp_path: Path) -> None:
    shared: dict[str, str] = {}
    made = trained(trainer(checkpoints=shared))
    made.save_checkpoint(tmp_path / "only" / "a" / "name")
    fresh = trainer(checkpoints=shared)
    fresh.load_checkpoint(tmp_path / "only" / "a" / "name")
    assert restored(fresh) == restored(made)
    assert list(tmp_path.iterdir()) == []


def test_folder_none_keeps_the_checkpoint_in_the_object() -> None:
    made = trained(trainer())
    made.save_checkpoint(None)
    before = made.optimizer_steps
    run_virtual(made.aio.train(batch(1)))
    made.load_checkpoint(None)
    assert (made.optimizer_steps, made.version) == (before, V3)


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    trained(trainer(ranks=2, rank=1)).save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"schema": 99}', '{"schema": 1}'])
def test_a_damaged_or_missing_checkpoint_says_where(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / CHECKPOINT_FILE).write_text(text)
    made = trained(trainer())
    with pytest.raises(RunFolderError, match=str(tmp_path)):
        made.load_checkpoint(tmp_path)
    assert (made.version, made.optimizer_steps) == (V3, 2)


def test_weights_fit_their_specs_and_change_with_training() -> None:
    made = trainer()
    before = dict(made.iter_weights())
    run_virtual(made.aio.train(batch(1)))
    after = dict(made.iter_weights())
    assert [(name, tuple(tensor.shape)) for name, tensor in after.items()] == [
        (s.name, s.shape) for s in EMULATED_SPECS
    ]
    assert not bool((before["emulated.weight"] == after["emulated.weight"]).any())


def test_it_is_refused_before_start() -> None:
    with pytest.raises(InternalError, match=r"before start|offloaded"):
        run_virtual(EmulatedTrainer(CONFIG).aio.train(batch(1)))
