"""Cutting a model into buckets, and saying how two models differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec, WeightVersion
from hybridsched.weight_sync.plan import (
    ALIGN,
    ITEM_SIZE,
    check_offer,
    describe_difference,
    digest,
    make_offer,
    plan_buckets,
    tensor_nbytes,
    total_nbytes,
)

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(ITEM_SIZE))), max_size=20).map(
    lambda rows: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows)]
)
LIMITS = st.integers(ALIGN, 5000)
A = TensorSpec("a", (4, 8), "float32")
B = TensorSpec("b", (3,), "bfloat16")


@given(SPECS, LIMITS)
def test_every_byte_of_every_tensor_travels_once_and_in_order(specs: list[TensorSpec], limit: int) -> None:
    covered = [0] * len(specs)
    seen: list[int] = []
    for bucket in plan_buckets(specs, limit):
        for piece in bucket.pieces:
            assert covered[piece.tensor] == piece.tensor_offset
            covered[piece.tensor] += piece.nbytes
            seen.append(piece.tensor)
    assert [tensor_nbytes(s) for s in specs] == covered
    assert sorted(seen) == seen
    assert set(range(len(specs))) == set(seen)


@given(SPECS, LIMITS)
def test_no_bucket_is_longer_than_the_limit_and_its_pieces_do_not_overlap(specs: list[TensorSpec], limit: int) -> None:
    for index, bucket in enumerate(plan_buckets(specs, limit)):
        assert index == bucket.index
        end = 0
        for piece in bucket.pieces:
            assert piece.bucket_offset >= end
            end = piece.bucket_offset + piece.nbytes
        assert end == bucket.nbytes
        assert bucket.nbytes <= limit


@given(SPECS, LIMITS)
def test_pieces_can_be_viewed_in_their_dtype(specs: list[TensorSpec], limit: int) -> None:
    for bucket in plan_buckets(specs, limit):
        for piece in bucket.pieces:
            size = ITEM_SIZE[specs[piece.tensor].dtype]
            assert (piece.bucket_offset % ALIGN, piece.nbytes % size, piece.tensor_offset % size) == (0, 0, 0)


@given(SPECS, LIMITS)
def test_both_sides_cut_alike(specs: list[TensorSpec], limit: int) -> None:
    copy = [TensorSpec(s.name, tuple(s.shape), s.dtype) for s in specs]
    assert plan_buckets(specs, limit) == plan_buckets(copy, limit)
    assert digest(specs) == digest(copy)


def test_small_tensors_share_a_bucket_and_a_long_one_is_sliced() -> None:
    specs = [A, B, TensorSpec("long", (100,), "float32"), B.__class__("c", (1,), "int8")]
    buckets = [[(p.tensor, p.nbytes) for p in b.pieces] for b in plan_buckets(specs, 320)]
    assert buckets == [[(0, 128), (1, 6)], [(2, 320)], [(2, 80)], [(3, 1)]]


def test_a_tensor_of_half_a_bucket_travels_alone_and_need_not_be_packed() -> None:
    specs = [A, TensorSpec("half", (32,), "float32"), B]
    assert [[p.tensor for p in b.pieces] for b in plan_buckets(specs, 256)] == [[0], [1], [2]]
    assert [[p.tensor for p in b.pieces] for b in plan_buckets(specs, 576)] == [[0, 1, 2]]


def test_total_is_the_sum_without_padding() -> None:
    assert total_nbytes([A, B]) == 128 + 6


@pytest.mark.parametrize(
    "other",
    [
        [B, A],
        [A],
        [A, TensorSpec("b", (3,), "float16")],
        [A, TensorSpec("b", (4,), "bfloat16")],
        [A, TensorSpec("c", (3,), "bfloat16")],
    ],
)
def test_digest_and_description_see_every_difference(other: list[TensorSpec]) -> None:
    assert digest([A, B]) != digest(other)
    assert describe_difference([A, B], other) != ""


def test_difference_names_the_tensor_and_both_shapes() -> None:
    other = [A, TensorSpec("b", (4,), "float32")]
    assert describe_difference([A, B], other) == "b: sender float32[4], receiver bfloat16[3]"


def test_no_difference_is_no_text() -> None:
    assert describe_difference([A, B], [A, B]) == ""


@pytest.mark.parametrize(
    ("specs", "limit", "word"),
    [
        ([A, A], 4096, "listed twice"),
        ([TensorSpec("q", (2,), "int4")], 4096, "'q'"),
        ([A], 63, "bucket_bytes is 63"),
    ],
)
def test_impossible_plans_are_refused_by_name(specs: list[TensorSpec], limit: int, word: str) -> None:
    with pytest.raises(WeightSyncError, match=word):
        plan_buckets(specs, limit)


def test_an_equal_offer_is_accepted_and_carries_the_verify_switch() -> None:
    version = WeightVersion(0, 7)
    for verify in (True, False):
        assert verify is check_offer(make_offer([A, B], version, 4096, verify), [A, B], version, 4096)


@pytest.mark.parametrize(
    ("specs", "version", "limit", "word"),
    [
        ([A, B], WeightVersion(1, 7), 4096, "offers version 0.7, this receiver expects 1.7"),
        ([A, B], WeightVersion(0, 7), 8192, "buckets of 4096 bytes, this receiver 8192"),
        ([A], WeightVersion(0, 7), 4096, "b: only the sender has it"),
    ],
)
def test_another_offer_is_refused_with_the_difference(
    specs: list[TensorSpec], version: WeightVersion, limit: int, word: str
) -> None:
    offer = make_offer([A, B], WeightVersion(0, 7), 4096, True)
    with pytest.raises(WeightSyncError, match=word):
        check_offer(offer, specs, version, limit)
