"""run.yaml and overrides -> frozen `RunConfig`; and a resolved configuration back to YAML.

Owns: the order of layers (base < file < overrides), the refusal of unknown and foreign keys, the wording of type
errors, and the resolved file. Invariants: all problems of one pass are told together, with file, line, key and cure;
relations between keys (`checks`) are judged only when every key is right in itself; what `save_resolved` writes,
`load_config` reads back as an equal configuration.
Does not: look at models, data or the machine (`paths.check_paths`, `checks.check_cores` do).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hybridsched.config.checks import find_problems
from hybridsched.config.derived import Derived, derive, format_derived
from hybridsched.config.keys import Key, all_keys, literal_values, number_kind, suggest, takes_keys, type_text
from hybridsched.config.peer_keys import REFUSED_VALUES, has_finer, refusal
from hybridsched.config.problems import KeyPath, Origin, Origins, Problem, config_error, dotted
from hybridsched.config.schema import RunConfig
from hybridsched.config.yaml_source import describe, dump_yaml, parse_value, parse_yaml, read_text
from hybridsched.errors import ConfigError

_OVERRIDE_ORDER = 1_000_000  #: overrides are told after all lines of the file


def load_config(
    path: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Read, merge, validate and cross-check one configuration.

    path: the YAML file; None: defaults only. overrides: ``a.b.c=value``, the value in YAML; a mapping given for a
    section is merged into it, everything else replaces. base: nested values below the file (a command's defaults).
    Relative paths inside stay as written: they are taken from the folder the command runs in.

    Raises ConfigError with every problem found: file:line, key, what is wrong, what to do.
    """
    name = os.fspath(path) if path is not None else "configuration"
    values, origins = parse_yaml(read_text(Path(path)), name) if path is not None else ({}, Origins(Origin(name)))
    merged: dict[str, Any] = {}
    _merge(merged, base or {}, ())
    _merge(merged, values, ())
    problems = [p for index, text in enumerate(overrides) for p in _apply_override(merged, text, index, origins)]
    known: dict[str, Any] = {}
    problems += _keep_known(merged, (), known)
    config, type_problems = _validate(known)
    problems += type_problems
    if config is not None and not problems:
        problems += find_problems(config)
    if problems or config is None:
        raise config_error(problems, origins)
    return config


