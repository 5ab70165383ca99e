"""A receiver in its own process, for the tests that kill one. Prints one JSON line per attempt.

argv: store address, secret, then one "attempt:rank:world:die" per attempt; with die >= 0 it kills itself while
loading that bucket.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from hybridsched.errors import WeightSyncError
from hybridsched.model import TensorSpec, WeightVersion
from hybridsched.weight_sync.broadcast import receive_weights
from hybridsched.weight_sync.group import BroadcastGroup, WeightSyncBroken

SPECS = [TensorSpec(f"layer.{i}", (64, 1024), "float32") for i in range(12)]
VERSION = WeightVersion(0, 3)
BUCKET = 256 * 1024  # one tensor each


def receive(address: str, secret: str, attempt: int, rank: int, world: int, die: int) -> dict[str, Any]:
    """One attempt; the outcome as a dictionary."""
    sums: dict[str, float] = {}

    def load(tensors: dict[str, Any]) -> None:
        if len(sums) == die:
            os.kill(os.getpid(), signal.SIGKILL)
        for name, tensor in tensors.items():
            sums[name] = float(tensor.double().sum())

    group = BroadcastGroup(rank=rank, world_size=world, secret=secret, attempt=attempt)
    try:
        group.join(address, 30)
        receive_weights(group, SPECS, version=VERSION, bucket_bytes=BUCKET, bucket_timeout_s=30, load=load)
    except WeightSyncError as error:
        missing = list(error.missing) if isinstance(error, WeightSyncBroken) else None
        return {"ok": False, "error": str(error), "missing": missing}
    finally:
        group.close()
    return {"ok": True, "sums": sums}


if __name__ == "__main__":
    for turn in sys.argv[3:]:
        print(json.dumps(receive(sys.argv[1], sys.argv[2], *map(int, turn.split(":")))), flush=True)
