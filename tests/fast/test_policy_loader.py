"""Finding, checking and building the policy of a run."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridsched.config.schema import AsyncTrainingConfig
from hybridsched.errors import ConfigError
from hybridsched.runtime import policy_loader
from hybridsched.runtime.policy_loader import list_policies, load_policy, policies_folders
from hybridsched.scheduling import (
    DefaultDynamicSchedulePolicy,
    DynamicScheduleContext,
    DynamicSchedulePolicyBase,
    FixedRatioDynamicSchedulePolicy,
    StaticFullyAsyncPolicy,
)

SHIPPED = Path(__file__).resolve().parents[2] / "policies"

MINE = """
from hybridsched.scheduling import DynamicScheduleContext, DynamicSchedulePolicyBase, register_policy

class {name}(DynamicSchedulePolicyBase):
    def __init__(self, deactivate_ratio{default}, only_hybrid: bool = False):
        self.deactivate_ratio = deactivate_ratio
        self.only_hybrid = only_hybrid
    def should_deactivate(self, global_steps, is_hybrid_active, ctx):
        return is_hybrid_active
    def deactivate_wait_samples(self, ctx):
        return int(ctx.step_required_samples * self.deactivate_ratio)
    def should_activate_after_step(self, global_steps, is_hybrid_active, ctx):
        return ctx.total_generated_samples < ctx.expected_samples + ctx.buffer_samples
