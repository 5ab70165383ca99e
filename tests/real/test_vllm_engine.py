"""The vLLM engine on CPU: the engine contract, with EngineCore in its own process. `make test-real-engines`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from vllm_kit import (
    CONFIG,
    EMPTY,
    HANGS_S,
    OPTIONS,
    V0,
    V1,
    forced,
    need_vllm,
    play,
    progressed,
    prompt,
    refill,
    request,
    tokens,
)

from hybridsched.engines.torch_engine import TorchEngine
from hybridsched.engines.vllm_engine import VllmEngine
from hybridsched.errors import ConfigError, DataError, FaultError, InternalError, WeightSyncError
from hybridsched.model import FinishReason, Response, VersionRun, WeightVersion
from hybridsched.models.hf_folder import load_hf, named_weights, save_hf, weight_specs
from hybridsched.models.qwen3 import CausalLM, seeded_init

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

Act = Callable[[VllmEngine], Awaitable[Any]]
OTHER = seeded_init(CONFIG, 77, std=0.2)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    need_vllm()
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # compute threads do not survive a fork
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(seeded_init(CONFIG, 1, std=0.2), path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load_hf(folder)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Callable[[Act], Any]]:
    """One engine for all tests that leave it as they found it (awake, running, with the folder's weights)."""
    with asyncio.Runner() as runner:
        engine = VllmEngine(folder, OPTIONS)
        runner.run(asyncio.wait_for(engine.start(), HANGS_S))
        yield lambda act: runner.run(asyncio.wait_for(act(engine), HANGS_S))
        runner.run(asyncio.wait_for(engine.shutdown(), HANGS_S))


# ---- what is sampled ----------------------------------------------------------------------------------------------


def test_greedy_equals_the_torch_engine_token_for_token(shared: Callable[[Act], Any], folder: Path) -> None:
    group = request(n=3, max_new_tokens=60)

    async def torch_engine() -> tuple[Response, ...]:
        engine = TorchEngine(folder, max_num_seqs=8, kv_cache_tokens=8 * 200)
        await engine.start()
        return await engine.generate(group)

    got = shared(lambda engine: engine.generate(group))
    expected = asyncio.run(torch_engine())
    assert tokens(expected) == tokens(got)
    assert {FinishReason.LENGTH} == {r.finish for r in got}
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4)
        assert a.version_runs == b.version_runs


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_sampling_temperature(
    shared: Callable[[Act], Any], model: CausalLM, temperature: float
) -> None:
    group = request(n=3, temperature=temperature)

    async def act(engine: VllmEngine) -> tuple[tuple[Response, ...], list[np.ndarray]]:
        responses = await engine.generate(group)
        return responses, await engine.logprobs([(group.prompt_tokens, r.token_ids) for r in responses], temperature)

    responses, teacher = shared(act)
    assert len({tuple(r.token_ids.tolist()) for r in responses}) == 3  # every response draws for itself
    for response, by_engine in zip(responses, teacher, strict=True):
        assert by_engine.dtype == np.float32
        np.testing.assert_allclose(response.logprobs, by_engine, rtol=0, atol=1e-4)
        np.testing.assert_allclose(response.logprobs, forced(model, group, response, temperature), rtol=0, atol=1e-4)


