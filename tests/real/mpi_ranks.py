"""What the ranks of tests/real/test_mpi_transport.py do: python mpi_ranks.py SCENARIO EXPECTED_SIZE [BELLS].

Rank 0 prints one JSON line. A scenario that goes wrong ends with a traceback and a non-zero exit code.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from hybridsched.errors import FaultError
from hybridsched.runtime import messages as m
from hybridsched.runtime.transport.mpi import MpiTransport, open_world

LONG_S = 60.0


class Rank:
    """A transport with an inbox."""

    def __init__(self, transport: MpiTransport) -> None:
        self.t = transport
        self.inbox: asyncio.Queue[m.Envelope] = asyncio.Queue()
        self.carrier = asyncio.ensure_future(transport.run(self.inbox.put_nowait))

    def send(self, rank: int, body: m.Message) -> None:
        self.t.send(rank, m.Envelope(f"agent.{self.t.rank}", f"agent.{rank}", 0, False, body))

    async def receive(self) -> Any:
        async with asyncio.timeout(LONG_S):
            return (await self.inbox.get()).body


async def ring(r: Rank) -> Any:
    """A token goes round; everybody adds its rank."""
    following = (r.t.rank + 1) % r.t.size
    if r.t.rank == 0:
        r.send(following, m.Flush("0"))
        return (await r.receive()).reason
    r.send(following, m.Flush(f"{(await r.receive()).reason} {r.t.rank}"))
    return None


async def order(r: Rank) -> Any:
    """1000 messages from everybody to rank 0, small ones between big ones."""
    count = 1000
    if r.t.rank != 0:
        for i in range(count):
            r.send(0, m.Flush(f"{r.t.rank} {i} " + "x" * (200_000 if i % 100 == 0 else i)))
        return None
    seen: dict[str, list[int]] = {}
    for _ in range(count * (r.t.size - 1)):
        rank, number, _ = (await r.receive()).reason.split(" ")
        seen.setdefault(rank, []).append(int(number))
    return {rank: numbers == list(range(count)) for rank, numbers in sorted(seen.items())}


async def big(r: Rank) -> Any:
    """64 MB both ways at once, unchanged."""
    other = 1 - r.t.rank
    if r.t.rank > 1:
        return None
    payload = np.arange(16 << 20, dtype=np.int32) + r.t.rank
    r.send(other, m.ProbeResult([payload]))
    await r.t.flush(LONG_S)
    got = (await r.receive()).logprobs[0]
    return bool((got == np.arange(16 << 20, dtype=np.int32) + other).all())


async def signals(r: Rank) -> Any:
    """A handler runs while all ranks only wait, which costs next to nothing."""
    got: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _frame: got.append(number))
    loop = asyncio.get_running_loop()
    loop.call_later(0.5, os.kill, os.getpid(), signal.SIGUSR2)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    await asyncio.sleep(3.0)
    after, spent = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"handled": got == [signal.SIGUSR2], "cpu_share": cpu / spent}


async def latency(r: Rank) -> Any:
    """Median seconds until a rank that has been idle answers."""
    other = 1 - r.t.rank
    times = []
    for _ in range(21):
        if r.t.rank == 0:
            await asyncio.sleep(0.1)
            start = time.monotonic()
            r.send(other, m.Flush("ping"))
            await r.receive()
            times.append(time.monotonic() - start)
        else:
            await r.receive()
            r.send(other, m.Flush("pong"))
    return sorted(times)[10] if times else None


async def dead(r: Rank) -> Any:
    """The last rank never says goodbye: the others find out within the deadline and do not finalize."""
    if r.t.rank == r.t.size - 1:
        await asyncio.sleep(LONG_S)  # killed by mpiexec when the others are through
    return None


SCENARIOS = {"ring": ring, "order": order, "big": big, "signals": signals, "latency": latency, "dead": dead}


def say(line: dict[str, Any]) -> None:
    """One write, so that lines of several ranks do not mix."""
    os.write(1, json.dumps(line).encode() + b"\n")


async def main(name: str, transport: MpiTransport) -> bool:
    """True when everybody left."""
    rank = Rank(transport)
    result = await SCENARIOS[name](rank)
    rank.carrier.cancel()
    await asyncio.gather(rank.carrier, return_exceptions=True)
    left = await transport.leave(1.0 if name == "dead" else LONG_S)
    if transport.rank == 0:
        say({"result": result, "left": left})
    return left


if __name__ == "__main__":
    try:
        world = open_world(int(sys.argv[2]), bells=Path(sys.argv[3]) if len(sys.argv) > 3 else None)
    except FaultError as error:
        say({"error": str(error)})
        os._exit(4)
    if asyncio.run(main(sys.argv[1], world)):
        world.finalize()
        sys.exit(0)
    os._exit(0)
