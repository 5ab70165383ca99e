"""The end of a run's batch script:

    exec python -m hybridsched.slurm.batch_main --run RUN_FOLDER

Owns: the launch loop inside a Slurm job, what Slurm's signals mean there, and putting the job back into the queue. The
run folder was prepared when the run was submitted; a start of the job that finds earlier attempts there resumes.

Invariants: USR2 (--signal=B:USR2@...) and TERM are an orderly stop after which the job starts anew; INT is one that is
final (scancel --batch --signal=INT JOB). Exit code 75 says that the job is to be started again, 130 that somebody
stopped it, 0 that the run is done (result.json says so), everything else why not. The job puts itself back only where
the site allows it, only when nobody cancelled it, and for lost nodes only so often (faults.requeues).

Does not: submit, or render scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridsched.errors import FaultError, HybridschedError, Interrupted, RequeueRequested
from hybridsched.runtime.adapters import slurm
from hybridsched.runtime.adapters.attempt import Ending
from hybridsched.runtime.prepare import PreparedRun, prepared_run
from hybridsched.slurm.allocation import Allocation, read_allocation
from hybridsched.slurm.launch_loop import LaunchLoop, Outcome, to_stderr
from hybridsched.slurm.node_table import NodeTable
from hybridsched.slurm.sites import SiteProfile, site_of_run
from hybridsched.slurm.srun import SrunLauncher
from hybridsched.slurm.step_watch import BATCH_SIGNALS, Interruptions

_ASKED = "asked to stop by Slurm or by signal: the run writes a checkpoint and ends"
_KILLED_S = 60.0  # after a requeue Slurm kills this script


def run_batch(folder: Path, allocation: Allocation) -> int:
    """Run to the end of this start of the job. Returns the exit code of the batch script."""
    run = prepared_run(folder, resume=has_attempts(folder))
    site = site_of_run(folder)
    table = NodeTable(allocation)
    require_planned(run, allocation)
    launcher = SrunLauncher(run, site, table, to_stderr)
    with Interruptions(BATCH_SIGNALS, kills=False, message=_ASKED) as interruptions:
        outcome = LaunchLoop(run, launcher, interruptions, StatusLines(print), to_stderr).run()
        if outcome.code != RequeueRequested.exit_code:
            return outcome.code
        if interruptions.by_user:
            to_stderr("stopped as asked; it is not put back into the queue")
            return Interrupted.exit_code
        return _start_anew(outcome, allocation, site, run, asked=interruptions.count > 0)


def has_attempts(folder: Path) -> bool:
    """Whether the run was started before: this start goes on from its newest checkpoint."""
    try:
        return any(entry.name.isdigit() for entry in os.scandir(folder / "attempts"))
    except FileNotFoundError:
        return False


def require_planned(run: PreparedRun, allocation: Allocation) -> None:
    """Raise FaultError when the job was given other nodes than the plan has."""
    for role, planned in (("trainer", run.plan.trainer_nodes), ("rollout", run.plan.rollout_nodes)):
        given = allocation.of_role(role)
        if len(given) != planned:
            raise FaultError(
                f"{run.folder}: the plan has {planned} {role} nodes, job {allocation.job_id} has {len(given)} "
                f"({', '.join(given) or 'none'}); submit the run again"
            )


def _start_anew(outcome: Outcome, allocation: Allocation, site: SiteProfile, run: PreparedRun, *, asked: bool) -> int:
    """Requeue the job, where that is right, and wait for Slurm to end this script."""
    refusal = ""
    if not site.requeue:
        refusal = "the site profile says requeue: false"
    elif not asked and allocation.restart_count >= run.config.faults.requeues:
        refusal = f"the job was started anew {allocation.restart_count} times already (faults.requeues)"
    else:
        refusal = slurm.requeue(allocation.job_id, allocation.restart_count)
    if refusal:
        to_stderr(f"not put back into the queue: {refusal}. {_reason(outcome.ending)}")
        return outcome.code
    to_stderr(f"job {allocation.job_id} goes back into the queue and resumes. {_reason(outcome.ending)}")
    _hasten(allocation)
    end = time.monotonic() + _KILLED_S
    while time.monotonic() < end:  # Slurm's TERM is only counted; its KILL comes KillWait later
        time.sleep(0.2)
    return outcome.code


def _reason(ending: Ending) -> str:
    return f"Reason: {ending.text}"


def _hasten(allocation: Allocation) -> None:
    """Slurm holds a requeued job back for two minutes; where users may, take that away. Failing is no harm."""
    for group in allocation.groups:
        slurm.call("scontrol", "update", f"JobId={group.job_id}", "StartTime=now")


class StatusLines:
    """Rank 0's status as lines of the job's output: one when the phase changes, one a cycle."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last = ""

    def __call__(self, status: dict[str, Any]) -> None:
        """Print it when it says something new."""
        text = f"version {status.get('version')} {status.get('phase')}"
        if text == self._last:
            return
        self._last = text
        numbers = {key: status.get(key) for key in ("trained", "queue", "in_flight", "tenant")}
        self._write(f"{time.strftime('%H:%M:%S')} {text} {json.dumps(numbers)}")
        sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="hybridsched.slurm.batch_main", description="Ends a run's batch script.")
    parser.add_argument("--run", type=Path, required=True, help="folder of a prepared run")
    arguments = parser.parse_args(argv)
    try:
        return run_batch(arguments.run.resolve(), read_allocation(os.environ))
    except HybridschedError as error:
        to_stderr(f"{type(error).__name__}: {error}")
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
