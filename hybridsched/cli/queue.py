"""`hybridsched queue ls | head | stat | fsck`: look into the samples of a run. Reads only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridsched.cli.console import print_json, print_pairs, print_table
from hybridsched.errors import QueueError, RunFolderError, UserError

if TYPE_CHECKING:
    from hybridsched.model import SegmentId

app = typer.Typer(help="Look into the sample queue of a run (reads only).", no_args_is_help=True)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, e.g. runs/demo/run.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command("ls")
def ls(run: Run, json: Json = False) -> None:
    """List the sealed segments: where they are and what they hold."""
    from hybridsched.sample_queue.inspection import list_segments

    rows = list_segments(run)
    if json:
        print_json(rows)
        return
    columns = ["producer", "incarnation", "seq", "samples", "responses", "tokens", "bytes"]
    columns += ["oldest_version", "newest_version", "sealed"]
    if any("error" in row for row in rows):
        columns.append("error")
    print_table(columns, [[row.get(column) for column in columns] for row in rows])


@app.command("head")
def head(
    run: Run,
    n: Annotated[int, typer.Option("-n", min=1, help="Samples.")] = 3,
    segment: Annotated[
        str | None,
        typer.Option(
            help="Only of this segment: PRODUCER/INCARNATION-SEQ, as `queue fsck` writes it.", show_default="all"
        ),
    ] = None,
) -> None:
    """Print the first samples as JSON: text, tokens, log-probs, versions, rewards."""
    from hybridsched.sample_queue.inspection import head

    try:
        samples = head(run, n, None if segment is None else _segment_id(segment))
    except FileNotFoundError as error:
        raise UserError(f"{run} has no segment {segment}: see `hybridsched queue ls {run}`") from error
    _add_text(run, samples)
    print_json(samples, flat=True)


def _add_text(run: Path, samples: list[dict[str, Any]]) -> None:
    """Prompts and responses as text, when the run's tokenizer is still where it was; tokens are shown in any case."""
    from hybridsched.config import load_config
    from hybridsched.data.tokenizer import Tokenizer

    resolved = run / "config" / "resolved.yaml"
    if not resolved.is_file():
        return
    try:
        model = load_config(resolved).actor_rollout_ref.model
        folder = model.tokenizer_path or model.path
        if folder is None:
            return
        tokenizer = Tokenizer.from_folder(folder)
    except UserError as error:
        typer.echo(f"no text, only tokens: {error}", err=True)
        return
    for sample in samples:
        sample["prompt_text"] = tokenizer.decode(sample["prompt_tokens"], skip_special_tokens=False)
        for response in sample["responses"]:
            response["text"] = tokenizer.decode(response["token_ids"], skip_special_tokens=False)


@app.command("stat")
def stat(run: Run, json: Json = False) -> None:
    """Print totals: samples, tokens, bytes, rewards, verdicts, free space."""
    from hybridsched.sample_queue.inspection import totals

    found = totals(run)
    if json:
        print_json(found)
    else:
        print_pairs(found)


@app.command("fsck")
def fsck(
    run: Run,
    complete: Annotated[
        bool, typer.Option("--complete", help="The run has ended: every sample needs a verdict.")
    ] = False,
) -> None:
    """Check that everything on disk fits together; exit code 4 when something is damaged."""
    from hybridsched.sample_queue.fsck import fsck
    from hybridsched.sample_queue.store import QUEUE_FOLDER

    if not (run / QUEUE_FOLDER).is_dir():
        raise RunFolderError(f"{run}: is not the folder of a run that began (there is no {QUEUE_FOLDER}/)")
    report = fsck(run, complete=complete)
    typer.echo(report.text())
    if not report.ok:
        raise typer.Exit(QueueError.exit_code)


def _segment_id(text: str) -> SegmentId:
    from hybridsched.model import SegmentId

    found = re.fullmatch(r"([^/]+)/([^/]+)-(\d+)", text)
    if found is None:
        raise UserError(
            f"{text!r} names no segment: write it as PRODUCER/INCARNATION-SEQ, e.g. standalone.0/ab12-00000003"
        )
    return SegmentId(found[1], found[2], int(found[3]))
