"""Megatron Core without CUDA: the few places of it that insist on a GPU, pointed at the CPU. Inert where CUDA is there.

Megatron Core has no CPU mode, but almost all of it is ordinary torch. With these substitutions the whole trainer runs
on gloo and CPU tensors with the same numbers: what the tests use, and `hybridsched run` on a machine without GPUs.

Owns every such substitution; nothing else in the package patches Megatron or torch. `prepare` has to be called before
`megatron.core` is imported, `finish` after the groups exist. Both are idempotent and process-wide: a process that ran
them is a Megatron CPU process until it ends.

Does not: make Megatron fast on CPU, or support sequence parallelism there (its torch norms refuse it).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_prepared = False


def prepare() -> bool:
    """Before megatron.core is imported. Returns False, having done nothing, where CUDA is available."""
    global _prepared
    if torch.cuda.is_available():
        return False
    if not _prepared:
        _prepared = True
        _stand_in_for_cuda()
    return True


def finish(seed: int, expert_seed: int) -> None:
    """After the model-parallel groups exist, before the model is built: random states, optimizer, expert dispatch.

    seed: differs between tensor-parallel ranks; expert_seed: between expert-parallel ranks.
    """
    if not _prepared:
        return
    from megatron.core.tensor_parallel import random as megatron_random

    tracker = _CpuRandomStates()
    tracker.add("model-parallel-rng", seed)
    tracker.add("expert-parallel-rng", expert_seed)
    megatron_random._CUDA_RNG_STATE_TRACKER = tracker
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            vars(module)["get_cuda_rng_tracker"] = lambda *args, **kwargs: tracker
    _use_cpu_adam()
    _dispatch_experts_on_cpu()


#: torch's functions that make tensors, as far as Megatron calls them with ``device="cuda"`` written out.
_FACTORIES = ("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "ones", "ones_like", "rand")
_MORE_FACTORIES = ("randint", "randn", "tensor", "zeros", "zeros_like")


def _cuda_means_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The factory, which makes a CPU tensor when CUDA is asked for.

    Not a torch function mode: those are per thread and absent while autograd runs a recomputed layer backward.
    """

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # nothing is copied to a GPU
        return make(*args, **kwargs)

    return made


class _NoStream:
    """Streams and events order work on a GPU; on the CPU everything is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Done already."""

    def record(self, stream: Any = None) -> None:
        """Done already."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Done already."""
        return True

    def record_event(self, event: Any = None) -> _NoStream:
        """An event that has happened."""
        return _NoStream()

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _stand_in_for_cuda() -> None:
    """torch.cuda as far as Megatron calls it without asking whether there is a GPU."""
    cuda, tensor = torch.cuda, torch.Tensor
    for name in (*_FACTORIES, *_MORE_FACTORIES):
        setattr(torch, name, _cuda_means_cpu(getattr(torch, name)))
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *args, **kwargs: None
    tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None
    # Recompute saves and restores the random state of its device.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    plain_type = tensor.type

    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Optimizers and clipping ask for 'torch.cuda.FloatTensor'."""
        answer = plain_type(self, *args, **kwargs)
        if isinstance(answer, str) and answer.startswith("torch.") and "cuda" not in answer:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    tensor.type = type_of


class _CpuRandomStates:
    """Megatron's tracker of named random states, over torch's CPU generator."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}

    def get_states(self) -> dict[str, Tensor]:
        """Copy of the states by name."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states."""
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """A new state from a seed; the default generator is left as it was."""
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        self._states[name] = torch.get_rng_state()
        torch.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Inside, random numbers come from the named state, which moves on."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(before)


class _CpuAdam(torch.optim.Optimizer):  # type: ignore[misc]  # torch is untyped to mypy here
    """AdamW with the state layout of the fused CUDA one (the step counter is in the group, moments are float32).

    The distributed optimizer's checkpoints rely on that layout, so theirs are the same on CPU and GPU.
    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **unused: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        """One update of every parameter with a gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)  # an empty one counts too: checkpoints hold one step for all ranks

    def _step_group(self, group: dict[str, Any]) -> None:
        group["step"] = int(group.get("step", 0)) + 1
        beta1, beta2 = group["betas"]
        first, second = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            gradient = parameter.grad.float()
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            divisor = (state["exp_avg_sq"].sqrt() / second**0.5).add_(group["eps"])
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_((state["exp_avg"] / divisor).to(parameter.dtype), alpha=-group["lr"] / first)


def _use_cpu_adam() -> None:
    """Megatron takes the fused Adam of Transformer Engine or Apex, which need CUDA."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = _CpuAdam
    optimizer.USING_PYTORCH_OPTIMIZER = distrib_optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True


def _dispatch_experts_on_cpu() -> None:
    """Expert dispatch counts tokens on the host, and names a Transformer Engine kernel even where there is none."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 defines it only beside Transformer Engine
        moe_utils.te_general_gemm = None
