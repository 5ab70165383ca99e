"""What components ask for, the order old Slurm needs, time limits, and what may stand in a script."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.errors import ConfigError
from hybridsched.slurm import words
from hybridsched.slurm.components import Component, components_of, minutes_of, order_for_pmix
from hybridsched.slurm.sites import SiteProfile


def test_a_component_asks_for_everything_it_names():
    one = Component(
        nodes=2,
        ntasks_per_node=3,
        gpus_per_node=8,
        partition="a,b",
        account="x",
        qos="high",
        constraint="h100&ib",
        reservation="r1",
        cpus_per_task=4,
        mem="480G",
        exclusive=True,
        time="1:00:00",
        options={"switches": "1", "contiguous": ""},
    )
    assert [
        "--nodes=2",
        "--ntasks-per-node=3",
        "--partition=a,b",
        "--account=x",
        "--qos=high",
        "--reservation=r1",
        "--constraint=h100&ib",
        "--cpus-per-task=4",
        "--mem=480G",
        "--time=1:00:00",
        "--exclusive",
        "--switches=1",
        "--contiguous",
        "--gpus-per-node=8",
        "--no-kill",
    ] == one.sbatch(SiteProfile())
    assert 6 == one.tasks


@pytest.mark.parametrize(
    ("site", "gres", "expected"),
    [
        ("--gpus-per-node={n}", None, ["--gpus-per-node=8"]),
        ("--gres=gpu:a100:{n}", None, ["--gres=gpu:a100:8"]),
        ("--gpus-per-node={n}", "gpu:h100:{n}", ["--gres=gpu:h100:8"]),
        ("--gpus-per-node={n}", "gpu:h100:4,nvme:1", ["--gres=gpu:h100:4,nvme:1"]),
        ("", None, []),
    ],
)
def test_gpus_are_asked_for_as_the_site_spells_it(site, gres, expected):
    one = Component(gpus_per_node=8, gres=gres)
    profile = SiteProfile(gpus=site)
    assert expected == [option for option in one.sbatch(profile) if "g" in option[2:4]]
    assert expected == [option for option in one.step(profile) if "g" in option[2:4]]


def test_no_gpus_are_asked_for_where_none_are_wanted():
    assert not any("gpu" in option for option in Component(gres="gpu:h100:{n}").sbatch(SiteProfile()))


def test_names_of_submitit_are_understood():
    (one,) = components_of([{"tasks_per_node": 2, "mem_gb": 1.5, "timeout_min": 7}])
    assert (2, "1536M", 7) == (one.ntasks_per_node, one.mem, one.minutes)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ([], "is empty"),
        ([{"nodez": 1}], r"components\[0\]: nodez unknown -> known are .*nodes"),
        ([{}, {"nodes": 0}], r"components\[1\].nodes: 0 -> write a whole number of at least 1"),
        ([{"nodes": True}], "whole number"),
        ([{"gpus_per_node": -1}], "at least 0"),
        ([{"time": "soon"}], r"components\[0\].time: 'soon'"),
        ([{"options": {"array": "0-3"}}], "array cannot be set here"),
    ],
)
def test_what_cannot_be_is_refused_naming_the_component(given_, message):
    with pytest.raises(ConfigError, match=message):
        components_of(given_)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        (90, 90),
        ("90", 90),
        ("1:30", 2),
        ("1:00:00", 60),
        ("2-12", 3600),
        ("2-12:30", 3630),
        ("1-00:00:01", 1441),
        ("0:10", 1),
        ("UNLIMITED", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(text, minutes):
    assert minutes == minutes_of(text)


@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        ([["trn0", "trn1"], ["gpu0", "gpu1"]], [1, 0]),
        ([["a0", "a1"], ["b0"]], [0, 1]),
        ([["node10", "node11"], ["node2", "node9"]], [1, 0]),  # 9 < 10: numbers are no text
        ([["node1", "node3"], ["node2"]], None),
        ([["node1", "node2"], ["node1", "node2"]], None),
        ([["node1"], []], None),
    ],
)
def test_the_order_for_pmix_is_that_of_the_node_names(nodes, order):
    assert order == order_for_pmix(nodes)


_NAMES = st.sets(st.tuples(st.sampled_from(["a", "b", "node"]), st.integers(0, 30)), min_size=1, max_size=4)


@given(st.lists(_NAMES, min_size=1, max_size=4))
def test_in_the_order_for_pmix_all_nodes_are_sorted(groups):
    order = order_for_pmix([[f"{prefix}{number}" for prefix, number in group] for group in groups])
    if order is not None:
        joined = [node for index in order for node in sorted(groups[index])]
        assert sorted(set(joined)) == joined


@given(st.text(max_size=40))
def test_whatever_passes_as_a_word_is_one_harmless_word(text):
    try:
        passed = words.word(text, "key")
    except ConfigError as error:
        assert str(error).startswith("key: ")
        return
    assert passed == text
    assert text
    assert not text.startswith("-")
    assert not set(text) & set(" \t\n\r\"'`$\\;&|<>(){}#*?!~")


@given(st.text(max_size=60))
def test_whatever_passes_as_a_line_is_one_line(text):
    try:
        passed = words.line(text, "key")
    except ConfigError:
        assert not text.isprintable()
        return
    assert [passed] == (passed.splitlines() or [""])
