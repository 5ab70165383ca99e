"""`hybridsched init`: a commented run.yaml to start from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from hybridsched.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def init(
    name: Annotated[str, typer.Argument(help="Name of the run; the file is NAME.yaml in this folder.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented run.yaml with every key."""
    from hybridsched.config import render_template

    stem = name.removesuffix(".yaml").removesuffix(".yml")
    if not _NAME.fullmatch(stem):
        raise UserError(f"{name!r} cannot name a run: use letters, digits, dots, dashes and underscores")
    path = Path(f"{stem}.yaml")
    text = render_template(
        {
            "trainer.experiment_name": stem,
            "data.train_files": ["data/train.parquet"],
            "data.val_files": ["data/val.parquet"],
            "actor_rollout_ref.model.path": "models/MODEL",
            "reward.function": "exact_match",
        },
        title=f"{stem}: hybridsched run {path}",
    )
    try:
        with open(path, "w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise UserError(f"{path} exists already: choose another name, or replace it with --force") from error
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; change to a folder of your own") from error
    typer.echo(f"wrote {path}: set data and model, then: hybridsched run {path} --dry-run --check-paths")
