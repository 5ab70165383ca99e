"""Reading and writing the YAML of run.yaml: text to plain values plus the line of every key, and back.

Owns: the dialect. It is the core schema of YAML 1.2: only ``true`` and ``false`` are booleans, ``1e-6`` is a number,
``24:00:00`` and ``off`` are text. (PyYAML's default is YAML 1.1, where ``verify: off`` is false, ``time: 24:00:00`` is
86400 and ``lr: 1e-6`` is text: three traps in this very file format.)

Invariants: keys are text and unique in their mapping; values are null, bool, int, float, str, list and dict only;
what `dump_yaml` writes, `parse_yaml` reads back as equal values, and a YAML 1.1 reader sees the same text as text.
Does not: know the schema.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from hybridsched.config.problems import KeyPath, Origin, Origins, Problem, config_error, dotted

_MAX_NODES = 100_000  #: a run.yaml has hundreds; more means aliases that multiply

_PLAIN: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:int", r"^(?:[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:merge", r"^<<$", "<"),
)
_TAGS = {tag for tag, _, _ in _PLAIN} | {f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map")}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the core schema instead of YAML 1.1."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own protocol

    def _int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        base = {"0o": 8, "0x": 16}.get(text[:2].lower(), 10)
        return int(text, base)

    def _float(self, node: yaml.ScalarNode) -> float:
        return float(str(self.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader._int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader._float)
for _tag, _pattern, _first in _PLAIN:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), [c if c != "\0" else "" for c in _first])


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text our dialect would read as something else; never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def _text(self, text: str) -> yaml.ScalarNode:
        style = "'" if any(re.match(pattern, text) for _, pattern, _ in _PLAIN) else None
        if any(character in text for character in "\x85\u2028\u2029"):  # line breaks to YAML unless escaped
            style = '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper._text)


def read_text(path: Path) -> str:
    """The file as text. Raises ConfigError when it is missing, a folder, unreadable or not UTF-8."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise _whole(path, "no such file", "check the path, or make one with: hybridsched init NAME") from None
    except IsADirectoryError:
        raise _whole(path, "is a folder, not a file", f"name the file, for example {path / 'run.yaml'}") from None
    except OSError as error:
        raise _whole(path, f"cannot be read ({error.strerror})", "check its permissions") from None
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise _whole(path, "is UTF-16", f"save it as UTF-8: iconv -f utf-16 -t utf-8 {path}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = raw[error.start]
        what = f"is not UTF-8 (byte 0x{byte:02x})"
        raise _whole(path, what, f"save it as UTF-8, for example: iconv -f latin1 -t utf-8 {path}", line) from None


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], Origins]:
    """A YAML document that is one mapping -> (values, line of every key). An empty document is an empty mapping.

    ``name`` is the file's name for messages. Raises ConfigError: syntax, duplicate or non-text keys (all together),
    a document that is no mapping, tags outside the core schema.
    """
    origins = Origins(Origin(name))
    node, value = _compose_and_construct(text, name, origins)
    if node is None or value is None:
        return {}, origins
    if not isinstance(value, dict):
        what = f"must be a mapping of sections (data:, trainer:, ...), is {describe(value)}"
        raise config_error([Problem((), what, "start from: hybridsched init NAME", Origin(f"{name}:1", 1))], origins)
    _collect_lines(node, (), name, origins, [])
    return value, origins


def parse_value(text: str) -> Any:
    """The value of an override, parsed as YAML. Raises ConfigError on syntax errors."""
    _, value = _compose_and_construct(text, "value", Origins(Origin("value")))
    return value


def dump_yaml(value: Any) -> str:
    """Plain values as block YAML in the given key order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def inline_yaml(value: Any) -> str:
    """Plain values on one line, e.g. ``[a, b]`` or ``1.0e-06``."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return text.strip().removesuffix("\n...").strip()


