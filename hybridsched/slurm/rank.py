"""One rank of a submitted function: `python -m hybridsched.slurm.rank FOLDER`, started by the job's own script.

Owns: what submitit's own entry point gets wrong in a job of several components (nodes in the wrong order, results of an
earlier start), the checkpoint on USR2 with requeue, and the file that says how a rank ended.

Invariants
    A result file belongs to this start: what an earlier one left is removed before the function runs.
    The submission is loaded only when this user owns it and nobody else can write it.
    A rank that left no marker did not succeed, whatever Slurm says.
    Signal handlers print nothing through Python's buffers: a handler that interrupts a print would kill the rank.

A rank that waits inside C code (a blocking MPI call) runs no handler, hence no checkpoint: poll instead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths, UncompletedJobError

from hybridsched.errors import HybridschedError
from hybridsched.slurm.commands import call
from hybridsched.slurm.pickles import load_own, mark_end, marker_of, save

COMPONENT_VARIABLE = "HYBRIDSCHED_COMPONENT"  #: of a rank: number of its component
_SUBMISSION_S = 60.0  # sbatch has returned before the submission gets its final name
_TIMED_OUT = 0.8  # share of the time limit after which USR2 means that it is near


def correct_environment(environment: MutableMapping[str, str]) -> None:
    """Make the variables of a step over several components tell the truth, for submitit and for users.

    Slurm sorts the nodes of such a step by name and counts nodes of the leader only; afterwards nodes are in the order
    of the ranks. ``HYBRIDSCHED_COMPONENT`` tells which component this rank belongs to. A plain job stays as it is.
    """
    groups = range(int(environment.get("SLURM_HET_SIZE", "0") or 0))
    lists = [environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in groups]
    if not lists or not all(lists):
        environment[COMPONENT_VARIABLE] = "0"
        return
    environment["SLURM_JOB_NODELIST"] = ",".join(lists)
    counts = [int(environment.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}", "0")) for group in groups]
    environment["SLURM_JOB_NUM_NODES"] = str(sum(counts))
    environment[COMPONENT_VARIABLE] = str(component_of_rank(environment))


def component_of_rank(environment: Mapping[str, str]) -> int:
    """Number of the component the rank in ``SLURM_PROCID`` belongs to, by the tasks of the components before it."""
    rank, component = int(environment.get("SLURM_PROCID", "0")), 0
    while f"SLURM_NTASKS_HET_GROUP_{component}" in environment:
        tasks = int(environment[f"SLURM_NTASKS_HET_GROUP_{component}"])
        if rank < tasks:
            return component
        rank -= tasks
        component += 1
    return 0


class Interruption:
    """USR2: rank 0 checkpoints and puts the job back into the queue; the others go on until Slurm ends them."""

    def __init__(self, paths: JobPaths, submission: DelayedSubmission, rank: int) -> None:
        self._paths = paths
        self._submission = submission
        self._rank = rank
        self._begun = time.monotonic()

    def arm(self) -> None:
        """From now on. TERM and CONT come before USR2 at preemption and must not end the rank."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            signal.signal(number, lambda received, _frame: _tell(f"{signal.Signals(received).name} is passed over"))
        signal.signal(signal.SIGUSR2, self._received)

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        if self._rank != 0:
            return
        limit_s = self._submission._timeout_min * 60
        timed_out = limit_s > 0 and time.monotonic() - self._begun >= _TIMED_OUT * limit_s
        left = self._submission._timeout_countdown - timed_out
        if left < 0:
            raise UncompletedJobError("not requeued: reached its time limit too many times (max_num_timeout)")
        self._checkpoint(left, timed_out)
        for kind in ("exit.json", "result.pkl"):
            for stale in self._paths.folder.glob(f"{self._paths.job_id}_*_{kind}"):
                stale.unlink(missing_ok=True)
        said = call(["scontrol", "requeue", str(self._paths.job_id)])
        if not said.ok:
            raise UncompletedJobError(f"checkpointed, but not requeued: {said.reason}")
        _tell("checkpointed and requeued")
        os._exit(0)  # the job is being taken down; nothing of this start may be reported as a result

    def _checkpoint(self, left: int, timed_out: bool) -> None:
        """Replace the submission by what the function wants to go on with. Raises UncompletedJobError."""
        function = self._submission.function
        if not hasattr(function, "checkpoint") and not hasattr(function, "__submitit_checkpoint__"):
            if timed_out:
                raise UncompletedJobError("not requeued: reached its time limit, and the function has no checkpoint")
            return  # preempted: begins again
        following = self._submission._checkpoint_function()
        if following is None:
            raise UncompletedJobError("not requeued: checkpoint returned None")
        following.set_timeout(self._submission._timeout_min, left)
        save(following, self._paths.submitted_pickle)


def main(folder: str, environment: MutableMapping[str, str] = os.environ) -> int:
    """Run the function of this rank; returns the exit code of the process."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until there is something to checkpoint; by default it kills
    correct_environment(environment)
    environment["SUBMITIT_FOLDER"] = folder
    rank = int(environment.get("SLURM_PROCID", "0"))
    paths = JobPaths(folder, job_id=environment["SLURM_JOB_ID"], task_id=rank)
    marker = marker_of(paths.folder, environment["SLURM_JOB_ID"], rank)
    for stale in (marker, paths.result_pickle):
        stale.unlink(missing_ok=True)
    outcome = _outcome(paths, rank)
    try:
        save(outcome, paths.result_pickle)
    except Exception as error:  # noqa: BLE001 - a __reduce__ of a user may raise anything
        outcome = ("error", f"the result of rank {rank} cannot be pickled: {error}\n{traceback.format_exc()}")
        save(outcome, paths.result_pickle)
    mark_end(marker, ok=outcome[0] == "success")
    if outcome[0] != "success":
        print(outcome[1], file=sys.stderr, flush=True)
    return 0 if outcome[0] == "success" else 1


def _outcome(paths: JobPaths, rank: int) -> tuple[str, Any]:
    """("success", value) or ("error", traceback)."""
    try:
        submission = _load(paths.submitted_pickle)
        Interruption(paths, submission, rank).arm()
        return "success", submission.result()
    except HybridschedError as error:
        return "error", f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - also sys.exit of a function is an end without a value
        return "error", traceback.format_exc()


def _load(path: Path) -> DelayedSubmission:
    end = time.monotonic() + _SUBMISSION_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes a network file system look again
    submission = load_own(path)
    if not hasattr(submission, "_timeout_countdown"):
        raise UncompletedJobError(f"{path}: is not a submission")
    return submission  # type: ignore[no-any-return]


def _tell(message: str) -> None:
    """To stderr past Python's buffers, for signal handlers."""
    os.write(2, f"hybridsched: {message}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
