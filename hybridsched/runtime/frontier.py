"""Which positions of the prompt stream are done: the lowest unfinished one, and the finished ones above it."""

from __future__ import annotations

from collections.abc import Iterable


class Frontier:
    """A set of non-negative integers that is dense from 0: memory is bounded by the work in flight."""

    def __init__(self, lowest: int = 0, above: Iterable[int] = ()) -> None:
        self._lowest = lowest
        self._above: set[int] = set(above)
        self._settle()

    @property
    def lowest(self) -> int:
        """The lowest position that is not done."""
        return self._lowest

    @property
    def above(self) -> list[int]:
        """Done positions above ``lowest``, sorted."""
        return sorted(self._above)

    def __contains__(self, position: int) -> bool:
        return position < self._lowest or position in self._above

    def __len__(self) -> int:
        return self._lowest + len(self._above)

    def add(self, position: int) -> bool:
        """Mark as done; False when it was done already."""
        if position in self:
            return False
        self._above.add(position)
        self._settle()
        return True

    def _settle(self) -> None:
        while self._lowest in self._above:
            self._above.remove(self._lowest)
            self._lowest += 1
