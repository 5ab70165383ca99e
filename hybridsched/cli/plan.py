"""`hybridsched plan`: which split and which policy, tried in the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridsched.cli.console import print_json, print_table
from hybridsched.cli.run import Overrides
from hybridsched.cli.simulate import EMULATED

if TYPE_CHECKING:
    from hybridsched.simulation.planning import Option


def plan(
    run_yaml: Annotated[Path, typer.Argument(metavar="RUN_YAML", help="The configuration; its GPUs are kept.")],
    overrides: Overrides = None,
    cycles: Annotated[int, typer.Option("--cycles", min=1, help="Sync cycles to play for each option.")] = 8,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Policies to try; repeat it. Default: the shipped ones.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the options for programs.")] = False,
) -> None:
    """Try splits of the same GPUs and policies in the simulator; print them ranked, with the reason."""
    from hybridsched.simulation.planning import POLICIES, options
    from hybridsched.simulation.scenario import load_scenario

    scenario = load_scenario(run_yaml, overrides or [], cycles=cycles)
    ranked = options(scenario.config, policy or POLICIES)
    if as_json:
        print_json({"emulated": True, "notes": list(scenario.notes), "options": [one.as_json() for one in ranked]})
        return
    _print(ranked)
    for note in scenario.notes:
        typer.echo(f"note: {note}")
    typer.echo(EMULATED)


def _print(ranked: list[Option]) -> None:
    from hybridsched.report.text import duration

    rows = []
    for rank, one in enumerate(ranked, start=1):
        run = one.run
        if run is None:
            rows.append((rank, one.split, one.policy, "-", "-", "-", "-", one.reason))
            continue
        ahead = f"{run.wall_clock_s / ranked[0].seconds:.3f}"
        per_cycle = duration(run.wall_clock_s / max(1, run.cycles))
        rows.append((rank, one.split, one.policy, per_cycle, ahead, f"{run.utilization:.0%}", one.to_bound, one.reason))
    columns = ("rank", "trainer+rollout", "policy", "a cycle", "to best", "GPUs used", "to bound", "why")
    print_table(columns, rows, title="splits and policies (emulated)")
    best = ranked[0]
    if best.run is not None:
        typer.echo(f"best: {best.split} GPUs with {best.policy}; as overrides: {' '.join(best.overrides)}")
