"""Following a submitted run from a login node: what Slurm says, and what the run's log on the shared disk says.

Owns: how both become lines and statuses for the live view (the same mappings the controller sends, as far as the log
holds them). Invariant: nothing is asked of the run itself, so following can begin, end and be repeated at any time.
Does not: print, or judge how a run ended (`submission` does).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridsched.errors import FaultError, RunFolderError
from hybridsched.runlog.reader import RunLog
from hybridsched.slurm.state import JobState
from hybridsched.slurm.submission import SlurmRun, last_attempt

Status = dict[str, Any]


class Follower:
    """Hands on what is new at each look. say: one line for people. on_status: progress for the live view."""

    def __init__(self, run: SlurmRun, say: Callable[[str], None], on_status: Callable[[Status], None]) -> None:
        self._run = run
        self._say = say
        self._on_status = on_status
        self._told = ""
        self._attempt = run.after_attempt
        self._cycle: tuple[float, int] = (0.0, -1)  # time and step of the last row handed on

    def look(self, found: JobState | None) -> None:
        """One look; for `SlurmRun.wait`."""
        told = "not known to Slurm" if found is None else found.told()
        if found is not None and found.nodes and not found.is_over:
            told += f" on {found.nodes}"
        if told != self._told:
            self._told = told
            self._say(f"job {self._run.job_id}: {told}")
        self._new_attempt()
        self._new_cycles()

    def _new_attempt(self) -> None:
        newest = last_attempt(self._run.folder)
        if newest > self._attempt:
            self._attempt = newest
            self._say(f"start {newest}; logs: {self._run.folder / 'attempts' / str(newest) / 'logs'}")

    def _new_cycles(self) -> None:
        for status in statuses(self._run.folder, self._cycle):
            self._cycle = (status.pop("time"), status["version"])
            self._on_status(status)


def statuses(folder: Path, after: tuple[float, int] = (0.0, -1)) -> list[Status]:
    """A status for every finished cycle in the run log that came after (time, step); [] when there is no log yet.

    Besides the live view's keys each has ``time``, seconds since the epoch.
    """
    try:
        log = RunLog.open(folder)
    except (RunFolderError, FaultError):
        return []  # not there yet, or just being written: the next look will see it
    firsts = [row.time for row in log.event_rows[:1]] + [row.time for row in log.metric_rows[:1]]
    began = min(firsts, default=0.0)
    found, trained = [], 0.0
    for row in log.metric_rows:
        if "timing_s/step" not in row.values:
            continue
        trained += row.values.get("samples/trained", 0.0)
        if (row.time, row.step) <= after:
            continue
        decisions = [event for event in log.event_rows if event.kind == "decision" and event.time <= row.time]
        last = decisions[-1] if decisions else None
        found.append(
            {
                "time": row.time,
                "phase": "cycle done",
                "version": row.step,
                "queue": int(row.values.get("dynamic_resource/mq_size", 0)),
                "trained": int(trained),
                "decision": f"{last.entity}: {last.new} ({last.reason})" if last is not None else "",
                "elapsed_s": row.time - began,
                "metrics": row.values,
            }
        )
    return found
