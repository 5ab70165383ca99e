"""A worker without an engine, for tests of processes: HYBRIDSCHED_TEST_BUILD=echo_worker:build.

It does what the reason of a Flush says, and answers with a Rendezvous.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

from hybridsched.runtime import messages as m
from hybridsched.runtime.endpoint import Endpoint

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class EchoWorker:
    """Beats, and obeys."""

    def __init__(self, spec: Any, context: Any, endpoint: Endpoint, offload: Any) -> None:
        self.spec, self.context, self.endpoint, self.offload = spec, context, endpoint, offload
        self.beats = 0
        endpoint.on(m.Flush, self.obey)

    async def run(self) -> None:
        """Beat to the agent."""
        while True:
            await asyncio.sleep(0.02)
            self.beats += 1
            self.endpoint.tell(self.context.agent, m.Beat("idle", self.beats))

    async def drain(self, deadline_s: float) -> None:
        """The last words of an orderly end."""
        await asyncio.sleep(0.05)
        self.endpoint.tell(self.context.agent, m.Beat(f"drained within {deadline_s:g}", self.beats))

    async def obey(self, order: m.Flush, src: str) -> m.Rendezvous:
        """One order."""
        verb, _, rest = order.reason.partition(" ")
        return m.Rendezvous(json.dumps(await getattr(self, f"do_{verb}")(rest)))

    async def do_echo(self, rest: str) -> Any:
        return rest

    async def do_about(self, _rest: str) -> Any:
        return {
            "environ": dict(os.environ),
            "cores": sorted(os.sched_getaffinity(0)),
            "session": os.getsid(0) == os.getpid(),
            "worker": self.context.worker,
            "incarnation": self.context.incarnation,
            "heavy": sorted({"torch", "h5py", "pydantic"} & set(sys.modules)),
        }

    async def do_raise(self, rest: str) -> Any:
        raise ValueError(rest)

    async def do_exit(self, rest: str) -> Any:
        print("\n".join(f"line {i}" for i in range(100)), flush=True)
        os._exit(int(rest))

    async def do_burst(self, rest: str) -> Any:
        """Send, let it leave, and die."""
        for i in range(int(rest)):
            self.endpoint.tell("agent.0", m.Beat("burst", i))
        await asyncio.sleep(0.2)
        os._exit(3)

    async def do_child(self, _rest: str) -> Any:
        return subprocess.Popen(SLEEP).pid  # noqa: ASYNC220

    async def do_busy(self, rest: str) -> Any:
        """Beats while a thread was busy."""
        before = self.beats
        await self.offload(time.sleep, float(rest))
        return self.beats - before


class BrokenDrain(EchoWorker):
    """Cannot leave in order."""

    async def drain(self, deadline_s: float) -> None:
        raise OSError("the disk is gone")


def build(spec: Any, _config: str, context: Any, endpoint: Endpoint, _clock: Any, offload: Any) -> EchoWorker:
    """As workers.build.build_worker."""
    if spec.kind == "trainer":
        raise RuntimeError("this worker cannot be built")
    return (BrokenDrain if spec.kind == "hybrid" else EchoWorker)(spec, context, endpoint, offload)


def build_any(spec: Any, _config: str, context: Any, endpoint: Endpoint, _clock: Any, offload: Any) -> EchoWorker:
    """The same for every kind of worker."""
    return EchoWorker(spec, context, endpoint, offload)
