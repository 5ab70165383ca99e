"""kill -9, hangs and a full disk during `hybridsched run`, with real processes: the outcomes DESIGN 14 names.

In every case: the run finishes (by itself, by the launch loop, or with --resume), fsck finds nothing, every sample has
exactly one verdict, and no process of the run is left.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_runs import LONG_S, RealRun, make_inputs, real_run

from hybridsched.runlog.rows import EventRow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PARTS = Path(__file__).with_name("slow_parts.py")
SLOW = [
    f"reward.function={PARTS}:reward",
    "reward.kwargs={seconds: 0.15}",
    f"async_training.dynamic_schedule_policy={PARTS}:EverySecondCycle",
]
S = 8  #: samples of a cycle


@pytest.fixture(scope="session")
def run_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and configuration, made once."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


# --- workers: the same attempt goes on -----------------------------------------------------------------------------

CYCLES = 9


def kill_and_wait_back(run: RealRun, worker: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a worker, and wait until the controller knows the next one of that name."""
    ups = len(run.events("worker", worker, "up"))
    run.kill(worker, number)
    run.wait(lambda: len(run.events("worker", worker, "up")) > ups, f"{worker} is back")


@pytest.fixture(scope="module")
def workers_killed(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """One run in which every kind of worker was killed, one after the other."""
    short = [f"deadlines.{name}=15" for name in ("decode_s", "agent_silence_s", "sync_s", "bucket_s", "call_s")]
    folder = tmp_path_factory.mktemp("workers") / "run"
    with real_run(run_yaml, folder, *SLOW, *short, f"trainer.total_training_steps={CYCLES}") as run:
        run.start()
        run.wait_cycles(1)
        kill_and_wait_back(run, "standalone.0")
        run.wait_event("switch", "pool", "activated")
        kill_and_wait_back(run, "hybrid.0")
        run.wait_event("sync", None, "second sync skipped")
        kill_and_wait_back(run, "hybrid.0")
        run.wait_event("switch", "pool", "activated")
        run.kill("trainer.0")
        run.wait(lambda: run.events("fault", "trainer", "group restarted"), "the trainer group restarts")
        run.kill("reward")
        kill_and_wait_back(run, "standalone.0", signal.SIGSTOP)
        run.finish()
        yield run


def exits(run: RealRun, worker: str) -> list[EventRow]:
    """Ends of a worker while the run went on."""
    return run.events("worker", worker, "exited")


def while_lent(run: RealRun, when: float) -> bool:
    """Whether the trainer's GPUs were lent at that time."""
    switches = [row for row in run.events("switch", "pool") if row.time <= when and row.new != "rebalanced"]
    return bool(switches) and switches[-1].new == "activated"


def test_after_workers_were_killed_every_sample_has_one_verdict(workers_killed: RealRun) -> None:
    report = workers_killed.require_exactly_once(workers_killed.trained_samples())

    assert report.ledger is not None
    assert {"trained", "surplus"} >= set(report.ledger.verdicts)
    assert CYCLES == workers_killed.log().history()[-1].step


def test_killed_workers_are_replaced_within_the_attempt(workers_killed: RealRun) -> None:
    run = workers_killed

    assert ["1", "latest"] == sorted(path.name for path in (run.folder / "attempts").iterdir())
    assert (2, 2, 1) == tuple(len(exits(run, name)) for name in ("standalone.0", "hybrid.0", "trainer.0"))
    assert all(
        row.reason.startswith("killed by SIGKILL") for row in [*exits(run, "hybrid.0"), exits(run, "trainer.0")[0]]
    )


def test_the_hybrid_was_killed_once_lent_and_once_asleep(workers_killed: RealRun) -> None:
    assert [True, False] == [while_lent(workers_killed, row.time) for row in exits(workers_killed, "hybrid.0")]


def test_a_killed_hybrid_is_lent_again(workers_killed: RealRun) -> None:
    last = exits(workers_killed, "hybrid.0")[-1].time

    assert any(row.time > last for row in workers_killed.events("switch", "hybrid.0", "resume_generation_replicas"))


def test_a_killed_trainer_opens_a_new_lineage_that_all_replicas_are_synced_to(workers_killed: RealRun) -> None:
    run = workers_killed
    [restored] = run.events("run", "run", "restored")
    lineage, number = restored.detail["version"]

    assert lineage == 1
    assert any(row.time > restored.time for row in run.events("sync", f"1.{number}", "done"))
    assert [] == [
        row.entity for row in run.events("sync", new="begun") if row.time > restored.time and row.entity[0] == "0"
    ]


def test_the_work_of_a_killed_replica_is_given_out_again_within_seconds(workers_killed: RealRun) -> None:
    died = exits(workers_killed, "standalone.0")[0].time
    first = next(row for row in workers_killed.events("fault", "standalone.0", "recovered") if row.time >= died)

    assert first.detail["restarted"] + first.detail["reissued"] > 0


def test_a_killed_reward_process_costs_no_sample(workers_killed: RealRun) -> None:
    assert [] == workers_killed.events("fault", "run", "fatal")
    assert 0 == sum(row.values.get("samples/failed", 0) for row in workers_killed.log().metric_rows)


def test_a_worker_that_hangs_is_noticed_by_a_deadline_and_replaced(workers_killed: RealRun) -> None:
    reason = exits(workers_killed, "standalone.0")[1].reason

    assert re.search(r"no progress in phase|did not (pause|answer)|within 15 s|no answer", reason), reason


# --- agents and mpiexec: the launch loop starts the step again ------------------------------------------------------


def test_the_launch_loop_goes_on_after_an_agent_rank_0_and_mpiexec_were_killed(run_yaml: Path, tmp_path: Path) -> None:
    steps = 5
    with real_run(
        run_yaml, tmp_path / "run", *SLOW, f"trainer.total_training_steps={steps}", "faults.attempts=5"
    ) as run:
        run.start()
        for attempt, victim in enumerate(["agent.1", "agent.0", "mpiexec"], 1):
            run.wait_attempt(attempt)
            run.wait_cycles(1)
            run.kill(victim)
        said = run.finish()

        assert ["1", "2", "3", "4", "latest"] == sorted(path.name for path in (run.folder / "attempts").iterdir())
        assert 3 == said.count("starting again from the newest checkpoint")
        run.require_exactly_once(steps * S)
        assert list(range(1, steps + 1)) == [row.step for row in run.log().history()]


# --- the launcher, and everything at once ---------------------------------------------------------------------------


def test_a_killed_launcher_takes_everything_with_it_and_the_run_is_resumed(run_yaml: Path, tmp_path: Path) -> None:
    """Also: a second launcher is refused; and everything killed at once, at three random moments."""
    steps = 6
    draw = random.Random(20261201)
    with real_run(run_yaml, tmp_path / "run", *SLOW, f"trainer.total_training_steps={steps}") as run:
        run.start()
        run.wait_cycles(1)
        require_refused(run)
        run.wait_cycles(1)
        assert run.process is not None
        run.process.kill()
        run.process.communicate()
        run.require_gone()
        for moment in (
            lambda: run.wait(run.processes, "a process") and time.sleep(draw.uniform(0.0, 8.0)),
            lambda: run.wait_event("sync", None, "begun") and time.sleep(draw.uniform(0.0, 0.3)),
            lambda: run.wait_event("sync", None, "done") and time.sleep(draw.uniform(0.0, 3.0)),
        ):
            run.start("--resume")
            kill_everything(run, moment)
        run.start("--resume")
        run.finish()

        run.require_exactly_once(steps * S)
        assert list(range(1, steps + 1)) == [row.step for row in run.log().history()]


def require_refused(run: RealRun) -> None:
    """Every further launcher on the folder of a running run: told who owns it, and nothing changed."""
    before = {path: path.read_bytes() for path in [run.folder / "run.json", run.folder / "config" / "resolved.yaml"]}
    for option in ("--resume", "--force"):
        second = run.launcher(option, "trainer.total_training_steps=1")
        said, _ = second.communicate(timeout=LONG_S)

        assert second.returncode in (2, 3), said
        assert "is owned by process" in said
        assert "it is alive" in said
    assert before == {path: path.read_bytes() for path in before}
    assert "1" == os.readlink(run.folder / "attempts" / "latest")


def kill_everything(run: RealRun, moment: Callable[[], object]) -> None:
    """SIGKILL to the launcher and all it started."""
    moment()
    assert run.process is not None
    victims = [run.process.pid, *run.processes()]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    run.process.communicate()
    run.require_gone()


# --- a full disk ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MB."""
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)], check=True, timeout=60)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)


def fill(folder: Path) -> Path:
    """A file that takes what is left but for a few pages."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as stream:
        os.posix_fallocate(stream.fileno(), 0, max(1, shutil.disk_usage(folder).free - (16 << 10)))
    return filler


def test_a_full_disk_stops_admission_and_loses_nothing(run_yaml: Path, small_disk: Path) -> None:
    steps = 4
    room = ["queue.min_free_bytes=1000000", "queue.seal_bytes=100000", "queue.retry_s=0.5"]
    with real_run(run_yaml, small_disk / "run", *SLOW, *room, f"trainer.total_training_steps={steps}") as run:
        run.start()
        run.wait_cycles(1)
        filler = fill(small_disk)
        time.sleep(6.0)  # a few samples and a checkpoint meet the full disk
        assert run.process is not None
        if run.process.poll() is not None:
            raise AssertionError(f"{run.end()}\n{run.story()}")
        filler.unlink()
        run.finish()

        run.require_exactly_once(steps * S)
        news = {row.new for row in run.events("fault")}
        assert {"admission stopped", "admission goes on"} <= news, run.story()
        assert news & {"disk full", "not written"}, run.story()
