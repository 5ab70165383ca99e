"""`hybridsched plan`: every split and policy, ranked by predicted time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sim_tools import BASE

from hybridsched.cli.main import main
from hybridsched.simulation.planning import options
from hybridsched.simulation.scenario import load_scenario, play

SMALL = [item for item in BASE if "strategy" not in item and "rollout.name" not in item]
FOUR = [*SMALL, "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2"]


def test_all_splits_and_policies_are_ranked_by_time() -> None:
    ranked = options(load_scenario(None, FOUR, cycles=2).config, ["static_fully_async", "default"])
    assert sorted(one.seconds for one in ranked) == [one.seconds for one in ranked]
    tried = {(split, policy) for split in ("1+3", "2+2", "3+1") for policy in ("static_fully_async", "default")}
    assert tried == {(one.split, one.policy) for one in ranked}
    assert all(one.bound_s <= one.seconds for one in ranked)


def test_the_overrides_of_an_option_give_the_predicted_time() -> None:
    ranked = options(load_scenario(None, FOUR, cycles=2).config, ["default"])
    best = ranked[0]
    again = load_scenario(None, [*FOUR, *best.overrides], cycles=2).config
    assert best.seconds == play(again).wall_clock_s


def test_slow_generation_wants_rollout_gpus_and_slow_training_trainer_gpus() -> None:
    def best(*load: str) -> str:
        config = load_scenario(None, [*FOUR, *load], cycles=2).config
        return options(config, ["static_fully_async"])[0].split

    assert "1+3" == best("emulated.train_fixed_s=0", "emulated.train_tokens_per_s=100000")
    assert "3+1" == best("emulated.train_tokens_per_s=50", "emulated.decode_base_s=0.002")


def test_what_cannot_run_is_last_and_says_why() -> None:
    hasty = ("deadlines.collect_s=3", "queue.retry_s=1", "queue.scan_s=1", "queue.seal_age_s=0.5")
    config = load_scenario(None, [*SMALL, *hasty, "emulated.decode_base_s=0.5"], cycles=2).config
    ranked = options(config, ["static_fully_async"])
    assert None is ranked[-1].run
    assert ranked[-1].reason.startswith("cannot run: ")


def test_the_command_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref: {model: {path: /models/x}}\ndata: {train_files: [x.jsonl]}\n", encoding="utf-8")
    arguments = ["plan", str(path), *SMALL, "--cycles", "2", "--policy", "default"]
    assert 0 == main(arguments)
    text = capsys.readouterr().out
    assert "splits and policies (emulated)" in text
    assert "best: 1+1 GPUs with default" in text
    assert "emulated: no model and no GPU took part" in text
    assert 0 == main([*arguments, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert ["1+1"] == [one["split"] for one in printed["options"]]
