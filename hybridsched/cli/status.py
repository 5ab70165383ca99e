"""`hybridsched status`: is a run going, where is it, and how did its last start end?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hybridsched.cli.console import print_json, print_pairs, print_table


def status(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="Folder of the run; none: all in runs/.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell where a run is: its controller, last cycle, how its last start ended."""
    from hybridsched.runtime.prepare import read_run

    if run is None:
        _all_runs(Path("runs"), json)
        return
    about = {"run": str(read_run(run)["run_id"]), **_job([run]).get(run, {})}
    found = about | {"controller": _controller(run), **_attempt(run), **_progress(run)}
    if json:
        print_json(found)
    else:
        print_pairs(found)


def _all_runs(folder: Path, json: bool) -> None:
    """One row a run; Slurm is asked once for all of them."""
    runs = sorted(path.parent for path in folder.glob("*/run.json"))
    if not runs and not json:
        typer.echo(f"no runs in {folder}/; name a run's folder, or start one: hybridsched run, hybridsched submit")
        return
    jobs = _job(runs)
    rows = [{"run": run.name, "job": "", **jobs.get(run, {}), **_attempt(run), **_progress(run)} for run in runs]
    if json:
        print_json(rows)
        return
    columns = ("run", "job", "attempt", "result", "last cycle")
    print_table(columns, [[row.get(column, "") for column in columns] for row in rows])


def _job(runs: list[Path]) -> dict[Path, dict[str, str]]:
    """What Slurm says of the newest job of each run; a run that was never submitted is left out."""
    from hybridsched.errors import FaultError, UserError
    from hybridsched.slurm.state import states_of
    from hybridsched.slurm.submission import read_jobs

    jobs = {run: str(entries[-1]["job_id"]) for run in runs if (entries := read_jobs(run))}
    try:
        states = states_of(jobs.values()) if jobs else {}
    except (FaultError, UserError) as error:
        return {run: {"job": f"{job}: {error}"} for run, job in jobs.items()}
    told = {job: state.told() for job, state in states.items()}
    return {run: {"job": f"{job}: {told.get(job, 'not known to Slurm any more')}"} for run, job in jobs.items()}


def _controller(run: Path) -> str:
    from hybridsched.sample_queue.owner import current_owner, identity_of_this_process, process_is_alive

    owner = current_owner(run)
    if owner is None:
        return "not started"
    if owner.released:
        return f"ended ({owner.identity})"
    here, there = identity_of_this_process(), owner.identity
    if here.host != there.host:
        return f"{there}; whether it is alive can only be told there"
    if there.job_id:
        return f"{there}; see job"
    alive = here.boot_id == there.boot_id and process_is_alive(there)
    return f"running ({there})" if alive else f"dead ({there}); go on with --resume"


def _attempt(run: Path) -> dict[str, Any]:
    """The newest start and the result it left; a start without one is going on, or was killed."""
    from hybridsched.runtime.adapters.attempt import read_result

    latest = run / "attempts" / "latest"
    if not latest.exists():
        return {"attempt": None}
    found: dict[str, Any] = {"attempt": latest.resolve().name, "logs": str(latest.resolve() / "logs")}
    result = read_result(latest)
    if result is None:
        return found | {"result": "none yet"}
    what = f" {result.kind}: {result.text}" if result.kind else ""
    return found | {"result": f"exit code {result.exit_code}{what}"}


def _progress(run: Path) -> dict[str, Any]:
    """The last event and the last cycle of the run log."""
    from hybridsched.errors import RunFolderError
    from hybridsched.runlog.reader import RunLog

    try:
        log = RunLog.open(run)
    except RunFolderError:
        return {"log": "none yet"}
    found: dict[str, Any] = {}
    if log.metric_rows:
        found["last cycle"] = log.metric_rows[-1].step
    if log.event_rows:
        last = log.event_rows[-1]
        change = f"{last.old} -> {last.new}" if last.old else last.new
        found["last event"] = f"{last.kind} {last.entity}: {change} ({last.reason})"
    return found
