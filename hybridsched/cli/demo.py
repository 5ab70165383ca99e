"""`hybridsched demo`: the main job, small enough for two CPU cores and real in every part."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hybridsched.cli.run import Overrides
from hybridsched.errors import UserError

MIN_RISE = 0.15


def demo(
    overrides: Overrides = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where model, data and run go.")] = Path("runs/demo"),
    cycles: Annotated[int, typer.Option("--cycles", min=1, help="Sync cycles of 64 samples.")] = 20,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of model, data and run.")] = 0,
    static: Annotated[bool, typer.Option("--static", help="Never lend: the baseline.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep earlier runs of this folder beside the new one.")] = False,
    engine: Annotated[str, typer.Option("--engine", help="actor_rollout_ref.rollout.name.")] = "torch",
    trainer: Annotated[str, typer.Option("--trainer", help="actor_rollout_ref.actor.strategy.")] = "torch",
    min_rise: Annotated[
        float, typer.Option("--min-rise", help="Exit code 4 when the reward rises by less than this.")
    ] = MIN_RISE,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No live view.")] = False,
) -> None:
    """Train a 0.1M-parameter model with fully-async RL and lending, in a few minutes on two cores."""
    from hybridsched.cli.start import require_available, start
    from hybridsched.cli.templates import template_text
    from hybridsched.config import load_config
    from hybridsched.demo import inputs as demo_inputs

    begun = time.monotonic()
    paths, run_folder = demo_inputs.input_paths(folder, seed), demo_inputs.run_folder(folder, keep=keep)
    run_yaml = demo_inputs.write_run_yaml(folder, template_text("demo.yaml"), paths, run_folder)
    changes = demo_inputs.overrides(cycles=cycles, seed=seed, static=static, engine=engine, trainer=trainer)
    config = load_config(run_yaml, [*changes, *(overrides or [])])
    typer.echo(f"hybridsched run {run_yaml} {' '.join([*changes, *(overrides or [])])}")
    if config.launcher == "slurm":
        raise UserError("launcher: slurm -> make slurm-demo shows the demo as a Slurm job; this one runs right here")
    require_available(config)  # before a model is trained for nothing
    _make_inputs(folder, seed)
    ready = time.monotonic()
    outcome = start(config, resume=False, force=not keep, quiet=quiet)
    outcome.print()
    typer.echo(f"time: {ready - begun:.0f} s model and data, {time.monotonic() - ready:.0f} s run and report")
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
    demo_inputs.require_rise(outcome.summary, min_rise)


def _make_inputs(folder: Path, seed: int) -> None:
    """Model and data, with a progress bar when the model has to be made (a quarter of a minute)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from hybridsched.demo.inputs import make_inputs

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.2f}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("warm start of the model", visible=False, loss=0.0)
        make_inputs(
            folder,
            seed,
            progress=lambda done, total, loss: bar.update(task, completed=done, total=total, loss=loss, visible=True),
        )
