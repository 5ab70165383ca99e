"""Where tensors go while the trainer's device is lent: pinned host memory on CUDA, an unnamed file on CPU.

Owns the parked bytes. On CPU the file lies in the scratch folder and has no name: it needs no cleaning up, whatever
happens to the process. Parking really frees: storages shrink to nothing and come back with the same bits, so that every
alias of a parked tensor is valid again after ``restore``.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from hybridsched.errors import FaultError, InternalError


@dataclass(slots=True)
class _Parked:
    """One tensor: its bytes on the host (CUDA) or at the next place in the file (CPU)."""

    tensor: Tensor
    shape: torch.Size
    n_bytes: int
    host: Tensor | None


class ParkingLot:
    """Parks tensors and brings them all back. Contiguous tensors that own their whole storage only."""

    def __init__(self, device: torch.device, scratch: Path) -> None:
        self._device = device
        self._scratch = scratch
        self._lots: list[tuple[IO[bytes] | None, list[_Parked]]] = []
        self._taken: set[int] = set()

    @property
    def holds(self) -> bool:
        """Whether anything is parked."""
        return bool(self._lots)

    def is_parked(self, tensor: Tensor) -> bool:
        """Whether this very tensor is parked."""
        return id(tensor) in self._taken

    def park(self, tensors: Iterable[Tensor]) -> int:
        """Free the tensors' memory on the device; returns bytes freed. What is parked already or empty is skipped."""
        chosen = [t for t in tensors if not self.is_parked(t) and t.numel() and t.device.type == self._device.type]
        if not chosen:
            return 0
        for tensor in chosen:
            n_bytes = tensor.numel() * tensor.element_size()
            if tensor.untyped_storage().nbytes() != n_bytes or not tensor.is_contiguous():
                raise InternalError(
                    f"a tensor of shape {tuple(tensor.shape)} to offload does not own its whole storage"
                )
        lot: list[_Parked] = []
        file = None if self._device.type == "cuda" else self._write(chosen)
        for tensor in chosen:
            n_bytes = tensor.numel() * tensor.element_size()
            host = None
            if file is None:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host.copy_(tensor)
            lot.append(_Parked(tensor, tensor.shape, n_bytes, host))
            self._taken.add(id(tensor))
        for parked in lot:
            storage = parked.tensor.untyped_storage()
            if storage.resizable():
                storage.resize_(0)
            else:  # somebody looked at it through numpy, which pins the storage: give the tensor a new, empty one
                parked.tensor.data = torch.empty(0, dtype=parked.tensor.dtype, device=self._device)
        self._lots.append((file, lot))
        _return_to_system(self._device)
        return sum(parked.n_bytes for parked in lot)

    def restore(self) -> None:
        """Bring everything back, bit for bit. Nothing parked: does nothing."""
        while self._lots:
            file, lot = self._lots.pop()
            for parked in lot:
                tensor = parked.tensor
                if tensor.shape == parked.shape:
                    tensor.untyped_storage().resize_(parked.n_bytes)
                else:
                    tensor.data = torch.empty(parked.shape, dtype=tensor.dtype, device=self._device)
                if parked.host is not None:
                    tensor.detach().copy_(parked.host, non_blocking=True)
                elif file is not None:
                    _read_exactly(file, _bytes_of(tensor))
            if file is not None:
                file.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._taken.clear()

    def _write(self, tensors: Sequence[Tensor]) -> IO[bytes]:
        try:
            self._scratch.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self._scratch, buffering=0)  # noqa: SIM115  # lives until restore
            for tensor in tensors:
                view = _bytes_of(tensor)
                while view:
                    view = view[file.write(view) :]
            file.seek(0)
        except OSError as error:
            raise FaultError(
                f"offloading the trainer to {self._scratch} failed ({error.strerror}): nothing was freed; "
                "free space there or choose another scratch folder"
            ) from error
        return file


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, writable. Not through numpy: that would make its storage unresizable."""
    n_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * n_bytes).from_address(tensor.data_ptr())).cast("B")


def _read_exactly(file: IO[bytes], view: memoryview) -> None:
    while view:
        got = file.readinto(view)  # type: ignore[attr-defined]  # raw files have it
        if not got:
            raise FaultError("the offload file of the trainer is shorter than what was written: the disk lost data")
        view = view[got:]


def _return_to_system(device: torch.device) -> None:
    """Give freed memory back, so that another process can have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps freed heap memory otherwise
    if trim is not None:
        trim(0)


class WeightSnapshot:
    """A host copy of a model's parameters, which can take their place for a while."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [p.detach() for p in parameters]
        pin = bool(self._parameters) and self._parameters[0].device.type == "cuda"
        self.tensors: list[Tensor] = []
        for parameter in self._parameters:
            self.tensors.append(torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=pin))
        self.take()

    def take(self) -> None:
        """Copy the parameters as they are now."""
        for parameter, copy in zip(self._parameters, self.tensors, strict=True):
            copy.copy_(parameter)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters hold the snapshot; afterwards their own values again, bit for bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """One tensor at a time, so that no second copy of the model is needed."""
        for parameter, copy in zip(self._parameters, self.tensors, strict=True):
            theirs = parameter.cpu().clone() if parameter.device.type == "cpu" else parameter.cpu()
            parameter.copy_(copy)
            copy.copy_(theirs)
