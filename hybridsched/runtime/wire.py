"""Envelopes as bytes: msgpack with numpy arrays as (dtype, raw bytes). Never a pickle.

A relaying agent reads only the header (`destination`); the body is decoded where it is handled.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec
import numpy as np

from hybridsched.runtime.messages import Envelope, Message


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """What travels: the envelope with its body still encoded."""

    src: str
    dst: str
    call: int
    reply: bool
    body: msgspec.Raw
    serial: int = 0


def _encode_hook(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        return (obj.dtype.str, np.ascontiguousarray(obj).tobytes())
    if isinstance(obj, np.generic):
        return obj.item()
    raise NotImplementedError(f"{type(obj).__name__} cannot travel in a message")


def _decode_hook(kind: Any, obj: Any) -> Any:
    if kind is np.ndarray or getattr(kind, "__origin__", None) is np.ndarray:
        dtype, payload = obj
        return np.frombuffer(payload, dtype=np.dtype(dtype))
    raise NotImplementedError(f"{kind} cannot be read from a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_frames = msgspec.msgpack.Decoder(_Frame)
_bodies = msgspec.msgpack.Decoder(Union[tuple(Message.__subclasses__())], dec_hook=_decode_hook)  # noqa: UP007


def encode(envelope: Envelope) -> bytes:
    """Envelope -> bytes."""
    body = msgspec.Raw(_encoder.encode(envelope.body))
    return _encoder.encode(_Frame(envelope.src, envelope.dst, envelope.call, envelope.reply, body, envelope.serial))


def decode(frame: bytes) -> Envelope:
    """Bytes -> Envelope. Raises msgspec.DecodeError (ValidationError) on foreign bytes."""
    head = _frames.decode(frame)
    return Envelope(head.src, head.dst, head.call, head.reply, _bodies.decode(head.body), head.serial)


def destination(frame: bytes) -> str:
    """Who a frame is for, without decoding its body."""
    return _frames.decode(frame).dst
