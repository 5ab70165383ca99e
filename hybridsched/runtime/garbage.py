"""Garbage collection in processes whose live objects only grow in number: rank 0 and simulated runs.

Python looks through all live objects whenever their number has grown by a quarter, and through the young ones every
few hundred allocations. With thousands of replicas that stops the event loop for seconds and finds next to nothing:
reference counts free almost everything here. Does not: switch the collection off.
"""

from __future__ import annotations

import gc

#: Allocations before the youngest generation is looked through, and how often the older ones follow.
RARELY = (100_000, 50, 100)


def collect_rarely() -> None:
    """For the rest of this process: what lives now is never looked through again, and what follows rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)
