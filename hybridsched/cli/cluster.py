"""`hybridsched cluster`: a real Slurm on this machine, for trying things out (slurm/dev_cluster)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

#: Where a cluster lies when nobody says so: on a local disk, one a user.
_DEFAULT = Path("/tmp") / f"hybridsched-cluster-{os.getuid()}"


def cluster(
    context: typer.Context,
    verb: Annotated[
        str,
        typer.Argument(
            metavar="VERB",
            help="up, status, shell, exec CMD, down; kill-node NODE, start-node NODE, stop-controller, ...",
        ),
    ],
    folder: Annotated[Path, typer.Option("--folder", help="Of the cluster.")] = _DEFAULT,
) -> None:
    """Boot a real Slurm on this machine (up --nodes trn[0-1],gpu[0-1]), use it, take it down."""
    import importlib.resources
    import subprocess
    import sys

    script = Path(str(importlib.resources.files("hybridsched"))) / "_data" / "dev_cluster" / "cluster.py"
    command = [sys.executable, "-B", str(script), verb, str(folder), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
