"""Handing a script to Slurm, and finding out first that it can run at all.

Slurm accepts a heterogeneous job it can never start, keeps it pending for ever, and lets it hold back others. So a
script is asked about beforehand (`sbatch --test-only`, which judges every component alone; then the number of nodes
all components need together, because two components never share a node), and a job that went in is looked at once more:
one that waits for a reason that will not go away is taken out again.

Owns: these checks, sbatch, scancel. Does not: write scripts (`sbatch`) or follow jobs (`state`, `job`).
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridsched.errors import FaultError, UserError
from hybridsched.slurm.commands import Call, call
from hybridsched.slurm.components import PMIX_FIXED_IN, Component, order_for_pmix
from hybridsched.slurm.state import states_of

_LOOK_S = 0.5
_LOOKS = 3  # at a new job, while it waits for a reason that looks hopeless

Sleep = Callable[[float], None]


def require_possible(script: Path, components: Sequence[Component], ask: Call = call) -> None:
    """Raise UserError with Slurm's reason when the job in ``script`` can never start. Submits nothing."""
    said = ask(["sbatch", "--test-only", str(script)])
    if not said.ok:
        raise UserError(f"Slurm would never start this job: {said.reason}\n{_asked(components)}")
    if len(components) > 1:
        _require_room(components, ask)


def send(script: Path, ask: Call = call) -> str:
    """Submit; returns the job id (the leader's). Raises UserError with Slurm's reason."""
    said = ask(["sbatch", "--parsable", str(script)])
    if not said.ok:
        raise UserError(f"sbatch refused {script}: {said.reason}")
    found = re.match(r"(\d+)", said.out.strip().splitlines()[-1] if said.out.strip() else "")
    if found is None:
        raise FaultError(f"sbatch answered {said.out.strip()!r}, which names no job; look with: squeue --me")
    return found[1]


def require_startable(
    job_id: str, components: Sequence[Component], ask: Call = call, sleep: Sleep = time.sleep
) -> None:
    """Take a job out again, with UserError, when it waits for something that will not come."""
    for look in range(_LOOKS):
        found = states_of([job_id], ask).get(job_id)
        if found is None or found.hopeless is None:
            return
        if look < _LOOKS - 1:  # the reason of a moment ago may be that of an earlier look of the scheduler
            sleep(_LOOK_S)
    assert found is not None
    cancel(job_id, ask)
    raise UserError(
        f"job {job_id} would have waited for ever ({found.hopeless}) and was cancelled\n{_asked(components)}\n"
        "Look at the limits with: scontrol show partition; sacctmgr show qos"
    )


def cancel(job_id: str, ask: Call = call) -> None:
    """End a job with all its components. Raises UserError when Slurm refuses; a job that ended is no error."""
    said = ask(["scancel", job_id])
    if not said.ok and "Invalid job id" not in said.err:
        raise UserError(f"scancel {job_id}: {said.reason}")


def signal(job_id: str, name: str, ask: Call = call, *, batch: bool = False) -> None:
    """Send a signal to all ranks of all components, or to the job script alone. Raises UserError on a refusal."""
    said = ask(["scancel", *["--batch"] * batch, f"--signal={name}", job_id])
    if not said.ok:
        raise UserError(f"scancel --signal={name} {job_id}: {said.reason}")


def nodes_of(component: Component, ask: Call = call) -> list[str]:
    """Names of the nodes in its partition, up or not; [] when Slurm does not tell. No partition: the default one."""
    partition = component.partition if component.partition is not None else _default_partition(ask)
    if not partition:
        return []
    said = ask(["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N"])
    return sorted(set(said.out.split())) if said.ok else []


def version(ask: Call = call) -> tuple[int, ...]:
    """Of this Slurm, e.g. (22, 5, 8); () when it does not tell."""
    said = ask(["sbatch", "--version"])
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", said.out) if said.ok else None
    return tuple(int(part) for part in found.groups()) if found else ()


def sure_order(components: Sequence[Component], mpi: str, ask: Call = call) -> list[int]:
    """The order of components in which this Slurm starts MPI: as given, but where PMIx is old (see `components`).

    Raises UserError when no order is sure to work.
    """
    found = version(ask) if mpi == "pmix" and len(components) > 1 else ()
    if not found or found >= PMIX_FIXED_IN:
        return list(range(len(components)))
    order = order_for_pmix([nodes_of(one, ask) for one in components])
    if order is None:
        raise UserError(
            "mpi: pmix of this Slurm (before 23.02.2) starts a heterogeneous job only when the nodes of its components "
            "follow each other in the order of names, and the partitions asked for do not make that sure. Use mpi: "
            "pmi2 in the site profile (the mpich wheel), or partitions whose node names do not mix."
        )
    return order


def _default_partition(ask: Call) -> str:
    said = ask(["sinfo", "--noheader", "--format=%P"])
    return next((name.rstrip("*") for name in said.out.split() if name.endswith("*")), "") if said.ok else ""


def _require_room(components: Sequence[Component], ask: Call) -> None:
    """Any group of components needs as many different nodes as it asks for (no two share one)."""
    names = [set(nodes_of(one, ask)) for one in components]
    for size in range(1, len(components) + 1):
        for group in itertools.combinations(range(len(components)), size):
            known = [names[index] for index in group]
            wanted = sum(components[index].nodes for index in group)
            if all(known) and wanted > len(set.union(*known)):
                raise UserError(
                    f"Slurm would never start this job: {_told(components, group)} need {wanted} nodes together, and "
                    f"their partitions have {len(set.union(*known))}; components of one job never share a node"
                )


def _told(components: Sequence[Component], group: Sequence[int]) -> str:
    return " and ".join(components[index].role or f"component {index}" for index in group)


def _asked(components: Sequence[Component]) -> str:
    lines = []
    for index, one in enumerate(components):
        gpus = f" with {one.gpus_per_node} GPUs each" if one.gpus_per_node else ""
        where = f"partition {one.partition}" if one.partition else "the default partition"
        lines.append(f"- {one.role or f'component {index}'}: {one.nodes} nodes{gpus} of {where}")
    return "asked for:\n" + "\n".join(lines)
