"""The real engine and the real trainer of a configuration, chosen independently of each other and of the device.

Owns the tables from `actor_rollout_ref.rollout.name` and `actor_rollout_ref.actor.strategy` to classes. Everything is
imported when it is asked for: torch takes seconds, vLLM more, and Megatron Core may not be installed.

Does not: know emulated parts (`build` does), start anything, or decide what belongs together (config.checks).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridsched.config.derived import Derived
from hybridsched.config.schema import RunConfig
from hybridsched.engines.base import GenerationEngine
from hybridsched.errors import ConfigError
from hybridsched.runtime.plan import WorkerSpec
from hybridsched.runtime.workers import settings
from hybridsched.trainers.base import Trainer

OnDeath = Callable[[Exception], None]

#: strategy -> (class, called as Class(config, device=..., scratch=...); the extra that installs what it needs)
_TRAINERS = {
    "torch": ("hybridsched.trainers.torch_trainer:TorchTrainer", None),
    "megatron": ("hybridsched.trainers.megatron_trainer:MegatronTrainer", "megatron"),
}


def device_of(config: RunConfig) -> str:
    """ "cpu" or "cuda": what trainer.device means on this machine."""
    if config.trainer.device != "auto":
        return config.trainer.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def make_trainer(config: RunConfig, device: str, scratch: Path) -> Trainer:
    """The trainer of actor.strategy, not yet started. Raises ConfigError when it is not installed."""
    strategy = config.actor_rollout_ref.actor.strategy
    _bound_threads(config)
    path, extra = _TRAINERS[strategy]
    trainer: Trainer = _load(path, f"actor_rollout_ref.actor.strategy: {strategy}", extra)(
        config, device=device, scratch=scratch
    )
    return trainer


def make_engine(
    config: RunConfig, derived: Derived, spec: WorkerSpec, device: str, on_death: OnDeath
) -> GenerationEngine:
    """The engine of rollout.name, not yet started. Raises ConfigError when it has no model.

    ``on_death`` is called on the event loop when a process of the engine dies: this worker is then of no use.
    """
    name = config.actor_rollout_ref.rollout.name
    model = config.actor_rollout_ref.model.path
    if model is None:
        raise ConfigError(f"actor_rollout_ref.model.path is null; the {name} engine needs a Hugging Face folder")
    _bound_threads(config)
    return _ENGINES[name](model, config, derived, spec, device, on_death)


def _torch_engine(
    model: str, config: RunConfig, derived: Derived, _spec: WorkerSpec, device: str, _on_death: OnDeath
) -> GenerationEngine:
    from hybridsched.data.tokenizer import stop_token_ids
    from hybridsched.engines.torch_engine import TorchEngine

    options = settings.torch_engine_options(config, derived)
    return TorchEngine(model, device=device, stop_token_ids=stop_token_ids(model), **options)


def _vllm_engine(
    model: str, config: RunConfig, derived: Derived, spec: WorkerSpec, device: str, on_death: OnDeath
) -> GenerationEngine:
    from hybridsched.data.tokenizer import stop_token_ids
    from hybridsched.engines.vllm_engine import VllmEngine

    options = settings.vllm_options(config, derived, spec)
    return VllmEngine(model, options, device=device, stop_token_ids=stop_token_ids(model), on_death=on_death)


_ENGINES: dict[str, Callable[[str, RunConfig, Derived, WorkerSpec, str, OnDeath], GenerationEngine]] = {
    "torch": _torch_engine,
    "vllm": _vllm_engine,
}


def _bound_threads(config: RunConfig) -> None:
    import torch

    torch.set_num_threads(config.local.threads_per_worker)


def _load(path: str, key: str, extra: str | None) -> Any:
    """The class behind ``module:Class``. ``extra``: what to install when its module cannot be imported."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        cure = f"pip install 'hybridsched[{extra}]'" if extra else "install hybridsched again"
        raise ConfigError(f"{key} cannot be used here: {error}; {cure}") from error
