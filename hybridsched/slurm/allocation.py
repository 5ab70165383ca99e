"""What a job was given: nodes of the trainer and of the rollout component, read from the batch script's environment.

Owns `Allocation` and the expansion of compressed host lists. Pure: the environment is handed in.

Invariant: hosts come from the ``_HET_GROUP_n`` variables, one list a component. SLURM_JOB_NODELIST of a heterogeneous
step is sorted by name over all components, so its first host need not be the first one of anything.

Does not: know which nodes are still alive (`nodes` asks).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybridsched.errors import FaultError, UserError
from hybridsched.slurm.sites import ROLES_VARIABLE

ROLES = ("trainer", "rollout")

_ITEM = re.compile(r"[^,\[\]]+|\[[^\]]*\]|,")


@dataclass(frozen=True, slots=True)
class Group:
    """One component: its role, its het group, the raw id of its job, its nodes in Slurm's order."""

    role: str
    index: int
    job_id: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """A job. ``groups`` in the order of the components; ``host``: the node of the batch script."""

    job_id: str
    restart_count: int
    host: str
    groups: tuple[Group, ...]

    def of_role(self, role: str) -> tuple[str, ...]:
        """Nodes of the component with this role; () when there is none."""
        return tuple(node for group in self.groups if group.role == role for node in group.nodes)

    def nodes(self) -> tuple[str, ...]:
        """Of all components."""
        return tuple(node for group in self.groups for node in group.nodes)


def read_allocation(environment: Mapping[str, str]) -> Allocation:
    """The job of a batch script. Raises UserError outside one, FaultError for an environment that makes no sense."""
    job_id = environment.get("SLURM_JOB_ID", "")
    if not job_id:
        raise UserError("this is no Slurm job (SLURM_JOB_ID is not set); submit the run: hybridsched submit run.yaml")
    size = int(environment.get("SLURM_HET_SIZE") or 1)
    roles = tuple(role for role in environment.get(ROLES_VARIABLE, ",".join(ROLES[:size])).split(",") if role)
    if len(roles) != size or len(set(roles)) != size or not set(roles) <= set(ROLES):
        raise FaultError(
            f"job {job_id} has {size} components, but {ROLES_VARIABLE}={','.join(roles)!r} names others; submit the "
            "script that `hybridsched render` prints as it is"
        )
    groups = tuple(
        Group(role, index, _of_group(environment, "SLURM_JOB_ID", index, size), _nodes(environment, index, size))
        for index, role in enumerate(roles)
    )
    host = environment.get("SLURMD_NODENAME") or groups[0].nodes[0]
    return Allocation(job_id, int(environment.get("SLURM_RESTART_COUNT") or 0), host, groups)


def _nodes(environment: Mapping[str, str], index: int, size: int) -> tuple[str, ...]:
    return expand_hosts(_of_group(environment, "SLURM_JOB_NODELIST", index, size))


def _of_group(environment: Mapping[str, str], name: str, index: int, size: int) -> str:
    """A variable of one component; of a plain job it has no suffix."""
    key = f"{name}_HET_GROUP_{index}" if size > 1 else name
    value = environment.get(key, "")
    if not value:
        raise FaultError(f"{key} is not set in the job's environment; is this the batch script of the job?")
    return value


def expand_hosts(text: str) -> tuple[str, ...]:
    """``trn[01-03,7],gpu1`` -> trn01, trn02, trn03, trn7, gpu1. Raises FaultError for what is no host list."""
    hosts: list[str] = []
    current = [""]
    for item in _ITEM.findall(text):
        if item == ",":
            hosts += current
            current = [""]
        elif item.startswith("["):
            current = [prefix + number for prefix in current for number in _numbers(item[1:-1], text)]
        else:
            current = [prefix + item for prefix in current]
    hosts += current
    if not all(hosts) or "".join(_ITEM.findall(text)) != text:
        raise FaultError(f"{text!r} is no host list of Slurm")
    return tuple(hosts)


def _numbers(ranges: str, text: str) -> list[str]:
    found = []
    for span in ranges.split(","):
        first, dash, last = span.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise FaultError(f"{text!r} is no host list of Slurm")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found
