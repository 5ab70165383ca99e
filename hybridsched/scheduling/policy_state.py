"""Plain attribute values to JSON-ready data and back: the default checkpoint of a policy.

Invariant: ``decode_like(json(encode(v)), v) == v`` for every value that ``is_plain``. JSON has neither tuples nor
sets nor dict keys that are not strings; such containers travel as ``{"__kind__": ..., "items": [...]}``, so they come
back as what they were also where nothing of the same type is there to compare with. Not here: arrays, tensors, objects
(a policy that holds such overrides ``state_dict``).
"""

from __future__ import annotations

from collections import deque
from typing import Any

_SCALARS = (bool, int, float, str)
_KIND = "__kind__"


def is_plain(value: Any) -> bool:
    """True when ``encode`` can carry the value. Types are compared exactly: a subclass may hold more than it shows."""
    if value is None or type(value) in _SCALARS:
        return True
    if type(value) in (list, tuple, deque, set, frozenset):
        return all(is_plain(item) for item in value)
    if type(value) is dict:
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    return False


def encode(value: Any) -> Any:
    """JSON-ready form of a plain value. Raises TypeError for any other."""
    if value is None or type(value) in _SCALARS:
        return value
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) in (tuple, deque):
        maxlen = value.maxlen if type(value) is deque else None
        return {_KIND: type(value).__name__, "items": [encode(item) for item in value], "maxlen": maxlen}
    if type(value) in (set, frozenset):
        # Sorted by text so that two checkpoints of one state are byte for byte equal.
        return {_KIND: type(value).__name__, "items": [encode(item) for item in sorted(value, key=repr)]}
    if type(value) is dict:
        if all(type(k) is str for k in value) and _KIND not in value:
            return {k: encode(v) for k, v in value.items()}
        return {_KIND: "dict", "items": [[encode(k), encode(v)] for k, v in value.items()]}
    raise TypeError(f"{type(value).__name__} is not plain data")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {k: _decode(v) for k, v in value.items()}
    items = [_decode(item) for item in value["items"]]
    if kind == "dict":
        return dict(items)
    if kind == "deque":
        return deque(items, maxlen=value["maxlen"])
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def decode_like(value: Any, current: Any) -> Any:
    """Undo ``encode``. A plain list becomes the container type ``current`` has (hand-written or older states)."""
    decoded = _decode(value)
    if type(decoded) is list and type(current) in (tuple, set, frozenset):
        return type(current)(decoded)
    if type(decoded) is list and type(current) is deque:
        return deque(decoded, maxlen=current.maxlen)
    return decoded
