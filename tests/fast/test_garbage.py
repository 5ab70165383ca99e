"""Rank 0 and simulated runs look through their objects rarely."""

from __future__ import annotations

import gc

from hybridsched.runtime.garbage import RARELY, collect_rarely


def test_what_lives_is_set_aside_and_garbage_is_still_found() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        collect_rarely()
        assert RARELY == gc.get_threshold()
        assert gc.get_freeze_count() > frozen
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
