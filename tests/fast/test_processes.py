"""Workers as real processes: started clean, watched, and reported with the reason they ended for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hybridsched.errors import DeadlineExceeded, FaultError, WorkerDied
from hybridsched.runtime import messages as m
from hybridsched.runtime.adapters.channel import Hello, connect
from hybridsched.runtime.adapters.lifeline import (
    carriers,
    open_tag,
    private_folder,
    start_ticks,
    sweep,
    tag_of,
    without_launcher,
)
from hybridsched.runtime.adapters.processes import ProcessHandle, ProcessSpawner, visible_gpus
from hybridsched.runtime.context import RunContext
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.plan import WorkerSpec

HERE = Path(__file__).parent
STANDALONE = WorkerSpec("standalone.0", "standalone", 0, 0, (0,), (min(os.sched_getaffinity(0)),))
HYBRID = WorkerSpec("hybrid.0", "hybrid", 0, 0, (0,))
TRAINER = WorkerSpec("trainer.0", "trainer", 0, 0, (0,))
LONG_S = 60.0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LONG_S):
            await test

    asyncio.run(bounded())


class Agent:
    """The agent's side of one worker."""

    def __init__(self, spawner: ProcessSpawner) -> None:
        self.spawner = spawner
        self.handle: ProcessHandle
        self.endpoint = Endpoint("agent.0", lambda envelope: self.handle.send(envelope))
        self.beats: list[m.Beat] = []
        self.endpoint.on(m.Beat, lambda beat, _src: self.beats.append(beat))

    async def start(self, spec: WorkerSpec, incarnation: str = "a001.1", deadline_s: float = LONG_S) -> None:
        self.handle = await self.spawner.spawn(spec, incarnation, self.endpoint.deliver, deadline_s)

    async def order(self, text: str) -> Any:
        worker = self.handle.spec.worker
        answer = await self.endpoint.call(worker, m.Flush(text), m.Rendezvous, deadline_s=LONG_S, what="test")
        return json.loads(answer.address)

    def tell(self, message: m.Message) -> None:
        self.endpoint.tell(self.handle.spec.worker, message)


def make_spawner(folder: Path, sockets: Path, **variables: str) -> ProcessSpawner:
    context = RunContext("run-1", str(folder), 1, str(folder), "s3cret", "agent.0")
    path = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "HYBRIDSCHED_TEST_BUILD": "echo_worker:build", **variables}
    return ProcessSpawner(context, folder / "resolved.yaml", sockets, threads=1, environment=environment)


@asynccontextmanager
async def agent(folder: Path, **variables: str) -> AsyncIterator[Agent]:
    with private_folder() as sockets:
        spawner = make_spawner(folder, sockets, **variables)
        try:
            yield Agent(spawner)
        finally:
            await spawner.close()


def gone(pid: int) -> bool:
    """Waits, generously, for a process to end."""
    end = time.monotonic() + LONG_S
    while start_ticks(pid) is not None:
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# ------------------------------------------------------------------ a worker's life


def test_a_worker_answers_and_leaves_in_order_when_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            assert await a.order("echo hello") == "hello"
            a.tell(m.Shutdown("end"))
            end = await a.handle.wait()

            assert (True, "ended by itself (exit code 0)") == (end.clean, end.reason)
            assert "drained within 5" == a.beats[-1].phase

    run(test())


