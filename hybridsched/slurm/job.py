"""A submitted function: the submitit job of several components, and the watcher all such jobs share.

Owns: when a job is over, what came out of every rank, and what is told when something went wrong. The rest (paths,
sub-jobs, awaitables, pickling) is submitit's.

Invariants
    Success is a marker and a result of every rank (`rank` writes them); COMPLETED alone is never believed: `state`
    says FAILED when a rank left none.
    An exception is that of the rank that failed first, not that of the lowest rank.
    A job nobody knows any more (purged, accounting off) is over after `GONE_AFTER_S`; a Slurm that cannot be asked
    changes nothing, and `wait` ends with DeadlineExceeded when that lasts longer than `SILENT_AFTER_S`.
    Pickles are loaded only when this user owns them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from submitit.core.core import R
from submitit.core.utils import FailedJobError, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from hybridsched.errors import DeadlineExceeded, FaultError, UserError
from hybridsched.slurm import admission
from hybridsched.slurm.commands import call
from hybridsched.slurm.pickles import end_of, load_own, marker_of
from hybridsched.slurm.state import HOPELESS, TERMINAL, states_of

GONE = "GONE"  #: state of a job Slurm has forgotten
GONE_AFTER_S = 30.0
SILENT_AFTER_S = 900.0
HOPELESS_AFTER_S = 60.0

_POLL_S = 1.0
_SHARED_FILES_S = 15.0  # a network file system may show a file that late
_TAIL = 40  # lines of stderr in a message


class HetWatcher(SlurmInfoWatcher):
    """States of all jobs of this process, by one squeue call; scontrol and sacct for what that leaves out."""

    def __init__(self, delay_s: int = 15, ask: Callable[..., Any] = call) -> None:
        super().__init__(delay_s=delay_s)
        self._ask = ask
        self._unknown_since: dict[str, float] = {}
        self.silent_since: float | None = None  #: since when Slurm has not answered (monotonic)

    def register_job(self, job_id: str) -> None:
        """Follow a job. What was known under its id is forgotten: another cluster may count the same numbers."""
        super().register_job(job_id)
        self._finished.discard(job_id)
        self._info_dict.pop(job_id, None)
        self._unknown_since.pop(job_id, None)

    def update(self) -> None:
        """Ask once about every job that is not over."""
        wanted = self._registered - self._finished
        if not wanted:
            return
        self._num_calls += 1
        now = time.monotonic()
        try:
            found = states_of(wanted, self._ask)
        except FaultError:
            self.silent_since = self.silent_since or now
            self._last_status_check = time.time()
            return
        self.silent_since = None
        for job_id in wanted:
            self._note(job_id, found.get(job_id), now)
        self._last_status_check = time.time()
        self._finished |= {job_id for job_id in wanted if self.is_done(job_id, mode="cache")}

    def _note(self, job_id: str, found: Any, now: float) -> None:
        if found is None:
            since = self._unknown_since.setdefault(job_id, now)
            state = GONE if now - since >= GONE_AFTER_S else "UNKNOWN"
            self._info_dict[job_id] = {**self._info_dict.get(job_id, {}), "State": state}
            return
        self._unknown_since.pop(job_id, None)
        self._info_dict[job_id] = {
            "JobID": job_id,
            "State": found.state,
            "NodeList": found.nodes,
            "Reason": found.reason,
            "Hopeless": found.hopeless or "",
            "Told": found.told(),
        }

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job is over: a terminal state, or forgotten by Slurm."""
        state = self.get_state(job_id, mode=mode).upper()
        return state in TERMINAL or state == GONE


