"""`hybridsched submit`: hand a run to Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridsched.cli.run import Overrides

if TYPE_CHECKING:
    from hybridsched.slurm.submission import SlurmRun


def submit(
    run_yaml: Annotated[Path, typer.Argument(metavar="RUN_YAML", help="The configuration.")],
    overrides: Overrides = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the run folder.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run that is in the run folder.")] = False,
    prepare_only: Annotated[
        bool, typer.Option("--prepare-only", hidden=True, help="For rendered scripts: only lay out the run folder.")
    ] = False,
) -> None:
    """Submit a run to Slurm as a heterogeneous job."""
    from hybridsched.config import load_config
    from hybridsched.errors import UserError
    from hybridsched.slurm.submission import prepare_here, submit_run

    if resume and force:
        raise UserError("--resume goes on with the run, --force replaces it: give one of the two")
    keys = ["launcher=slurm", *(overrides or []), *(["trainer.resume_mode=auto"] if resume else [])]
    config = load_config(run_yaml, keys)
    if prepare_only:
        typer.echo(f"run folder: {prepare_here(config)}")
        return
    run = submit_run(config, resume=resume, force=force)
    _tell(run)
    if watch:
        from hybridsched.cli.watch import watch_run

        raise typer.Exit(watch_run(run))


def _tell(run: SlurmRun) -> None:
    folder = _short(run.folder)
    typer.echo(f"job     {run.job_id}")
    typer.echo(f"folder  {folder}")
    typer.echo(f"follow  hybridsched watch {folder}    (or: hybridsched status {folder}; hybridsched logs {folder})")
    typer.echo(f"cancel  hybridsched cancel {folder}")


def _short(folder: Path) -> Path:
    """Relative to the working folder where it lies below it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
