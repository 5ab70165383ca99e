"""What `hybridsched demo` makes before its run: complete inputs, a right run.yaml, the verdict on its reward."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridsched.cli.templates import template_text
from hybridsched.config import derive, load_config
from hybridsched.demo import inputs
from hybridsched.errors import ConfigError, DataError, FaultError, InternalError
from hybridsched.runtime.prepare import check_everything


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, inputs.DemoInputs]:
    """Inputs with two warm-start steps in a folder whose name YAML must not stumble over."""
    folder = tmp_path_factory.mktemp("demo") / 'a "quoted" folder'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "WARM_START_STEPS", 2)
        return folder, inputs.make_inputs(folder, 0)


def demo_config(made, *overrides: str, **changes):
    folder, paths = made
    run_yaml = inputs.write_run_yaml(folder, template_text("demo.yaml"), paths, inputs.run_folder(folder, keep=False))
    chosen = {"cycles": 20, "seed": 0, "static": False, "engine": "torch", "trainer": "torch"} | changes
    return load_config(run_yaml, [*inputs.overrides(**chosen), *overrides])


def test_the_demo_passes_every_check_before_a_start(made):
    config, derived = check_everything(demo_config(made, "local.allow_oversubscribe=true"))
    assert (64, 96, 20) == (derived.step_required_samples, derived.max_required_samples, derived.total_cycles)
    assert (1, 1, 24) == (derived.n_standalone_replicas, derived.n_hybrid_replicas, derived.max_num_seqs)
    assert str(made[0] / "run") == derived.run_folder
    assert 80 == config.actor_rollout_ref.actor.optim.total_training_steps


def test_inputs_are_made_once(made):
    folder, paths = made
    before = {path: path.stat().st_mtime_ns for path in (folder / "inputs").rglob("*")}
    assert paths == inputs.make_inputs(folder, 0, progress=lambda *_: pytest.fail("made again"))
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "inputs").rglob("*")}


def test_interrupted_inputs_leave_nothing_that_looks_complete(tmp_path):
    def interrupt(done: int, total: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inputs.make_inputs(tmp_path, 0, progress=interrupt)
    assert ["data-seed0"] == os.listdir(tmp_path / "inputs")


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="choose another --folder"):
        inputs.make_inputs(tmp_path / "file", 0)


@pytest.mark.parametrize("cycles", [1, 20, 31, 32, 200])
def test_the_data_is_enough_for_every_number_of_cycles(made, cycles):
    config = demo_config(made, cycles=cycles)
    derived = derive(config, inputs.N_TRAIN)
    assert cycles == derived.total_cycles
    ahead = derived.max_required_samples - derived.step_required_samples
    assert derived.total_samples >= cycles * derived.step_required_samples + ahead


def test_switches_of_the_demo_reach_the_configuration(made):
    config = demo_config(made, static=True, seed=7)
    assert "static_fully_async" == config.async_training.dynamic_schedule_policy
    assert (7, 7) == (config.trainer.seed, config.data.seed)
    with pytest.raises(ConfigError, match="emulate both or neither"):
        demo_config(made, engine="emulated")
    both = demo_config(made, engine="emulated", trainer="emulated")
    assert "emulated" == both.actor_rollout_ref.rollout.name


def test_one_core_is_shared(made, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert demo_config(made).local.allow_oversubscribe
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert not demo_config(made).local.allow_oversubscribe


def test_kept_runs_are_numbered(tmp_path):
    assert tmp_path / "run" == inputs.run_folder(tmp_path, keep=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").mkdir()
    assert tmp_path / "run-3" == inputs.run_folder(tmp_path, keep=True)
    assert tmp_path / "run" == inputs.run_folder(tmp_path, keep=False)


def test_a_rise_that_is_large_enough_passes():
    inputs.require_rise({"reward_first": 0.3, "reward_last": 0.45000001}, 0.15)


@pytest.mark.parametrize(
    "summary",
    [
        {},
        {"reward_first": None, "reward_last": 0.9},
        {"reward_first": 0.3, "reward_last": 0.44},
        {"reward_first": 0.3, "reward_last": float("nan")},
    ],
)
def test_a_demo_that_learns_nothing_fails(summary):
    with pytest.raises(FaultError, match="demo's"):
        inputs.require_rise(summary, 0.15)


def test_a_missing_template_is_told():
    with pytest.raises(InternalError, match="install hybridsched again"):
        template_text("nothing.yaml")
