"""What may stand in a Slurm script: every value that comes from a user passes here before it is written anywhere.

Owns: the alphabet of each kind of value, and the refusal with its cure. Values are quoted as well where they are used;
this is the other half: sbatch reads its own lines without a shell, so quoting alone does not keep a line break or a
second option out of them.

Invariant: what these functions let through is one line, one word where a word is meant, and starts no option.
"""

from __future__ import annotations

import re

from hybridsched.errors import ConfigError

_LIST = re.compile(r"[A-Za-z0-9_.,+:/@-]*")  # partitions, accounts, features without operators
_EXPRESSION = re.compile(r"[A-Za-z0-9_.,+:/@&|!*()\[\]=-]*")  # --constraint="a100&(ib|roce)*2"
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MEMORY = re.compile(r"[0-9]+(\.[0-9]+)?[KMGT]?B?", re.IGNORECASE)
_TIME = re.compile(r"([0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|[0-9]+(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE)")
_MAX_NAME = 200


def line(value: object, key: str) -> str:
    """Any text without line breaks and control characters, e.g. a path or the value of a variable."""
    text = str(value)
    if not text.isprintable():
        raise _refused(key, text, "has a line break or a control character", "remove it")
    return text


def word(value: object, key: str) -> str:
    """Name of a partition, account, reservation, quality of service; also a comma-separated list of them."""
    return _matching(_LIST, value, key, "letters, digits and _ . , + : / @ -")


def expression(value: object, key: str) -> str:
    """A --constraint: features with & | ! * ( ) [ ]."""
    return _matching(_EXPRESSION, value, key, "letters, digits and _ . , + : / @ - & | ! * ( ) [ ] =")


def name(value: object, key: str) -> str:
    """Name of a job or of a profile."""
    text = _matching(_NAME, value, key, "letters, digits and _ . -, the first one a letter or digit")
    if len(text) > _MAX_NAME:
        raise _refused(key, text[:20] + "...", f"has {len(text)} characters", f"use at most {_MAX_NAME}")
    return text


def memory(value: object, key: str) -> str:
    """An amount of memory, e.g. 480G."""
    return _matching(_MEMORY, value, key, "a number with K, M, G or T, e.g. 480G")


def time_limit(value: object, key: str) -> str:
    """A time limit as Slurm writes it, e.g. 24:00:00 or 2-12:00:00; a bare number is minutes."""
    return _matching(_TIME, value, key, "e.g. 24:00:00 or 2-12:00:00")


def option(value: object, key: str) -> str:
    """The long name of an sbatch or srun option, without dashes."""
    return _matching(_OPTION, value, key, "the long name without dashes, e.g. mail-type")


def variable(value: object, key: str) -> str:
    """Name of an environment variable."""
    return _matching(_VARIABLE, value, key, "letters, digits and _")


def _matching(pattern: re.Pattern[str], value: object, key: str, allowed: str) -> str:
    text = line(value, key)
    if not text:
        raise _refused(key, text, "is empty", f"give it, or leave the key out ({allowed})")
    if text.startswith("-"):
        raise _refused(key, text, "starts with a dash, which Slurm would read as an option", "write the value alone")
    if not pattern.fullmatch(text):
        raise _refused(key, text, "cannot stand in a Slurm script", f"allowed: {allowed}")
    return text


def _refused(key: str, value: str, what: str, cure: str) -> ConfigError:
    return ConfigError(f"{key}: {value!r} {what} -> {cure}")
