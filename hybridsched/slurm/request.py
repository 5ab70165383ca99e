"""What a run asks Slurm for: its components, their order, its script. Pure, but for one question about node names.

Owns: how run.yaml becomes components. Trainer nodes are the first component, rollout nodes the second; a run without
rollout nodes is a plain job. Where an old Slurm starts MPI by PMIx the order follows the names of the nodes
(`components` tells why); the job learns its roles from HYBRIDSCHED_ROLES.

Does not: touch a run folder, or submit (`submission` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridsched.config.derived import derive
from hybridsched.config.schema import ComponentConfig, RunConfig
from hybridsched.slurm import admission, words
from hybridsched.slurm.commands import Call, call
from hybridsched.slurm.components import Component
from hybridsched.slurm.sbatch import AGENT_SIGNAL, JobOptions, components_lines, log_pattern, render_run
from hybridsched.slurm.sites import SiteProfile, load_site


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
    if ask is None:
        return tuple(components)
    return tuple(components[index] for index in admission.sure_order(components, site.mpi, ask))
