"""From named tensors to bucket bytes and back. Owns packing, unpacking, checksums and the report of one sync.

Device-agnostic; used by the broadcast and by the same-node hand-over. Memory: the packer copies straight into the
bucket, or sends from where the tensor lies, and holds at most one source tensor itself; the unpacker holds nothing,
except a staging copy of one tensor longer than a bucket when the loader takes only complete tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec
from hybridsched.weight_sync.plan import ITEM_SIZE, Bucket, Piece, bucket_names, tensor_nbytes

Load = Callable[[dict[str, Any]], None]
"""Takes complete named tensors; they are views that die when it returns (unless fresh buffers were asked for)."""
LoadSlice = Callable[[str, int, Any], None]
"""Takes (name, first element, flat tensor): a part of a tensor longer than a bucket, in order."""
Into = Callable[[str], Any]
"""Where a named tensor may be received in place: a tensor of its shape and dtype, or None for "give it to load"."""
Progress = Callable[[int, int], None]
"""Called with (buckets done, buckets in all) after each bucket."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one side of one sync did. ``seconds`` by phase: handshake, pack, transfer, checksum, load, finish, total.

    ``transfer`` is the time this side waited for the wire; what is hidden behind other work does not count.
    """

    rank: int
    version: str
    wire_bytes: int
    buckets: int
    seconds: Mapping[str, float]
    checksums: tuple[int, ...] = field(repr=False, default=())  #: xxh3-64 per bucket; empty when switched off


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> dict[str, float]:
        """All phases and the time since the watch was made."""
        return {**self.seconds, "total": time.perf_counter() - self._start}


def checksum(buffer: Any) -> int:
    """xxh3-64 of a flat uint8 tensor (copied to the host first when it lives on a device)."""
    return xxhash.xxh3_64_intdigest(memoryview(buffer.cpu().numpy()))  # type: ignore[no-any-return]


def torch_dtype(name: str) -> Any:
    """torch's dtype object of a TensorSpec dtype name."""
    dtype = getattr(torch, name, None)
    if name not in ITEM_SIZE or dtype is None:
        raise WeightSyncError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


class Packer:
    """Writes the buckets of a plan, in order, from an iterator of (name, tensor) in the order of the specs."""

    def __init__(self, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Any]]) -> None:
        self._specs = specs
        self._source = iter(tensors)
        self._current: Any = None  # the tensor whose pieces are being sent

    def pack(self, bucket: Bucket, buffer: Any) -> None:
        """Fill ``buffer`` (flat uint8, bucket.nbytes long). Raises WeightSyncError when the source does not fit."""
        for piece in bucket.pieces:
            tensor = self._tensor(piece)
            spec = self._specs[piece.tensor]
            target = buffer[piece.bucket_offset : piece.bucket_offset + piece.nbytes].view(torch_dtype(spec.dtype))
            if piece.nbytes == tensor_nbytes(spec):
                target.view(spec.shape).copy_(tensor)
            else:
                first = piece.tensor_offset // ITEM_SIZE[spec.dtype]
                target.copy_(tensor.reshape(-1)[first : first + target.numel()])
            self._release(piece)

    def direct(self, bucket: Bucket, device: Any) -> Any:
        """The bucket as a view of the tensor's own memory (flat uint8), when it is one piece of a contiguous tensor on
        ``device``; else None, and `pack` must follow. The tensor must not change until the bucket is sent."""
        if len(bucket.pieces) != 1:
            return None
        piece = bucket.pieces[0]
        tensor = self._tensor(piece)
        view = _own_bytes(tensor, piece, device)
        if view is not None:
            self._release(piece)
        return view

    def _tensor(self, piece: Piece) -> Any:
        if self._current is None:
            self._current = self._take(piece.tensor, self._specs[piece.tensor])
        return self._current

    def _release(self, piece: Piece) -> None:
        if piece.tensor_offset + piece.nbytes == tensor_nbytes(self._specs[piece.tensor]):
            self._current = None
            if piece.tensor == len(self._specs) - 1:
                self._finish()

    def _finish(self) -> None:
        """The source is read to its end (it may be a collective gather); anything left over is an error."""
        extra = next(self._source, None)
        if extra is not None:
            raise WeightSyncError(f"the weight source yields {extra[0]!r} after the last of {len(self._specs)} tensors")

    def _take(self, index: int, spec: TensorSpec) -> Any:
        item = next(self._source, None)
        if item is None:
            raise WeightSyncError(
                f"the weight source ended before tensor {index} ({spec.name!r}) of {len(self._specs)}"
            )
        name, tensor = item
        found = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != TensorSpec(spec.name, tuple(spec.shape), spec.dtype):
            raise WeightSyncError(f"tensor {index} of the weight source is {found}, the specs say {spec}")
        return tensor.detach()


