"""The truth test passes only what was compared and found equal."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hybridsched.weight_sync.probe import ProbeResult, compare_logprobs


def arrays(*rows: list[float]) -> list[np.ndarray]:
    return [np.array(row, np.float32) for row in rows]


def test_equal_logprobs_pass() -> None:
    result = compare_logprobs(arrays([-1, -2], [-3]), arrays([-1, -2], [-3]), 1e-4)
    assert (result.max_abs_diff, result.n_tokens, result.n_probes, result.ok) == (0.0, 3, 2, True)


def test_the_largest_difference_is_found_and_placed() -> None:
    result = compare_logprobs(arrays([-1, -2], [-3, -4]), arrays([-1, -2.25], [-3, -4.5]), 0.25)
    expected = ProbeResult(0.5, 4, 2, False, "largest difference 0.5 at probe 1, token 1: above the tolerance 0.25")
    assert expected == result


def test_a_difference_equal_to_the_tolerance_passes() -> None:
    assert compare_logprobs(arrays([-1.0]), arrays([-1.25]), 0.25).ok


@pytest.mark.parametrize(
    ("trainer", "receiver", "word"),
    [
        ([], [], "no probes"),
        (arrays([-1]), [], "no probes"),
        (arrays([]), arrays([]), "no tokens"),
        (arrays([-1]), arrays([-1], [-2]), "answered 1 probes, receiver 2"),
        (arrays([-1, -2]), arrays([-1]), "shape"),
        (arrays([-1, math.nan]), arrays([-1, -2]), "trainer log-prob is nan"),
        (arrays([-1, -2]), arrays([-1, -math.inf]), "receiver log-prob is -inf"),
        (arrays([-math.inf]), arrays([-math.inf]), "-inf"),
    ],
)
def test_what_proves_nothing_fails(trainer: list[np.ndarray], receiver: list[np.ndarray], word: str) -> None:
    result = compare_logprobs(trainer, receiver, 1e-4)
    assert (result.ok, math.isnan(result.max_abs_diff)) == (False, True)
    assert word in result.reason


def test_an_empty_response_among_others_is_allowed() -> None:
    result = compare_logprobs(arrays([], [-1]), arrays([], [-1]), 1e-4)
    assert (result.ok, result.n_tokens, result.n_probes) == (True, 1, 2)


@pytest.mark.parametrize("tolerance", [-1.0, math.nan])
def test_a_tolerance_that_is_none_fails(tolerance: float) -> None:
    assert not compare_logprobs(arrays([-1]), arrays([-1]), tolerance).ok
