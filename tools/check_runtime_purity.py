"""Rules of the house that neither ruff, mypy nor import contracts can hold. Run by `make check`; prints file:line.

1. Acting code gets clock, processes, files, threads and chance handed in (DESIGN 3, rule 2): modules of
   ``hybridsched/runtime`` outside ``TOUCHING`` call none of them themselves and iterate no set of tasks (its order
   changes from run to run), so that the simulator runs the same code reproducibly.
2. Deciding code (``hybridsched/scheduling``) imports a short list of pure modules.
3. A module has at most ``MAX_LINES`` lines.

Exit code 0: nothing found; 1: findings, one per line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_LINES = 400

#: Of hybridsched/runtime: modules whose work is to touch the machine. A name with a slash at its end is a folder.
TOUCHING = (
    "adapters/",
    "agent_main.py",
    "build.py",
    "clock.py",
    "policy_loader.py",
    "prepare.py",
    "transport/mpi.py",
    "workers/build.py",
    "workers/process.py",
    "workers/reward.py",
)
IMPURE_MODULES = frozenset(
    {"multiprocessing", "random", "secrets", "socket", "subprocess", "threading", "time", "uuid"}
)
IMPURE_CALLS = frozenset({"asyncio.to_thread", "os.fork", "os.getpid", "os.urandom"})
UNORDERED_CALLS = frozenset({"asyncio.as_completed", "asyncio.wait"})
PURE_MODULES = frozenset(
    {"__future__", "abc", "bisect", "collections", "dataclasses", "difflib", "enum", "functools", "heapq", "inspect"}
    | {"itertools", "math", "operator", "statistics", "typing"}
)
PURE_ROOMS = ("hybridsched.scheduling", "hybridsched.model", "hybridsched.errors")


class Finding(NamedTuple):
    """One broken rule."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def find_all(root: Path) -> list[Finding]:
    """Everything wrong in the package below ``root`` (the repository), in order of file and line."""
    package = root / "hybridsched"
    findings: list[Finding] = []
    for path in sorted(package.rglob("*.py")):
        shown = path.relative_to(root)
        if shown.is_relative_to("hybridsched/_data"):
            continue  # a link to policies/, which users write
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > MAX_LINES:
            findings.append(Finding(shown, lines, f"{lines} lines; a module has at most {MAX_LINES}: split it"))
        tree = ast.parse(text, filename=str(path))
        if path.is_relative_to(package / "scheduling"):
            findings += [Finding(shown, line, what) for line, what in impure_imports(tree)]
        if path.is_relative_to(package / "runtime") and not is_touching(path.relative_to(package / "runtime")):
            findings += [Finding(shown, line, what) for line, what in runtime_faults(tree)]
    return findings


def is_touching(path: Path) -> bool:
    """Whether a module of hybridsched/runtime (path relative to it) may touch the machine."""
    name = path.as_posix()
    return any(name.startswith(entry) if entry.endswith("/") else name == entry for entry in TOUCHING)


def impure_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports deciding code must not have."""
    for line, name in sorted(_imports(tree)):
        ours = any(name == room or name.startswith(room + ".") for room in PURE_ROOMS)
        if not ours and name.partition(".")[0] not in PURE_MODULES:
            yield line, f"deciding code imports {name}; it may import {', '.join(sorted(PURE_MODULES))}"


def runtime_faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What acting code must get handed in, and iterations over sets of tasks."""
    names = _bindings(tree)
    found: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {
                (line, f"imports {name}; get it handed in (services.py)")
                for line, name in _imports(node)
                if name.partition(".")[0] in IMPURE_MODULES
            }
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        called = _full_name(node, names)
        if called in IMPURE_CALLS:
            found.add((node.lineno, f"uses {called}; get it handed in (services.py)"))
        elif called in UNORDERED_CALLS:
            found.add((node.lineno, f"uses {called}, which gives tasks in no order; wait for them one by one"))
    task_sets = _task_sets(tree)
    for line, name in _iterated(tree):
        if name in task_sets:
            found.add((line, f"iterates {name}, a set of tasks: no order; keep a list or a dict"))
    yield from sorted(found)


def _imports(tree: ast.AST) -> set[tuple[int, str]]:
    """(line, module) of every import; ``from a import b`` counts as a."""
    found: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(node.lineno, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.lineno, "." * node.level + (node.module or "")))
    return found


def _bindings(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, of everything imported under another or a short name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """``aio.wait`` -> ``asyncio.wait``; None for what is no dotted name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _task_sets(tree: ast.Module) -> set[str]:
    """Names annotated as a set of tasks or futures, e.g. ``self._tasks``."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            annotation, target = node.annotation, ast.unparse(node.target)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            annotation, target = node.annotation, node.arg
        else:
            continue
        text = ast.unparse(annotation)
        if text.startswith(("set[", "frozenset[", "AbstractSet[")) and ("Task" in text or "Future" in text):
            found |= {target, f"self.{target}"} if isinstance(node, ast.AnnAssign) else {target}
    return found


def _iterated(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Expressions that are walked through: for, comprehensions, ``*unpacking``, list(), tuple()."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            source: ast.expr = node.iter
        elif isinstance(node, ast.Starred):
            source = node.value
        else:
            continue
        while isinstance(source, ast.Call) and len(source.args) == 1 and ast.unparse(source.func) in ("list", "tuple"):
            source = source.args[0]
        yield source.lineno, ast.unparse(source)


def main() -> int:
    """Check the repository this file lies in."""
    findings = find_all(Path(__file__).resolve().parents[1])
    for finding in findings:
        print(finding)
    if findings:
        print(f"{len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
