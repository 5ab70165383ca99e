"""A whole run as a Slurm job: what it asks for, its script, its submission, and the run afterwards.

    run = submit_run(load_config("run.yaml"))
    run.wait()                      # returns how it ended; bounded by the job's own life, or by timeout_s
    run.state(), run.report(), run.cancel()

In the run folder: ``config/site.yaml`` (the profile of this submission), ``slurm/jobs.json`` (every job of this run),
``slurm/JOB_submission.sh``, ``slurm/JOB_batch.log``.

Owns: the components of a run and their order, `jobs.json`, and the judgement how a submitted run ended.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridsched.config.checks import not_available
from hybridsched.config.derived import derive
from hybridsched.config.schema import ComponentConfig, RunConfig
from hybridsched.errors import ConfigError, DeadlineExceeded, FaultError, RunFolderError, UserError
from hybridsched.runtime.adapters.attempt import Ending, read_result
from hybridsched.runtime.prepare import prepare, read_run
from hybridsched.slurm import admission, words
from hybridsched.slurm.commands import Call, call
from hybridsched.slurm.components import PMIX_FIXED_IN, Component
from hybridsched.slurm.sbatch import AGENT_SIGNAL, JobOptions, components_lines, log_pattern, render_run
from hybridsched.slurm.sites import SiteProfile, load_site, site_yaml
from hybridsched.slurm.state import JobState, detailed, states_of

GONE_AFTER_S = 30.0  #: of not being known to Slurm, after which a job is over
SILENT_AFTER_S = 900.0  #: of Slurm not answering, after which `SlurmRun.wait` gives up

_JOBS_FILE = "jobs.json"
_FIRST_POLL_S, _LONGEST_POLL_S = 1.0, 15.0
_RESULT_S = 15.0  # a network file system may show the result that late


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a run asks Slurm for: components in the order of their het groups."""

    components: tuple[Component, ...]
    site: SiteProfile
    name: str
    time: str
    signal_before_end_s: int
    folder: Path
    working_folder: Path

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the components, in order."""
        return tuple(one.role for one in self.components)

    def script(self, prepare_command: Sequence[str] = ()) -> str:
        """The sbatch script. prepare_command: lays out the run folder inside the job, () when that was done."""
        home = self.working_folder if prepare_command else self.folder / "slurm"  # the log's folder has to be there
        job = JobOptions(
            name=self.name,
            log=log_pattern(home, f"{self.name}-%j.log" if prepare_command else "%j_batch.log"),
            signal=f"B:{AGENT_SIGNAL}@{self.signal_before_end_s}",
            requeue=self.site.requeue,
        )
        return render_run(
            components_lines(self.components, self.site, job, self.time),
            self.site,
            run_folder=self.folder,
            working_folder=self.working_folder,
            title=self.name,
            roles=self.roles,
            prepare=prepare_command,
        )


def request_of(config: RunConfig, site: SiteProfile | None = None, ask: Call | None = call) -> RunRequest:
    """What a run asks for. ask: how to reach Slurm, for the order of components; None: Slurm is not asked.

    Raises ConfigError for values that cannot stand in a script, UserError when no order of components is safe.
    """
    site = site if site is not None else load_site(config.slurm.site)
    folder = Path(derive(config).run_folder).absolute()
    components = [_component(config, "trainer")]
    if config.rollout.nnodes > 0:
        components.append(_component(config, "rollout"))
    return RunRequest(
        components=_ordered(components, site, ask),
        site=site,
        name=words.name(config.slurm.job_name or config.trainer.experiment_name, "slurm.job_name"),
        time=config.slurm.time,
        signal_before_end_s=config.slurm.signal_before_end_s,
        folder=folder,
        working_folder=Path.cwd(),
    )


def _component(config: RunConfig, role: str) -> Component:
    wanted: ComponentConfig = getattr(config.slurm, role)
    nodes = config.trainer if role == "trainer" else config.rollout
    on_cpu = config.trainer.device == "cpu"
    cores = wanted.cpus_per_task
    if cores is None and on_cpu:
        cores = nodes.n_gpus_per_node + 1
    return Component(
        nodes=nodes.nnodes,
        gpus_per_node=0 if on_cpu else nodes.n_gpus_per_node,
        role=role,
        partition=wanted.partition,
        account=wanted.account,
        qos=wanted.qos,
        constraint=wanted.constraint,
        reservation=wanted.reservation,
        cpus_per_task=cores,
        mem=wanted.mem,
        exclusive=wanted.exclusive,
        gres=wanted.gres,
        time=wanted.time,
        options=wanted.extra,
    )


def _ordered(components: list[Component], site: SiteProfile, ask: Call | None) -> tuple[Component, ...]:
    """Trainer first, but where an old Slurm starts MPI by PMIx: there by the names of the nodes (see `components`)."""
    if site.mpi != "pmix" or len(components) == 1 or ask is None:
        return tuple(components)
    found = admission.version(ask)
    if not found or found >= PMIX_FIXED_IN:
        return tuple(components)
    return tuple(components[index] for index in admission.pmix_order(components, ask))


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

OnChange = Callable[["JobState | None"], None]


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
        """End the job at once. For an orderly end send it TERM first (`hybridsched cancel` does)."""
        admission.cancel(self.job_id, self._ask)

    def ending(self) -> Ending | None:
        """The result the run itself left; None when there is none of this submission (yet)."""
        newest = last_attempt(self.folder)
        return read_result(self.folder / "attempts" / str(newest)) if newest > self.after_attempt else None

    def wait(self, timeout_s: float | None = None, on_look: OnChange = lambda _state: None) -> Ending:
        """Wait until the job is over; returns how the run ended (exit code 0: well).

        Ends with the job. Raises DeadlineExceeded after ``timeout_s``, or when Slurm does not answer for
        `SILENT_AFTER_S`; the job is left as it is. on_look: called with what Slurm says at each look.
        """
        begun = self._now()
        unknown_since: float | None = None
        silent_since: float | None = None
        pause = _FIRST_POLL_S
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
            pause = min(_LONGEST_POLL_S, pause * 1.5)

    def conclude(self, found: JobState | None) -> Ending:
        """How a run whose job is over ended: what it says itself, else why there is no result."""
        end = self._now() + _RESULT_S
        while (ending := self.ending()) is None and found is not None and found.state == "COMPLETED":
            if self._now() >= end:
                break
            self._sleep(_FIRST_POLL_S)
        if ending is not None:
            return ending
        return Ending(FaultError.exit_code, "FaultError", self._no_result(detailed(self.job_id, self._ask) or found))

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

    def _no_result(self, found: JobState | None) -> str:
        told = "nothing any more (it does not know the job)" if found is None else found.told()
        codes = [f"component {one.offset}: {one.exit_code}" for one in (found.components if found else ())]
        exits = f" (exit codes {', '.join(codes)})" if codes else ""
        return (
            f"job {self.job_id} is over, but the run left no result; Slurm says {told}{exits}\n"
            f"log of the job script: {self.log}"
        )
