"""Learning-rate schedule and AdamW with master copies."""

from __future__ import annotations

import math

import pytest
import torch

from hybridsched.config.schema import OptimConfig, RunConfig
from hybridsched.errors import ConfigError
from hybridsched.trainers.optimizer import PolicyOptimizer
from hybridsched.trainers.schedule import LearningRate, build_schedule, total_optimizer_steps


def config(optim, **sections):
    return RunConfig.model_validate({"actor_rollout_ref": {"actor": {"optim": optim}}, **sections})


def test_warm_up_reaches_the_peak_and_stays():
    schedule = build_schedule(config({"lr": 4.0, "lr_warmup_steps": 4}))
    assert [1.0, 2.0, 3.0, 4.0, 4.0, 4.0] == [schedule.at(step) for step in range(6)]


def test_cosine_falls_to_its_floor_and_stays_there():
    schedule = LearningRate(peak=2.0, warmup=0, cosine=True, floor=0.25, total=4)
    half = 0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi / 4))
    assert [2.0, 2 * half, 1.25, 0.5, 0.5] == pytest.approx([schedule.at(step) for step in (0, 1, 2, 4, 9)])


def test_warm_up_ratio_counts_all_optimizer_steps():
    cycles = {"trainer": {"total_training_steps": 5}, "async_training": {"trigger_parameter_sync_step": 4}}
    schedule = build_schedule(config({"lr": 1.0, "lr_warmup_steps_ratio": 0.1}, **cycles))
    assert [0.5, 1.0, 1.0] == [schedule.at(step) for step in range(3)]  # 20 steps, 2 of them warm-up


def test_length_is_the_shorter_of_cycles_and_samples():
    sections = {"trainer": {"total_training_steps": 5}, "rollout": {"total_rollout_steps": 100}}
    assert 7 == total_optimizer_steps(config({}, **sections))  # 100 samples of 16: seven steps, less than 20
    assert 3 == total_optimizer_steps(config({"total_training_steps": 3}, **sections))
    assert total_optimizer_steps(config({})) is None


@pytest.mark.parametrize("optim", [{"lr_scheduler_type": "cosine"}, {"lr_warmup_steps_ratio": 0.1}])
def test_a_shape_without_length_is_refused_with_the_cure(optim):
    with pytest.raises(ConfigError, match=r"set actor_rollout_ref\.actor\.optim\.total_training_steps"):
        build_schedule(config(optim))


def test_half_precision_keeps_small_updates_in_masters():
    layer = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    layer.weight.data.fill_(1.0)
    optim = OptimConfig(lr=1e-3, weight_decay=0.0)
    optimizer = PolicyOptimizer(layer, optim, 1.0, LearningRate(1e-3, 0, False, 0.0, None))
    for _ in range(20):  # each update is below half a unit of bfloat16 at 1.0
        layer.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.absorb()
        optimizer.clip()
        optimizer.step()
    assert 0.98 == pytest.approx(layer.weight.item(), abs=0.004)


def test_gradients_of_micro_batches_add_up_in_masters():
    layer = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = PolicyOptimizer(layer, OptimConfig(), 1e9, LearningRate(1e-3, 0, False, 0.0, None))
    for _ in range(3):
        layer.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.absorb()
    assert (torch.float32, 3.0) == (optimizer.gradients()[0].dtype, optimizer.gradients()[0].item())


def test_clipping_scales_to_the_norm_and_reports_the_one_before():
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = PolicyOptimizer(layer, OptimConfig(), 1.0, LearningRate(1e-3, 0, False, 0.0, None))
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    assert 5.0 == pytest.approx(optimizer.clip())
    assert [0.6, 0.8] == pytest.approx(optimizer.gradients()[0].flatten().tolist(), abs=1e-5)


def test_a_rank_without_samples_has_zero_gradients():
    layer = torch.nn.Linear(2, 1)
    optimizer = PolicyOptimizer(layer, OptimConfig(), 1.0, LearningRate(1e-3, 0, False, 0.0, None))
    assert [0.0, 0.0] == [float(g.abs().sum()) for g in optimizer.gradients()]
