"""Site profiles: how one is chosen, what follows from it, and what is refused."""

from __future__ import annotations

import pytest

from hybridsched.errors import ConfigError
from hybridsched.slurm.sites import (
    SITE_VARIABLE,
    ContainerProfile,
    SiteProfile,
    load_site,
    site_choice,
    site_names,
    site_of_run,
    site_yaml,
)


@pytest.fixture
def write(tmp_path):
    """A profile of one's own; returns its path."""

    def file(text: str):
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return file


@pytest.mark.parametrize("name", site_names())
def test_every_shipped_profile_is_right_and_described(name):
    assert load_site(name).description


def test_there_are_a_generic_and_three_real_looking_profiles():
    assert {"generic", "infiniband-pyxis", "slingshot-cray", "campus-apptainer"} == set(site_names())
    assert {"pmix", "pmi2", "cray_shasta"} == {load_site(name).mpi for name in site_names()}


def test_a_profile_is_chosen_by_name_then_by_variable_then_generic(monkeypatch, write):
    monkeypatch.setenv(SITE_VARIABLE, str(write("mpi: cray_shasta")))
    assert "pmi2" == load_site("generic").mpi
    assert "cray_shasta" == load_site().mpi
    monkeypatch.delenv(SITE_VARIABLE)
    assert load_site("generic") == load_site()


def test_the_choice_means_the_same_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SITE_VARIABLE, "./mine.yaml")
    assert str(tmp_path / "mine.yaml") == site_choice(None)
    assert "generic" == site_choice("generic")


def test_an_unknown_name_names_the_known_ones(monkeypatch):
    with pytest.raises(ConfigError, match=r"no profile 'gneric' -> use one of campus-apptainer, generic"):
        load_site("gneric")


@pytest.mark.parametrize("name", site_names())
def test_the_profile_kept_with_a_run_is_the_same(name, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "site.yaml").write_text(site_yaml(load_site(name)), encoding="utf-8")
    assert load_site(name) == site_of_run(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mpi: openmpi", r"mine.yaml:1: mpi: Input should be 'pmix', 'pmi2' or 'cray_shasta'"),
        ("modulez: []", r"mine.yaml:1: modulez: unknown key -> keys of a profile are .*modules"),
        ("gpus: 8", "gpus"),
        ("gpus: --gpus-per-node=8", "write --gpus-per-node={n}"),
        ("gpus: '--gres=gpu:{n} --uid=0'", "cannot stand in a Slurm script"),
        ("environment: {'A;B': x}", "environment: 'A;B'"),
        ('fabric: {A: "a\\nb"}', r"fabric.A: .*line break"),
        ("srun: [oversubscribe]", "is no option"),
        ("options: {'--x': y}", "options: '--x'"),
        ("interface: 'eth0;reboot'", "interface"),
        ("container: {kind: docker, image: x}", "container.kind"),
        ("container: {kind: pyxis, image: x, mounts: ['/a:/a,/b:/b']}", "one entry a mount"),
        ('modules: ["a\\nb"]', "modules"),
    ],
)
def test_mistakes_are_told_with_their_place(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_site(write(text))


def test_pyxis_is_options_of_srun_and_apptainer_wraps_the_command():
    pyxis = SiteProfile(container=ContainerProfile(kind="pyxis", image="i.sqsh", mounts=["/a:/a", "/b:/b"]))
    assert ["--mpi=pmix", "--container-image=i.sqsh", "--container-mounts=/a:/a,/b:/b"] == pyxis.step_arguments()
    assert ["cmd"] == pyxis.inside_container(["cmd"])
    wrapped = SiteProfile(container=ContainerProfile(kind="apptainer", image="i.sif", mounts=["/a:/a"], python="/p"))
    assert ["--mpi=pmix"] == wrapped.step_arguments()
    assert ["apptainer", "exec", "--nv", "--bind", "/a:/a", "i.sif", "cmd"] == wrapped.inside_container(["cmd"])
    assert "/p" == wrapped.agent_python()


def test_the_interface_is_told_to_every_library_and_can_be_overruled():
    site = SiteProfile(interface="ib0", fabric={"NCCL_SOCKET_IFNAME": "hsn"})
    assert {"NCCL_SOCKET_IFNAME": "hsn", "GLOO_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": "ib0"} == site.variables()
