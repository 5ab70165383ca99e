"""The torch engine: what it samples, how it is interrupted, and how its weights come and go."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.engines.base import GroupRequest
from hybridsched.engines.torch_batch import Batch
from hybridsched.engines.torch_engine import TorchEngine
from hybridsched.errors import DataError, FaultError, InternalError, WeightSyncError
from hybridsched.model import FinishReason, Response, SamplingParams, VersionRun, WeightVersion
from hybridsched.models.hf_folder import load_hf, named_weights, save_hf, weight_specs
from hybridsched.models.qwen3 import CausalLM, ModelConfig, seeded_init

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    max_position_embeddings=128,
)
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)
EMPTY = Response.empty()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf(seeded_init(CONFIG, 1, std=0.4), path)
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(seed: int = 0, length: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, CONFIG.vocab_size, length).astype(np.int32)


def request(
    uid: int = 0, n: int = 2, length: int = 7, partials: tuple[Response, ...] = (), **params: Any
) -> GroupRequest:
    settings = SamplingParams(**{"n": n, "max_new_tokens": 20, "seed": 3, **params})
    return GroupRequest(f"g{uid}", uid, prompt(uid, length), settings, partials or (EMPTY,) * n)


def tokens(responses: tuple[Response, ...]) -> list[list[int]]:
    return [r.token_ids.tolist() for r in responses]


def play(path: Path, act: Callable[[TorchEngine], Awaitable[Any]], **options: Any) -> Any:
    """Run ``act`` with a started engine, under a deadline (a hang is a failure)."""

    async def main() -> Any:
        engine = TorchEngine(path, **{"max_num_seqs": 8, "kv_cache_tokens": 8 * 32, **options})
        await engine.start()
        try:
            return await asyncio.wait_for(act(engine), 60)
        finally:
            await asyncio.wait_for(engine.shutdown(), 10)

    return asyncio.run(main())


async def progressed(engine: TorchEngine, amount: int) -> None:
    """Wait until the engine did ``amount`` more tokens of work."""
    goal = engine.progress + amount
    while engine.progress < goal:  # noqa: ASYNC110 - the engine's own steps are what is waited for
        await asyncio.sleep(0)


async def refill(engine: TorchEngine, model: CausalLM, version: WeightVersion, **options: bool) -> None:
    await engine.begin_update(weight_specs(model))
    for name, tensor in named_weights(model):
        await engine.load_bucket({name: tensor})
    await engine.finish_update(version, **options)


def forced(model: CausalLM, group: GroupRequest, response: Response, temperature: float) -> np.ndarray:
    """Log-probs of a response by the plain model."""
    ids = torch.from_numpy(np.concatenate((group.prompt_tokens, response.token_ids)).astype(np.int64))[None]
    with torch.no_grad():
        logp = torch.log_softmax(model(ids)[0] / temperature, dim=-1)
    start = len(group.prompt_tokens)
    return logp[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()


# ---- what is sampled ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [{}, {"tie_word_embeddings": False}, {"qk_norm": False, "attention_bias": True}, {"qk_norm": False}],
    ids=["qwen3-tied", "qwen3-untied", "qwen2", "llama"],
)
def test_greedy_equals_transformers_token_for_token(family: dict[str, Any], tmp_path: Path) -> None:
    save_hf(seeded_init(replace(CONFIG, **family), 2, std=0.4), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = []
    for uid in range(3):
        ids = torch.from_numpy(prompt(uid, 5 + uid).astype(np.int64))[None]
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        expected.append(out[0, 5 + uid :].tolist())

    async def act(engine: TorchEngine) -> list[list[int]]:
        groups = [request(uid, 1, 5 + uid, temperature=0.0) for uid in range(3)]
        return [tokens(r)[0] for r in await asyncio.gather(*map(engine.generate, groups))]

    assert expected == play(tmp_path, act)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_teacher_forced_ones_of_model_and_engine(folder: Path, temperature: float) -> None:
    group = request(temperature=temperature)

    async def act(engine: TorchEngine) -> tuple[tuple[Response, ...], list[np.ndarray]]:
        responses = await engine.generate(group)
        pairs = [(group.prompt_tokens, r.token_ids) for r in responses]
        return responses, await engine.logprobs([*pairs, (group.prompt_tokens, np.empty(0, np.int32))], temperature)

    responses, again = play(folder, act)
    model = load_hf(folder)
    for response, of_engine in zip(responses, again[:2], strict=True):
        np.testing.assert_allclose(response.logprobs, forced(model, group, response, temperature), rtol=0, atol=1e-4)
        np.testing.assert_allclose(of_engine, response.logprobs, rtol=0, atol=1e-4)
    assert again[2].shape == (0,)


def test_draws_do_not_depend_on_the_batch(folder: Path) -> None:
    async def alone(engine: TorchEngine) -> list[list[int]]:
        return tokens(await engine.generate(request(5)))

    async def together(engine: TorchEngine) -> list[list[int]]:
        others = [request(uid, 3, 3 + uid, max_new_tokens=5 + uid) for uid in range(5)]
        results = await asyncio.gather(*map(engine.generate, [*others, request(5)]))
        return tokens(results[-1])

    assert play(folder, alone, max_num_seqs=1) == play(folder, together)


def test_responses_of_a_group_differ_and_the_offset_names_them(folder: Path) -> None:
    async def act(engine: TorchEngine) -> tuple[list[list[int]], list[list[int]]]:
        whole = tokens(await engine.generate(request(n=4)))
        return whole, tokens(await engine.generate(replace(request(n=2), response_offset=2)))

    whole, tail = play(folder, act)
    assert len({tuple(t) for t in whole}) == 4
    assert whole[2:] == tail


def test_sampling_follows_the_model_distribution(folder: Path) -> None:
    draws = 2000

    async def act(engine: TorchEngine) -> np.ndarray:
        group = request(n=draws, max_new_tokens=1, temperature=0.8)
        return np.array([r.token_ids[0] for r in await engine.generate(group)])

    seen = np.bincount(play(folder, act, max_num_seqs=500, kv_cache_tokens=500 * 16), minlength=CONFIG.vocab_size)
    with torch.no_grad():
        logits = load_hf(folder)(torch.from_numpy(prompt().astype(np.int64))[None])[0, -1]
    expected = torch.softmax(logits / 0.8, dim=-1).numpy()
    assert np.abs(seen / draws - expected).sum() < 0.15  # about sqrt(vocab / draws)


@pytest.mark.parametrize(
    ("limit", "allowed"), [({"top_k": 1}, 1), ({"top_k": 3}, 3), ({"top_p": 1e-9}, 1), ({"min_p": 1.0}, 1)]
)
def test_truncation_keeps_the_likeliest_and_log_probs_stay_untruncated(
    folder: Path, limit: dict[str, Any], allowed: int
) -> None:
    group = request(n=16, max_new_tokens=1, **limit)
    with torch.no_grad():
        logits = load_hf(folder)(torch.from_numpy(group.prompt_tokens.astype(np.int64))[None])[0, -1]
    best = logits.topk(allowed).indices.tolist()
    logp = torch.log_softmax(logits, dim=-1)

    async def act(engine: TorchEngine) -> tuple[Response, ...]:
        plain = request(9, n=4)  # untruncated neighbours in the same batch
        return (await asyncio.gather(engine.generate(group), engine.generate(plain)))[0]

    for response in play(folder, act):
        assert response.token_ids[0] in best
        assert response.logprobs[0] == pytest.approx(logp[response.token_ids[0]].item(), abs=1e-4)


def test_stop_tokens_end_a_response_and_belong_to_it(folder: Path) -> None:
    async def act(engine: TorchEngine) -> list[tuple[list[int], FinishReason]]:
        free = tokens(await engine.generate(request(n=1)))[0]
        out = [(free, FinishReason.LENGTH)]
        engine._stops = (free[5],)
        out += [(r.token_ids.tolist(), r.finish) for r in await engine.generate(request(n=1))]
        out += [(r.token_ids.tolist(), r.finish) for r in await engine.generate(request(n=1, ignore_eos=True))]
        own = request(n=1, ignore_eos=True, stop_token_ids=(free[3], free[5]))
        return out + [(r.token_ids.tolist(), r.finish) for r in await engine.generate(own)]

    (free, _), by_engine, ignored, by_request = play(folder, act)
    assert by_engine == (free[: free.index(free[5]) + 1], FinishReason.STOP)
    assert ignored == (free, FinishReason.LENGTH)
    first = min(free.index(free[3]), free.index(free[5]))
    assert by_request == (free[: first + 1], FinishReason.STOP)


def test_finished_partials_and_spent_budgets_come_back_as_they_are(folder: Path) -> None:
    done = Response(prompt(8), np.zeros(7, np.float32), (VersionRun(V0, 0, 7),), FinishReason.STOP)
    spent = replace(done, finish=FinishReason.ABORTED)

    async def act(engine: TorchEngine) -> tuple[Response, ...]:
        await engine.pause("keep")  # nothing has to be generated
        return await engine.generate(request(partials=(done, spent), max_new_tokens=7))

    assert play(folder, act) == (done, replace(spent, finish=FinishReason.LENGTH))


def test_bfloat16_halves_the_memory_and_generates(folder: Path) -> None:
    async def act(engine: TorchEngine) -> tuple[int, tuple[Response, ...]]:
        return engine.memory().weights_bytes + engine.memory().kv_bytes, await engine.generate(request())

    (full, _), (half, responses) = play(folder, act), play(folder, act, dtype="bfloat16")
    assert full == 2 * half
    assert [r.n_tokens for r in responses] == [20, 20]


# ---- interrupting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_abort_and_continue_elsewhere_equals_an_uninterrupted_run(folder: Path, temperature: float) -> None:
    group = request(n=3, temperature=temperature)

    async def whole(engine: TorchEngine) -> tuple[Response, ...]:
        return await engine.generate(group)

    async def first_part(engine: TorchEngine) -> tuple[Response, ...]:
        running = asyncio.ensure_future(engine.generate(group))
        await progressed(engine, 6 + 3 * 8)
        await engine.abort([group.key])
        assert running.done()
        return running.result()

    partials = play(folder, first_part)
    assert [p.n_tokens for p in partials] == [8] * 3
    assert {FinishReason.ABORTED} == {p.finish for p in partials}

    async def rest(engine: TorchEngine) -> tuple[Response, ...]:
        return await engine.generate(replace(group, partials=partials))

    expected, got = play(folder, whole), play(folder, rest, version=V1)
    assert tokens(expected) == tokens(got)
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4)
        assert b.version_runs == (VersionRun(V0, 0, 8), VersionRun(V1, 8, 20))


def test_continuing_under_the_same_version_merges_runs_and_extends_the_mask(folder: Path) -> None:
    mask = np.array([1, 0, 1], np.uint8)
    part = Response(prompt(4, 3), np.zeros(3, np.float32), (VersionRun(V0, 0, 3),), FinishReason.ABORTED, mask)

    async def act(engine: TorchEngine) -> tuple[Response, ...]:
        return await engine.generate(request(partials=(part,), max_new_tokens=6))

    (response,) = play(folder, act)
    assert (VersionRun(V0, 0, 6),) == response.version_runs
    assert response.response_mask is not None
    assert response.response_mask.tolist() == [1, 0, 1, 1, 1, 1]


def test_abort_names_groups_and_leaves_the_others(folder: Path) -> None:
    async def act(engine: TorchEngine) -> tuple[Any, Any, list[list[int]]]:
        groups = [asyncio.ensure_future(engine.generate(request(uid))) for uid in range(2)]
        await progressed(engine, 20)
        await engine.abort(["g0", "unknown"])
        assert engine.unfinished("g0") == 0
        assert engine.unfinished("g1") == 2
        return await groups[0], await groups[1], tokens(await engine.generate(request(1)))

    aborted, finished, again = play(folder, act)
    assert {FinishReason.ABORTED} == {r.finish for r in aborted}
    assert again == tokens(finished)


def test_pause_keep_stops_the_work_and_resume_changes_nothing(folder: Path) -> None:
    async def act(engine: TorchEngine) -> tuple[list[list[int]], list[list[int]]]:
        running = asyncio.ensure_future(engine.generate(request()))
        await progressed(engine, 20)
        await engine.pause("keep")
        before = engine.progress
        held = asyncio.ensure_future(engine.generate(request(1)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.progress == before
        assert not held.done()
        assert engine.running_sequences() == 2
        await engine.resume()
        await held
        return tokens(await running), tokens(await engine.generate(request()))

    interrupted, plain = play(folder, act)
    assert plain == interrupted


def test_pause_abort_returns_partials_and_holds_new_groups(folder: Path) -> None:
    async def act(engine: TorchEngine) -> None:
        running = asyncio.ensure_future(engine.generate(request()))
        await progressed(engine, 20)
        await engine.pause("abort")
        assert {FinishReason.ABORTED} == {r.finish for r in running.result()}
        held = asyncio.ensure_future(engine.generate(request(1)))
        await asyncio.sleep(0)
        assert engine.running_sequences() == 0
        await engine.resume()
        assert {FinishReason.LENGTH} == {r.finish for r in await held}

    play(folder, act)


def test_pause_wait_finishes_what_runs_and_holds_what_comes(folder: Path) -> None:
    async def act(engine: TorchEngine) -> None:
        running = asyncio.ensure_future(engine.generate(request(n=12)))  # more than fit at once
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

    play(folder, act)


def test_a_cancelled_pause_wait_leaves_the_engine_running(folder: Path) -> None:
    async def act(engine: TorchEngine) -> None:
        running = asyncio.ensure_future(engine.generate(request(n=12)))
        await progressed(engine, 10)
        pausing = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(engine.generate(request(1)))
        await asyncio.sleep(0)
        pausing.cancel()
        assert {FinishReason.LENGTH} == {r.finish for r in (*await running, *await later)}

    play(folder, act)


def test_a_cancelled_generate_frees_its_rows(folder: Path) -> None:
    async def act(engine: TorchEngine) -> None:
        running = asyncio.ensure_future(engine.generate(request(n=12)))
        await progressed(engine, 10)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert engine.running_sequences() == 0
        assert len(await engine.generate(request())) == 2

    play(folder, act)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.sampled_from(["work", "abort 0", "abort 1", "abort all", "keep", "resume", "update", "nap"]), max_size=14
    )
)
def test_no_sequence_of_interruptions_changes_a_response(folder: Path, story: list[str]) -> None:
    groups = [request(uid, 3, max_new_tokens=12) for uid in range(2)]
    model = load_hf(folder)

    async def until_done(engine: TorchEngine, group: GroupRequest) -> list[list[int]]:
        responses = group.partials
        while not all(r.finished for r in responses):
            responses = await engine.generate(replace(group, partials=responses))
        assert [r.version_runs[-1].end for r in responses] == [12] * 3
        return tokens(responses)

    async def act(engine: TorchEngine) -> list[list[list[int]]]:
        running = [asyncio.ensure_future(until_done(engine, group)) for group in groups]
        for event in story:
            if event == "work":
                for _ in range(5):
                    await asyncio.sleep(0)
            elif event.startswith("abort"):
                await engine.abort(None if event == "abort all" else [f"g{event[-1]}"])
            elif event == "keep":
                await engine.pause("keep")
            elif event == "resume":
                await engine.resume()
            elif event == "update":  # of the same weights: the text must not change
                await engine.pause("keep")
                await refill(engine, model, WeightVersion(0, engine.version.number + 1))
            else:
                await engine.pause("abort")
                await engine.sleep()
                await engine.wake_weights()
                await refill(engine, model, engine.version)
                await engine.wake_kv()
        await engine.resume()
        return list(await asyncio.gather(*running))

    async def plain(engine: TorchEngine) -> list[list[list[int]]]:
        return [await until_done(engine, group) for group in groups]

    assert play(folder, plain) == play(folder, act, max_num_seqs=4)


# ---- batch and budget ---------------------------------------------------------------------------------------------


def test_the_budget_is_never_exceeded_and_everything_finishes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    step = Batch.step

    def watched(self: Batch) -> Any:
        promised = sum(s.need for s in self.sequences)
        assert promised <= self.reserved_tokens
        seen.append((len(self), self.reserved_tokens))
        return step(self)

    monkeypatch.setattr(Batch, "step", watched)
    lengths = [(3, 4), (3, 4), (30, 20), (5, 40), (9, 9), (2, 5), (40, 50), (4, 6)]

    async def act(engine: TorchEngine) -> list[list[list[int]]]:
        groups = [request(uid, 4, p, max_new_tokens=m) for uid, (p, m) in enumerate(lengths)]
        return [tokens(r) for r in await asyncio.gather(*map(engine.generate, groups))]

    tight = play(folder, act, max_num_seqs=8, kv_cache_tokens=100)
    assert max(reserved for _, reserved in seen) <= 100
    assert max(rows for rows, _ in seen) == 8  # short ones run together
    assert min(rows for rows, _ in seen) == 1  # the longest runs alone
    assert tight == play(folder, act, max_num_seqs=32, kv_cache_tokens=32 * 100)
    assert [[m] * 4 for _, m in lengths] == [[len(t) for t in group] for group in tight]


def test_running_sequences_survive_every_change_of_the_cache_geometry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, wide = request(0, 2, 3, max_new_tokens=40), request(1, 1, 45, max_new_tokens=5)
    third = request(2, 3, 4, max_new_tokens=9)
    strides: list[tuple[int, int]] = []
    step = Batch.step

    def watched(self: Batch) -> Any:
        strides.append((len(self), self.cache.stride))
        return step(self)

    monkeypatch.setattr(Batch, "step", watched)

    async def staggered(engine: TorchEngine) -> list[list[list[int]]]:
        running = [asyncio.ensure_future(engine.generate(first))]
        await progressed(engine, 12)
        running.append(asyncio.ensure_future(engine.generate(wide)))
        await running[1]
        running.append(asyncio.ensure_future(engine.generate(third)))
        return [tokens(await r) for r in running]

    async def one_by_one(engine: TorchEngine) -> list[list[list[int]]]:
        return [tokens(await engine.generate(group)) for group in (first, wide, third)]

    got = play(folder, staggered, max_num_seqs=5, kv_cache_tokens=5 * 43)
    # Two rows of 43, cut anew for a wide third one, and back to five rows while the first two still run.
    assert list(dict.fromkeys(strides))[:3] == [(2, 43), (3, 53), (2, 53)]
    assert (5, 43) in strides
    assert got == play(folder, one_by_one)


def test_groups_start_in_order(folder: Path) -> None:
    async def act(engine: TorchEngine) -> list[int]:
        ended: list[int] = []

        async def one(uid: int) -> None:
            await engine.generate(request(uid, max_new_tokens=3 + uid % 2))
            ended.append(uid)

        await asyncio.gather(*(one(uid) for uid in range(6)))
        return ended

    assert list(range(6)) == play(folder, act, max_num_seqs=2)


def test_the_prompt_of_a_group_is_prefilled_once(folder: Path) -> None:
    async def act(engine: TorchEngine) -> int:
        before = engine.progress
        await engine.generate(request(n=8, length=11, max_new_tokens=5))
        return engine.progress - before

    assert play(folder, act) == 10 + 8 * 5


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"length": 20, "max_new_tokens": 45}, "kv_cache_tokens"),
        ({"length": 0}, "empty"),
    ],
)
def test_requests_that_can_never_run_are_refused(folder: Path, bad: dict[str, Any], says: str) -> None:
    async def act(engine: TorchEngine) -> None:
        with pytest.raises(DataError, match=says):
            await engine.generate(request(**bad))
        outside = replace(request(), prompt_tokens=np.array([CONFIG.vocab_size], np.int32))
        with pytest.raises(DataError, match="token outside"):
            await engine.generate(outside)

    play(folder, act, kv_cache_tokens=64)


def test_an_error_in_a_step_reaches_every_waiting_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(engine: TorchEngine) -> None:
        groups = [asyncio.ensure_future(engine.generate(request(uid, n=6))) for uid in range(3)]
        await progressed(engine, 20)

        def broken(self: Batch) -> Any:
            raise RuntimeError("no such luck")

        with monkeypatch.context() as patch:
            patch.setattr(Batch, "step", broken)
            results = await asyncio.gather(*groups, return_exceptions=True)
        assert [FaultError] * 3 == [type(r) for r in results]
        assert "no such luck" in str(results[0])
        assert len(await engine.generate(request())) == 2  # usable again

    play(folder, act)


# ---- weights come and go ------------------------------------------------------------------------------------------


def test_sleep_wake_update_equals_a_fresh_engine(folder: Path, tmp_path: Path) -> None:
    other = seeded_init(CONFIG, 77, std=0.4)
    save_hf(other, tmp_path)

    async def cycle(engine: TorchEngine) -> tuple[Response, ...]:
        await engine.generate(request())
        full = engine.memory()
        await engine.sleep()
        assert (engine.memory().weights_bytes, engine.memory().kv_bytes) == (0, 0)
        held = asyncio.ensure_future(engine.generate(request()))
        await engine.wake_weights()
        await refill(engine, other, V1)
        await engine.wake_kv()
        assert engine.memory() == full
        await engine.resume()
        return await held

    async def fresh(engine: TorchEngine) -> tuple[Response, ...]:
        return await engine.generate(request())

    cycled, expected = play(folder, cycle), play(tmp_path, fresh, version=V1)
    assert tokens(expected) == tokens(cycled)
    assert [r.logprobs.tolist() for r in expected] == [r.logprobs.tolist() for r in cycled]
    assert [r.version_runs for r in expected] == [r.version_runs for r in cycled]


@pytest.mark.parametrize("keep_kv", [False, True])
def test_kept_groups_go_on_under_the_new_version(folder: Path, keep_kv: bool) -> None:
    other, group = seeded_init(CONFIG, 77, std=0.4), request(n=3)

    async def act(engine: TorchEngine) -> tuple[Response, ...]:
        running = asyncio.ensure_future(engine.generate(group))
        await progressed(engine, 6 + 3 * 8)
        await engine.pause("keep")
        await refill(engine, other, V1, keep_kv=keep_kv)
        await engine.resume()
        return await running

    for response in play(folder, act):
        assert (VersionRun(V0, 0, 8), VersionRun(V1, 8, 20, keep_kv)) == response.version_runs
        # The tail is exactly what the new weights say of the same text if, and only if, the old cache was dropped.
        gap = np.abs(response.logprobs[8:] - forced(other, group, response, 1.0)[8:]).max()
        assert gap > 1e-2 if keep_kv else gap < 1e-4


def test_a_late_sibling_never_copies_a_kept_cache(folder: Path) -> None:
    other, group = seeded_init(CONFIG, 77, std=0.4), request(n=3, max_new_tokens=20)
    short = Response(prompt(4, 15), np.zeros(15, np.float32), (VersionRun(V0, 0, 15),), FinishReason.ABORTED)

    async def act(engine: TorchEngine) -> tuple[Response, ...]:
        running = asyncio.ensure_future(engine.generate(replace(group, partials=(short, EMPTY, EMPTY))))
        await progressed(engine, 30)
        await engine.pause("keep")
        await refill(engine, other, V1, keep_kv=True)
        await engine.resume()
        return await running

    late = play(folder, act, max_num_seqs=2)[2]
    assert (VersionRun(V1, 0, 20),) == late.version_runs
    np.testing.assert_allclose(late.logprobs, forced(other, group, late, 1.0), rtol=0, atol=1e-4)


def test_a_missed_tensor_is_named_and_the_engine_stays_shut(folder: Path) -> None:
    model = seeded_init(CONFIG, 77)

    async def act(engine: TorchEngine) -> None:
        await engine.sleep()
        await engine.wake_weights()
        with pytest.raises(InternalError, match="weight update must finish"):
            await engine.wake_kv()
        await engine.begin_update(weight_specs(model))
        await engine.load_bucket({n: t for n, t in named_weights(model) if n != "model.norm.weight"})
        with pytest.raises(WeightSyncError, match=r"1 of .* did not arrive: model.norm.weight"):
            await engine.finish_update(V1)
        for forbidden in (engine.wake_kv(), engine.resume(), engine.logprobs([(prompt(), prompt())], 1.0)):
            with pytest.raises(InternalError):
                await forbidden
        await refill(engine, model, V1)  # a repeated sync heals it
        await engine.wake_kv()
        await engine.resume()
        assert engine.version == V1
        assert len(await engine.generate(request())) == 2

    play(folder, act)


def test_weights_nobody_refilled_are_caught_when_used(folder: Path) -> None:
    model = seeded_init(CONFIG, 77, std=0.4)

    async def act(engine: TorchEngine) -> None:
        await engine.pause("abort")
        await refill(engine, model, V1)
        engine._weights.named["model.layers.0.mlp.up_proj.weight"].fill_(float("nan"))  # as a lying transport leaves it
        assert np.isnan((await engine.logprobs([(prompt(), prompt())], 1.0))[0]).all()
        await engine.resume()
        with pytest.raises(FaultError, match=r"not finite under weight version 0\.1"):
            await engine.generate(request())
        await engine.pause("abort")
        await refill(engine, model, V1)
        await engine.resume()
        # No NaN stays in the cache: the short row is as wide as its neighbour, masked or not.
        short, long = await asyncio.gather(engine.generate(request(0, length=1)), engine.generate(request(1)))
        assert all(np.isfinite(r.logprobs).all() for r in (*short, *long))

    play(folder, act)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s[1:], "missing model.embed_tokens.weight"),
        (lambda s: [*s, replace(s[0], name="lm_head.weight")], "not in this model lm_head.weight"),
        (lambda s: [replace(s[0], shape=(9, 9)), *s[1:]], r"has shape \(9, 9\), here it is \(48, 32\)"),
        (lambda s: [replace(s[0], dtype="bfloat16"), *s[1:]], "is bfloat16, here it is float32"),
    ],
)
def test_announced_weights_that_do_not_fit_are_refused_by_name(folder: Path, change: Any, says: str) -> None:
    async def act(engine: TorchEngine) -> None:
        await engine.pause("abort")
        with pytest.raises(WeightSyncError, match=says):
            await engine.begin_update(change(weight_specs(seeded_init(CONFIG, 0))))

    play(folder, act)


def test_steps_out_of_order_are_refused(folder: Path) -> None:
    model = seeded_init(CONFIG, 77)

    async def act(engine: TorchEngine) -> None:
        with pytest.raises(InternalError, match="pause it first"):
            await engine.begin_update(weight_specs(model))
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


def test_tensors_written_to_their_places_count_as_arrived(folder: Path) -> None:
    model = seeded_init(CONFIG, 77, std=0.4)

    async def act(engine: TorchEngine) -> list[np.ndarray]:
        assert engine.destination("model.norm.weight") is None, "no update runs"
        await engine.pause("abort")
        await engine.begin_update(weight_specs(model))
        for name, tensor in named_weights(model):
            place = engine.destination(name)
            assert place is not None
            with torch.inference_mode():
                place.copy_(tensor)
        await engine.finish_update(V1)
        return await engine.logprobs([(prompt(), prompt(1))], 1.0)

    (got,) = play(folder, act)
    response = Response(prompt(1), got, (), FinishReason.STOP)
    np.testing.assert_allclose(got, forced(model, request(), response, 1.0), rtol=0, atol=1e-4)


def test_the_caller_may_reuse_the_memory_of_a_bucket(folder: Path) -> None:
    model = seeded_init(CONFIG, 77, std=0.4)

    async def act(engine: TorchEngine) -> list[np.ndarray]:
        await engine.pause("abort")
        await engine.begin_update(weight_specs(model))
        for name, tensor in named_weights(model):
            bucket = tensor.clone()
            await engine.load_bucket({name: bucket})
            bucket.fill_(float("nan"))
        await engine.finish_update(V1)
        return await engine.logprobs([(prompt(), prompt(1))], 1.0)

    (got,) = play(folder, act)
    response = Response(prompt(1), got, (), FinishReason.STOP)
    np.testing.assert_allclose(got, forced(model, request(), response, 1.0), rtol=0, atol=1e-4)


_RSS = """
import asyncio, sys, numpy as np, psutil
from hybridsched.engines.base import GroupRequest
from hybridsched.engines.torch_engine import TorchEngine
from hybridsched.model import Response, SamplingParams

async def main():
    engine = TorchEngine(sys.argv[1], max_num_seqs=4, kv_cache_tokens=20000)
    await engine.start()
    params = SamplingParams(max_new_tokens=4000)
    group = GroupRequest("g", 0, np.arange(500, dtype=np.int32), params, (Response.empty(),))
    task = asyncio.ensure_future(engine.generate(group))
    while engine.progress < 505:
        await asyncio.sleep(0)
    await engine.abort()
    held = engine.memory()
    before = psutil.Process().memory_info().rss
    await engine.sleep()
    print(before - psutil.Process().memory_info().rss, held.weights_bytes)

asyncio.run(main())
"""


def test_sleep_gives_the_memory_back_to_the_system(tmp_path: Path) -> None:
    big = replace(CONFIG, hidden_size=1024, intermediate_size=6144, vocab_size=1024, max_position_embeddings=8192)
    save_hf(seeded_init(big, 0), tmp_path)
    done = subprocess.run([sys.executable, "-c", _RSS, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    freed, weights = map(int, done.stdout.split())
    assert weights > 100e6
    assert freed >= weights
