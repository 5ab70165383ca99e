"""The main job for real: `hybridsched run` with torch, MPI and files. What happened is read from its run log."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_runs import LONG_S, RealRun, make_inputs, real_run

from hybridsched.report.html import write_html
from hybridsched.runlog.rows import EventRow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

S = 8  #: samples of a cycle
STEPS = 6
VALIDATED = ["trainer.test_freq=2", "trainer.val_before_train=true", "trainer.val_at_end=true"]

#: Names users look for (specification, section 4, and DESIGN 13); a run with everything on has them all.
METRICS = {
    "dynamic_resource/train_compute_time_s",
    "dynamic_resource/train_allocated_time_s",
    "dynamic_resource/train_resource_utilization",
    "dynamic_resource/rollout_resource_utilization",
    "dynamic_resource/resource_utilization",
    "dynamic_resource/resource_utilization_exact",
    "dynamic_resource/hybrid_rollout_gpu_s",
    "dynamic_resource/hybrid_train_gpu_s",
    "dynamic_resource/switch_cost_s",
    "dynamic_resource/deactivate_ratio",
    "dynamic_resource/mq_size",
    "fully_async/total_wait_time",
    "fully_async/trainer/idle_ratio",
    "fully_async/rollouter/active_time",
    "fully_async/rollouter/idle_ratio",
    "fully_async/count/staleness_samples",
    "fully_async/count/total_generated_samples",
    "fully_async/count/current_param_version",
    "fully_async/partial/partial_ratio",
    "fully_async/static/max_required_samples",
    "fully_async/processing_time/tp95",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/param_sync",
    "timing_s/activate",
    "timing_s/deactivate",
    "timing_s/seal_wait",
    "timing_s/wait_for_enough_samples",
    "timing_s/save_checkpoint",
    "timing_s/validate",
    "perf/throughput",
    "training/global_step",
    "actor/loss",
    "actor/grad_norm",
    "critic/rewards/mean",
    "rollout/reward/mean",
    "rollout/response_length/mean",
    "rollout_corr/ess",
    "rollout_corr/kl",
    "staleness/age_mean",
    "samples/trained",
    "samples/filtered_share",
    "tokens/wasted_total",
    "replica/standalone.0/unfinished",
    "replica/hybrid.0/unfinished",
    "weight_sync/probe_max_diff",
    "weight_sync/transfer_s",
    "runtime/event_loop_lag_s",
    "val/reward/mean@1",
}


@pytest.fixture(scope="session")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and configuration, made once."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def job(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """A run with lending, validation and the truth test; interrupted with Ctrl-C, resumed, finished."""
    folder = tmp_path_factory.mktemp("job") / "run"
    keys = [f"trainer.total_training_steps={STEPS}", "weight_sync.verify=probe", *VALIDATED]
    with real_run(run_yaml, folder, *keys) as run:
        run.start()
        run.wait_cycles(3)
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        code, said = run.end()
        assert code == 130, f"{said}\n{run.story()}"
        assert "go on with: hybridsched run" in said
        run.require_gone()
        assert list((folder / "checkpoints").glob("global_step_*"))
        run.start("--resume")
        run.finish()
        yield run


def between(rows: list[EventRow], first: str, last: str) -> list[list[EventRow]]:
    """Slices that begin with a ``first`` and end with the next ``last`` (values of ``new``), both included."""
    slices: list[list[EventRow]] = []
    open_slice: list[EventRow] | None = None
    for row in rows:
        if row.new == first:
            open_slice = []
        if open_slice is not None:
            open_slice.append(row)
            if row.new == last:
                slices.append(open_slice)
                open_slice = None
    return slices


# --- order of calls -----------------------------------------------------------------------------------------------


def test_an_activation_offloads_hands_over_and_only_then_routes(job: RealRun) -> None:
    rows = [row for row in job.log().event_rows if row.kind in ("pool", "tenancy", "replica", "switch")]
    activations = between(rows, "activating", "hybrid_active")
    calls = [(row.kind, row.entity, row.new) for row in activations[0]]

    assert len(activations) >= 2
    assert [
        ("pool", "hybrids", "activating"),
        ("tenancy", "trainer.0", "handover"),
        ("replica", "hybrid.0", "syncing"),
        ("tenancy", "trainer.0", "hybrid"),
        ("replica", "hybrid.0", "held"),
        ("switch", "hybrid.0", "add_replicas"),
        ("replica", "hybrid.0", "ready"),
        ("switch", "hybrid.0", "resume_generation_replicas"),
        ("pool", "hybrids", "hybrid_active"),
    ] == [call for call in calls if not call[1].startswith("standalone")]


def test_a_deactivation_removes_aborts_sleeps_and_only_then_trains(job: RealRun) -> None:
    rows = [row for row in job.log().event_rows if row.kind in ("pool", "tenancy", "replica", "switch")]
    deactivations = between(rows, "deactivating", "deactivated")

    assert len(deactivations) >= 2
    for one in deactivations:
        assert [
            ("pool", "hybrids", "deactivating"),
            ("switch", "hybrid.0", "remove_replicas"),
            ("replica", "hybrid.0", "draining"),
            ("switch", "hybrid.0", "abort_replicas"),
            ("switch", "hybrid.0", "sleep_replicas"),
            ("replica", "hybrid.0", "asleep"),
            ("pool", "hybrids", "standalone_only"),
            ("tenancy", "trainer.0", "trainer"),
            ("switch", "pool", "deactivated"),
        ] == [(row.kind, row.entity, row.new) for row in one if not row.entity.startswith("standalone")]


def test_the_trainer_never_trains_while_its_gpu_is_lent(job: RealRun) -> None:
    tenant, trained = {1: "trainer"}, 0
    for row in job.log().event_rows:
        if (row.kind, row.entity) == ("tenancy", "trainer.0") and row.new:
            tenant[row.attempt] = row.new
        if (row.kind, row.entity, row.new) == ("activity", "trainer.0", "train"):
            trained += 1
            assert tenant.get(row.attempt, "trainer") == "trainer"
    assert trained >= 2 * STEPS - 1  # Ctrl-C may cut a cycle short


def test_a_cycle_syncs_decides_hands_over_and_takes_back(job: RealRun) -> None:
    names = {
        ("sync", "begun"): "sync",
        ("sync", "done"): "synced",
        ("decision", "yes"): "decision",
        ("decision", "no"): "decision",
        ("sync", "second sync skipped"): "skipped",
        ("switch", "activated"): "lent",
        ("switch", "deactivated"): "taken back",
    }
    order = "".join(
        {
            "sync": "(",
            "synced": ")",
            "decision": "?" if row.entity == "activate" else "!",
            "skipped": "-",
            "lent": "+",
            "taken back": "<",
        }[names[row.kind, row.new]]
        for row in job.log().event_rows
        if (row.kind, row.new) in names
    )
    cycles = order.split("(")[1:]

    assert len(cycles) >= STEPS + 1  # and one more for each start
    allowed = {")?+!<", ")?-", ")?", ")?+<"}  # lent and taken back; not lent; the last one; stopped while lent
    assert set(cycles) <= allowed, order
    assert ")?+!<" in cycles


def test_every_decision_and_switch_has_its_reason(job: RealRun) -> None:
    rows = [*job.events("decision"), *job.events("switch", "pool"), *job.events("pool")]

    assert {"activate", "deactivate"} == {row.entity for row in job.events("decision")}
    assert [] == [row for row in rows if not row.reason.strip()]


def test_what_a_sleeping_hybrid_gave_back_is_measured(job: RealRun) -> None:
    asleep = job.events("replica", "hybrid.0", "asleep")

    assert asleep
    assert all("measured" in row.reason for row in asleep)


# --- truth, samples, figures ---------------------------------------------------------------------------------------


def test_after_every_sync_trainer_and_replica_agree(job: RealRun) -> None:
    differences = job.log().metrics()["weight_sync/probe_max_diff"].value

    assert len(differences) >= STEPS - 1  # none of the cycle that Ctrl-C cut short
    assert max(differences) < 1e-4


def test_every_sample_has_one_verdict_also_after_ctrl_c(job: RealRun) -> None:
    report = job.require_exactly_once(job.trained_samples())

    assert report.ledger is not None
    assert {"trained", "surplus"} >= set(report.ledger.verdicts)
    assert list(range(STEPS + 1)) == [row.step for row in job.log().history()]
    assert ["1", "2", "latest"] == sorted(path.name for path in (job.folder / "attempts").iterdir())


def test_all_metrics_are_there_and_finite(job: RealRun) -> None:
    curves = job.log().metrics()

    assert set() == METRICS - set(curves)
    assert all(math.isfinite(value) for name in METRICS for value in curves[name].value)


def test_validation_was_made_before_in_between_and_at_the_end(job: RealRun) -> None:
    """A stop cuts a running validation off: at its own version it is made again, else it is left out."""
    steps = set(job.log().metrics()["val/reward/mean@1"].step.tolist())
    assert {0, 2, 4, 6} >= steps >= {0, 6}
    assert len(steps) >= 3


def test_reports_can_be_made_of_it(job: RealRun, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hybridsched.cli.main", "report", str(job.folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    summary = json.loads(done.stdout)

    assert ("finished", STEPS, 2) == (summary["outcome"], summary["cycles"], summary["attempts"])
    assert job.trained_samples() == summary["samples"]["trained"]
    assert summary["activations"] == summary["deactivations"] >= 2
    text = write_html(job.folder, tmp_path / "report.html").read_text()
    assert "resource" in text
    assert len(text) > 20_000


# --- other shapes --------------------------------------------------------------------------------------------------


def test_training_bound_the_second_sync_is_skipped(run_yaml: Path, tmp_path: Path) -> None:
    """Step 3 of the method's figure: the queue is full enough already, hybrids get nothing. Also: sync_mode keep."""
    bound = ["async_training.staleness_threshold=1.0", "actor_rollout_ref.actor.ppo_epochs=4"]
    keys = [*bound, "rollout.sync_mode=keep", "rollout.kv_on_sync=keep", "data.max_response_length=16"]
    with real_run(run_yaml, tmp_path / "run", *keys, "trainer.total_training_steps=6") as run:
        run.start()
        run.finish()

        skipped = run.events("sync", new="second sync skipped")
        assert skipped
        assert all(row.reason for row in skipped)
        version = skipped[0].entity
        assert [] == [row for row in run.events("replica", "hybrid.0", "syncing") if version in row.reason]
        assert {"keep"} == {row.reason for row in run.events("sync", new="begun")}
        run.require_exactly_once(6 * S)


def test_two_trainer_ranks_with_two_hybrids(run_yaml: Path, tmp_path: Path) -> None:
    keys = ["trainer.n_gpus_per_node=2", "weight_sync.verify=probe", "trainer.total_training_steps=2"]
    with real_run(run_yaml, tmp_path / "run", *keys) as run:
        run.start()
        run.finish()

        run.require_exactly_once(2 * S)
        lent = [row.detail["lent"] for row in run.events("switch", "pool", "activated")]
        assert ["hybrid.0", "hybrid.1"] in [sorted(names) for names in lent]
        assert max(run.log().metrics()["weight_sync/probe_max_diff"].value) < 1e-4


def test_colocated_without_a_rollout_node(run_yaml: Path, tmp_path: Path) -> None:
    with real_run(run_yaml, tmp_path / "run", "rollout.nnodes=0", "trainer.total_training_steps=3") as run:
        run.start()
        run.finish()

        run.require_exactly_once(3 * S)
        assert len(run.events("switch", "pool", "activated")) >= 3
