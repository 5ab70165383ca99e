"""Where the YAML templates are: ``templates/`` in a checkout, package data in an installed hybridsched."""

from __future__ import annotations

from pathlib import Path

from hybridsched.errors import InternalError

_FOLDER = Path(__file__).resolve().parents[1] / "_data" / "templates"


def template_text(name: str) -> str:
    """The text of a shipped template, e.g. ``demo.yaml``. Raises InternalError when the installation lacks it."""
    path = _FOLDER / name
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InternalError(f"{path} is missing from this installation: install hybridsched again") from error