def resolved_values(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain nested values, every key present, in the order of the schema."""
    plain = _plain(config.model_dump(mode="python"))
    assert isinstance(plain, dict)
    return plain


def resolved_yaml(config: RunConfig, derived: Derived | None = None) -> str:
    """The resolved configuration as YAML, the derived values after it as comments."""
    table = format_derived(config, derived if derived is not None else derive(config))
    comments = "\n".join(f"# {_printable(line)}".rstrip() for line in table.splitlines())
    head = "# Resolved configuration: every key with the value this run uses. Can be given to hybridsched run.\n"
    return f"{head}{dump_yaml(resolved_values(config))}\n# Derived values (for reading; not read back):\n{comments}\n"


def save_resolved(config: RunConfig, path: str | os.PathLike[str], derived: Derived | None = None) -> None:
    """Write `resolved_yaml` so that the file is either complete or not there (temporary file, fsync, rename).

    Raises OSError when the folder cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(resolved_yaml(config, derived))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _printable(text: str) -> str:
    """Control characters escaped: YAML forbids them even in comments."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _is_section(path: KeyPath) -> bool:
    key = all_keys().get(dotted(path))
    return not path or (key is not None and key.section is not None)


def _merge(target: dict[str, Any], layer: Mapping[str, Any], path: KeyPath) -> None:
    """Lay ``layer`` over ``target``: sections key by key; an empty section (all keys commented out) changes nothing."""
    for name, value in layer.items():
        here = (*path, str(name))
        if _is_section(here) and value is None:
            continue
        if _is_section(here) and isinstance(value, Mapping):
            below = target.get(name)
            target[name] = below if isinstance(below, dict) else {}
            _merge(target[name], value, here)
        else:
            target[str(name)] = _plain(value)


def _apply_override(values: dict[str, Any], text: str, index: int, origins: Origins) -> list[Problem]:
    """Set ``a.b.c=value``; unknown names are left to `_keep_known`, so that the advice is the same as for a file."""
    origin = Origin(f"override {text!r}", _OVERRIDE_ORDER + index)
    key, equals, raw = text.partition("=")
    key = key.strip()
    path = tuple(key.split("."))
    if not equals or not key:
        return [Problem((), "is not key=value", "write it as section.key=value", origin)]
    if key[0] in "+~":
        return [Problem((key,), "has a Hydra prefix", f"leave out {key[0]!r}: keys need not exist in the file", origin)]
    if not all(path):
        return [Problem((key,), "has an empty part between dots", "write it as section.key=value", origin)]
    if not raw.strip():
        return [Problem((key,), "has no value", f"write {key}=null or {key}='\"\"'", origin)]
    try:
        value = parse_value(raw)
    except ConfigError:
        return [Problem((key,), f"the value {raw!r} is not valid YAML", f"quote it: '{key}=\"...\"'", origin)]
    inner = values
    for end, part in enumerate(path[:-1], 1):
        outer = all_keys().get(dotted(path[:end]))
        below = inner.get(part)
        if outer is not None and outer.section is None and not takes_keys(outer):
            cure = f"give the whole value: {outer.dotted}=..."
            return [Problem((key,), f"{outer.dotted} is {type_text(outer)}, it has no keys", cure, origin)]
        if below is None:
            below = inner[part] = {}
        if not isinstance(below, dict):
            what = f"{dotted(path[:end])} is {describe(below)}, it has no keys"
            return [Problem((key,), what, f"set {dotted(path[:end])} itself", origin)]
        inner = below
    _mark(origins, path, value, origin)
    _merge(inner, {path[-1]: value}, path[:-1])
    return []


def _mark(origins: Origins, path: KeyPath, value: Any, origin: Origin) -> None:
    """``path`` now comes from ``origin``; lines the file gave for what it replaces are forgotten."""
    if not (_is_section(path) and isinstance(value, Mapping)):
        for stale in [known for known in origins.by_path if known[: len(path)] == path]:
            del origins.by_path[stale]
    origins.by_path[path] = origin
    if isinstance(value, Mapping):
        for name, item in value.items():
            _mark(origins, (*path, str(name)), item, origin)


def _keep_known(values: Mapping[str, Any], path: KeyPath, known: dict[str, Any]) -> list[Problem]:
    """Copy what the schema knows into ``known``; report the rest, and booleans where a number is wanted."""
    problems: list[Problem] = []
    for name, value in values.items():
        here = (*path, name)
        key = all_keys().get(dotted(here))
        if key is None:
            problems += _unknown(here, value)
        elif key.section is not None:
            if isinstance(value, Mapping):
                known[name] = {}
                problems += _keep_known(value, here, known[name])
            else:
                what = f"is a section, but has {describe(value)}"
                problems.append(Problem((key.dotted,), what, "write its keys below it, indented"))
        elif isinstance(value, bool) and number_kind(key):
            problems.append(Problem((key.dotted,), f"is {describe(value)}", f"write a number: {type_text(key)}"))
        else:
            known[name] = value
    return problems


def _unknown(path: KeyPath, value: Any) -> list[Problem]:
    """Advice on a key the schema lacks: once for a whole foreign section, unless there is better advice inside it."""
    if isinstance(value, Mapping) and value and has_finer(path):
        return [problem for name, item in value.items() for problem in _unknown((*path, str(name)), item)]
    refused = refusal(path)
    if refused is not None:
        return [Problem((dotted(path),), "is a key of the peer that is not honoured here", refused)]
    return [Problem((dotted(path),), "unknown key", suggest(path))]


def _validate(values: Mapping[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        return None, [_type_problem(detail) for detail in error.errors(include_url=False)]


def _type_problem(detail: ErrorDetails) -> Problem:
    """One pydantic error in our words."""
    location = tuple(str(part) for part in detail["loc"])
    key = _key_at(location)
    value = detail["input"]
    name = dotted(location)
    if key is None:
        return Problem((name,), f"{detail['msg']} (is {describe(value)})", "see: hybridsched config")
    refused = REFUSED_VALUES.get((key.dotted, str(value)))
    if refused is not None:
        return Problem((name,), f"{value} is not available here", refused)
    choices = literal_values(key)
    if detail["type"] == "literal_error" and choices:
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        return Problem((name,), f"is {describe(value)}", f"{guess}it must be {type_text(key)}")
    if detail["type"] == "string_type" and isinstance(value, bool | int | float):
        return Problem((name,), f"is {describe(value)}, but must be text", f'quote it: "{value}"')
    return Problem((name,), f"is {describe(value)}", f"it must be {type_text(key)}")


def _key_at(location: KeyPath) -> Key | None:
    """The key an error location lies in (list positions and keys of free mappings cut off)."""
    for end in range(len(location), 0, -1):
        key = all_keys().get(dotted(location[:end]))
        if key is not None:
            return key
    return None
