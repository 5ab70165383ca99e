"""`hybridsched run` with a Megatron trainer of two sharded ranks, lending on, the truth test after every sync.

The trainer's ranks hold halves of the model, so every sync, hand-over, probe and checkpoint works only when both take
part in it; one of them is killed on the way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_kit import require_megatron
from real_runs import RealRun, make_inputs, real_run

from hybridsched.models.hf_folder import load_config, load_hf, save_hf
from hybridsched.models.qwen3 import seeded_init

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

CYCLES = 4
S = 8  #: samples of a cycle
MEGATRON = "actor_rollout_ref.actor.megatron"
PARTS = Path(__file__).parents[1] / "faults" / "slow_parts.py"  #: generation that takes its time, and always lends
SHARDED = [
    "actor_rollout_ref.actor.strategy=megatron",
    "trainer.n_gpus_per_node=2",
    "weight_sync.verify=probe",
    "weight_sync.probe_tolerance=1e-4",
    f"async_training.dynamic_schedule_policy={PARTS}:EverySecondCycle",
    f"reward.function={PARTS}:reward",
    "reward.kwargs={seconds: 0.1}",
]
TENSOR = [*SHARDED, f"{MEGATRON}.tensor_model_parallel_size=2"]


@pytest.fixture(scope="module", autouse=True)
def megatron_is_installed() -> None:
    require_megatron()


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data and a model of its size whose heads can be shared out to two ranks."""
    path = make_inputs(tmp_path_factory.mktemp("inputs"))
    model = path.parent / "model"
    save_hf(seeded_init(replace(load_config(model), num_key_value_heads=2), seed=1), model)
    return path


@pytest.fixture(scope="module")
def tensor_run(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """TP 2, whose second trainer is killed once; then resumed with PP 2 for two more cycles."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    with real_run(run_yaml, folder, *TENSOR, f"trainer.total_training_steps={CYCLES}") as run:
        run.start()
        run.wait_cycles(1)
        run.kill("trainer.1")
        run.wait(lambda: run.events("fault", "trainer", "group restarted"), "the trainer group restarts")
        run.finish()
        yield run


def test_the_run_finishes_its_cycles_and_every_sample_has_its_verdict(tensor_run):
    tensor_run.require_exactly_once(CYCLES * S)


def test_receivers_agree_with_the_sharded_trainer_after_every_sync(tensor_run):
    rows = tensor_run.log().history()
    probes = [row.values["weight_sync/probe_max_diff"] for row in rows if "weight_sync/probe_max_diff" in row.values]
    assert CYCLES <= len(probes)
    assert max(probes) < 1e-4


def test_gpus_of_a_sharded_trainer_are_lent(tensor_run):
    assert tensor_run.events("switch", "pool", "activated")
    assert any(row.values.get("dynamic_resource/hybrid_rollout_gpu_s", 0) > 0 for row in tensor_run.log().history())


def test_checkpoints_hold_shards_of_both_ranks_and_a_whole_model(tensor_run, run_yaml):
    newest = max((tensor_run.folder / "checkpoints").iterdir(), key=os.path.getmtime)
    shards = {path.name for path in newest.rglob("*.distcp")}
    assert {name.split("_")[2] for name in shards} == {"0", "1"}
    model = next(path for path in newest.rglob("model") if path.is_dir())
    assert load_hf(model).config == load_config(run_yaml.parent / "model")


def test_a_run_resumes_under_other_sizes(tensor_run):
    more = [f"{MEGATRON}.tensor_model_parallel_size=1", f"{MEGATRON}.pipeline_model_parallel_size=2"]
    tensor_run.start("--resume", *more, f"trainer.total_training_steps={CYCLES + 2}")
    tensor_run.finish()
    tensor_run.require_exactly_once((CYCLES + 2) * S)
