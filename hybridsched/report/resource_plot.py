"""The resource-time picture: one row per standalone replica and trainer GPU, coloured by what it does.

Standalone replicas on top, trainer GPUs below; a GPU that is lent shows as rollout. Vertical lines separate cycles; a
cycle after which nothing was lent is named so. Long runs are thinned to the resolution of the picture, many rows to the
first ones of each kind (the picture says so). matplotlib is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridsched.report import style
from hybridsched.report.run_data import RunData
from hybridsched.report.timeline import ACTIVITIES, Interval, Timeline, clip, kind_of, shares, thin, timeline

ZOOM_CYCLES = 6
_MOST_ROWS = 32  # of a kind
_BINS = 700
_MOST_LABELS = 40


def whole_run(run: RunData) -> Any:
    """Everything from the first to the last entry."""
    return _picture(run, "Resources over time: the whole run", run.start, run.end)


def zoom(run: RunData, cycles: int = ZOOM_CYCLES) -> Any:
    """The last ``cycles`` cycles."""
    ends = [row.time for row in run.log.history() if "timing_s/step" in row.values]
    start = ends[-cycles - 1] if len(ends) > cycles else run.start
    end = ends[-1] if ends else run.end
    return _picture(run, f"Resources over time: the last {min(cycles, len(ends))} cycles", start, end)


def time_shares(run: RunData) -> Any:
    """Where the time of each kind of row went, as one bar each."""
    figure = style.new_figure(1.9)
    axes = figure.add_subplot()
    style.dress(axes, "Where the time went", "share of time", grid="x")
    found = shares(timeline(run.log.event_rows))
    names = {"standalone": "standalone replicas", "trainer": "trainer GPUs"}
    for row, parts in enumerate(found.values()):
        left = 0.0
        for what in ACTIVITIES:
            share = parts.get(what, 0.0)
            axes.barh(row, share, 0.6, left=left, color=style.ACTIVITY_COLOURS[what], linewidth=0)
            if share >= 0.04:
                ink = "#FFFFFF" if what in ("rollout", "sync", "switch") else "#1B1F24"
                axes.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", fontsize=9, color=ink)
            left += share
    if not found:
        style.empty(axes, "no activity has been recorded yet")
        return figure
    axes.set_yticks(range(len(found)), [names.get(kind, kind) for kind in found])
    axes.set_xlim(0, 1)
    axes.set_ylim(len(found) - 0.5, -0.5)
    style.legend(axes, handles=_handles())
    return figure


def _picture(run: RunData, title: str, start: float, end: float) -> Any:
    rows, left_out = _chosen(timeline(run.log.event_rows, run.end))
    visible = {row: clip(intervals, start, end) for row, intervals in rows.items()}
    height = 1.5 + min(0.42, 7.0 / max(1, len(visible))) * len(visible)
    figure = style.new_figure(max(2.4, height))
    axes = figure.add_subplot()
    style.dress(axes, title, "seconds since the start", grid="")
    if not any(visible.values()) or end <= start:
        style.empty(axes, "no activity has been recorded yet")
        return figure
    places = _places(list(visible))
    for row, intervals in visible.items():
        _draw(axes, places[row], thin(intervals, _BINS), run.start)
    _cycle_lines(axes, run, start, end)
    labelled = list(places) if len(places) <= _MOST_LABELS else list(places)[:: len(places) // _MOST_LABELS + 1]
    axes.set_yticks([places[row] for row in labelled], labelled)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(start - run.start, end - run.start)
    axes.set_ylim(max(places.values()) + 0.6, -0.6)
    if left_out:
        style.note(axes, 0.0, -0.16, f"{left_out} more rows are not shown", transform=axes.transAxes)
    style.legend(axes, handles=_handles(), bbox_to_anchor=(1.0, 1.0 + 0.22 / height))
    return figure


def _draw(axes: Any, place: float, intervals: Sequence[Interval], zero: float) -> None:
    for what in dict.fromkeys(interval.what for interval in intervals):
        spans = [(i.start - zero, i.seconds) for i in intervals if i.what == what]
        colour = style.ACTIVITY_COLOURS.get(what, style.PURPLE)
        axes.broken_barh(spans, (place - 0.39, 0.78), facecolors=colour, linewidth=0)


def _cycle_lines(axes: Any, run: RunData, start: float, end: float) -> None:
    """A line at the end of each cycle, numbered where there is room; a star says that nothing was lent in it."""
    not_lent = {e.detail.get("version") for e in run.log.events("decision", "activate") if e.new != "yes"}
    rows = [row for row in run.log.history() if "timing_s/step" in row.values and start < row.time <= end]
    every = max(1, len(rows) // 20)
    starred = False
    for index, row in enumerate(rows):
        x = row.time - run.start
        if len(rows) <= 60:
            axes.axvline(x, color=style.FAINT, alpha=0.55, linewidth=0.7, zorder=3)
        if index % every == 0:
            begin = max(start, row.time - row.values["timing_s/step"]) - run.start
            star = "*" if row.step - 1 in not_lent else ""
            starred = starred or bool(star)
            name = f"cycle {row.step}{star}" if len(rows) <= ZOOM_CYCLES else f"{row.step}{star}"
            style.note(axes, (begin + x) / 2, -0.5, name, ha="center")
    if rows and starred:
        axes.set_xlabel(f"{axes.get_xlabel()}   (* cycle in which nothing was lent)")


def _chosen(rows: Timeline) -> tuple[Timeline, int]:
    counts: dict[str, int] = {}
    chosen: Timeline = {}
    for row, intervals in rows.items():
        kind = kind_of(row)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= _MOST_ROWS:
            chosen[row] = intervals
    return chosen, len(rows) - len(chosen)


def _places(rows: Sequence[str]) -> dict[str, float]:
    """Heights of rows, with a gap between the two kinds."""
    places: dict[str, float] = {}
    at, before = 0.0, ""
    for row in rows:
        if before and kind_of(row) != before:
            at += 0.35
        places[row] = at
        at, before = at + 1.0, kind_of(row)
    return places


def _handles() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=style.ACTIVITY_COLOURS[what], label=style.ACTIVITY_NAMES[what]) for what in ACTIVITIES]
