"""`hybridsched logs`: what launch loop, agents and workers of a run wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def logs(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    rank: Annotated[int | None, typer.Option("--rank", help="Of this node agent (rank 0: the controller's).")] = None,
    worker: Annotated[str | None, typer.Option("--worker", help="Of this worker, e.g. trainer.0.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines of each file.")] = 40,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Of this start; else the newest.")] = None,
) -> None:
    """Print the ends of a run's log files: launch loop and job script, or one rank's, or one worker's."""
    from hybridsched.errors import UserError

    if rank is not None and worker is not None:
        raise UserError("--rank and --worker name different files: give one of the two")
    files = _files(run, rank, worker, attempt)
    for path in files:
        if len(files) > 1:
            typer.echo(f"==> {path} <==")
        for line in _tail(path, lines):
            typer.echo(line)


def _files(run: Path, rank: int | None, worker: str | None, attempt: int | None) -> list[Path]:
    """Existing files that were asked for. Raises UserError naming what there is instead."""
    from hybridsched.errors import UserError
    from hybridsched.runtime.prepare import read_run
    from hybridsched.slurm.submission import last_attempt, read_jobs

    read_run(run)
    number = attempt if attempt is not None else last_attempt(run)
    folder = run / "attempts" / str(number) / "logs"
    if rank is not None:
        wanted = [folder / f"agent-{rank}.log"]
    elif worker is not None:
        wanted = sorted(folder.glob(f"{_literal(worker)}-*.log"))
    else:
        jobs = read_jobs(run)
        wanted = [*([run / "slurm" / f"{jobs[-1]['job_id']}_batch.log"] if jobs else []), folder / "launcher.log"]
    found = [path for path in wanted if path.is_file()]
    if not found:
        there = ", ".join(path.name for path in sorted(folder.glob("*.log"))) or "nothing yet"
        raise UserError(f"{folder}: no such log; there is: {there}")
    return found


def _literal(name: str) -> str:
    """Without the characters a pattern would take for something."""
    from glob import escape

    return escape(name)


def _tail(path: Path, lines: int) -> list[str]:
    from collections import deque

    from hybridsched.errors import UserError

    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return [line.rstrip("\n") for line in deque(stream, maxlen=lines)]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
