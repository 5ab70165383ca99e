"""`hybridsched calibrate`: known parameters come back, the rest of a run is foretold, and bad logs are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from sim_tools import config

from hybridsched.cli.main import main
from hybridsched.config import load_config
from hybridsched.errors import DataError, RunFolderError
from hybridsched.runtime.workers.meter import DecodeMeter
from hybridsched.simulation.calibration import Calibration, calibrate, save_scenario
from hybridsched.simulation.export import write_run_log
from hybridsched.simulation.fitting import fit_decode, fit_lengths, fit_train
from hybridsched.simulation.world import SimulatedRun

#: What the recorded run is made with, and how near the fit has to come (relative).
TRUTH = {
    "decode_base_s": (0.03, 0.05),
    "decode_per_seq_s": (0.001, 0.10),
    "prefill_tokens_per_s": (4000.0, 0.35),
    "hybrid_speed": (0.8, 0.03),
    "response_mean_tokens": (400.0, 0.08),
    "response_sigma": (0.6, 0.08),
    "train_tokens_per_s": (500.0, 0.10),
    "sync_s": (4.0, 0.01),
    "wake_s": (3.0, 0.01),  # with hand-over
    "sleep_s": (1.5, 0.01),
    "prompt_tokens": (64.0, 0.2),
}
CYCLES = 16


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run whose parameters are known, as a run folder."""
    given = {key: value for key, (value, _tolerance) in TRUTH.items()}
    given |= {"wake_s": 2.0, "handover_s": 1.0, "prompt_tokens": 64, "dataset_size": 4096, "train_fixed_s": 0}
    made = config(
        *(f"emulated.{key}={value}" for key, value in given.items()),
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "async_training.concurrent_samples_per_replica=8",
        "async_training.dynamic_schedule_policy=fixed_ratio",
        f"trainer.total_training_steps={CYCLES}",
    )
    run = SimulatedRun(made)
    run.run()
    folder = tmp_path_factory.mktemp("recorded") / "run"
    write_run_log(run, folder)
    return folder


@pytest.fixture(scope="module")
def fitted(recorded: Path) -> Calibration:
    return calibrate(recorded, draws=2)


@pytest.mark.parametrize("key", TRUTH)
def test_known_parameters_come_back(fitted: Calibration, key: str) -> None:
    value, tolerance = TRUTH[key]
    assert getattr(fitted.config.emulated, key) == pytest.approx(value, rel=tolerance)


def test_cycles_that_were_not_fitted_are_foretold(fitted: Calibration) -> None:
    assert CYCLES == len(fitted.cycles)
    assert CYCLES // 2 == sum(cycle.fitted for cycle in fitted.cycles)
    assert abs(fitted.share_off(fitted=False)) < 0.06
    low, high = fitted.rest_range
    assert low <= fitted.share_off(fitted=False) <= high


def test_what_is_predicted_does_not_depend_on_the_cycles_it_is_judged_by(fitted: Calibration, recorded: Path) -> None:
    """The same first cycles give the same model, whatever came after them."""
    again = calibrate(recorded, fit_share=0.25, draws=1)
    assert CYCLES // 4 == sum(cycle.fitted for cycle in again.cycles)
    assert again.found != fitted.found


