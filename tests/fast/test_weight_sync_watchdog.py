"""The watchdog fires once: at the deadline without progress, or when ordered."""

from __future__ import annotations

import threading

import pytest

from hybridsched.weight_sync.watchdog import BucketWatchdog


class Bell:
    def __init__(self) -> None:
        self.rung = threading.Event()
        self.reasons: list[str] = []

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.rung.set()


def test_fires_when_no_bucket_finishes() -> None:
    bell = Bell()
    with BucketWatchdog(0.05, bell):
        assert bell.rung.wait(10)
    assert bell.reasons == ["no bucket finished within 0.05 s (before the first bucket)"]


def test_says_how_far_it_had_come() -> None:
    bell = Bell()
    with BucketWatchdog(0.05, bell) as dog:
        dog.progress(3, 8)
        assert bell.rung.wait(10)
    assert bell.reasons == ["no bucket finished within 0.05 s (after bucket 3 of 8)"]


def test_an_order_fires_at_once_and_only_once() -> None:
    bell = Bell()
    with BucketWatchdog(60, bell) as dog:
        dog.order_abort("the agent says so")
        dog.order_abort("again")
        assert dog.fired == "the agent says so"
    assert bell.reasons == ["the agent says so"]


def test_stopped_in_time_it_never_fires() -> None:
    bell = Bell()
    with BucketWatchdog(0.2, bell) as dog:
        dog.progress(1, 1)
    assert not bell.rung.wait(0.4)
    assert dog.fired is None


def test_stop_may_come_twice_and_from_its_own_callback() -> None:
    done = threading.Event()

    def on_expire(reason: str) -> None:
        dog.stop()
        done.set()

    dog = BucketWatchdog(0.02, on_expire)
    dog.start()
    assert done.wait(10)
    dog.stop()


def test_a_deadline_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        BucketWatchdog(0, Bell())
