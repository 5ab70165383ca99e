"""The summary of a run as lines for people: what `run` and `demo` print at the end. Only wording, no figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridsched.report.text import duration, show


def summary_pairs(summary: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text, from the figures of `report.summary.summarize`."""
    use = {name: _percent(value) for name, value in summary["utilizations"].items()}
    reward = f"{show(summary['reward_first'])} -> {show(summary['reward_last'])} (first and last tenth)"
    if summary["val_reward_last"] is not None:
        reward += f"; held out {show(summary['val_reward_first'])} -> {show(summary['val_reward_last'])}"
    lending = (
        f"{summary['activations']} activations, {summary['deactivations']} deactivations, "
        f"{summary['skipped_syncs']} second syncs skipped, {duration(summary['switch_cost_s'])} a switch"
    )
    return {
        "ended": f"{summary['outcome']}: {summary['reason']}" if summary["reason"] else str(summary["outcome"]),
        "reward": reward,
        "lending": lending,
        "utilization": f"all GPUs {use['exact']}, training {use['train']}, rollout {use['rollout']}",
        "samples": show(summary["samples"]),
        "wall clock": f"{duration(summary['wall_clock_s'])}, {show(summary['cycles'])} cycles",
        "time in a cycle": _phases(summary["timings_s"]),
        **{f"{who} GPUs did": _shares(what) for who, what in summary["resource_time"].items()},
    }


def _phases(timings: Mapping[str, float]) -> str:
    """The whole cycle first, then its phases, the longest first; what takes no time is left out."""
    whole = timings.get("step")
    parts = sorted(((v, name) for name, v in timings.items() if name != "step" and v >= 0.005), reverse=True)
    text = ", ".join(f"{name} {duration(value)}" for value, name in parts)
    return f"{duration(whole)}: {text}" if text else duration(whole)


def _shares(activities: Mapping[str, float]) -> str:
    found = sorted(((share, what) for what, share in activities.items() if share >= 0.005), reverse=True)
    return ", ".join(f"{what} {_percent(share)}" for share, what in found) or "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
