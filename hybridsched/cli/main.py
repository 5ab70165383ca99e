"""`hybridsched`: the command line. Collects the commands and turns every error into one message and an exit code.

Invariants: nobody sees a traceback for a mistake of their own; an unexpected exception leaves its traceback in a file
and says where; importing this module costs typer and nothing heavier (no torch, numpy, h5py, pydantic, matplotlib),
so that `hybridsched --help` answers at once on a login node. Commands import what they need when they are called.
Does not: decide, compute or format results (the rooms below do).
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hybridsched import __version__
from hybridsched.cli import (
    calibrate,
    cancel,
    cluster,
    compare,
    config,
    demo,
    explain,
    init,
    logs,
    plan,
    policies,
    queue,
    render,
    report,
    run,
    simulate,
    status,
    submit,
    watch,
)
from hybridsched.errors import FaultError, HybridschedError, InternalError, Interrupted

TRACEBACK_VARIABLE = "HYBRIDSCHED_TRACEBACK"

_EPILOG = """\
[bold]Exit codes[/bold]

0 done, 1 unexpected error (a bug), 2 wrong input, 3 another controller owns the run folder, 4 something failed while \
running (resume is possible), 70 broken rule (a bug), 75 wants to be started again, 130 stopped with Ctrl-C.

HYBRIDSCHED_TRACEBACK=1 shows the traceback of any error.
"""

app = typer.Typer(
    name="hybridsched",
    help="Fully-async RL post-training that lends the trainer's GPUs to generation while they would only wait.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_START, _SLURM, _AHEAD, _LOOK = "Start", "Slurm", "Look ahead", "Look at a run"
app.command("demo", rich_help_panel=_START)(demo.demo)
app.command("init", rich_help_panel=_START)(init.init)
app.command("run", rich_help_panel=_START)(run.run)
app.command("config", rich_help_panel=_START)(config.config)
app.command("policies", rich_help_panel=_START)(policies.policies)
app.command("render", rich_help_panel=_SLURM)(render.render)
app.command("submit", rich_help_panel=_SLURM)(submit.submit)
app.command("watch", rich_help_panel=_SLURM)(watch.watch)
app.command("cancel", rich_help_panel=_SLURM)(cancel.cancel)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("cluster", rich_help_panel=_SLURM, context_settings=_PASSED_ON)(cluster.cluster)
app.command("simulate", rich_help_panel=_AHEAD)(simulate.simulate)
app.command("plan", rich_help_panel=_AHEAD)(plan.plan)
app.command("calibrate", rich_help_panel=_AHEAD)(calibrate.calibrate)
app.command("status", rich_help_panel=_LOOK)(status.status)
app.command("logs", rich_help_panel=_LOOK)(logs.logs)
app.command("report", rich_help_panel=_LOOK)(report.report)
app.command("explain", rich_help_panel=_LOOK)(explain.explain)
app.command("compare", rich_help_panel=_LOOK)(compare.compare)
app.add_typer(queue.app, name="queue", rich_help_panel=_LOOK)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hybridsched {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    del version  # the callback has printed it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (see `hybridsched.errors`). ``arguments``: None takes sys.argv."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="hybridsched")
    except SystemExit as error:  # how typer ends, also after its own usage errors (2)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except HybridschedError as error:
        return _tell(error)
    except KeyboardInterrupt:
        return _tell(Interrupted("stopped"))
    except BrokenPipeError:
        # `hybridsched config | head`: the reader has gone, which is no error. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - the one place where every bug ends up
        return _tell_bug(error)
    return 0


def _tell(error: HybridschedError) -> int:
    """One message on stderr, the traceback only when asked for."""
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        traceback.print_exception(error)
    prefix = "error"
    if isinstance(error, Interrupted):
        prefix = "stopped"
    elif isinstance(error, InternalError):
        prefix = "internal error (a bug in hybridsched)"
    elif isinstance(error, FaultError):
        prefix = "failed"
    _say(f"{prefix}: {error}")
    return error.exit_code


def _tell_bug(error: Exception) -> int:
    """Keep the traceback in a file: it belongs in a bug report, not on a user's screen."""
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        traceback.print_exception(error)
    text = "".join(traceback.format_exception(error))
    head = f"hybridsched {__version__}, Python {sys.version.split()[0]}\ncommand: {' '.join(sys.argv)}\n\n"
    summary = f"unexpected error: {type(error).__name__}: {error}"
    try:
        handle, name = tempfile.mkstemp(prefix="hybridsched-traceback-", suffix=".txt")
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(head + text)
    except OSError as problem:
        _say(f"{summary}\n(the traceback could not be saved: {problem})\n{text}")
        return 1
    _say(f"{summary}\nThis is a bug in hybridsched. The traceback is in {Path(name)}: please send it along.")
    return 1


def _say(message: str) -> None:
    # Plain, not through rich: messages hold paths and keys in brackets, and must not be wrapped.
    sys.stdout.flush()
    print(f"hybridsched: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
