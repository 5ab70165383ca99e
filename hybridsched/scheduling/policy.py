"""The public policy API: what a policy is asked, what it is told, and how it is found by name.

Owns: ``DynamicScheduleContext`` (what a policy sees), ``DynamicSchedulePolicyBase`` (what it answers), the registry
(``register_policy``, ``build_policy``, ``registered_policies``). Names, arguments and call order are those users of
the peer know; a policy file written for it runs here once its import line says ``hybridsched.scheduling``.

Invariants: a registered name means one class for the life of the process (the same file loaded again replaces
itself, anything else is refused). Nothing here does I/O, looks at a clock or draws a number.

Not here: loading policy files and YAML (``hybridsched.runtime.policy_loader``), and making odd answers of a policy
harmless (``hybridsched.scheduling.cycle``).

Call order, once per sync cycle::

    should_deactivate -> deactivate_wait_samples   before each collection, while hybrids are lent
    should_activate_after_step                     after the weight sync
    request_rebalance                              after an activation, if enabled
    update_after_step                              last, exactly once per weight version
"""

from __future__ import annotations

import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from hybridsched.errors import ConfigError
from hybridsched.scheduling.load import LoadModel
from hybridsched.scheduling.policy_state import decode_like, encode, is_plain

P = TypeVar("P", bound="type[DynamicSchedulePolicyBase]")


@dataclass
class DynamicScheduleContext:
    """What a policy sees when it is asked. Made fresh for every call; changing it changes nothing elsewhere.

    The first block is the specification's, in its order; what follows it is ours and always has a default.
    Unit of all counts: samples (one prompt with its n responses). Times are seconds.
    """

    required_samples: int  #: R, samples of one collection
    trigger_parameter_sync_step: int  #: K, collections per weight sync
    total_generated_samples: int  #: trained + usable; filtered, failed and stale ones are not in it
    expected_samples: int  #: S x max(1, version): what training has used up by now
    buffer_samples: int  #: headroom, S x staleness_threshold
    step_wait_times: list[float] = field(default_factory=list)  #: waiting time of each collection of this cycle
    step_wait_samples: list[int] = field(default_factory=list)  #: max(0, R - queue) at the start of each collection
    only_hybrid: bool = False  #: there is no standalone replica
    last_activate_duration_s: float = 0.0  #: the last activation took this long; 0: none yet
    last_deactivate_duration_s: float = 0.0  #: the last deactivation took this long, without waiting; 0: none yet

    activations: int | None = None  #: activations so far; None: not told (durations are then compared by value)
    deactivations: int | None = None  #: deactivations so far; None: not told
    remaining_samples: int | None = None  #: prompts left to generate; None: not known
    queue_size: int = 0  #: completed and not yet taken for training
    in_flight: int = 0  #: admitted and not yet completed
    hybrid_replicas: int = 0  #: H, hybrids that could be lent now (FAILED ones are not in it)
    standalone_replicas: int = 0  #: READY standalone replicas
    weight_version: int = 0  #: number of the current weight version
    now_s: float = 0.0  #: run clock; only differences mean something

    window_room: int | None = None  #: samples that may still be admitted; None: not told, as are all that follow
    lent_replicas: int = 0  #: hybrids that generate right now
    samples_per_replica: int = 0  #: samples a replica works on at a time (concurrent_samples_per_replica)
    service_s: list[float] = field(default_factory=list)  #: of the last completed samples: seconds spent on replicas
    served_s: list[float] = field(default_factory=list)  #: ... of those in flight, so far
    train_s: list[float] = field(default_factory=list)  #: training time of the last collections, without any waiting
    sync_s: float = 0.0  #: duration of the last weight sync
    load: LoadModel = field(default_factory=LoadModel)  #: how time on a replica goes with what else it works on

    step_required_samples: int = field(init=False)  #: S = R x K, derived

    def __post_init__(self) -> None:
        self.step_required_samples = self.required_samples * self.trigger_parameter_sync_step

    @property
    def surplus(self) -> int:
        """Samples generated beyond what training has used: the queue at the decision."""
        return self.total_generated_samples - self.expected_samples

    @property
    def total_wait_samples(self) -> int:
        """Samples of this cycle that training really had to wait for."""
        return sum(self.step_wait_samples)

    @property
    def total_wait_s(self) -> float:
        """Seconds of this cycle that training spent waiting for samples."""
        return sum(self.step_wait_times)


class Rebalancer(Protocol):
    """What a policy may call on ``self._rollouter``."""

    def rebalance_requests(self) -> Any:
        """Note down that requests should be spread anew; the controller carries it out. Returns at once."""
        ...


