"""What a report starts from: the run log of a run, its configuration, and how it ended.

Reads the run folder: ``log/``, ``config/resolved.yaml``, ``run.json``, the newest ``attempts/*/result.json``; all but
the log may be missing. Changes nothing. h5py and yaml are imported on first use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridsched.runlog.reader import RunLog
    from hybridsched.runlog.rows import EventRow, MetricsRow

#: ``run`` events that end an attempt, and how people say it.
ENDINGS = {"finished": "finished", "stopped": "stopped", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class RunData:
    """One run, loaded. ``config``: nested mapping, {} when there is none; ``config_text``: the file as it is."""

    folder: Path
    log: RunLog
    run_id: str
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def start(self) -> float:
        """Wall clock of the first entry, seconds since the epoch; 0.0 for an empty log."""
        times = [rows[0].time for rows in (self.log.event_rows, self.log.metric_rows) if rows]
        return min(times, default=0.0)

    @property
    def end(self) -> float:
        """Wall clock of the last entry."""
        times = [rows[-1].time for rows in (self.log.event_rows, self.log.metric_rows) if rows]
        return max(times, default=0.0)

    def ending(self) -> tuple[str, str]:
        """(outcome, reason): finished, stopped or failed; "running or killed" when the log just stops."""
        last: EventRow | None = None
        for event in self.log.events("run", "run"):
            if event.new in ENDINGS or event.new == "started":
                last = event
        if last is None or last.new not in ENDINGS:
            when = datetime.fromtimestamp(self.end, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            return "running or killed", f"last entry of the log: {when}"
        return ENDINGS[last.new], last.reason

    def wall_clock_s(self) -> float:
        """Time in which the controller was there, over all starts; pauses between starts do not count."""
        spans: dict[tuple[str, int], tuple[float, float]] = {}
        rows: list[EventRow | MetricsRow] = [*self.log.event_rows, *self.log.metric_rows]
        for row in rows:
            low, high = spans.get((row.stream, row.attempt), (row.now, row.now))
            spans[row.stream, row.attempt] = (min(low, row.now), max(high, row.now))
        streams = {stream for stream, _attempt in spans}
        main = "controller" if "controller" in streams else min(streams, default="")
        return sum(high - low for (stream, _attempt), (low, high) in spans.items() if stream == main)

    def setting(self, dotted: str, default: Any = None) -> Any:
        """A key of the configuration, or the default."""
        value: Any = self.config
        for key in dotted.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value


def load_run(run_folder: Path) -> RunData:
    """Read a run. RunFolderError when it has no run log."""
    from hybridsched.runlog.reader import RunLog

    folder = Path(run_folder)
    log = RunLog.open(folder)
    config, text = _config(folder / "config" / "resolved.yaml")
    results = sorted((folder / "attempts").glob("*/result.json"), key=lambda path: (len(path.parent.name), path))
    run_id = str(_json(folder / "run.json").get("run_id", folder.resolve().name))
    return RunData(folder, log, run_id, config, text, _json(results[-1]) if results else {})


def _config(path: Path) -> tuple[dict[str, Any], str]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}, ""
    return (values if isinstance(values, dict) else {}), text


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
