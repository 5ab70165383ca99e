"""Finds the reward function a configuration names, and checks that it can be called.

Owns: the three spellings (built-in name, ``module:function``, ``path.py:function``) and the messages for when they
lead nowhere. Invariant: what is returned imports, is callable and accepts the call the scorer makes; so a wrong name
ends a run before it starts. Does not: call the function, or start processes (every reward process resolves the name
for itself; functions are never pickled).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridsched.errors import DataError
from hybridsched.rewards.builtin import BUILTINS

_GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A resolved reward function with the configured keyword arguments: call it as the peer calls ``compute_score``."""

    name: str
    function: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> Any:
        """Whatever the function returns; ``score_one`` checks it."""
        return self.function(
            data_source=data_source,
            solution_str=solution_str,
            ground_truth=ground_truth,
            extra_info=extra_info,
            **self.kwargs,
        )


def resolve_reward(function: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """The function `function` names: a built-in, ``module:function`` or ``path.py:function``.

    It is called with the keyword arguments data_source, solution_str, ground_truth, extra_info and `kwargs`.
    Raises DataError that names the import problem (missing file or module, error while importing with its line,
    missing or uncallable attribute, arguments it does not take).
    """
    where, colon, attribute = function.rpartition(":")
    if not colon:
        found = _builtin(function)
    elif not where or not attribute:
        raise DataError(f"reward.function {function!r} is incomplete. Write module:function or path.py:function.")
    else:
        module = _load_file(Path(where).expanduser()) if where.endswith(".py") else _load_module(where)
        found = _attribute(module, attribute, function)
    _check_callable(found, function, kwargs or {})
    return RewardFunction(function, found, dict(kwargs or {}))


def _builtin(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = BUILTINS.get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name, BUILTINS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(
        f"reward.function {name!r} is not a built-in reward ({', '.join(sorted(BUILTINS))}).{hint} "
        "Your own function is named module:function or path.py:function."
    )


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise DataError(
                f"reward.function: there is no module {name!r}. Put its folder on PYTHONPATH, install it into "
                f"{sys.prefix}, or name its file: path/to/{name.rpartition('.')[2]}.py:function."
            ) from error
        raise DataError(_import_problem(name, error)) from error
    except (Exception, SystemExit) as error:  # whatever a user's module does at import is the user's error
        raise DataError(_import_problem(name, error)) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise DataError(f"reward.function: {path} does not exist (looked from {Path.cwd()}). Correct the path.")
    # A name of its own, so that two files called reward.py do not shadow each other (or a real module).
    name = f"hybridsched_reward_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise DataError(f"reward.function: {path} cannot be loaded as Python code.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it is being executed
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # as above
        del sys.modules[name]
        raise DataError(_import_problem(str(path), error)) from error
    return module


def _import_problem(name: str, error: BaseException) -> str:
    """One line: what importing ended with, and where."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}: {error.msg}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        user = [frame for frame in frames if not frame.filename.startswith("<") and frame.filename != __file__]
        last = user[-1] if user else None
        place = f"{last.filename}:{last.lineno}: {error}" if last else str(error)
    return f"reward.function: importing {name} ends with {type(error).__name__}: {place}. Correct it and start again."


def _attribute(module: ModuleType, name: str, function: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")] if hasattr(found, "__dict__") else []
            near = difflib.get_close_matches(part, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            place = getattr(module, "__file__", None) or module.__name__
            raise DataError(f"reward.function {function!r}: {place} has no {name!r}.{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise DataError(f"reward.function {function!r} is {type(found).__name__}, not a function.")
    return found  # type: ignore[no-any-return]  # callable() does not narrow Any


def _check_callable(found: Callable[..., Any], function: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse what the call ``found(data_source=..., ..., **kwargs)`` would fail on."""
    taken = [name for name in _GIVEN if name in kwargs]
    if taken:
        raise DataError(f"reward.kwargs: {', '.join(taken)} is set by hybridsched for every response. Remove it.")
    called = found if inspect.isroutine(found) else type(found).__call__  # a callable object is its class's __call__
    if inspect.iscoroutinefunction(called) or inspect.isgeneratorfunction(called):
        raise DataError(f"reward.function {function!r} is async or a generator. Write a plain function.")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # some C functions have none; the first call will tell
    try:
        signature.bind(**dict.fromkeys(_GIVEN), **kwargs)
    except TypeError as error:
        raise DataError(
            f"reward.function {function!r} does not take the call it gets: {error}. It is called as "
            f"f(data_source=, solution_str=, ground_truth=, extra_info=, **reward.kwargs); it is f{signature}."
        ) from error