def test_sigterm_is_an_orderly_end_too(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            await a.order("echo hello")
            os.kill(a.handle.pid, signal.SIGTERM)

            assert (await a.handle.wait()).clean
            assert "drained within 5" == a.beats[-1].phase

    run(test())


def test_a_worker_starts_clean_bound_and_with_its_own_session(tmp_path: Path) -> None:
    async def test() -> None:
        left_by_launchers = {"PMI_RANK": "0", "SLURM_JOB_ID": "7", "OMPI_X": "1", "MPIR_CVAR_X": "1", "I_MPI_X": "1"}
        async with agent(tmp_path, **left_by_launchers) as a:
            await a.start(STANDALONE, "a001.7")
            about = await a.order("about")
            environ = about["environ"]

            assert [] == [name for name in environ if name in left_by_launchers]
            assert ("run-1", "1", "1") == tuple(
                environ[name] for name in ("HYBRIDSCHED_RUN_ID", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
            )
            assert "HYBRIDSCHED_SECRET" not in environ
            assert list(STANDALONE.cores) == about["cores"]
            assert about["session"] is True
            assert ("standalone.0", "a001.7") == (about["worker"], about["incarnation"])
            assert [] == about["heavy"]  # nobody pays for what this worker does not need

    run(test())


def test_the_worker_beats_while_a_thread_works(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)

            assert await a.order("busy 1.0") >= 3

    run(test())


# ------------------------------------------------------------------ how it ends


def test_a_killed_worker_is_reported_with_its_signal_and_the_end_of_its_log(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            await a.order("echo alive")
            os.kill(a.handle.pid, signal.SIGSEGV)
            end = await a.handle.wait()

            assert not end.clean
            assert end.reason.startswith("killed by SIGSEGV; end of its log ")
            assert "workers/process.py" in end.reason  # where every thread was

    run(test())


def test_a_kill_by_the_agent_keeps_its_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            a.handle.kill("no progress in phase 'decode'")
            a.handle.kill("a later reason")
            end = await a.handle.wait()

            assert end.reason.startswith("killed by its agent: no progress in phase 'decode'; its log ")
            assert end.reason.endswith("standalone.0-a001.1.log is empty")

    run(test())


def test_exit_code_and_the_last_twenty_lines_are_the_reason(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            a.tell(m.Flush("exit 5"))
            head, *lines = (await a.handle.wait()).reason.splitlines()

            assert head.startswith("exit code 5; end of its log ")
            assert [f"    line {i}" for i in range(80, 100)] == lines

    run(test())


def test_everything_a_worker_sent_is_delivered_before_its_end_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            a.tell(m.Flush("burst 5000"))
            await a.handle.wait()

            assert list(range(5000)) == [beat.progress for beat in a.beats if beat.phase == "burst"]

    run(test())


def test_an_error_that_nobody_waits_for_ends_the_worker_with_a_traceback(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            a.tell(m.Flush("raise out of paper"))
            reason = (await a.handle.wait()).reason

            assert reason.startswith("exit code 1")
            assert "ValueError: out of paper" in reason
            assert "while: standalone.0 handling Flush from agent.0" in reason

    run(test())


def test_an_orderly_end_that_fails_is_not_a_clean_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(HYBRID)
            a.tell(m.Shutdown("end"))
            end = await a.handle.wait()

            assert not end.clean
            assert "OSError: the disk is gone" in end.reason

    run(test())


def test_what_a_worker_started_dies_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            child = await a.order("child")
            os.kill(a.handle.pid, signal.SIGKILL)
            end = await a.handle.wait()

            assert end.reason.startswith("killed by SIGKILL (by somebody else; or the machine is out of memory")
            assert gone(child)

    run(test())


def test_a_worker_that_cannot_be_built_is_reported_after_it_connected(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(TRAINER)

            assert "RuntimeError: this worker cannot be built" in (await a.handle.wait()).reason

    run(test())


def test_a_worker_that_dies_before_it_connects_is_reported_with_its_log(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path, PYTHONPATH="", PYTHONHOME="/nowhere") as a:
            with pytest.raises(WorkerDied, match=r"standalone\.0 ended before it connected: exit code 1"):
                await a.start(STANDALONE)

    run(test())


def test_a_worker_that_does_not_connect_in_time_is_killed(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            with pytest.raises(DeadlineExceeded, match=r"standalone\.0 \(pid \d+\) did not connect within 0\.001 s"):
                await a.start(STANDALONE, deadline_s=0.001)

            assert {} == a.spawner._running

    run(test())


def test_workers_die_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from pathlib import Path\n"
        "from test_processes import STANDALONE, Agent, make_spawner, private_folder\n"
        "async def main():\n"
        "    with private_folder() as sockets:\n"
        f"        a = Agent(make_spawner(Path({str(tmp_path)!r}), sockets))\n"
        "        await a.start(STANDALONE)\n"
        "        print(a.handle.pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        assert start_ticks(worker) is not None
        process.kill()
        process.wait(LONG_S)
        assert gone(worker)
    finally:
        process.kill()
        process.stdout.close()


# ------------------------------------------------------------------ who may connect


def test_a_wrong_secret_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            hello = Hello("guessed", "standalone.0", "a001.1", a.handle.pid)
            with pytest.raises(FaultError, match="has not the secret of this attempt"):
                await connect(a.spawner._socket, hello, LONG_S)
            assert await a.order("echo undisturbed") == "undisturbed"

    run(test())


def test_somebody_the_agent_did_not_start_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            with pytest.raises(FaultError, match="was not started by this agent"):
                await connect(a.spawner._socket, Hello("s3cret", "standalone.0", "a001.1", os.getpid()), LONG_S)

    run(test())


def test_a_second_connection_of_a_worker_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with agent(tmp_path) as a:
            await a.start(STANDALONE)
            with pytest.raises(FaultError, match="is connected already"):
                await connect(a.spawner._socket, Hello("s3cret", "standalone.0", "a001.1", a.handle.pid), LONG_S)

    run(test())


def test_a_socket_path_that_is_too_long_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match="set a shorter TMPDIR"):
        make_spawner(tmp_path, Path("/tmp") / ("x" * 100))


# ------------------------------------------------------------------ small parts


@pytest.mark.parametrize(
    ("offered", "gpus", "expected"), [(None, (2, 3), "2,3"), ("4,5", (1,), "5"), ("GPU-a,GPU-b", (0, 1), "GPU-a,GPU-b")]
)
def test_a_worker_sees_its_gpus_among_those_of_its_node(
    offered: str | None, gpus: tuple[int, ...], expected: str
) -> None:
    assert expected == visible_gpus(WorkerSpec("trainer.0", "trainer", 0, 0, gpus), offered)


def test_a_node_with_fewer_gpus_than_planned_is_refused() -> None:
    with pytest.raises(FaultError, match=r"trainer\.0 is planned on GPUs \[1\].*CUDA_VISIBLE_DEVICES='0'"):
        visible_gpus(WorkerSpec("trainer.0", "trainer", 0, 0, (1,)), "0")


def test_the_environment_is_cleaned_of_launchers_only() -> None:
    kept = {"PATH": "/bin", "MPLBACKEND": "Agg", "HYBRIDSCHED_RUN_ID": "r"}

    assert kept == without_launcher({**kept, "PMIX_RANK": "1", "SLURM_PROCID": "0", "HYDRA_X": "1", "MPICH_X": "1"})


def test_a_tag_names_one_process_only() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    tag = tag_of(process.pid)
    pid, _, ticks = tag.partition(":")
    fd = open_tag(tag)
    try:
        assert fd is not None
        assert open_tag(f"{pid}:{int(ticks) + 1}") is None  # somebody else with the same number
    finally:
        process.kill()
        process.wait(LONG_S)
        if fd is not None:
            os.close(fd)

    assert open_tag(tag) is None


def test_a_sweep_takes_what_carries_every_mark_and_nothing_else() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    marks = {"HYBRIDSCHED_RUN_ID": f"sweep-{os.getpid()}", "HYBRIDSCHED_LAUNCH": "mine"}
    ours = subprocess.Popen(sleep, env={**os.environ, **marks})
    other = subprocess.Popen(sleep, env={**os.environ, **marks, "HYBRIDSCHED_LAUNCH": "another"})
    try:
        while ours.pid not in carriers(marks):  # between fork and exec it still has our environment
            time.sleep(0.01)

        assert (1, []) == sweep(marks, LONG_S)
        assert -signal.SIGKILL == ours.wait(LONG_S)
        assert other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait(LONG_S)


def test_a_sweep_without_a_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="every process"):
        carriers({})


def test_folders_of_dead_processes_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stale, alive = tmp_path / "hs-4194999.1-x", tmp_path / f"hs-{os.getppid()}.{start_ticks(os.getppid())}-x"
    stale.mkdir()
    alive.mkdir()
    with private_folder() as folder:
        assert 0o700 == folder.stat().st_mode & 0o777
        assert {folder.name, alive.name} == {path.name for path in tmp_path.iterdir()}

    assert [alive] == list(tmp_path.iterdir())
