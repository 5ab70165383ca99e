"""Misfortune on a real Slurm, during runs with real training: the outcomes DESIGN 14 names, each really done.

In every case the run finishes (by itself, by the launch loop, or in a later start of its job), fsck finds nothing,
every sample has one verdict, steps go on without gap, and no process of the run is left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import make_inputs
from slurm_cluster import SlurmCluster, missing, require_slurm, slurm_cluster
from slurm_runs import SlurmRealRun, slurm_run

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(500)]

PARTS = Path(__file__).with_name("slow_parts.py")
SLOW = [f"reward.function={PARTS}:reward", "reward.kwargs={seconds: 0.3}"]
S = 8  #: samples of a cycle
SLURMS_OWN_S = 120  #: SlurmdTimeout: until then Slurm takes a lost node for a healthy one


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_slurm()
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """SlurmdTimeout is as long as on a real cluster: what these tests wait for is ours alone."""
    with slurm_cluster(tmp_path_factory, "--set", f"SlurmdTimeout={SLURMS_OWN_S}", nodes="trn[0-1],gpu[0-1]") as one:
        yield one


def require_no_gap(run: SlurmRealRun, steps: int) -> None:
    """All steps, each once in the history that counts, and the ledger agrees."""
    run.require_exactly_once(steps * S)
    assert list(range(1, steps + 1)) == [row.step for row in run.log().history()]


# --- what the job survives: processes, Slurm's controller, a rollout node -------------------------------------------


@pytest.fixture(scope="module")
def survived(
    cluster: SlurmCluster, run_yaml: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SlurmRealRun, float]]:
    """One run through a killed worker, a restarted slurmctld, a killed agent and a killed node.

    Yields it with the seconds from the node's death to the next trained step.
    """
    folder = tmp_path_factory.mktemp("survived") / "run"
    size = ["rollout.nnodes=2", "trainer.total_training_steps=16", "faults.attempts=4"]
    with slurm_run(cluster, run_yaml, folder, *SLOW, *size) as run:
        run.submit()
        run.wait_cycles(1)
        run.kill("standalone.0")
        run.wait_event("worker", "standalone.0", "up")
        cluster.order("stop-controller")
        run.wait_cycles(1)
        cluster.order("start-controller")
        run.kill("agent.2")
        run.wait_attempt(2)
        run.wait_cycles(1)
        done = run.cycles()
        died = time.monotonic()
        cluster.order("kill-node", "gpu1")
        try:
            run.wait(lambda: run.cycles() > done and run.nodes() == ["trn0", "gpu0"], "training without gpu1")
            recovery_s = time.monotonic() - died
            print(f"from the node's death to the next trained step: {recovery_s:.1f} s")
            run.finish()
        finally:
            cluster.order("start-node", "gpu1")
        yield run, recovery_s


def test_nothing_is_lost_or_doubled(survived: tuple[SlurmRealRun, float]) -> None:
    require_no_gap(survived[0], 16)


def test_a_killed_worker_and_a_restarted_slurmctld_cost_no_attempt(survived: tuple[SlurmRealRun, float]) -> None:
    run, _ = survived
    [begun] = [row for row in run.events("run", "run", "started") if row.reason.startswith("attempt 2")]
    exits = [row for row in run.events("worker", "standalone.0", "exited") if row.time < begun.time]

    assert "killed by SIGKILL" in exits[0].reason
    assert ["1", "2", "3", "latest"] == sorted(path.name for path in (run.folder / "attempts").iterdir())


def test_a_lost_rollout_node_makes_the_plan_smaller_and_is_recorded(survived: tuple[SlurmRealRun, float]) -> None:
    run, _ = survived
    last = run.events("run", "run", "started")[-1]

    assert "1 of 2 rollout nodes, without gpu1" in last.reason
    assert "node gpu1 is lost: it does not answer" in run.said()


def test_a_lost_node_is_made_up_for_without_slurms_own_detection(survived: tuple[SlurmRealRun, float]) -> None:
    """Slurm would have needed SlurmdTimeout, which is longer than everything here."""
    run, recovery_s = survived
    [restored] = [row for row in run.events("run", "run", "started") if row.reason.startswith("attempt 3")]

    assert recovery_s < SLURMS_OWN_S
    assert restored.time < run.log().history()[-1].time


# --- what needs a new start of the job --------------------------------------------------------------------------------


def test_a_cancelled_component_and_a_lost_batch_node_requeue_the_job(
    cluster: SlurmCluster, run_yaml: Path, tmp_path: Path
) -> None:
    steps = 6
    with slurm_run(cluster, run_yaml, tmp_path / "run", *SLOW, f"trainer.total_training_steps={steps}") as run:
        run.submit()
        run.wait_cycles(1)
        cluster.run("scancel", f"{run.job}+1")
        run.wait_said("the rollout component is ")
        run.wait_restart(1)
        run.wait_cycles(1)
        batch = run.nodes()[0]
        cluster.order("kill-node", batch)
        try:
            run.wait(lambda: "goes back into the queue" in agents_said(run), "an agent requeues the job")
            cluster.run("scontrol", "update", f"NodeName={batch}", "State=DOWN", "Reason=killed")
            run.wait_restart(2)
            run.finish()
        finally:
            cluster.order("start-node", batch)
            cluster.run("scontrol", "update", f"NodeName={batch}", "State=RESUME", check=False)
        require_no_gap(run, steps)


def agents_said(run: SlurmRealRun) -> str:
    """Logs of all agents of all attempts."""
    return "\n".join(path.read_text(errors="replace") for path in run.folder.glob("attempts/*/logs/agent-*.log"))


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_the_job_waits_for_room_on_a_full_disk(
    run_yaml: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The nodes see a file system of 48 MB, which is mounted before the cluster is booted."""
    if os.getuid() != 0:
        missing("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    steps = 4
    room = ["queue.min_free_bytes=1000000", "queue.seal_bytes=100000", "queue.retry_s=0.5"]
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], check=True, timeout=60)
    try:
        with (
            slurm_cluster(tmp_path_factory, nodes="trn0,gpu0") as small,
            slurm_run(small, run_yaml, disk / "run", *SLOW, *room, f"trainer.total_training_steps={steps}") as run,
        ):
            run.submit()
            run.wait_cycles(1)
            filler = disk / "filler"
            with open(filler, "wb", buffering=0) as stream:
                os.posix_fallocate(stream.fileno(), 0, max(1, shutil.disk_usage(disk).free - (16 << 10)))
            time.sleep(5.0)
            assert not run.is_over(), run.said()
            filler.unlink()
            run.finish()
            require_no_gap(run, steps)
            assert {"admission stopped", "admission goes on"} <= {row.new for row in run.events("fault")}
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=60)
