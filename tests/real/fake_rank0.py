"""A controller that only watches: HYBRIDSCHED_TEST_RANK0=fake_rank0:run. What it saw goes to RUN/saw.json.

FAKE_RANK0 says what it does once every worker is up: "end" (orderly), "wait" (for the stop request), "raise".
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from hybridsched.errors import WorkerDied
from hybridsched.runtime import messages as m
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.plan import CONTROLLER

LONG_S = 60.0


def memory() -> dict[str, int]:
    """Peak resident memory in kB of the agents, by rank."""
    attempt = Path(sys.argv[sys.argv.index("--run") + 1]) / "attempts" / sys.argv[sys.argv.index("--attempt") + 1]
    found = {}
    for path in sorted(attempt.glob("agent-*.json")):
        pid = json.loads(path.read_text())["process"].partition(":")[0]
        status = Path(f"/proc/{pid}/status").read_text()
        found[path.stem] = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return found


async def run(agent: Any, config: Any, plan: Any, context: Any, stop: Any, *, resume: bool) -> int:
    """As runtime.build.run_rank0."""
    agents: dict[int, list[str]] = {}
    workers: dict[str, str] = {}
    exits: list[dict[str, Any]] = []
    changed = asyncio.Event()

    def note(message: Any, src: str) -> None:
        if isinstance(message, m.AgentUp):
            agents[message.rank] = message.workers
        elif isinstance(message, m.WorkerUp):
            workers[message.worker] = message.incarnation
        elif isinstance(message, m.WorkerExited):
            exits.append({"worker": message.worker, "reason": message.reason, "restarting": message.restarting})
        changed.set()

    endpoint = Endpoint(CONTROLLER, agent.route)
    for kind in (m.AgentUp, m.AgentBeat, m.WorkerUp, m.WorkerExited):
        endpoint.on(kind, note)
    agent.attach_controller(endpoint.deliver)
    serving = asyncio.ensure_future(agent.run())
    answers = {}
    async with asyncio.timeout(LONG_S):
        while len(workers) < len(plan.workers):
            changed.clear()
            await changed.wait()
        for worker in plan.workers:
            order = m.Flush(f"echo hello {worker.worker}")
            answer = await endpoint.call(worker.worker, order, m.Rendezvous, deadline_s=LONG_S, what="test")
            answers[worker.worker] = json.loads(answer.address)
    saw = {"agents": agents, "workers": workers, "answers": answers, "memory_kb": memory(), "resume": resume}
    part = os.environ["FAKE_RANK0"]
    if part == "kill-worker":
        endpoint.tell("agent.1", m.KillWorker("standalone.0", "for the test"))
        async with asyncio.timeout(LONG_S):
            while not exits or workers["standalone.0"] == "a001.1":
                changed.clear()
                await changed.wait()
        saw["exits"], saw["workers"] = exits, workers
    (Path(context.run_folder) / "saw.json").write_text(json.dumps(saw))
    if part == "raise":
        raise WorkerDied("trainer.0: for the test")
    async with asyncio.timeout(LONG_S):
        while part == "wait" and not stop.kind:  # noqa: ASYNC110 - a signal handler sets it, and nothing else
            await asyncio.sleep(0.02)
    for rank in range(plan.world_size):
        endpoint.tell(f"agent.{rank}", m.Shutdown("end"))
    await serving
    code = {"": 0, "stop": 130, "requeue": 75}[stop.kind]
    (Path(context.attempt_folder) / "result.json").write_text(json.dumps({"exit_code": code, "ok": code == 0}))
    return code
