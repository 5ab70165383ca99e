"""When the launch loop ends a step by itself, and how it judges what is left of an attempt."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from hybridsched.config import load_config
from hybridsched.errors import FaultError
from hybridsched.runtime.adapters.attempt import (
    AttemptInfo,
    Ending,
    new_attempt,
    read_attempt,
    write_agent,
    write_exit,
)
from hybridsched.slurm.launch_loop import judge
from hybridsched.slurm.step_watch import Interruptions, StepWatch, stop_bound_s
from hybridsched.slurm.steps import Step

CONFIG = load_config(
    None,
    [
        "actor_rollout_ref.actor.strategy=emulated",
        "actor_rollout_ref.rollout.name=emulated",
        "deadlines.start_s=100",
        "deadlines.stop_s=10",
    ],
)


class FakeStep:
    """A step that is what a test says."""

    def __init__(self) -> None:
        self.missing: list[int] = []
        self.dead: list[int] = []
        self.hears = True
        self.asked: list[signal.Signals] = []

    def ask(self, number: signal.Signals) -> bool:
        self.asked.append(number)
        return self.hears

    def not_up(self) -> list[int]:
        return self.missing

    def lost(self) -> list[int]:
        return self.dead


class Scene:
    """A watch, its step, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.step, self.interruptions, self.said, self.folder = FakeStep(), Interruptions(), list[str](), folder
        self.watch = StepWatch(cast(Step, self.step), folder, CONFIG, self.interruptions, self.said.append)
        assert self.watch.why_end(0.0) is None


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_healthy_step_runs_as_long_as_it_likes(scene: Scene) -> None:
    assert scene.watch.why_end(1e6) is None


def test_agents_that_do_not_come_up_end_the_step(scene: Scene) -> None:
    scene.step.missing = [1]

    assert scene.watch.why_end(100.0) is None
    assert "agents of ranks [1] did not come up within 100 s (deadlines.start_s); killed" == scene.watch.why_end(101.0)


def test_a_dead_agent_ends_the_step_when_mpi_does_not(scene: Scene) -> None:
    scene.step.dead = [0]

    assert scene.watch.why_end(50.0) is None
    assert scene.watch.why_end(54.0) is None
    assert "agents of ranks [0] are gone and the rest did not end by itself; killed" == scene.watch.why_end(56.0)


def test_a_result_gives_the_processes_a_while_to_leave(scene: Scene) -> None:
    (scene.folder / "result.json").write_text(json.dumps({"exit_code": 0, "ok": True}))
    scene.step.dead = [0]

    assert scene.watch.why_end(50.0) is None
    assert scene.watch.why_end(90.0) is None
    assert str(scene.watch.why_end(91.0)).startswith("the run ended, but its processes did not within 40 s")


def test_an_orderly_stop_is_asked_for_once_and_bounded(scene: Scene) -> None:
    scene.interruptions.count = 1

    assert scene.watch.why_end(10.0) is None
    assert scene.watch.why_end(11.0) is None
    assert [signal.SIGTERM] == scene.step.asked
    assert 1 == len(scene.said)
    assert str(scene.watch.why_end(11.0 + stop_bound_s(CONFIG))).startswith("the orderly stop took more than")


def test_a_step_that_cannot_hear_is_ended_at_once(scene: Scene) -> None:
    scene.interruptions.count = 1
    scene.step.hears = False

    assert "stopped before the run began" == scene.watch.why_end(10.0)
    assert scene.watch.asked


def test_a_second_interruption_kills(scene: Scene) -> None:
    scene.interruptions.count = 2

    assert "killed" == scene.watch.why_end(10.0)


# ------------------------------------------------------------------ judging


def test_the_result_of_rank_0_comes_before_everything_else(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"exit_code": 0, "ok": True}))
    write_exit(tmp_path, Ending(4, "FaultError", "late", rank=1))

    assert Ending(0) == judge(tmp_path, 9, stopped=True)


def test_a_result_that_is_not_ok_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"exit_code": 0, "ok": False}))

    assert 1 == judge(tmp_path, 0, stopped=False).exit_code


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_half_a_result_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)

    assert 4 == judge(tmp_path, 0, stopped=False).exit_code


def test_of_several_ranks_the_one_that_cannot_be_mended_is_told(tmp_path: Path) -> None:
    write_exit(tmp_path, Ending(4, "DeadlineExceeded", "nothing heard", rank=0))
    write_exit(tmp_path, Ending(2, "DataError", "no such function", rank=2))

    assert Ending(2, "DataError", "no such function", rank=2) == judge(tmp_path, 2, stopped=False)


def test_a_stop_without_a_result_was_a_kill(tmp_path: Path) -> None:
    assert (130, "Interrupted") == _code_and_kind(judge(tmp_path, None, stopped=True))


def test_a_step_in_which_no_agent_came_up_shows_what_the_launcher_said(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/launcher.log").write_text("$ mpiexec\nhydra: no such host\nmpiexec ended with 255\n")

    text = judge(tmp_path, 255, stopped=False).text
    assert "the step ended without a result (exit code 255 of the launcher): no agent came up\n" in text
    assert text.endswith("    hydra: no such host")

    write_agent(tmp_path, 0, "1:1")
    assert "a node agent or the launcher of the step was killed" in judge(tmp_path, -9, stopped=False).text


def _code_and_kind(ending: Ending) -> tuple[int, str]:
    return ending.exit_code, ending.kind


# ------------------------------------------------------------------ folders of attempts


def test_attempts_are_numbered_and_the_newest_is_linked(tmp_path: Path) -> None:
    made = [new_attempt(tmp_path, "run-1", "launch", "1:1", "/s") for _ in range(2)]
    folder, info = made[1]

    assert [tmp_path / "attempts/1", tmp_path / "attempts/2"] == [one[0] for one in made]
    assert folder == (tmp_path / "attempts/latest").resolve()
    assert info == read_attempt(folder)
    assert made[0][1].secret != info.secret


def test_an_agent_started_by_hand_is_told_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FaultError, match="agents are started by the launch loop"):
        read_attempt(tmp_path)


def test_an_attempt_of_another_version_is_refused(tmp_path: Path) -> None:
    fields: dict[str, Any] = dict.fromkeys(AttemptInfo.__dataclass_fields__, "")
    (tmp_path / "attempt.json").write_text(json.dumps({**fields, "from_the_future": 1}))
    with pytest.raises(FaultError, match="another version of hybridsched"):
        read_attempt(tmp_path)
