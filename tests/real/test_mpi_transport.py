"""The MPI transport under a real mpiexec: order, size, signals, and an end that cannot hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridsched.runtime.adapters.lifeline import without_launcher
from hybridsched.slurm.local import mpiexec

RANKS = Path(__file__).with_name("mpi_ranks.py")
LONG_S = 100.0


def start(
    scenario: str, ranks: int, expected: int | None = None, *options: str
) -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, the JSON lines, stderr)."""
    command = [str(mpiexec()), "-launcher", "fork", "-n", str(ranks), sys.executable, str(RANKS)]
    ended = subprocess.run(
        [*command, scenario, str(expected or ranks), *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env=without_launcher(os.environ),
    )
    return ended.returncode, [json.loads(x) for x in ended.stdout.splitlines() if x.startswith("{")], ended.stderr


def test_a_token_goes_round_three_ranks() -> None:
    assert (0, [{"result": "0 1 2", "left": True}], "") == start("ring", 3)


def test_messages_of_a_pair_arrive_in_order_whatever_their_size() -> None:
    code, lines, stderr = start("order", 3)

    assert (0, [{"result": {"1": True, "2": True}, "left": True}]) == (code, lines), stderr


def test_messages_arrive_in_order_with_doorbells(tmp_path: Path) -> None:
    code, lines, stderr = start("order", 3, None, str(tmp_path))

    assert (0, [{"result": {"1": True, "2": True}, "left": True}]) == (code, lines), stderr


def test_big_messages_cross_each_other_unharmed() -> None:
    code, lines, stderr = start("big", 2)

    assert (0, [{"result": True, "left": True}]) == (code, lines), stderr


def test_a_waiting_rank_runs_signal_handlers_and_costs_next_to_nothing(tmp_path: Path) -> None:
    code, [line], stderr = start("signals", 3, None, str(tmp_path))

    assert code == 0, stderr
    assert line["result"]["handled"]
    assert line["result"]["cpu_share"] < 0.1  # about 0.008; a blocking receive would burn all of it


def test_a_rank_that_does_not_leave_cannot_hold_the_others() -> None:
    _code, lines, _stderr = start("dead", 3)

    assert [{"result": None, "left": False}] == lines


def test_a_world_of_one_is_explained_as_a_mismatch_of_launcher_and_library() -> None:
    ended = subprocess.run(
        [sys.executable, str(RANKS), "ring", "3"],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        env=without_launcher(os.environ),
    )
    error = json.loads(ended.stdout)["error"]

    assert ended.returncode == 4
    assert error.startswith(
        "MPI sees a world of 1 rank, the plan has 3: the launcher and the MPI library do not belong"
    )
    assert f"{sys.prefix}/bin/mpiexec" in error


@pytest.mark.parametrize("expected", [1, 3])
def test_a_world_of_another_size_is_refused(expected: int) -> None:
    code, lines, _stderr = start("ring", 2, expected)

    assert code == 4
    assert lines[0]["error"].startswith(f"MPI sees a world of 2 ranks, the plan has {expected}; the step was started")
