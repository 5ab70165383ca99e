"""Building workers from a configuration, and what they are told; scoring through the agent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trainer_kit import run_config, write_model

from hybridsched.config.derived import derive
from hybridsched.config.schema import RunConfig
from hybridsched.engines.emulated import EmulatedEngine
from hybridsched.engines.emulated_draws import draw_rewards
from hybridsched.engines.torch_engine import TorchEngine
from hybridsched.errors import ConfigError, RunFolderError
from hybridsched.model import FinishReason, Response, SamplingParams
from hybridsched.runtime import messages as m
from hybridsched.runtime.clock import RealClock
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.plan import WorkerSpec
from hybridsched.runtime.workers import settings
from hybridsched.runtime.workers.build import (
    agent_scorer,
    build_emulated_worker,
    build_worker,
    emulated_scorer,
    rss_bytes,
)
from hybridsched.runtime.workers.rollout import RolloutWorker
from hybridsched.runtime.workers.trainer import TrainerWorker
from hybridsched.sample_queue.store import FileSegmentStore
from hybridsched.simulation.storage import MemoryDisk, MemorySegmentStore
from hybridsched.trainers.emulated import EmulatedTrainer

HANGS_S = 60.0  # a bound that only a hang reaches
SPECS = {
    "trainer": WorkerSpec("trainer.0", "trainer", 0, 0, (0,)),
    "hybrid": WorkerSpec("hybrid.0", "hybrid", 0, 0, (0,)),
    "standalone": WorkerSpec("standalone.3", "standalone", 3, 2, (1,)),
}


@dataclass
class Context:
    run_folder: Path
    run_id: str = "run-1"
    incarnation: str = "i1"
    secret: str = "s"


def emulated(**sections: Any) -> RunConfig:
    both = {"actor": {"strategy": "emulated"}, "rollout": {"name": "emulated", "n": 4}}
    return RunConfig.model_validate({"actor_rollout_ref": both, **sections})


def wired(*names: str) -> dict[str, Endpoint]:
    """Endpoints that deliver to each other at once."""
    ends: dict[str, Endpoint] = {}
    for name in names:
        ends[name] = Endpoint(name, lambda envelope: ends[envelope.dst].deliver(envelope))
    return ends


def build(spec: WorkerSpec, config: RunConfig, folder: Path) -> RolloutWorker | TrainerWorker:
    return build_worker(spec, config, Context(folder), Endpoint(spec.worker, print), RealClock(), asyncio.to_thread)


def lease(n: int = 4, uid: int = 0) -> m.Lease:
    return m.Lease(1, "train", uid, "p0", np.array([1], np.int32), SamplingParams(n=n, seed=5), "math", "7", {"a": 1})


def responses(count: int) -> list[Response]:
    one = Response(np.array([1, 2], np.int32), np.zeros(2, np.float32), (), FinishReason.STOP)
    return [one] * count


# --- settings -----------------------------------------------------------------------------------------------------


def test_every_bound_scales_with_the_machine() -> None:
    slow, normal = RunConfig.model_validate({"deadlines": {"scale": 3.0}}), RunConfig()
    once, thrice = settings.phase_deadlines(normal), settings.phase_deadlines(slow)
    assert set(once) == {"starting", "decode", "idle", "sync", "switch", "train", "checkpoint", "shutdown"}
    assert thrice == {phase: pytest.approx(3 * bound) for phase, bound in once.items()}
    assert settings.trainer_settings(slow, SPECS["trainer"]).group_timeout_s == 3 * 1800.0


def test_the_controllers_own_deadlines_end_before_the_agents() -> None:
    config = RunConfig()
    limits, d = settings.phase_deadlines(config), config.deadlines
    assert limits["sync"] > config.weight_sync.attempts * d.sync_s
    assert limits["switch"] > 5 * d.switch_s
    assert limits["checkpoint"] > d.checkpoint_s
    assert settings.reward_call_s(config, 8) > settings.reward_queue_s(config) + 8 * config.reward.timeout_s


def test_a_sleeping_worker_has_no_limit() -> None:
    assert "asleep" not in settings.phase_deadlines(RunConfig())


def test_overlong_shaping_is_off_unless_enabled() -> None:
    def shaping(enable: bool) -> tuple[int, float]:
        config = emulated(reward={"overlong_buffer": {"enable": enable, "len": 16, "penalty_factor": 0.5}})
        found = settings.rollout_settings(config, derive(config), SPECS["standalone"])
        return found.overlong_buffer, found.overlong_factor

    assert (shaping(False), shaping(True)) == ((0, 0.0), (16, 0.5))


def test_a_worker_reports_to_the_agent_of_its_node() -> None:
    config = emulated()
    assert settings.rollout_settings(config, derive(config), SPECS["standalone"], beat_s=9.0).agent == "agent.2"
    assert settings.rollout_settings(config, derive(config), SPECS["standalone"], beat_s=9.0).beat_s == 9.0
    assert settings.trainer_settings(config, SPECS["trainer"]).agent == "agent.0"


# --- building -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "made"), [("trainer", TrainerWorker), ("hybrid", RolloutWorker)])
def test_emulated_workers_are_built_in_a_process_and_in_a_simulation(tmp_path: Path, kind: str, made: type) -> None:
    config, spec = emulated(), SPECS[kind]
    real = build(spec, config, tmp_path)
    simulated = build_emulated_worker(
        spec,
        config,
        derive(config),
        Endpoint(spec.worker, print),
        RealClock(),
        asyncio.to_thread,
        MemorySegmentStore(MemoryDisk()),
        "sim0",
    )
    assert (type(real), type(simulated)) == (made, made)
    parts = {type(getattr(worker, "_trainer" if kind == "trainer" else "_engine")) for worker in (real, simulated)}
    assert parts == {EmulatedTrainer if kind == "trainer" else EmulatedEngine}


def test_a_torch_replica_starts_and_lets_go_of_everything_when_it_sleeps(tmp_path: Path) -> None:
    config = run_config(write_model(tmp_path / "model"), data={"max_prompt_length": 8, "max_response_length": 8})
    spec = SPECS["standalone"]

    async def main() -> tuple[m.MemoryReport, m.MemoryReport]:
        ends = wired(spec.worker, "controller")
        build_worker(spec, config, Context(tmp_path), ends[spec.worker], RealClock(), asyncio.to_thread)
        call = ends["controller"].call
        started = await call(spec.worker, m.StartEngine(), m.MemoryReport, deadline_s=HANGS_S, what="start")
        slept = await call(spec.worker, m.SleepEngine(), m.MemoryReport, deadline_s=HANGS_S, what="sleep")
        return started, slept

    started, slept = asyncio.run(main())
    assert started.weights_bytes > 0
    assert started.kv_bytes > 0
    assert (slept.weights_bytes, slept.kv_bytes) == (0, 0)


def test_a_torch_trainer_joins_and_tells_its_weights(tmp_path: Path) -> None:
    config = run_config(write_model(tmp_path / "model"))

    async def main() -> m.SyncAddress:
        ends = wired("trainer.0", "controller")
        build_worker(SPECS["trainer"], config, Context(tmp_path), ends["trainer.0"], RealClock(), asyncio.to_thread)
        call = ends["controller"].call
        where = await call("trainer.0", m.OpenRendezvous(), m.Rendezvous, deadline_s=HANGS_S, what="open")
        start = m.StartTrainer(0, 1, where.address)
        await call("trainer.0", start, m.MemoryReport, deadline_s=HANGS_S, what="start")
        opened = m.OpenSync(1, ["trainer.0", "standalone.0"], True)
        return await call("trainer.0", opened, m.SyncAddress, deadline_s=HANGS_S, what="open sync")

    address = asyncio.run(main())
    host, _, port = address.address.rpartition(":")
    assert (host, int(port) > 0, address.secret) == ("127.0.0.1", True, "s.1")
    assert "model.embed_tokens.weight" in [spec.name for spec in address.specs]


def test_a_trainer_that_is_not_installed_is_refused_with_key_and_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hybridsched.trainers.megatron_trainer", None)  # importing it fails
    config = run_config(write_model(tmp_path / "model"), {"strategy": "megatron"})
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.actor\.strategy: megatron .*hybridsched\[megatron\]"):
        build(SPECS["trainer"], config, tmp_path)


def test_engine_and_trainer_are_chosen_independently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    class Stub:
        def __init__(self, _config: RunConfig, **options: Any) -> None:
            made.update(options)

    monkeypatch.setitem(sys.modules, "hybridsched.trainers.megatron_trainer", SimpleNamespace(MegatronTrainer=Stub))
    config = run_config(write_model(tmp_path / "model"), {"strategy": "megatron"})
    trainer, replica = build(SPECS["trainer"], config, tmp_path), build(SPECS["hybrid"], config, tmp_path)
    assert (type(trainer._trainer), type(replica._engine)) == (Stub, TorchEngine)
    assert (made["device"], made["scratch"].is_dir()) == ("cpu", True)


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    FileSegmentStore(tmp_path, "another")
    with pytest.raises(RunFolderError, match="'another'"):
        build(SPECS["hybrid"], emulated(), tmp_path)


def test_a_new_replica_removes_only_what_its_own_predecessor_left_unfinished(tmp_path: Path) -> None:
    left = {}
    for producer in ("hybrid.0", "standalone.3"):
        left[producer] = tmp_path / "queue" / "seg" / producer / ".i0-00000000.h5.tmp"
        left[producer].parent.mkdir(parents=True)
        left[producer].touch()
    build(SPECS["hybrid"], emulated(), tmp_path)
    assert [path.exists() for path in left.values()] == [False, True]


def test_building_emulated_workers_loads_neither_torch_nor_hdf5() -> None:
    script = (
        "import sys, hybridsched.runtime.workers.build as b; "
        "print([name for name in ('torch', 'h5py', 'tokenizers') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_resident_memory_is_measured() -> None:
    before = rss_bytes()
    block = np.ones(32 << 20, np.uint8)
    assert rss_bytes() - before > 16 << 20
    del block


# --- scoring ------------------------------------------------------------------------------------------------------


def through_agent(answer: Any) -> list[tuple[float | None, str | None]]:
    """Score two responses where the agent answers with ``answer`` (or raises it)."""
    asked: list[m.RewardRequest] = []

    async def on_request(request: m.RewardRequest, _src: str) -> m.RewardReply:
        asked.append(request)
        if isinstance(answer, Exception):
            raise answer
        reply: m.RewardReply = answer
        return reply

    async def main() -> list[tuple[float | None, str | None]]:
        ends = wired("standalone.3", "agent.2")
        ends["agent.2"].on(m.RewardRequest, on_request)
        score = agent_scorer(RunConfig(), ends["standalone.3"], "agent.2")
        return await score(lease(), responses(2))

    scores = asyncio.run(main())
    (request,) = asked
    assert (request.data_source, request.ground_truth, request.extra_info) == ("math", "7", {"a": 1})
    assert [tokens.tolist() for tokens in request.responses] == [[1, 2], [1, 2]]
    return scores


def test_rewards_and_failures_come_back_per_response() -> None:
    assert through_agent(m.RewardReply([(1.0, None), (None, "timed out")])) == [(1.0, None), (None, "timed out")]


def test_an_agent_that_fails_fails_every_response_and_scores_none() -> None:
    scores = through_agent(ValueError("pool is broken"))
    assert [reward for reward, _ in scores] == [None, None]
    assert "pool is broken" in str(scores[0][1])


def test_the_wrong_number_of_rewards_is_a_failure_of_all() -> None:
    assert (
        through_agent(m.RewardReply([(1.0, None)])) == [(None, "not scored: 1 rewards came back for 2 responses")] * 2
    )


def test_emulated_rewards_are_those_of_the_draws() -> None:
    config = emulated()
    drawn = draw_rewards(config.emulated, 5, 0, 4)
    scores = asyncio.run(emulated_scorer(config)(lease(), responses(4)))
    assert scores == [(reward, None) for reward in drawn]


def test_emulated_failures_are_drawn_anew_for_exactly_the_failed_ones() -> None:
    config = emulated(emulated={"reward_failed_fraction": 0.5}, reward={"retries": 3})
    score = emulated_scorer(config)
    for uid in range(50):
        first = asyncio.run(score(lease(uid=uid), responses(4)))
        failed = [i for i, (reward, _) in enumerate(first) if reward is None]
        if 0 < len(failed) < 4:
            again = asyncio.run(score(lease(uid=uid), responses(len(failed))))
            drawn = draw_rewards(config.emulated, 5, uid, 4, attempt=1)
            assert [reward for reward, _ in again] == [drawn[i] for i in failed]
            assert [why is None for _, why in again] == [reward is not None for reward, _ in again]


def test_an_emulated_sample_that_explains_nothing_is_still_scored() -> None:
    scores = asyncio.run(emulated_scorer(emulated())(lease(), responses(3)))
    assert len(scores) == 3
