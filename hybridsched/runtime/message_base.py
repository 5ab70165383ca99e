"""What every message is, and the two replies that carry nothing or a failure."""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, tag_field="t", omit_defaults=True):
    """Base of all messages."""


class Ok(Message, frozen=True):
    """Empty reply."""


class Failure(Message, frozen=True):
    """Reply of a call whose handler raised."""

    kind: str  #: exception class name
    text: str
    data: dict[str, Any] = {}
