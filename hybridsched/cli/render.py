"""`hybridsched render`: the sbatch script of a run, for reading or for sbatch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from hybridsched.cli.run import Overrides


def render(
    run_yaml: Annotated[Path, typer.Argument(metavar="RUN_YAML", help="The configuration.")],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
) -> None:
    """Print the sbatch script of a run; sbatch takes it as it is."""
    from hybridsched.config import load_config
    from hybridsched.errors import UserError
    from hybridsched.slurm.commands import call
    from hybridsched.slurm.request import request_of
    from hybridsched.slurm.sites import site_choice

    config = load_config(run_yaml, ["launcher=slurm", *(overrides or [])])
    # Without Slurm there is nobody to ask about node names; the script is that of a Slurm without the PMIx bug.
    request = request_of(config, ask=call if shutil.which("sbatch") else None)
    prepare = [request.site.host_python(), "-m", "hybridsched.cli.main", "submit", str(run_yaml.absolute())]
    keys = [*(overrides or []), f"slurm.site={site_choice(config.slurm.site)}"]
    text = request.script([*prepare, *keys, "--prepare-only"])
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {output}; submit it from anywhere: sbatch {output}")
