"""Pictures of a run over its cycles: reward, step time, queue, utilizations, decisions, staleness.

Each function takes the loaded run and returns a matplotlib figure (style.py makes SVG or PNG of it); what the log does
not hold is said in the picture. The resource-time pictures are in resource_plot.py. matplotlib is imported late.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridsched.report import style
from hybridsched.report.run_data import RunData
from hybridsched.report.summary import UTILIZATIONS

#: Phases of a cycle that do not overlap, in order: (name, timings that make it up, colour).
PHASES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("lent to rollout", ("wait_for_enough_samples",), style.BLUE),
    ("switching", ("activate", "deactivate"), style.VERMILION),
    ("waiting for samples", ("gen", "seal_wait"), style.GREY),
    ("training", ("load", "old_log_prob", "ref", "adv", "update_actor"), style.ORANGE),
    ("weight sync", ("param_sync",), style.GREEN),
    ("validation", ("validate",), style.PURPLE),
    ("checkpoint", ("save_checkpoint",), style.SKY),
)
_VALIDATION = re.compile(r"val/reward/(?P<what>mean|best)@(?P<n>\d+)")
_AGES = tuple(f"staleness/age_{age}_share" for age in range(9))


def reward(run: RunData) -> Any:
    """Mean reward of what was generated in each cycle, and of validation."""
    figure = style.new_figure(3.4)
    axes = figure.add_subplot()
    style.dress(axes, "Reward", "cycle", "mean reward")
    curves = run.log.metrics()
    train = curves.get("rollout/reward/mean")
    if train is not None:
        style.line(axes, train.step, train.value, style.BLUE, "rollouts")
    looks = {"mean": (style.VERMILION, "-", "s"), "best": (style.ORANGE, "--", "^")}
    for name, curve in sorted(curves.items(), reverse=True):
        found = _VALIDATION.fullmatch(name)
        if found:
            colour, dashes, marker = looks[found["what"]]
            label = f"validation, {found['what']}@{found['n']}"
            style.line(axes, curve.step, curve.value, colour, label, linestyle=dashes, marker=marker, markersize=4.5)
    return _finish(figure, axes, "no cycle has finished yet")


def step_time(run: RunData) -> Any:
    """Seconds of each cycle by phase, stacked."""
    figure = style.new_figure(3.4)
    axes = figure.add_subplot()
    style.dress(axes, "Time of a cycle", "cycle", "seconds")
    table = run.log.table()
    total = table.columns.get("timing_s/step")
    if total is not None:
        there = ~np.isnan(total)
        steps, left = table.step[there], total[there].copy()
        parts: list[tuple[str, Any, str]] = []
        for name, keys, colour in PHASES:
            seconds = np.zeros(len(steps))
            for key in keys:
                seconds += np.nan_to_num(table.columns.get(f"timing_s/{key}", np.zeros(len(there))))[there]
            if seconds.any():
                parts.append((name, seconds, colour))
                left -= seconds
        parts.append(("other", np.clip(left, 0.0, None), style.PALE))
        _stack(axes, steps, parts)
        axes.set_ylim(0, 1.05 * max((float(sum(p[1][i] for p in parts)) for i in range(len(steps))), default=1.0))
    return _finish(figure, axes, "no cycle has finished yet", tight=True)


def queue(run: RunData) -> Any:
    """Samples in the queue after the last collection of each cycle, with the sizes that matter."""
    figure = style.new_figure(3.2)
    axes = figure.add_subplot()
    style.dress(axes, "Sample queue", "cycle", "samples")
    curves = run.log.metrics()
    size = curves.get("dynamic_resource/mq_size")
    if size is not None:
        axes.fill_between(size.step, size.value, color=style.BLUE, alpha=0.15, linewidth=0)
        style.line(axes, size.step, size.value, style.BLUE, "in the queue")
        required = _constant(run, "fully_async/static/required_samples")
        most = _constant(run, "fully_async/static/max_required_samples")
        trigger = run.setting("async_training.trigger_parameter_sync_step")
        per_cycle = required * trigger if required is not None and isinstance(trigger, int) else None
        for value, label, dashes, colour in (
            (required, "R, one collection", ":", style.GREEN),
            (per_cycle, "S, one cycle", "--", style.ORANGE),
            (most, "window", "-.", style.VERMILION),
        ):
            if value is not None:
                axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.4, label=f"{label}: {value:g}")
        axes.set_ylim(bottom=0)
    return _finish(figure, axes, "no cycle has finished yet")


def utilizations(run: RunData) -> Any:
    """Share of the GPUs' time that did work."""
    figure = style.new_figure(3.4)
    axes = figure.add_subplot()
    style.dress(axes, "Utilization", "cycle", "share of GPU time")
    names = {"train": "training", "rollout": "rollout", "cluster": "cluster", "exact": "cluster, exact"}
    colours = {"train": style.ORANGE, "rollout": style.BLUE, "cluster": style.GREY, "exact": style.GREEN}
    curves = run.log.metrics()
    for key, metric in UTILIZATIONS.items():
        if metric in curves:
            dashes = "--" if key == "cluster" else "-"
            style.line(axes, *curves[metric][:2], colours[key], names[key], linestyle=dashes)
            axes.set_ylim(0, 1.02)
    return _finish(figure, axes, "no cycle has finished yet")


