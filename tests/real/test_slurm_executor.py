"""HetSlurmExecutor on a real Slurm whose nodes are hosts of their own: results, failures, checkpoint, refusals."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from hybridsched.errors import DeadlineExceeded, UserError
from hybridsched.slurm import HetSlurmExecutor, HetSlurmJob, SiteProfile
from hybridsched.slurm import job as job_module
from hybridsched.slurm.commands import Said, call
from hybridsched.slurm.state import TERMINAL, detailed, states_of
from tests.slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no rank can import a test module

LONG_S = 120.0
TRAINERS = {"nodes": 2, "partition": "trn", "gpus_per_node": 8, "cpus_per_task": 2}
ROLLOUTS = {"nodes": 2, "partition": "gpu", "gpus_per_node": 4}
SITE = SiteProfile(mpi="pmi2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Accounting off; SIGKILL two seconds after SIGTERM."""
    with slurm_cluster(tmp_path_factory, "--set", "KillWait=2") as one, one.in_this_process():
        os.environ["PYTHONPATH"] = one.environment["PYTHONPATH"]  # for the ranks: this checkout
        yield one


@pytest.fixture
def executor(cluster: SlurmCluster, tmp_path: Path) -> HetSlurmExecutor:
    """Two components, four ranks."""
    return HetSlurmExecutor(tmp_path / "jobs", [TRAINERS, ROLLOUTS], site=SITE, time=5)


def whoami(greeting: str) -> dict[str, Any]:
    """What a rank sees."""
    import submitit

    here = submitit.JobEnvironment()
    print(greeting, here.global_rank, flush=True)
    return {
        "rank": here.global_rank,
        "ranks": here.num_tasks,
        "host": here.hostname,
        "hosts": list(here.hostnames),
        "component": int(os.environ["HYBRIDSCHED_COMPONENT"]),
        "gpus": len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")),
    }


def fail_on(bad: int) -> int:
    """One rank raises, the others would go on for long."""
    import submitit

    rank: int = submitit.JobEnvironment().global_rank
    if rank == bad:
        raise ValueError(f"the trouble of rank {bad}")
    time.sleep(LONG_S)
    return rank


