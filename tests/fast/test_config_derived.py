"""Derived values by hand-worked numbers, and the tables people read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.config import RunConfig, derive, format_derived
from hybridsched.config.derived import collective_weights, data_parallel_rank

Values = dict[str, Any]


def build(actor: Values | None = None, rollout: Values | None = None, **sections: Values) -> RunConfig:
    """An emulated configuration; ``nodes`` is the top-level section rollout."""
    engine = {"actor": {"strategy": "emulated"} | (actor or {}), "rollout": {"name": "emulated"} | (rollout or {})}
    if "nodes" in sections:
        sections["rollout"] = sections.pop("nodes")
    return RunConfig.model_validate({"actor_rollout_ref": engine} | sections)


def test_limits_of_the_specifications_experiment() -> None:
    config = build(
        actor={"ppo_mini_batch_size": 128},
        async_training={"trigger_parameter_sync_step": 4, "staleness_threshold": 0.5},
    )
    derived = derive(config)
    assert (128, 512, 768) == (
        derived.required_samples,
        derived.step_required_samples,
        derived.max_required_samples,
    )


@given(st.integers(1, 512), st.integers(1, 8), st.integers(1, 8), st.floats(0, 4))
def test_window_is_between_one_cycle_and_its_staleness_share(mini: int, batches: int, k: int, staleness: float) -> None:
    training = {"require_batches": batches, "trigger_parameter_sync_step": k, "staleness_threshold": staleness}
    derived = derive(build(actor={"ppo_mini_batch_size": mini}, async_training=training))
    assert mini * batches * k == derived.step_required_samples
    assert derived.step_required_samples <= derived.max_required_samples
    assert derived.max_required_samples <= derived.step_required_samples * (1 + staleness)


def test_zero_staleness_gives_exactly_one_cycle() -> None:
    derived = derive(build(async_training={"staleness_threshold": 0}))
    assert derived.step_required_samples == derived.max_required_samples


def test_replicas_of_a_split_with_lending() -> None:
    config = build(
        rollout={"tensor_model_parallel_size": 4},
        trainer={"nnodes": 2, "n_gpus_per_node": 8},
        async_training={"use_dynamic_resource_scheduling": True, "concurrent_samples_per_replica": 5},
        nodes={"nnodes": 3, "n_gpus_per_node": 8},
    )
    derived = derive(config)
    assert (16, 24) == (derived.n_trainer_gpus, derived.n_rollout_gpus)
    assert (6, 4, 4) == (derived.n_standalone_replicas, derived.n_hybrid_replicas, derived.gpus_per_replica)
    assert (30, 50) == (derived.concurrency_standalone, derived.concurrency_with_hybrids)
    assert not derived.only_hybrid


def test_without_lending_there_are_no_hybrids() -> None:
    derived = derive(build(trainer={"n_gpus_per_node": 4}))
    assert (0, derived.concurrency_standalone) == (derived.n_hybrid_replicas, derived.concurrency_with_hybrids)


def test_colocated_mode_builds_hybrids_without_being_told() -> None:
    derived = derive(build(trainer={"n_gpus_per_node": 4}, nodes={"nnodes": 0}))
    assert (True, 4, 0, 0) == (
        derived.only_hybrid,
        derived.n_hybrid_replicas,
        derived.n_standalone_replicas,
        derived.concurrency_standalone,
    )


def test_concurrency_never_exceeds_the_window() -> None:
    training = {"concurrent_samples_per_replica": 1000, "trigger_parameter_sync_step": 1, "staleness_threshold": 0.5}
    derived = derive(build(actor={"ppo_mini_batch_size": 10}, async_training=training))
    assert (15, 15) == (derived.max_required_samples, derived.concurrency_standalone)


@pytest.mark.parametrize(
    ("gpus", "sizes", "expected"),
    [
        (16, {}, 16),
        (16, {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}, 2),
        (16, {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}, 2),
    ],
)
def test_data_parallel_size_of_megatron(gpus: int, sizes: Values, expected: int) -> None:
    actor = {"strategy": "megatron", "megatron": sizes}
    assert expected == derive(build(actor=actor, trainer={"n_gpus_per_node": gpus})).data_parallel_size


@pytest.mark.parametrize(
    ("gpus", "sizes", "expected"),
    [
        (4, {}, [0, 1, 2, 3]),
        (4, {"tensor_model_parallel_size": 2}, [0, 0, 1, 1]),
        (4, {"pipeline_model_parallel_size": 2}, [0, 1, 0, 1]),
        (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, [0, 0, 1, 1, 0, 0, 1, 1]),
        (4, {"expert_model_parallel_size": 4}, [0, 1, 2, 3]),
    ],
)
def test_ranks_that_hold_one_model_together_share_their_samples(gpus: int, sizes: Values, expected: list[int]) -> None:
    config = build(actor={"strategy": "megatron", "megatron": sizes}, trainer={"n_gpus_per_node": gpus})
    assert expected == [data_parallel_rank(config, rank) for rank in range(gpus)]


@pytest.mark.parametrize(
    ("strategy", "sizes", "expected"),
    [
        ("torch", {"tensor_model_parallel_size": 2}, False),
        ("megatron", {}, False),
        ("megatron", {"tensor_model_parallel_size": 2}, True),
        ("megatron", {"pipeline_model_parallel_size": 2}, True),
        ("megatron", {"expert_model_parallel_size": 2}, True),
        ("megatron", {"weight_source": "megatron-bridge"}, True),
    ],
)
def test_handing_out_weights_is_collective_where_a_rank_does_not_hold_them_all(
    strategy: str, sizes: Values, expected: bool
) -> None:
    config = build(actor={"strategy": strategy, "megatron": sizes}, trainer={"n_gpus_per_node": 2})
    assert expected == collective_weights(config)


def test_torch_trainer_is_data_parallel_over_all_gpus() -> None:
    assert (
        6 == derive(build(actor={"strategy": "torch"}, trainer={"nnodes": 2, "n_gpus_per_node": 3})).data_parallel_size
    )


def test_engine_budgets_follow_from_concurrency_and_lengths_unless_given() -> None:
    data = {"max_prompt_length": 100, "max_response_length": 28}
    training = {"concurrent_samples_per_replica": 3}
    derived = derive(build(rollout={"n": 8}, data=data, async_training=training))
    assert (24, 24 * 128) == (derived.max_num_seqs, derived.kv_cache_tokens)
    given_sizes = derive(build(rollout={"n": 8, "max_num_seqs": 7, "kv_cache_tokens": 999}))
    assert (7, 999) == (given_sizes.max_num_seqs, given_sizes.kv_cache_tokens)


def lengths(prompts: int | None, ranks: int = 1, epochs: int = 1, **other: Any) -> tuple[int | None, ...]:
    """(samples, cycles, optimizer steps) with R = 20 (10 x 2), K = 3, S = 60."""
    config = build(
        actor={"ppo_mini_batch_size": 10, "strategy": "torch", "ppo_epochs": other.get("ppo_epochs", 1)},
        async_training={"require_batches": 2, "trigger_parameter_sync_step": 3},
        trainer={"total_epochs": epochs, "n_gpus_per_node": ranks, "total_training_steps": other.get("limit")},
        nodes={"total_rollout_steps": other.get("steps")},
    )
    derived = derive(config, prompts)
    return derived.total_samples, derived.total_cycles, derived.optimizer_steps


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"prompts": 60}, (60, 1, 6)),
        ({"prompts": 60, "epochs": 2}, (120, 2, 12)),
        ({"prompts": 61}, (61, 2, 7)),  # one sample left: one rank, so it is trained, in a cycle of its own
        ({"prompts": 61, "ranks": 2}, (61, 1, 6)),  # fewer than ranks: surplus
        ({"prompts": 75, "ranks": 2}, (75, 2, 8)),  # 15 left: mini-batches of 10 and 5
        ({"prompts": 79}, (79, 2, 8)),
        ({"prompts": 1000, "steps": 120}, (120, 2, 12)),
        ({"prompts": 50, "steps": 120}, (50, 1, 5)),
        ({"prompts": 1000, "limit": 3}, (1000, 3, 18)),
        ({"prompts": 70, "limit": 1}, (70, 1, 6)),
        ({"prompts": 70, "limit": 5}, (70, 2, 7)),
        ({"prompts": 60, "ppo_epochs": 3}, (60, 1, 18)),
        ({"prompts": 0}, (0, 0, 0)),
        ({"prompts": None}, (None, None, None)),
        ({"prompts": None, "limit": 4}, (None, 4, 24)),
        ({"prompts": None, "steps": 120}, (None, None, None)),
    ],
)
def test_length_of_the_run(given: Values, expected: tuple[int | None, ...]) -> None:
    assert expected == lengths(**given)


def test_emulated_data_set_has_its_configured_size() -> None:
    assert 500 == derive(build(emulated={"dataset_size": 250}, trainer={"total_epochs": 2})).total_samples


def test_partial_rollout_off_makes_syncs_wait() -> None:
    assert "wait" == derive(build(async_training={"partial_rollout": False})).sync_mode
    assert "keep" == derive(build(nodes={"sync_mode": "keep"})).sync_mode


def test_min_responses_never_exceeds_n() -> None:
    assert 1 == derive(build(rollout={"n": 1})).min_responses
    assert 2 == derive(build(rollout={"n": 8})).min_responses


def test_run_folder_and_memory_shares() -> None:
    derived = derive(build(trainer={"experiment_name": "x"}, rollout={"gpu_memory_utilization": 0.45}))
    assert ("runs/x", 0.45, 0.45) == (
        derived.run_folder,
        derived.hybrid_memory_fraction,
        derived.standalone_memory_fraction,
    )
    other = {"gpu_memory_utilization": 0.45, "standalone_gpu_memory_utilization": 0.7}
    derived = derive(build(trainer={"default_local_dir": "/scratch/y"}, rollout=other))
    assert ("/scratch/y", 0.7) == (derived.run_folder, derived.standalone_memory_fraction)


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ({"lr_warmup_steps": 5}, (15, 5)),
        ({"lr_warmup_steps_ratio": 0.2}, (15, 3)),
        ({"lr_warmup_steps_ratio": 0.2, "total_training_steps": 100}, (100, 20)),
        ({}, (15, 0)),
    ],
)
def test_schedule_and_warm_up_steps(optim: Values, expected: tuple[int, int]) -> None:
    config = build(actor={"ppo_mini_batch_size": 4, "optim": optim})
    derived = derive(config, 60)
    assert expected == (derived.schedule_steps, derived.warmup_steps)


def test_table_for_people_shows_sizes_and_says_what_is_unknown() -> None:
    config = build(actor={"strategy": "torch"})
    rows = {line[:25].strip(): line[25:] for line in format_derived(config, derive(config)).splitlines()}
    assert "64 samples" in rows["sync cycle S"]
    assert "70 samples" in rows["window"]
    assert "known once the data is read" in rows["samples in all"]
    known = format_derived(config, derive(config, 6400))
    assert "6,400" in known
    assert "known once" not in known
