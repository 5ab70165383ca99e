"""The schema as a list of keys: walking it, naming its types for people, finding the nearest right name.

Owns: `KEYS` (every dotted key of run.yaml with its field), the human spelling of types and bounds, suggestions.
Does not: read files or judge values.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from hybridsched.config.schema import RunConfig, Section


@dataclass(frozen=True, slots=True)
class Key:
    """One key of run.yaml. ``section`` is the class of a nested section, None for a value."""

    path: tuple[str, ...]
    field: FieldInfo
    section: type[Section] | None

    @property
    def dotted(self) -> str:
        """e.g. ``actor_rollout_ref.rollout.n``."""
        return ".".join(self.path)

    @property
    def default(self) -> Any:
        """The default value (a fresh one for lists and mappings)."""
        return self.field.get_default(call_default_factory=True, validated_data={})


def iter_keys(section: type[Section] = RunConfig, prefix: tuple[str, ...] = ()) -> Iterator[Key]:
    """All keys depth first, a section before its keys, in the order of the schema."""
    for name, info in section.model_fields.items():
        inner = info.annotation
        nested = inner if isinstance(inner, type) and issubclass(inner, Section) else None
        yield Key((*prefix, name), info, nested)
        if nested is not None:
            yield from iter_keys(nested, (*prefix, name))


@cache
def all_keys() -> Mapping[str, Key]:
    """Dotted name -> key."""
    return {key.dotted: key for key in iter_keys()}


def type_text(key: Key) -> str:
    """The type as people say it: ``int >= 1``, ``one of a, b``, ``float in (0, 1], or null``."""
    annotation, nullable = _strip_none(key.field.annotation)
    text = _bounded(_plain(annotation), key.field)
    return f"{text}, or null" if nullable else text


def number_kind(key: Key) -> bool:
    """True when the key takes an int or a float (where a boolean is a mistake)."""
    return _strip_none(key.field.annotation)[0] in (int, float)


def takes_keys(key: Key) -> bool:
    """True when the value is a free mapping (whose own keys the schema does not know)."""
    annotation = _strip_none(key.field.annotation)[0]
    return annotation is dict or get_origin(annotation) is dict


def literal_values(key: Key) -> tuple[Any, ...]:
    """The allowed values of a choice (of its items for a list of choices); empty for other types."""
    annotation = _strip_none(key.field.annotation)[0]
    if get_origin(annotation) is list:
        annotation = get_args(annotation)[0]
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def suggest(path: tuple[str, ...]) -> str:
    """What an unknown key was probably meant to be, as a sentence."""
    *parent, name = path
    keys = all_keys()
    prefix = ".".join(parent)
    siblings = [key.path[-1] for key in keys.values() if list(key.path[:-1]) == parent]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    elsewhere = [dotted for dotted, key in keys.items() if key.path[-1] == name]
    if near and not elsewhere:
        return f"did you mean {'.'.join([*parent, near[0]])}?"
    if elsewhere:
        options = ([f"{prefix}.{near[0]}" if prefix else near[0]] if near else []) + elsewhere
        return f"did you mean {_or(options[:3])}?"
    names = {key.path[-1] for key in keys.values()}
    similar = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.8)
    if similar:
        return f"did you mean {_or([d for d, key in keys.items() if key.path[-1] == similar[0]][:3])}?"
    where = prefix or "the top level"
    return f"keys of {where}: {', '.join(siblings)}" if siblings else "see: hybridsched config"


def _or(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _strip_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        if len(rest) == 1 and len(rest) < len(get_args(annotation)):
            return rest[0], True
    return annotation, False


def _plain(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        shown = [str(value).lower() if isinstance(value, bool) else str(value) for value in args]
        return f"always {shown[0]}" if len(shown) == 1 else f"one of {', '.join(shown)}"
    if origin is list:
        return f"list of {_plain(args[0])}"
    if origin is tuple:
        return f"list of {len(args)} x {_plain(args[0])}"
    if origin is dict:
        return "mapping"
    names = {str: "text", int: "int", float: "float", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _bounded(text: str, field: FieldInfo) -> str:
    signs: list[str] = []
    for item in field.metadata:
        for kind, sign in (
            (annotated_types.Ge, ">="),
            (annotated_types.Gt, ">"),
            (annotated_types.Le, "<="),
            (annotated_types.Lt, "<"),
        ):
            if isinstance(item, kind):
                signs.append(f"{sign} {getattr(item, kind.__name__.lower()):g}")
    return f"{text} {' and '.join(signs)}" if signs else text
