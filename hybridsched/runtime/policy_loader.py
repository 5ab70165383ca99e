"""From ``async_training.dynamic_schedule_policy`` to a policy object.

Owns: where policies are looked for and in which order, policy YAML, the arguments a policy gets, and the messages when
something is missing. What a user may write::

    default                          a YAML of that name (policies/ beside run.yaml, then the shipped ones), a
                                     registered name, an entry point of the group ``hybridsched.policies``
    policies/mine.yaml               a policy YAML: {policy: any form but a YAML, kwargs: {...}}
    mypackage.policies:MyPolicy      a class in an importable module
    my_policy.py, my_policy.py:Mine  a Python file (and the class in it, where it defines several)

Relative paths count from the folder of run.yaml, then from the shipped policies. Arguments, later ones win: the YAML's
``kwargs``, ``dynamic_schedule_policy_kwargs``, ``dynamic_schedule_deactivate_ratio``. The first two must be arguments
of the policy; the ratio and ``only_hybrid`` are only offered.

Invariants: every failure is a ConfigError that says what was tried; a policy written for a stack of ray and verl is
recognised before any of its code runs. Not here: what policies decide (``hybridsched.scheduling``).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from hybridsched.config.schema import AsyncTrainingConfig
from hybridsched.errors import ConfigError
from hybridsched.scheduling import DynamicSchedulePolicyBase, registered_policies
from hybridsched.scheduling.policy import accepted_arguments, instantiate, nearest, required_arguments

ENTRY_POINT_GROUP = "hybridsched.policies"
#: Ratio of a policy that wants one, when neither the run nor the policy's file says.
FALLBACK_RATIO = 0.3
_KEY = "async_training.dynamic_schedule_policy"
PolicyClass = type[DynamicSchedulePolicyBase]


@dataclass(frozen=True, slots=True)
class PolicySource:
    """A policy class as found. ``origin`` says where, ``kwargs`` are those of its YAML."""

    cls: PolicyClass
    origin: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """First line of the class's documentation."""
        return (inspect.getdoc(self.cls) or "").partition("\n")[0]


def policies_folders(base_dir: Path | None = None) -> list[Path]:
    """Existing folders with policy YAMLs: ``policies/`` beside run.yaml, in the repository, in the package."""
    root = Path(__file__).resolve().parents[2]
    # Installed, the root is site-packages, where a folder of that name would be somebody else's.
    repository = root / ("policies" if (root / "setup.cfg").is_file() else "hybridsched/_data/policies")
    packaged = Path(str(importlib.resources.files("hybridsched"))) / "_data" / "policies"
    candidates = [*([base_dir / "policies"] if base_dir is not None else []), repository, packaged]
    folders: list[Path] = []
    for folder in candidates:
        if folder.is_dir() and folder.resolve() not in folders:
            folders.append(folder.resolve())
    return folders


def load_policy(
    config: AsyncTrainingConfig, *, only_hybrid: bool, base_dir: Path | str | None = None
) -> DynamicSchedulePolicyBase:
    """The policy of a run. ``base_dir``: folder of run.yaml (None: the working folder).

    Raises ConfigError: not found (what was tried, nearest name), not loadable (file, line), wrong or missing argument.
    """
    name = config.dynamic_schedule_policy
    source = find_policy(name, Path(base_dir) if base_dir is not None else Path.cwd())
    explicit = {**source.kwargs, **config.dynamic_schedule_policy_kwargs}
    accepted = accepted_arguments(source.cls)
    for key in explicit:
        if accepted is not None and key not in accepted:
            where = _KEY + "_kwargs" if key in config.dynamic_schedule_policy_kwargs else f"kwargs: of {source.origin}"
            takes = ", ".join(sorted(accepted)) or "none"
            raise ConfigError(
                f"{where}: policy {name!r} has no argument {key!r}{nearest(key, accepted)}; its arguments: {takes}"
            )
    arguments = dict(explicit)
    if config.dynamic_schedule_deactivate_ratio is not None:
        arguments["deactivate_ratio"] = config.dynamic_schedule_deactivate_ratio
    elif "deactivate_ratio" in required_arguments(source.cls):
        arguments.setdefault("deactivate_ratio", FALLBACK_RATIO)
    arguments["only_hybrid"] = only_hybrid  # a fact of the run, not a choice
    if config.compat == "peer":
        arguments["compat_peer"] = True  # the run asks for it: the shipped YAML's `false` is no objection
    try:
        policy = instantiate(source.cls, name, arguments)
    except ConfigError as error:
        raise ConfigError(f"{_KEY}: {error} (from {source.origin})") from error
    except Exception as error:  # foreign constructor
        raise ConfigError(
            f"{_KEY}: the constructor of {source.cls.__qualname__} ({source.origin}) raised "
            f"{type(error).__name__}: {error}"
        ) from error
    assert isinstance(policy, DynamicSchedulePolicyBase)
    return policy


