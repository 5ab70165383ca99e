"""Messages that arrive again are not handled again; late ones are."""

from __future__ import annotations

import random

from hybridsched.runtime import messages as m
from hybridsched.runtime import wire
from hybridsched.runtime.endpoint import Endpoint
from hybridsched.runtime.once import MOST_GAPS, Numbering, Seen


def test_each_message_counts_once_in_whatever_order_and_however_often_it_arrives() -> None:
    numbering, seen, draw = Numbering("first"), Seen(), random.Random(1)
    serials = [numbering.next("b") for _ in range(200)]
    arriving = [serial for serial in serials for _ in range(draw.randint(1, 3))]
    for i in range(0, len(arriving), 10):  # what is near in time may overtake
        part = arriving[i : i + 10]
        draw.shuffle(part)
        arriving[i : i + 10] = part
    handled = [serial for serial in arriving if not seen.again("a", serial)]
    assert sorted(handled) == serials


def test_a_lost_message_is_no_repetition_when_it_arrives_late() -> None:
    numbering, seen = Numbering(""), Seen()
    first, second, third = (numbering.next("b") for _ in range(3))
    assert [False, False] == [seen.again("a", first), seen.again("a", third)]
    assert [False, True] == [seen.again("a", second), seen.again("a", second)]


def test_receivers_senders_and_lives_are_counted_apart() -> None:
    numbering, seen = Numbering("one"), Seen()
    assert numbering.next("b") == numbering.next("c")
    serial = Numbering("one").next("b")
    assert not seen.again("a", serial)
    assert not seen.again("other", serial)
    assert not seen.again("a", Numbering("two").next("b")), "a worker that lives again begins anew"
    assert seen.again("a", serial)


def test_memory_of_gaps_is_bounded() -> None:
    numbering, seen = Numbering(""), Seen()
    serials = [numbering.next("b") for _ in range(4 * MOST_GAPS)]
    for serial in serials[::2]:
        seen.again("a", serial)
    assert all(len(gaps) <= MOST_GAPS for gaps in seen._gaps.values())
    assert not seen.again("a", serials[-1]) and seen.again("a", serials[1])


def test_an_endpoint_handles_a_repeated_message_once_also_over_the_wire() -> None:
    posted: list[m.Envelope] = []
    sender = Endpoint("standalone.0", posted.append, "life")
    handled: list[str] = []
    receiver = Endpoint("controller", posted.append)
    receiver.on(m.Flush, lambda order, _src: handled.append(order.reason))
    sender.tell("controller", m.Flush("one"))
    sender.tell("controller", m.Flush("two"))
    for envelope in (posted[0], posted[1], posted[0], posted[1]):
        receiver.deliver(wire.decode(wire.encode(envelope)))
    assert ["one", "two"] == handled


def test_messages_without_a_number_are_never_taken_for_repetitions() -> None:
    seen = Seen()
    assert [False, False] == [seen.again("a", 0), seen.again("a", 0)]
