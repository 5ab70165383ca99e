"""The data-parallel group of the torch trainer: the few collectives it uses, bounded in time, with readable failures.

Owns the rendezvous store and the process group. A group of one owns neither and its collectives are identities, so a
single trainer needs no network. Every collective ends within the group's timeout; a failure is a FaultError that says
which rank waited for what. Not thread-safe: one caller at a time, the same order of calls on every rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from hybridsched.errors import FaultError, InternalError
from hybridsched.trainers.base import TrainerGroup

BUCKET_BYTES = 32 << 20  #: gradients travel in flat buckets of about this size


class Rendezvous:
    """The store of rank 0, on a port the system chose. Keep it until the group has ended."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self.address = f"{host}:{self.store.port}"


def reachable_host(nnodes: int) -> str:
    """The name other ranks find this machine under: loopback when there is only one trainer node."""
    return "127.0.0.1" if nnodes == 1 else socket.gethostname()


class Collectives:
    """What the ranks of one trainer group do together."""

    def __init__(self, group: TrainerGroup, device: torch.device) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self._timeout_s = group.timeout_s
        self._device = device
        self._joined = False

    @property
    def backend(self) -> str:
        """torch's name of the transport."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    def join(self, group: TrainerGroup, rendezvous: Rendezvous | None, interface: str | None) -> None:
        """Meet the other ranks. ``interface``: network interface for gloo, None for the system's choice."""
        if self.world_size == 1:
            return
        if dist.is_initialized():
            raise InternalError("this process is already in a trainer group; shut that trainer down first")
        timeout = timedelta(seconds=group.timeout_s)
        with self._explained(f"joining at {group.rendezvous}"), gloo_interface(interface):
            if rendezvous is not None:
                store = rendezvous.store
            else:
                host, _, port = group.rendezvous.rpartition(":")
                store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore("trainer", store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
            )
        self._joined = True

    def leave(self) -> None:
        """End the group. Idempotent."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, in flat buckets; equal bits on every rank."""
        if self.world_size == 1:
            return
        with self._explained("summing gradients"):
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                offset = 0
                for tensor in bucket:
                    tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
                    offset += tensor.numel()

    def sum_array(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Element-wise sum over ranks."""
        return self._reduced(values, lambda tensor: dist.all_reduce(tensor))

    def max_array(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Element-wise maximum over ranks."""
        return self._reduced(values, lambda tensor: dist.all_reduce(tensor, op=dist.ReduceOp.MAX))

    def barrier(self, what: str) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            with self._explained(what):
                dist.all_reduce(torch.zeros(1, device=self._device))

    def agree(self, problem: str | None) -> None:
        """Raise FaultError on every rank when any rank has a problem, so that none waits for one that gave up."""
        problems = [problem] if problem else []
        if self.world_size > 1 and self.max_array(np.array([float(len(problems))]))[0] > 0:
            gathered: list[str | None] = [None] * self.world_size
            with self._explained("gathering problems"):
                dist.all_gather_object(gathered, problem)
            problems = [f"trainer rank {rank}: {text}" for rank, text in enumerate(gathered) if text]
        if problems:
            raise FaultError("; ".join(problems))

    def _reduced(
        self, values: npt.NDArray[np.float64], operation: Callable[[Tensor], object]
    ) -> npt.NDArray[np.float64]:
        if self.world_size == 1:
            return values
        with self._explained("reducing metrics"):
            tensor = torch.from_numpy(np.array(values, dtype=np.float64)).to(self._device)
            operation(tensor)
            result: npt.NDArray[np.float64] = tensor.cpu().numpy()
            return result

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn a failing collective into a FaultError that names rank, work and bound."""
        try:
            yield
        except RuntimeError as error:
            raise FaultError(
                f"trainer rank {self.rank} of {self.world_size}: {what} failed or took longer than "
                f"{self._timeout_s:g} s (another trainer process probably died): {error}"
            ) from error


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbouring tensors of one dtype up to BUCKET_BYTES together."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        n_bytes = tensor.numel() * tensor.element_size()
        if bucket and (size + n_bytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += n_bytes
    if bucket:
        yield bucket


@contextmanager
def gloo_interface(interface: str | None) -> Iterator[None]:
    """gloo reads its interface from the environment when the group is made; other groups must not inherit ours."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    if interface is None or before is not None:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]