def describe(value: Any) -> str:
    """A value as messages show it: what it is and, when short, what it says."""
    kinds = {dict: "a mapping", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    if value is None:
        return "empty (null)"
    if isinstance(value, dict | list):
        return kinds[type(value)]
    shown = inline_yaml(value)
    return f"{kinds.get(type(value), type(value).__name__)} ({shown if len(shown) <= 60 else shown[:57] + '...'})"


def _whole(path: Path, what: str, cure: str, line: int | None = None) -> Exception:
    where = f"{path}:{line}" if line else str(path)
    return config_error([Problem((), what, cure, Origin(where))], Origins())


def _compose_and_construct(text: str, name: str, origins: Origins) -> tuple[yaml.Node | None, Any]:
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        problems = _structure_problems(node, name)
        if problems:
            raise config_error(problems, origins)
        return node, loader.construct_document(node)
    except yaml.YAMLError as error:
        raise config_error([_syntax_problem(error, text, name)], origins) from None
    except RecursionError:
        cure = "a run.yaml is at most five levels deep"
        raise config_error([Problem((), "is nested too deeply", cure, Origin(name))], origins) from None
    except ValueError as error:
        cure = "write the number in plain digits, or quote it if it is text"
        raise config_error([Problem((), f"has a number that cannot be read ({error})", cure)], origins) from None
    finally:
        if loader is not None:
            loader.dispose()


def _syntax_problem(error: yaml.YAMLError, text: str, name: str) -> Problem:
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(str(error.character)[0])
        cure = "remove it; is this a text file?"
        return Problem((), f"has a control character (#x{code:04x})", cure, Origin(f"{name}:{line}", line))
    if not isinstance(error, yaml.MarkedYAMLError):
        return Problem((), f"is not valid YAML ({error})", "correct it", Origin(name))
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else 1
    reason = " ".join(part for part in (error.context, error.problem) if part)
    source = text.splitlines()[line - 1] if line <= len(text.splitlines()) else ""
    if "\t" in source[: len(source) - len(source.lstrip())] or "'\\t'" in reason:
        return Problem((), "is indented with a tab", "indent with spaces", Origin(f"{name}:{line}", line))
    cure = "look at this line and the one before: indentation, a missing colon, an open quote or bracket"
    return Problem((), f"is not valid YAML ({reason})", cure, Origin(f"{name}:{line}", line))


def _structure_problems(root: yaml.Node, name: str) -> list[Problem]:
    """Duplicate keys, keys that are not text, foreign tags, cycles: everything construction would hide."""
    problems: list[Problem] = []
    done: set[int] = set()

    def visit(node: yaml.Node, path: KeyPath, parents: tuple[int, ...]) -> None:
        line = node.start_mark.line + 1
        here = Origin(f"{name}:{line}", line)
        if id(node) in parents:
            problems.append(Problem((dotted(path),), "contains itself (alias)", "write the value out", here))
            return
        if id(node) in done:
            return
        done.add(id(node))
        if node.tag not in _TAGS:
            what = f"has the tag {node.tag.replace('tag:yaml.org,2002:', '!!')}"
            problems.append(Problem((dotted(path),), what, "write a plain value", here))
            return
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                visit(item, (*path, str(index)), (*parents, id(node)))
        elif isinstance(node, yaml.MappingNode):
            visit_mapping(node, path, parents)
        elif _has_surrogate(node.value):
            problems.append(Problem((dotted(path),), "contains half a character (surrogate)", "remove it", here))

    def visit_mapping(node: yaml.MappingNode, path: KeyPath, parents: tuple[int, ...]) -> None:
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            here = Origin(f"{name}:{line}", line)
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith((":str", ":merge")):
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                problems.append(Problem((dotted(path),), f"has the key {shown}, which is not text", "quote it", here))
                continue
            here_path = path if key.tag.endswith(":merge") else (*path, str(key.value))
            if key.value in first:
                what = f"is written twice (first on line {first[key.value]})"
                problems.append(Problem((dotted(here_path),), what, "keep one of the two", here))
            first.setdefault(key.value, line)
            visit(value, here_path, (*parents, id(node)))

    visit(root, (), ())
    return problems


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _collect_lines(node: yaml.Node, path: KeyPath, name: str, origins: Origins, count: list[None]) -> None:
    """Lines of all keys, after construction: merged mappings (<<) are already flattened into ``node.value``."""
    count.append(None)
    if len(count) > _MAX_NODES:
        raise config_error([Problem((), "has too many values (aliases)", "write the values out")], origins)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            line = key.start_mark.line + 1
            origins.by_path[here] = Origin(f"{name}:{line}", line)
            _collect_lines(value, here, name, origins, count)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            here = (*path, str(index))
            line = item.start_mark.line + 1
            origins.by_path[here] = Origin(f"{name}:{line}", line)
            _collect_lines(item, here, name, origins, count)
