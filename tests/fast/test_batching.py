"""Splitting over ranks and micro-batches."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.trainers.batching import micro_batches, partition_samples

LENGTHS = st.lists(st.integers(0, 5000), max_size=40)


def test_differencing_by_hand():
    # 8-7=1, 6-5=1, 4-1=3, 3-1=2: sums 16 and 14
    parts = partition_samples([8, 7, 6, 5, 4], 2)
    assert [14, 16] == sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts)


def test_one_giant_is_balanced_against_all_others():
    assert [[0], [1, 2, 3]] == partition_samples([300, 100, 100, 100], 2)


def test_fewer_samples_than_ranks_leaves_ranks_empty():
    assert [[0], [1], [], []] == partition_samples([5, 9], 4)
    assert [[], []] == partition_samples([], 2)


def test_no_parts_are_refused():
    with pytest.raises(ValueError, match="0 parts"):
        partition_samples([1], 0)


@given(LENGTHS, st.integers(1, 8))
def test_partition_loses_and_repeats_nothing(lengths, k):
    parts = partition_samples(lengths, k)
    assert list(range(len(lengths))) == sorted(i for part in parts for i in part)
    assert k == len(parts)
    assert min(k, len(lengths)) == sum(bool(part) for part in parts)
    assert parts == partition_samples(lengths, k)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 8))
def test_partition_is_balanced_up_to_one_sample(lengths, k):
    loads = [sum(lengths[i] for i in part) for part in partition_samples(lengths, k)]
    assert max(loads) - min(loads) <= max(lengths)


def test_equal_rows_fill_micro_batches_evenly():
    # four rows fit; nine rows need three micro-batches, which are then made equal
    assert [[0, 1, 2], [3, 4, 5], [6, 7, 8]] == micro_batches([10] * 9, 40)


def test_rows_are_grouped_by_length():
    assert [[1, 3], [2, 0]] == micro_batches([1, 100, 2, 99], 200)


def test_a_row_longer_than_the_limit_stands_alone():
    assert [[1], [0, 2]] == micro_batches([5, 1000, 5], 10)


def test_nothing_needs_no_micro_batch():
    assert [] == micro_batches([], 10)


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="0 tokens"):
        micro_batches([1], 0)


@given(LENGTHS, st.integers(1, 6000))
def test_micro_batches_respect_the_limit_and_lose_nothing(lengths, limit):
    groups = micro_batches(lengths, limit)
    assert list(range(len(lengths))) == sorted(i for group in groups for i in group)
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= limit


def test_the_controller_can_import_it_without_torch():
    code = "import sys, hybridsched.trainers.batching; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode
