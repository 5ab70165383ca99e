"""The clairvoyant bound: hand-worked cases, and never above what a policy really takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.config.schema import RunConfig
from hybridsched.simulation.bound import best_fixed_ratio, lower_bound
from hybridsched.simulation.scenario import load_scenario, play, with_policy

#: One trainer GPU, one rollout GPU; R = 2, K = 2, S = 4. 10 tokens a response, 2 responses a sample, batches of 2.
#: A decode step takes 1 s whatever runs, so a sample is 10 s of a replica; training one (22 tokens) takes 5.5 s.
HAND = (
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "async_training.trigger_parameter_sync_step=2",
    "async_training.staleness_threshold=1",
    "async_training.concurrent_samples_per_replica=1",
    "async_training.use_dynamic_resource_scheduling=true",
    "emulated.response_mean_tokens=10",
    "emulated.response_sigma=0",
    "emulated.decode_base_s=1",
    "emulated.decode_per_seq_s=0",
    "emulated.prefill_tokens_per_s=1e9",
    "emulated.prompt_tokens=1",
    "emulated.train_tokens_per_s=4",
    "emulated.train_fixed_s=0",
    "emulated.sync_s=1",
    "emulated.wake_s=1",
    "emulated.sleep_s=1",
    "emulated.handover_s=1",
    "queue.seal_age_s=0.01",
)


def scenario(*overrides: str, cycles: int = 3) -> RunConfig:
    return load_scenario(None, [*HAND, *overrides], cycles=cycles).config


def test_without_lending_generation_takes_its_work_and_the_syncs() -> None:
    """12 samples x 10 s, and 4 syncs of 1 s in which nobody generates."""
    bound = lower_bound(scenario(), 12, lending=False)
    assert (124.0, 0, "generation") == (pytest.approx(bound.seconds), bound.activations, bound.limit)


def test_lending_shares_the_work() -> None:
    """Trainer: 66 s of training, 4 of syncs, x lent; work 120 = (66 + x) + (x - 3): x = 28.5, wall 98.5."""
    bound = lower_bound(scenario(), 12)
    assert (98.5, 28.5) == (pytest.approx(bound.seconds), pytest.approx(bound.lent_s))
    assert 1 == bound.activations


def test_one_activation_finds_no_more_than_a_window_of_samples() -> None:
    """A window of 4: each activation does at most 40 s of work. Slow training hides nothing: two are not enough."""
    few = scenario("async_training.staleness_threshold=0", "emulated.train_tokens_per_s=1000", cycles=4)
    assert 2 <= lower_bound(few, 16).activations


def test_training_bound_is_training_and_syncs() -> None:
    """12 samples x 22 tokens at 0.5 tokens/s = 528 s, 4 syncs."""
    bound = lower_bound(scenario("emulated.train_tokens_per_s=0.5"), 12)
    assert (532.0, 0, "training") == (pytest.approx(bound.seconds), bound.activations, bound.limit)


def test_a_closed_window_keeps_the_last_collection_from_overlapping() -> None:
    """Staleness 0: the 120 s of generation and the last collection (11 s) of each of 3 cycles exclude each other."""
    bound = lower_bound(scenario("async_training.staleness_threshold=0"), 12, lending=False)
    assert (120 + 4 + 33, "window") == (pytest.approx(bound.seconds), bound.limit)


def test_colocated_runs_need_a_switch_or_more() -> None:
    """No standalone replica: 120 s of work, 66 s of training, no broadcast, two activations (a window holds 8)."""
    bound = lower_bound(scenario("rollout.nnodes=0"), 12)
    assert (120 + 66 + 2 * 3, 2) == (pytest.approx(bound.seconds), bound.activations)


def test_a_lost_replica_does_no_work_afterwards() -> None:
    """Two replicas, one lost at 20 s: 120 = 20 + (wall - 4)."""
    lost = scenario("rollout.n_gpus_per_node=2", "emulated.worker_lost_at_s={standalone.1: 20}")
    assert 104.0 == pytest.approx(lower_bound(lost, 12, lending=False).seconds)


def test_a_sample_holds_its_place_until_its_longest_response_ends() -> None:
    """Two samples a replica, batches of two sequences only: whichever is scarcer counts.

    Places: 12 x 10 / 2 = 60 s. Sequences: 12 x 20 / 2 = 120 s, as with one place and its two sequences.
    """
    two = ("async_training.concurrent_samples_per_replica=2", "emulated.train_tokens_per_s=50")
    few = scenario(*two, "actor_rollout_ref.rollout.max_num_seqs=2")
    assert 124.0 == pytest.approx(lower_bound(few, 12, lending=False).seconds)
    many = scenario(*two)
    assert 64.0 == pytest.approx(lower_bound(many, 12, lending=False).seconds)


def test_samples_begun_after_a_sync_take_at_least_their_longest_response() -> None:
    """Staleness 0, more replicas than samples: 3 cycles of 10 s, 0.11 s for the last collections, 4 syncs."""
    wide = scenario(
        "rollout.n_gpus_per_node=8", "async_training.staleness_threshold=0", "emulated.train_tokens_per_s=400"
    )
    bound = lower_bound(wide, 12)
    assert (3 * 10 + 3 * 0.11 + 4, "tails") == (pytest.approx(bound.seconds), bound.limit)


def test_samples_of_hybrids_that_leave_may_crowd_on_the_others() -> None:
    """Batches of four: a second sample runs at no cost. Each of 3 activations saves 5 s of work.

    120 - 3 x 5 = (66 + x) + (x - 3 x 3): x = 24, wall 66 + 4 + 24. Not allowed to crowd: as with batches of two.
    """
    roomy = scenario("actor_rollout_ref.rollout.max_num_seqs=4")
    assert (94.0, 3) == (pytest.approx(lower_bound(roomy, 12).seconds), lower_bound(roomy, 12).activations)
    assert 98.5 == pytest.approx(lower_bound(roomy, 12, crowding=False).seconds)


POLICIES = ("static_fully_async", "default", "fixed_ratio", "lookahead")


@settings(max_examples=24, deadline=None, derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    staleness=st.sampled_from([0, 0.25, 1]),
    train=st.sampled_from([1, 4, 50]),
    sigma=st.sampled_from([0, 1.0]),
    rollout=st.sampled_from([0, 1, 2]),
    seed=st.integers(0, 5),
    seats=st.sampled_from([2, 8]),
)
def test_no_policy_is_faster_than_the_bound(
    policy: str, staleness: float, train: float, sigma: float, rollout: int, seed: int, seats: int
) -> None:
    config = scenario(
        f"async_training.staleness_threshold={staleness}",
        f"emulated.train_tokens_per_s={train}",
        f"emulated.response_sigma={sigma}",
        f"rollout.nnodes={rollout}",
        f"trainer.seed={seed}",
        f"actor_rollout_ref.rollout.max_num_seqs={seats}",
    )
    played = play(with_policy(config, policy))
    assert lower_bound(config, played.trained).seconds <= played.wall_clock_s + 1e-6


def test_the_best_fixed_ratio_is_the_fastest_of_those_tried() -> None:
    config = scenario("emulated.train_tokens_per_s=50")
    alone = {ratio: best_fixed_ratio(config, [ratio])[1].wall_clock_s for ratio in (0.25, 1.0)}
    ratio, run = best_fixed_ratio(config, [0.25, 1.0])
    assert min(alone.values()) == run.wall_clock_s == alone[ratio]
