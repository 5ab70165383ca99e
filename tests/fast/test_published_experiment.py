"""The published experiment in small: its picture comes out by itself, the fit reaches the statics, the bound is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridsched.simulation import experiment as x
from hybridsched.simulation.uncertainty import read_assumptions

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "published" / "assumptions.yaml"


def _setting() -> x.Setting:
    """The file's values with a quarter of the responses (speed of the test) at the same place of the decode curve."""
    content, assumptions = read_assumptions(FILE)
    fixed = {key: value for key, value in content["setting"].items() if key != "gpus_per_block"}
    starts = {key: entry["value"] for key, entry in content["calibrated"].items()}
    values = {a.name: a.value for a in assumptions}
    values |= {"decode_half_batch": values["decode_half_batch"] / 4, "response_sigma": 0.6}
    return x.Setting(**{**fixed, "n": 2, "max_num_seqs": 64}, **starts, **values)


@pytest.fixture(scope="module")
def fit() -> x.Fit:
    measured = read_assumptions(FILE)[0]["measured"]
    return x.calibrate(_setting(), measured["static_16_16_h"], measured["static_8_24_h"], cycles=9, warmup=3, rounds=4)


@pytest.fixture(scope="module")
def outcomes(fit: x.Fit) -> dict[str, x.Outcome]:
    dynamic = x.simulate(fit.setting, x.DYNAMIC_PEER, cycles=12, warmup=3)
    default = x.simulate(fit.setting, x.DYNAMIC_DEFAULT, cycles=12, warmup=3)
    return {
        x.STATIC_16_16.name: fit.static_16_16,
        x.STATIC_8_24.name: fit.static_8_24,
        x.DYNAMIC_PEER.name: dynamic,
        x.DYNAMIC_DEFAULT.name: default,
    }


def test_the_fit_reaches_both_static_times(fit: x.Fit) -> None:
    assert abs(fit.error_16_16) < 0.01
    assert abs(fit.error_8_24) < 0.01


def test_the_published_picture_comes_out_by_itself(fit: x.Fit, outcomes: dict[str, x.Outcome]) -> None:
    assert [text for text, good in x.picture(fit.setting, outcomes).items() if not good] == []


def test_lending_is_faster_than_both_static_splits(outcomes: dict[str, x.Outcome]) -> None:
    static = min(outcomes[arm.name].seconds_per_cycle for arm in (x.STATIC_16_16, x.STATIC_8_24))
    assert outcomes[x.DYNAMIC_PEER.name].seconds_per_cycle < static
    assert outcomes[x.DYNAMIC_DEFAULT.name].seconds_per_cycle < static


def test_nothing_is_faster_than_the_bound(fit: x.Fit, outcomes: dict[str, x.Outcome]) -> None:
    for outcome in outcomes.values():
        assert outcome.seconds_per_cycle > x.bound_s(fit.setting, outcome.tokens_per_cycle)


def test_the_bound_without_switch_cost_is_all_work_over_all_blocks() -> None:
    """Rate of a replica the same at any batch: tokens / 4 blocks, training / 2 trainer blocks, by hand."""
    setting = replace(
        _setting(),
        decode_half_batch=1e-9,
        generation_tokens_per_s=1000.0,
        training_tokens_per_s=1000.0,
        train_efficiency=1.0,
        train_fixed_s=0.0,
        hybrid_speed=1.0,
        switch_s=0.0,
        sync_s=0.0,
    )
    assert x.bound_s(setting, 80_000) == pytest.approx((80.0 + 80.0) / 4)


def test_a_finer_split_cuts_blocks_without_changing_their_speed() -> None:
    """12+20 in blocks of 4: two half replicas together decode, and two half ranks train, as fast as one whole."""
    setting = _setting()
    whole = x.configuration(setting, x.STATIC_16_16, 2).emulated
    half = x.configuration(setting, x.STATIC_12_20, 2).emulated
    batch = 24
    one = batch / (whole.decode_base_s + whole.decode_per_seq_s * batch)
    two = 2 * (batch / 2) / (half.decode_base_s + half.decode_per_seq_s * batch / 2)
    assert two == pytest.approx(one)
    assert half.train_tokens_per_s * 2**setting.train_efficiency == pytest.approx(whole.train_tokens_per_s)
