"""A whole run as a Slurm job: its submission, and the run afterwards.

    run = submit_run(load_config("run.yaml"))
    run.wait()                      # returns how it ended; bounded by the job's own life, or by timeout_s
    run.state(), run.report(), run.cancel()

In the run folder: ``config/site.yaml`` (the profile of this submission), ``slurm/jobs.json`` (every job of this run),
``slurm/JOB_submission.sh``, ``slurm/JOB_batch.log``.

Owns: `jobs.json`, and the judgement how a submitted run ended. What a run asks for is the matter of `request`.

Invariants
    What can be checked on a login node is checked before the run folder is touched; a refused submission leaves
    neither a job nor a half-made folder.
    A run succeeded when its own result says so: COMPLETED without a result is a failure.
    A result counts only when the start that left it came after the submission.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridsched.config.checks import not_available
from hybridsched.config.schema import RunConfig
from hybridsched.errors import (
    ConfigError,
    DeadlineExceeded,
    FaultError,
    Interrupted,
    RequeueRequested,
    RunFolderError,
    UserError,
)
from hybridsched.runtime.adapters.attempt import Ending, read_result
from hybridsched.runtime.prepare import prepare, read_run
from hybridsched.slurm import admission
from hybridsched.slurm.commands import Call, call
from hybridsched.slurm.launch_loop import judge
from hybridsched.slurm.request import RunRequest, request_of
from hybridsched.slurm.sites import SiteProfile, load_site, site_yaml
from hybridsched.slurm.state import JobState, detailed, states_of

GONE_AFTER_S = 30.0  #: of not being known to Slurm, after which a job is over
SILENT_AFTER_S = 900.0  #: of Slurm not answering, after which `SlurmRun.wait` gives up

_JOBS_FILE = "jobs.json"
_FIRST_LOOK_S, _LOOK_S = 1.0, 15.0
_TAIL_LINES = 10
_RESULT_S = 15.0  # a network file system may show the result that late


def prepare_here(config: RunConfig) -> Path:
    """Lay out the folder of a run whose rendered script was handed to sbatch; called inside the job. Returns it.

    Raises ConfigError, DataError, RunFolderError.
    """
    folder = prepare(config, resume=False).folder
    (folder / "config" / "site.yaml").write_text(site_yaml(load_site(config.slurm.site)), encoding="utf-8")
    return folder


# --- submitting -------------------------------------------------------------------------------------------------------


def submit_run(
    config: RunConfig,
    *,
    resume: bool = False,
    force: bool = False,
    site: SiteProfile | None = None,
    ask: Call = call,
) -> SlurmRun:
    """Check, lay out the run folder, submit. resume: go on from the newest checkpoint; force: replace a run.

    Raises ConfigError, DataError, RunFolderError, UserError (with Slurm's reason); then nothing was submitted.
    """
    request = require_submittable(config, site=site, ask=ask)
    if resume or force:
        _require_no_job(request.folder, ask)
    folder = prepare(config, resume=resume, force=force).folder.absolute()
    try:
        run = SlurmRun(folder, _send(request, folder, ask), last_attempt(folder), ask=ask)
        _record(run, request)
        with contextlib.suppress(FaultError):  # the job is in; whoever follows it will tell that Slurm is silent
            admission.require_startable(run.job_id, request.components, ask)
    except UserError:
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)  # made a moment ago; in the way of the next submission
        raise
    return run


def require_submittable(config: RunConfig, *, site: SiteProfile | None = None, ask: Call = call) -> RunRequest:
    """What a run asks for, when Slurm could start it. Touches no run folder. Raises ConfigError, UserError."""
    if config.launcher != "slurm":
        raise ConfigError("launcher: is local -> set launcher: slurm to submit (or start it here: hybridsched run)")
    if problems := not_available(config):
        raise ConfigError("this run cannot be started:\n- " + "\n- ".join(problems))
    request = request_of(config, site, ask)
    with tempfile.TemporaryDirectory(prefix="hybridsched-") as name:
        script = Path(name) / "job.sh"
        script.write_text(request.script(), encoding="utf-8")
        admission.require_possible(script, request.components, ask)
    return request


def _send(request: RunRequest, folder: Path, ask: Call) -> str:
    home = folder / "slurm"
    home.mkdir(exist_ok=True, mode=0o700)
    (folder / "config" / "site.yaml").write_text(site_yaml(request.site), encoding="utf-8")
    script = home / "job.sh"
    script.write_text(request.script(), encoding="utf-8")
    script.chmod(0o700)
    job_id = admission.send(script, ask)
    script.rename(home / f"{job_id}_submission.sh")
    return job_id


def _require_no_job(folder: Path, ask: Call) -> None:
    """Raise UserError while a job of this run may still write in the folder."""
    for entry in read_jobs(folder):
        job_id = str(entry["job_id"])
        found = states_of([job_id], ask).get(job_id)
        if found is not None and not found.is_over:
            raise UserError(
                f"{folder}: job {job_id} of this run is {found.told()}; wait for it (hybridsched watch {folder}) or "
                f"cancel it first (hybridsched cancel {folder})"
            )


# --- the record in the run folder -------------------------------------------------------------------------------------


def _record(run: SlurmRun, request: RunRequest) -> None:
    entry = {
        "job_id": run.job_id,
        "after_attempt": run.after_attempt,
        "roles": request.roles,
        "components": [asdict(one) for one in request.components],
        "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = run.folder / "slurm" / _JOBS_FILE
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps([*read_jobs(run.folder), entry], indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_jobs(folder: Path) -> list[dict[str, Any]]:
    """Every job of this run, the newest last; [] when it was never submitted. Raises RunFolderError when damaged."""
    path = folder / "slurm" / _JOBS_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [entry for entry in data if isinstance(entry["job_id"], str)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path}: cannot be read ({error}); look for the job with: squeue --me") from error


def last_attempt(folder: Path) -> int:
    """Number of the newest start of the run; 0 before the first one."""
    parent = folder / "attempts"
    numbers = [int(entry.name) for entry in os.scandir(parent) if entry.name.isdigit()] if parent.is_dir() else []
    return max(numbers, default=0)


def run_in(folder: Path, ask: Call = call) -> SlurmRun:
    """The newest submission of the run in this folder. Raises RunFolderError when there is none."""
    read_run(folder)
    jobs = read_jobs(folder)
    if not jobs:
        raise RunFolderError(f"{folder}: was not submitted to Slurm (no slurm/{_JOBS_FILE}); a local run has no job")
    newest = jobs[-1]
    return SlurmRun(folder.absolute(), newest["job_id"], int(newest.get("after_attempt", 0)), ask=ask)


# --- a submitted run --------------------------------------------------------------------------------------------------

OnLook = Callable[["JobState | None"], None]


class SlurmRun:
    """A run that was submitted. ``after_attempt``: number of the newest start before this submission."""

    def __init__(
        self,
        folder: Path,
        job_id: str,
        after_attempt: int = 0,
        *,
        ask: Call = call,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.job_id, self.after_attempt = folder, job_id, after_attempt
        self._ask, self._sleep, self._now = ask, sleep, now

    def __repr__(self) -> str:
        return f"SlurmRun(job_id={self.job_id!r}, folder={str(self.folder)!r})"

    def state(self) -> JobState | None:
        """What Slurm says; None when it does not know the job. Raises FaultError when it does not answer."""
        return states_of([self.job_id], self._ask).get(self.job_id)

    def cancel(self) -> None:
        """End the job at once; what was durable is kept. See `stop` for an orderly end."""
        admission.cancel(self.job_id, self._ask)

    def stop(self) -> None:
        """Ask a running job to write a checkpoint and end for good (`batch_main` does so on INT). Does not wait."""
        admission.signal(self.job_id, "INT", self._ask, batch=True)

    def ending(self) -> Ending | None:
        """The result the run itself left; None when there is none of this submission (yet)."""
        newest = last_attempt(self.folder)
        return read_result(self.folder / "attempts" / str(newest)) if newest > self.after_attempt else None

    def wait(
        self, timeout_s: float | None = None, on_look: OnLook = lambda _state: None, look_s: float = _LOOK_S
    ) -> Ending:
        """Wait until the job is over; returns how the run ended (exit code 0: well).

        Ends with the job. Raises DeadlineExceeded after ``timeout_s``, or when Slurm does not answer for
        `SILENT_AFTER_S`; the job is left as it is. on_look: called with what Slurm says at each look. look_s: longest
        pause between two looks.
        """
        begun = self._now()
        unknown_since: float | None = None
        silent_since: float | None = None
        pause = _FIRST_LOOK_S
        while True:
            now = self._now()
            try:
                found = self.state()
                silent_since = None
                on_look(found)
            except FaultError as error:
                silent_since = silent_since if silent_since is not None else now
                if now - silent_since > SILENT_AFTER_S:
                    raise DeadlineExceeded(f"{error}; given up, job {self.job_id} is left as it is") from error
            else:
                if found is not None and found.is_over:
                    return self.conclude(found)
                unknown_since = (unknown_since if unknown_since is not None else now) if found is None else None
                if unknown_since is not None and now - unknown_since >= GONE_AFTER_S:
                    return self.conclude(None)
            if timeout_s is not None and now - begun >= timeout_s:
                raise DeadlineExceeded(
                    f"job {self.job_id} is not over after {timeout_s:g} s; it was left as it is. Follow it with: "
                    f"hybridsched watch {self.folder}"
                )
            self._sleep(pause)
            pause = min(look_s, pause * 1.5)

    def conclude(self, found: JobState | None) -> Ending:
        """How a run whose job is over ended: what it says itself, else why there is no result."""
        end = self._now() + _RESULT_S
        while (ending := self.ending()) is None and found is not None and found.state == "COMPLETED":
            if self._now() >= end:
                break
            self._sleep(_FIRST_LOOK_S)
        if ending is not None:
            return self._of_job(ending)
        return self._without_result(detailed(self.job_id, self._ask) or found)

    def _of_job(self, ending: Ending) -> Ending:
        """The ranks are only told to stop; whether that was to start anew or for good, the job script knows."""
        if ending.exit_code != RequeueRequested.exit_code:
            return ending
        found = detailed(self.job_id, self._ask)
        code = found.components[0].exit_code.partition(":")[0] if found is not None else ""
        if code != str(Interrupted.exit_code):
            return ending
        return Ending(Interrupted.exit_code, Interrupted.__name__, "stopped on request, with a checkpoint")

    def report(self) -> dict[str, Any]:
        """Write ``report.html`` into the run folder; returns the figures of `hybridsched report --json`.

        Of what is there now, also while the run goes on. Raises RunFolderError before there is a run log.
        """
        from hybridsched.report import summarize, write_html

        write_html(self.folder, self.folder / "report.html")
        return summarize(self.folder)

    @property
    def log(self) -> Path:
        """What the job script and the launch loop said."""
        return self.folder / "slurm" / f"{self.job_id}_batch.log"

    def _without_result(self, found: JobState | None) -> Ending:
        """Never a success. What agents said of themselves comes first, then what Slurm and the job script say."""
        newest, own = last_attempt(self.folder), None
        if newest > self.after_attempt:
            own = judge(self.folder / "attempts" / str(newest), None, stopped=False)
            if own.exit_code == 0:
                return own  # the result has come after all
        told = "nothing any more (it does not know the job)" if found is None else found.told()
        parts = found.components if found is not None else ()
        codes = [f"component {one.offset}: {one.exit_code}" for one in parts if one.exit_code]
        exits = f" (exit codes {', '.join(codes)})" if codes else ""
        text = f"job {self.job_id} is over, but the run left no result; Slurm says {told}{exits}"
        lines = [text, *([own.text] if own is not None else []), f"log of the job script: {self.log}", *self._tail()]
        code = own.exit_code if own is not None else FaultError.exit_code
        return Ending(code, own.kind if own is not None else "FaultError", "\n".join(lines))

    def _tail(self) -> list[str]:
        """Last lines of the job script's log, indented; [] when there is none."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        return [f"    {line}" for line in lines[-_TAIL_LINES:]]
