"""Reward processes: every way a user's function can misbehave costs one response, never the run."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models

from hybridsched.config.schema import RunConfig
from hybridsched.errors import DataError, InternalError
from hybridsched.runtime import messages as m
from hybridsched.runtime.adapters.reward_pool import ProcessRewardPool

HANGS_S = 60.0  # a bound that only a hang reaches
T = TypeVar("T")

# What the response says decides what the function does.
FUNCTION = """
import os, signal, subprocess, sys, time

def reward(data_source, solution_str, ground_truth, extra_info, unit=1.0):
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "child":
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
        time.sleep(600)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "raise":
        raise KeyError("no such\\ngrade")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "text":
        return "very good"
    if solution_str == "print":
        print("x" * 100_000)
    if solution_str == "torch":
        return float("torch" in sys.modules)
    if solution_str == "pid":
        time.sleep(0.3)
        return os.getpid()
    if solution_str == "sum":
        return {"score": unit * (len(data_source) + ground_truth["value"] + sum(extra_info["more"]))}
    return unit * len(solution_str)
"""
WORDS = ("hang", "child", "exit", "crash", "raise", "nan", "text", "print", "torch", "pid", "sum", "fine", "a")


@dataclass
class Context:
    attempt_folder: Path


def word(text: str) -> np.ndarray[Any, Any]:
    return np.array([WORDS.index(text)], np.int32)


def make_pool(tmp_path: Path, function: str = FUNCTION, **reward: Any) -> ProcessRewardPool:
    (tmp_path / "model").mkdir(exist_ok=True)
    backend = Tokenizer(models.WordLevel({text: i for i, text in enumerate(WORDS)}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    source = tmp_path / "my_reward.py"
    source.write_text(textwrap.dedent(function))
    config = RunConfig.model_validate(
        {
            "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}},
            "reward": {"function": f"{source}:reward", "timeout_s": 30.0, **reward},
            "deadlines": {"start_s": 50.0},
        }
    )
    return ProcessRewardPool(config, Context(tmp_path), "agent.1")


def request(*words: str, **fields: Any) -> m.Envelope:
    body = m.RewardRequest("gsm8k", fields.get("ground_truth"), fields.get("extra_info", {}), [word(w) for w in words])
    return m.Envelope("standalone.0", "agent.1", 7, False, body)


async def scored(pool: ProcessRewardPool, *words: str, **fields: Any) -> list[tuple[float | None, str | None]]:
    answer = await pool.score(request(*words, **fields))
    assert isinstance(answer.body, m.RewardReply)
    return answer.body.rewards


def with_pool(
    tmp_path: Path, act: Callable[[ProcessRewardPool], Awaitable[T]], function: str = FUNCTION, **reward: Any
) -> T:
    """Run ``act`` on a pool; afterwards none of its processes may be left."""

    async def main() -> T:
        pool = make_pool(tmp_path, function, **reward)
        async with asyncio.timeout(HANGS_S):
            try:
                return await act(pool)
            finally:
                pids = list(pool.pids)
                await pool.close()
                assert [pid for pid in pids if alive(pid)] == []

    return asyncio.run(main())


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def log_of(tmp_path: Path) -> str:
    return "".join(path.read_text() for path in sorted((tmp_path / "logs").iterdir()))


def test_responses_are_decoded_and_scored_in_order(tmp_path: Path) -> None:
    async def act(pool: ProcessRewardPool) -> Any:
        await pool.check()
        return await pool.score(request("fine", "a"))

    answer = with_pool(tmp_path, act, kwargs={"unit": 0.5})
    assert answer == m.Envelope("agent.1", "standalone.0", 7, True, m.RewardReply([(2.0, None), (0.5, None)]))


def test_the_function_gets_data_source_truth_and_extra_info_also_as_numpy_values(tmp_path: Path) -> None:
    extra = {"more": np.array([1, 2])}
    truth = {"value": np.int64(10)}
    got = with_pool(tmp_path, lambda pool: scored(pool, "sum", ground_truth=truth, extra_info=extra))
    assert got == [(18.0, None)]


def test_a_reward_process_loads_no_torch(tmp_path: Path) -> None:
    assert with_pool(tmp_path, lambda pool: scored(pool, "torch")) == [(0.0, None)]


def test_an_exception_is_a_failure_in_one_line_with_the_traceback_in_the_log(tmp_path: Path) -> None:
    got = with_pool(tmp_path, lambda pool: scored(pool, "raise", "fine"))
    assert got == [(None, "the reward function raised KeyError: 'no such\\ngrade'"), (4.0, None)]
    assert "my_reward.py" in log_of(tmp_path)
    assert "raise KeyError" in log_of(tmp_path)


@pytest.mark.parametrize(("what", "why"), [("nan", "returned nan"), ("text", "returned str")])
def test_what_is_no_finite_number_is_a_failure(tmp_path: Path, what: str, why: str) -> None:
    ((reward, failure),) = with_pool(tmp_path, lambda pool: scored(pool, what))
    assert (reward, why in (failure or "")) == (None, True)


def test_output_of_the_function_goes_to_the_log_and_not_into_the_answers(tmp_path: Path) -> None:
    assert with_pool(tmp_path, lambda pool: scored(pool, "print", "fine")) == [(5.0, None), (4.0, None)]
    assert "x" * 100_000 in log_of(tmp_path)


def test_a_hang_costs_one_response_and_the_process_is_replaced(tmp_path: Path) -> None:
    async def act(pool: ProcessRewardPool) -> Any:
        await pool.check()
        (before,) = pool.pids
        got = await scored(pool, "hang", "fine")
        (after,) = pool.pids
        return got, alive(before), before != after

    got, still_there, replaced = with_pool(tmp_path, act, timeout_s=0.5)
    assert got == [(None, "timed out after 0.5 s (reward.timeout_s)"), (4.0, None)]
    assert (still_there, replaced) == (False, True)


@pytest.mark.parametrize(("how", "end"), [("exit", "exit code 3"), ("crash", "signal SIGSEGV")])
def test_a_crash_costs_only_the_response_being_scored(tmp_path: Path, how: str, end: str) -> None:
    got = with_pool(tmp_path, lambda pool: scored(pool, "fine", how, "fine"))
    assert got == [(4.0, None), (None, f"the reward process died: {end}"), (4.0, None)]


def test_what_the_function_started_is_killed_with_it(tmp_path: Path) -> None:
    async def act(pool: ProcessRewardPool) -> list[tuple[float | None, str | None]]:
        return await scored(pool, "child")

    with_pool(tmp_path, act, timeout_s=1.0)
    child = int(log_of(tmp_path).split()[0])
    deadline = time.monotonic() + 20  # it is killed; the kernel may take a moment on a busy machine
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_processes_score_side_by_side(tmp_path: Path) -> None:
    async def act(pool: ProcessRewardPool) -> Any:
        await pool.check()
        return await scored(pool, "pid", "pid"), set(pool.pids)

    rewards, pids = with_pool(tmp_path, act, workers=2)
    assert {int(reward or 0) for reward, _ in rewards} == pids
    assert len(pids) == 2


def test_many_requests_share_one_process_and_each_gets_its_own_answers(tmp_path: Path) -> None:
    async def act(pool: ProcessRewardPool) -> Any:
        return await asyncio.gather(*[scored(pool, "fine", "a") for _ in range(20)])

    assert with_pool(tmp_path, act) == [[(4.0, None), (1.0, None)]] * 20


def test_a_request_that_is_cancelled_does_not_shift_the_answers_of_the_next(tmp_path: Path) -> None:
    async def act(pool: ProcessRewardPool) -> Any:
        await pool.check()
        given_up = asyncio.ensure_future(scored(pool, "pid"))
        await asyncio.sleep(0.1)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        return await scored(pool, "fine")

    assert with_pool(tmp_path, act) == [(4.0, None)]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("import no_such_package", "no_such_package"),
        ("def other(): return 0", "has no 'reward'"),
        ("import os; os._exit(9)", "exit code 9"),
    ],
)
def test_a_function_that_cannot_be_imported_ends_the_run_at_its_start(tmp_path: Path, function: str, why: str) -> None:
    async def act(pool: ProcessRewardPool) -> Any:
        with pytest.raises(DataError, match=why):
            await pool.check()
        return list(pool.pids)

    assert with_pool(tmp_path, act, function, workers=2) == []


def test_a_process_that_cannot_start_fails_the_response_and_not_the_pool(tmp_path: Path) -> None:
    async def act(pool: ProcessRewardPool) -> Any:
        return await scored(pool, "fine")

    ((reward, failure),) = with_pool(tmp_path, act, "import no_such_package")
    assert (reward, "no_such_package" in (failure or "")) == (None, True)


def test_closing_fails_what_is_being_scored_and_refuses_more(tmp_path: Path) -> None:
    async def act(pool: ProcessRewardPool) -> Any:
        await pool.check()
        waiting = asyncio.ensure_future(scored(pool, "hang", "hang"))
        await asyncio.sleep(0.2)
        await pool.close()
        return await waiting, await scored(pool, "fine")

    waiting, late = with_pool(tmp_path, act)
    assert waiting == [(None, "the reward pool was closed"), (None, "the reward pool is closed")]
    assert late == [(None, "the reward pool is closed")]


def test_a_sample_that_cannot_be_sent_is_a_failure(tmp_path: Path) -> None:
    ((reward, failure),) = with_pool(tmp_path, lambda pool: scored(pool, "fine", ground_truth=object()))
    assert (reward, failure) == (
        None,
        "the sample cannot be sent to a reward process: a value of type object cannot be sent to a reward process",
    )


def test_anything_but_a_reward_request_is_refused(tmp_path: Path) -> None:
    async def act(pool: ProcessRewardPool) -> None:
        with pytest.raises(InternalError, match="handed a Ok"):
            await pool.score(m.Envelope("a", "b", 1, False, m.Ok()))

    with_pool(tmp_path, act)


def test_an_emulated_run_needs_no_process(tmp_path: Path) -> None:
    pool = ProcessRewardPool(RunConfig(), Context(tmp_path), "agent.0")
    asyncio.run(pool.check())
    assert list(pool.pids) == []


def test_reward_processes_die_with_their_agent(tmp_path: Path) -> None:
    make_pool(tmp_path)  # writes model and function
    script = f"""
import asyncio, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_reward_pool as t
from pathlib import Path
async def main():
    pool = t.make_pool(Path({str(tmp_path)!r}))
    await pool.check()
    asyncio.ensure_future(t.scored(pool, "hang"))
    await asyncio.sleep(0.2)
    print(*pool.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    agent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANGS_S)
    assert agent.returncode == -signal.SIGKILL, agent.stderr
    (pid,) = map(int, agent.stdout.split())
    give_up = time.monotonic() + HANGS_S
    while alive(pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not alive(pid)
