"""How a micro-batch is shared out along the sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridsched.trainers.context_parallel import positions, share
from hybridsched.trainers.forward import pad_rows


def test_every_rank_holds_an_early_and_a_late_chunk():
    assert [0, 1, 6, 7] == positions(0, 2, 8).tolist()
    assert [2, 3, 4, 5] == positions(1, 2, 8).tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_hold_every_action_once_at_its_own_token_and_target(size):
    rng = np.random.default_rng(0)
    drawn = [rng.permutation(100)[:length].astype(np.int32) for length in (9, 5, 14)]
    rows = pad_rows([(tokens, np.arange(2, len(tokens))) for tokens in drawn], torch.device("cpu"))
    seen = []
    for rank in range(size):
        part = share(rows, rank, size)
        assert len(part.held) == len(part.rows.sources) == len(part.rows.targets)
        assert torch.equal(rows.targets[part.held], part.rows.targets)
        predicting = part.rows.tokens.reshape(-1)[part.rows.sources]
        assert torch.equal(rows.tokens.reshape(-1)[rows.sources[part.held]], predicting)
        seen += part.held.tolist()
        assert rows.targets.shape[0] == part.n_actions
    assert list(range(rows.targets.shape[0])) == sorted(seen)


def test_a_row_of_one_token_is_filled_up():
    rows = pad_rows([(np.array([4, 5], np.int32), np.array([1]))], torch.device("cpu"))
    parts = [share(rows, rank, 2) for rank in range(2)]
    assert [(1, 2), (1, 2)] == [tuple(part.rows.tokens.shape) for part in parts]
    assert [1, 0] == [len(part.held) for part in parts]
