"""Which nodes of a job can still be used, and what follows for the next attempt. Asks Slurm and the nodes themselves.

Owns `NodeTable`: the allocation minus what is lost, and the judgement after a failed attempt (`look`).

Invariants
    A node is used again only when its component still runs, Slurm still counts it to the job, and its Slurm daemon
    answers; Slurm's own time-out (SlurmdTimeout, minutes) is not waited for. A node that was lost stays out for this
    start of the job, also when it comes back: what an earlier attempt left there is not looked at.
    When Slurm's controller does not answer, nodes alone decide. When not even the node of this process answers (its
    port may be closed to us), answers mean nothing, and Slurm's word counts alone.

Does not: start or end steps (`srun`), or put the job back into the queue (`batch_main`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hybridsched.runtime.adapters import slurm
from hybridsched.slurm.allocation import Allocation, Group, expand_hosts


@dataclass(frozen=True, slots=True)
class Asked:
    """How a table asks; other functions in tests."""

    components: Callable[[str], list[slurm.Component] | None] = slurm.job_components
    addresses: Callable[[Sequence[str]], Mapping[str, str]] = slurm.node_addresses
    silent: Callable[[Mapping[str, str]], list[str]] = slurm.silent_nodes


@dataclass(frozen=True, slots=True)
class Look:
    """What a look found. ``lost``: newly lost node -> why. ``verdict``: why the job has to start anew, "" go on."""

    lost: Mapping[str, str] = field(default_factory=dict)
    verdict: str = ""


class NodeTable:
    """The nodes of one start of a job."""

    def __init__(self, allocation: Allocation, asked: Asked | None = None) -> None:
        self.allocation = allocation
        self.lost: dict[str, str] = {}
        self._asked = asked or Asked()
        self._addresses = dict(self._asked.addresses(allocation.nodes()))

    def usable(self, role: str) -> tuple[str, ...]:
        """Nodes of a role for the next attempt, in Slurm's order."""
        return tuple(node for node in self.allocation.of_role(role) if node not in self.lost)

    def ranks(self) -> tuple[str, ...]:
        """Nodes by rank: the trainer's first."""
        return self.usable("trainer") + self.usable("rollout")

    def address(self, node: str) -> str:
        """``HOST:PORT`` of a node's Slurm daemon; "" when Slurm did not tell."""
        return self._addresses.get(node, "")

    def look(self, not_started: Sequence[str] = ()) -> Look:
        """After an attempt failed. not_started: nodes whose agent never came up although others did."""
        components = self._asked.components(self.allocation.job_id)
        if components == []:
            return Look(verdict=f"Slurm knows no job {self.allocation.job_id} any more")
        found = dict.fromkeys(not_started, "its agent did not start")
        for group in self.allocation.groups:
            component = None if components is None else self._component(components, group)
            if component is not None and component.state != "RUNNING":
                return Look(verdict=f"the {group.role} component is {component.state.lower()}")
            if component is not None:
                present = expand_hosts(component.nodes) if component.nodes else ()
                found |= {node: "Slurm took it out of the job" for node in group.nodes if node not in present}
        found |= self._silent()
        fresh = {node: why for node, why in found.items() if node not in self.lost}
        self.lost |= fresh
        return Look(fresh, self._verdict())

    def _component(self, components: Sequence[slurm.Component], group: Group) -> slurm.Component | None:
        """None: Slurm shows none of that number, which says nothing about its nodes."""
        return next((one for one in components if one.offset == group.index), None)

    def _silent(self) -> dict[str, str]:
        known = {node: self._addresses[node] for node in self.ranks() if node in self._addresses}
        silent = self._asked.silent(known)
        if self.allocation.host in silent:
            return {}
        return dict.fromkeys(silent, "it does not answer")

    def _verdict(self) -> str:
        """The trainer's plan holds for all its nodes; without a rollout node that was asked for nothing generates."""
        for node in self.allocation.of_role("trainer"):
            if node in self.lost:
                return f"trainer node {node} is lost ({self.lost[node]})"
        if self.allocation.of_role("rollout") and not self.usable("rollout"):
            return "every rollout node is lost: " + ", ".join(self.allocation.of_role("rollout"))
        return ""
