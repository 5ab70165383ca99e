"""Site profiles: what differs from cluster to cluster and not from run to run (`slurm/sites/*.yaml`).

Owns: the schema of a profile, how one is found, and what follows from it for a job script (`script_lines`), for a step
(`step_arguments`, `gpu_option`) and for the command inside a step (`inside_container`).

A profile is named by `slurm.site` in run.yaml (a name or a path), else by the variable ``HYBRIDSCHED_SITE``, else it
is `generic`. The profile a run was submitted with is kept in its folder (`config/site.yaml`): inside the job it is read
from there (`site_of_run`), so that a profile edited meanwhile, or another environment, changes nothing.

Invariants: every value was checked by `words`; the same profile gives the same text.
Does not: know a run, or ask Slurm anything.
"""

from __future__ import annotations

import importlib.resources
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from hybridsched.config.problems import Problem, config_error, dotted
from hybridsched.config.schema_base import Section
from hybridsched.config.yaml_source import dump_yaml, parse_yaml, read_text
from hybridsched.errors import ConfigError
from hybridsched.slurm import words

SITE_VARIABLE = "HYBRIDSCHED_SITE"  #: name or path of the profile when run.yaml has none
#: In the environment of a job: roles of its components in the order of their het groups, e.g. "trainer,rollout".
ROLES_VARIABLE = "HYBRIDSCHED_ROLES"
DEFAULT_SITE = "generic"

MpiFlavour = Literal["pmix", "pmi2", "cray_shasta"]


class ContainerProfile(Section):
    """Where node agents run when not on the host's own system. The job script itself always runs on the host."""

    kind: Literal["pyxis", "apptainer"]
    """pyxis: srun options of NVIDIA's plugin. apptainer: the command is wrapped."""
    image: str
    """Image file, or for pyxis also registry#image:tag."""
    mounts: list[str] = Field(default_factory=list)
    """HOST:CONTAINER[:OPTIONS]; the run folder must be visible under its own path."""
    python: str = "python3"
    """Interpreter inside the image, with hybridsched installed."""
    arguments: list[str] = Field(default_factory=list)
    """More options: of srun for pyxis, of `apptainer exec` for apptainer."""


class SiteProfile(Section):
    """One cluster."""

    description: str = ""
    """One line for people."""
    source: list[str] = Field(default_factory=list)
    """Files to source before modules are loaded, e.g. /etc/profile.d/lmod.sh."""
    modules: list[str] = Field(default_factory=list)
    """Modules to load, in this order, after `module purge`."""
    python: str | None = None
    """Interpreter of the job script on the host; null: the one that submits."""
    mpi: MpiFlavour = "pmix"
    """How srun starts MPI processes. pmi2: the mpich wheel, no MPI of the site needed."""
    gpus: str = "--gpus-per-node={n}"
    """Spelling of the GPU request of one node; {n}: number of GPUs. Empty: nodes come with their GPUs."""
    container: ContainerProfile | None = None
    """Null: the host's own system."""
    interface: str | None = None
    """Network interface between nodes, e.g. hsn0; null: libraries choose."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of job script, agents and workers."""
    fabric: dict[str, str] = Field(default_factory=dict)
    """Variables of the network fabric (NCCL_*, FI_*, UCX_*)."""
    options: dict[str, str] = Field(default_factory=dict)
    """sbatch options of every component, e.g. {hint: nomultithread}."""
    srun: list[str] = Field(default_factory=list)
    """More srun options of every step, e.g. --cpu-bind=none."""
    requeue: bool = True
    """Whether a job may put itself back into the queue (scontrol requeue)."""

    def gpu_option(self, n: int, spelling: str | None = None) -> list[str]:
        """The option that asks for ``n`` GPUs a node, for sbatch and srun; [] when there is nothing to ask for.

        spelling: a component's own (`slurm.trainer.gres`), e.g. ``gpu:h100:{n}``; it stands for ``--gres=``.
        """
        text = self.gpus if spelling is None else f"--gres={spelling}"
        return [text.replace("{n}", str(n))] if text and n > 0 else []

    def step_arguments(self) -> list[str]:
        """srun options of every step: MPI flavour, container, the site's own."""
        found = [f"--mpi={self.mpi}"]
        if self.container is not None and self.container.kind == "pyxis":
            found.append(f"--container-image={self.container.image}")
            if self.container.mounts:
                found.append(f"--container-mounts={','.join(self.container.mounts)}")
            found += self.container.arguments
        return [*found, *self.srun]

    def inside_container(self, command: list[str]) -> list[str]:
        """The command of a step as srun has to start it."""
        if self.container is None or self.container.kind != "apptainer":
            return list(command)
        binds = [part for mount in self.container.mounts for part in ("--bind", mount)]
        return ["apptainer", "exec", "--nv", *binds, *self.container.arguments, self.container.image, *command]

    def agent_python(self) -> str:
        """The interpreter of node agents, where they run."""
        return self.container.python if self.container is not None else self.host_python()

    def host_python(self) -> str:
        """The interpreter of the job script."""
        return self.python or sys.executable

    def variables(self) -> dict[str, str]:
        """Environment of job script, agents and workers; what the profile names wins over what `interface` implies."""
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        implied = dict.fromkeys(names, self.interface) if self.interface else {}
        return {**{key: value for key, value in implied.items() if value}, **self.fabric, **self.environment}

    def script_lines(self) -> list[str]:
        """Shell lines that make the environment: sourced files, modules, variables."""
        lines = []
        for path in self.source:
            lines += ["# shellcheck source=/dev/null", f"source {shlex.quote(path)}"]
        if self.modules:
            lines += ["module purge", *(f"module load {shlex.quote(name)}" for name in self.modules)]
        return lines + [f"export {name}={_assigned(value)}" for name, value in self.variables().items()]


