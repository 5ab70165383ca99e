"""`hybridsched status`: is a run going, where is it, and how did its last start end?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridsched.cli.console import print_json, print_pairs


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell where a run is: its controller, last cycle, how its last start ended."""
    from hybridsched.runtime.prepare import read_run

    found = {"run": str(read_run(run)["run_id"]), "controller": _controller(run), **_attempt(run), **_progress(run)}
    if json:
        print_json(found)
    else:
        print_pairs(found)


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
    alive = here.boot_id == there.boot_id and process_is_alive(there)
    return f"running ({there})" if alive else f"dead ({there}); go on with --resume"


def _attempt(run: Path) -> dict[str, Any]:
    """The newest start and the result it left; a start without one is going on, or was killed."""
    numbers = [int(path.name) for path in run.glob("attempts/*") if path.name.isdigit()]
    if not numbers:
        return {"attempt": None}
    found: dict[str, Any] = {"attempt": max(numbers)}
    try:
        result = json.loads((run / "attempts" / str(max(numbers)) / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return found | {"result": "none yet"}
    except (OSError, ValueError) as error:
        return found | {"result": f"result.json cannot be read: {error}"}
    found["exit code"] = result.get("exit_code")
    if "error" in result:
        found["error"] = f"{result['error'].get('kind')}: {result['error'].get('text')}"
    return found | {"summary": result.get("summary")}


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
        found["last event"] = f"{last.kind} {last.entity}: {last.old} -> {last.new} ({last.reason})"
    return found
