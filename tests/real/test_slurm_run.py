"""A run as a heterogeneous job on a real Slurm, each node a host of its own: submitted, trained, stopped, resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import LONG_S, make_inputs
from slurm_cluster import SlurmCluster, require_slurm, slurm_cluster
from slurm_runs import SlurmRealRun, slurm_run

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(500)]

S = 8  #: samples of a cycle


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_slurm()
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory, nodes="trn[0-1],gpu[0-1]") as one:
        yield one


@pytest.fixture(scope="module")
def finished(cluster: SlurmCluster, run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmRealRun]:
    """Two trainer nodes, two rollout nodes, three cycles; stopped by USR2 in the second and resumed by requeue."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    size = ["trainer.nnodes=2", "rollout.nnodes=2", "trainer.total_training_steps=4"]
    with slurm_run(cluster, run_yaml, folder, *size) as run:
        run.submit()
        run.wait_cycles(1)
        cluster.run("scancel", "--batch", "--signal=USR2", run.job)
        run.wait_said("goes back into the queue and resumes")
        run.wait_restart(1)
        run.finish()
        yield run


def test_every_sample_is_trained_once_over_a_requeue(finished: SlurmRealRun) -> None:
    finished.require_exactly_once(finished.trained_samples())

    assert [1, 2, 3, 4] == [row.step for row in finished.log().history()]


def test_the_stop_was_orderly_and_the_resumed_state_is_the_checkpoint(finished: SlurmRealRun) -> None:
    first = json.loads((finished.folder / "attempts" / "1" / "result.json").read_text())
    [restored] = finished.events("run", "run", "restored")
    written = [row for row in finished.events("checkpoint", new="written") if row.time < restored.time]

    assert (75, "RequeueRequested") == (first["exit_code"], first["error"]["kind"])
    assert restored.reason == f"checkpoint {written[-1].reason}"
    assert ["1", "2", "latest"] == sorted(path.name for path in (finished.folder / "attempts").iterdir())


def test_ranks_follow_the_plan_and_agents_sit_on_their_nodes(finished: SlurmRealRun) -> None:
    ups = {row.entity: row.reason.split()[0] for row in finished.events("agent", new="up")}

    assert ["trn0", "trn1", "gpu0", "gpu1"] == finished.nodes()
    assert {f"agent.{rank}": node for rank, node in enumerate(finished.nodes())} == ups


def test_the_owner_is_known_by_job_and_start(finished: SlurmRealRun) -> None:
    owners = [json.loads(path.read_text()) for path in sorted((finished.folder / "owner").glob("*.json"))]

    assert [(finished.job, 1), (finished.job, 2)] == [(one["job_id"], one["restart_count"]) for one in owners]


def test_ranks_are_the_plans_when_the_rollout_component_comes_first(
    cluster: SlurmCluster, run_yaml: Path, tmp_path: Path
) -> None:
    """As the script has it where an old Slurm starts MPI by PMIx."""
    size = ["rollout.nnodes=2", "trainer.total_training_steps=1"]
    with slurm_run(cluster, run_yaml, tmp_path / "run", *size) as run:
        keys = [*run.overrides, f"trainer.default_local_dir={run.folder}", "--prepare-only"]
        cluster.run("python", "-m", "hybridsched.cli.main", "submit", run_yaml, *keys, timeout_s=LONG_S)
        (run.folder / "slurm").mkdir()
        script = tmp_path / "job.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH -p gpu -N2 --no-kill -o {run.folder}/slurm/%j_batch.log\n"
            "#SBATCH hetjob\n#SBATCH -p trn -N1 --no-kill\n"
            "export HYBRIDSCHED_ROLES=rollout,trainer\n"
            f"exec python -m hybridsched.slurm.batch_main --run {run.folder}\n"
        )
        run.job = cluster.sbatch(script)
        run.finish()

        assert ["trn0", "gpu0", "gpu1"] == run.nodes()
        ups = {row.entity: row.reason.split()[0] for row in run.events("agent", new="up")}
        assert {"agent.0": "trn0", "agent.1": "gpu0", "agent.2": "gpu1"} == ups
        run.require_exactly_once(S)
