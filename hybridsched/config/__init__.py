"""run.yaml -> frozen `RunConfig`, with everything that follows from it.

`load_config` reads, merges, validates and cross-checks; `derive` computes; `check*` and `not_available` judge;
`render_docs` and `render_template` explain. Importing this package costs neither torch, numpy nor h5py.
"""

from __future__ import annotations

from hybridsched.config.checks import check, check_cores, not_available, notes
from hybridsched.config.derived import Derived, derive, format_derived
from hybridsched.config.docs import render_docs, render_template
from hybridsched.config.loader import load_config, resolved_values, resolved_yaml, save_resolved
from hybridsched.config.paths import check_paths
from hybridsched.config.schema import RunConfig

__all__ = [
    "Derived",
    "RunConfig",
    "check",
    "check_cores",
    "check_paths",
    "derive",
    "format_derived",
    "load_config",
    "not_available",
    "notes",
    "render_docs",
    "render_template",
    "resolved_values",
    "resolved_yaml",
    "save_resolved",
]
