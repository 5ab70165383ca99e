"""HetSlurmExecutor: any function on the ranks of one or several Slurm components, as a submitit executor.

    executor = HetSlurmExecutor("runs/a", components=[{"nodes": 2, "partition": "trn"}, {"nodes": 4}])
    job = executor.submit(function, x)      # every rank calls function(x)
    job.results()                           # one value a rank; ranks count through the components in their order

Owns: what is written and called at a submission. Invariants: a submission that fails leaves no file and no job; a job
Slurm can never start is refused before it waits; folder and pickles are readable by their owner only.

Inside the function `submitit.JobEnvironment()` tells rank, world size and hosts (in the order of ranks), the variable
HYBRIDSCHED_COMPONENT the number of the component.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit.core.core import Job, R
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmExecutor

from hybridsched.errors import ConfigError, UserError
from hybridsched.slurm import admission
from hybridsched.slurm.components import Component, components_of, minutes_of
from hybridsched.slurm.job import HetSlurmJob
from hybridsched.slurm.pickles import save
from hybridsched.slurm.sbatch import AGENT_SIGNAL, JobOptions, components_lines, log_pattern, render_executor
from hybridsched.slurm.sites import SiteProfile, load_site

_SHARED = ("components", "time", "job_name", "setup", "teardown", "srun_args", "signal_delay_s", "requeue")
_SUBMITIT_NAMES = {"name": "job_name", "timeout_min": "time", "tasks_per_node": "ntasks_per_node", "mem_gb": "mem"}
_GIB = 1 << 30
_RANK_MODULE = "hybridsched.slurm.rank"


class HetSlurmExecutor(SlurmExecutor):
    """Submits functions as (heterogeneous) Slurm jobs. See the module's docstring.

    folder: shared by all nodes; scripts, logs (`JOB_RANK_log.out`) and pickles go there. components: keywords of
    `Component` each; one gives a plain job. site: profile, name or path; None: as `load_site`. time: minutes or text,
    for components without their own. signal_delay_s: seconds before the time limit at which rank 0 checkpoints.
    setup, teardown: shell lines around the step, as they are. python: interpreter on the nodes, None: the site's.
    clean: remove a job's pickles once its results were collected. Raises ConfigError, UserError.
    """

    job_class = HetSlurmJob

    def __init__(
        self,
        folder: str | os.PathLike[str],
        components: Sequence[Component | Mapping[str, Any]] = ({},),
        *,
        site: SiteProfile | str | os.PathLike[str] | None = None,
        time: int | str = 60,
        job_name: str = "hybridsched",
        signal_delay_s: int = 90,
        requeue: bool = True,
        setup: Sequence[str] = (),
        teardown: Sequence[str] = (),
        srun_args: Sequence[str] = (),
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        clean: bool = True,
    ) -> None:
        if "%" in os.fspath(folder):
            raise ConfigError(f"folder: {os.fspath(folder)!r} has a percent sign, a pattern to sbatch; rename it")
        if self.affinity() < 0:
            raise UserError("srun: not found; functions are submitted on a login node of a Slurm cluster")
        super().__init__(Path(folder), max_num_timeout=max_num_timeout, max_pickle_size_gb=max_pickle_size_gb)
        self.site = site if isinstance(site, SiteProfile) else load_site(site)
        self.rank_python = python
        self.clean = clean
        self.parameters = {
            "components": components_of(components),
            "time": time,
            "job_name": job_name,
            "signal_delay_s": signal_delay_s,
            "requeue": requeue,
            "setup": list(setup),
            "teardown": list(teardown),
            "srun_args": list(srun_args),
        }
        self._script("true")  # what cannot be is said here, not at the first submission

    @property
    def components(self) -> tuple[Component, ...]:
        """What is asked for now."""
        found: tuple[Component, ...] = self.parameters["components"]
        return found

    # --- what submitit users know ---------------------------------------------------------------------------------

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {*_SHARED, *Component.__dataclass_fields__, *_SUBMITIT_NAMES}

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        """submitit's generic names; memory in GB becomes text."""
        found = {_SUBMITIT_NAMES.get(key, key): value for key, value in params.items()}
        if "mem_gb" in params:
            found["mem"] = f"{round(float(params['mem_gb']) * 1024)}M"
        return found

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Change parameters; those of a component (partition, nodes, mem_gb, ...) are changed in all of them."""
        given = self._convert_parameters(kwargs)
        if unknown := sorted(set(given) - self._valid_parameters()):
            raise ConfigError(f"{', '.join(unknown)} unknown; known are {', '.join(sorted(self._valid_parameters()))}")
        before = dict(self.parameters)
        shared = {key: value for key, value in given.items() if key in _SHARED and key != "components"}
        own = {key: value for key, value in given.items() if key not in _SHARED}
        components = components_of(given.get("components", self.components))
        changed = [{**_values(one), **own} for one in components]
        self.parameters = {**before, **shared, "components": components_of(changed)}
        try:
            self._script("true")
        except ConfigError:
            self.parameters = before
            raise

    @contextmanager
    def batch(self, allow_implicit_submissions: bool = False) -> Iterator[None]:
        """Refused: a batch is a job array, and Slurm has no arrays of heterogeneous jobs."""
        raise NotImplementedError(
            "batch() makes a job array, and Slurm refuses --array in heterogeneous jobs; submit one by one"
        )
        yield

    def submit(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> HetSlurmJob[R]:
        """Every rank calls ``fn(*args, **kwargs)``. Raises UserError with the reason when Slurm cannot run it."""
        (job,) = self._internal_process_submissions([DelayedSubmission(fn, *args, **kwargs)])
        assert isinstance(job, HetSlurmJob)
        return job

    # --- a submission ---------------------------------------------------------------------------------------------

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        if len(delayed_submissions) != 1:
            raise NotImplementedError(
                f"{len(delayed_submissions)} functions at once are a job array, and Slurm refuses --array in "
                "heterogeneous jobs; submit them one by one"
            )
        self._require_sure_order()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        pickle_path = self.folder / f"{uuid.uuid4().hex}.pkl"
        try:
            self._pickle(delayed_submissions[0], pickle_path)
            job = self.submit_script(self._script(self._rank_command()))
            job.paths.move_temporary_file(pickle_path, "submitted_pickle")
        finally:
            pickle_path.unlink(missing_ok=True)
        return [job]

    def _require_sure_order(self) -> None:
        """Ranks are numbered through the components, so their order is the caller's to change. Raises UserError."""
        order = admission.sure_order(self.components, self.site.mpi)
        if order != list(range(len(order))):
            raise UserError(
                f"PMIx of this Slurm (before 23.02.2) starts these components only in the order {order} (by the "
                "names of their nodes): list them so, or use mpi: pmi2 in the site profile"
            )

    def submit_script(self, text: str) -> HetSlurmJob[Any]:
        """Submit a script whose components are those of this executor; it is kept as ``JOB_submission.sh``.

        Raises UserError with Slurm's reason; then no file and no job is left.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        script = self.folder / f"submission-{uuid.uuid4().hex}.sh"
        try:
            script.write_text(text, encoding="utf-8")
            script.chmod(0o700)
            admission.require_possible(script, self.components)
            job_id = admission.send(script)
            script.rename(JobPaths(self.folder, job_id=job_id).submission_file)
        finally:
            script.unlink(missing_ok=True)
        admission.require_startable(job_id, self.components)
        return self._job(job_id)

    def _job(self, job_id: str) -> HetSlurmJob[Any]:
        job: HetSlurmJob[Any] = self.job_class(self.folder, job_id, tasks=list(range(self._num_tasks())))
        for one in (job, *job._sub_jobs):
            one.__dict__["clean_when_collected"] = self.clean
            one.__dict__["_ranks_of_job"] = self._num_tasks()
        return job

    def _pickle(self, submission: DelayedSubmission, path: Path) -> None:
        minutes = [one.minutes or minutes_of(self.parameters["time"]) for one in self.components]
        submission.set_timeout(min((one for one in minutes if one is not None), default=0), self.max_num_timeout)
        save(submission, path)
        size = path.stat().st_size
        if size > self.max_pickle_size_gb * _GIB:
            raise ConfigError(
                f"function and arguments are {size / _GIB:.2f} GB when pickled, more than max_pickle_size_gb "
                f"({self.max_pickle_size_gb:g}): pass the path of a file instead, or raise it"
            )

    def _num_tasks(self) -> int:
        return sum(one.tasks for one in self.components)

    def _rank_command(self) -> list[str]:
        return [self.rank_python or self.site.agent_python(), "-u", "-m", _RANK_MODULE, str(self.folder)]

    def _script(self, command: str | list[str]) -> str:
        settings = self.parameters
        job = JobOptions(
            name=settings["job_name"],
            log=log_pattern(self.folder, "%j_batch.log"),
            signal=f"{AGENT_SIGNAL}@{int(settings['signal_delay_s'])}",
            requeue=bool(settings["requeue"]),
        )
        return render_executor(
            components_lines(self.components, self.site, job, settings["time"]),
            self.components,
            self.site,
            folder=self.folder,
            command=[command] if isinstance(command, str) else command,
            srun_args=settings["srun_args"],
            setup=settings["setup"],
            teardown=settings["teardown"],
        )


def _values(component: Component) -> dict[str, Any]:
    return {name: getattr(component, name) for name in Component.__dataclass_fields__}