def destination(bucket: Bucket, specs: Sequence[TensorSpec], into: Into, device: Any) -> Any:
    """Where a bucket of one piece can be received without a copy (flat uint8), None where it cannot.

    Raises WeightSyncError when ``into`` names a tensor of another shape or dtype.
    """
    if len(bucket.pieces) != 1:
        return None
    piece = bucket.pieces[0]
    spec = specs[piece.tensor]
    tensor = into(spec.name)
    if tensor is None:
        return None
    found = TensorSpec(spec.name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if found != TensorSpec(spec.name, tuple(spec.shape), spec.dtype):
        raise WeightSyncError(f"the place for a tensor is {found}, the specs say {spec}")
    return _own_bytes(tensor.detach(), piece, device)


def _own_bytes(tensor: Any, piece: Piece, device: Any) -> Any:
    """The piece as a view of the tensor's own memory; None when it is not contiguous or lies on another device."""
    here = torch.device(device)
    if not tensor.is_contiguous() or tensor.device.type != here.type:
        return None
    if here.index is not None and tensor.device.index != here.index:
        return None
    return tensor.view(-1).view(torch.uint8)[piece.tensor_offset : piece.tensor_offset + piece.nbytes]


class Unpacker:
    """Hands the tensors of received buckets to a loader."""

    def __init__(
        self, specs: Sequence[TensorSpec], load: Load, load_slice: LoadSlice | None, *, fresh: bool = False
    ) -> None:
        self._specs = specs
        self._load = load
        self._load_slice = load_slice
        self._fresh = fresh
        self._staging: Any = None

    def unpack(self, bucket: Bucket, buffer: Any) -> None:
        """Load one bucket. An exception of the loader is re-raised as WeightSyncError naming bucket and tensors."""
        try:
            ready: dict[str, Any] = {}
            for piece in bucket.pieces:
                self._take(piece, buffer[piece.bucket_offset : piece.bucket_offset + piece.nbytes], ready)
            if ready:
                self._load(ready)
        except Exception as error:
            names = bucket_names(bucket, self._specs)
            raise WeightSyncError(
                f"loading bucket {bucket.index} ({names}) failed: {type(error).__name__}: {error}"
            ) from error

    def _take(self, piece: Piece, data: Any, ready: dict[str, Any]) -> None:
        spec = self._specs[piece.tensor]
        dtype = torch_dtype(spec.dtype)
        nbytes = tensor_nbytes(spec)
        if piece.nbytes == nbytes:
            ready[spec.name] = (data.clone() if self._fresh else data).view(dtype).view(spec.shape)
            return
        if self._load_slice is not None:
            self._load_slice(spec.name, piece.tensor_offset // ITEM_SIZE[spec.dtype], data.view(dtype))
            return
        if piece.tensor_offset == 0:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=data.device)
        self._staging[piece.tensor_offset : piece.tensor_offset + piece.nbytes].copy_(data)
        if piece.tensor_offset + piece.nbytes == nbytes:
            ready[spec.name] = self._staging.view(dtype).view(spec.shape)
            self._staging = None
