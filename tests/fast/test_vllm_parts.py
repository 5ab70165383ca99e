"""The parts of the vLLM engine that need no vLLM: options, streams of tokens, buckets in shared memory."""

from __future__ import annotations

import asyncio
import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from hybridsched.config.derived import derive
from hybridsched.config.schema import RunConfig
from hybridsched.engines import vllm_options
from hybridsched.engines.base import GroupRequest
from hybridsched.engines.vllm_buckets import BucketBox
from hybridsched.engines.vllm_groups import Group, open_group, parse_version
from hybridsched.engines.vllm_options import VllmOptions, check_engine_kwargs, engine_arguments, set_environment
from hybridsched.errors import ConfigError, DataError, FaultError, WeightSyncError
from hybridsched.model import FinishReason, Response, SamplingParams, VersionRun, WeightVersion
from hybridsched.models.config import ModelConfig
from hybridsched.runtime.plan import WorkerSpec
from hybridsched.runtime.workers import settings

MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=256,
)
OPTIONS = VllmOptions("float32", max_num_seqs=4, kv_cache_tokens=400, max_tokens=100)
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)


# ---- options ------------------------------------------------------------------------------------------------------


def test_the_kv_budget_of_a_cpu_replica_is_its_tokens_and_a_block_per_sequence() -> None:
    arguments = engine_arguments(Path("m"), MODEL, OPTIONS, "cpu")
    block = 2 * 2 * 32 * 1 * 32 * 4  # k and v, layers, tokens, heads, head_dim, bytes
    assert arguments["kv_cache_memory_bytes"] == (13 + 4 + 1) * block
    assert arguments["max_model_len"] == 101


def test_a_gpu_replica_gets_its_share_of_the_memory_and_only_hybrids_sleep() -> None:
    hybrid = engine_arguments(Path("m"), MODEL, replace(OPTIONS, gpu_memory_utilization=0.4), "cuda")
    standalone = engine_arguments(Path("m"), MODEL, replace(OPTIONS, sleeps=False), "cuda")
    assert (hybrid["gpu_memory_utilization"], hybrid["enable_sleep_mode"]) == (0.4, True)
    assert standalone["enable_sleep_mode"] is False
    assert {"worker_cls", "kv_cache_memory_bytes"}.isdisjoint(hybrid)
    fixed = engine_arguments(Path("m"), MODEL, replace(OPTIONS, fixed_kv=True), "cuda")
    assert fixed["kv_cache_memory_bytes"] == engine_arguments(Path("m"), MODEL, OPTIONS, "cpu")["kv_cache_memory_bytes"]


def test_options_of_the_user_win_over_our_defaults() -> None:
    options = replace(OPTIONS, engine_kwargs={"enforce_eager": False, "seed": 7})
    arguments = engine_arguments(Path("m"), MODEL, options, "cpu")
    assert (arguments["enforce_eager"], arguments["seed"]) == (False, 7)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"enforce_eagre": True},
            r"engine_kwargs\.vllm\.enforce_eagre: vLLM has no such option; did you mean enforce_e",
        ),
        ({"xyz": 1}, "see vLLM's engine arguments"),
        ({"dtype": "float16"}, r"dtype cannot be set here; set actor_rollout_ref\.rollout\.dtype"),
        ({"worker_cls": "a.B"}, "hybridsched needs it as it is"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_engine_kwargs(given, {"enforce_eager", "seed", "dtype"})


def test_models_that_vllm_cannot_run_are_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match="head_dim is 16, possible are 32, 64"):
        engine_arguments(Path("m"), replace(MODEL, head_dim=16), OPTIONS, "cpu")
    with pytest.raises(ConfigError, match="is 300, but the context of m ends at 256"):
        engine_arguments(Path("m"), MODEL, replace(OPTIONS, max_tokens=300), "cpu")


def test_the_environment_is_set_only_where_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CPU_KVCACHE_SPACE": "4"})
    set_environment(OPTIONS, "cpu")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ


def test_hybrids_and_standalone_replicas_are_told_their_own_share() -> None:
    config = RunConfig.model_validate(
        {
            "data": {"max_prompt_length": 10, "max_response_length": 20},
            "actor_rollout_ref": {
                "rollout": {
                    "name": "vllm",
                    "gpu_memory_utilization": 0.3,
                    "standalone_gpu_memory_utilization": 0.8,
                    "engine_kwargs": {"vllm": {"seed": 1}},
                }
            },
        }
    )
    told = {
        kind: settings.vllm_options(config, derive(config), WorkerSpec(f"{kind}.0", kind, 0, 0, (0,)))
        for kind in ("hybrid", "standalone")
    }
    assert (told["hybrid"].gpu_memory_utilization, told["hybrid"].sleeps) == (0.3, True)
    assert (told["standalone"].gpu_memory_utilization, told["standalone"].sleeps) == (0.8, False)
    assert (told["hybrid"].max_tokens, told["hybrid"].engine_kwargs) == (30, {"seed": 1})


def test_what_the_plan_owns_names_keys_that_exist() -> None:
    from hybridsched.config.keys import all_keys

    named = {word.strip(",") for text in vllm_options.OWNED.values() for word in text.split() if word.count(".") > 1}
    assert named
    assert named <= set(all_keys())


# ---- streams ------------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    logprob: float


@dataclass
class Span:
    version: str
    start: int
    end: int


def group(partials: tuple[Response, ...] = (Response.empty(),), **params: Any) -> Group:
    """As inside generate(); needs a running loop."""
    sampling = SamplingParams(**{"n": len(partials), "max_new_tokens": 20, "seed": 3, **params})
    request = GroupRequest("g", 5, np.array([1, 2, 3], np.int32), sampling, partials)
    return open_group(request, vocab_size=32, max_tokens=100, stops=(9,))


