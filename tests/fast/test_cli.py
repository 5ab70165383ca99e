"""The command line: exit codes, one message per mistake, what commands print, and what importing them costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridsched import __version__
from hybridsched.cli import main as cli
from hybridsched.cli.console import print_json
from hybridsched.config import load_config
from hybridsched.errors import FaultError, InternalError, Interrupted, OwnershipLost, RequeueRequested, UserError

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "h5py", "pyarrow", "matplotlib", "pydantic", "yaml", "jinja2", "tokenizers", "mpi4py")


class Result:
    """What one command left: exit code, stdout, stderr."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def hybridsched(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def call(*arguments: str) -> Result:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


EMULATED = """\
actor_rollout_ref:
  actor: {strategy: emulated, ppo_mini_batch_size: 12}
  rollout: {name: emulated}
async_training: {trigger_parameter_sync_step: 3, use_dynamic_resource_scheduling: true}
local: {allow_oversubscribe: true}
"""


# -- the program


def test_help_lists_every_command(hybridsched):
    result = hybridsched("--help")
    assert 0 == result.code
    wanted = ["demo", "init", "run", "config", "policies", "status", "report", "explain", "compare", "queue"]
    assert [] == [name for name in wanted if f" {name} " not in result.out]
    assert "Exit codes" in result.out


def test_version(hybridsched):
    result = hybridsched("--version")
    assert (0, f"hybridsched {__version__}\n") == (result.code, result.out)


def test_importing_the_command_line_loads_nothing_heavy():
    code = f"import sys, hybridsched.cli.main; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "" == done.stdout.strip()


def test_unknown_command_is_a_usage_error(hybridsched):
    result = hybridsched("rnu")
    assert 2 == result.code
    assert "No such command 'rnu'" in result.err


@pytest.mark.parametrize(
    ("error", "code", "prefix"),
    [
        (UserError("no"), 2, "error: no"),
        (OwnershipLost("no"), 3, "error: no"),
        (FaultError("no"), 4, "failed: no"),
        (InternalError("no"), 70, "internal error (a bug in hybridsched): no"),
        (RequeueRequested("no"), 75, "error: no"),
        (Interrupted("no"), 130, "stopped: no"),
    ],
)
def test_errors_become_one_message_and_their_exit_code(hybridsched, monkeypatch, error, code, prefix):
    def fail(section=None):
        raise error

    monkeypatch.setattr("hybridsched.config.render_docs", fail)
    result = hybridsched("config")
    assert (code, "", f"hybridsched: {prefix}\n") == (result.code, result.out, result.err)


def test_traceback_is_shown_only_when_asked_for(hybridsched, monkeypatch):
    monkeypatch.setenv(cli.TRACEBACK_VARIABLE, "1")
    result = hybridsched("config", "no.such.key")
    assert 2 == result.code
    assert "Traceback (most recent call last)" in result.err


def test_a_bug_leaves_its_traceback_in_a_file(hybridsched, monkeypatch, tmp_path):
    def fail(section=None):
        raise KeyError("lost")

    monkeypatch.setattr("hybridsched.config.render_docs", fail)
    result = hybridsched("config")
    assert 1 == result.code
    assert "unexpected error: KeyError: 'lost'" in result.err
    assert "Traceback" not in result.err
    (file,) = tmp_path.glob("hybridsched-traceback-*.txt")
    assert str(file) in result.err
    assert "KeyError: 'lost'" in file.read_text(encoding="utf-8")


def test_ctrl_c_is_130(hybridsched, monkeypatch):
    def fail(section=None):
        raise KeyboardInterrupt

    monkeypatch.setattr("hybridsched.config.render_docs", fail)
    assert 130 == hybridsched("config").code


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m hybridsched.cli.main config | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (0, "launcher\n", "") == (done.returncode, done.stdout, done.stderr)


# -- config, init, policies


def test_config_documents_a_section(hybridsched):
    result = hybridsched("config", "async_training")
    assert 0 == result.code
    assert "async_training.staleness_threshold\n    float >= 0; default 0.1" in result.out
    assert "trainer.nnodes" not in result.out


def test_config_of_an_unknown_section_suggests(hybridsched):
    result = hybridsched("config", "async_trainin")
    assert (2, "") == (result.code, result.out)
    assert "did you mean async_training?" in result.err


def test_init_writes_a_run_yaml_that_loads(hybridsched, tmp_path):
    result = hybridsched("init", "first")
    assert 0 == result.code
    config = load_config(tmp_path / "first.yaml")
    assert "first" == config.trainer.experiment_name
    assert "# " in (tmp_path / "first.yaml").read_text(encoding="utf-8")


