"""What is shipped, and the rules of the house that `make check` holds with tools/check_runtime_purity.py."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hybridsched.config import check, load_config

ROOT = Path(__file__).resolve().parents[2]


def _load_tool():
    spec = importlib.util.spec_from_file_location("check_runtime_purity", ROOT / "tools" / "check_runtime_purity.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


purity = _load_tool()


# -- wheel


def build(hook: str, source: Path, out: Path) -> Path:
    """Run a build hook of setuptools in ``source``, as pip does, but without a network."""
    out.mkdir()
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, timeout=100, check=True)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel of a source distribution of a checkout: what `pip install .` and an upload both give."""
    folder = tmp_path_factory.mktemp("packaging")
    checkout = folder / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("hybridsched", "policies", "slurm", "templates"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout / name)
    with tarfile.open(build("build_sdist", checkout, folder / "sdist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return zipfile.ZipFile(build("build_wheel", source, folder / "wheel"))


@pytest.mark.parametrize("room", ["policies", "templates", "slurm/sites"])
def test_the_wheel_holds_every_policy_template_and_site_profile_as_an_ordinary_file(wheel, room):
    shipped = {path.name: path.read_bytes() for path in (ROOT / room).iterdir() if path.is_file()}
    prefix = f"hybridsched/_data/{Path(room).name}/"
    found = {name.removeprefix(prefix): wheel.read(name) for name in wheel.namelist() if name.startswith(prefix)}
    assert shipped == found
    assert shipped


def test_the_wheel_holds_every_module_licence_and_entry_point(wheel):
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hybridsched").rglob("*.py")
        if not path.relative_to(ROOT).is_relative_to("hybridsched/_data")
    }
    assert set() == modules - set(wheel.namelist())
    metadata = {name.rpartition("/")[2]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert b"Apache License" in wheel.read(metadata["LICENSE"])
    assert b"hybridsched = hybridsched.cli.main:main" in wheel.read(metadata["entry_points.txt"])


def test_an_unpacked_wheel_finds_its_templates_and_policies(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    code = (
        "from hybridsched.cli.templates import template_text; from hybridsched.runtime.policy_loader import *; "
        "import hybridsched; print(hybridsched.__file__); assert 'count_on' in template_text('demo.yaml'); "
        "print(*policies_folders())"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    package = tmp_path / "site" / "hybridsched"
    assert [str(package / "__init__.py"), str(package / "_data" / "policies")] == done.stdout.splitlines()


# -- pins and templates


def test_everything_in_setup_cfg_is_pinned():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = parser["options.extras_require"]
    ranges = "\n".join([parser["options"]["install_requires"], extras["test"], extras["analysis"]])
    wanted = {_normal(re.split(r"[<>=;\s]", line.strip())[0]) for line in ranges.splitlines() if line.strip()}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert set() == wanted - {_normal(name) for name in pins}
    assert "2.13.0" == pins["torch"]  # with a local part (+cpu) no other wheel would match


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


@pytest.mark.parametrize("path", sorted((ROOT / "templates").glob("*.yaml")), ids=lambda path: path.name)
def test_templates_are_right_configurations(path):
    assert [] == check(load_config(path))


# -- rules of the house


def faults(source: str) -> list[str]:
    return [what for _, what in purity.runtime_faults(ast.parse(source))]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import time", "imports time"),
        ("def f():\n    from time import monotonic", "imports time"),
        ("import subprocess as sp", "imports subprocess"),
        ("import asyncio\nawait_ = asyncio.to_thread(f)", "uses asyncio.to_thread"),
        ("import asyncio as aio\nx = aio.to_thread", "uses asyncio.to_thread"),
        ("from asyncio import to_thread as t\nt(f)", "uses asyncio.to_thread"),
        ("import os\nos.getpid()", "uses os.getpid"),
        ("import asyncio\nasync def f(t):\n    await asyncio.wait(t)", "uses asyncio.wait"),
        (
            "class A:\n    _t: set[asyncio.Task[None]]\n    def f(self):\n        for t in self._t: pass",
            "iterates self._t",
        ),
        ("def f(ts: set[Task]):\n    return [t for t in ts]", "iterates ts"),
        ("def f(ts: set[Task]):\n    return gather(*ts)", "iterates ts"),
        ("def f(ts: set[Task]):\n    for t in list(ts): pass", "iterates ts"),
    ],
)
def test_acting_code_that_touches_the_machine_is_found(source, told):
    assert [told] == [fault[: len(told)] for fault in faults(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasync def f(clock):\n    await clock.sleep(1.0)",
        "import os.path",
        "def f(ts: list[Task]):\n    for t in ts: pass",
        "def f(names: set[str]):\n    for n in sorted(names): pass",
        "def f(self):\n    self.time(); self.random = 1",
    ],
)
def test_acting_code_that_gets_everything_handed_in_passes(source):
    assert [] == faults(source)


def test_deciding_code_imports_only_pure_modules():
    bad = "import numpy as np\nfrom hybridsched.runtime import clock\nimport math\nfrom hybridsched.model import Sample"
    found = [what.split(";")[0] for _, what in purity.impure_imports(ast.parse(bad))]
    assert ["deciding code imports numpy", "deciding code imports hybridsched.runtime"] == found


def test_long_modules_and_impure_ones_are_told_with_file_and_line(tmp_path):
    room = tmp_path / "hybridsched" / "runtime"
    (room / "workers").mkdir(parents=True)
    (room / "long.py").write_text("x = 1\n" * (purity.MAX_LINES + 1), encoding="utf-8")
    (room / "impure.py").write_text("\nimport time\n", encoding="utf-8")
    (room / "workers" / "process.py").write_text("import time\n", encoding="utf-8")
    assert [
        "hybridsched/runtime/impure.py:2: imports time; get it handed in (services.py)",
        "hybridsched/runtime/long.py:401: 401 lines; a module has at most 400: split it",
    ] == [str(finding) for finding in purity.find_all(tmp_path)]


def test_every_exception_to_the_rules_still_exists():
    runtime = ROOT / "hybridsched" / "runtime"
    assert [] == [name for name in purity.TOUCHING if not (runtime / name).exists()]
