"""The emulated engine: time by hand-worked numbers, lengths that routing cannot change, versions, guards, faults."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.config.schema import EmulatedConfig
from hybridsched.engines.base import EngineMemory, GroupRequest
from hybridsched.engines.emulated import EmulatedEngine, FaultKind
from hybridsched.engines.emulated_draws import draw_length, draw_rewards, emulated_rewards
from hybridsched.errors import ConfigError, InternalError, WeightSyncError, WorkerDied
from hybridsched.model import (
    FinishReason,
    ReplicaKind,
    Response,
    Sample,
    SamplingParams,
    TensorSpec,
    VersionRun,
    WeightVersion,
)
from hybridsched.simulation.clock import EPOCH_BASE, VirtualClock, run_virtual
from hybridsched.trainers.emulated import EmulatedTrainer

V0, V1, V2 = (WeightVersion(0, n) for n in range(3))
CONFIG = EmulatedConfig(
    response_mean_tokens=10,
    response_sigma=0,
    decode_base_s=1.0,
    decode_per_seq_s=0.5,
    prefill_tokens_per_s=10.0,
    wake_s=3.0,
    sleep_s=2.0,
    sync_s=4.0,
    handover_s=1.5,
)


def make_engine(config: EmulatedConfig = CONFIG, **more: Any) -> EmulatedEngine:
    settings: dict[str, Any] = {"kind": ReplicaKind.STANDALONE, "kv_tokens": 10_000, "max_num_seqs": 100}
    return EmulatedEngine(config, wall=VirtualClock().wall, **{**settings, **more})


def make_group(key: str = "a", n: int = 1, uid: int = 0, budget: int = 100, **more: Any) -> GroupRequest:
    partials = more.pop("partials", (Response.empty(),) * n)
    prompt = np.zeros(more.pop("prompt", 10), np.int32)
    return GroupRequest(key, uid, prompt, SamplingParams(n=n, max_new_tokens=budget, **more), partials)


def now() -> float:
    return asyncio.get_running_loop().time()


async def started(config: EmulatedConfig = CONFIG, **more: Any) -> EmulatedEngine:
    engine = make_engine(config, **more)
    await engine.start()
    return engine


async def sync(engine: EmulatedEngine, version: WeightVersion, keep_kv: bool = False) -> None:
    await engine.begin_update(())
    await engine.finish_update(version, keep_kv=keep_kv)


def spawn(coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coro)


def lengths_of(responses: tuple[Response, ...]) -> list[int]:
    return [r.n_tokens for r in responses]


def test_a_group_takes_prefill_plus_length_steps() -> None:
    async def main() -> None:
        engine = await started()
        responses = await engine.generate(make_group(n=4))
        assert now() == 1.0 + 10 * 3.0  # 10 prompt tokens at 10/s; ten steps of 1 + 4 x 0.5 s
        response = responses[0]
        assert (len(responses), response.n_tokens, response.finish) == (4, 10, FinishReason.STOP)
        assert response.version_runs == (VersionRun(V0, 0, 10),)
        assert (response.t_start, response.t_end) == (EPOCH_BASE, EPOCH_BASE + 31.0)
        assert (response.token_ids.dtype, response.logprobs.dtype) == (np.int32, np.float32)
        assert response.logprobs.shape == (10,)

    run_virtual(main())


def test_a_hybrid_runs_at_its_own_speed_with_its_own_kv_budget() -> None:
    async def main() -> None:
        config = CONFIG.model_copy(update={"hybrid_speed": 0.5})
        engine = await started(config, kind=ReplicaKind.HYBRID, kv_tokens=30)
        await engine.generate(make_group(n=2, budget=10))  # 10 + 2 x 10 tokens just fit
        assert now() == (1.0 + 10 * 2.0) * 2
        await engine.generate(make_group(n=3, budget=10))  # two side by side, the third after them
        assert now() == 42.0 + (1.0 + 10 * 2.0) * 2 + (1.0 + 10 * 1.5) * 2

    run_virtual(main())


def test_a_budget_cuts_off_with_length_and_ignore_eos_goes_to_the_budget() -> None:
    async def main() -> None:
        engine = await started()
        found = {}
        for name, group in {
            "cut": make_group(budget=9),
            "exact": make_group(budget=10),
            "forced": make_group(budget=25, ignore_eos=True),
        }.items():
            (response,) = await engine.generate(group)
            found[name] = (response.n_tokens, response.finish)
        assert found == {
            "cut": (9, FinishReason.LENGTH),
            "exact": (10, FinishReason.STOP),
            "forced": (25, FinishReason.LENGTH),
        }

    run_virtual(main())


def test_a_sequence_that_can_outgrow_the_kv_budget_is_refused_with_the_key() -> None:
    async def main() -> None:
        engine = await started(kv_tokens=100)
        with pytest.raises(ConfigError, match=r"kv_cache_tokens: a budget of 100 tokens cannot hold .* 110"):
            await engine.generate(make_group(budget=100))

    run_virtual(main())


def test_abort_returns_partials_before_it_returns_and_they_continue_elsewhere_to_the_same_length() -> None:
    async def main() -> None:
        first, second = await started(), await started()
        task = spawn(first.generate(make_group(n=2)))
        await asyncio.sleep(1.0 + 3 * 2.0 + 0.1)
        await first.abort(["a", "unknown"])
        assert task.done()
        partials = task.result()
        assert [(r.n_tokens, r.finish) for r in partials] == [(3, FinishReason.ABORTED)] * 2
        assert first.running_sequences() == 0
        begin = now()
        responses = await second.generate(make_group(n=2, partials=partials))
        assert now() - begin == pytest.approx(1.6 + 7 * 2.0)  # prompt and 2 x 3 tokens prefilled, 7 steps
        assert lengths_of(responses) == [10, 10]
        assert [r.version_runs for r in responses] == [(VersionRun(V0, 0, 10),)] * 2  # same version: one run
        assert responses[0].t_start == partials[0].t_start == EPOCH_BASE

    run_virtual(main())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**63), st.integers(0, 10**9), st.lists(st.floats(0.1, 40.0), max_size=6), st.integers(20, 200))
def test_lengths_do_not_depend_on_aborts_and_version_runs_cover_exactly_the_tokens(
    seed: int, uid: int, pauses: list[float], budget: int
) -> None:
    config = CONFIG.model_copy(update={"response_mean_tokens": 40.0, "response_sigma": 1.0})

    async def interrupted() -> tuple[Response, ...]:
        responses: tuple[Response, ...] = (Response.empty(),) * 3
        for number, pause in enumerate(pauses):
            engine = await started(config, version=WeightVersion(0, number))
            task = spawn(engine.generate(make_group(n=3, uid=uid, seed=seed, budget=budget, partials=responses)))
            await asyncio.sleep(pause)
            await engine.abort()
            responses = await task
        engine = await started(config, version=WeightVersion(0, len(pauses)))
        return await engine.generate(make_group(n=3, uid=uid, seed=seed, budget=budget, partials=responses))

    async def in_one_go() -> tuple[Response, ...]:
        return await (await started(config)).generate(make_group(n=3, uid=uid, seed=seed, budget=budget))

    whole, pieces = run_virtual(in_one_go()), run_virtual(interrupted())
    assert [(r.n_tokens, r.finish) for r in pieces] == [(r.n_tokens, r.finish) for r in whole]
    for r in pieces:
        assert [run.start for run in r.version_runs] == [0, *(run.end for run in r.version_runs)][:-1]
        assert r.version_runs[-1].end == r.n_tokens
        numbers = [run.version.number for run in r.version_runs]
        assert numbers == sorted(set(numbers))


def test_finished_responses_come_back_as_they_are_and_take_no_time() -> None:
    async def main() -> None:
        engine = await started()
        done = (await engine.generate(make_group()))[0].with_reward(0.5)
        begin = now()
        assert await engine.generate(make_group(n=1, partials=(done,))) == (done,)
        assert now() == begin
        responses = await engine.generate(make_group(n=2, partials=(done, Response.empty())))
        assert responses[0] is done
        assert responses[1].n_tokens == 10

    run_virtual(main())


def test_a_partial_with_nothing_left_of_its_budget_is_finished_at_once() -> None:
    async def main() -> None:
        engine = await started()
        partial = Response(
            np.zeros(9, np.int32), np.zeros(9, np.float32), (VersionRun(V0, 0, 9),), FinishReason.ABORTED
        )
        (response,) = await engine.generate(make_group(budget=9, partials=(partial,)))
        assert (response.n_tokens, response.finish, response.version_runs) == (
            9,
            FinishReason.LENGTH,
            (VersionRun(V0, 0, 9),),
        )
        assert now() == 0.0

    run_virtual(main())


def test_keep_with_recomputed_kv_splits_the_run_and_pays_for_the_prefill() -> None:
    async def main() -> None:
        engine = await started()
        task = spawn(engine.generate(make_group(n=2)))
        await asyncio.sleep(1.0 + 4 * 2.0)
        await engine.pause("keep")
        await sync(engine, V1)
        await engine.resume()
        assert now() == 9.0 + 4.0
        responses = await task
        assert now() == pytest.approx(13.0 + (10 + 2 * 4) / 10.0 + 6 * 2.0)
        assert [r.version_runs for r in responses] == [(VersionRun(V0, 0, 4), VersionRun(V1, 4, 10))] * 2

    run_virtual(main())


def test_kept_kv_is_marked_for_what_was_in_the_batch_only() -> None:
    async def main() -> None:
        engine = await started(max_num_seqs=1)
        task = spawn(engine.generate(make_group(n=2)))
        await asyncio.sleep(1.0 + 4 * 1.5)
        await engine.pause("keep")
        await sync(engine, V1, keep_kv=True)
        await engine.resume()
        assert (await task)[0].version_runs == (VersionRun(V0, 0, 4), VersionRun(V1, 4, 10, True))
        assert task.result()[1].version_runs == (VersionRun(V1, 0, 10),)  # it waited: nothing of it was computed

    run_virtual(main())


def test_a_response_that_finished_before_the_sync_keeps_its_version() -> None:
    async def main() -> None:
        engine = await started(lengths=lambda seed, uid, index: (2, 8)[index])
        task = spawn(engine.generate(make_group(n=2)))
        await asyncio.sleep(1.0 + 2 * 2.0)
        await engine.pause("keep")
        await sync(engine, V1, keep_kv=True)
        await engine.resume()
        responses = await task
        assert [r.version_runs for r in responses] == [
            (VersionRun(V0, 0, 2),),
            (VersionRun(V0, 0, 2), VersionRun(V1, 2, 8, True)),
        ]
        assert responses[0].t_end == EPOCH_BASE + 5.0

    run_virtual(main())


def test_pause_abort_returns_partials_and_holds_newcomers_until_resume() -> None:
    async def main() -> None:
        engine = await started()
        running = spawn(engine.generate(make_group("a")))
        await asyncio.sleep(2.5)
        await engine.pause("abort")
        assert running.done()
        assert lengths_of(running.result()) == [1]
        held = spawn(engine.generate(make_group("b")))
        await asyncio.sleep(100)
        assert (engine.unfinished("b"), engine.running_sequences(), held.done()) == (1, 0, False)
        await engine.resume()
        begin = now()
        await held
        assert now() - begin == 1.0 + 10 * 1.5
        assert engine.unfinished("b") == 0

    run_virtual(main())


def test_a_held_group_can_be_aborted_and_gives_its_partials_unchanged() -> None:
    async def main() -> None:
        engine = await started()
        await engine.pause("keep")
        group = make_group()
        held = spawn(engine.generate(group))
        await asyncio.sleep(1)
        await engine.abort(["a"])
        assert held.result() == group.partials

    run_virtual(main())


def test_pause_wait_finishes_what_runs_and_holds_newcomers() -> None:
    async def main() -> None:
        engine = await started()
        running = spawn(engine.generate(make_group("a")))
        await asyncio.sleep(1.0)
        pausing = spawn(engine.pause("wait"))
        await asyncio.sleep(1.0)
        newcomer = spawn(engine.generate(make_group("b")))
        await pausing
        assert (now(), running.done(), newcomer.done()) == (16.0, True, False)
        await engine.resume()
        assert lengths_of(await newcomer) == [10]
        assert now() == 32.0

    run_virtual(main())


def test_a_cancelled_wait_leaves_the_engine_running_newcomers_too() -> None:
    async def main() -> None:
        engine = await started()
        spawn(engine.generate(make_group("a")))
        await asyncio.sleep(1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                newcomer = spawn(engine.generate(make_group("b")))
                await engine.pause("wait")
        assert engine.running_sequences() == 2
        assert lengths_of(await newcomer) == [10]

    run_virtual(main())


def test_a_caller_that_gives_up_frees_its_place() -> None:
    async def main() -> None:
        engine = await started(max_num_seqs=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4.0):
                await engine.generate(make_group("a"))
        assert (engine.running_sequences(), engine.unfinished("a")) == (0, 0)
        await engine.generate(make_group("a"))
        assert now() == 4.0 + 1.0 + 15.0

    run_virtual(main())


def test_a_key_twice_is_refused() -> None:
    async def main() -> None:
        engine = await started()
        spawn(engine.generate(make_group("a")))
        await asyncio.sleep(1.0)
        with pytest.raises(InternalError, match="'a' is running already"):
            await engine.generate(make_group("a"))

    run_virtual(main())


def test_sleep_and_wake_take_their_time_and_memory_follows() -> None:
    async def main() -> None:
        engine = await started(
            kind=ReplicaKind.HYBRID, weights_bytes=7, kv_bytes_per_token=3, kv_tokens=200, version=V0
        )
        seen = [(now(), engine.memory())]
        await engine.sleep()
        seen.append((now(), engine.memory()))
        await engine.wake_weights()
        seen.append((now(), engine.memory()))
        await sync(engine, V2)
        await engine.wake_kv()
        seen.append((now(), engine.memory()))
        assert seen == [
            (0.0, EngineMemory(7, 600)),
            (2.0, EngineMemory(0, 0)),
            (5.0, EngineMemory(7, 0)),
            (6.5, EngineMemory(7, 600)),
        ]
        await engine.resume()
        (response,) = await engine.generate(make_group())
        assert response.version_runs == (VersionRun(V2, 0, 10),)
        assert engine.version == V2

    run_virtual(main())


def test_nothing_runs_on_weights_that_were_not_refilled_after_a_wake() -> None:
    async def main() -> list[str]:
        engine = await started()
        complaints = []

        async def refused(coro: Coroutine[Any, Any, Any]) -> None:
            with pytest.raises(InternalError) as caught:
                await coro
            complaints.append(str(caught.value))

        await engine.sleep()
        await refused(engine.generate(make_group()))
        await refused(engine.resume())
        await refused(engine.begin_update(()))
        await engine.wake_weights()
        await refused(engine.generate(make_group()))
        await refused(engine.wake_kv())
        await refused(engine.logprobs([], 1.0))
        await refused(engine.wake_weights())
        await sync(engine, V1)
        await refused(engine.resume())
        await engine.wake_kv()
        await engine.resume()
        await refused(engine.begin_update(()))
        return complaints

    expected = [
        "asleep",
        "asleep",
        "asleep",
        "NaN",
        "NaN",
        "NaN",
        "not asleep",
        "KV cache is not mapped",
        "not paused",
    ]
    assert [word in text for word, text in zip(expected, run_virtual(main()), strict=True)] == [True] * 9


def test_sleep_with_work_on_the_engine_is_refused() -> None:
    async def main() -> None:
        engine = await started()
        spawn(engine.generate(make_group("busy")))
        await asyncio.sleep(1)
        with pytest.raises(InternalError, match="busy"):
            await engine.sleep()

    run_virtual(main())


def test_using_an_engine_before_start_is_refused() -> None:
    async def main() -> None:
        engine = make_engine()
        with pytest.raises(InternalError, match="not started"):
            await engine.generate(make_group())
        await engine.start()
        with pytest.raises(InternalError, match="twice"):
            await engine.start()

    run_virtual(main())


def test_an_update_is_complete_or_raises() -> None:
    async def main() -> None:
        engine = await started()
        await engine.pause("keep")
        trainer = EmulatedTrainer(CONFIG)
        with pytest.raises(WeightSyncError, match="was offered"):
            await engine.begin_update([TensorSpec("other", (1,), "float32")])
        await engine.begin_update(trainer.weight_specs())
        with pytest.raises(WeightSyncError, match="did not arrive"):
            await engine.finish_update(V1)
        with pytest.raises(WeightSyncError, match="not announced"):
            await engine.load_bucket({"other": None})
        with pytest.raises(InternalError, match="middle of a weight update"):
            await engine.resume()
        for name, tensor in trainer.iter_weights():
            await engine.load_bucket({name: tensor})
        await engine.finish_update(V1)
        assert (engine.version, now()) == (V1, 4.0)
        with pytest.raises(InternalError, match="without begin_update"):
            await engine.finish_update(V2)
        with pytest.raises(InternalError, match="outside begin_update"):
            await engine.load_bucket({})

    run_virtual(main())


def test_progress_grows_between_events_while_there_is_work() -> None:
    async def main() -> list[int]:
        engine = await started()
        seen = [engine.progress]
        spawn(engine.generate(make_group(n=2)))
        for _ in range(4):
            await asyncio.sleep(0.75)
            seen.append(engine.progress)
        await asyncio.sleep(100)
        return [*seen, engine.progress]

    assert run_virtual(main()) == [0, 7, 10, 11, 12, 30]


def test_a_dead_engine_fails_what_runs_and_everything_after() -> None:
    async def main() -> None:
        engine = await started()
        task = spawn(engine.generate(make_group()))
        await asyncio.sleep(5)
        engine.fault("die")
        with pytest.raises(WorkerDied, match=r"died at 5\.000 s"):
            await task
        for call in (engine.generate(make_group("b")), engine.abort(), engine.pause("keep"), engine.sleep()):
            with pytest.raises(WorkerDied):
                await call
        await engine.shutdown()
        await engine.shutdown()
        assert engine.memory() == EngineMemory(0, 0)

    run_virtual(main())


def test_a_hung_engine_answers_nothing_and_makes_no_progress_until_healed() -> None:
    async def main() -> None:
        engine = await started()
        task = spawn(engine.generate(make_group()))
        await asyncio.sleep(4)
        engine.fault("hang")
        before = engine.progress
        for call in (engine.abort(), engine.generate(make_group("b")), engine.pause("abort")):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 100)
        assert (task.done(), engine.progress) == (False, before)
        engine.fault("heal")
        begin = now()
        assert lengths_of(await task) == [10]
        assert now() - begin == 8 * 1.5

    run_virtual(main())


def test_a_sync_that_hangs_in_the_middle_ends_by_its_callers_deadline() -> None:
    async def main() -> None:
        engine = await started()
        await engine.pause("keep")
        await engine.begin_update(())
        asyncio.get_running_loop().call_later(2.0, engine.fault, "hang")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.finish_update(V1), 60)
        assert engine.version == V0

    run_virtual(main())


@pytest.mark.parametrize(("kind", "seconds"), [("slow", 1 + 5 * 1.5 + 5 * 3.0), ("heal", 16.0)])
def test_a_slow_engine_runs_at_the_given_factor(kind: FaultKind, seconds: float) -> None:
    async def main() -> float:
        engine = await started()
        asyncio.get_running_loop().call_at(1 + 5 * 1.5, engine.fault, kind, 0.5)
        await engine.generate(make_group())
        return now()

    assert run_virtual(main()) == seconds


def test_one_timer_serves_a_replica_whatever_runs_on_it() -> None:
    async def main() -> int:
        engine = await started(EmulatedConfig())
        tasks = [spawn(engine.generate(make_group(str(i), n=4, uid=i, budget=4000))) for i in range(20)]
        await asyncio.sleep(1)
        timers = [t for t in asyncio.get_running_loop()._scheduled if not t.cancelled()]  # type: ignore[attr-defined]
        await asyncio.wait(tasks)
        return len(timers)

    assert run_virtual(main()) == 1


def test_the_same_engine_runs_in_real_time() -> None:
    async def main() -> list[int]:
        config = EmulatedConfig(
            response_mean_tokens=5, response_sigma=0.5, decode_base_s=0.0001, prefill_tokens_per_s=1e6, sync_s=0.001
        )
        engine = await started(config)
        first = spawn(engine.generate(make_group("a", n=3)))
        await asyncio.sleep(0.0003)
        await engine.pause("abort")
        await sync(engine, V1)
        await engine.resume()
        return lengths_of(await engine.generate(make_group("b", n=3, partials=await first)))

    config = EmulatedConfig(response_mean_tokens=5, response_sigma=0.5)
    assert asyncio.run(main()) == [draw_length(config, 0, 0, i) for i in range(3)]


def test_lengths_are_log_normal_with_the_configured_mean() -> None:
    config = EmulatedConfig(response_mean_tokens=1000.0, response_sigma=0.5)
    logs = [math.log(draw_length(config, 7, uid, i)) for uid in range(2500) for i in range(4)]
    assert statistics.fmean(logs) == pytest.approx(math.log(1000) - 0.125, abs=0.02)
    assert statistics.stdev(logs) == pytest.approx(0.5, abs=0.02)
    assert (
        len({draw_length(config, 7, 0, i) for i in range(50)} | {draw_length(config, 8, 0, i) for i in range(50)}) > 90
    )


def make_sample(uid: int, n: int) -> Sample:
    return Sample(uid, f"p{uid}", np.zeros(4, np.int32), (Response.empty(),) * n)


def test_rewards_honour_the_equal_and_the_failed_share() -> None:
    config = EmulatedConfig(reward_equal_fraction=0.4, reward_failed_fraction=0.1)
    samples = [emulated_rewards(make_sample(uid, 8), config, seed=3) for uid in range(3000)]
    good = [[r for r in rewards if r is not None] for rewards in samples]
    assert sum(len(set(rewards)) == 1 for rewards in good) / 3000 == pytest.approx(0.4, abs=0.03)
    assert 1 - sum(map(len, good)) / 24_000 == pytest.approx(0.1, abs=0.01)
    assert {r for rewards in good for r in rewards} == {0.0, 1.0}
    assert emulated_rewards(make_sample(5, 8), config, seed=3) == samples[5]


def test_without_an_equal_share_no_sample_has_equal_rewards() -> None:
    assert all(len(set(draw_rewards(EmulatedConfig(), 0, uid, 2))) == 2 for uid in range(500))


def test_another_attempt_draws_failures_anew() -> None:
    config = EmulatedConfig(reward_failed_fraction=0.5)
    attempts = [[r is None for r in draw_rewards(config, 0, 1, 32, attempt=a)] for a in range(2)]
    assert attempts[0] != attempts[1]
