"""How the samples of a collection are handed to trainer ranks."""

from __future__ import annotations

from hybridsched.model import RowRef, SampleRow, SegmentId, WeightVersion
from hybridsched.runtime.collector import split_rows

V = WeightVersion(0, 0)


def rows(*tokens: int) -> list[SampleRow]:
    segment = SegmentId("w", "i", 0)
    return [SampleRow(i, f"p{i}", RowRef(segment, i), n, V, V, 0.0, 1) for i, n in enumerate(tokens)]


def taken(orders, rank: int) -> list[list[int]]:
    return [[row for _segment, row in mini] for mini in orders[rank]]


def test_ranks_of_different_places_share_a_mini_batch_out_by_tokens():
    orders = split_rows(rows(90, 10, 50, 50), 4, [0, 1])
    assert [[[0, 1]], [[2, 3]]] == [taken(orders, rank) for rank in range(2)]


def test_ranks_of_one_place_get_the_same_samples():
    orders = split_rows(rows(5, 4, 3, 2, 1, 6), 3, [0, 1, 0, 1])
    assert taken(orders, 0) == taken(orders, 2)
    assert taken(orders, 1) == taken(orders, 3)
    for mini in range(2):
        both = sorted(taken(orders, 0)[mini] + taken(orders, 1)[mini])
        assert [3 * mini, 3 * mini + 1, 3 * mini + 2] == both


def test_a_single_place_takes_everything_mini_batch_by_mini_batch():
    orders = split_rows(rows(1, 1, 1), 2, [0, 0])
    assert [[0, 1], [2]] == taken(orders, 0) == taken(orders, 1)


def test_more_places_than_samples_leaves_some_without():
    orders = split_rows(rows(7), 4, [0, 1])
    assert [[0]] == taken(orders, 0)
    assert [[]] == taken(orders, 1)
