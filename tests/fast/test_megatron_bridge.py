"""megatron-bridge as the source of weights: what is asked of it, and what is said where it is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridsched.errors import ConfigError
from hybridsched.models.config import ModelConfig
from hybridsched.trainers.megatron_bridge import BridgeWeights

CONFIG = ModelConfig(4, 2, 2, 1, 1, 1, 2, tie_word_embeddings=True)


class FakeBridge:
    """Exports what was loaded, under Hugging Face names, in an order of its own."""

    def __init__(self, folder: str) -> None:
        self.folder, self.walked = folder, 0

    def load_hf_weights(self, models: list[torch.nn.Module]) -> None:
        with torch.no_grad():
            models[0].weight.fill_(7.0)

    def export_hf_weights(self, models, cpu: bool, show_progress: bool):
        assert not cpu
        for name in ("b", "lm_head.weight", "a"):
            self.walked += 1
            yield name, models[0].weight * 2


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BridgeWeights:
    auto = SimpleNamespace(from_hf_pretrained=FakeBridge)
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace(bridge=SimpleNamespace(AutoBridge=auto)))
    monkeypatch.setitem(sys.modules, "megatron.bridge", SimpleNamespace(AutoBridge=auto))
    made = BridgeWeights(torch.nn.Linear(2, 3, bias=False), CONFIG, tmp_path)
    made.load(tmp_path)
    return made


def test_the_bridge_loads_the_model_and_its_order_is_kept(weights):
    assert [("b", (3, 2), "float32"), ("a", (3, 2), "float32")] == [
        (spec.name, spec.shape, spec.dtype) for spec in weights.specs()
    ]
    walk = dict(weights.gather())
    assert ["b", "a"] == list(walk)
    assert 14.0 == float(walk["a"][0, 0])


def test_a_walk_given_up_is_finished(weights):
    before = weights._bridge.walked
    ticks: list[int] = []
    walk = weights.gather(lambda: ticks.append(1))
    next(walk)
    walk.close()
    assert 3 == weights._bridge.walked - before
    assert 2 == len(ticks)
    weights.gather().close()  # not begun
    assert 6 == weights._bridge.walked - before


def test_a_missing_bridge_is_told_with_its_cure(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(ConfigError, match=r"weight_source is megatron-bridge.*use builtin"):
        BridgeWeights(torch.nn.Linear(2, 2), CONFIG, tmp_path)
