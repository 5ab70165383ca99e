"""Who a process of a run is: the one thing every agent and worker is told about the run it belongs to.

Owns `RunContext`. JSON-able; made by the agent (for itself and, with `for_worker`, for each process it starts). Holds
nothing that changes while the process lives, and nothing the configuration says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RunContext:
    """Identity of one process. Paths are absolute; ``worker`` and ``incarnation`` are "" in an agent."""

    run_id: str
    run_folder: str
    attempt: int  #: number of this start of the run, 1, 2, ...; never reused in a run folder
    attempt_folder: str
    secret: str  #: shared by the processes of one attempt; proves that somebody belongs to it
    agent: str  #: endpoint name of the node's agent
    worker: str = ""
    incarnation: str = ""  #: one start of this worker; never reused in a run

    def for_worker(self, worker: str, incarnation: str) -> RunContext:
        """The context of a worker process of this agent."""
        return replace(self, worker=worker, incarnation=incarnation)
