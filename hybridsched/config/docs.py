"""The documentation of run.yaml, rendered from the schema: for `hybridsched config` and `hybridsched init`.

Invariant: nothing is written by hand here; a key's text is the docstring under it in `schema`. Plain text, no colours.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from hybridsched.config.keys import Key, all_keys, suggest, type_text
from hybridsched.config.yaml_source import inline_yaml
from hybridsched.errors import ConfigError

_WIDTH = 100

_HEAD = """\
# {title}
#
# Every key of the configuration. "# text" explains; "#key: value" is a key at its default: remove the # to change it.
# Unknown keys are refused, so a typing mistake cannot pass. A key can also be given on the command line:
#     hybridsched run run.yaml async_training.staleness_threshold=0.5
"""


def render_docs(section: str | None = None) -> str:
    """Every key with type, default and meaning; of one section or key when a dotted name is given.

    Raises ConfigError with the nearest name when there is no such key.
    """
    keys = list(all_keys().values())
    if section is not None:
        path = tuple(section.strip(".").split("."))
        keys = [key for key in keys if key.path[: len(path)] == path]
        if not keys:
            raise ConfigError(f"{section}: no such section or key -> {suggest(path)}")
    blocks: list[str] = []
    for key in keys:
        text = _sentence(key)
        if key.section is not None:
            body = " ".join(line.strip() for line in (key.section.__doc__ or "").splitlines()).strip()
            blocks.append(f"\n{key.dotted}:\n{_indent(body if body else text)}")
        else:
            default = inline_yaml(_plain(key.default))
            blocks.append(f"{key.dotted}\n{_indent(f'{type_text(key)}; default {default}')}\n{_indent(text)}")
    return "\n".join(blocks).strip("\n") + "\n"


def render_template(overrides: Mapping[str, Any] | None = None, *, title: str = "hybridsched run") -> str:
    """A complete commented run.yaml: ``overrides`` (dotted name -> value) are set, all other keys commented out.

    Raises ConfigError when an override names no key.
    """
    chosen = dict(overrides or {})
    for name in chosen:
        key = all_keys().get(name)
        if key is None or key.section is not None:
            raise ConfigError(f"{name}: no such key -> {suggest(tuple(name.split('.')))}")
    lines = [_HEAD.format(title=title.replace("\n", " "))]
    for key in all_keys().values():
        margin = "  " * (len(key.path) - 1)
        if key.section is not None:
            lines += ["", *_comment(_sentence(key), margin), f"{margin}{key.path[-1]}:"]
        else:
            lines += _comment(f"{_sentence(key)} [{type_text(key)}]", margin)
            mark = "" if key.dotted in chosen else "#"
            value = inline_yaml(_plain(chosen.get(key.dotted, key.default)))
            lines.append(f"{margin}{mark}{key.path[-1]}: {value}")
    return "\n".join(lines) + "\n"


def _sentence(key: Key) -> str:
    return " ".join((key.field.description or "").split())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _indent(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _comment(text: str, margin: str) -> list[str]:
    prefix = f"{margin}# "
    return textwrap.wrap(text, _WIDTH + 10, initial_indent=prefix, subsequent_indent=prefix) if text else []
