"""`hybridsched simulate`, scenarios, and what they need of the emulated engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sim_tools import BASE

from hybridsched.cli.main import main
from hybridsched.config.schema import EmulatedConfig
from hybridsched.engines.emulated_draws import draw_length, mean_length
from hybridsched.errors import ConfigError, RunFolderError
from hybridsched.simulation.export import write_run_log
from hybridsched.simulation.scenario import DEFAULT_CYCLES, load_scenario, play, splits, with_policy, with_split
from hybridsched.simulation.world import SimulatedRun

SCENARIOS = sorted((Path(__file__).parents[2] / "benchmarks" / "scenarios").glob("*.yaml"))
SMALL = [item for item in BASE if "strategy" not in item and "rollout.name" not in item]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def real_yaml(tmp_path: Path) -> Path:
    """A run.yaml as one writes it for a real run: model, data, torch."""
    return write(
        tmp_path,
        """
actor_rollout_ref: {model: {path: /models/nobody}, rollout: {name: torch}}
data: {train_files: [/data/nothing.jsonl]}
trainer: {nnodes: 1, n_gpus_per_node: 1, test_freq: 2}
""",
    )


def test_a_real_run_yaml_is_played_with_emulated_engines_and_its_own_sizes(
    real_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == main(["simulate", str(real_yaml), *SMALL, "--cycles", "3", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert (True, 3, "finished") == (printed["emulated"], printed["cycles"], printed["outcome"])
    assert 3 * 8 == printed["samples"]["trained"]
    assert [1, 2, 3] == [row["cycle"] for row in printed["cycle"]]


def test_the_text_says_that_it_is_emulated_and_the_log_can_be_reported(
    real_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "log"
    assert 0 == main(["simulate", str(real_yaml), *SMALL, "--cycles", "2", "--log", str(folder)])
    text = capsys.readouterr().out
    assert "emulated: no model and no GPU took part" in text
    assert "sync cycles (emulated)" in text
    assert 0 == main(["report", str(folder), "--json"])
    assert 2 == json.loads(capsys.readouterr().out)["cycles"]


def test_plot_draws_curves_and_resources(real_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pictures"
    assert 0 == main(["simulate", str(real_yaml), *SMALL, "--cycles", "2", "--plot", str(out)])
    drawn = {path.stem: path.read_bytes()[:8] for path in out.iterdir()}
    assert {"resources", "resources_last_cycles", "queue", "step_time", "utilizations", "decisions"} <= set(drawn)
    assert {b"\x89PNG\r\n\x1a\n"} == set(drawn.values())
    assert str(out / "queue.png") in capsys.readouterr().out
    (tmp_path / "file").write_text("in the way")
    assert 2 == main(["simulate", str(real_yaml), *SMALL, "--cycles", "2", "--plot", str(tmp_path / "file")])
    assert "pictures cannot be written" in capsys.readouterr().err


def test_reported_figures_are_those_of_the_simulation(real_yaml: Path, tmp_path: Path) -> None:
    from hybridsched.report.summary import summarize

    run = SimulatedRun(load_scenario(real_yaml, SMALL, cycles=3).config)
    ended = run.run()
    write_run_log(run, tmp_path / "log")
    found = summarize(tmp_path / "log")
    names = ("cycles", "activations", "deactivations", "skipped_syncs")
    assert {name: getattr(ended, name) for name in names} == {name: found[name] for name in names}
    with pytest.raises(RunFolderError, match="holds the log of a run already"):
        write_run_log(run, tmp_path / "log")


def test_a_file_without_an_end_is_cut_and_says_so(real_yaml: Path) -> None:
    scenario = load_scenario(real_yaml)
    assert DEFAULT_CYCLES == scenario.config.trainer.total_training_steps
    assert any("names no end" in note for note in scenario.notes)
    assert any("defaults, not of your model" in note for note in scenario.notes)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_of_the_suite_is_read(path: Path) -> None:
    scenario = load_scenario(path)
    assert () == scenario.notes
    assert path.stem.replace("_", "-") == scenario.config.trainer.experiment_name


def test_there_are_at_least_twelve_scenarios() -> None:
    assert len(SCENARIOS) >= 12


def test_lengths_grow_and_alternate_over_the_samples() -> None:
    growing = EmulatedConfig(response_mean_tokens=100, response_sigma=0, response_growth_per_1000=2.0)
    assert [100, 200, 300] == [draw_length(growing, 1, uid, 0) for uid in (0, 500, 1000)]
    blocks = EmulatedConfig(response_mean_tokens=100, response_block_samples=2, response_block_factor=3.0)
    assert [100, 100, 300, 300, 100] == [mean_length(blocks, uid) for uid in range(5)]


def test_a_slow_replica_makes_a_static_run_longer() -> None:
    whole = load_scenario(None, SMALL, cycles=3).config
    slow = load_scenario(None, [*SMALL, "emulated.replica_speed={standalone.0: 0.5}"], cycles=3).config
    static = [play(with_policy(config, "static_fully_async")).wall_clock_s for config in (whole, slow)]
    assert static[1] > 1.3 * static[0]


def test_a_lost_worker_stays_lost_and_the_run_goes_on() -> None:
    two = [*SMALL, "rollout.n_gpus_per_node=2"]
    config = load_scenario(None, [*two, "emulated.worker_lost_at_s={standalone.1: 30}"], cycles=3).config
    run = SimulatedRun(config)
    assert 3 == run.run().cycles
    ready = [e.t for e in run.log.of("replica", "standalone.1") if e.new == "ready"]
    assert ready and max(ready) < 30
    assert ["given up"] == [e.new for e in run.log.of("fault", "standalone.1") if e.new == "given up"]


def test_replicas_nobody_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no replica 'standalone.7'; there are hybrid.0, standalone.0"):
        load_scenario(None, [*SMALL, "emulated.replica_speed={standalone.7: 0.5}"])


def test_splits_keep_the_number_of_gpus() -> None:
    config = load_scenario(None, [*SMALL, "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2"]).config
    assert [(1, 3), (2, 2), (3, 1)] == splits(config)
    other = SimulatedRun(with_split(config, 3, 1)).derived
    assert (3, 1) == (other.n_trainer_gpus, other.n_rollout_gpus)
    nodes = [*SMALL, "trainer.nnodes=2", "trainer.n_gpus_per_node=8", "rollout.nnodes=2", "rollout.n_gpus_per_node=8"]
    assert [(8, 24), (16, 16), (24, 8)] == splits(load_scenario(None, nodes).config)
