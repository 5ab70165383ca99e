"""Job scripts: templates filled in. Pure: the same values give the same text.

Owns: how a value becomes text in `templates/*.sbatch.j2`. Every ``{{ value }}`` is quoted for the shell by itself;
only what this module made of quoted parts (`Shell`) goes in as it is. A name the template needs and does not get is an
error (StrictUndefined). sbatch reads quotes in its own lines as a shell does.

Does not: decide anything about a job. What the options are comes from `components` and `sites`.
"""

from __future__ import annotations

import importlib.resources
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from hybridsched import __version__
from hybridsched.errors import InternalError
from hybridsched.slurm import words
from hybridsched.slurm.components import Component
from hybridsched.slurm.sites import SiteProfile

AGENT_SIGNAL = "USR2"  #: what says that the time limit is near


class Shell(str):
    """Text that is shell already. Only for what was quoted part by part."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What belongs to the whole job and stands on its leader. ``log``: file name pattern of sbatch, or a path.

    signal: as sbatch takes it, e.g. ``USR2@90`` for all tasks, ``B:USR2@300`` for the batch script alone.
    chdir: where the script starts; None: where sbatch is called.
    """

    name: str
    log: str
    signal: str
    requeue: bool
    chdir: str | None = None

    def lines(self) -> list[str]:
        """Its #SBATCH options."""
        found = [f"--job-name={words.name(self.name, 'job name')}", f"--output={words.line(self.log, 'log file')}"]
        if self.chdir is not None:
            found.append(f"--chdir={words.line(self.chdir, 'working folder')}")
        return [
            *found,
            "--open-mode=append",
            f"--signal={self.signal}",
            "--requeue" if self.requeue else "--no-requeue",
        ]


def components_lines(
    components: Sequence[Component], site: SiteProfile, job: JobOptions, default_time: int | str
) -> list[list[Shell]]:
    """The #SBATCH options of every component; the leader's carry the job's."""
    found = []
    for index, component in enumerate(components):
        options = [*(job.lines() if index == 0 else []), *component.sbatch(site)]
        if component.time is None:
            options.append(f"--time={words.time_limit(default_time, 'time')}")
        found.append([Shell(_option(option)) for option in options])
    return found


def log_pattern(folder: Path, name: str) -> str:
    """A path for ``--output``: a percent sign in the folder is doubled, those in ``name`` stay patterns."""
    return f"{str(folder).replace('%', '%%')}/{name}"


def render_run(
    lines: list[list[Shell]],
    site: SiteProfile,
    *,
    run_folder: Path,
    working_folder: Path,
    title: str,
    roles: Sequence[str],
    prepare: Sequence[str] = (),
) -> str:
    """The script of a run. prepare: command that lays out the run folder, () when that was done."""
    return _render(
        "run.sbatch.j2",
        components=lines,
        environment=_shell(site.script_lines()),
        python=site.host_python(),
        run_folder=words.line(run_folder, "run folder"),
        working_folder=words.line(working_folder, "working folder"),
        title=words.name(title, "name of the run"),
        version=__version__,
        roles=",".join(roles),
        prepare=Shell(shlex.join([words.line(part, "command") for part in prepare])) if prepare else "",
    )


def render_executor(
    lines: list[list[Shell]],
    components: Sequence[Component],
    site: SiteProfile,
    *,
    folder: Path,
    command: Sequence[str],
    srun_args: Sequence[str] = (),
    setup: Sequence[str] = (),
    teardown: Sequence[str] = (),
) -> str:
    """The script of a function. setup, teardown: shell lines of the caller, taken as they are."""
    common = ["--kill-on-bad-exit=1", *site.step_arguments(), *srun_args]
    several = len(components) > 1
    parts = []
    for index, component in enumerate(components):
        group = [f"--het-group={index}"] if several else []
        options = Shell(shlex.join([*group, *component.step(site), *common]))
        parts.append({"options": options, "command": Shell(shlex.join(site.inside_container(list(command))))})
    return _render(
        "executor.sbatch.j2",
        components=lines,
        environment=_shell(site.script_lines()),
        setup=_shell(setup),
        teardown=_shell(teardown),
        folder=words.line(folder, "folder"),
        ranks=sum(component.tasks for component in components),
        parts=parts,
    )


def _option(option: str) -> str:
    """``--name=value`` with the value quoted: sbatch splits its lines at blanks and # as a shell does."""
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else name


def _shell(lines: Iterable[str]) -> list[Shell]:
    return [Shell(line) for line in lines]


def _quoted(value: Any) -> str:
    """What stands in the script for a value of a template."""
    return value if isinstance(value, Shell) else shlex.quote(str(value))


@cache
def _environment() -> jinja2.Environment:
    folder = Path(str(importlib.resources.files("hybridsched"))) / "_data" / "templates"
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        finalize=_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML
    )


def _render(name: str, **values: Any) -> str:
    try:
        return _environment().get_template(name).render(**values)
    except jinja2.TemplateNotFound as error:
        raise InternalError(
            f"the template {error.name} is missing from this installation: install hybridsched again"
        ) from error
