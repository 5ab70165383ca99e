"""Deaths around vLLM: of EngineCore, of the process that owns it, and of replicas in the middle of everything they do.

In every case of a run: it goes on in the same attempt, every sample has one verdict, and nothing is left of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from real_runs import RealRun, make_inputs, real_run
from vllm_kit import CONFIG, need_vllm, play, progressed, request

from hybridsched.engines.vllm_engine import VllmEngine
from hybridsched.errors import FaultError
from hybridsched.models.hf_folder import save_hf
from hybridsched.models.qwen3 import seeded_init
from hybridsched.runtime.adapters.lifeline import is_alive, tag_of

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
GONE_S = 30.0  #: bound of what the kernel does at once


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    need_vllm()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(seeded_init(CONFIG, 1, std=0.2), path)
    return path


# ---- one engine ---------------------------------------------------------------------------------------------------


def test_the_death_of_engine_core_ends_every_call_and_is_told(folder: Path) -> None:
    async def act(engine: VllmEngine) -> None:
        told: list[Exception] = []
        engine._on_death = told.append
        groups = [asyncio.ensure_future(engine.generate(request(uid, ignore_eos=True))) for uid in range(3)]
        await progressed(engine, 20)
        os.kill(engine.pids[0], signal.SIGKILL)
        ended = await asyncio.wait_for(asyncio.gather(*groups, return_exceptions=True), 20)
        assert [FaultError] * 3 == [type(error) for error in ended], ended
        assert f"pid {engine.pids[0]}) ended" in str(ended[0])
        assert [str(ended[0])] == [str(error) for error in told]
        for call in (engine.generate(request(9)), engine.pause("abort"), engine.sleep(), engine.resume()):
            with pytest.raises(FaultError, match="ended"):
                await asyncio.wait_for(call, 20)

    play(folder, act)


_OWNER = """
import asyncio, sys, torch
torch.set_num_threads(1)
from vllm_kit import OPTIONS
from hybridsched.engines.vllm_engine import VllmEngine

async def main():
    engine = VllmEngine(sys.argv[1], OPTIONS)
    await engine.start()
    print(*engine.pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_engine_core_never_outlives_the_process_that_owns_it(folder: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE.parents[1]}"}
    command = [sys.executable, "-c", _OWNER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        try:
            assert owner.stdout is not None
            tags = []
            for line in owner.stdout:  # vLLM says things before; ends with the process
                if line.split() and all(word.isdigit() for word in line.split()):
                    tags = [tag_of(int(word)) for word in line.split()]
                    break
            assert tags
            assert all(map(is_alive, tags))
            os.kill(owner.pid, number)
            end = time.monotonic() + GONE_S
            while any(map(is_alive, tags)) and time.monotonic() < end:
                time.sleep(0.05)
            assert [] == [tag for tag in tags if is_alive(tag)]
        finally:
            owner.kill()


# ---- a run --------------------------------------------------------------------------------------------------------

CYCLES = 16


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealRun, Path]]:
    """One run in which replicas died in every way, one after the other."""
    folder = tmp_path_factory.mktemp("kills")
    deaths = folder / "deaths"
    deaths.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDSCHED_TEST_BUILD", "dying_parts:build")
        patch.setenv("HYBRIDSCHED_TEST_DEATHS", str(deaths))
        patch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}")
        slow = [
            f"reward.function={HERE / 'slow_parts.py'}:reward",
            "reward.kwargs={seconds: 0.15}",
            f"async_training.dynamic_schedule_policy={HERE / 'slow_parts.py'}:EverySecondCycle",
            "actor_rollout_ref.rollout.name=vllm",
            "weight_sync.verify=probe",
            "faults.worker_restarts=10",
            f"trainer.total_training_steps={CYCLES}",
        ]
        with real_run(make_inputs(folder), folder / "run", *slow) as run:
            run.start()
            run.wait_cycles(1)
            die(run, "standalone.0", lambda: kill_core(run, "standalone.0"))
            die(run, "standalone.0", (deaths / "standalone.0.load_bucket").touch)  # in the middle of a sync
            die(run, "hybrid.0", (deaths / "hybrid.0.load_bucket").touch)  # ... of an activation
            die(run, "hybrid.0", (deaths / "hybrid.0.sleep").touch)  # ... of a deactivation
            run.finish()
            yield run, deaths


def die(run: RealRun, worker: str, act: Callable[[], object]) -> None:
    """Cause a death, and wait until the worker's successor is known."""
    ups = len(run.events("worker", worker, "up"))
    act()
    run.wait(lambda: len(run.events("worker", worker, "up")) > ups, f"{worker} is back", 240)


def kill_core(run: RealRun, worker: str) -> None:
    """SIGKILL to the EngineCore of a worker."""

    def cores() -> list[psutil.Process]:
        children = psutil.Process(run.pid(worker)).children()
        return [child for child in children if "EngineCore" in " ".join(child.cmdline())]

    run.wait(cores, f"EngineCore of {worker}")[0].kill()


def test_every_sample_has_one_verdict(survived: tuple[RealRun, Path]) -> None:
    run, deaths = survived
    run.require_exactly_once(run.trained_samples())
    assert [] == list(deaths.iterdir())  # every death was died
    assert CYCLES == run.log().history()[-1].step


def test_all_deaths_were_survived_within_one_attempt(survived: tuple[RealRun, Path]) -> None:
    run, _ = survived
    assert ["1", "latest"] == sorted(path.name for path in (run.folder / "attempts").iterdir())
    exits = {name: len(run.events("worker", name, "exited")) for name in ("standalone.0", "hybrid.0", "trainer.0")}
    assert {"standalone.0": 2, "hybrid.0": 2, "trainer.0": 0} == exits


def test_a_worker_without_its_engine_core_ends_and_says_why(survived: tuple[RealRun, Path]) -> None:
    run, _ = survived
    first = run.events("worker", "standalone.0", "exited")[0]
    assert "SIGKILL" not in first.reason, first.reason
    text = "".join(path.read_text() for path in (run.folder / "attempts/1/logs").glob("standalone.0*"))
    assert "EngineCore" in text
    assert ") ended; this replica's worker has to be started again" in text


def test_the_sync_was_repeated_without_the_dead_receiver(survived: tuple[RealRun, Path]) -> None:
    run, _ = survived
    died = run.events("worker", "standalone.0", "exited")[1].time
    assert any(row.time >= died for row in run.events("sync", new="done"))
    assert [] == run.events("fault", "run", "fatal")


def test_the_hybrid_is_lent_again_after_its_last_death(survived: tuple[RealRun, Path]) -> None:
    run, _ = survived
    last = run.events("worker", "hybrid.0", "exited")[-1].time
    assert any(row.time > last for row in run.events("switch", "hybrid.0", "resume_generation_replicas"))
