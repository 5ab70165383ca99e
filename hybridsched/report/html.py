"""The HTML report: one self-contained file with key figures, pictures, decisions, faults and configuration.

Owns what is shown and in which order; the page is page.py, the pictures are plots.py and resource_plot.py, the figures
summary.py. Invariants: the file needs nothing else, neither network nor script; all text from the run is escaped; the
file is replaced whole or not at all; a live or killed run can be reported as well as a finished one.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybridsched import __version__
from hybridsched.errors import RunFolderError
from hybridsched.report.run_data import RunData, load_run
from hybridsched.report.summary import flat, summary_of
from hybridsched.report.text import duration, show

MOST_DECISIONS = 300
MOST_FAULTS = 300
_FAULTS = ("exited", "quarantined", "reissued", "cut short")


def write_html(run_folder: Path, out: Path) -> Path:
    """Write the report of a run; returns ``out``. RunFolderError: no run log, or ``out`` cannot be written."""
    page = render(load_run(run_folder))
    out = Path(out)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, out)
    except OSError as error:
        raise RunFolderError(f"{out}: the report cannot be written: {error.strerror}; choose another place") from error
    return out


def render(run: RunData) -> str:
    """The page as text."""
    from jinja2 import Environment
    from markupsafe import Markup

    from hybridsched.report.page import CSS, TEMPLATE

    summary = summary_of(run)
    outcome = str(summary["outcome"])
    decisions, decisions_left_out = _decisions(run)
    faults, faults_left_out = _faults(run)
    name = run.setting("trainer.experiment_name") or run.run_id
    environment = Environment(autoescape=True, trim_blocks=False, keep_trailing_newline=True)
    return environment.from_string(TEMPLATE).render(
        title=f"hybridsched: {name}",
        css=Markup(CSS),
        outcome=outcome,
        outcome_class=outcome.split()[0],
        reason=summary["reason"],
        began=datetime.fromtimestamp(run.start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        wall_clock=duration(summary["wall_clock_s"]),
        attempts=summary["attempts"],
        run_id=run.run_id,
        emulated=any("emulated" in row.values for row in run.log.metric_rows),
        cards=_cards(summary),
        sections=[(heading, [Markup(svg) for svg in svgs]) for heading, svgs in _sections(run)],
        decisions=decisions,
        decisions_left_out=decisions_left_out,
        faults=faults,
        faults_left_out=faults_left_out,
        figures_table=[(key, show(value)) for key, value in flat(summary).items()],
        config=run.config_text,
        hybridsched=__version__,
    )


def _cards(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the key figures."""
    use, samples = summary["utilizations"], summary["samples"]
    dropped = ", ".join(f"{count} {name}" for name, count in samples.items() if name != "trained" and count)
    validation = "-"
    if summary["val_reward_last"] is not None:
        validation = f"{show(summary['val_reward_first'])} → {show(summary['val_reward_last'])}"
    return [
        ("cycles", show(summary["cycles"]), f"{duration(summary['timings_s'].get('step'))} each on average"),
        ("reward", f"{show(summary['reward_first'])} → {show(summary['reward_last'])}", "first and last tenth"),
        ("validation reward", validation, "first and last"),
        ("wall clock", duration(summary["wall_clock_s"]), f"{show(summary['tokens_per_s'])} trained tokens/s"),
        ("GPU use", _percent(use["exact"]), f"training {_percent(use['train'])}, rollout {_percent(use['rollout'])}"),
        ("lent", f"{summary['activations']} times", f"taken back {summary['deactivations']} times"),
        ("syncs skipped", show(summary["skipped_syncs"]), "hybrids stayed with training"),
        ("cost of a switch", duration(summary["switch_cost_s"]), "there and back"),
        ("samples trained", show(samples["trained"]), dropped or "none dropped"),
        ("deaths", show(summary["deaths"]), f"{summary['lineages']} lineage(s) of weights"),
    ]


def _sections(run: RunData) -> list[tuple[str, list[str]]]:
    from hybridsched.report import plots, resource_plot, style

    over_time = [
        style.to_svg(resource_plot.zoom(run), "resources over time, last cycles"),
        style.to_svg(resource_plot.whole_run(run), "resources over time, whole run"),
        style.to_svg(resource_plot.time_shares(run), "share of time by activity"),
    ]
    over_cycles = [style.to_svg(draw(run), f"{name} over cycles") for name, draw in plots.PICTURES]
    return [("Who did what when", over_time), ("Cycle by cycle", over_cycles)]


def _decisions(run: RunData) -> tuple[list[dict[str, str]], int]:
    events = run.log.events("decision")
    rows = []
    for event in events[-MOST_DECISIONS:]:
        detail = event.detail
        numbers = {key: show(detail.get(key)) for key in ("version", "queue", "in_flight", "window_room", "ratio")}
        when = f"{event.time - run.start:.1f}"
        answer = event.new if event.new in ("yes", "no") else ""
        rows.append({"time": when, "question": event.entity, "answer": answer, "reason": event.reason, **numbers})
    return rows, max(0, len(events) - MOST_DECISIONS)


def _faults(run: RunData) -> tuple[list[dict[str, str]], int]:
    """Fault events, and what else went wrong (deaths, quarantine, re-issues, cycles cut short)."""
    events = [e for e in run.log.event_rows if e.kind == "fault" or e.new in _FAULTS]
    rows = [
        {"time": f"{e.time - run.start:.1f}", "entity": e.entity, "new": e.new, "reason": e.reason}
        for e in events[-MOST_FAULTS:]
    ]
    return rows, max(0, len(events) - MOST_FAULTS)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
