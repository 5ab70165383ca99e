"""`hybridsched demo --engine vllm`: real lending between a torch trainer and vLLM replicas that learns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_kit import need_vllm

from hybridsched.runlog.reader import RunLog
from hybridsched.sample_queue.fsck import fsck

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

CYCLES = 6


@pytest.fixture(scope="module", params=["keep"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a finished run, whose sync mode is the parameter; exit code 0: the reward rose by 0.15."""
    need_vllm()
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "hybridsched.cli.main", "demo", "--engine", "vllm", "--quiet"]
    command += ["--folder", str(folder), "--cycles", str(CYCLES), f"rollout.sync_mode={request.param}"]
    command += [
        "weight_sync.verify=probe",
        "deadlines.scale=3",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    ]
    done = subprocess.run(
        [*command, "trainer.val_at_end=false", "local.allow_oversubscribe=true"],
        capture_output=True,
        text=True,
        timeout=500,
        env=dict(os.environ),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    yield folder / "run"


def test_it_learns_with_lending_on_and_loses_no_sample(demo: Path) -> None:
    log = RunLog.open(demo)
    assert log.events("switch", "hybrid.0")
    assert fsck(demo, complete=True).ok


def test_after_every_sync_trainer_and_vllm_agree(demo: Path) -> None:
    differences = RunLog.open(demo).metrics()["weight_sync/probe_max_diff"].value
    assert len(differences) >= CYCLES
    assert max(differences) < 1e-4


def test_what_a_sleeping_hybrid_gave_back_is_measured(demo: Path) -> None:
    asleep = RunLog.open(demo).events("replica", "hybrid.0")
    reasons = [row.reason for row in asleep if row.new == "asleep"]
    assert reasons
    assert all("measured" in reason for reason in reasons)


def test_responses_go_on_under_a_new_version_after_a_sync(demo: Path) -> None:
    assert max(RunLog.open(demo).metrics()["fully_async/partial/max_partial_span"].value) >= 1
