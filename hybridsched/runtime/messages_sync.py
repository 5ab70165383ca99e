"""Messages of a weight sync and of the same-node hand-over. Import them from `messages`."""

from __future__ import annotations

import numpy as np

from hybridsched.model import TensorSpec, WeightVersion
from hybridsched.runtime.message_base import Message


class OpenSync(Message, frozen=True):
    """To trainer.0: make (or keep) the broadcast group of these members; replied with where to meet."""

    attempt: int
    members: list[str]
    fresh: bool


class SyncAddress(Message, frozen=True):
    """Where receivers meet the sender; ``secret`` is part of every key. ``specs``: what will be sent."""

    address: str
    secret: str
    specs: list[TensorSpec]


class SendWeights(Message, frozen=True):
    """To trainer.0."""

    attempt: int
    version: WeightVersion
    members: list[str]


class ReceiveWeights(Message, frozen=True):
    """To a replica. rank 0 is the sender."""

    attempt: int
    version: WeightVersion
    members: list[str]
    rank: int
    address: SyncAddress
    keep_kv: bool


class AbortSync(Message, frozen=True):
    """Break a running transfer; survivors repeat the whole sync."""

    attempt: int
    reason: str


class JoinGather(Message, frozen=True):
    """To a trainer that hands nothing out while another does: take part in gathering the sharded weights. Ok after."""


class WriteHandover(Message, frozen=True):
    """To the first trainer of a node: publish the weights for the hybrids of this node."""

    version: WeightVersion
    name: str
    readers: list[str]


class ReadHandover(Message, frozen=True):
    """To a hybrid: take the weights its node's trainer published."""

    version: WeightVersion
    name: str
    specs: list[TensorSpec]


class SyncDone(Message, frozen=True):
    """A transfer ended well."""

    seconds: float
    n_bytes: int
    phases: dict[str, float] = {}
    checksum: str = ""


class Probe(Message, frozen=True):
    """Teacher-force these (prompt, response) pairs; truth test."""

    sequences: list[tuple[np.ndarray, np.ndarray]]
    temperature: float


class ProbeResult(Message, frozen=True):
    """float32 log-probs per sequence."""

    logprobs: list[np.ndarray]