class DynamicSchedulePolicyBase(ABC):
    """Decides when hybrid replicas are lent to generation and when they go back to training.

    A subclass need not call ``super().__init__()``: everything set here is a class attribute.
    """

    #: Set by the controller before the first call.
    _rollouter: Rebalancer | None = None
    #: Why the last decision was taken; logged with the decision. Setting it is optional.
    last_reason: str = ""

    @abstractmethod
    def should_deactivate(self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext) -> bool:
        """True: take the hybrids back before this collection. False: keep lending, nothing is collected yet.

        global_steps is the number of the current weight version.
        """

    @abstractmethod
    def deactivate_wait_samples(self, ctx: DynamicScheduleContext) -> int:
        """Completed samples to wait for before the hybrids are taken back (capped at what is reachable)."""

    @abstractmethod
    def should_activate_after_step(
        self, global_steps: int, is_hybrid_active: bool, ctx: DynamicScheduleContext
    ) -> bool:
        """True: lend the hybrids for the next cycle."""

    def update_after_step(self, global_steps: int, ctx: DynamicScheduleContext) -> None:  # noqa: B027
        """Learn from the cycle that just ended. Optional."""

    def request_rebalance(self, global_steps: int, ctx: DynamicScheduleContext) -> None:  # noqa: B027
        """Spread the requests anew after an activation. Optional; the base class leaves them where they are."""

    def lend_count(self, ctx: DynamicScheduleContext) -> int | None:
        """How many of ``ctx.hybrid_replicas`` to lend in an activation; None: all. Optional."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint, ready for JSON: every instance attribute that is plain data.

        Plain are None, bool, int, float, str and lists, tuples, deques, sets and dicts of them. Others are left out:
        override both methods when the policy learns into something else.
        """
        return {k: encode(v) for k, v in vars(self).items() if k not in _NOT_STATE and is_plain(v)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave; attributes it does not name stay as they are."""
        for key, value in state.items():
            setattr(self, key, decode_like(value, getattr(self, key, None)))


#: Attributes that describe the run at hand, not what was learned: a resumed run may have other nodes.
_NOT_STATE = frozenset({"_rollouter", "only_hybrid"})

_registry: dict[str, type[DynamicSchedulePolicyBase]] = {}


def register_policy(name: str) -> Callable[[P], P]:
    """Class decorator: make a policy known as ``name``.

    Raises ConfigError when it is no policy, or the name means another class already.
    """

    def decorate(cls: P) -> P:
        if not (inspect.isclass(cls) and issubclass(cls, DynamicSchedulePolicyBase)):
            raise ConfigError(
                f"policy {name!r}: {cls!r} is no subclass of hybridsched.scheduling.DynamicSchedulePolicyBase"
            )
        known = _registry.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"policy name {name!r} is taken by {known.__module__}.{known.__qualname__}; "
                f"give {cls.__module__}.{cls.__qualname__} another name in @register_policy(...)"
            )
        _registry[name] = cls
        return cls

    return decorate


def registered_policies() -> dict[str, type[DynamicSchedulePolicyBase]]:
    """Every known policy class by name, sorted."""
    return dict(sorted(_registry.items()))


def accepted_arguments(cls: type[DynamicSchedulePolicyBase]) -> set[str] | None:
    """Names the constructor takes as keyword; None: it takes any (**kwargs)."""
    if cls.__init__ is object.__init__:
        return set()
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def required_arguments(cls: type[DynamicSchedulePolicyBase]) -> set[str]:
    """Names the constructor cannot do without."""
    if cls.__init__ is object.__init__:
        return set()
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in parameters if p.kind in named and p.default is p.empty}


def instantiate(cls: type[DynamicSchedulePolicyBase], name: str, kwargs: Mapping[str, Any]) -> Any:
    """Build ``cls`` from those of ``kwargs`` its constructor takes. Raises ConfigError naming what is missing."""
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise ConfigError(f"policy {name!r} ({cls.__module__}.{cls.__qualname__}) does not define: {missing}")
    accepted = accepted_arguments(cls)
    given = {k: v for k, v in kwargs.items() if accepted is None or k in accepted}
    absent = sorted(required_arguments(cls) - set(given))
    if absent:
        raise ConfigError(
            f"policy {name!r} needs {', '.join(absent)}: set it under kwargs: of the policy's YAML, "
            f"or under async_training.dynamic_schedule_policy_kwargs"
        )
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy {name!r} refuses its arguments {given}: {error}") from error


def build_policy(name: str, **kwargs: Any) -> DynamicSchedulePolicyBase:
    """A new instance of the policy registered as ``name``.

    Only those keyword arguments the constructor accepts are handed on, so a caller may always offer
    ``deactivate_ratio`` and ``only_hybrid``. Raises ConfigError for an unknown name (with the nearest known one), a
    missing argument, or a value the constructor refuses.
    """
    cls = _registry.get(name)
    if cls is None:
        raise ConfigError(
            f"there is no policy {name!r}{nearest(name, _registry)}; known: {', '.join(sorted(_registry))}"
        )
    policy = instantiate(cls, name, kwargs)
    assert isinstance(policy, DynamicSchedulePolicyBase)
    return policy


def nearest(word: str, known: Any) -> str:
    """`` (did you mean 'x'?)`` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
