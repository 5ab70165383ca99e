"""A bounded share of the deterministic simulation; `make simtest` runs thousands of seeds."""

from __future__ import annotations

import misfortune
import pytest


@pytest.mark.parametrize("block", range(10))
def test_random_misfortunes_lose_nothing_and_every_wait_ends(block: int) -> None:
    """Twelve seeds a block. A failing seed is replayed with `python tests/fast/misfortune.py SEED`."""
    for seed in range(block * 12, block * 12 + 12):
        try:
            misfortune.play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: replay with `python tests/fast/misfortune.py {seed}`") from error


def test_a_seed_replays_byte_for_byte() -> None:
    assert misfortune.play(5)[0].log.dump() == misfortune.play(5)[0].log.dump()
