"""Starting a run and telling how it ended: shared by `run` and `demo`.

Owns: what `--dry-run` prints, and the order prepare -> launch loop with live view -> report -> summary.
Does not: check (config, runtime.prepare), start processes (slurm.launch_loop) or compute figures (report).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hybridsched.cli.console import print_pairs, print_table
from hybridsched.errors import ConfigError, HybridschedError

if TYPE_CHECKING:
    from hybridsched.config import Derived, RunConfig


def print_dry_run(config: RunConfig, *, with_files: bool) -> None:
    """Print derived values, plan and notes. Raises ConfigError or DataError when the run could not be started here."""
    from hybridsched.config import check_paths, derive, format_derived, notes
    from hybridsched.runtime.policy_loader import load_policy
    from hybridsched.runtime.prepare import check_everything

    problems = _not_here(config)
    derived = derive(config)
    if with_files and not problems:
        config, derived = check_everything(config)
    elif with_files:
        problems += check_paths(config)
    else:
        load_policy(config.async_training, only_hybrid=derived.only_hybrid)
    typer.echo(format_derived(config, derived))
    for note in notes(config):
        typer.echo(f"note: {note}")
    _refuse(problems)
    _print_plan(config, derived)
    checked = "files checked" if with_files else "files not looked at (--check-paths)"
    typer.echo(f"dry run: nothing started; configuration checked, {checked}")


def require_available(config: RunConfig) -> None:
    """Raise ConfigError when this release, or this machine, cannot run what is asked for. Looks at no file."""
    _refuse(_not_here(config))


def _not_here(config: RunConfig) -> list[str]:
    from hybridsched.config import check_cores, not_available
    from hybridsched.runtime.prepare import usable_cores

    return [*not_available(config), *check_cores(config, len(usable_cores(config)))]


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("this run cannot be started here:\n- " + "\n- ".join(problems))


def _print_plan(config: RunConfig, derived: Derived) -> None:
    from hybridsched.runtime.prepare import plan_of

    plan = plan_of(config, derived)
    rows = []
    for worker in plan.workers:
        side = "trainer" if worker.node < plan.trainer_nodes else "rollout"
        rows.append((worker.worker, f"{worker.node} ({side})", worker.gpus, worker.cores or "not bound"))
    print_table(("worker", "node", "GPUs of the node", "cores"), rows, title="plan")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``summary`` is that of `hybridsched report --json`, empty when there is no run log."""

    folder: Path
    exit_code: int
    summary: dict[str, Any]
    report: Path | None

    def print(self) -> None:
        """Summary, then where the report is."""
        from hybridsched.cli.summary import summary_pairs

        if self.summary:
            print_pairs(summary_pairs(self.summary))
        if self.report is not None:
            typer.echo(f"report: {self.report}")


def start(config: RunConfig, *, resume: bool, force: bool, quiet: bool) -> Outcome:
    """Check everything, run to the end, write the report. Raises HybridschedError for what cannot be started."""
    from hybridsched.report.live import LiveView
    from hybridsched.runtime.prepare import prepare
    from hybridsched.slurm.launch_loop import run_local

    prepared = prepare(config, resume=resume, force=force)
    if quiet:
        exit_code = run_local(prepared)
    else:
        with LiveView(prepared.folder) as view:
            exit_code = run_local(prepared, on_status=view.update)
    return outcome_of(prepared.folder, exit_code)


def outcome_of(folder: Path, exit_code: int) -> Outcome:
    """Summary and report of a run that ended; a log that cannot be reported does not hide how the run ended."""
    from hybridsched.report.html import write_html
    from hybridsched.report.summary import summarize

    try:
        summary = summarize(folder)
        report = write_html(folder, folder / "report.html")
    except HybridschedError as error:
        typer.echo(f"no report: {error}", err=True)
        return Outcome(folder, exit_code, {}, None)
    return Outcome(folder, exit_code, summary, report)
