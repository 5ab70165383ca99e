"""Slurm as processes inside a job ask it: what became of a job, does a node answer, put the job back into the queue.

Owns: the few commands a running job calls, each with a bound, and the connection test of a node. Invariants: no answer
is never taken for bad news (`job_components` returns None then); a job is put back only when it is still the start of
it that this process belongs to, and nobody cancelled it.

Does not: submit, or know what a run is.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CALL_S = 15.0  #: bound of one Slurm command: more than the controller's own MessageTimeout
PING_S = 2.0  #: bound of one connection to a node
DONE_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "REVOKED", "TIMEOUT"}
)

_GONE_MESSAGE = "Invalid job id"
_PINGS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a job as Slurm sees it now. A plain job has one. ``nodes``: compressed list, "" when none."""

    job_id: str
    offset: int
    state: str
    nodes: str
    restarts: int


def call(*command: str, timeout_s: float = CALL_S, cwd: Path | None = None) -> tuple[int, str]:
    """(exit code, output) of a Slurm command; code -1 when it could not be asked in time.

    cwd: for commands that leave files where they are called.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=cwd,
        )
    except subprocess.TimeoutExpired:
        return -1, f"{command[0]} did not answer within {timeout_s:g} s"
    except OSError as error:
        return -1, f"{command[0]} cannot be started: {error}"
    return done.returncode, done.stdout.strip()


def fields_of(line: str) -> dict[str, str]:
    """``Key=value`` words of a line of `scontrol -o`. Values with spaces (Reason, Command) lose what follows one."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def job_components(job_id: str) -> list[Component] | None:
    """All components, leader first; [] when Slurm knows no such job (any more); None when Slurm does not answer."""
    code, text = call("scontrol", "-o", "show", "job", job_id)
    if code != 0:
        return [] if _GONE_MESSAGE in text else None
    found = []
    for line in text.splitlines():
        values = fields_of(line)
        if "JobId" not in values:
            continue
        nodes = values.get("NodeList", "")
        found.append(
            Component(
                values["JobId"],
                int(values.get("HetJobOffset", "0")),
                values.get("JobState", ""),
                "" if nodes == "(null)" else nodes,
                int(values.get("Restarts", "0")),
            )
        )
    return sorted(found, key=lambda one: one.offset)


def job_is_gone(job_id: str) -> bool:
    """Whether Slurm says that nothing of this job runs; False when it does not say."""
    components = job_components(job_id)
    return components is not None and all(one.state in DONE_STATES for one in components)


def requeue(job_id: str, restart_count: int) -> str:
    """Put the job (the leader's id) back into the queue. Returns why that was not done; "" when it was.

    restart_count: of the start this process belongs to.
    """
    components = job_components(job_id)
    if components is None:
        return "Slurm does not answer"
    if not components:
        return f"Slurm knows no job {job_id} any more"
    leader = components[0]
    if leader.restarts != restart_count:
        return ""  # somebody else of this job has done it
    if leader.state == "CANCELLED":
        return f"job {job_id} was cancelled"
    code, text = call("scontrol", "requeue", job_id)
    return "" if code == 0 else f"scontrol requeue {job_id}: {text}"


def cancel(job_id: str) -> str:
    """Cancel all components. Returns why that was not done; "" when it was."""
    code, text = call("scancel", job_id)
    return "" if code == 0 else f"scancel {job_id}: {text}"


def node_addresses(nodes: Iterable[str]) -> dict[str, str]:
    """``HOST:PORT`` of the Slurm daemon of each node; without those Slurm does not tell."""
    code, text = call("scontrol", "-o", "show", "node", ",".join(nodes))
    if code != 0:
        return {}
    found = {}
    default = ""
    for line in text.splitlines():
        values = fields_of(line)
        if "NodeName" not in values or "NodeAddr" not in values:
            continue
        default = default or ("" if "Port" in values else _slurmd_port())
        found[values["NodeName"]] = f"{values['NodeAddr']}:{values.get('Port', default)}"
    return found


def _slurmd_port() -> str:
    """Of nodes that have none of their own."""
    _code, text = call("scontrol", "show", "config")
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "SlurmdPort":
            return value.strip()
    return "6818"


def answers(address: str, timeout_s: float = PING_S) -> bool:
    """Whether something accepts connections at ``HOST:PORT``: a lost node does not, a living slurmd does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout_s):
            return True
    except OSError:
        return False


def silent_nodes(addresses: Mapping[str, str]) -> list[str]:
    """Nodes whose Slurm daemon does not answer; all are asked at the same time, those in doubt twice."""
    if not addresses:
        return []

    def is_silent(node: str) -> bool:
        return not answers(addresses[node]) and not answers(addresses[node])

    with ThreadPoolExecutor(min(len(addresses), _PINGS_AT_ONCE)) as pool:
        return [node for node, silent in zip(addresses, pool.map(is_silent, addresses), strict=True) if silent]


def this_job() -> str:
    """Id of the job this process is in (of the leader, for every component); "" outside Slurm."""
    return os.environ.get("SLURM_JOB_ID", "")


def this_restart() -> int:
    """How often this job was put back into the queue before."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)
