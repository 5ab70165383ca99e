"""`hybridsched watch`: follow a submitted run until it ends. Ctrl-C ends the watching, never the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hybridsched.slurm.submission import SlurmRun


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Stop watching after so many seconds.")] = None,
) -> None:
    """Follow a submitted run; Ctrl-C leaves it running."""
    from hybridsched.slurm.submission import run_in

    raise typer.Exit(watch_run(run_in(run), timeout_s))


_LOOK_S = 5.0  # Slurm is asked that often: somebody is looking


def watch_run(run: SlurmRun, timeout_s: float | None = None) -> int:
    """Show progress until the run ends; returns its exit code. Raises Interrupted on Ctrl-C."""
    from hybridsched.cli.start import outcome_of
    from hybridsched.errors import Interrupted
    from hybridsched.report.live import LiveView
    from hybridsched.slurm.follow import Follower

    try:
        with LiveView(run.folder) as view:
            ending = run.wait(timeout_s, Follower(run, _say, view.update).look, look_s=_LOOK_S)
    except KeyboardInterrupt:
        raise Interrupted(
            f"watching only: job {run.job_id} goes on\nfollow it again: hybridsched watch {run.folder}\n"
            f"end it:          hybridsched cancel {run.folder}"
        ) from None
    if ending.exit_code:
        typer.echo(f"hybridsched: {ending.kind or 'failed'} (exit code {ending.exit_code}): {ending.text}", err=True)
    outcome_of(run.folder, ending.exit_code).print()
    return ending.exit_code


def _say(line: str) -> None:
    typer.echo(line)