def find_policy(name: str, base_dir: Path) -> PolicySource:
    """The class that ``name`` means (see the module's forms). Raises ConfigError."""
    if not name.strip():
        raise ConfigError(f"{_KEY} is empty; name a policy, e.g. default")
    if name.endswith((".yaml", ".yml")):
        return _from_yaml(_existing(name, base_dir), name)
    return _from_yaml_by_name(name, base_dir) or _find_class(name, base_dir)


def list_policies(base_dir: Path | None = None) -> dict[str, PolicySource]:
    """Everything that can be named without a path: YAMLs in policies folders, registered names, entry points."""
    base = base_dir if base_dir is not None else Path.cwd()
    names = {path.stem for folder in policies_folders(base) for path in folder.glob("*.yaml")}
    names |= set(registered_policies()) | {point.name for point in _entry_points()}
    return {name: find_policy(name, base) for name in sorted(names)}


# -- YAML


def _from_yaml_by_name(name: str, base_dir: Path) -> PolicySource | None:
    if any(mark in name for mark in "/:\\") or name.endswith(".py"):
        return None
    for folder in policies_folders(base_dir):
        path = folder / f"{name}.yaml"
        if path.is_file():
            return _from_yaml(path, name)
    return None


def _from_yaml(path: Path, name: str) -> PolicySource:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_KEY}: cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("policy"), str):
        raise ConfigError(f"{path}: a policy file is a mapping with `policy: NAME` and optionally `kwargs:`")
    for key in content:
        if key not in ("policy", "kwargs"):
            raise ConfigError(
                f"{path}: unknown key {key!r}{nearest(str(key), ('policy', 'kwargs'))}; "
                f"a policy file has `policy` and `kwargs`"
            )
    kwargs = content.get("kwargs") or {}
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise ConfigError(f"{path}: kwargs must be a mapping from argument names to values")
    target = content["policy"]
    if target.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"{path}: policy {target!r} is a YAML again; name a class, a Python file or a registered name"
        )
    found = _find_class(target, path.parent)
    return PolicySource(found.cls, str(path), dict(kwargs))


# -- classes


def _find_class(name: str, base_dir: Path) -> PolicySource:
    stem, _, class_name = name.rpartition(":") if ":" in name else (name, "", "")
    if stem.endswith(".py"):
        path = _existing(stem, base_dir)
        return PolicySource(_class_of(_load_file(path), class_name, str(path)), str(path))
    if class_name:
        return PolicySource(_class_of(_import(stem, base_dir), class_name, stem), f"{stem}:{class_name}")
    registered = registered_policies()
    if name in registered:
        return PolicySource(registered[name], f"registered name {name!r}")
    for point in _entry_points():
        if point.name == name:
            return _from_entry_point(point)
    raise _not_found(name, base_dir)


def _not_found(name: str, base_dir: Path) -> ConfigError:
    known = {*registered_policies(), *(point.name for point in _entry_points())}
    known |= {path.stem for folder in policies_folders(base_dir) for path in folder.glob("*.yaml")}
    folders = ", ".join(str(folder) for folder in policies_folders(base_dir))
    return ConfigError(
        f"{_KEY}: there is no policy {name!r}{nearest(name, known)}. Tried: {name}.yaml in {folders}; registered names "
        f"({', '.join(sorted(registered_policies()))}); entry points of the group {ENTRY_POINT_GROUP}. A class of your "
        f"own is named as module:Class or as path/to/file.py"
    )


def _from_entry_point(point: importlib.metadata.EntryPoint) -> PolicySource:
    origin = f"entry point {point.name} = {point.value}"
    try:
        cls = point.load()
    except Exception as error:  # foreign module
        raise ConfigError(f"{_KEY}: {origin} cannot be loaded: {type(error).__name__}: {error}") from error
    return PolicySource(_checked(cls, origin), origin)


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)


