"""What Slurm says about jobs: one squeue call for all of them, then scontrol, then sacct for those it left out.

Owns: how the three are read, how the states of components become one state, and which pending reasons never go away.

Invariants
    Works with accounting off (sacct is only the last resort, and its refusal is no error).
    "Slurm does not know the job" (absent from the answer) and "Slurm cannot be asked" (FaultError) are different.
    Nothing here believes COMPLETED: what a state proves is the matter of who asks (`job`, `submission`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridsched.errors import FaultError
from hybridsched.slurm.commands import Call, Said, call

#: States that stay.
TERMINAL = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED", "TIMEOUT"}
)
#: Pending reasons that waiting does not cure: the request itself, or the permission for it, is wrong.
HOPELESS = frozenset(
    {"AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS"}
    | {"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "QOSNotAllowed", "MaxMemPerLimit"}
    | {"AssocMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "QOSMaxNodePerJobLimit"}
    | {"QOSMaxWallDurationPerJobLimit", "QOSMinGRES", "QOSUsageThreshold", "QOSMaxGRESPerJob", "QOSMaxCpuPerJobLimit"}
)
_ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "CONFIGURING", "REQUEUED", "PENDING")
_FORMAT = "%i|%T|%r|%N"
_KEYS = ("JobId", "HetJobId", "HetJobOffset", "JobState", "Reason", "Restarts", "ExitCode", "NodeList")
_PAIR = re.compile(rf"(?:^|\s)({'|'.join(_KEYS)})=(\S*)")
_UNKNOWN = "Invalid job id"


@dataclass(frozen=True, slots=True)
class ComponentState:
    """One component. ``nodes``: compressed list; ``exit_code``: Slurm's "code:signal", "" when not told."""

    offset: int
    state: str
    reason: str = ""
    nodes: str = ""
    exit_code: str = ""
    restarts: int | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """A whole job, by its leader's id."""

    job_id: str
    components: tuple[ComponentState, ...]

    @property
    def state(self) -> str:
        """One word for all: over only when every component is; then the first that did not complete, the leader first.

        A job one of whose components is gone while others run is still what the others are.
        """
        states = [one.state for one in self.components]
        for active in _ACTIVE:
            if active in states:
                return active
        living = [state for state in states if state not in TERMINAL]
        return next((state for state in [*living, *states] if state != "COMPLETED"), "COMPLETED")

    @property
    def is_over(self) -> bool:
        """Whether every component ended for good."""
        return all(one.state in TERMINAL for one in self.components)

    @property
    def hopeless(self) -> str | None:
        """The pending reason that will not go away; None when there is none."""
        return next((one.reason for one in self.components if one.state == "PENDING" and one.reason in HOPELESS), None)

    @property
    def reason(self) -> str:
        """Why it waits or ended, of the first component that says so."""
        return next((one.reason for one in self.components if one.reason not in ("", "None")), "")

    @property
    def nodes(self) -> str:
        """Nodes in the order of the components."""
        return ",".join(one.nodes for one in self.components if one.nodes)

    def told(self) -> str:
        """For people: the state, and what each component is when they differ."""
        parts = {one.state for one in self.components}
        detail = f" ({self.reason})" if self.reason else ""
        if len(parts) > 1:
            detail += " - " + ", ".join(f"component {one.offset} {one.state}" for one in self.components)
        return f"{self.state}{detail}"


def states_of(job_ids: Iterable[str], ask: Call = call) -> dict[str, JobState]:
    """What Slurm knows of these jobs (leaders' ids); one nobody knows is absent.

    Raises FaultError when Slurm does not answer, UserError when there is none here.
    """
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    found = _from_squeue(wanted, ask)
    for job in wanted:
        if job not in found:
            components = _from_scontrol(job, ask) or _from_sacct(job, ask)
            if components:
                found[job] = components
    return {job: JobState(job, tuple(sorted(parts, key=lambda part: part.offset))) for job, parts in found.items()}


def detailed(job_id: str, ask: Call = call) -> JobState | None:
    """One job with exit codes and restarts, from scontrol or sacct; None: unknown. Raises as `states_of`."""
    parts = _from_scontrol(job_id, ask) or _from_sacct(job_id, ask)
    return JobState(job_id, tuple(sorted(parts, key=lambda part: part.offset))) if parts else None


def _from_squeue(wanted: Sequence[str], ask: Call) -> dict[str, list[ComponentState]]:
    said = ask(["squeue", "--noheader", "--states=all", f"--jobs={','.join(wanted)}", f"--format={_FORMAT}"])
    if not said.ok:
        _require_unknown(said, "squeue")
        return {}
    found: dict[str, list[ComponentState]] = {}
    for line in said.out.splitlines():
        shown, *rest = line.split("|")
        job, _plus, offset = shown.strip().partition("+")
        if job in wanted and len(rest) == 3 and (offset or "0").isdigit():
            state, reason, nodes = (part.strip() for part in rest)
            found.setdefault(job, []).append(ComponentState(int(offset or 0), state, reason, nodes))
    return found


def _from_scontrol(job: str, ask: Call) -> list[ComponentState]:
    said = ask(["scontrol", "--oneliner", "show", "job", job])
    if not said.ok:
        _require_unknown(said, "scontrol")
        return []
    found = []
    for line in said.out.splitlines():
        values: dict[str, str] = {}
        for key, value in _PAIR.findall(line):
            values.setdefault(key, value)
        if job in (values.get("JobId"), values.get("HetJobId")) and "JobState" in values:
            found.append(_of_scontrol(values))
    return found


def _of_scontrol(values: dict[str, Any]) -> ComponentState:
    nodes = values.get("NodeList", "")
    return ComponentState(
        offset=int(values.get("HetJobOffset", 0)),
        state=values["JobState"],
        reason=values.get("Reason", ""),
        nodes="" if nodes == "(null)" else nodes,
        exit_code=values.get("ExitCode", ""),
        restarts=int(values["Restarts"]) if values.get("Restarts", "").isdigit() else None,
    )


def _from_sacct(job: str, ask: Call) -> list[ComponentState]:
    """Of a requeued job every start has a row, and a lost node makes one more: the last row counts."""
    columns = "JobID,State,ExitCode,NodeList"
    said = ask(["sacct", "--noheader", "--allocations", "--parsable2", "--duplicates", f"--jobs={job}", f"-o{columns}"])
    if not said.ok:
        return []  # accounting is off: nothing to be known, and no error
    found: dict[int, ComponentState] = {}
    for line in said.out.splitlines():
        shown, *rest = line.split("|")
        leader, _plus, offset = shown.partition("+")
        if leader != job or len(rest) != 3 or not (offset or "0").isdigit():
            continue
        state, exit_code, nodes = rest
        word = state.split()[0] if state.split() else "UNKNOWN"  # "CANCELLED by 1000"
        found[int(offset or 0)] = ComponentState(int(offset or 0), word, "", nodes, exit_code)
    return list(found.values())


def _require_unknown(said: Said, command: str) -> None:
    """A refusal other than "no such job" means that nothing is known. Raises FaultError."""
    if _UNKNOWN not in said.err:
        raise FaultError(f"{command}: {said.reason}; Slurm cannot be asked now, the job is not touched by that")


__all__ = ["HOPELESS", "TERMINAL", "ComponentState", "JobState", "detailed", "states_of"]