def test_the_command_prints_both_tables_and_writes_a_scenario_that_can_be_played(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scenario.yaml"
    assert 0 == main(["calibrate", str(recorded), "-o", str(out), "--draws", "1"])
    text = capsys.readouterr().out
    assert "emulated.decode_base_s" in text and "predicted" in text and "8 cycles that were not fitted" in text
    assert "fitted by `hybridsched calibrate` to cycles 1 to 8" in out.read_text(encoding="utf-8")
    assert 0 == main(["simulate", str(out), "--cycles", "2", "--json"])
    assert 2 == json.loads(capsys.readouterr().out)["cycles"]


def test_figures_for_programs(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["calibrate", str(recorded), "--json", "--draws", "1"])
    found = json.loads(capsys.readouterr().out)
    assert CYCLES == len(found["cycles"]) and {"found", "rest_off", "rest_cycle_error", "notes"} <= set(found)


def test_a_written_scenario_is_the_fitted_configuration(fitted: Calibration, recorded: Path, tmp_path: Path) -> None:
    save_scenario(fitted, recorded, tmp_path / "s.yaml")
    assert load_config(tmp_path / "s.yaml").emulated == fitted.config.emulated
    with pytest.raises(RunFolderError, match="cannot be written"):
        save_scenario(fitted, recorded, tmp_path / "nowhere" / "s.yaml")


def test_a_log_with_too_few_cycles_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SimulatedRun(config("trainer.total_training_steps=3"))
    run.run()
    write_run_log(run, tmp_path / "run")
    assert 2 == main(["calibrate", str(tmp_path / "run")])
    message = capsys.readouterr().err
    assert "holds 3 finished cycles" in message and "at least 6" in message and "Traceback" not in message


def test_a_damaged_log_is_refused(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(recorded, folder)
    for file in (folder / "log").iterdir():
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        calibrate(folder)


def test_a_folder_without_a_run_or_without_its_configuration_is_refused(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run log"):
        calibrate(tmp_path)
    shutil.copytree(recorded / "log", tmp_path / "run" / "log")
    with pytest.raises(RunFolderError, match=r"resolved\.yaml: missing"):
        calibrate(tmp_path / "run")


def test_an_unfinished_run_is_used_and_said_to_be_unfinished(tmp_path: Path) -> None:
    run = SimulatedRun(config("trainer.total_training_steps=8"))
    run.run()
    run.log.events = [event for event in run.log.events if (event.kind, event.new) != ("run", "finished")]
    for row in run.log.rows:
        object.__setattr__(row, "after", min(row.after, len(run.log.events)))
    write_run_log(run, tmp_path / "run")
    assert any("has not finished: its 8 cycles" in note for note in calibrate(tmp_path / "run", draws=1).notes)


def test_decode_times_are_split_into_their_parts() -> None:
    cycles = []
    for size, steps, prefill in ((4, 100.0, 0.0), (16, 300.0, 5000.0), (32, 50.0, 9000.0), (8, 80.0, 100.0)):
        seconds = 0.02 * steps + 0.001 * steps * size + prefill / 10_000
        stem = f"decode/standalone/batch_{size:04d}/"
        cycles.append(
            {
                stem + "seconds": seconds,
                stem + "steps": steps,
                stem + "tokens": steps * size,
                stem + "prefill_tokens": prefill,
            }
        )
    fit = fit_decode(cycles)
    assert fit is not None and fit.prefill_tokens_per_s is not None
    assert (0.02, 0.001, 10_000) == pytest.approx((fit.base_s, fit.per_seq_s, fit.prefill_tokens_per_s), rel=1e-6)
    assert (4, 32) == fit.batches and fit.hybrid_speed is None and fit.error < 1e-9
    assert fit_decode([{}]) is None


def test_training_time_has_a_fixed_part_only_where_the_cycles_show_one() -> None:
    tokens = [1000.0, 2000.0, 1500.0, 3000.0, 2500.0]
    fit = fit_train([4 * 0.5 + t / 100 for t in tokens], [4.0] * 5, tokens)
    assert (0.5, 100.0) == pytest.approx((fit.fixed_s, fit.tokens_per_s), rel=1e-6)
    same = fit_train([20.0, 30.0, 22.0, 28.0], [4.0] * 4, [1000.0, 1001.0, 1002.0, 1000.5])
    assert 0 == same.fixed_s and same.notes and same.tokens_per_s == pytest.approx(40.035)


def test_lengths_are_fitted_below_the_cut() -> None:
    lengths = np.random.default_rng(1).lognormal(np.log(300) - 0.32, 0.8, 20_000)
    cut = 600
    seen = np.sort(np.minimum(lengths, cut))
    values = {f"rollout/response_length/tp{q:02d}": float(seen[q * 200]) for q in (10, 25, 50, 75, 90, 95)}
    values["rollout/response_length/mean"] = float(seen.mean())
    fit = fit_lengths([values] * 4, [32.0, 96.0, 160.0, 224.0], cut)
    assert fit is not None
    assert (300, 0.8) == pytest.approx((fit.mean, fit.sigma), rel=0.03)
    assert fit.cut_share == pytest.approx(float((lengths > cut).mean()), abs=0.01)
    assert 0 == fit.growth_per_1000


def test_lengths_that_grow_are_said_to_grow() -> None:
    def cycle(mean: float) -> dict[str, float]:
        quantiles = {f"rollout/response_length/tp{q:02d}": mean for q in (10, 25, 50, 75, 90, 95)}
        return {"rollout/response_length/mean": mean, **quantiles}

    samples = [500.0 * i for i in range(6)]
    fit = fit_lengths([cycle(100 * (1 + 0.5 * s / 1000)) for s in samples], samples, 10_000)
    assert fit is not None
    assert (100, 0.5) == pytest.approx((fit.mean, fit.growth_per_1000), rel=1e-6)


class Engine:
    """An engine whose progress a test sets."""

    def __init__(self) -> None:
        self.progress, self.running, self.open = 0, 0, {"a": 0}

    def running_sequences(self) -> int:
        return self.running

    def unfinished(self, key: str) -> int:
        return self.open.get(key, 0)


class HandClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.t = 0.0

    def now(self) -> float:
        return self.t

    def wall(self) -> float:
        return self.t


def test_the_meter_books_what_ran_and_leaves_pauses_out() -> None:
    engine, clock = Engine(), HandClock()
    meter = DecodeMeter(engine, clock)
    from hybridsched.model import Response

    meter.enter("a", 100, (Response.empty(),) * 4)
    engine.running, engine.open = 4, {"a": 4}
    clock.t, engine.progress = 10.0, 100 + 4 * 50
    meter.stop()
    clock.t = 20.0  # a pause
    meter.skip()
    meter.look()
    clock.t, engine.progress = 25.0, engine.progress + 4 * 20
    meter.look()
    assert {4: (15.0, 70.0, 280.0, 100.0)} == meter.report()
    assert {} == meter.report()