def in_loop(act: Any) -> Any:
    async def main() -> Any:
        return act()

    return asyncio.run(main())


def grow(stream: Any, tokens: list[int], spans: list[Span] | None, reason: str = "abort") -> None:
    stream.take(tokens, [{token: Entry(-0.5)} for token in tokens])
    stream.end(reason, spans, V1)


def test_a_response_grows_over_several_requests_and_its_runs_merge() -> None:
    def act() -> Response:
        g = group()
        (stream,) = g.running.values()
        assert stream.begin()[:2] == ([1, 2, 3], 20)
        grow(stream, [4, 5], [Span("0.0", 0, 2)])
        assert stream.begin()[:2] == ([1, 2, 3, 4, 5], 18)
        grow(stream, [6, 7, 8], [Span("0.0", 0, 1), Span("0.1", 1, 3)], "length")
        g.record(stream)
        return g.future.result()[0]

    response = in_loop(act)
    assert response.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert response.version_runs == (VersionRun(V0, 0, 3), VersionRun(V1, 3, 5))
    assert response.finish is FinishReason.LENGTH


def test_tokens_sampled_on_an_old_cache_say_so() -> None:
    def act() -> list[VersionRun]:
        (stream,) = group().running.values()
        stream.begin()
        stream.kept_from.append(V1)
        grow(stream, [4, 5, 6], [Span("0.0", 0, 1), Span("0.1", 1, 3)])
        stream.begin()  # a new request has no old cache
        grow(stream, [7], [Span("0.1", 0, 1)])
        return stream.runs

    assert in_loop(act) == [VersionRun(V0, 0, 1), VersionRun(V1, 1, 3, True), VersionRun(V1, 3, 4)]


def test_tokens_without_a_label_belong_to_the_current_version() -> None:
    def act() -> list[VersionRun]:
        (stream,) = group().running.values()
        stream.begin()
        grow(stream, [4], None)
        return stream.runs

    assert in_loop(act) == [VersionRun(V1, 0, 1)]
    assert parse_version("default", V1) == V1
    assert parse_version("2.17", V1) == WeightVersion(2, 17)


def test_log_probs_that_are_not_finite_are_a_fault() -> None:
    def act() -> None:
        (stream,) = group().running.values()
        stream.begin()
        stream.take([4], [{4: Entry(float("nan"))}])

    with pytest.raises(FaultError, match="not finite"):
        in_loop(act)


def test_seeds_name_response_and_position_and_do_not_depend_on_the_way() -> None:
    def seeds(partials: tuple[Response, ...]) -> list[int]:
        return in_loop(lambda: [stream.begin()[2] for stream in group(partials).running.values()])

    part = Response(np.array([4], np.int32), np.zeros(1, np.float32), (VersionRun(V0, 0, 1),), FinishReason.ABORTED)
    fresh, continued = seeds((Response.empty(),) * 3), seeds((part,) * 3)
    assert len({*fresh, *continued}) == 6
    assert fresh == seeds((Response.empty(),) * 3)
    assert all(0 <= seed < 1 << 63 for seed in (*fresh, *continued))


def test_a_mask_is_extended_and_finished_partials_are_left_alone() -> None:
    done = Response(np.array([4], np.int32), np.zeros(1, np.float32), (VersionRun(V0, 0, 1),), FinishReason.STOP)
    part = replace(done, finish=FinishReason.ABORTED, response_mask=np.array([0], np.uint8))

    def act() -> tuple[Response, ...]:
        g = group((done, part))
        (stream,) = g.running.values()
        stream.begin()
        grow(stream, [9], None, "stop")
        g.record(stream)
        return g.future.result()

    finished, grown = in_loop(act)
    assert finished is done
    assert grown.response_mask is not None
    assert grown.response_mask.tolist() == [0, 1]
    assert grown.finish is FinishReason.STOP


@pytest.mark.parametrize(("params", "stops"), [({}, [9, 7]), ({"ignore_eos": True}, [7])])
def test_the_models_own_ends_count_unless_ignored(params: dict[str, Any], stops: list[int]) -> None:
    assert in_loop(lambda: group(stop_token_ids=(7,), **params).stops) == stops


def test_requests_that_can_never_run_are_refused() -> None:
    with pytest.raises(DataError, match="is 1003, at most 100 fit"):
        in_loop(lambda: group(max_new_tokens=1000))


# ---- buckets ------------------------------------------------------------------------------------------------------


def read(update: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As another process would."""
    with open(update["path"], "r+b") as file:
        flat = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)[: update["nbytes"]]
    assert xxhash.xxh3_64_intdigest(memoryview(flat.numpy())) == update["checksum"]
    found = {}
    for name, dtype, shape, start in update["tensors"]:
        kind = getattr(torch, dtype)
        count = int(np.prod(shape))
        found[name] = flat[start : start + count * kind.itemsize].view(kind).view(shape)
    return found


def test_buckets_arrive_whole_and_the_memory_grows_with_them() -> None:
    box = BucketBox()
    for size in (3, 5000, 7):
        sent = {"a": torch.randn(size), "b": torch.randn(2, size).bfloat16(), "c": torch.arange(size)}
        found = read(box.fill(sent))
        assert {name: tensor.dtype for name, tensor in sent.items()} == {n: t.dtype for n, t in found.items()}
        assert all(torch.equal(sent[name], found[name]) for name in sent)
    box.close()
    box.close()


def test_no_memory_for_a_bucket_is_told_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"no shared memory .* lower weight_sync\.bucket_bytes"):
        BucketBox().fill({"a": torch.zeros(3)})
