"""`hybridsched calibrate`: from a recorded run to a scenario for `simulate` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybridsched.cli.console import print_json, print_table

if TYPE_CHECKING:
    from hybridsched.simulation.calibration import Calibration, Part


def calibrate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a recorded run (or of `simulate --log`).")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="YAML", help="Write the fitted scenario here.")
    ] = None,
    first: Annotated[float, typer.Option("--first", help="Share of the cycles that is fitted; the rest judges.")] = 0.5,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Simulated runs behind each prediction.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures for programs.")] = False,
) -> None:
    """Fit the timing model to the first cycles of a run, predict the others, and say how well."""
    from hybridsched.simulation import calibration as c

    found = c.calibrate(run, fit_share=first, draws=draws)
    if out is not None:
        c.save_scenario(found, run, out)
    if as_json:
        print_json(c.as_json(found))
        return
    _print(found)
    if out is not None:
        typer.echo(f"scenario: {out} (hybridsched simulate {out}; hybridsched plan {out})")


def _ratio(part: Part) -> str:
    return f"{part.predicted / part.recorded - 1:+.1%}" if part.recorded > 0 else "-"


def _print(found: Calibration) -> None:
    from hybridsched.report.text import duration

    fitted = [(f"emulated.{f.key}", f"{f.value:.6g}", f.source) for f in found.found]
    print_table(("key", "value", "fitted to"), fitted, title="timing model")
    cycles = [
        (
            one.cycle,
            duration(one.recorded_s),
            duration(one.predicted_s),
            f"{one.predicted_s / one.recorded_s - 1:+.1%}",
            "fitted" if one.fitted else "predicted",
        )
        for one in found.cycles
    ]
    columns = ("cycle", "recorded", "model", "off", "")
    print_table(columns, cycles, title="time of a cycle, without checkpoints and validation")
    parts = [(p.name, f"{p.recorded:.4g}", f"{p.predicted:.4g}", _ratio(p)) for p in found.parts]
    print_table(("part", "recorded", "model", "off"), parts, title="the cycles that were not fitted, mean")
    rest = sum(not one.fitted for one in found.cycles)
    low, high = found.rest_range
    typer.echo(
        f"{rest} cycles that were not fitted: {found.share_off(fitted=False):+.1%} in all ({low:+.1%} to {high:+.1%} "
        f"over {len(found.rest_s)} draws of lengths), {found.mean_cycle_error(fitted=False):.1%} a cycle on average; "
        f"the recorded cycles themselves lie {found.recorded_spread():.1%} around their mean"
    )
    typer.echo(f"fitted cycles: {found.share_off(fitted=True):+.1%} in all")
    for note in found.notes:
        typer.echo(f"note: {note}")
