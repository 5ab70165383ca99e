"""hybridsched: lend trainer GPUs to generation while they would only wait (Slurm-native, fully-async RL)."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__", "load_config"]


def __getattr__(name: str) -> object:
    # Lazy: `import hybridsched` must stay cheap on a login node.
    if name == "load_config":
        from hybridsched.config import load_config

        return load_config
    raise AttributeError(f"module 'hybridsched' has no attribute {name!r}")
