"""A run in figures, for programs (`hybridsched report --json`) and for the head of the HTML report.

Owns the meaning of each figure (docstring of `summarize`). Invariant: everything comes from the run log, except the
verdicts of samples, which the queue's ledger knows exactly (the log's sums stand in when there is no ledger).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridsched.errors import HybridschedError
from hybridsched.report.run_data import ENDINGS, RunData, load_run
from hybridsched.report.timeline import shares, timeline
from hybridsched.runlog.rows import EventRow, MetricsRow

REWARD = "rollout/reward/mean"
UTILIZATIONS = {
    "train": "dynamic_resource/train_resource_utilization",
    "rollout": "dynamic_resource/rollout_resource_utilization",
    "cluster": "dynamic_resource/resource_utilization",
    "exact": "dynamic_resource/resource_utilization_exact",
}
VERDICTS = ("trained", "stale", "filtered", "failed", "surplus")

_VALIDATION = re.compile(r"val/reward/mean@\d+")
_CYCLE = "timing_s/step"  # only the row of a finished cycle has it


def summarize(run_folder: Path) -> dict[str, Any]:
    """The figures of a run; JSON-able, None where there is nothing to tell. RunFolderError without a run log.

    outcome, reason      how it ended            cycles, version    sync cycles done, number of the newest weights
    wall_clock_s         over all starts         attempts, lineages starts, and histories of weights
    reward_first, _last  means of the first and last tenth (at least one) of the cycles' rollout/reward/mean
    val_reward_first, _last  validation, mean@n  activations, deactivations, skipped_syncs   lending (validation aside)
    switch_cost_s        mean activation plus mean deactivation
    utilizations         means over cycles: train, rollout, cluster (with x), exact (from tenancy)
    samples              by verdict              tokens, tokens_per_s   trained tokens, per second of cycles
    deaths               worker processes that ended before the run did
    timings_s            mean seconds per cycle by phase
    resource_time        share of time per activity, of standalone replicas and of trainer GPUs
    """
    return summary_of(load_run(run_folder))


def summary_of(run: RunData) -> dict[str, Any]:
    """`summarize` of a loaded run."""
    log = run.log
    history = log.history()
    cycles = [row for row in history if _CYCLE in row.values]
    outcome, reason = run.ending()
    rewards = _column(cycles, REWARD)
    validation = [value for row in history for name, value in row.values.items() if _VALIDATION.fullmatch(name)]
    tokens = sum(_column(cycles, "perf/total_num_tokens"))
    seconds = sum(_column(cycles, _CYCLE))
    return {
        "run_id": run.run_id,
        "outcome": outcome,
        "reason": reason,
        "cycles": len(cycles),
        "version": max((row.step for row in cycles), default=0),
        "attempts": len({event.attempt for event in log.event_rows}) or 1,
        "lineages": 1 + len({_lineage(e) for e in log.events("run") if e.new == "restored"}),
        "wall_clock_s": run.wall_clock_s(),
        "reward_first": _mean(rewards[: _tenth(rewards)]),
        "reward_last": _mean(rewards[len(rewards) - _tenth(rewards) :]),
        "val_reward_first": validation[0] if validation else None,
        "val_reward_last": validation[-1] if validation else None,
        **_lending(log.event_rows),
        "utilizations": {name: _mean(_column(cycles, metric)) for name, metric in UTILIZATIONS.items()},
        "samples": _verdicts(run, cycles),
        "tokens": int(tokens),
        "tokens_per_s": tokens / seconds if seconds > 0 else None,
        "deaths": _deaths(log.event_rows),
        "timings_s": _timings(cycles),
        "resource_time": shares(timeline(log.event_rows)),
    }


def _lending(events: Sequence[EventRow]) -> dict[str, Any]:
    switches = [e for e in events if (e.kind, e.entity) == ("switch", "pool") and not e.reason.startswith("validation")]
    on = [event for event in switches if event.new == "activated"]
    off = [event for event in switches if event.new == "deactivated"]
    costs = [_mean([_seconds(event) for event in group]) for group in (on, off)]
    known = [cost for cost in costs if cost is not None]
    return {
        "activations": len(on),
        "deactivations": len(off),
        "skipped_syncs": sum(e.kind == "sync" and e.new == "second sync skipped" for e in events),
        "switch_cost_s": sum(known) if known else None,
    }


def _deaths(events: Sequence[EventRow]) -> int:
    """Worker processes that ended while their start of the run was going on."""
    count, running = 0, True
    for event in events:
        if event.kind == "run":
            running = event.new not in ENDINGS
        elif event.kind == "worker" and event.new == "exited" and running:
            count += 1
    return count


def _verdicts(run: RunData, cycles: Sequence[MetricsRow]) -> dict[str, int]:
    counts = _ledger(run.folder / "queue")
    if counts is None:
        counts = {name: round(sum(_column(cycles, f"samples/{name}"))) for name in VERDICTS}
    return {name: counts.get(name, 0) for name in VERDICTS}


def _ledger(queue: Path) -> dict[str, int] | None:
    if not (queue / "ledger").is_dir():
        return None
    from hybridsched.sample_queue.inspection import newest_chain
    from hybridsched.sample_queue.log import LEDGER

    try:
        entries = newest_chain(queue, LEDGER)
    except HybridschedError:
        return None  # a damaged ledger is `queue fsck`'s business; the log's sums are near enough here
    counts: dict[str, int] = {}
    for entry in entries:
        verdict = str(entry.get("verdict"))
        counts[verdict] = counts.get(verdict, 0) + 1
    return counts or None


def _timings(cycles: Sequence[MetricsRow]) -> dict[str, float]:
    names = dict.fromkeys(name for row in cycles for name in row.values if name.startswith("timing_s/"))
    means = {name.removeprefix("timing_s/"): _mean(_column(cycles, name)) for name in names}
    return {name: value for name, value in means.items() if value is not None}


def _column(rows: Sequence[MetricsRow], name: str) -> list[float]:
    values = (row.values.get(name, math.nan) for row in rows)
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _tenth(values: Sequence[float]) -> int:
    return max(1, len(values) // 10)


def _seconds(event: EventRow) -> float:
    value = event.detail.get("seconds", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def _lineage(event: EventRow) -> Any:
    version = event.detail.get("version")
    return version[0] if isinstance(version, list) and version else event.time


def flat(summary: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures as dotted names."""
    out: dict[str, Any] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out
