"""Steps in a Slurm job without one: the command, what agents are told, and what a failed attempt means for the next."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridsched.config import derive, load_config
from hybridsched.errors import ConfigError, FaultError
from hybridsched.runtime.adapters import slurm, slurm_step
from hybridsched.runtime.adapters.attempt import (
    BEAT_LINE,
    AttemptInfo,
    Ending,
    read_attempt,
    read_wish,
    write_agent,
    write_exit,
)
from hybridsched.runtime.plan import RunPlan
from hybridsched.runtime.prepare import PreparedRun, plan_of
from hybridsched.slurm import srun
from hybridsched.slurm.allocation import Allocation, Group
from hybridsched.slurm.batch_main import StatusLines, has_attempts, require_planned
from hybridsched.slurm.node_table import Asked, NodeTable
from hybridsched.slurm.sites import SiteProfile
from hybridsched.slurm.srun import SrunLauncher, SrunStep
from hybridsched.slurm.steps import StepSpec

EMULATED = ["actor_rollout_ref.actor.strategy=emulated", "actor_rollout_ref.rollout.name=emulated", "launcher=slurm"]


class Scene:
    """A launcher on trainer node t0 and rollout nodes g0, g1."""

    def __init__(self, folder: Path, *overrides: str, groups: Sequence[tuple[str, str]] | None = None) -> None:
        size = ["rollout.nnodes=2", "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=8"]
        config = load_config(None, [*EMULATED, *size, *overrides])
        derived = derive(config)
        (folder / "config").mkdir()
        self.run = PreparedRun(folder, "run-1", config, derived, plan_of(config, derived), False)
        wanted = groups if groups is not None else [("trainer", "t0"), ("rollout", "g0 g1")]
        made = [Group(role, i, str(i + 1), tuple(nodes.split())) for i, (role, nodes) in enumerate(wanted)]
        self.dead: list[str] = []
        asked = Asked(
            lambda _job: None,
            lambda nodes: {node: f"{node}:1" for node in nodes},
            lambda known: [node for node in known if node in self.dead],
        )
        self.said: list[str] = []
        self.site = SiteProfile(mpi="pmi2")
        table = NodeTable(Allocation("1", 0, "t0", tuple(made)), asked)
        self.launcher = SrunLauncher(self.run, self.site, table, self.said.append)

    def begin(self) -> tuple[Path, AttemptInfo]:
        """One attempt's folder and what its agents are told."""
        with self.launcher.attempt("launch") as (folder, _info):
            return folder, read_attempt(folder)

    def spec(self, folder: Path, info: AttemptInfo) -> StepSpec:
        return StepSpec(self.run.folder, info.attempt, folder, "run-1", info.launch, len(info.nodes), False)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands that would have gone to Slurm; all succeed and say nothing."""
    made: list[str] = []

    def call(*command: str, timeout_s: float = 0.0, cwd: Path | None = None) -> tuple[int, str]:
        made.append(" ".join(command))
        return 0, ""

    monkeypatch.setattr(slurm, "call", call)
    return made


def segments(command: list[str]) -> list[list[str]]:
    """Of an srun command line."""
    assert command[0] == "srun"
    found: list[list[str]] = [[]]
    for word in command[1:]:
        found = [*found, []] if word == ":" else [*found[:-1], [*found[-1], word]]
    return found


# --- the step ---------------------------------------------------------------------------------------------------------


def test_one_srun_has_a_segment_for_each_component(scene: Scene) -> None:
    folder, info = scene.begin()
    trainer, rollout = segments(scene.launcher.command(scene.spec(folder, info)))

    assert {"--het-group=0", "--nodes=1", "--ntasks=1", "--nodelist=t0", "--gpus-per-node=4"} <= set(trainer)
    assert {"--het-group=1", "--nodes=2", "--ntasks=2", "--nodelist=g0,g1", "--gpus-per-node=8"} <= set(rollout)
    for segment in (trainer, rollout):
        assert {"--mpi=pmi2", "--kill-on-bad-exit=1", "--overlap", "--cpu-bind=none"} <= set(segment)
        assert segment[-6:] == scene.spec(folder, info).agent()[1:] or "--attempt" in segment


def test_ranks_are_the_plans_whatever_the_order_of_components(tmp_path: Path) -> None:
    scene = Scene(tmp_path, groups=[("rollout", "g0 g1"), ("trainer", "t0")])
    folder, info = scene.begin()
    first, second = segments(scene.launcher.command(scene.spec(folder, info)))

    assert ("t0", "g0", "g1") == info.nodes
    assert {"--het-group=0", "--nodelist=g0,g1", "--gpus-per-node=8"} <= set(first)
    assert {"--het-group=1", "--nodelist=t0"} <= set(second)


def test_a_plain_job_has_no_groups_and_on_cpu_no_gpus_are_asked_for(tmp_path: Path) -> None:
    overrides = ["rollout.nnodes=0", "trainer.device=cpu"]
    scene = Scene(tmp_path, *overrides, groups=[("trainer", "t0")])
    [only] = segments(scene.launcher.command(scene.spec(*scene.begin())))

    assert not [word for word in only if word.startswith(("--het-group", "--gpus", "--gres"))]


def test_agents_are_told_where_they_are_and_whom_to_look_after(scene: Scene) -> None:
    _folder, info = scene.begin()

    assert ("", "", "t0", "t0:1", True) == (
        info.launcher,
        info.socket_dir,
        info.batch_host,
        info.batch_address,
        info.can_requeue,
    )
    assert "config/resolved.yaml" == info.config
    assert info.launch.startswith("launch.")


def test_requests_of_the_leader_do_not_become_the_steps() -> None:
    kept = srun.step_variables({"SLURM_NTASKS": "3", "SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "8", "PATH": "/bin"})
    assert {"SLURM_JOB_ID": "7", "PATH": "/bin"} == kept


def fake_srun(scene: Scene, program: str, silence_s: float = 60.0) -> tuple[SrunStep, list[str], Path]:
    folder, info = scene.begin()
    lines: list[str] = []
    command = [sys.executable, "-c", program]
    environment = {"PATH": "/usr/bin:/bin"}
    step = SrunStep(scene.spec(folder, info), command, environment, lines.append, info.nodes, ["1", "2"], silence_s)
    return step, lines, folder


def pump_until(step: SrunStep, there: Any) -> None:
    end = time.monotonic() + 30.0
    while not there():
        assert time.monotonic() < end
        step.pump(0.05)


def test_rank_0_is_missed_when_its_beat_stops(scene: Scene) -> None:
    step, lines, _ = fake_srun(scene, f"import time; print({BEAT_LINE!r}, flush=True); time.sleep(60)", silence_s=0.2)
    assert [] == step.lost()  # nobody was heard of yet
    pump_until(step, lambda: BEAT_LINE in lines)
    pump_until(step, lambda: step.lost() == [0])
    assert [] == step.end()


def test_what_srun_says_of_a_task_that_ended_badly_is_heard_at_once(scene: Scene) -> None:
    program = "import time; print('srun: error: g[0-1]: tasks 1-2: Killed', flush=True); time.sleep(60)"
    step, _lines, _ = fake_srun(scene, program)
    pump_until(step, lambda: step.lost() == [1, 2])
    assert [] == step.end()


def test_rank_0_is_asked_by_a_file_once_it_is_there(scene: Scene) -> None:
    step, lines, folder = fake_srun(scene, "import time; print('up', flush=True); time.sleep(600)")
    pump_until(step, lambda: "up" in lines)
    assert not step.ask(signal.SIGTERM)
    assert not read_wish(folder)
    write_agent(folder, 0, "1:1")
    assert step.ask(signal.SIGTERM)
    assert read_wish(folder)
    assert [1, 2] == step.not_up()
    assert [] == step.end()


def test_a_step_ends_also_when_srun_does_not(scene: Scene) -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    step, lines, _ = fake_srun(scene, program)
    pump_until(step, lambda: "up" in lines)

    assert [] == step.end()
    assert step.returncode == -signal.SIGKILL


# --- after an attempt -------------------------------------------------------------------------------------------------

FAULT = Ending(4, "AgentSilent", "agent 2 has been silent", suspects=(2,))


def test_a_fault_without_a_lost_node_is_tried_again_as_it_was(scene: Scene) -> None:
    folder, _ = scene.begin()

    assert FAULT == scene.launcher.after(FAULT, folder)
    assert scene.run.config is scene.launcher.config()


def test_a_lost_rollout_node_makes_the_next_attempt_smaller(scene: Scene, calls: list[str]) -> None:
    folder, _ = scene.begin()
    scene.dead = ["g1"]

    assert FAULT == scene.launcher.after(FAULT, folder)
    folder, info = scene.begin()
    assert ("t0", "g0") == info.nodes
    assert "1 of 2 rollout nodes, without g1" == info.note
    assert f"attempts/{info.attempt}/config.yaml" == info.config
    assert 1 == load_config(scene.run.folder / info.config).rollout.nnodes == scene.launcher.config().rollout.nnodes
    assert "scontrol update JobId=2 NodeList=g0" in calls


def test_a_lost_trainer_node_asks_for_a_new_start_of_the_job(tmp_path: Path) -> None:
    groups = [("trainer", "t0 t1"), ("rollout", "g0 g1")]
    scene = Scene(tmp_path, "trainer.nnodes=2", groups=groups)
    folder, _ = scene.begin()
    scene.dead = ["t1"]
    ending = scene.launcher.after(FAULT, folder)

    assert (75, "RequeueRequested") == (ending.exit_code, ending.kind)
    assert "trainer node t1 is lost (it does not answer); before: agent 2 has been silent" == ending.text


@pytest.mark.parametrize(("code", "kind"), [(0, ""), (2, "DataError"), (4, "RunStalled"), (75, "RequeueRequested")])
def test_other_endings_are_left_as_they_are(scene: Scene, code: int, kind: str) -> None:
    folder, _ = scene.begin()
    scene.dead = ["g1"]
    assert Ending(code, kind) == scene.launcher.after(Ending(code, kind), folder)
    assert ("t0", "g0", "g1") == scene.begin()[1].nodes


def test_a_stop_that_was_not_finished_is_made_up_for_by_the_next_start(scene: Scene) -> None:
    folder, _ = scene.begin()
    assert 75 == scene.launcher.after(Ending(130, "Interrupted", "killed"), folder).exit_code


def test_one_agent_that_never_came_up_costs_its_node(scene: Scene) -> None:
    folder, _ = scene.begin()
    for rank in (0, 1):
        write_agent(folder, rank, "1:1")
    scene.launcher.after(Ending(4, "FaultError", "agents of ranks [2] did not come up"), folder)

    assert ("t0", "g0") == scene.begin()[1].nodes


def test_an_agent_that_said_why_it_did_not_come_up_costs_no_node(scene: Scene) -> None:
    folder, _ = scene.begin()
    for rank in (0, 1):
        write_agent(folder, rank, "1:1")
    write_exit(folder, Ending(4, "FaultError", "no such library", rank=2))
    scene.launcher.after(Ending(4, "FaultError", "no such library"), folder)

    assert ("t0", "g0", "g1") == scene.begin()[1].nodes


# --- agents -----------------------------------------------------------------------------------------------------------


def test_an_agent_finds_its_rank_by_its_nodes_name() -> None:
    assert 2 == slurm_step.node_rank(["t0", "a", "b"], {"SLURMD_NODENAME": "b"})
    with pytest.raises(FaultError, match="started on node c, which is none of the attempt's"):
        slurm_step.node_rank(["t0", "a", "b"], {"SLURMD_NODENAME": "c"})


def test_workers_are_bound_to_the_cores_of_their_own_node(scene: Scene) -> None:
    plan: RunPlan = scene.run.plan.on_cores(1, range(16, 32), oversubscribe=False)

    assert [(16,), (17,)] == [worker.cores for worker in plan.of_node(1)][:2]
    assert {()} == {worker.cores for worker in plan.of_node(0)}
    with pytest.raises(ConfigError, match="only 2 cores may be used there"):
        scene.run.plan.on_cores(1, [0, 1], oversubscribe=False)
    assert {(0,), (1,)} == {w.cores for w in scene.run.plan.on_cores(1, [0, 1], oversubscribe=True).of_node(1)}


def orphaned(monkeypatch: pytest.MonkeyPatch, *, reachable: bool, can_requeue: bool, problem: str = "") -> list[str]:
    """What an agent does for its job."""
    done: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    monkeypatch.setattr(slurm, "answers", lambda _address: reachable)
    monkeypatch.setattr(slurm, "requeue", lambda job, restart: done.append(f"requeue {job} {restart}") or problem)
    monkeypatch.setattr(slurm, "cancel", lambda job: done.append(f"cancel {job}") or "")
    info = AttemptInfo("r", 1, "s", "l", "", "", batch_host="t0", batch_address="t0:1", can_requeue=can_requeue)
    slurm_step.save_orphaned_job(info)
    return done


def test_a_job_whose_batch_node_answers_is_left_to_its_launch_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [] == orphaned(monkeypatch, reachable=True, can_requeue=True)


def test_a_job_that_lost_its_batch_node_is_requeued_by_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ["requeue 7 3"] == orphaned(monkeypatch, reachable=False, can_requeue=True)


def test_where_it_cannot_be_requeued_it_is_cancelled_instead_of_idling(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ["cancel 7"] == orphaned(monkeypatch, reachable=False, can_requeue=False)
    assert ["requeue 7 3", "cancel 7"] == orphaned(monkeypatch, reachable=False, can_requeue=True, problem="refused")


# --- the batch script -------------------------------------------------------------------------------------------------


def test_a_job_of_another_size_than_the_plan_is_refused(scene: Scene) -> None:
    groups = (Group("trainer", 0, "1", ("t0",)), Group("rollout", 1, "2", ("g0",)))
    with pytest.raises(FaultError, match="the plan has 2 rollout nodes, job 1 has 1"):
        require_planned(scene.run, Allocation("1", 0, "t0", groups))


def test_a_run_folder_with_attempts_is_resumed(scene: Scene) -> None:
    assert not has_attempts(scene.run.folder)
    scene.begin()
    assert has_attempts(scene.run.folder)


def test_status_is_printed_once_a_phase() -> None:
    lines: list[str] = []
    status = StatusLines(lines.append)
    for phase in ("training", "training", "weight sync"):
        status({"version": 1, "phase": phase, "trained": 8})

    assert ["version 1 training", "version 1 weight sync"] == [line.split("{")[0][9:].strip() for line in lines]
    assert 8 == json.loads(lines[0][lines[0].index("{") :])["trained"]


def test_an_event_loop_that_stands_still_is_seen_by_a_thread() -> None:
    stood: list[float] = []
    watch = slurm_step.LoopWatch(0.3, stood.append, look_s=0.01)
    end = time.monotonic() + 30.0
    for _ in range(3):
        watch.turn()
    assert [] == stood
    while not stood and time.monotonic() < end:
        time.sleep(0.01)
    assert 1 == len(stood)
    assert stood[0] > 0.3


def test_a_watch_that_was_stopped_says_nothing() -> None:
    stood: list[float] = []
    watch = slurm_step.LoopWatch(0.05, stood.append, look_s=0.01)
    watch.stop()
    time.sleep(0.2)
    assert [] == stood