class Counter:
    """Counts to a number, and goes on where it was after a checkpoint."""

    def __init__(self) -> None:
        self.at = self.begun_at = 0

    def __call__(self, end: int, pause_s: float) -> tuple[int, int]:
        self.begun_at = self.at
        while self.at < end:
            self.at += 1
            print("at", self.at, flush=True)
            time.sleep(pause_s if self.begun_at == 0 else 0.0)
        return self.begun_at, self.at

    def checkpoint(self, end: int, pause_s: float) -> Any:
        """Goes on with the same arguments."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, end, pause_s)


def until(look: Callable[[], Any], what: str) -> Any:
    """The first true answer."""
    end = time.monotonic() + LONG_S
    while not (found := look()):
        assert time.monotonic() < end, what
        time.sleep(0.2)
    return found


# -- what comes out


def test_four_ranks_of_two_components_give_their_results_in_order(executor: HetSlurmExecutor) -> None:
    job = executor.submit(whoami, "hello from")
    job.wait(LONG_S)
    seen = job.results()
    assert [0, 1, 2, 3] == [one["rank"] for one in seen]
    assert [4] * 4 == [one["ranks"] for one in seen]
    assert [0, 0, 1, 1] == [one["component"] for one in seen]
    assert [8, 8, 4, 4] == [one["gpus"] for one in seen]
    # Slurm itself would list gpu0 first: nodes have to be those of the ranks.
    assert ["trn0", "trn1", "gpu0", "gpu1"] == [one["host"] for one in seen] == seen[0]["hosts"]
    assert [f"hello from {rank}\n" for rank in range(4)] == [job.task(rank).stdout() for rank in range(4)]
    until(lambda: job.watcher.is_done(job.job_id, mode="force"), "Slurm has cleaned up, too")
    assert "COMPLETED" == job.state
    left = sorted(path.suffix for path in Path(job.paths.folder).iterdir())
    assert ".pkl" not in left
    assert seen == job.results()  # kept, though the pickles are gone


def test_one_component_is_a_plain_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = HetSlurmExecutor(tmp_path, [{"partition": "gpu"}], site=SITE, time=5).submit(sum, [1, 2, 3])
    job.wait(LONG_S)
    assert 6 == job.result()
    assert "hetjob" not in job.paths.submission_file.read_text()


def test_the_exception_is_that_of_the_rank_that_failed(executor: HetSlurmExecutor) -> None:
    job = executor.submit(fail_on, 2)
    job.wait(LONG_S)
    error = job.exception()
    assert error is not None
    assert str(error).startswith(f"rank 2 of job {job.job_id} failed:")
    assert "ValueError: the trouble of rank 2" in str(error)
    with pytest.raises(type(error), match="the trouble of rank 2"):
        job.results()
    until(lambda: job.watcher.is_done(job.job_id, mode="force"), "the other ranks are ended")
    assert "FAILED" == job.state


def test_a_rank_that_dies_without_a_word_is_a_failure_and_never_completed(
    executor: HetSlurmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "_SHARED_FILES_S", 2.0)
    executor.update_parameters(teardown=["exit 0"])  # a script that hides the exit code of its step
    job = executor.submit(os._exit, 0)
    until(lambda: (found := detailed(job.job_id)) and found.state == "COMPLETED", "Slurm thinks that it went well")
    assert "FAILED" == job.state
    assert "without a result of ranks [0, 1, 2, 3]" in str(job.exception())


def test_cancel_ends_all_components(executor: HetSlurmExecutor) -> None:
    job = executor.submit(time.sleep, LONG_S)
    until(lambda: job.watcher.get_state(job.job_id, mode="force") == "RUNNING", "running")
    job.cancel()
    job.wait(LONG_S)
    found = detailed(job.job_id)
    assert found is not None
    assert {"CANCELLED"} == {one.state for one in found.components}
    assert "Slurm says CANCELLED" in str(job.exception())


def test_a_wait_is_bounded_and_leaves_the_job_alone(executor: HetSlurmExecutor) -> None:
    job = executor.submit(time.sleep, LONG_S)
    with pytest.raises(DeadlineExceeded, match=f"job {job.job_id} is "):
        job.wait(1.0)
    assert job.watcher.get_state(job.job_id, mode="force") in ("PENDING", "CONFIGURING", "RUNNING")
    job.cancel()


def test_checkpoint_requeues_the_job_which_goes_on_where_it_was(
    cluster: SlurmCluster, executor: HetSlurmExecutor
) -> None:
    job = executor.submit(Counter(), 400, 0.1)
    until(lambda: "at 5\n" in (job.task(0).stdout() or ""), "rank 0 counts")
    job.checkpoint()
    until(lambda: job.watcher.get_state(job.job_id, mode="force") == "PENDING", "requeued")
    assert not job.done()
    for number in (0, 1):  # Slurm would let it wait for two minutes
        cluster.run("scontrol", "update", f"jobid={int(job.job_id) + number}", "starttime=now")
    job.wait(LONG_S)
    begun, ended = zip(*job.results(), strict=True)
    assert {400} == set(ended)
    assert 1 == len(set(begun))
    assert 5 <= begun[0] < 400
    found = detailed(job.job_id)
    assert found is not None
    assert {1} == {one.restarts for one in found.components}


# -- what is refused


@pytest.mark.parametrize(
    ("components", "reason"),
    [
        ([TRAINERS, {**ROLLOUTS, "nodes": 40}], "Requested node configuration is not available"),
        ([TRAINERS, {**ROLLOUTS, "partition": "nowhere"}], "invalid partition specified: nowhere"),
        ([TRAINERS, {**ROLLOUTS, "gpus_per_node": 9}], "Requested node configuration is not available"),
        (
            [{"nodes": 3, "partition": "all"}, {"nodes": 2, "partition": "all"}],
            r"components\[0\] and components\[1\] need 5 nodes together",
        ),
    ],
)
def test_what_can_never_start_is_refused_before_it_blocks_the_queue(
    cluster: SlurmCluster, tmp_path: Path, components: list[dict[str, Any]], reason: str
) -> None:
    before = cluster.run("squeue", "-h", "-t", "all")
    with pytest.raises(UserError, match=f"would never start this job: .*{reason}"):
        HetSlurmExecutor(tmp_path / "jobs", components, site=SITE, time=5).submit(whoami, "never")
    assert before == cluster.run("squeue", "-h", "-t", "all")
    assert [] == list((tmp_path / "jobs").iterdir())


def test_a_job_that_got_in_and_waits_for_ever_is_taken_out_again(
    cluster: SlurmCluster, executor: HetSlurmExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the partition: Slurm accepts such a job and leaves it pending."""
    monkeypatch.setattr("hybridsched.slurm.admission.require_possible", lambda *_: None)
    cluster.run("scontrol", "update", "partitionname=gpu", "maxnodes=1")
    try:
        with pytest.raises(UserError, match=r"job (\d+) would have waited for ever \(PartitionNodeLimit\)") as refused:
            executor.submit(whoami, "never")
    finally:
        cluster.run("scontrol", "update", "partitionname=gpu", "maxnodes=unlimited")
    job_id = str(refused.value).split()[1]
    assert states_of([job_id])[job_id].state == "CANCELLED"


