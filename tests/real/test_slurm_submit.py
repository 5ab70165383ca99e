"""A run submitted to a real Slurm: from Python, by the command, and as a rendered script handed to sbatch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridsched.config import load_config
from hybridsched.errors import Interrupted, UserError
from hybridsched.slurm import SlurmRun, submit_run
from hybridsched.slurm.state import states_of
from tests.real_runs import make_inputs
from tests.slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

LONG_S = 240.0
EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "slurm" / "examples").glob("*.yaml"))
#: What the examples ask for and a dev cluster does not have.
OF_THE_SITE = [f"slurm.{role}.{key}=null" for role in ("trainer", "rollout") for key in ("account", "qos", "mem")]
OF_THE_SITE += [f"slurm.{role}.{key}=null" for role in ("trainer", "rollout") for key in ("constraint", "gres")]
OF_THE_SITE += [f"slurm.{role}.cpus_per_task=8" for role in ("trainer", "rollout")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Enough nodes for every example; names whose order is not that of the components."""
    options = ("--set", "KillWait=2")
    with slurm_cluster(tmp_path_factory, *options, nodes="trn[0-3],gpu[0-3]") as one, one.in_this_process():
        yield one


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run.yaml of a small real run: torch engine, one trainer and one rollout node, two cycles."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: SlurmCluster) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", cluster.environment["PYTHONPATH"])  # for the job: this checkout
    return tmp_path


def keys(name: str, **more: str) -> list[str]:
    """Overrides for a run on the dev cluster."""
    fixed = {
        "launcher": "slurm",
        "trainer.experiment_name": name,
        "trainer.total_training_steps": "2",
        "slurm.time": "00:20:00",
        "slurm.trainer.partition": "trn",
        "slurm.rollout.partition": "gpu",
    }
    return [f"{key}={value}" for key, value in {**fixed, **more}.items()]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "hybridsched.cli.main", *map(str, arguments)]


def ran(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=LONG_S, check=False)


def test_a_submitted_run_trains_and_is_reported(here: Path, inputs: Path) -> None:
    run = submit_run(load_config(inputs, keys("api")))
    ending = run.wait(LONG_S)
    assert 0 == ending.exit_code, ending.text
    state = run.state()
    assert state is not None
    assert "COMPLETED" == state.state
    assert 2 == len(state.components)
    figures = run.report()
    assert ("finished", 2) == (figures["outcome"], figures["cycles"])
    assert (run.folder / "report.html").stat().st_size > 1000


def test_a_rendered_script_handed_to_sbatch_runs(here: Path, inputs: Path, cluster: SlurmCluster) -> None:
    done = ran("render", inputs, *keys("rendered"), "--output", here / "job.sh")
    assert 0 == done.returncode, done.stderr
    cluster.run("sbatch", "--test-only", here / "job.sh")
    job_id = cluster.sbatch(here / "job.sh")
    ending = SlurmRun(here / "runs" / "rendered", job_id).wait(LONG_S)
    log = here / f"rendered-{job_id}.log"
    assert 0 == ending.exit_code, f"{ending.text}\n{log.read_text() if log.exists() else 'no log'}"


def test_watching_shows_the_run_and_ctrl_c_leaves_it_alone_until_cancel(here: Path, inputs: Path) -> None:
    long_run = keys("long", **{"trainer.total_training_steps": "1000", "trainer.total_epochs": "1000"})
    watching = subprocess.Popen(
        command("submit", inputs, *long_run, "--watch"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    said = []
    end = time.monotonic() + LONG_S
    for line in watching.stdout:
        said.append(line)
        if "cycle 1 " in line:
            break
        assert time.monotonic() < end, "".join(said)
    watching.send_signal(2)
    _, told = watching.communicate(timeout=60)
    assert 130 == watching.returncode, told
    job_id = said[0].split()[1]
    assert f"job {job_id} goes on" in told
    assert "RUNNING" == states_of([job_id])[job_id].state
    status = ran("status")
    assert f"{job_id}: RUNNING" in status.stdout
    with pytest.raises(UserError, match=f"job {job_id} of this run is RUNNING"):
        submit_run(load_config(inputs, [*long_run, "trainer.resume_mode=auto"]), resume=True)
    cancelled = ran("cancel", "runs/long")
    assert f"job {job_id} was asked to write a checkpoint and end" in cancelled.stdout, cancelled.stderr
    ending = SlurmRun(here / "runs" / "long", job_id).wait(LONG_S)
    assert (Interrupted.exit_code, "Interrupted") == (ending.exit_code, ending.kind), ending.text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_slurm_takes_the_script_of_every_example(here: Path, cluster: SlurmCluster, path: Path) -> None:
    split = "8-24" in path.stem
    partitions = [f"slurm.trainer.partition={'trn' if split else 'all'}", "slurm.rollout.partition=all"]
    site = ["slurm.site=generic"] if split else []
    done = ran("render", path, *OF_THE_SITE, *partitions, *site, "--output", here / "job.sh")
    if "pyxis" in path.read_text():  # this Slurm is too old for PMIx with mixed partitions, and is told so
        assert "Use mpi: pmi2" in done.stderr
        done = ran(
            "render", path, *OF_THE_SITE, "slurm.trainer.partition=trn", "slurm.rollout.partition=gpu", "-o", "job.sh"
        )
        assert "HYBRIDSCHED_ROLES=rollout,trainer" in (here / "job.sh").read_text()
    assert 0 == done.returncode, done.stderr
    cluster.run("sbatch", "--test-only", here / "job.sh")
