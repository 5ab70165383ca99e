"""How a model is cut into buckets. Owns the layout of the wire; does no I/O and imports no torch.

Invariants: the plan is a pure function of (specs, limit), so sender and receivers cut alike without talking; pieces
come in the order of the specs and cover every byte of every tensor once; a bucket is at most ``limit_bytes`` long;
every piece starts on a 64-byte boundary of its bucket, so any dtype can be viewed in place.

A tensor longer than the limit is cut into buckets of its own, each a slice on an element boundary: a bucket of the
tensor's own size would make "two buckets" mean two embeddings. One of at least half the limit gets a bucket to itself,
because a bucket of one piece need not be packed: it is sent from where it lies.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec, WeightVersion

ALIGN = 64  #: bytes; a multiple of every element size and one cache line

ITEM_SIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
}
"""Bytes per element of the dtypes that may travel, by torch's name."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one tensor inside one bucket (the whole tensor unless it is longer than the limit)."""

    tensor: int  #: index in the specs
    tensor_offset: int  #: first byte within the flat tensor
    bucket_offset: int  #: first byte within the bucket; a multiple of ALIGN
    nbytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What crosses in one transfer: ``nbytes`` includes the padding between pieces."""

    index: int
    pieces: tuple[Piece, ...]
    nbytes: int


def tensor_nbytes(spec: TensorSpec) -> int:
    """Bytes of one tensor. Raises WeightSyncError for a dtype that cannot travel."""
    size = ITEM_SIZE.get(spec.dtype)
    if size is None:
        raise WeightSyncError(
            f"tensor {spec.name!r} has dtype {spec.dtype!r}, which weight sync cannot move; "
            f"known: {', '.join(ITEM_SIZE)}"
        )
    return math.prod(spec.shape) * size


def total_nbytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of all tensors, without padding."""
    return sum(tensor_nbytes(spec) for spec in specs)


def plan_buckets(specs: Sequence[TensorSpec], limit_bytes: int) -> tuple[Bucket, ...]:
    """Cut the tensors, in order, into buckets of at most ``limit_bytes`` (rounded down to a multiple of 64).

    Raises WeightSyncError for a limit below 64 bytes, an unknown dtype, and a name that comes twice.
    """
    if limit_bytes < ALIGN:
        raise WeightSyncError(f"weight_sync.bucket_bytes is {limit_bytes}; it must be at least {ALIGN}")
    _refuse_duplicates(specs)
    limit = limit_bytes // ALIGN * ALIGN
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0

    def close() -> None:
        nonlocal used
        if pieces:
            buckets.append(Bucket(len(buckets), tuple(pieces), used))
            pieces.clear()
            used = 0

    for i, spec in enumerate(specs):
        nbytes = tensor_nbytes(spec)
        start = _aligned(used)
        alone = nbytes >= limit // 2
        if alone or start + nbytes > limit:
            close()
            start = 0
        if nbytes <= limit:
            pieces.append(Piece(i, 0, start, nbytes))
            used = start + nbytes
            if alone:
                close()
            continue
        for offset in range(0, nbytes, limit):
            pieces.append(Piece(i, offset, 0, min(limit, nbytes - offset)))
            used = pieces[-1].nbytes
            close()
    close()
    return tuple(buckets)


def digest(specs: Sequence[TensorSpec]) -> str:
    """Fingerprint of names, shapes, dtypes and their order (32 hexadecimal digits), equal on both sides or no sync."""
    h = hashlib.blake2b(digest_size=16)
    for spec in specs:
        h.update(repr((spec.name, tuple(spec.shape), spec.dtype)).encode())
    return h.hexdigest()


def describe_difference(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec], limit: int = 5) -> str:
    """Say for people in what two lists of specs differ; empty when they do not."""
    mine = {s.name: s for s in ours}
    other = {s.name: s for s in theirs}
    lines = [f"{name}: only the sender has it" for name in other if name not in mine]
    lines += [f"{name}: only the receiver has it" for name in mine if name not in other]
    for name, a in mine.items():
        b = other.get(name)
        if b is not None and (tuple(a.shape), a.dtype) != (tuple(b.shape), b.dtype):
            lines.append(f"{name}: sender {b.dtype}{list(b.shape)}, receiver {a.dtype}{list(a.shape)}")
    if not lines:
        lines = [
            f"position {i}: sender {b.name}, receiver {a.name} (same tensors, another order)"
            for i, (a, b) in enumerate(zip(ours, theirs, strict=False))
            if a.name != b.name
        ]
    more = f"; and {len(lines) - limit} more" if len(lines) > limit else ""
    return "; ".join(lines[:limit]) + more


def make_offer(specs: Sequence[TensorSpec], version: WeightVersion, bucket_bytes: int, verify: bool) -> bytes:
    """What the sender says before the first bucket, so that a receiver can refuse with the difference (JSON)."""
    offer = {
        "digest": digest(specs),
        "version": str(version),
        "bucket_bytes": bucket_bytes,
        "verify": verify,
        "specs": [[s.name, list(s.shape), s.dtype] for s in specs],
    }
    return json.dumps(offer).encode()


def check_offer(raw: bytes, specs: Sequence[TensorSpec], version: WeightVersion, bucket_bytes: int) -> bool:
    """Compare the sender's offer with what this side expects; returns whether checksums are on.

    Raises WeightSyncError saying what differs: the version, the bucket size, or which tensors.
    """
    offer = json.loads(raw)
    if offer["version"] != str(version):
        raise WeightSyncError(f"the sender offers version {offer['version']}, this receiver expects {version}")
    if offer["bucket_bytes"] != bucket_bytes:
        raise WeightSyncError(f"the sender cuts buckets of {offer['bucket_bytes']} bytes, this receiver {bucket_bytes}")
    if offer["digest"] != digest(specs):
        theirs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in offer["specs"]]
        raise WeightSyncError(f"the weights of sender and receiver differ: {describe_difference(specs, theirs)}")
    return bool(offer["verify"])


def bucket_names(bucket: Bucket, specs: Sequence[TensorSpec], limit: int = 4) -> str:
    """The tensors of a bucket for a message, shortened."""
    names = [specs[p.tensor].name for p in bucket.pieces]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _aligned(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


def _refuse_duplicates(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise WeightSyncError(
                f"tensor {spec.name!r} is listed twice in the weight specs; tied weights must be sent once"
            )
        seen.add(spec.name)