def test_a_job_slurm_has_forgotten_is_over(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "GONE_AFTER_S", 1.0)
    job: HetSlurmJob[int] = HetSlurmJob(tmp_path, "99999", tasks=[0, 1])
    job.wait(LONG_S)
    assert "GONE" == job.state
    assert "without a result of ranks [0, 1]" in str(job.exception())


# -- states


def test_one_squeue_call_answers_for_all_jobs(cluster: SlurmCluster, executor: HetSlurmExecutor) -> None:
    jobs = [executor.submit(sum, [number]) for number in range(3)]
    for one in jobs:
        one.wait(LONG_S)
    asked: list[str] = []

    def counting(command: Any) -> Said:
        asked.append(command[0])
        return call(command)

    found = states_of([one.job_id for one in jobs], counting)
    assert ["squeue"] == asked
    assert {one.job_id: 2 for one in jobs} == {job: len(state.components) for job, state in found.items()}
    assert [[number] * 4 for number in range(3)] == [one.results() for one in jobs]


def test_with_accounting_a_job_squeue_has_forgotten_is_found(
    cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Jobs of the other cluster must not find the commands of this one.
    folders = [folder for folder in os.environ["PATH"].split(":") if not folder.startswith(str(cluster.folder))]
    monkeypatch.setenv("PATH", ":".join(folders))

    def without_controller(command: Any) -> Said:
        return call(command) if command[0] == "sacct" else Said(False, "", "Invalid job id specified")

    with (
        slurm_cluster(tmp_path_factory, accounting=True, nodes="trn0,gpu0") as one,
        one.in_this_process(),
    ):
        jobs = tmp_path_factory.mktemp("accounted")
        components = [{"partition": "trn"}, {"partition": "gpu"}]
        job = HetSlurmExecutor(jobs, components, site=SITE, time=5).submit(fail_on, 1)
        assert "the trouble of rank 1" in str(job.exception())
        job.cancel()
        until(lambda: job.watcher.is_done(job.job_id, mode="force"), "over")

        def recorded() -> bool:
            state = states_of([job.job_id], without_controller).get(job.job_id)
            return state is not None and [0, 1] == [c.offset for c in state.components] and state.state in TERMINAL

        until(recorded, "sacct has both components")
