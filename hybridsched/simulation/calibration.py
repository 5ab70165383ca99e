"""The timing model of a recorded run: fitted to its first cycles, tried on the rest.

Owns ``calibrate``: from a run folder (run log and resolved configuration) to a scenario whose ``emulated:`` section has
the measured times, and to a comparison of that scenario, played by the real scheduler in virtual time, with the
recorded cycles. Nothing of the cycles it is judged on enters the fit. The fits themselves are in fitting.py.

What counts as the time of a cycle is its ``timing_s/step`` without checkpoints and validation, which the emulated
engine does not model. Recorded runs whose log lacks decode times, which is unfinished in its first cycles or cannot be
read, are refused with the reason. Does not change the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hybridsched.config.loader import load_config
from hybridsched.config.schema import EmulatedConfig, RunConfig
from hybridsched.errors import DataError, RunFolderError
from hybridsched.runlog.reader import RunLog
from hybridsched.runlog.rows import MetricsRow
from hybridsched.simulation.fitting import Metrics, fit_decode, fit_lengths, fit_train
from hybridsched.simulation.scenario import load_scenario
from hybridsched.simulation.world import SimulatedRun

#: Fewest cycles of a log, and fewest on either side of the cut.
FEWEST_CYCLES, FEWEST_PART = 6, 3
_STEP = "timing_s/step"
#: Not modelled: taken off the time of a cycle.
_BESIDE = ("timing_s/save_checkpoint", "timing_s/validate")
#: Parts of a cycle that are not the trainer's: what is left of it is.
_NOT_TRAINING = (
    *_BESIDE,
    "timing_s/wait_for_enough_samples",
    "timing_s/deactivate",
    "timing_s/gen",
    "timing_s/seal_wait",
    "timing_s/param_sync",
    "timing_s/activate",
)


@dataclass(frozen=True, slots=True)
class Found:
    """One fitted key of ``emulated:``. ``source``: what it was fitted to."""

    key: str
    value: float
    source: str


@dataclass(frozen=True, slots=True)
class ComparedCycle:
    """One cycle in seconds: recorded, and predicted as the mean over draws. ``fitted``: it was part of the fit."""

    cycle: int
    recorded_s: float
    predicted_s: float
    fitted: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the cycles that were not fitted: mean per cycle, recorded and predicted."""

    name: str
    recorded: float
    predicted: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted scenario and how well it foretells the run."""

    config: RunConfig
    found: tuple[Found, ...]
    cycles: tuple[ComparedCycle, ...]
    parts: tuple[Part, ...]
    rest_s: tuple[float, ...]  #: time of all cycles that were not fitted, by draw
    notes: tuple[str, ...]

    @property
    def rest_range(self) -> tuple[float, float]:
        """Shortest and longest draw over recorded time of the cycles that were not fitted, less 1."""
        recorded = math.fsum(c.recorded_s for c in self.cycles if not c.fitted)
        return min(self.rest_s) / recorded - 1.0, max(self.rest_s) / recorded - 1.0

    def share_off(self, *, fitted: bool) -> float:
        """Predicted over recorded time of all fitted (or all other) cycles together, less 1."""
        part = [cycle for cycle in self.cycles if cycle.fitted is fitted]
        return math.fsum(c.predicted_s for c in part) / math.fsum(c.recorded_s for c in part) - 1.0

    def mean_cycle_error(self, *, fitted: bool) -> float:
        """Mean of |predicted / recorded - 1| over those cycles."""
        return fmean(abs(c.predicted_s / c.recorded_s - 1.0) for c in self.cycles if c.fitted is fitted)

    def recorded_spread(self) -> float:
        """Mean of |recorded / their mean - 1| over the cycles that were not fitted: no constant does better."""
        part = [c.recorded_s for c in self.cycles if not c.fitted]
        return fmean(abs(seconds / fmean(part) - 1.0) for seconds in part)


def calibrate(folder: Path, *, fit_share: float = 0.5, draws: int = 5) -> Calibration:
    """Fit the first ``fit_share`` of a run's cycles and predict the others, ``draws`` times with other lengths.

    Raises RunFolderError (no or unreadable log or configuration) and DataError (too few cycles, nothing to fit to).
    """
    rows, log = _cycles(folder)
    config = _configuration(folder)
    n = _cut(len(rows), fit_share)
    values = [row.values for row in rows]
    found, notes = _fit(config, values[:n])
    found = _balanced(config, found, values[:n])
    fitted = _with(config, found)
    played = [_play(_seeded(fitted, i), len(rows)) for i in range(1, draws + 1)]
    compared = tuple(
        ComparedCycle(row.step, _modelled(row.values), fmean(_modelled(run[i]) for run in played), i < n)
        for i, row in enumerate(rows)
    )
    parts = _parts(values[n:], [row for run in played for row in run[n:]])
    rest = tuple(math.fsum(map(_modelled, run[n:])) for run in played)
    return Calibration(fitted, tuple(found), compared, parts, rest, (*_warnings(log, rows), *notes))


def _parts(recorded: Sequence[Metrics], played: Sequence[Metrics]) -> tuple[Part, ...]:
    """Where the difference comes from."""

    def of(name: str, value: Callable[[Metrics], float]) -> Part:
        return Part(name, fmean(map(value, recorded)), fmean(map(value, played)))

    def timed(*names: str) -> Callable[[Metrics], float]:
        return lambda values: math.fsum(values.get(f"timing_s/{name}", 0.0) for name in names)

    return (
        of("training, s", _training_s),
        of("lent to rollout, s", timed("wait_for_enough_samples")),
        of("waiting for samples, s", timed("gen", "seal_wait")),
        of("weight sync, s", timed("param_sync")),
        of("switching, s", timed("activate", "deactivate")),
        of("trained tokens", lambda values: values.get("perf/total_num_tokens", 0.0)),
        of("tokens of a response", lambda values: values.get("rollout/response_length/mean", 0.0)),
    )


def _with(config: RunConfig, found: Sequence[Found]) -> RunConfig:
    values = {"response_block_samples": 0, **{f.key: _typed(f.key, f.value) for f in found}}
    return config.model_copy(update={"emulated": config.emulated.model_copy(update=values)})


def _seeded(config: RunConfig, more: int) -> RunConfig:
    """Other draws than those of a recorded simulation."""
    trainer = config.trainer.model_copy(update={"seed": config.trainer.seed + more})
    return config.model_copy(update={"trainer": trainer})


def _balanced(config: RunConfig, found: Sequence[Found], cycles: Sequence[Metrics]) -> list[Found]:
    """The training speed again, so that it is that of one rank: a collection takes as long as its longest rank.

    Recorded times hold the imbalance between ranks, and the simulation adds its own; one simulated run of the fitted
    cycles tells how much that is.
    """
    played = _play(_seeded(_with(config, found), 1), len(cycles))
    recorded, simulated = (
        math.fsum(map(_training_s, rows)) / math.fsum(row["perf/total_num_tokens"] for row in rows)
        for rows in (cycles, played)
    )
    scale = simulated / recorded if recorded > 0 else 1.0
    return [replace(f, value=f.value * scale) if f.key == "train_tokens_per_s" else f for f in found]


def _cycles(folder: Path) -> tuple[list[MetricsRow], RunLog]:
    """The finished cycles. Raises as `calibrate`."""
    log = RunLog.open(folder)
    rows = [row for row in log.history() if row.values.get(_STEP, 0.0) > 0]
    if len(rows) < FEWEST_CYCLES:
        ending = [event.new for event in log.events("run", "run")]
        state = "it is damaged or its run never began" if not log.event_rows else "the run is short or still going on"
        if ending and ending[-1] in ("stopped", "failed"):
            state = f"the run {ending[-1]} early"
        raise DataError(
            f"{folder}: the log holds {len(rows)} finished cycles ({state}); calibration needs at least "
            f"{FEWEST_CYCLES}: {FEWEST_PART} to fit and {FEWEST_PART} to judge the fit by"
        )
    return rows, log


def _configuration(folder: Path) -> RunConfig:
    path = folder / "config" / "resolved.yaml"
    if not path.is_file():
        raise RunFolderError(f"{path}: missing; give the folder of a run (it holds log/ and config/resolved.yaml)")
    return load_scenario(path).config


def _cut(cycles: int, share: float) -> int:
    if not 0 < share < 1:
        raise DataError(f"the share of cycles to fit is {share:g}; it must lie between 0 and 1")
    return min(cycles - FEWEST_PART, max(FEWEST_PART, round(cycles * share)))


def _warnings(log: RunLog, rows: Sequence[MetricsRow]) -> list[str]:
    """What a reader should know about the record."""
    notes = []
    endings = [event.new for event in log.events("run", "run")]
    if not endings or endings[-1] != "finished":
        notes.append(f"the run has not finished: its {len(rows)} cycles so far are used")
    deaths = sum(event.new == "exited" for event in log.events("worker")) if endings[-1:] != ["finished"] else 0
    restarts = len({event.attempt for event in log.event_rows}) - 1
    if restarts > 0 or deaths:
        notes.append("the run was interrupted: cycles around a restart are longer than the model knows")
    return notes


def _fit(config: RunConfig, cycles: Sequence[Metrics]) -> tuple[list[Found], list[str]]:
    """Keys of ``emulated:`` from the cycles to be fitted, and remarks."""
    found, notes = _fit_engine(cycles)
    more, remarks = _fit_lengths_and_prompts(config, cycles)
    found, notes = found + more, notes + remarks
    trained = _fit_trainer(config, cycles)
    notes += trained[1]
    found += trained[0] + _fit_switches(cycles)
    filtered = [values.get("samples/filtered_share", 0.0) for values in cycles]
    found.append(Found("reward_equal_fraction", fmean(filtered), "share of filtered samples"))
    found.append(Found("reward_failed_fraction", 0.0, "not modelled: failed rewards are part of the times"))
    return found, notes


def _fit_engine(cycles: Sequence[Metrics]) -> tuple[list[Found], list[str]]:
    fit = fit_decode(cycles)
    if fit is None:
        raise DataError(
            "the log has no decode times (decode/*/batch_*/seconds): it is of an older version, or its replicas "
            "finished no sample in the cycles to be fitted; record a run with this version"
        )
    low, high = fit.batches
    seen = f"decode times of batches of {low} to {high} sequences, off by {fit.error:.1%}"
    found = [Found("decode_base_s", fit.base_s, seen), Found("decode_per_seq_s", fit.per_seq_s, seen)]
    if fit.prefill_tokens_per_s is not None:
        found.append(Found("prefill_tokens_per_s", fit.prefill_tokens_per_s, "the same times"))
    notes = list(fit.notes)
    if fit.hybrid_speed is not None:
        found.append(Found("hybrid_speed", fit.hybrid_speed, "decode times of hybrids against standalone replicas"))
    else:
        found.append(Found("hybrid_speed", 1.0, "only one kind of replica was measured"))
    return found, notes


def _fit_lengths_and_prompts(config: RunConfig, cycles: Sequence[Metrics]) -> tuple[list[Found], list[str]]:
    trained = [values.get("samples/trained", 0.0) for values in cycles]
    before = [math.fsum(trained[:i]) + 0.5 * trained[i] for i in range(len(trained))]
    lengths = fit_lengths(cycles, before, config.data.max_response_length)
    if lengths is None:
        raise DataError("the log has no response lengths (rollout/response_length/tp*): it is of an older version")
    source = f"response lengths of {len(cycles)} cycles, {lengths.cut_share:.1%} cut off"
    found = [
        Found("response_mean_tokens", lengths.mean, source),
        Found("response_sigma", lengths.sigma, source),
        Found("response_growth_per_1000", lengths.growth_per_1000, source),
        Found("prompt_tokens", _prompt_tokens(config, cycles), "trained tokens less response tokens"),
    ]
    return found, list(lengths.notes)


def _prompt_tokens(config: RunConfig, cycles: Sequence[Metrics]) -> float:
    """The trainer counts a prompt once per response."""
    n = config.actor_rollout_ref.rollout.n
    known = [
        values["perf/total_num_tokens"] / (values["samples/trained"] * n) - values["response_length/mean"]
        for values in cycles
        if values.get("samples/trained", 0.0) > 0 and "response_length/mean" in values
    ]
    return max(1.0, float(round(fmean(known)))) if known else float(config.emulated.prompt_tokens)


def _fit_trainer(config: RunConfig, cycles: Sequence[Metrics]) -> tuple[list[Found], list[str]]:
    actor = config.actor_rollout_ref.actor
    seconds = [_training_s(values) for values in cycles]
    steps = [actor.ppo_epochs * values.get("samples/trained", 0.0) / actor.ppo_mini_batch_size for values in cycles]
    tokens = [actor.ppo_epochs * values.get("perf/total_num_tokens", 0.0) for values in cycles]
    if not math.fsum(tokens) > 0 or not math.fsum(seconds) > 0:
        raise DataError("nothing was trained in the cycles to be fitted (perf/total_num_tokens, timing_s/step)")
    fit = fit_train(seconds, steps, tokens)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    efficiency = config.emulated.train_efficiency
    source = f"time of a cycle that is neither waiting, switching nor sync, off by {fit.error:.1%} a cycle"
    return [
        Found("train_tokens_per_s", fit.tokens_per_s / ranks**efficiency, source),
        Found("train_fixed_s", fit.fixed_s, source),
    ], list(fit.notes)


def _fit_switches(cycles: Sequence[Metrics]) -> list[Found]:
    """Medians; wake and hand-over follow each other and are recorded as one time."""

    def typical(name: str) -> tuple[float, int]:
        seconds = [values[name] for values in cycles if values.get(name, 0.0) > 0]
        return (median(seconds), len(seconds)) if seconds else (0.0, 0)

    out = []
    for key, name in (("sync_s", "param_sync"), ("wake_s", "activate"), ("sleep_s", "deactivate")):
        seconds, times = typical(f"timing_s/{name}")
        out.append(Found(key, seconds, f"timing_s/{name}, median of {times}"))
    return [*out, Found("handover_s", 0.0, "in wake_s: one follows the other")]


def _typed(key: str, value: float) -> float | int:
    return int(value) if EmulatedConfig.model_fields[key].annotation is int else float(value)


def _modelled(values: Metrics) -> float:
    return values[_STEP] - math.fsum(values.get(name, 0.0) for name in _BESIDE)


def _training_s(values: Metrics) -> float:
    return max(0.0, values[_STEP] - math.fsum(values.get(name, 0.0) for name in _NOT_TRAINING))


def _play(config: RunConfig, cycles: int) -> list[dict[str, float]]:
    """Metrics of each of the first ``cycles`` cycles. Raises DataError when the simulation ends before."""
    trainer = config.trainer.model_copy(update={"total_training_steps": cycles, "save_freq": 0, "test_freq": -1})
    run = SimulatedRun(config.model_copy(update={"trainer": trainer}))
    run.run(limit_s=1e9)
    rows = [row.values for row in run.log.rows if _STEP in row.values]
    if len(rows) < cycles:
        raise DataError(f"the fitted scenario ends after {len(rows)} of {cycles} cycles: its data is used up")
    return rows[:cycles]


def scenario_yaml(calibration: Calibration, source: Path) -> str:
    """The fitted configuration as YAML that `hybridsched simulate` and `plan` take; the head says where it is from."""
    from hybridsched.config.loader import resolved_yaml

    fitted = [cycle.cycle for cycle in calibration.cycles if cycle.fitted]
    head = [
        f"Timing under emulated: fitted by `hybridsched calibrate` to cycles {fitted[0]} to {fitted[-1]} of {source};",
        f"the {len(calibration.cycles) - len(fitted)} cycles after them were predicted "
        f"{calibration.share_off(fitted=False):+.1%} off in all, "
        f"{calibration.mean_cycle_error(fitted=False):.1%} off a cycle on average.",
        *calibration.notes,
    ]
    return "".join(f"# {line}\n" for line in head) + resolved_yaml(calibration.config)


def save_scenario(calibration: Calibration, source: Path, target: Path) -> None:
    """Write `scenario_yaml` and read it back. Raises RunFolderError when it cannot be written."""
    try:
        target.write_text(scenario_yaml(calibration, source), encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{target}: the scenario cannot be written: {error.strerror}") from error
    load_config(target)


def as_json(calibration: Calibration) -> dict[str, Any]:
    """Plain values."""
    return {
        "found": {f.key: f.value for f in calibration.found},
        "cycles": [
            {"cycle": c.cycle, "recorded_s": c.recorded_s, "predicted_s": c.predicted_s, "fitted": c.fitted}
            for c in calibration.cycles
        ],
        "fitted_off": calibration.share_off(fitted=True),
        "rest_off": calibration.share_off(fitted=False),
        "rest_parts": {p.name: [p.recorded, p.predicted] for p in calibration.parts},
        "rest_off_of_draws": list(calibration.rest_range),
        "rest_cycle_error": calibration.mean_cycle_error(fitted=False),
        "rest_spread": calibration.recorded_spread(),
        "notes": list(calibration.notes),
    }