def decisions(run: RunData) -> Any:
    """After each sync: were hybrids lent, and what was the policy's ratio?"""
    figure = style.new_figure(2.8)
    axes = figure.add_subplot()
    style.dress(axes, "Decisions: lend the trainer's GPUs?", "cycle", "deactivate ratio")
    asked = [event for event in run.log.events("decision", "activate") if "version" in event.detail]
    points = [(e.detail["version"], e.detail.get("ratio", 0.0), e.new == "yes") for e in asked]
    if points:
        axes.step(
            [p[0] for p in points], [p[1] for p in points], where="mid", color=style.GREY, linewidth=1.2, zorder=1
        )
        for answer, colour, marker, label in ((True, style.BLUE, "o", "lend"), (False, style.VERMILION, "X", "do not")):
            chosen = [point for point in points if point[2] is answer]
            size = 55 if len(points) <= 60 else 14
            axes.scatter(
                [p[0] for p in chosen],
                [p[1] for p in chosen],
                s=size,
                color=colour,
                marker=marker,
                zorder=2,
                label=f"{label}: {len(chosen)}",
            )
        highest = max(point[1] for point in points)
        axes.set_ylim(0, highest * 1.25 if highest > 0 else 1)
    return _finish(figure, axes, "the policy has not been asked yet")


def staleness(run: RunData) -> Any:
    """How many weight versions old the trained samples were, as shares."""
    figure = style.new_figure(3.0)
    axes = figure.add_subplot()
    style.dress(axes, "Age of trained samples", "cycle", "share of samples")
    table = run.log.table()
    known = [name for name in _AGES if name in table.columns]
    if known:
        there = ~np.isnan(table.columns["staleness/age_max"])
        from matplotlib import colormaps

        scale = colormaps["cividis_r"]
        parts = []
        for name in known:
            age = int(name.split("_")[1])
            colour = scale(0.12 + 0.8 * age / max(3, len(known) - 1))
            parts.append((f"{age}", np.nan_to_num(table.columns[name])[there], colour))
        _stack(axes, table.step[there], parts)
        axes.set_ylim(0, 1.0)
    return _finish(figure, axes, "nothing has been trained yet", tight=True, legend_title="versions old")


#: Pictures over cycles, in the order of the report: (name for files, function).
PICTURES: tuple[tuple[str, Callable[[RunData], Any]], ...] = (
    ("reward", reward),
    ("step_time", step_time),
    ("queue", queue),
    ("utilizations", utilizations),
    ("decisions", decisions),
    ("staleness", staleness),
)


def _stack(axes: Any, steps: Any, parts: Sequence[tuple[str, Any, Any]]) -> None:
    """Stacked bars while they can be told apart, areas beyond."""
    if len(steps) > 120:
        axes.stackplot(
            steps, *[p[1] for p in parts], labels=[p[0] for p in parts], colors=[p[2] for p in parts], linewidth=0
        )
        return
    bottom = np.zeros(len(steps))
    for label, values, colour in parts:
        axes.bar(steps, values, 0.82, bottom=bottom, color=colour, label=label, linewidth=0)
        bottom = bottom + values


def _finish(figure: Any, axes: Any, nothing: str, *, tight: bool = False, legend_title: str = "") -> Any:
    if axes.has_data():
        if tight:
            axes.margins(x=0.01)
        style.whole_numbers(axes.xaxis)
        style.legend(axes)
        if legend_title and axes.get_legend() is not None:
            for text in axes.get_legend().get_texts()[:1]:
                text.set_text(f"{legend_title}: {text.get_text()}")
    else:
        style.empty(axes, nothing)
    return figure


def _constant(run: RunData, metric: str) -> float | None:
    curve = run.log.metrics().get(metric)
    return float(curve.value[-1]) if curve is not None and len(curve.value) else None