def test_init_replaces_a_file_only_with_force(hybridsched, tmp_path):
    write(tmp_path / "first.yaml", "mine")
    result = hybridsched("init", "first")
    assert (2, "mine") == (result.code, (tmp_path / "first.yaml").read_text(encoding="utf-8"))
    assert "--force" in result.err
    assert 0 == hybridsched("init", "first.yaml", "--force").code
    assert "mine" != (tmp_path / "first.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["../up", "", "a b", ".hidden"])
def test_init_refuses_names_that_are_no_name(hybridsched, tmp_path, name):
    result = hybridsched("init", name)
    assert (2, []) == (result.code, list(tmp_path.rglob("*.yaml")))


def test_policies_are_listed_with_source_and_meaning(hybridsched, tmp_path):
    (tmp_path / "policies").mkdir()
    write(tmp_path / "policies" / "eager.yaml", "policy: fixed_ratio\nkwargs: {deactivate_ratio: 0.9}\n")
    result = hybridsched("policies")
    assert 0 == result.code
    for name in ("default", "fixed_ratio", "static_fully_async", "eager", str(tmp_path / "policies" / "eager.yaml")):
        assert name in result.out
    assert "FixedRatioDynamicSchedulePolicy" in result.out


# -- run --dry-run


def test_dry_run_prints_derived_values_and_the_plan(hybridsched, tmp_path):
    path = write(tmp_path / "run.yaml", EMULATED)
    result = hybridsched("run", path, "--dry-run", "trainer.n_gpus_per_node=2", "rollout.nnodes=2")
    assert 0 == result.code, result.err
    lines = [line.split() for line in result.out.splitlines()]
    assert ["collection", "R", "12", "samples", "12", "x", "1"] in lines
    assert ["sync", "cycle", "S", "36", "samples", "R", "x", "3"] in lines
    assert ["window", "39", "samples", "S", "x", "(1", "+", "0.1)"] in lines
    workers = [line[:3] for line in lines if line and "." in line[0] and line[0].split(".")[-1].isdigit()]
    assert [
        ["trainer.0", "0", "(trainer)"],
        ["trainer.1", "0", "(trainer)"],
        ["hybrid.0", "0", "(trainer)"],
        ["hybrid.1", "0", "(trainer)"],
        ["standalone.0", "1", "(rollout)"],
        ["standalone.1", "2", "(rollout)"],
    ] == workers
    assert not (tmp_path / "runs").exists()


def test_dry_run_of_the_slurm_example_needs_neither_gpus_nor_cores(hybridsched):
    result = hybridsched("run", str(ROOT / "templates" / "run_math.yaml"), "--dry-run")
    assert (0, "") == (result.code, result.err)
    assert "768 samples" in result.out
    assert "not bound" in result.out


def test_dry_run_checks_the_policy(hybridsched, tmp_path):
    path = write(tmp_path / "run.yaml", EMULATED)
    result = hybridsched("run", path, "--dry-run", "async_training.dynamic_schedule_policy=defualt")
    assert 2 == result.code
    assert "default" in result.err


def test_dry_run_looks_at_files_only_when_asked(hybridsched, tmp_path):
    arguments = ["run", write(tmp_path / "run.yaml", "local: {allow_oversubscribe: true}\n"), "--dry-run"]
    arguments += ["actor_rollout_ref.model.path=nowhere", "data.train_files=[nothing.jsonl]"]
    assert 0 == hybridsched(*arguments).code
    result = hybridsched(*arguments, "--check-paths")
    assert 2 == result.code
    assert "nowhere does not exist" in result.err
    assert "nothing.jsonl does not exist" in result.err


def test_dry_run_names_the_cores_that_are_missing(hybridsched, tmp_path):
    path = write(tmp_path / "run.yaml", EMULATED)
    arguments = ["run", path, "--dry-run", "local.allow_oversubscribe=false", "trainer.n_gpus_per_node=4096"]
    result = hybridsched(*arguments)
    assert 2 == result.code
    assert "local.allow_oversubscribe" in result.err


# -- run: mistakes


def test_unknown_keys_are_one_message_with_line_and_cure(hybridsched, tmp_path):
    path = write(tmp_path / "run.yaml", "trainer:\n  nnode: 2\nasync_training:\n  staleness_treshold: 0.5\n")
    result = hybridsched("run", path)
    assert (2, "") == (result.code, result.out)
    assert f"{path}:2: trainer.nnode: unknown key -> did you mean trainer.nnodes?" in result.err
    assert f"{path}:4: async_training.staleness_treshold" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing.yaml"], "missing.yaml: no such file"),
        (["run.yaml", "--resume", "--force"], "--resume goes on"),
        (["run.yaml", "--check-paths"], "--dry-run"),
        (["run.yaml", "trainer.nnodes"], "is not key=value"),
        (["run.yaml", "actor_rollout_ref.actor.ppo_mini_batch_size=0"], "int >= 1"),
        (["run.yaml", "--resume"], "there is no run to resume"),
    ],
)
def test_mistakes_of_run(hybridsched, tmp_path, arguments, told):
    write(tmp_path / "run.yaml", EMULATED)
    result = hybridsched("run", *arguments)
    assert (2, "") == (result.code, result.out)
    assert told in result.err
    assert [] == list(tmp_path.glob("runs/*/run.json"))


def test_a_folder_of_somebody_else_is_refused(hybridsched, tmp_path):
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "thesis.tex", "x")
    result = hybridsched("run", write(tmp_path / "run.yaml", EMULATED), "trainer.default_local_dir=mine", "--force")
    assert 2 == result.code
    assert "is not empty and is no run of ours" in result.err
    assert ["thesis.tex"] == os.listdir(tmp_path / "mine")


# -- looking at a run


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "nowhere"],
        ["report", "nowhere", "--json"],
        ["explain", "nowhere", "hybrid.0"],
        ["compare", "nowhere", "neither"],
        ["status", "nowhere"],
        ["queue", "ls", "nowhere"],
        ["queue", "head", "nowhere"],
        ["queue", "stat", "nowhere"],
    ],
)
def test_a_folder_that_holds_no_run_is_one_message(hybridsched, tmp_path, arguments):
    result = hybridsched(*arguments)
    assert (2, "") == (result.code, result.out)
    assert "nowhere" in result.err
    assert [] == os.listdir(tmp_path)


# -- printing


def test_json_has_no_nan(capsys):
    print_json({"a": float("nan"), "b": [float("inf"), 1.5]})
    assert {"a": None, "b": [None, 1.5]} == json.loads(capsys.readouterr().out)
