"""How work is split: samples over data-parallel ranks, responses over micro-batches.

Owns two pure decisions on lengths (tokens); it knows nothing of samples, tensors or ranks' processes, and imports only
the standard library, so that the controller may use it. Both are deterministic, lose nothing and repeat nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class _Partial:
    """A partial solution of the differencing method: k parts, heaviest first."""

    loads: tuple[int, ...]
    members: tuple[tuple[int, ...], ...] = field(compare=False)

    @property
    def spread(self) -> int:
        return self.loads[0] - self.loads[-1]

    def merged(self, other: _Partial) -> _Partial:
        """Heaviest part with lightest part, and so on inwards, sorted again."""
        pairs = [
            (load + other_load, mine + theirs)
            for load, mine, other_load, theirs in zip(
                self.loads, self.members, reversed(other.loads), reversed(other.members), strict=True
            )
        ]
        pairs.sort(key=lambda pair: (-pair[0], pair[1]))
        return _Partial(tuple(load for load, _ in pairs), tuple(members for _, members in pairs))


def partition_samples(lengths: Sequence[int], k: int) -> list[list[int]]:
    """Split indices 0..len(lengths)-1 into k parts whose sums of lengths are nearly equal.

    Largest differencing method (Karmarkar and Karp, "The differencing method of set partitioning", 1982): the two
    partial solutions with the largest spread are merged so that their spreads cancel. A length below one counts as one,
    so no part is empty when there are at least k items; with fewer items the last parts are empty. Indices inside a
    part ascend; parts are ordered by their smallest index, empty ones last.

    Raises ValueError when k < 1.
    """
    if k < 1:
        raise ValueError(f"cannot split into {k} parts")
    if not lengths:
        return [[] for _ in range(k)]
    heap: list[tuple[int, int, _Partial]] = []
    for index, length in enumerate(lengths):
        rest = ((),) * (k - 1)
        partial = _Partial((max(1, length), *(0,) * (k - 1)), ((index,), *rest))
        heap.append((-partial.spread, index, partial))
    heapq.heapify(heap)
    ticket = len(heap)  # keeps ties deterministic: older partial solutions first
    while len(heap) > 1:
        merged = heapq.heappop(heap)[2].merged(heapq.heappop(heap)[2])
        heapq.heappush(heap, (-merged.spread, ticket, merged))
        ticket += 1
    parts = [sorted(members) for members in heap[0][2].members]
    return sorted(parts, key=lambda part: part[0] if part else len(lengths))


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group indices into micro-batches of at most ``max_tokens`` padded tokens (rows x longest row).

    Rows are taken longest first, so that neighbours have similar lengths and little is padded; a row longer than
    ``max_tokens`` gets a micro-batch of its own. Among the groupings with the fewest micro-batches the one whose
    largest padded size is smallest is chosen, so the micro-batches cost about the same.

    Raises ValueError when max_tokens < 1.
    """
    if max_tokens < 1:
        raise ValueError(f"a micro-batch cannot hold {max_tokens} tokens")
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    fewest = len(_fill(order, lengths, max_tokens))
    low, high = 1, max_tokens  # smallest capacity that still needs no more micro-batches
    while low < high:
        middle = (low + high) // 2
        if len(_fill(order, lengths, middle)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return _fill(order, lengths, high)


def _fill(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Cut the length-sorted order wherever one more row would exceed the capacity."""
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        if groups and (len(groups[-1]) + 1) * longest <= capacity:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = max(1, lengths[index])
    return groups