def _class_of(module: ModuleType, class_name: str, origin: str) -> PolicyClass:
    """The named class, or the only policy the module defines itself."""
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, DynamicSchedulePolicyBase)
        and not inspect.isabstract(value)
        and value.__module__ == module.__name__
    }
    if class_name:
        if not hasattr(module, class_name):
            defines = ", ".join(sorted(own)) or "none"
            hint = nearest(class_name, vars(module))
            raise ConfigError(f"{origin} has no class {class_name!r}{hint}; policies it defines: {defines}")
        return _checked(getattr(module, class_name), f"{origin}:{class_name}")
    if len(own) != 1:
        listing = f"several ({', '.join(sorted(own))}); add the one you mean: {origin}:CLASS" if own else "none"
        cure = "" if own else ": derive a class from hybridsched.scheduling.DynamicSchedulePolicyBase with its methods"
        raise ConfigError(f"{origin} must define one policy, it defines {listing}{cure}")
    return next(iter(own.values()))


def _checked(cls: Any, origin: str) -> PolicyClass:
    if not (inspect.isclass(cls) and issubclass(cls, DynamicSchedulePolicyBase)):
        bases = {base.__module__.partition(".")[0] for base in inspect.getmro(cls)} if inspect.isclass(cls) else set()
        cure = (
            _FOREIGN["verl"] if "verl" in bases else "derive it from hybridsched.scheduling.DynamicSchedulePolicyBase"
        )
        raise ConfigError(f"{origin} is no policy: {cure}")
    return cls


# -- importing foreign code


def _existing(name: str, base_dir: Path) -> Path:
    """The file a relative or absolute name means: from run.yaml's folder, then from the shipped policies."""
    path = Path(name).expanduser()
    folders = policies_folders(base_dir)
    tried = [path] if path.is_absolute() else [base_dir / path, *(f / path for f in folders)]
    if not path.is_absolute() and path.parts[0] == "policies":
        tried += [f.parent / path for f in folders]
    for candidate in tried:
        if candidate.is_file():
            return candidate.resolve()
    near = nearest(path.name, {p.name for f in folders for p in f.iterdir() if p.suffix in (".yaml", ".yml", ".py")})
    places = ", ".join(dict.fromkeys(str(candidate) for candidate in tried))
    raise ConfigError(f"{_KEY}: there is no policy file {name!r}{near}. Tried: {places}")


def _load_file(path: Path) -> ModuleType:
    """Run a policy file as a module of its own. The name depends on the path only, so loading it again replaces it."""
    _refuse_foreign(path)
    name = f"hybridsched_policy_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{_KEY}: {path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles in the file look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failed(str(path), error, str(path)) from error
    return module


def _import(name: str, base_dir: Path) -> ModuleType:
    with _importable(base_dir):
        try:
            spec = importlib.util.find_spec(name)
        except Exception as error:  # a parent package that fails to import, or a name that is none
            raise _import_failed(name, error) from error
        if spec is None:
            raise ConfigError(f"{_KEY}: there is no module {name!r}; searched sys.path and {base_dir}")
        if spec.origin and spec.origin.endswith(".py"):
            _refuse_foreign(Path(spec.origin))
        try:
            return importlib.import_module(name)
        except Exception as error:
            raise _import_failed(name, error, spec.origin) from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Modules beside run.yaml can be named without being installed."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _import_failed(origin: str, error: Exception, file: str | None = None) -> ConfigError:
    if isinstance(error, ConfigError):
        return ConfigError(f"{origin}: {error}")
    frames = []
    trace = error.__traceback__
    while trace is not None:
        if file is not None and trace.tb_frame.f_code.co_filename == file:
            frames.append(trace.tb_lineno)
        trace = trace.tb_next
    line = f":{frames[-1]}" if frames else ""
    return ConfigError(f"{_KEY}: {origin}{line} cannot be imported: {type(error).__name__}: {error}")


_FOREIGN = {
    "verl": (
        "it is written for verl: change its import line to `from hybridsched.scheduling import "
        "DynamicScheduleContext, DynamicSchedulePolicyBase, register_policy`; nothing else needs to change"
    ),
    "ray": (
        "there is no ray here: remove the import and the ray.get(... .remote()) around calls; self._rollouter is a "
        "plain object whose rebalance_requests() returns at once"
    ),
}


def _refuse_foreign(path: Path) -> None:
    """Raise ConfigError with file and line when the file imports ray or verl, or is no Python."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise ConfigError(f"{_KEY}: cannot read {path}: {error}") from error
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(f"{path}{line}: not valid Python: {getattr(error, 'msg', error)}") from error
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots = [node.module.partition(".")[0]]
        elif isinstance(node, ast.Import):
            roots = [alias.name.partition(".")[0] for alias in node.names]
        else:
            continue
        found += [(node.lineno, root) for root in roots if root in _FOREIGN]
    if found:
        cures = "; ".join(f"line {line} imports {root}: {_FOREIGN[root]}" for line, root in sorted(set(found)))
        raise ConfigError(f"{path}:{min(found)[0]}: this policy does not run here yet. {cures}")
