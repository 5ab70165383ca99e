"""How configuration mistakes are collected and told.

Owns: `Problem` (which key, what is wrong, what to do), `Origins` (which file and line, or which override, a key came
from) and the one place that turns a list of problems into a `ConfigError`.

Invariant: all problems found in one pass are told in one message, in the order of the file, each with its place.
Does not: find problems (yaml_source, loader, checks do).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybridsched.errors import ConfigError

KeyPath = tuple[str, ...]


def dotted(path: Iterable[str | int]) -> str:
    """``("data", "seed")`` -> ``"data.seed"``; list positions keep their number."""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written. ``order`` sorts messages; overrides come after all lines of the file."""

    where: str
    order: int = 0


@dataclass(slots=True)
class Origins:
    """Key path -> where it was written; a key nobody wrote has the origin of its nearest written parent."""

    default: Origin = field(default_factory=lambda: Origin("configuration"))
    by_path: dict[KeyPath, Origin] = field(default_factory=dict)

    def of(self, path: Sequence[str | int]) -> Origin:
        """The origin of ``path`` or of its nearest parent that was written, else of the whole configuration."""
        parts = tuple(str(part) for part in path)
        for end in range(len(parts), 0, -1):
            if parts[:end] in self.by_path:
                return self.by_path[parts[:end]]
        return self.default

    def written(self, key: str) -> Origin | None:
        """The origin of exactly this dotted key, None when it has its default."""
        return self.by_path.get(tuple(key.split(".")))


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. ``keys[0]`` is the key the message is about; the others take part in it."""

    keys: tuple[str, ...]
    what: str
    cure: str
    origin: Origin | None = None  #: known already (a line that could not be parsed); None: looked up by key

    def text(self) -> str:
        """Without the place: ``key: what -> cure``."""
        head = f"{self.keys[0]}: " if self.keys and self.keys[0] else ""
        return f"{head}{self.what} -> {self.cure}"

    def place(self, origins: Origins) -> Origin:
        """Where to look: the line of the first of its keys that was written at all."""
        if self.origin is not None:
            return self.origin
        for key in self.keys:
            found = origins.written(key)
            if found is not None:
                return found
        return origins.of(self.keys[0].split(".")) if self.keys else origins.default


def problem(keys: str, what: str, cure: str) -> Problem:
    """Short constructor for checks: ``keys`` separated by spaces."""
    return Problem(tuple(keys.split()), what, cure)


def config_error(problems: Sequence[Problem], origins: Origins) -> ConfigError:
    """All problems as one error: a count, then one numbered line each, in the order of the file."""
    placed = sorted(((p.place(origins), p) for p in problems), key=lambda pair: pair[0].order)
    lines = [f"{origin.where}: {p.text()}" for origin, p in placed]
    if len(lines) == 1:
        return ConfigError(lines[0])
    numbered = "\n".join(f"  {number}. {line}" for number, line in enumerate(lines, 1))
    return ConfigError(f"{len(lines)} problems in the configuration:\n{numbered}")
