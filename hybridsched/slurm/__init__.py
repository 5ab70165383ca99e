"""Slurm: jobs of several components from Python (`HetSlurmExecutor`) and whole runs (`submit_run`).

Exports are loaded when they are used: submitit and jinja2 cost nothing to who only runs locally.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridsched.slurm.components import Component
    from hybridsched.slurm.executor import HetSlurmExecutor
    from hybridsched.slurm.job import HetSlurmJob
    from hybridsched.slurm.sites import SiteProfile, load_site
    from hybridsched.slurm.submission import SlurmRun, submit_run

__all__ = ["Component", "HetSlurmExecutor", "HetSlurmJob", "SiteProfile", "SlurmRun", "load_site", "submit_run"]

_HOMES = {
    "Component": "components",
    "HetSlurmExecutor": "executor",
    "HetSlurmJob": "job",
    "SiteProfile": "sites",
    "SlurmRun": "submission",
    "load_site": "sites",
    "submit_run": "submission",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridsched.slurm' has no attribute {name!r}")
    try:
        return getattr(import_module(f"hybridsched.slurm.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "submitit":
            from hybridsched.errors import UserError

            raise UserError("submitit is not installed: pip install 'hybridsched[slurm]'") from None
        raise
