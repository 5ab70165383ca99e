"""`hybridsched simulate`: a run.yaml in virtual time, with emulated engines and trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridsched.cli.console import print_json, print_pairs, print_table
from hybridsched.cli.run import Overrides

if TYPE_CHECKING:
    from hybridsched.simulation.world import SimulatedRun

EMULATED = (
    "emulated: no model and no GPU took part; the real controller and policies ran under a virtual clock, engine and "
    "trainer only took the time that emulated: says"
)


def simulate(
    run_yaml: Annotated[Path, typer.Argument(metavar="RUN_YAML", help="The configuration; its sizes are kept.")],
    overrides: Overrides = None,
    cycles: Annotated[int | None, typer.Option("--cycles", min=1, help="Sync cycles to play.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for programs.")] = False,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FOLDER", help="Keep the run log here, for report and explain.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FOLDER", help="Draw curves and resources over time there (PNG).")
    ] = None,
) -> None:
    """Play a run in virtual time: how long it would take, under the timing model of `emulated:`."""
    import tempfile

    from hybridsched.report.summary import summarize
    from hybridsched.simulation.export import write_run_log
    from hybridsched.simulation.scenario import load_scenario
    from hybridsched.simulation.world import SimulatedRun

    scenario = load_scenario(run_yaml, overrides or [], cycles=cycles)
    run = SimulatedRun(scenario.config)
    run.run()
    with tempfile.TemporaryDirectory(prefix="hybridsched-simulate-") as scratch:
        folder = log if log is not None else Path(scratch)
        write_run_log(run, folder)
        summary = summarize(folder)
        pictures = _draw(folder, plot) if plot is not None else []
    rows = _cycles(run)
    if as_json:
        print_json({"emulated": True, "notes": list(scenario.notes), **summary, "cycle": rows})
        return
    _print(summary, rows)
    for note in scenario.notes:
        typer.echo(f"note: {note}")
    typer.echo(EMULATED)
    if pictures:
        typer.echo(f"pictures: {', '.join(map(str, pictures))}")
    if log is not None:
        typer.echo(f"run log: {log} (hybridsched report {log})")


def _draw(folder: Path, out: Path) -> list[Path]:
    from hybridsched.report.pictures import write_pictures

    return write_pictures(folder, out)


def _cycles(run: SimulatedRun) -> list[dict[str, float]]:
    names = {
        "seconds": "timing_s/step",
        "waiting": "timing_s/gen",
        "lending": "timing_s/wait_for_enough_samples",
        "training": "timing_s/update_actor",
        "sync": "timing_s/param_sync",
        "queue": "dynamic_resource/mq_size",
        "lent": "dynamic_resource/lent_replicas",
        "utilization": "dynamic_resource/resource_utilization_exact",
    }
    rows = [row for row in run.log.rows if "timing_s/step" in row.values]
    return [{"cycle": row.step} | {name: row.values.get(metric, 0.0) for name, metric in names.items()} for row in rows]


def _print(summary: dict[str, Any], rows: list[dict[str, float]]) -> None:
    from hybridsched.cli.summary import summary_pairs
    from hybridsched.report.text import duration, show

    spoken = ("seconds", "waiting", "lending", "training", "sync")
    table = [
        [
            int(row["cycle"]),
            *(duration(row[name]) for name in spoken),
            show(int(row["queue"])),
            show(int(row["lent"])),
            f"{row['utilization']:.0%}",
        ]
        for row in rows
    ]
    columns = ("cycle", "time", "waiting", "lending", "training", "sync", "queue", "then lent", "GPUs used")
    print_table(columns, table, title="sync cycles (emulated)")
    print_pairs(summary_pairs(summary))
