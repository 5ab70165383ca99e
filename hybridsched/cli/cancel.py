"""`hybridsched cancel`: end a submitted run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def cancel(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    now: Annotated[bool, typer.Option("--now", help="Do not wait for a checkpoint.")] = False,
) -> None:
    """End a submitted run for good: it writes a checkpoint first, unless --now; it can be resumed."""
    from hybridsched.slurm.submission import run_in

    found = run_in(run)
    state = found.state()
    if state is None or state.is_over:
        typer.echo(f"job {found.job_id} is over already ({'unknown to Slurm' if state is None else state.told()})")
        return
    if state.state == "RUNNING" and not now:
        found.stop()
        typer.echo(f"job {found.job_id} was asked to write a checkpoint and end")
        typer.echo(f"do not wait for that: hybridsched cancel {run} --now")
    else:
        found.cancel()
        typer.echo(f"job {found.job_id} cancelled (it was {state.told()})")
    typer.echo(f"go on with it later: hybridsched submit {run / 'config' / 'resolved.yaml'} --resume")
