"""A node agent inside a Slurm step: which rank it is, and what it does for a job that lost its batch script.

Owns `node_rank`, `LoopWatch` and `save_orphaned_job`.

An MPI call that touches a lost node may never return (seen with MPICH over libfabric's TCP: it spins), and with it the
event loop and every deadline in it stand still; a thread sees that, for mpi4py lets other threads run during a call.
A job that is submitted with --no-kill goes on without the node of its batch script: Slurm shows it as running although
nobody would ever start its step again (seen with 22.05). So an agent that ends because somebody is silent looks whether
that node still answers, and puts the job back into the queue if not.

Does not: decide about steps (the launch loop does, as long as it lives).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from hybridsched.errors import FaultError
from hybridsched.runtime.adapters import slurm
from hybridsched.runtime.adapters.attempt import AttemptInfo


def node_rank(nodes: Sequence[str], environment: Mapping[str, str]) -> int:
    """The rank of this node's agent. ``nodes``: of the attempt, by rank. Raises FaultError for a node not among them.

    Slurm numbers tasks by component, and lists nodes by name; the node's own name depends on neither.
    """
    node = environment.get("SLURMD_NODENAME", "")
    if node not in nodes:
        raise FaultError(
            f"this agent was started on node {node or '?'}, which is none of the attempt's ({', '.join(nodes)}); was "
            "the step started by hand?"
        )
    return nodes.index(node)


class LoopWatch:
    """Calls ``stuck`` from a thread when `turn` was not called for so long. Once; until `stop`."""

    def __init__(self, bound_s: float, stuck: Callable[[float], None], *, look_s: float = 0.5) -> None:
        self._bound_s = bound_s
        self._stuck = stuck
        self._look_s = look_s
        self._turned = time.monotonic()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def turn(self) -> None:
        """The event loop turns."""
        self._turned = time.monotonic()

    def stop(self) -> None:
        """From now on it may stand still."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._look_s):
            stood = time.monotonic() - self._turned
            if stood > self._bound_s:
                self._stuck(stood)
                return


def save_orphaned_job(info: AttemptInfo) -> None:
    """Put the job back into the queue (where that is not allowed: cancel it) when its batch script's node is lost.

    Bounded by a few calls. Says on stderr what was done.
    """
    job = slurm.this_job()
    if not job or not info.batch_address or slurm.answers(info.batch_address) or slurm.answers(info.batch_address):
        return
    why = f"node {info.batch_host} of the batch script does not answer"
    if info.can_requeue and not (problem := slurm.requeue(job, slurm.this_restart())):
        print(f"{why}: job {job} goes back into the queue", file=sys.stderr, flush=True)
        return
    problem = problem if info.can_requeue else "this site does not allow requeueing"
    cancelled = slurm.cancel(job) or f"job {job} is cancelled, for nobody would start it again"
    print(f"{why}, and {problem}: {cancelled}", file=sys.stderr, flush=True)
