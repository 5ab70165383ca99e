"""At most once: a message that arrives again is not handled again.

Owns the numbering of an endpoint's messages per receiver (`Numbering`) and the memory of what has arrived per sender
(`Seen`). MPI and local sockets repeat nothing; whoever relays a message again (a retry, a transport of another make)
must not start a second generation or restart a worker that runs. Invariants: numbers of one life of a sender rise by
one per receiver; what is remembered is a high mark and the gaps below it, bounded by ``MOST_GAPS`` per sender (older
gaps count as arrived: such a message would be as late as a thousand newer ones).

Does not ask for lost messages again: calls have deadlines for that.
"""

from __future__ import annotations

import zlib

#: Gaps remembered per sender.
MOST_GAPS = 1024
_LIFE_BITS = 32


class Numbering:
    """Serials of what one life of an endpoint sends."""

    def __init__(self, life: str) -> None:
        """life: the incarnation of a worker, which distinguishes it from its predecessors of the same name."""
        self._life = zlib.crc32(life.encode()) << _LIFE_BITS
        self._sent: dict[str, int] = {}

    def next(self, dst: str) -> int:
        """The number of the next message to ``dst``."""
        number = self._sent[dst] = self._sent.get(dst, 0) + 1
        return self._life | number


class Seen:
    """What has arrived."""

    def __init__(self) -> None:
        self._high: dict[tuple[str, int], int] = {}
        self._gaps: dict[tuple[str, int], dict[int, None]] = {}

    def again(self, src: str, serial: int) -> bool:
        """True when this message arrived before; notes it down otherwise. Serial 0 never repeats."""
        if not serial:
            return False
        who, number = (src, serial >> _LIFE_BITS), serial & ((1 << _LIFE_BITS) - 1)
        high = self._high.get(who, 0)
        if number <= high:
            gaps = self._gaps.get(who)
            if gaps is None or number not in gaps:
                return True
            del gaps[number]
            return False
        if number > high + 1:
            gaps = self._gaps.setdefault(who, {})
            gaps.update(dict.fromkeys(range(max(high + 1, number - MOST_GAPS), number)))
            while len(gaps) > MOST_GAPS:
                del gaps[next(iter(gaps))]
        self._high[who] = number
        return False
