"""Scripts for sbatch: golden files of every example, quoting, refusals, and what shellcheck says.

Golden files are made anew with HYBRIDSCHED_GOLDEN=write; look at the difference before committing it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from hybridsched.cli import main as cli
from hybridsched.config import check, load_config, notes
from hybridsched.errors import ConfigError
from hybridsched.slurm.components import Component
from hybridsched.slurm.request import request_of
from hybridsched.slurm.sbatch import JobOptions, components_lines, log_pattern, render_executor, render_run
from hybridsched.slurm.sites import SiteProfile, load_site

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden")
EXAMPLES = sorted((ROOT / "slurm" / "examples").glob("*.yaml"))
TEMPLATES = sorted((ROOT / "templates").glob("*.sbatch.j2"))
ODD = "/data/it's $(here) 100%\u00e4"  #: a folder people do have


@pytest.fixture
def rendered(tmp_path, monkeypatch, capsys):
    """The script of a run.yaml, with this checkout's own paths replaced."""
    monkeypatch.setenv("PATH", "/usr/bin-without-slurm")
    monkeypatch.delenv("HYBRIDSCHED_SITE", raising=False)
    monkeypatch.chdir(tmp_path)

    def render(path: Path, *overrides: str) -> str:
        assert 0 == cli.main(["render", str(path), *overrides]), capsys.readouterr().err
        text = capsys.readouterr().out
        return text.replace(str(tmp_path), "/WORK").replace(str(ROOT), "/CHECKOUT").replace(sys.executable, "/PYTHON")

    return render


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_renders_as_its_golden_file(rendered, path):
    text = rendered(path)
    golden = GOLDEN / f"{path.stem}.sbatch"
    if os.environ.get("HYBRIDSCHED_GOLDEN") == "write":
        golden.write_text(text, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_right_configuration(path):
    assert [] == check(load_config(path))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_dry_run_of_every_example_prints_its_sizes(path, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    assert 0 == cli.main(["run", str(path), "--dry-run"]), capsys.readouterr().err
    out = capsys.readouterr().out
    assert "dry run: nothing started" in out
    assert f"{config.trainer.nnodes} nodes x {config.trainer.n_gpus_per_node}" in out
    assert [] == list(tmp_path.iterdir())


def test_the_published_experiment_says_that_it_needs_the_bridge():
    (bridge,) = [path for path in EXAMPLES if path.stem == "qwen3.5-35b-a3b-16-16"]
    assert any("needs megatron-bridge, not run by us" in note for note in notes(load_config(bridge)))
    others = [notes(load_config(path)) for path in EXAMPLES if path != bridge]
    assert not any("megatron-bridge" in note for found in others for note in found)


@pytest.mark.parametrize("size", ["tensor_model", "expert_model"])
def test_the_8_24_split_with_sizes_that_do_not_divide_its_gpus_is_refused(size):
    (split,) = [path for path in EXAMPLES if path.stem.endswith("8-24")]
    with pytest.raises(ConfigError, match="8 trainer GPUs cannot be split"):
        load_config(split, [f"actor_rollout_ref.actor.megatron.{size}_parallel_size=16"])


def test_a_run_without_rollout_nodes_is_a_plain_job(rendered):
    text = rendered(ROOT / "templates" / "run_math.yaml", "rollout.nnodes=0")
    assert "hetjob" not in text
    assert "HYBRIDSCHED_ROLES=trainer\n" in text


def test_a_run_on_cpus_asks_for_cores_and_no_gpus(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = load_config(ROOT / "templates" / "demo.yaml", ["launcher=slurm", "trainer.device=cpu"])
    request = request_of(config, SiteProfile(), ask=None)
    assert [0, 0] == [one.gpus_per_node for one in request.components]
    assert [config.trainer.n_gpus_per_node + 1] * 2 == [one.cpus_per_task for one in request.components]


def test_every_value_of_a_template_is_quoted(tmp_path):
    site = SiteProfile(environment={"MESSAGE": "$(touch /tmp/gone)"}, modules=["a b"])
    lines = components_lines([Component(options={"comment": "a # b"})], site, _job(log_pattern(Path(ODD), "%j.log")), 5)
    text = render_run(
        lines, site, run_folder=Path(ODD), working_folder=tmp_path, title="a", roles=["trainer"], prepare=["x", ODD]
    )
    assert "export MESSAGE='$(touch /tmp/gone)'" in text
    assert "module load 'a b'" in text
    assert f"--run {shlex.quote(ODD)}" in text
    assert "#SBATCH --comment='a # b'" in text
    assert "100%%\u00e4/%j.log" in text


def test_a_script_does_with_odd_folders_what_it_says(tmp_path):
    """The body of the script really runs: with a stand-in for Python that writes down its arguments."""
    folder = tmp_path / "it's $(here)"
    folder.mkdir()
    python = folder / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@" >"$OUT"\n')
    python.chmod(0o755)
    site = SiteProfile(python=str(python), environment={"OUT": str(folder / "out")})
    lines = components_lines([Component()], site, _job("x.log"), 5)
    script = tmp_path / "job.sh"
    script.write_text(render_run(lines, site, run_folder=folder, working_folder=folder, title="a", roles=["trainer"]))
    subprocess.run(["bash", str(script)], check=True, timeout=60)
    assert ["-m", "hybridsched.slurm.batch_main", "--run", str(folder)] == (folder / "out").read_text().splitlines()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slurm.job_name", '"a\\n#SBATCH --uid=0"'),
        ("slurm.job_name", "a b"),
        ("slurm.trainer.partition", '"$(reboot)"'),
        ("slurm.trainer.partition", "-x"),
        ("slurm.trainer.account", '"a b"'),
        ("slurm.rollout.qos", '"high;"'),
        ("slurm.rollout.constraint", "'a\"b'"),
        ("slurm.trainer.mem", "lots"),
        ("slurm.trainer.reservation", '"a`id`"'),
        ("slurm.trainer.gres", '"gpu:8 --uid=0"'),
        ("slurm.trainer.time", "tomorrow"),
        ("slurm.trainer.extra", "{uid=0: x}"),
        ("slurm.trainer.extra", "{output: /etc/passwd}"),
        ("slurm.trainer.extra", '{comment: "a\\nb"}'),
        ("trainer.default_local_dir", '"a\\nb"'),
    ],
)
def test_hostile_values_are_refused_with_their_key(key, value, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = load_config(None, [*_EMULATED, "launcher=slurm", f"{key}={value}"])
    with pytest.raises(ConfigError) as error:
        request_of(config, SiteProfile(), ask=None).script()
    assert key.split(".")[-1].replace("extra", "options").replace("default_local_dir", "run folder") in str(
        error.value
    ).replace("log file", "run folder")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_short_and_hold_no_logic(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    assert not any(mark in line for line in lines for mark in ("{% set", "{% macro", "{% call"))


def test_a_name_the_template_does_not_get_is_an_error():
    from hybridsched.slurm import sbatch

    with pytest.raises(jinja2.UndefinedError, match="title"):
        sbatch._render("run.sbatch.j2", components=[], environment=[])


def test_shellcheck_finds_nothing_in_any_script(rendered, tmp_path):
    if (shellcheck := shutil.which("shellcheck", path="/usr/bin:/usr/local/bin:/opt/homebrew/bin")) is None:
        if os.environ.get("CI"):
            pytest.fail("shellcheck is not installed: apt-get install shellcheck (make slurm-deps)")
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    texts = {path.stem: rendered(path) for path in EXAMPLES}
    site = load_site("infiniband-pyxis")
    components = [Component(nodes=2, gpus_per_node=8), Component(nodes=2, gpus_per_node=4, cpus_per_task=3)]
    lines = components_lines(components, site, _job("x.log"), 5)
    texts["executor"] = render_executor(lines, components, site, folder=Path("/a b"), command=["python", "-m", "x"])
    files = []
    for name, text in texts.items():
        files.append(tmp_path / f"{name}.sh")
        files[-1].write_text(text, encoding="utf-8")
    done = subprocess.run([shellcheck, *files], capture_output=True, text=True, timeout=100)
    assert "" == done.stdout + done.stderr


_EMULATED = ("actor_rollout_ref.actor.strategy=emulated", "actor_rollout_ref.rollout.name=emulated")


def _job(log: str) -> JobOptions:
    return JobOptions("a", log, "USR2@90", True)
