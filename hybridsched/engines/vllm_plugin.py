"""What hybridsched changes inside vLLM's processes. Entry point ``vllm.general_plugins: hybridsched = ...:register``.

Owns: the name of our weight-transfer engine; and, in the processes of an engine that we started (ACTIVE_VARIABLE),
plain linear layers on CPU, AMX permission, and the promise that none of them outlives the one that started it.

Invariants: `register` may run any number of times, in the process of the engine's user, in EngineCore and in its
workers; a vLLM that we did not start is left as it is. Importing this module imports neither vLLM nor torch. What a
forked process inherits is set at the fork, for plugins are not loaded again there.

Does not: move weights (vllm_weights does) or start anything.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

BACKEND = "hybridsched"  #: of vLLM's WeightTransferConfig
ACTIVE_VARIABLE = "HYBRIDSCHED_VLLM"  #: set where an engine of ours starts; its processes inherit it
#: "0" leaves vLLM's own packed linear layers on CPU: faster for large batches, but weights cannot be freed or read.
PLAIN_LINEAR_VARIABLE = "HYBRIDSCHED_VLLM_PLAIN_LINEAR"

_PR_SET_PDEATHSIG = 1
_done: set[str] = set()


def register() -> None:
    """Make this vLLM process ours. Idempotent."""
    _once("weights", _register_weight_transfer)
    if os.environ.get(ACTIVE_VARIABLE):
        _once("linear", _keep_linear_weights)
        _once("amx", _allow_amx)
        _once("lifeline", _tie_to_parent)


def plain_linear() -> bool:
    """Whether linear layers on CPU compute from their own weights (see PLAIN_LINEAR_VARIABLE)."""
    return os.environ.get(PLAIN_LINEAR_VARIABLE, "1") != "0"


def _once(name: str, act: Callable[[], None]) -> None:
    if name not in _done:
        act()
        _done.add(name)


def _register_weight_transfer() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if BACKEND not in Factory._registry:
        Factory.register_engine(BACKEND, "hybridsched.engines.vllm_weights", "BucketTransferEngine")


def _keep_linear_weights() -> None:
    """On CPU, vLLM packs the weights of a linear layer for oneDNN and empties the layer.

    What is left cannot be summed up, refilled in place or given back in sleep, and a tied output layer would keep its
    packed copy of old weights. Plain layers agree with packed ones to rounding, at no cost at the sizes used on CPUs.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not plain_linear():
        return
    import torch
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        del remove_weight
        layer.cpu_linear = torch.nn.functional.linear

    keep.hybridsched = utils.dispatch_cpu_unquantized_gemm  # type: ignore[attr-defined]  # what it replaces
    utils.dispatch_cpu_unquantized_gemm = keep


def _allow_amx() -> None:
    """bfloat16 on CPUs with AMX dies of SIGILL where oneDNN uses tiles that the kernel was never asked for."""
    import torch

    supported, start = getattr(torch.cpu, "_is_amx_tile_supported", None), getattr(torch.cpu, "_init_amx", None)
    if supported is not None and start is not None and supported():
        start()


def _tie_to_parent() -> None:
    """A spawned child arms its parent-death signal now; children that will be forked from here do it at the fork."""
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        _die_with(parent.pid)
    here: list[int] = []
    os.register_at_fork(before=lambda: here.append(os.getpid()), after_in_parent=here.pop, after_in_child=_forked(here))


def _forked(here: list[int]) -> Callable[[], None]:
    def after() -> None:
        _die_with(here.pop())
        # The child shares the pipe through which the parent's event loop learns of signals: one sent to the child
        # would be handled by the parent.
        signal.set_wakeup_fd(-1)

    return after


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; end at once when its process is gone already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused; hybridsched needs Linux")
    if os.getppid() != parent:
        os._exit(1)