"""


def mine(name: str = "Mine", default: str = ": float = 0.5") -> str:
    return MINE.format(name=name, default=default)


def load(base: Path, policy: str, *, only_hybrid: bool = False, **fields: Any) -> Any:
    fields = {
        f"dynamic_schedule_{k}" if k in ("policy_kwargs", "deactivate_ratio") else k: v for k, v in fields.items()
    }
    config = AsyncTrainingConfig(dynamic_schedule_policy=policy, **fields)
    return load_policy(config, only_hybrid=only_hybrid, base_dir=base)


# -- shipped files


def test_the_shipped_yaml_of_a_policy_changes_nothing_about_its_defaults(tmp_path: Path) -> None:
    for name, cls in (
        ("default", DefaultDynamicSchedulePolicy),
        ("fixed_ratio", FixedRatioDynamicSchedulePolicy),
        ("static_fully_async", StaticFullyAsyncPolicy),
    ):
        policy = load(tmp_path, name)
        assert type(policy) is cls
        assert policy.state_dict() == cls().state_dict()


def test_default_yaml_shows_every_knob_with_the_value_of_the_code_and_a_comment() -> None:
    kwargs = yaml.safe_load((SHIPPED / "default.yaml").read_text())["kwargs"]
    parameters = inspect.signature(DefaultDynamicSchedulePolicy).parameters
    assert kwargs == {key: p.default for key, p in parameters.items() if key != "only_hybrid"}
    commented = False
    for line in (SHIPPED / "default.yaml").read_text().splitlines():
        if line.strip().split(":")[0] in kwargs:
            assert commented, line
        else:
            commented = line.strip().startswith("#")


def test_default_yaml_lists_the_deviations_from_the_peer() -> None:
    text = (SHIPPED / "default.yaml").read_text()
    assert all(f"#   {w}  " in text for w in ("W1", "W2", "W3"))


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_yaml_loads_by_name_and_by_path(path: Path, tmp_path: Path) -> None:
    assert type(load(tmp_path, path.stem)) is type(load(tmp_path, str(path)))
    assert type(load(tmp_path, f"policies/{path.name}")) is type(load(tmp_path, path.stem))


def test_the_example_policy_works(tmp_path: Path) -> None:
    policy = load(tmp_path, "policies/example_policy.py", policy_kwargs={"target_queue": 0.25, "patience": 2})
    low = DynamicScheduleContext(16, 4, 64, 64, 6, hybrid_replicas=4)
    assert policy.deactivate_wait_samples(low) == 16
    assert policy.should_activate_after_step(1, False, low) is False  # one cycle below, patience is two
    policy.update_after_step(1, low)
    assert policy.should_activate_after_step(2, False, low) is True
    assert policy.lend_count(low) == 4
    assert policy.lend_count(DynamicScheduleContext(16, 4, 76, 64, 6, hybrid_replicas=4)) == 1
    assert policy.state_dict()["cycles_below"] == 1


def test_listing_names_what_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "careful.yaml").write_text("policy: fixed_ratio\nkwargs: {deactivate_ratio: 0.1}\n")
    found = list_policies(tmp_path)
    assert {"default", "fixed_ratio", "static_fully_async", "careful"} <= set(found)
    assert found["careful"].kwargs == {"deactivate_ratio": 0.1}
    assert found["default"].summary


def test_installed_policies_come_from_the_package_and_not_from_a_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    for folder in (site / "policies", site / "hybridsched" / "_data" / "policies", site / "hybridsched" / "runtime"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(policy_loader, "__file__", str(site / "hybridsched" / "runtime" / "policy_loader.py"))
    monkeypatch.setattr(importlib.resources, "files", lambda _: site / "hybridsched")
    assert policies_folders(tmp_path) == [site / "hybridsched" / "_data" / "policies"]


# -- arguments


def test_the_ratio_of_the_run_overrides_kwargs_which_override_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("policy: default\nkwargs: {deactivate_ratio: 0.1, decrease: 0.05}\n")
    assert load(tmp_path, "p.yaml").deactivate_ratio == 0.1
    assert load(tmp_path, "p.yaml", policy_kwargs={"deactivate_ratio": 0.2}).deactivate_ratio == 0.2
    both = load(tmp_path, "p.yaml", policy_kwargs={"deactivate_ratio": 0.2}, deactivate_ratio=0.7)
    assert (both.deactivate_ratio, both.decrease) == (0.7, 0.05)


def test_a_custom_policy_keeps_its_own_default_ratio(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(mine())
    assert load(tmp_path, "mine.py").deactivate_ratio == 0.5
    assert load(tmp_path, "mine.py", deactivate_ratio=0.9).deactivate_ratio == 0.9


def test_a_policy_that_demands_a_ratio_gets_the_usual_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(mine(default=""))
    assert load(tmp_path, "mine.py").deactivate_ratio == 0.3


def test_only_hybrid_is_a_fact_of_the_run(tmp_path: Path) -> None:
    assert load(tmp_path, "default", only_hybrid=True).deactivate_ratio == 1.0
    assert load(tmp_path, "default", only_hybrid=True, policy_kwargs={"only_hybrid": False}).only_hybrid is True


def test_compat_peer_reaches_default_and_nobody_else(tmp_path: Path) -> None:
    assert load(tmp_path, "default", compat="peer").compat_peer is True
    assert load(tmp_path, "default").compat_peer is False
    assert isinstance(load(tmp_path, "fixed_ratio", compat="peer"), FixedRatioDynamicSchedulePolicy)


def test_an_unknown_argument_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy_kwargs.*no argument 'increase_mx' \(did you mean 'increase_max'"):
        load(tmp_path, "default", policy_kwargs={"increase_mx": 0.1})
    (tmp_path / "p.yaml").write_text("policy: fixed_ratio\nkwargs: {decrease: 0.1}\n")
    with pytest.raises(ConfigError, match=r"kwargs: of .*p\.yaml.*its arguments: deactivate_ratio, only_hybrid"):
        load(tmp_path, "p.yaml")


def test_a_value_the_policy_refuses_is_reported_with_its_origin(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("policy: default\nkwargs: {deactivate_ratio: 3}\n")
    with pytest.raises(ConfigError, match=r"deactivate_ratio is 3.*from .*p\.yaml"):
        load(tmp_path, "p.yaml")
    with pytest.raises(ConfigError, match="target_queue is 0"):
        load(tmp_path, "policies/example_policy.py", policy_kwargs={"target_queue": 0})


# -- ways to name a policy


def test_a_python_file_with_several_policies_needs_the_class(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(mine("A") + mine("B"))
    with pytest.raises(ConfigError, match=r"several \(A, B\)"):
        load(tmp_path, "two.py")
    assert type(load(tmp_path, "two.py:B")).__name__ == "B"
    with pytest.raises(ConfigError, match=r"no class 'C'.*defines: A, B"):
        load(tmp_path, "two.py:C")


def test_a_file_can_be_loaded_twice_although_it_registers_a_name(tmp_path: Path) -> None:
    (tmp_path / "reg.py").write_text(mine().replace("class Mine", '@register_policy("loaded_twice")\nclass Mine'))
    assert type(load(tmp_path, "reg.py")).__name__ == type(load(tmp_path, str(tmp_path / "reg.py"))).__name__
    assert type(load(tmp_path, "loaded_twice")).__name__ == "Mine"


def test_a_yaml_names_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(mine())
    (tmp_path / "sub" / "p.yaml").write_text("policy: mine.py:Mine\nkwargs: {deactivate_ratio: 0.8}\n")
    assert load(tmp_path, "sub/p.yaml").deactivate_ratio == 0.8


def test_a_class_in_an_importable_module(tmp_path: Path) -> None:
    assert type(load(tmp_path, "hybridsched.scheduling:StaticFullyAsyncPolicy")) is StaticFullyAsyncPolicy
    (tmp_path / "beside_run_yaml.py").write_text(mine())
    assert type(load(tmp_path, "beside_run_yaml:Mine")).__name__ == "Mine"


def test_an_entry_point_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint(
        "plugged", "hybridsched.scheduling:StaticFullyAsyncPolicy", policy_loader.ENTRY_POINT_GROUP
    )
    broken = importlib.metadata.EntryPoint("broken", "no_such_module_anywhere:X", policy_loader.ENTRY_POINT_GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point, broken])
    assert type(load(tmp_path, "plugged")) is StaticFullyAsyncPolicy
    with pytest.raises(ConfigError, match="entry point broken = no_such_module_anywhere:X cannot be loaded"):
        load(tmp_path, "broken")


def test_an_unknown_name_says_what_was_tried_and_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'defalt' \(did you mean 'default'\?\)\. Tried: defalt\.yaml in") as caught:
        load(tmp_path, "defalt")
    assert "hybridsched.policies" in str(caught.value) and "module:Class" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        (" ", "is empty"),
        ("nope/x.yaml", "no policy file"),
        ("exmple_policy.py", "did you mean 'example_policy.py'"),
        ("no_such_module_x:Y", "no module 'no_such_module_x'"),
        ("no_such.module_x:Y", "cannot be imported"),
        ("os.path:join", "is no policy"),
        ("hybridsched.scheduling:StaticFulyAsyncPolicy", "did you mean 'StaticFullyAsyncPolicy'"),
    ],
)
def test_a_name_that_leads_nowhere_is_explained(name: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=word):
        load(tmp_path, name)


# -- broken and foreign files


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("policy: [\n", r"p\.yaml:2: not valid YAML"),
        ("- default\n", "a policy file is a mapping"),
        ("kwargs: {}\n", "a policy file is a mapping"),
        ("policy: default\nkwarg: {}\n", "did you mean 'kwargs'"),
        ("policy: default\nkwargs: [1]\n", "kwargs must be a mapping"),
        ("policy: other.yaml\n", "is a YAML again"),
    ],
)
def test_a_broken_yaml_is_reported_with_its_file(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match=word):
        load(tmp_path, "p.yaml")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x = 1\ny = = 2\n", r"mine\.py:2: not valid Python"),
        ("x = 1\n\nraise RuntimeError('on import')\n", r"mine\.py:3 cannot be imported: RuntimeError: on import"),
        ("import no_such_thing_x\n", r"mine\.py:1 cannot be imported: ModuleNotFoundError"),
        ("x = 1\n", "must define one policy, it defines none"),
        (mine().replace("def should_deactivate", "def other"), "defines none"),
    ],
)
def test_a_broken_python_file_is_reported_with_its_line(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=word):
        load(tmp_path, "mine.py")


def test_a_file_written_for_verl_is_told_which_line_to_change_and_is_not_run(tmp_path: Path) -> None:
    peer = mine().replace("hybridsched.scheduling", "verl.experimental.fully_async_policy.dynamic_schedule")
    (tmp_path / "mine.py").write_text(peer + "raise RuntimeError('was run')\n")
    with pytest.raises(ConfigError, match=r"mine\.py:2: .*line 2 imports verl.*hybridsched\.scheduling"):
        load(tmp_path, "mine.py")
    fixed = peer.replace("verl.experimental.fully_async_policy.dynamic_schedule", "hybridsched.scheduling")
    (tmp_path / "mine.py").write_text(fixed)
    assert isinstance(load(tmp_path, "mine.py"), DynamicSchedulePolicyBase)


@pytest.mark.parametrize("where", ["mine.py", "uses_ray_in_a_method:Mine"])
def test_a_file_that_imports_ray_inside_a_method_is_the_named_exception(where: str, tmp_path: Path) -> None:
    text = mine() + "    def request_rebalance(self, global_steps, ctx):\n        import ray\n"
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "uses_ray_in_a_method.py").write_text(text)
    with pytest.raises(ConfigError, match="line 15 imports ray: there is no ray here"):
        load(tmp_path, where)
