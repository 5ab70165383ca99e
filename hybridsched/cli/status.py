"""`hybridsched status`: is a run going, and how did its last start end?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
) -> None:
    """Tell where a run is: attempt, last cycle, how it ended."""
