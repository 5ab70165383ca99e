"""Components of a (heterogeneous) job: what each asks for, as #SBATCH options and as options of its part of a step.

Owns: `Component`, its checks, its options in one fixed order, and which component comes first.

Invariants: a job of one component is a plain job; the leader alone carries what belongs to the whole job (name, log
file, signal); every option passed `words`.

Order: rank 0 and the batch script live on the leader. Trainer nodes come first, unless Slurm is old and starts MPI by
PMIx: before 23.02.2 a step over several components gives PMIx the nodes sorted by name while ranks follow the order of
the components, and ranks then look for each other on the wrong nodes. `order_for_pmix` picks the order in which both
agree, from the node names each component may get.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hybridsched.errors import ConfigError
from hybridsched.slurm import words
from hybridsched.slurm.sites import SiteProfile

PMIX_FIXED_IN = (23, 2, 2)  #: first Slurm whose PMIx knows the order of components

_GRES = re.compile(r"[A-Za-z0-9_.,:/()-]*(\{n\})?[A-Za-z0-9_.,:/()-]*")
#: Options that have a field of their own, or that only the script may set.
_RESERVED = frozenset(
    {"array", "chdir", "constraint", "cpus-per-task", "error", "exclusive", "gpus-per-node", "gres", "het-group"}
    | {"hetjob", "job-name", "mem", "no-kill", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "partition"}
    | {
        "account",
        "parsable",
        "qos",
        "requeue",
        "no-requeue",
        "reservation",
        "signal",
        "test-only",
        "time",
        "wait",
        "wrap",
    }
)


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a job. ``time``: minutes, or text as Slurm writes it; None: the job's.

    gres: the site's own spelling of the GPU request, ``{n}`` standing for gpus_per_node, e.g. ``gpu:h100:{n}``.
    options: further sbatch options by long name, e.g. {"switches": "1"}. Raises ConfigError for what cannot be.
    """

    nodes: int = 1
    ntasks_per_node: int = 1
    gpus_per_node: int = 0
    role: str = ""  #: for people and messages, e.g. "trainer"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    exclusive: bool = False
    gres: str | None = None
    time: int | str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, least in (("nodes", 1), ("ntasks_per_node", 1), ("gpus_per_node", 0), ("cpus_per_task", 1)):
            value = getattr(self, key)
            if value is None and key == "cpus_per_task":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{self._key(key)}: {value!r} -> write a whole number of at least {least}")
        if self.gres is not None and not _GRES.fullmatch(words.line(self.gres, self._key("gres"))):
            raise ConfigError(f"{self._key('gres')}: {self.gres!r} -> write e.g. gpu:h100:{{n}}")
        self.requests()

    @property
    def tasks(self) -> int:
        """Ranks of this component in a step over all components."""
        return self.nodes * self.ntasks_per_node

    @property
    def minutes(self) -> int | None:
        """The time limit in whole minutes (at least 1); None: not given, or none."""
        return None if self.time is None else minutes_of(self.time, self._key("time"))

    def requests(self) -> list[str]:
        """#SBATCH options of this component that do not depend on the site, but for GPUs."""
        found = [f"--nodes={self.nodes}", f"--ntasks-per-node={self.ntasks_per_node}"]
        checks = (
            ("partition", words.word),
            ("account", words.word),
            ("qos", words.word),
            ("reservation", words.word),
            ("constraint", words.expression),
            ("cpus_per_task", words.word),
            ("mem", words.memory),
            ("time", words.time_limit),
        )
        for key, check in checks:
            value = getattr(self, key)
            if value is not None:
                found.append(f"--{key.replace('_', '-')}={check(value, self._key(key))}")
        if self.exclusive:
            found.append("--exclusive")
        return found + [self._further(name, value) for name, value in self.options.items()]

    def sbatch(self, site: SiteProfile) -> list[str]:
        """All its #SBATCH options. ``--no-kill``: a lost node does not end the job."""
        more = [f"--{name}={value}" if value else f"--{name}" for name, value in site.options.items()]
        return [*self.requests(), *site.gpu_option(self.gpus_per_node, self.gres), "--no-kill", *more]

    def step(self, site: SiteProfile) -> list[str]:
        """srun options of this component's part of a step. Named again: srun does not take all of them from the job."""
        found = [f"--nodes={self.nodes}", f"--ntasks-per-node={self.ntasks_per_node}"]
        if self.cpus_per_task is not None:
            found.append(f"--cpus-per-task={self.cpus_per_task}")
        return found + site.gpu_option(self.gpus_per_node, self.gres)

    def _further(self, name: str, value: str) -> str:
        key = self._key("options")
        if words.option(name, key) in _RESERVED:
            raise ConfigError(f"{key}: {name} cannot be set here -> use the key of its own, or leave it to hybridsched")
        return f"--{name}={words.line(value, f'{key}.{name}')}" if value else f"--{name}"

    def _key(self, name: str) -> str:
        return f"{self.role or 'component'}.{name}"


def components_of(given: Sequence[Component | Mapping[str, Any]]) -> tuple[Component, ...]:
    """Components from keyword mappings; names of submitit are understood (tasks_per_node, mem_gb, timeout_min).

    Raises ConfigError for an unknown name, naming the component.
    """
    if not given:
        raise ConfigError("components: is empty -> give at least one, e.g. [{'nodes': 1}]")
    return tuple(_component(one, index) for index, one in enumerate(given))


def _component(given: Component | Mapping[str, Any], index: int) -> Component:
    if isinstance(given, Component):
        return given
    values = dict(given)
    for theirs, ours in (("tasks_per_node", "ntasks_per_node"), ("timeout_min", "time")):
        if theirs in values:
            values[ours] = values.pop(theirs)
    if "mem_gb" in values:
        values["mem"] = f"{round(float(values.pop('mem_gb')) * 1024)}M"
    known = {one.name for one in fields(Component)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(
            f"components[{index}]: {', '.join(unknown)} unknown -> known are {', '.join(sorted(known))}; other sbatch "
            "options go into options={'name': 'value'}"
        )
    return Component(**{"role": f"components[{index}]", **values})


def minutes_of(time: int | str, key: str = "time") -> int | None:
    """Whole minutes of a time limit (rounded up, at least 1); None for no limit. Raises ConfigError."""
    text = words.time_limit(time, key)
    if text in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, rest = text.partition("-") if "-" in text else ("0", "", text)
    parts = [int(part) for part in rest.split(":")]
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    total = ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    return max(1, -(-total // 60))


def order_for_pmix(nodes: Sequence[Sequence[str]]) -> list[int] | None:
    """The order of components in which all nodes, sorted as Slurm sorts them, follow each other; None: there is none.

    nodes: of each component, the names it may get.
    """
    if any(not names for names in nodes):
        return None
    ranges = sorted(
        (min(map(_sort_key, names)), max(map(_sort_key, names)), index) for index, names in enumerate(nodes)
    )
    for (_, last, _), (first, _, _) in itertools.pairwise(ranges):
        if last >= first:
            return None
    return [index for _, _, index in ranges]


def _sort_key(node: str) -> tuple[str, int]:
    """Slurm sorts by prefix, then by number: node2 comes before node10."""
    found = re.fullmatch(r"(.*?)(\d*)", node)
    assert found is not None  # the pattern takes any line
    return found[1], int(found[2] or -1)
