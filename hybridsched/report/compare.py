"""Several runs side by side: what each cost and reached, and how much faster it was than the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridsched.errors import UserError
from hybridsched.report.run_data import load_run
from hybridsched.report.summary import summary_of
from hybridsched.report.text import columns, duration, show

_Rows = tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]


def _share(name: str) -> Callable[[dict[str, Any]], str]:
    def cell(summary: dict[str, Any]) -> str:
        value = summary["utilizations"][name]
        return "-" if value is None else f"{value:.1%}"

    return cell


_ROWS: _Rows = (
    ("outcome", lambda s: str(s["outcome"])),
    ("policy", lambda s: str(s["policy"])),
    ("cycles", lambda s: show(s["cycles"])),
    ("wall clock", lambda s: duration(s["wall_clock_s"])),
    ("  against the first", lambda s: str(s["against_first"])),
    ("seconds a cycle", lambda s: show(s["timings_s"].get("step"))),
    ("  against the first", lambda s: str(s["cycle_against_first"])),
    ("trained tokens/s", lambda s: show(s["tokens_per_s"])),
    ("reward, first tenth", lambda s: show(s["reward_first"])),
    ("reward, last tenth", lambda s: show(s["reward_last"])),
    ("validation, last", lambda s: show(s["val_reward_last"])),
    ("use of all GPUs, exact", _share("exact")),
    ("use of all GPUs", _share("cluster")),
    ("use in training", _share("train")),
    ("use in rollout", _share("rollout")),
    ("lent", lambda s: show(s["activations"])),
    ("second syncs skipped", lambda s: show(s["skipped_syncs"])),
    ("cost of a switch", lambda s: duration(s["switch_cost_s"])),
    ("samples trained", lambda s: show(s["samples"]["trained"])),
    (
        "samples dropped",
        lambda s: show(sum(n for name, n in s["samples"].items() if name not in ("trained", "surplus"))),
    ),
    ("deaths", lambda s: show(s["deaths"])),
)


def compare(runs: Sequence[Path]) -> str:
    """A table, one column a run. UserError for fewer than two; RunFolderError for a folder without a run log."""
    if len(runs) < 2:
        raise UserError("there is nothing to compare: name the folders of at least two runs")
    summaries = []
    for folder in runs:
        run = load_run(Path(folder))
        policy = run.setting("async_training.dynamic_schedule_policy", "-")
        summaries.append(summary_of(run) | {"policy": policy})
    first = summaries[0]
    for summary in summaries:
        summary["against_first"] = _change(summary["wall_clock_s"], first["wall_clock_s"])
        summary["cycle_against_first"] = _change(summary["timings_s"].get("step"), first["timings_s"].get("step"))
    head = ["", *_names([Path(folder) for folder in runs])]
    return columns([head, *([name, *(cell(s) for s in summaries)] for name, cell in _ROWS)])


def _change(value: float | None, base: float | None) -> str:
    if not value or not base:
        return "-"
    return f"{value / base - 1:+.1%}"


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, as long as it takes to tell them apart."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in folders]