def test_draws_do_not_depend_on_the_batch(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> tuple[Any, Any]:
        together = await asyncio.gather(*(engine.generate(request(uid, temperature=1.0)) for uid in range(3)))
        return tokens(together[1]), tokens(await engine.generate(request(1, temperature=1.0)))

    in_batch, alone = shared(act)
    assert alone == in_batch


def test_stop_tokens_end_a_response_and_belong_to_it(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> tuple[Response, ...]:
        free = (await engine.generate(request(n=1)))[0].token_ids.tolist()
        return free, (await engine.generate(request(n=1, stop_token_ids=(free[10],))))[0]

    free, stopped = shared(act)
    assert stopped.finish is FinishReason.STOP
    assert stopped.token_ids.tolist() == free[: free.index(free[10]) + 1]


def test_finished_partials_and_spent_budgets_come_back_as_they_are(shared: Callable[[Act], Any]) -> None:
    done = Response(prompt(4, 3), np.zeros(3, np.float32), (VersionRun(V0, 0, 3),), FinishReason.STOP)
    spent = replace(done, finish=FinishReason.ABORTED)

    got = shared(lambda engine: engine.generate(request(partials=(done, spent), max_new_tokens=3)))
    assert got[0] is done
    assert got[1].finish is FinishReason.LENGTH
    assert got[1].n_tokens == 3


@pytest.mark.parametrize("length", [0, 150])
def test_requests_that_can_never_run_are_refused(shared: Callable[[Act], Any], length: int) -> None:
    with pytest.raises(DataError, match="group g0"):
        shared(lambda engine: engine.generate(request(length=length)))


# ---- interrupting -------------------------------------------------------------------------------------------------


def test_abort_and_continue_elsewhere_equals_an_uninterrupted_run(shared: Callable[[Act], Any], folder: Path) -> None:
    group = request(n=3)

    async def act(engine: VllmEngine) -> tuple[tuple[Response, ...], tuple[Response, ...]]:
        whole = await engine.generate(group)
        running = asyncio.ensure_future(engine.generate(group))
        await progressed(engine, 3 * 20)
        await engine.abort([group.key])
        assert running.done()
        return whole, running.result()

    expected, partials = shared(act)
    assert {FinishReason.ABORTED} == {p.finish for p in partials}
    assert all(0 < p.n_tokens < 100 for p in partials)
    assert all(len(p.logprobs) == p.n_tokens == p.version_runs[-1].end for p in partials)
    got = play(folder, lambda engine: engine.generate(replace(group, partials=partials)), version=V1)
    assert tokens(expected) == tokens(got)
    for a, b, part in zip(expected, got, partials, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4)
        assert b.version_runs == (VersionRun(V0, 0, part.n_tokens), VersionRun(V1, part.n_tokens, 100))


def test_abort_names_groups_and_leaves_the_others(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> tuple[Any, Any, Any]:
        groups = [asyncio.ensure_future(engine.generate(request(uid))) for uid in range(2)]
        await progressed(engine, 40)
        await engine.abort(["g0", "unknown"])
        assert engine.unfinished("g0") == 0
        return await groups[0], await groups[1], tokens(await engine.generate(request(1)))

    aborted, finished, again = shared(act)
    assert {FinishReason.ABORTED} == {r.finish for r in aborted}
    assert again == tokens(finished)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_an_abort_before_the_request_is_in_vllm_returns_it_empty(shared: Callable[[Act], Any], turns: int) -> None:
    async def act(engine: VllmEngine) -> tuple[Response, ...]:
        running = asyncio.ensure_future(engine.generate(request()))
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.abort()
        return await running

    assert {FinishReason.ABORTED} == {r.finish for r in shared(act)}


def test_pause_keep_stops_the_work_and_resume_changes_nothing(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> tuple[Any, Any]:
        running = asyncio.ensure_future(engine.generate(request()))
        await progressed(engine, 20)
        await engine.pause("keep")
        await asyncio.sleep(0.1)  # what was on its way has arrived
        before = engine.progress
        held = asyncio.ensure_future(engine.generate(request(1)))
        await asyncio.sleep(0.3)
        assert engine.progress == before
        assert not held.done()
        assert engine.running_sequences() == 2
        await engine.resume()
        await held
        return tokens(await running), tokens(await engine.generate(request()))

    interrupted, plain = shared(act)
    assert plain == interrupted


def test_teacher_forcing_while_paused_lets_nothing_else_run(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> tuple[Any, Any]:
        running = asyncio.ensure_future(engine.generate(request()))
        await progressed(engine, 20)
        await engine.pause("keep")
        have = [len(s.tokens) for s in engine._streams()]
        for temperature in (1.0, 0.7):
            (lp,) = await engine.logprobs([(prompt(), prompt(1))], temperature)
            assert np.isfinite(lp).all()
        now = [len(s.tokens) for s in engine._streams()]
        assert all(b - a <= 1 for a, b in zip(have, now, strict=True))  # a token may have been on its way
        await asyncio.sleep(0.2)
        assert now == [len(s.tokens) for s in engine._streams()]
        await engine.resume()
        return tokens(await running), tokens(await engine.generate(request()))

    interrupted, plain = shared(act)
    assert plain == interrupted


def test_a_group_recalled_for_teacher_forcing_can_be_aborted(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> tuple[Response, ...]:
        running = asyncio.ensure_future(engine.generate(request()))
        await progressed(engine, 20)
        await engine.pause("keep")
        await engine.logprobs([(prompt(), prompt(1))], 1.0)
        await engine.abort()
        await engine.resume()
        return await running

    got = shared(act)
    assert {FinishReason.ABORTED} == {r.finish for r in got}
    assert all(r.n_tokens >= 5 for r in got)


def test_pause_abort_returns_partials_and_holds_new_groups(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> tuple[Response, ...]:
        running = asyncio.ensure_future(engine.generate(request()))
        await progressed(engine, 20)
        await engine.pause("abort")
        assert {FinishReason.ABORTED} == {r.finish for r in running.result()}
        held = asyncio.ensure_future(engine.generate(request(1)))
        await asyncio.sleep(0.1)
        assert engine.running_sequences() == 0
        await engine.resume()
        return await held

    assert {FinishReason.LENGTH} == {r.finish for r in shared(act)}


def test_pause_wait_finishes_what_runs_and_holds_what_comes(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> None:
        running = asyncio.ensure_future(engine.generate(request(n=20)))  # more than fit at once
        await progressed(engine, 10)
        pausing = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0)
        held = asyncio.ensure_future(engine.generate(request(1)))
        await pausing
        assert {FinishReason.LENGTH} == {r.finish for r in running.result()}
        assert not held.done()
        assert engine.unfinished("g1") == 2
        await engine.resume()
        assert {FinishReason.LENGTH} == {r.finish for r in await held}

    shared(act)


def test_a_cancelled_pause_wait_leaves_the_engine_running(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> None:
        running = asyncio.ensure_future(engine.generate(request(n=20)))
        await progressed(engine, 10)
        pausing = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(engine.generate(request(1)))
        await asyncio.sleep(0.01)
        pausing.cancel()
        assert {FinishReason.LENGTH} == {r.finish for r in (*await running, *await later)}

    shared(act)


def test_a_cancelled_generate_leaves_nothing_in_vllm(shared: Callable[[Act], Any]) -> None:
    async def act(engine: VllmEngine) -> int:
        running = asyncio.ensure_future(engine.generate(request(n=12)))
        await progressed(engine, 10)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert engine.running_sequences() == 0
        assert len(await engine.generate(request())) == 2
        return engine._core.llm.get_num_unfinished_requests()

    assert shared(act) == 0


# ---- weights come and go ------------------------------------------------------------------------------------------


def test_sleep_wake_update_equals_a_fresh_engine_and_memory_comes_and_goes(folder: Path, tmp_path: Path) -> None:
    """Over several cycles, measured: by vLLM's worker, and by the system (a leak would show)."""
    save_hf(OTHER, tmp_path)

    async def cycle(engine: VllmEngine) -> tuple[tuple[Response, ...], list[int]]:
        await engine.generate(request())
        full, resident = engine.memory(), []
        assert full.weights_bytes > 0 < full.kv_bytes
        for number in range(1, 6):
            await engine.pause("abort")
            await engine.sleep()
            assert (engine.memory().weights_bytes, engine.memory().kv_bytes) == (0, 0)
            resident.append(psutil.Process(engine.pids[0]).memory_info().rss)
            held = asyncio.ensure_future(engine.generate(request()))
            await engine.wake_weights()
            assert (engine.memory().weights_bytes, engine.memory().kv_bytes) == (full.weights_bytes, 0)
            await refill(engine, OTHER, WeightVersion(0, number))
            await engine.wake_kv()
            assert engine.memory() == full
            await engine.resume()
            last = await held
        return last, resident

    async def fresh(engine: VllmEngine) -> tuple[Response, ...]:
        return await engine.generate(request())

    (cycled, resident), expected = play(folder, cycle), play(tmp_path, fresh, version=WeightVersion(0, 5))
    assert tokens(expected) == tokens(cycled)
    for a, b in zip(expected, cycled, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
        assert a.version_runs == b.version_runs
    assert resident[-1] - resident[1] < 8 << 20


def test_sleep_gives_the_memory_back_to_the_system(tmp_path: Path) -> None:
    big = replace(CONFIG, hidden_size=1024, intermediate_size=6144, vocab_size=1024)
    save_hf(seeded_init(big, 0), tmp_path)

    async def act(engine: VllmEngine) -> tuple[int, int]:
        process, held = psutil.Process(engine.pids[0]), engine.memory()
        await engine.generate(request())
        before = process.memory_info().rss
        await engine.pause("abort")
        await engine.sleep()
        return before - process.memory_info().rss, held.weights_bytes

    freed, weights = play(tmp_path, act)
    assert weights > 100e6
    assert freed >= 0.95 * weights


@pytest.mark.parametrize("keep_kv", [False, True])
def test_kept_groups_go_on_under_the_new_version(folder: Path, keep_kv: bool) -> None:
    group = request(n=3, length=70)  # long enough to fill blocks of the prefix cache

    async def act(engine: VllmEngine) -> tuple[tuple[Response, ...], tuple[Response, ...]]:
        running = asyncio.ensure_future(engine.generate(group))
        await progressed(engine, 3 * 20)
        await engine.pause("keep")
        await refill(engine, OTHER, V1, keep_kv=keep_kv)
        await engine.resume()
        fresh = await engine.generate(replace(request(length=70, n=1), key="fresh"))
        return await running, fresh

    kept, (fresh,) = play(folder, act)
    for response in kept:
        old, new = response.version_runs
        assert (old, new) == (VersionRun(V0, 0, old.end), VersionRun(V1, old.end, 100, keep_kv))
        # The tail is exactly what the new weights say of the same text if, and only if, the old cache was dropped.
        gap = np.abs(response.logprobs[old.end :] - forced(OTHER, group, response)[old.end :]).max()
        assert gap > 1e-2 if keep_kv else gap < 1e-4
    # A new request with the same prompt does not find what the old version left in the cache.
    np.testing.assert_allclose(fresh.logprobs, forced(OTHER, group, fresh), rtol=0, atol=1e-4)


def test_after_a_sync_nothing_cached_under_old_weights_is_used(folder: Path) -> None:
    group = request(n=2, length=100, max_new_tokens=40)

    async def act(engine: VllmEngine) -> tuple[Response, ...]:
        await engine.generate(group)  # leaves the prompt's blocks in the prefix cache
        await engine.pause("abort")
        await refill(engine, OTHER, V1)
        await engine.resume()
        return await engine.generate(replace(group, key="again"))

    for response in play(folder, act):
        np.testing.assert_allclose(response.logprobs, forced(OTHER, group, response), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_vllms_own_packed_layers_take_weights_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    """The layer-by-layer path, which GPUs use for quantised models; a tied head must not stay old."""
    monkeypatch.setenv("HYBRIDSCHED_VLLM_PLAIN_LINEAR", "0")
    from vllm.model_executor.layers import utils

    if getattr(utils.dispatch_cpu_unquantized_gemm, "hybridsched", None) is not None:
        monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm.hybridsched)
    shape = replace(CONFIG, tie_word_embeddings=tied)
    other = seeded_init(shape, 5, std=0.2)
    save_hf(seeded_init(shape, 1, std=0.2), tmp_path)
    group = request(n=2)

    async def act(engine: VllmEngine) -> tuple[Response, ...]:
        await engine.generate(group)
        await engine.pause("abort")
        await engine.begin_update(weight_specs(other))
        await engine.load_bucket(dict(list(named_weights(other))[:5]))  # given up: the next one starts over
        await refill(engine, other, V1)
        await engine.resume()
        return await engine.generate(group)

    for response in play(tmp_path, act):
        np.testing.assert_allclose(response.logprobs, forced(other, group, response), rtol=0, atol=1e-4)


def test_checksums_of_all_weights_change_with_them(folder: Path) -> None:
    async def act(engine: VllmEngine) -> tuple[dict[str, str], dict[str, str]]:
        (before,) = await engine._core.llm.compute_weight_checksums()
        await engine.pause("abort")
        await refill(engine, OTHER, V1)
        (after,) = await engine._core.llm.compute_weight_checksums()
        return before, after

    before, after = play(folder, act)
    norms = {name for name in before if "norm" in name}  # all ones in both models
    assert before.keys() == after.keys()
    assert norms == {name for name in before if before[name] == after[name]}


def test_a_missed_tensor_is_named_and_the_engine_stays_shut(folder: Path) -> None:
    async def act(engine: VllmEngine) -> None:
        await engine.pause("abort")
        await engine.sleep()
        await engine.wake_weights()
        with pytest.raises(InternalError, match="weight update must finish"):
            await engine.wake_kv()
        await engine.begin_update(weight_specs(OTHER))
        await engine.load_bucket({n: t for n, t in named_weights(OTHER) if n != "model.norm.weight"})
        with pytest.raises(WeightSyncError, match=r"1 of .* did not arrive: model.norm.weight"):
            await engine.finish_update(V1)
        for forbidden in (engine.wake_kv(), engine.resume(), engine.logprobs([(prompt(), prompt())], 1.0)):
            with pytest.raises(InternalError):
                await forbidden
        await refill(engine, OTHER, V1)  # a repeated sync heals it
        await engine.wake_kv()
        await engine.resume()
        assert engine.version == V1
        assert len(await engine.generate(request())) == 2

    play(folder, act)


def test_weights_nobody_refilled_are_caught_when_used(folder: Path) -> None:
    async def act(engine: VllmEngine) -> None:
        await engine.pause("abort")
        await refill(engine, OTHER, V1)
        await engine._core.rpc("hs_poison")  # as a lying transport leaves it
        assert np.isnan((await engine.logprobs([(prompt(), prompt())], 1.0))[0]).all()
        await engine.resume()
        with pytest.raises(FaultError, match="not finite"):
            await engine.generate(request(temperature=1.0))

    play(folder, act)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s[1:], "missing model.embed_tokens.weight"),
        (lambda s: [*s, replace(s[0], name="lm_head.weight")], "not in this model lm_head.weight"),
        (lambda s: [replace(s[0], shape=(9, 9)), *s[1:]], r"has shape \(9, 9\), here it is \(48, 64\)"),
        (lambda s: [replace(s[0], dtype="bfloat16"), *s[1:]], "is bfloat16, here it is float32"),
    ],
)
def test_announced_weights_that_do_not_fit_are_refused_by_name(
    shared: Callable[[Act], Any], model: CausalLM, change: Any, says: str
) -> None:
    async def act(engine: VllmEngine) -> None:
        await engine.pause("abort")
        try:
            with pytest.raises(WeightSyncError, match=says):
                await engine.begin_update(change(weight_specs(OTHER)))
        finally:
            await refill(engine, model, V0)
            await engine.resume()

    shared(act)


def test_steps_out_of_order_are_refused(folder: Path) -> None:
    async def act(engine: VllmEngine) -> None:
        with pytest.raises(InternalError, match="pause it first"):
            await engine.begin_update(weight_specs(OTHER))
        for early in (engine.load_bucket({}), engine.finish_update(V1), engine.wake_weights(), engine.start()):
            with pytest.raises(InternalError):
                await early
        running = asyncio.ensure_future(engine.generate(request()))
        await progressed(engine, 10)
        with pytest.raises(InternalError, match="running already"):
            await engine.generate(request())
        with pytest.raises(InternalError, match="abort them first"):
            await engine.sleep()
        await engine.abort()
        await engine.sleep()
        with pytest.raises(InternalError, match="not resident"):
            await engine.resume()
        assert {FinishReason.ABORTED} == {r.finish for r in running.result()}
        await engine.shutdown()
        with pytest.raises(FaultError, match="shut down"):
            await engine.generate(request())

    play(folder, act)


def test_a_damaged_bucket_is_refused_and_the_sync_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(engine: VllmEngine) -> tuple[Response, ...]:
        await engine.pause("abort")
        await engine.begin_update(weight_specs(OTHER))
        fill = engine._updates._box.fill
        with monkeypatch.context() as patch:
            patch.setattr(engine._updates._box, "fill", lambda tensors: {**fill(tensors), "checksum": 1})
            with pytest.raises(WeightSyncError, match="damaged on its way into vLLM"):
                await engine.load_bucket(dict(named_weights(OTHER)))
        await refill(engine, OTHER, V1)
        await engine.resume()
        return await engine.generate(request())

    group = request()
    for response in play(folder, act):
        np.testing.assert_allclose(response.logprobs, forced(OTHER, group, response), rtol=0, atol=1e-4)


# ---- options ------------------------------------------------------------------------------------------------------


def test_an_unknown_option_is_refused_before_anything_is_loaded(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_kwargs\.vllm\.max_num_batched_token.*did you mean max_num_batched_"):
        play(folder, lambda _engine: asyncio.sleep(0), engine_kwargs={"max_num_batched_token": 64})


def test_a_known_option_reaches_vllm(folder: Path) -> None:
    async def act(engine: VllmEngine) -> tuple[int, tuple[Response, ...]]:
        limit = engine._core.llm.vllm_config.scheduler_config.max_num_batched_tokens
        return limit, await engine.generate(request(length=90, partials=(EMPTY,)))

    limit, (response,) = play(folder, act, engine_kwargs={"max_num_batched_tokens": 64})
    assert (limit, response.n_tokens) == (64, 100)