class HetSlurmJob(SlurmJob[R]):
    """A function running on the ranks of one or several components. One id (the leader's) stands for all of them.

    Everything submitit users know works: `result`, `results`, `exception`, `done`, `wait`, `cancel`, `stdout`,
    `stderr`, `task(rank)`, `awaitable`. Added: `checkpoint`, `clean`, bounds for `wait`.
    """

    watcher = HetWatcher()
    clean_when_collected = False  #: remove pickles once results or an exception were handed out

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Slurm's word for the whole job; COMPLETED only when every rank left a result."""
        state = str(super().state)
        if state == "COMPLETED" and not all(self._ends().values()):
            return "FAILED"
        return state

    def done(self, force_check: bool = False) -> bool:
        """Whether the job is over: every rank left a result, a rank failed, or Slurm says so."""
        if self._is_collected:
            return True
        ends = list(self._ends().values())
        hurry = force_check or any(end is not None for end in ends)
        state = self.watcher.get_state(self.job_id, mode="force" if hurry else "standard").upper()
        if state in TERMINAL or state == GONE:
            return True
        if state in ("PENDING", "REQUEUED"):
            return False  # a requeued job: files of the earlier start prove nothing
        return None not in ends or False in ends

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the job is over.

        Ends by itself with the job. Raises DeadlineExceeded after ``timeout_s`` or when Slurm does not answer for
        `SILENT_AFTER_S`, UserError when the job waits in the queue for something that will not come. The job is left
        as it is.
        """
        begun = time.monotonic()
        hopeless_since: float | None = None
        while not self.done():
            now = time.monotonic()
            if timeout_s is not None and now - begun > timeout_s:
                raise DeadlineExceeded(f"job {self.job_id} is {self.state} after {timeout_s:g} s; it was left as it is")
            self._require_answers(now)
            reason = self.watcher.get_info(self.job_id, mode="cache").get("Reason", "")
            pending = self.watcher.get_state(self.job_id, mode="cache") == "PENDING"
            hopeless_since = (hopeless_since or now) if pending and reason in HOPELESS else None
            if hopeless_since is not None and now - hopeless_since > HOPELESS_AFTER_S:
                raise UserError(
                    f"job {self.job_id} waits for something that will not come ({reason}); cancel it with: scancel "
                    f"{self.job_id}"
                )
            time.sleep(_POLL_S)

    def _require_answers(self, now: float) -> None:
        since = self.watcher.silent_since
        if since is not None and now - since > SILENT_AFTER_S:
            raise DeadlineExceeded(
                f"Slurm has not answered for {now - since:.0f} s; job {self.job_id} is left as it is"
            )

    # --- what came out --------------------------------------------------------------------------------------------

    def results(self) -> list[R]:
        """Values of all ranks, in order. Waits; raises the exception of the rank that failed first."""
        error = self.exception()
        if error is not None:
            raise error
        return [value for _outcome, value in self._collected().values()]

    def result(self) -> R:
        """The value of the only rank. Raises TypeError when there are several (see `results`, `task`)."""
        if self._sub_jobs:
            raise TypeError(f"job {self.job_id} has {self.num_tasks} ranks: use results(), or task(rank).result()")
        return self.results()[0]

    def exception(self) -> UncompletedJobError | FailedJobError | None:
        """Waits; what went wrong, None when nothing did."""
        self.wait()
        outcomes = self._collected()
        failed = [rank for rank, (outcome, _) in outcomes.items() if outcome == "error"]
        if failed:
            return self._failed(min(failed, key=lambda rank: self._mtimes[rank]), failed)
        missing = [rank for rank in self._ranks() if rank not in outcomes]
        return self._uncompleted(missing) if missing else None

    def clean(self) -> None:
        """Remove the pickles of this job; what was collected before stays available in this object.

        Raises RuntimeError while the job runs.
        """
        if not self.done():
            raise RuntimeError(f"job {self.job_id} still needs its pickles; cancel it first")
        self._collected()
        for path in [self.paths.submitted_pickle, *self._result_files()]:
            path.unlink(missing_ok=True)

    # --- asking for things ----------------------------------------------------------------------------------------

    def cancel(self, check: bool = True) -> None:
        """End all components. check: raise UserError when Slurm refuses."""
        try:
            admission.cancel(self.job_id)
        except (UserError, FaultError):
            if check:
                raise

    def checkpoint(self) -> None:
        """Let rank 0 checkpoint and put the job back into the queue, as near the time limit."""
        admission.signal(self.job_id, "USR2")

    def _interrupt(self, timeout: bool = False) -> None:
        if not timeout:
            admission.signal(self.job_id, "TERM")
        self.checkpoint()

    # --- files ----------------------------------------------------------------------------------------------------

    @property
    def _is_collected(self) -> bool:
        return "_outcomes" in self.__dict__

    def _ranks(self) -> tuple[int, ...]:
        return self._tasks

    def _result_files(self) -> list[Path]:
        jobs = self._sub_jobs or [self]
        return [Path(job.paths.result_pickle) for job in jobs]

    def _collected(self) -> dict[int, tuple[str, Any]]:
        """Outcomes of the ranks that left one; read once the job is over, then kept."""
        if not self._is_collected:
            self._await_files()
            outcomes: dict[int, tuple[str, Any]] = {}
            self._mtimes: dict[int, float] = {}
            for rank, path in zip(self._ranks(), self._result_files(), strict=True):
                if self._ends()[rank] is None:
                    continue
                if not path.exists():
                    raise UserError(f"{path}: is gone; the results of job {self.job_id} were collected before")
                self._mtimes[rank] = path.stat().st_mtime
                outcomes[rank] = load_own(path)
            self._outcomes = outcomes
            if self.clean_when_collected and len(self._tasks) == self.ranks_of_job:
                self.clean()
        return self._outcomes

    @property
    def ranks_of_job(self) -> int:
        """Ranks of the whole job, also for the sub-job of one rank."""
        return int(self.__dict__.get("_ranks_of_job", len(self._tasks)))

    def _await_files(self) -> None:
        """A job that completed has left files, though a network file system may show them late."""
        end = time.monotonic() + _SHARED_FILES_S
        while (
            str(super().state) == "COMPLETED"
            and None in self._ends().values()
            and False not in self._ends().values()
            and time.monotonic() < end
        ):
            time.sleep(_POLL_S)

    def _ends(self) -> dict[int, bool | None]:
        """Whether each rank succeeded; None: it has not said anything."""
        folder = Path(self.paths.folder)
        return {rank: end_of(marker_of(folder, self.job_id, rank)) for rank in self._ranks()}

    # --- messages -------------------------------------------------------------------------------------------------

    def _failed(self, rank: int, failed: list[int]) -> FailedJobError:
        others = [one for one in failed if one != rank]
        also = f" (ranks {others} failed after it)" if others else ""
        job = self.task(rank) if self._sub_jobs else self
        return FailedJobError(
            f"rank {rank} of job {self.job_id} failed{also}:\n{self._outcomes[rank][1]}\n"
            f"logs: {job.paths.stderr}, {job.paths.stdout}"
        )

    def _uncompleted(self, missing: list[int]) -> UncompletedJobError:
        told = self.watcher.get_info(self.job_id, mode="cache").get("Told", super().state)
        job = self.task(missing[0]) if self._sub_jobs else self
        lines = (job._get_logs_string("stderr") or "").splitlines()[-_TAIL:]
        said = "\n".join(["stderr:", *lines]) if lines else f"it wrote nothing to {job.paths.stderr}"
        batch = self.paths.folder / f"{self.job_id}_batch.log"
        return UncompletedJobError(
            f"job {self.job_id} ended without a result of ranks {missing}; Slurm says {told}\n"
            f"rank {missing[0]}: {said}\nlog of the job script: {batch}"
        )
