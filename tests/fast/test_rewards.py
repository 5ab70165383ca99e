"""Rewards: built-ins on hand-worked cases, finding the user's function, and the border to user code."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.errors import DataError
from hybridsched.rewards import (
    RewardFailure,
    count_on,
    exact_match,
    group_is_degenerate,
    numeric_match,
    overlong_penalty,
    resolve_reward,
    score_one,
)
from hybridsched.rewards.builtin import last_number


@pytest.mark.parametrize(
    ("solution", "truth", "kwargs", "expected"),
    [
        (" Paris\n", "Paris", {}, 1.0),
        (" Paris\n", "Paris", {"strip": False}, 0.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("7", 7, {}, 1.0),
        ("", "x", {}, 0.0),
    ],
)
def test_exact_match(solution: str, truth: Any, kwargs: dict[str, Any], expected: float) -> None:
    assert expected == exact_match("d", solution, truth, **kwargs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42.", 42.0),
        ("$1,234.50 in all", 1234.5),
        ("x = -3", -3.0),
        ("5-3", 3.0),
        ("2+.5", 0.5),
        ("1e3", 1000.0),
        ("3/4 of it", 0.75),
        (r"\frac{1}{8}", 0.125),
        ("\u22122", -2.0),
        ("1/0 or 7/0", None),
        ("9" * 400, None),
        ("none at all - .", None),
        ("room 1, 2, 3", 3.0),
    ],
)
def test_last_number(text: str, expected: float | None) -> None:
    assert expected == last_number(text)


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("so 2 + 2 = 4\n#### 4", "4", 1.0),
        ("#### 5 \n#### 4 apples", 4, 1.0),
        (r"we get \boxed{\frac{3}{4}} and stop 9", "0.75", 1.0),
        (r"\boxed{12", "12", 1.0),
        ("1,000", "1000", 1.0),
        ("4.1", "4", 0.0),
        ("no number", "4", 0.0),
    ],
)
def test_numeric_match(solution: str, truth: Any, expected: float) -> None:
    assert expected == numeric_match("d", solution, truth)


def test_numeric_match_tolerance_is_configurable() -> None:
    assert (numeric_match("d", "4.1", "4"), numeric_match("d", "4.1", "4", abs_tol=0.2)) == (0.0, 1.0)


def test_numeric_match_refuses_a_ground_truth_without_number() -> None:
    with pytest.raises(ValueError, match="'seven' is not a number"):
        numeric_match("d", "7", "seven")


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("", "7", Fraction(0)),
        ("8", "7", Fraction(1, 2)),
        ("890123", "417", Fraction(6, 7)),
        ("8 9 0", "7", Fraction(3, 4)),
        ("888", "7", Fraction(1, 4)),
        ("8991", "7", Fraction(2, 5)),  # 9 after 9 and 1 after 9 are wrong
        ("8x9", "7", Fraction(2, 4)),
        ("77", "7", Fraction(0)),
    ],
)
def test_count_on_by_hand(solution: str, truth: str, expected: Fraction) -> None:
    assert float(expected) == pytest.approx(count_on("count_on", solution, truth))


@given(start=st.integers(0, 999), length=st.integers(0, 200))
def test_count_on_pays_every_further_right_step(start: int, length: int) -> None:
    right = "".join(str((start + 1 + i) % 10) for i in range(length + 1))
    shorter, longer = count_on("", right[:-1], start), count_on("", right, start)
    assert 0.0 <= shorter < longer < 1.0


@given(st.text(max_size=50), st.integers(0, 9))
def test_count_on_stays_between_zero_and_one(text: str, start: int) -> None:
    assert 0.0 <= count_on("", text, start) < 1.0


def test_builtins_resolve_by_name_with_kwargs() -> None:
    assert score_one(resolve_reward("exact_match", {"ignore_case": True}), "d", "A", "a") == 1.0


def write_reward(folder: Path, body: str, name: str = "my_reward.py") -> str:
    path = folder / name
    path.write_text(body, encoding="utf-8")
    return str(path)


GOOD = (
    "def f(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n    return len(solution_str) + bonus\n"
)


def test_a_file_resolves(tmp_path: Path) -> None:
    reward = resolve_reward(write_reward(tmp_path, GOOD) + ":f", {"bonus": 10})
    assert score_one(reward, "d", "abc", None) == 13.0


def test_two_files_of_one_name_do_not_shadow_each_other(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        write_reward(folder, GOOD.replace("bonus=0", f"bonus={number}"), "reward.py")
    assert [score_one(resolve_reward(f"{folder}/reward.py:f"), "d", "", None) for folder in folders] == [0.0, 1.0]


def test_a_module_and_a_nested_attribute_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indented = "    @staticmethod\n    " + GOOD.replace("\n    return", "\n        return")
    write_reward(tmp_path, "class Rewards:\n" + indented, "nested_reward_module.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert score_one(resolve_reward("nested_reward_module:Rewards.f"), "d", "ab", None) == 2.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exact_mtch", r"Did you mean 'exact_match'\?"),
        ("no_such_package_xyz.rewards:f", "there is no module 'no_such_package_xyz.rewards'"),
        ("/no/such/file.py:f", "/no/such/file.py does not exist"),
        ("math:", "is incomplete"),
        ("math:sqroot", "has no 'sqroot'. Did you mean 'sqrt'"),
        ("math:pi", "is float, not a function"),
        ("hybridsched.rewards:overlong_penalty", "does not take the call it gets"),
    ],
)
def test_a_name_that_leads_nowhere_is_explained(function: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_reward(function)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import no_such_package_xyz\n", "ModuleNotFoundError: .*broken.py:1: No module named"),
        ("x = 1\nx = 1 / 0\n", "ZeroDivisionError: .*broken.py:2: division by zero"),
        ("def f(:\n", "SyntaxError: .*broken.py:1"),
        ("import sys\nsys.exit(3)\n", "SystemExit: .*broken.py:2: 3"),
        ("async def f(data_source, solution_str, ground_truth, extra_info=None): return 1\n", "is async"),
        ("def f(solution_str, ground_truth): return 1\n", "does not take the call it gets"),
        ("def f(data_source, solution_str, ground_truth): return 1\n", "'extra_info'"),
    ],
)
def test_a_broken_file_is_explained(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_reward(write_reward(tmp_path, body, "broken.py") + ":f")


def test_a_file_that_failed_is_imported_again_after_the_correction(tmp_path: Path) -> None:
    name = write_reward(tmp_path, "1 / 0\n")
    with pytest.raises(DataError):
        resolve_reward(name + ":f")
    write_reward(tmp_path, GOOD)
    assert score_one(resolve_reward(name + ":f"), "d", "", None) == 0.0


def test_kwargs_that_are_given_per_response_are_refused() -> None:
    with pytest.raises(DataError, match="ground_truth is set by hybridsched"):
        resolve_reward("exact_match", {"ground_truth": "x"})


def test_unknown_kwargs_are_refused() -> None:
    with pytest.raises(DataError, match="unexpected keyword argument 'strp'"):
        resolve_reward("exact_match", {"strp": True})


def returns(value: Any) -> Any:
    return lambda *_: value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (-3, -3.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(2), 2.0),
        (Fraction(1, 4), 0.25),
        ({"score": 0.75, "acc": "x"}, 0.75),
        ({"score": np.int64(1)}, 1.0),
    ],
)
def test_score_one_takes_numbers(value: Any, expected: float) -> None:
    score = score_one(returns(value), "d", "s", "g")
    assert (expected, float) == (score, type(score))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "returned nan; a finite"),
        (-math.inf, "returned -inf; a finite"),
        (np.float32("nan"), "returned nan"),
        (10**400, "returned inf"),
        (None, "returned NoneType; one number"),
        ("1.0", "returned str of length 3"),
        ([1.0, 2.0], "returned list of length 2"),
        (np.ones(3), "returned ndarray of length 3"),
        (1 + 2j, "returned complex"),
        ({}, 'without "score" \\(it has: nothing\\)'),
        ({"acc": 1}, 'without "score" \\(it has: acc\\)'),
        ({"score": None}, "returned NoneType"),
    ],
)
def test_score_one_refuses_everything_else(value: Any, reason: str) -> None:
    with pytest.raises(RewardFailure, match=reason):
        score_one(returns(value), "d", "s", "g")


@pytest.mark.parametrize("error", [ValueError("bad <tag>"), RecursionError("deep"), SystemExit(3), AssertionError("")])
def test_a_raising_function_fails_the_response_with_its_traceback(error: BaseException) -> None:
    def user_function(*_: Any) -> float:
        raise error

    with pytest.raises(RewardFailure) as caught:
        score_one(user_function, "d", "s", "g")
    assert f"the reward function raised {type(error).__name__}: {error}" == caught.value.reason == str(caught.value)
    assert "in user_function" in caught.value.detail


def test_ctrl_c_is_not_a_failed_response() -> None:
    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_one(interrupted, "d", "s", "g")


@pytest.mark.parametrize(
    ("n_tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (120, -2.0)]
)
def test_overlong_penalty_by_hand(n_tokens: int, expected: float) -> None:
    assert expected == pytest.approx(overlong_penalty(n_tokens, max_response_length=100, buffer_len=20, factor=2.0))


def test_overlong_penalty_without_buffer_punishes_only_beyond_the_limit() -> None:
    assert [overlong_penalty(n, 100, 0, 1.5) for n in (100, 101)] == [0.0, -1.5]


@pytest.mark.parametrize(("buffer_len", "factor"), [(101, 1.0), (-1, 1.0), (10, -1.0)])
def test_overlong_penalty_refuses_impossible_settings(buffer_len: int, factor: float) -> None:
    with pytest.raises(ValueError, match="should"):
        overlong_penalty(10, 100, buffer_len, factor)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], True), ([0.5], False), ([0.5, 0.5], True), ([0.0, 1.0], False), ([0.1, 0.1, 0.1 + 1e-12], False)],
)
def test_group_is_degenerate(values: list[float], expected: bool) -> None:
    assert expected == group_is_degenerate(values)


def test_the_reward_room_imports_no_heavy_library() -> None:
    code = (
        "import sys, hybridsched.rewards; "
        "print(sorted({'torch', 'numpy', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
