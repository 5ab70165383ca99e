"""How samples slow each other down: the fit, the model, and what lookahead makes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from sim_tools import config

from hybridsched.scheduling.load import LoadModel, fit_load
from hybridsched.scheduling.outlook import Outlook, play_forward
from hybridsched.simulation.scenario import play, with_policy


def report(*sizes: int, base: float = 0.02, per_sequence: float = 0.001) -> dict[int, tuple[float, ...]]:
    """100 steps with each of these batches."""
    return {n: (100 * (base + per_sequence * n), 100.0, 100.0 * n, 0.0) for n in sizes}


def test_the_fixed_part_of_a_step_and_the_mean_load_are_found() -> None:
    """Batches of 4 and 36: 20 on average, a step of 40 ms, half of it fixed. 8 s x 5 samples on one replica."""
    load = fit_load([8.0] * 5, [report(4, 36)], max_num_seqs=64)
    assert (0.5, 5.0) == pytest.approx((load.fixed_share, load.mean_load))
    assert 64 / 4 == pytest.approx(load.max_load)  # four sequences of a sample in the batch on average
    assert 1.0 == pytest.approx(load.slowness(5.0))
    assert 1.5 == pytest.approx(load.slowness(10.0))
    assert 0.6 == pytest.approx(load.slowness(1.0))


def test_samples_beyond_the_batch_wait_in_turn() -> None:
    load = LoadModel(fixed_share=1.0, mean_load=4.0, max_load=8.0)
    assert [1.0, 1.0, 2.0] == [load.slowness(n) for n in (4, 8, 16)]


@pytest.mark.parametrize("reports", [[], [{}], [report(8)], [{8: (0.0, 0.0, 0.0, 0.0)}]])
def test_what_cannot_be_told_apart_counts_as_not_depending_on_the_load(
    reports: list[dict[int, tuple[float, ...]]],
) -> None:
    load = fit_load([1.0, 2.0], reports, 64)
    assert load.slowness(1.0) == load.slowness(20.0) if math.isinf(load.max_load) else 1.0 == load.fixed_share


def test_spreading_samples_over_hybrids_helps_only_where_load_costs_time() -> None:
    """Eight samples have places on the standalone replica alone; hybrids halve what each replica works on."""
    outlook = Outlook(
        collection=4,
        collections=2,
        window=8,
        queue=0,
        served_s=(),
        service_s=(10.0,),
        places=8,
        hybrid_places=8,
        train_s=1.0,
        sync_s=0.0,
        activate_s=0.0,
        deactivate_s=0.0,
        per_replica=8,
    )
    assert play_forward(outlook, None, 1).first_s == play_forward(outlook, 8, 1).first_s
    slowed = replace(outlook, load=LoadModel(fixed_share=0.2, mean_load=4.0))
    assert play_forward(slowed, 8, 1).first_s < 0.75 * play_forward(slowed, None, 1).first_s


def test_without_staleness_lent_hybrids_get_their_share_of_new_samples() -> None:
    """The standalone replica has places for the whole window; what it took while hybrids woke would stay there."""
    crowded = config(
        "async_training.trigger_parameter_sync_step=1",
        "async_training.staleness_threshold=0",
        "async_training.concurrent_samples_per_replica=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "emulated.decode_base_s=0.01",
        "emulated.decode_per_seq_s=0.01",
        "trainer.n_gpus_per_node=3",
    )
    times = {
        name: play(with_policy(crowded, name)).wall_clock_s for name in ("static_fully_async", "default", "lookahead")
    }
    assert times["default"] < 0.8 * times["static_fully_async"]
    assert times["lookahead"] < 1.02 * times["default"]
