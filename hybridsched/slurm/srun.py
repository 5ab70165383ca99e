"""Steps inside a Slurm job: one srun over all components, one node agent a node.

Owns: srun's command line, the attempt's table of nodes, the signs of life of a step whose processes cannot be seen,
and what a failed attempt means for the next one: fewer rollout nodes, or the job has to start anew.

Invariants
    One step, one MPI world: a segment a component, each with the exact nodes that are to be used.
    --kill-on-bad-exit ends the step when an agent fails; --overlap lets the next step begin while Slurm still waits for
    a dead node of the last one. Agents end what an earlier attempt left on their node before they begin.
    The step's end is never waited for without a bound: srun itself may wait for a dead node.

Does not: judge endings (`launch_loop`), or find out which nodes are lost (`node_table`).
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hybridsched.config import derive, load_config, save_resolved
from hybridsched.config.loader import resolved_values
from hybridsched.config.schema import RunConfig
from hybridsched.errors import FaultError, Interrupted, RequeueRequested
from hybridsched.runtime.adapters import slurm
from hybridsched.runtime.adapters.attempt import (
    BEAT_LINE,
    AttemptInfo,
    Ending,
    new_attempt,
    read_agent,
    read_exits,
    write_attempt,
    write_wish,
)
from hybridsched.runtime.prepare import PreparedRun
from hybridsched.slurm.allocation import expand_hosts
from hybridsched.slurm.launch_loop import is_tried_again
from hybridsched.slurm.node_table import NodeTable
from hybridsched.slurm.sites import SiteProfile
from hybridsched.slurm.step_watch import Say
from hybridsched.slurm.steps import Child, OnLine, StepSpec

ATTEMPT_CONFIG = "config.yaml"  #: in the attempt's folder, when it has fewer nodes than the run

#: srun says at once which task ended badly, long before it ends itself.
_TASK_ENDED = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: ")
_TERM_S = 2.0  # srun kills the tasks at once, but may wait longer for a node that does not answer
_CANCEL_S = 10.0
_STEP_NAME = "hybridsched"


class SrunLauncher:
    """Implements `steps.Launcher` in a batch script."""

    def __init__(self, run: PreparedRun, site: SiteProfile, table: NodeTable, say: Say) -> None:
        self._run = run
        self._site = site
        self._table = table
        self._say = say
        self._config = run.config
        self._note = ""

    def check(self) -> None:
        """The script runs inside the job: srun is there."""

    def config(self) -> RunConfig:
        """With the nodes that are left."""
        return self._config

    @contextmanager
    def attempt(self, launch: str) -> Iterator[tuple[Path, AttemptInfo]]:
        """Agents make private folders on their own nodes: there is none here."""
        folder, info = new_attempt(self._run.folder.resolve(), self._run.run_id, launch, "", "")
        host = self._table.allocation.host
        info = replace(
            info,
            nodes=self._table.ranks(),
            batch_host=host,
            batch_address=self._table.address(host),
            can_requeue=self._site.requeue,
            note=self._note,
        )
        if self._config is not self._run.config:
            path = folder / ATTEMPT_CONFIG
            save_resolved(self._config, path, derive(self._config))
            info = replace(info, config=str(path.relative_to(self._run.folder.resolve())))
        write_attempt(folder, info)
        yield folder, info

    def command(self, what: StepSpec) -> list[str]:
        """srun with a segment for each component."""
        agent = self._site.inside_container(what.agent(self._site.agent_python()))
        groups = [group for group in self._table.allocation.groups if self._table.usable(group.role)]
        command = ["srun"]
        for group in groups:
            nodes = self._table.usable(group.role)
            het = [f"--het-group={group.index}"] if len(self._table.allocation.groups) > 1 else []
            count = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
            where = [*count, f"--nodelist={','.join(nodes)}", *self._gpus(group.role)]
            rules = ["--kill-on-bad-exit=1", "--overlap", "--mem=0", "--cpu-bind=none", f"--job-name={_STEP_NAME}"]
            command += [":"] * (command != ["srun"])
            command += [*het, *where, *rules, *self._site.step_arguments(), *agent]
        return command

    def _gpus(self, role: str) -> list[str]:
        """As the component asked for them (`submission`): none where everything computes on cores."""
        config = self._run.config
        if config.trainer.device == "cpu":
            return []
        if role == "trainer":
            return self._site.gpu_option(config.trainer.n_gpus_per_node, config.slurm.trainer.gres)
        return self._site.gpu_option(config.rollout.n_gpus_per_node, config.slurm.rollout.gres)

    def start(self, what: StepSpec, on_line: OnLine) -> SrunStep:
        """Start it."""
        silence_s = self._config.deadlines.agent_silence_s * self._config.deadlines.scale
        environment = {**step_variables(os.environ), **self._site.variables(), **what.marks, "PYTHONUNBUFFERED": "1"}
        jobs = tuple(group.job_id for group in self._table.allocation.groups)
        return SrunStep(what, self.command(what), environment, on_line, self._table.ranks(), jobs, silence_s)

    def after(self, ending: Ending, folder: Path) -> Ending:
        """After a failure, look at the nodes: go on with those that are left, or ask for a new start of the job."""
        if ending.kind == Interrupted.__name__:  # Slurm asked, and the run did not get so far as to say so
            return _anew(ending.text)
        if not is_tried_again(ending.exit_code) or ending.kind == "RunStalled":
            return ending
        look = self._table.look(self._not_started(folder))
        for node, why in look.lost.items():
            self._say(f"node {node} is lost: {why}")
        if look.verdict:
            return _anew(f"{look.verdict}; before: {ending.text}")
        if look.lost:
            self._go_on_without(tuple(look.lost), folder)
        return ending

    def resume_command(self) -> str:
        """For people."""
        return shlex.join(["hybridsched", "submit", str(self._run.folder / "config" / "resolved.yaml"), "--resume"])

    def _not_started(self, folder: Path) -> tuple[str, ...]:
        """Nodes whose agent never came up, when others did: a broken step is not taken for broken nodes."""
        nodes = self._table.ranks()
        missing = tuple(node for rank, node in enumerate(nodes) if read_agent(folder, rank) is None)
        explained = {ending.rank for ending in read_exits(folder)}
        unexplained = tuple(node for node in missing if nodes.index(node) not in explained)
        return unexplained if len(missing) < len(nodes) and not explained else ()

    def _go_on_without(self, lost: tuple[str, ...], folder: Path) -> None:
        left, planned = self._table.usable("rollout"), self._run.config.rollout.nnodes
        overrides = [f"rollout.nnodes={len(left)}"]
        self._config = load_config(None, overrides, base=resolved_values(self._run.config))
        self._note = f"{len(left)} of {planned} rollout nodes, without {', '.join(sorted(self._table.lost))}"
        self._say(f"going on with {self._note}")
        self._drop(lost, folder)

    def _drop(self, lost: tuple[str, ...], folder: Path) -> None:
        """Give lost nodes back, so that Slurm does not end the job when it finds out for itself.

        It would where the leader has one node only, whatever --no-kill says. The first node of a component cannot be
        given back; then Slurm requeues the job some time after, and the run resumes.
        """
        group = next(group for group in self._table.allocation.groups if group.role == "rollout")
        left = ",".join(self._table.usable("rollout"))
        update = ("scontrol", "update", f"JobId={group.job_id}", f"NodeList={left}")
        code, text = slurm.call(*update, cwd=folder / "logs")  # it leaves a script for shells, slurm_job_N_resize.sh
        if code != 0:
            self._say(f"{', '.join(lost)} stay in the job ({text}); Slurm may requeue it when it finds them lost")


def _anew(text: str) -> Ending:
    return Ending(RequeueRequested.exit_code, RequeueRequested.__name__, text)


def step_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """The batch script's environment, without requests of its own component that srun would take for the step's."""
    dropped = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_MEM_PER", "SLURM_EXACT")
    return {name: value for name, value in inherited.items() if not name.startswith(dropped)}


class SrunStep:
    """Implements `steps.Step`. Must be started from the main thread."""

    def __init__(
        self,
        what: StepSpec,
        command: list[str],
        environment: Mapping[str, str],
        on_line: OnLine,
        nodes: Sequence[str],
        jobs: Sequence[str],
        silence_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """nodes: by rank. jobs: ids of the components. silence_s: how long rank 0 may print no beat."""
        self._what = what
        self._nodes = nodes
        self._jobs = jobs
        self._failed: set[int] = set()
        self._on_line = on_line
        self._silence_s = silence_s
        self._now = now
        self._heard: float | None = None
        self._missing = list(range(what.ranks))
        self._child = Child(command, environment, self._line)

    @property
    def returncode(self) -> int | None:
        """Of srun; None while it runs. Proves nothing about the run."""
        return self._child.returncode

    def pump(self, timeout_s: float) -> None:
        """Wait for output or the end, at most so long, and hand on complete lines."""
        self._child.pump(timeout_s)

    def ask(self, number: signal.Signals) -> bool:
        """By a file, whatever the signal: srun would pass it on to every process of the step, workers as well."""
        if read_agent(self._what.attempt_folder, 0) is None or self._child.returncode is not None:
            return False
        write_wish(self._what.attempt_folder)
        return True

    def not_up(self) -> list[int]:
        """Ranks whose agent has not said so far who it is."""
        self._missing = [rank for rank in self._missing if read_agent(self._what.attempt_folder, rank) is None]
        return list(self._missing)

    def lost(self) -> list[int]:
        """Ranks that ended badly, as they or srun say, and rank 0 when its event loop is silent for too long."""
        failed = self._failed | {ending.rank for ending in read_exits(self._what.attempt_folder) if ending.exit_code}
        if self._heard is not None and self._now() - self._heard > self._silence_s:
            failed.add(0)
        return sorted(failed)

    def end(self) -> list[int]:
        """Kill the tasks and srun. Always returns []: what cannot be seen from here the next agents end."""
        if self._child.returncode is None:
            self._child.signal(signal.SIGTERM)  # srun: "forcing job termination", which is SIGKILL to the tasks
            self._child.wait(_TERM_S)
        self._cancel()
        left = [] if self._child.kill() else [self._child.pid]
        self._child.close()
        return left

    def _cancel(self) -> None:
        """A step that srun could not end, as far as Slurm still counts it. A dead node keeps it in the list."""
        jobs = ",".join(self._jobs)
        code, text = slurm.call("squeue", "-h", "-s", "-j", jobs, "-o", "%i %j", timeout_s=_CANCEL_S)
        steps = [line.split()[0] for line in text.splitlines() if line.endswith(f" {_STEP_NAME}")] if code == 0 else []
        if steps:
            slurm.call("scancel", "--signal=KILL", *steps, timeout_s=_CANCEL_S)

    def _line(self, line: str) -> None:
        if line == BEAT_LINE:
            self._heard = self._now()
        elif (found := _TASK_ENDED.match(line)) is not None:
            self._failed |= {self._nodes.index(node) for node in _hosts(found[1]) if node in self._nodes}
        self._on_line(line)


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return expand_hosts(text)
    except FaultError:
        return ()
