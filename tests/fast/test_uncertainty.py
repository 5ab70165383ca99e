"""Draws over assumptions: ranges, strata, effects, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridsched.errors import ConfigError
from hybridsched.simulation.uncertainty import Assumption, latin_hypercube, main_effects, quantile, read_assumptions

LINEAR = Assumption("x", 2.0, 0.0, 10.0, False, "", "")
LOG = Assumption("y", 10.0, 1.0, 100.0, True, "", "")


def test_every_stratum_of_every_range_is_drawn_once() -> None:
    draws = latin_hypercube([LINEAR, LOG], 16, seed=3)
    for assumption in (LINEAR, LOG):
        assert sorted(int(16 * assumption.share(draw[assumption.name])) for draw in draws) == list(range(16))


def test_the_same_seed_gives_the_same_draws() -> None:
    assert latin_hypercube([LOG], 5, seed=1) == latin_hypercube([LOG], 5, seed=1)
    assert latin_hypercube([LOG], 5, seed=1) != latin_hypercube([LOG], 5, seed=2)


def test_half_of_a_logarithmic_range_is_its_geometric_mean() -> None:
    assert LOG.at(0.5) == pytest.approx(10.0)
    assert LINEAR.at(0.5) == 5.0


def test_effects_of_a_linear_result_are_found_exactly() -> None:
    draws = latin_hypercube([LINEAR, LOG], 8, seed=0)
    results = [5.0 + 3.0 * LINEAR.share(d["x"]) - 2.0 * LOG.share(d["y"]) for d in draws]
    effects = main_effects([LINEAR, LOG], draws, results)
    assert effects["x"] == pytest.approx((3.0, 0.0), abs=1e-9)
    assert effects["y"] == pytest.approx((-2.0, 0.0), abs=1e-9)


def test_what_assumptions_do_not_explain_is_in_the_standard_error() -> None:
    draws = latin_hypercube([LINEAR], 64, seed=0)
    results = [LINEAR.share(d["x"]) + (-1) ** i for i, d in enumerate(draws)]
    effect, error = main_effects([LINEAR], draws, results)["x"]
    assert abs(effect - 1.0) < 3 * error
    assert error == pytest.approx(12**0.5 / 64**0.5, rel=0.1)  # 1 / (sqrt(n) x deviation of a uniform share)


def test_effects_need_more_draws_than_unknowns() -> None:
    draws = latin_hypercube([LINEAR, LOG], 3, seed=0)
    assert main_effects([LINEAR, LOG], draws, [1.0, 2.0, 3.0]) == {}


def test_quantiles_interpolate() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0], 0.1) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("{value: 1, low: 0, high: 2, scale: linear, unit: s}", "lacks reason"),
        ("{value: 3, low: 0, high: 2, scale: linear, unit: s, reason: r}", "not within a range"),
        ("{value: 1, low: 0, high: 2, scale: log, unit: s, reason: r}", "not within a range"),
    ],
)
def test_an_assumption_without_reason_or_range_is_refused(tmp_path: Path, entry: str, says: str) -> None:
    file = tmp_path / "assumptions.yaml"
    file.write_text(f"assumptions:\n  a: {entry}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_assumptions(file)
