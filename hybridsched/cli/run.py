"""`hybridsched run`: start a run, go on with one, or only say what it would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="Keys to change, e.g. async_training.staleness_threshold=0.5."),
]


def run(
    run_yaml: Annotated[Path, typer.Argument(metavar="RUN_YAML", help="The configuration.")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print plan and derived values, start nothing.")] = False,
    check_paths: Annotated[
        bool, typer.Option("--check-paths", help="With --dry-run: also check model, data, reward function.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the run folder.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run that is in the run folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No live view.")] = False,
) -> None:
    """Start a run, or go on with one (--resume)."""
    from hybridsched.cli.start import print_dry_run, start
    from hybridsched.config import load_config
    from hybridsched.errors import UserError

    if resume and force:
        raise UserError("--resume goes on with the run, --force replaces it: give one of the two")
    if check_paths and not dry_run:
        raise UserError("--check-paths belongs to --dry-run: a real start always checks the files")
    config = load_config(run_yaml, [*(overrides or []), *(["trainer.resume_mode=auto"] if resume else [])])
    if dry_run:
        print_dry_run(config, with_files=check_paths)
        return
    if config.launcher == "slurm":
        raise UserError(
            f"launcher: slurm -> hybridsched submit {run_yaml} (or start it on this machine with launcher=local)"
        )
    outcome = start(config, resume=resume, force=force, quiet=quiet)
    outcome.print()
    raise typer.Exit(outcome.exit_code)
