"""Envelopes between node agents over MPI: implements `supervision.Transport` on MPI_COMM_WORLD.

Owns: MPI in this process (initialisation, requests, the end). One thread only: the event loop's.

Invariants
    No MPI call blocks: messages are sent with Isend, found with Improbe and received with Irecv, and all requests are
    only tested. Between two looks the process sleeps in the event loop, so signal handlers run. Where all ranks are on
    one host, and share its cores with the workers, a doorbell wakes the receiver, and an idle agent looks so seldom
    that it costs under 1 % of a core; without one it looks more often (about 3 % of a core of its node).
    Order per pair of ranks is kept: one communicator, one tag, and per sender messages are delivered in the order they
    were found.
    A rank that died is not noticed here (what MPI makes of it differs between libraries): sends to it stay pending up
    to ``MAX_UNSENT`` bytes, then `run` raises. The agents' own silence deadline ends the step long before.

The end: MPI_Finalize waits for every rank and hangs when one is dead or messages are left unreceived. So `leave` first
exchanges an empty last message with every other rank (order per pair: after it nothing more comes from there), within
a deadline; only when all have come may `finalize` be called. A rank that finalized has to leave through ``sys.exit``
(MPICH tells its process manager in an exit handler; after ``os._exit`` that one takes the rank for crashed and kills
the others), under the C-level timer that `finalize` started. Otherwise the process ends without MPI_Finalize, through
``os._exit``.

Does not: decode for the sake of relaying, retry, or decide who is dead.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpi4py

from hybridsched.errors import DeadlineExceeded, FaultError, InternalError
from hybridsched.runtime.adapters.doorbell import Doorbell
from hybridsched.runtime.messages import Envelope
from hybridsched.runtime.wire import decode, encode

mpi4py.rc.initialize = False  # importing must not join an MPI job; `open` does, and says so
mpi4py.rc.finalize = False  # at exit MPI_Finalize could hang; see above

MAX_UNSENT = 1 << 30  #: bytes waiting for ranks that do not receive
MAX_FRAME = (1 << 31) - 1  #: an MPI count

_TAG = 1
_SHORTEST_S, _LONGEST_S = 0.0002, 0.005  # between two looks; doubles while nothing happens
_LONGEST_WITH_BELL_S = 0.025
_EXIT_S = 30.0  # from MPI_Finalize to the end of the process


class MpiTransport:
    """This rank's end. Made by `open`."""

    def __init__(self, comm: Any, bell: Doorbell | None = None) -> None:
        """comm: mpi4py intracommunicator, used by nobody else. bell: where all ranks are on one host."""
        self._comm = comm
        self.bell = bell
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._status = _mpi().Status()
        self._sends: deque[tuple[Any, bytes]] = deque()  # (request, its buffer: MPI reads it until the request is done)
        self._unsent = 0
        self._arriving: dict[int, deque[tuple[Any, bytearray]]] = {}  # per sender, in order of finding
        self._left: dict[int, None] = {}  # ranks whose last message came
        self._look: asyncio.Future[None] | None = None
        self._pause_s = _SHORTEST_S

    # --- supervision.Transport ------------------------------------------------------------------------------------

    def send(self, rank: int, envelope: Envelope) -> None:
        """Queue an envelope for an agent. Raises InternalError for one that no MPI message can hold."""
        frame = encode(envelope)
        if len(frame) > MAX_FRAME:
            raise InternalError(f"a message of {len(frame)} bytes from {envelope.src} to {envelope.dst} is too long")
        self._post(rank, frame)

    async def run(self, deliver: Callable[[Envelope], None]) -> None:
        """Deliver arriving envelopes until cancelled. Raises FaultError when too much waits to be sent."""
        if self.bell is not None:
            self.bell.answer(self._wake)
        while True:
            moved = self._progress(lambda frame: deliver(decode(frame)))
            if self._unsent > MAX_UNSENT:
                raise FaultError(
                    f"rank {self.rank}: {self._unsent} bytes wait for other ranks (at most {MAX_UNSENT}); one of them "
                    "is dead or hangs"
                )
            await self._pause(moved)

    async def flush(self, deadline_s: float) -> None:
        """Wait until everything sent has left this process. What arrives meanwhile waits for `run`.

        Raises DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while self._sends:
                    await self._pause(self._test_sends())
        except TimeoutError:
            raise DeadlineExceeded(
                f"rank {self.rank}: {len(self._sends)} messages to other ranks did not leave within {deadline_s:g} s"
            ) from None

    # --- the end --------------------------------------------------------------------------------------------------

    async def leave(self, deadline_s: float) -> bool:
        """Say goodbye to every rank and wait for theirs; what still arrives is dropped. `run` must have ended.

        False when a rank did not leave within the deadline; then `finalize` must not be called.
        """
        for rank in range(self.size):
            if rank != self.rank:
                self._post(rank, b"")
        try:
            async with asyncio.timeout(deadline_s):
                while self._sends or len(self._left) < self.size - 1:
                    await self._pause(self._progress(lambda _frame: None))
        except TimeoutError:
            return False
        return True

    @staticmethod
    def finalize() -> None:
        """MPI_Finalize; leave through sys.exit after it. What hangs on the way ends with exit code 1 and says where."""
        faulthandler.dump_traceback_later(_EXIT_S, exit=True)
        _mpi().Finalize()

    def abort(self, code: int) -> None:
        """End every rank of the world now. Does not return."""
        self._comm.Abort(code)

    # --- moving messages ------------------------------------------------------------------------------------------

    def _post(self, rank: int, frame: bytes) -> None:
        request = self._comm.Isend([frame, _mpi().BYTE], dest=rank, tag=_TAG)
        self._sends.append((request, frame))
        self._unsent += len(frame)
        if self.bell is not None:
            self.bell.ring(rank)
        self._wake()  # an answer may come soon

    def _wake(self) -> None:
        self._pause_s = _SHORTEST_S
        if self._look is not None and not self._look.done():
            self._look.set_result(None)

    def _progress(self, deliver: Callable[[bytes], None]) -> bool:
        """One look at everything; True when something moved."""
        moved = self._test_sends()
        while (message := self._comm.Improbe(tag=_TAG, status=self._status)) is not None:
            buffer = bytearray(self._status.Get_count(_mpi().BYTE))
            request = message.Irecv([buffer, _mpi().BYTE])
            self._arriving.setdefault(self._status.Get_source(), deque()).append((request, buffer))
        for source, queue in self._arriving.items():
            while queue and queue[0][0].Test():
                moved = True
                frame = bytes(queue.popleft()[1])
                if frame:
                    deliver(frame)
                else:
                    self._left[source] = None
        return moved

    def _test_sends(self) -> bool:
        before = len(self._sends)
        for _ in range(before):
            request, frame = self._sends.popleft()
            if request.Test():
                self._unsent -= len(frame)
            else:
                self._sends.append((request, frame))
        return len(self._sends) < before

    async def _pause(self, moved: bool) -> None:
        """Sleep until the next look: shortest after something moved, longer and longer while nothing does."""
        busy = self._sends or any(self._arriving.values())
        longest = _LONGEST_S if busy or self.bell is None else _LONGEST_WITH_BELL_S
        self._pause_s = _SHORTEST_S if moved else min(longest, 2 * self._pause_s)
        loop = asyncio.get_running_loop()
        look = self._look = loop.create_future()
        timer = loop.call_later(self._pause_s, lambda: None if look.done() else look.set_result(None))
        try:
            await look
        finally:
            timer.cancel()


def open_world(expected: int, *, bells: Path | None = None, rank: int | None = None) -> MpiTransport:
    """Join MPI_COMM_WORLD. Raises FaultError when it has not the ``expected`` number of ranks.

    bells: folder for the doorbells; only where all ranks are on one host. rank: which one of the plan this process is,
    where the launcher started them in another order (all ranks say it, or none does).
    """
    mpi = _mpi()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_FUNNELED)  # other threads exist, MPI is called from this one only
    size = mpi.COMM_WORLD.Get_size()
    if size != expected:
        raise FaultError(world_mismatch(size, expected, mpi.Get_library_version()))
    world = mpi.COMM_WORLD
    if rank is not None:  # a collective call; the launch loop's deadline for agents to come up bounds it
        world = world.Split(0, rank)
        if world.Get_rank() != rank:
            raise FaultError(f"two agents claim rank {min(rank, world.Get_rank())}: two of the step are on one node")
    bell = None if bells is None else Doorbell(bells, world.Get_rank())
    return MpiTransport(world, bell)


def world_mismatch(size: int, expected: int, library: str) -> str:
    """What is wrong when the world is of another size than planned."""
    found = f"MPI sees a world of {size} rank{'s' if size != 1 else ''}, the plan has {expected}"
    version = " ".join(library.split())[:80]
    if size != 1:
        return f"{found}; the step was started with another number of tasks (library: {version})"
    return (
        f"{found}: the launcher and the MPI library do not belong together, so that every rank is a silent world of "
        f"one (library: {version}; interpreter: {sys.executable}). Start the ranks with the mpiexec of the same "
        f"installation, {Path(sys.prefix) / 'bin' / 'mpiexec'}, or with the srun --mpi=... that this library speaks"
    )


def _mpi() -> Any:
    from mpi4py import MPI  # loads libmpi; not at import of this module, which must stay cheap

    return MPI
