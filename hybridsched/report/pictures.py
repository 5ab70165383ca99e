"""Every picture of a run as PNG files, for `simulate --plot` and for slides.

Owns the list of files; the pictures are plots.py and resource_plot.py. Files that are there are replaced.
"""

from __future__ import annotations

from pathlib import Path

from hybridsched.errors import RunFolderError
from hybridsched.report.run_data import RunData, load_run


def write_pictures(run_folder: Path, out: Path) -> list[Path]:
    """PNGs of a run in ``out`` (made when missing); returns them. RunFolderError: no run log, or not writable."""
    run = load_run(run_folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
        return [_write(out / f"{name}.png", png) for name, png in _drawn(run)]
    except OSError as error:
        raise RunFolderError(f"{out}: pictures cannot be written: {error.strerror}; choose another folder") from error


def _drawn(run: RunData) -> list[tuple[str, bytes]]:
    from hybridsched.report import plots, resource_plot, style

    over_time = (
        ("resources_last_cycles", resource_plot.zoom),
        ("resources", resource_plot.whole_run),
        ("time_shares", resource_plot.time_shares),
    )
    return [(name, style.to_png(draw(run))) for name, draw in (*over_time, *plots.PICTURES)]


def _write(path: Path, png: bytes) -> Path:
    path.write_bytes(png)
    return path