def _assigned(value: str) -> str:
    """Quoted; also a leading ``=``, which is right in an assignment but reads like a comparison."""
    quoted = shlex.quote(value)
    return f"'{quoted}'" if quoted.startswith("=") else quoted


def load_site(name_or_path: str | os.PathLike[str] | None = None) -> SiteProfile:
    """The profile of that name or path; None: the one of ``HYBRIDSCHED_SITE``, else `generic`.

    Raises ConfigError with file, line, key and cure for everything wrong in it.
    """
    path = _path_of(_chosen(name_or_path))
    values, origins = parse_yaml(read_text(path), str(path))
    try:
        site = SiteProfile.model_validate(values)
    except ValidationError as error:
        problems = [_problem(detail["loc"], detail["msg"]) for detail in error.errors(include_url=False)]
        raise config_error(problems, origins) from None
    try:
        _check(site)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return site


def site_choice(name_or_path: str | None) -> str:
    """What chooses the same profile from any folder and in any environment: a name, or an absolute path."""
    chosen = _chosen(name_or_path)
    return str(Path(chosen).absolute()) if _is_path(chosen) else chosen


def site_of_run(run_folder: Path) -> SiteProfile:
    """The profile the run in this folder was submitted with. Raises ConfigError."""
    return load_site(Path(run_folder) / "config" / "site.yaml")


def site_yaml(site: SiteProfile) -> str:
    """The profile as YAML that `load_site` reads back."""
    return dump_yaml(site.model_dump(mode="json"))


def site_names() -> list[str]:
    """Profiles that can be chosen by name."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def _folder() -> Path:
    """`slurm/sites` in a checkout, package data in an installed hybridsched (one copy, by a link)."""
    return Path(str(importlib.resources.files("hybridsched"))) / "_data" / "sites"


def _chosen(name_or_path: str | os.PathLike[str] | None) -> str:
    return os.fspath(name_or_path) if name_or_path is not None else os.environ.get(SITE_VARIABLE) or DEFAULT_SITE


def _is_path(chosen: str) -> bool:
    return "/" in chosen or chosen.endswith((".yaml", ".yml"))


def _path_of(chosen: str) -> Path:
    if _is_path(chosen):
        return Path(chosen)
    path = _folder() / f"{words.name(chosen, 'slurm.site')}.yaml"
    if not path.is_file():
        known = ", ".join(site_names())
        raise ConfigError(
            f"slurm.site: there is no profile {chosen!r} -> use one of {known}, or the path of a file of your own "
            f"(start from {_folder() / f'{DEFAULT_SITE}.yaml'})"
        )
    return path


def _problem(location: tuple[int | str, ...], message: str) -> Problem:
    known = ", ".join(SiteProfile.model_fields)
    cure = f"keys of a profile are {known}" if "Extra inputs" in message else "see slurm/sites/generic.yaml"
    what = "unknown key" if "Extra inputs" in message else message
    return Problem((dotted(location),), what, cure)


def _check(site: SiteProfile) -> None:
    """Raise ConfigError for a value that cannot stand in a script."""
    _check_gpus(site.gpus)
    for key, texts in (("source", site.source), ("modules", site.modules), ("srun", site.srun)):
        for text in texts:
            words.line(text, key)
    for argument in site.srun:
        if not argument.startswith("-"):
            raise ConfigError(f"srun: {argument!r} is no option -> write it as --name=value")
    _check_variables("environment", site.environment)
    _check_variables("fabric", site.fabric)
    for name, value in site.options.items():
        words.line(value, f"options.{words.option(name, 'options')}")
    if site.interface is not None:
        words.word(site.interface, "interface")
    if site.python is not None:
        words.line(site.python, "python")
    if site.container is not None:
        _check_container(site.container)


def _check_gpus(text: str) -> None:
    words.line(text, "gpus")
    name, _equals, value = text.partition("=")
    if text and (name not in ("--gpus-per-node", "--gres") or value.count("{n}") != 1):
        raise ConfigError(f"gpus: {text!r} -> write --gpus-per-node={{n}}, --gres=gpu:TYPE:{{n}}, or nothing")
    if text:
        words.word(value.replace("{n}", "1"), "gpus")


def _check_variables(key: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        words.line(value, f"{key}.{words.variable(name, key)}")


def _check_container(container: ContainerProfile) -> None:
    words.line(container.image, "container.image")
    words.line(container.python, "container.python")
    for mount in container.mounts:
        if "," in words.line(mount, "container.mounts") or ":" not in mount:
            raise ConfigError(f"container.mounts: {mount!r} -> write HOST:CONTAINER, one entry a mount")
    for argument in container.arguments:
        words.line(argument, "container.arguments")
