"""Hardware profiles: closed forms of collectives, the shipped ones, files, and errors that name the entry."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch

from fsdp_compile.passes import HardwareProfile, Network, profile
from fsdp_compile.passes.alpha_beta import ALGORITHMS, ROUNDS, Link
from fsdp_compile.passes.hardware import SHIPPED

ALPHA, BANDWIDTH = 3e-6, 100e9  # within a node
FAR_ALPHA, FAR_BANDWIDTH = 11e-6, 20e9
SIZE = 7.0e6  # bytes of the whole
NAMES = ["a100", "b200", "cpu", "h100", "h200"]


def machine(**changes: object) -> HardwareProfile:
    """Nodes of 4 ranks."""
    base = HardwareProfile(
        "machine",
        peak_flops=(("bfloat16", 4e14), ("float32", 1e14)),
        memory_bandwidth=2e12,
        kernel_launch=1e-6,
        host_bandwidth=5e10,
        ranks_in_node=4,
        within=Network(ALPHA, BANDWIDTH),
        across=Network(FAR_ALPHA, FAR_BANDWIDTH),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def seconds(kind: str, size: int, in_node: int | None = None, **changes: object) -> float:
    return machine(**changes).line(kind, size, in_node).seconds(SIZE)


# -- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "steps"), [("ring", 3), ("tree", 2), ("direct", 1)], ids=lambda value: str(value)
)
@pytest.mark.parametrize(("kind", "rounds"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_within_a_node(algorithm: str, steps: int, kind: str, rounds: int) -> None:
    expected = rounds * (steps * ALPHA + 3 / 4 * SIZE / BANDWIDTH)
    assert seconds(kind, 4, within=Network(ALPHA, BANDWIDTH, algorithm=algorithm)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_a_tree_takes_the_logarithm_rounded_up(ranks: int, steps: int) -> None:
    fixed = machine(ranks_in_node=128, within=Network(ALPHA, BANDWIDTH, algorithm="tree")).line("all_gather", ranks)
    assert fixed.fixed == pytest.approx(steps * ALPHA)


@pytest.mark.parametrize(
    ("algorithm", "near_steps", "far_steps", "bandwidth"),
    [
        ("ring", 12, 3, 4 * FAR_BANDWIDTH),  # each node is entered once, through 4 cards
        ("tree", 2, 2, 4 * FAR_BANDWIDTH),
        ("direct", 0, 1, FAR_BANDWIDTH),
    ],
)
def test_across_nodes(algorithm: str, near_steps: int, far_steps: int, bandwidth: float) -> None:
    expected = near_steps * ALPHA + far_steps * FAR_ALPHA + 15 / 16 * SIZE / bandwidth
    network = Network(FAR_ALPHA, FAR_BANDWIDTH, algorithm=algorithm)
    assert seconds("all_gather", 16, across=network) == pytest.approx(expected, rel=1e-12)


def test_one_rank_of_each_node() -> None:
    """Replicas: every step crosses the network, through one card."""
    expected = 2 * (15 * FAR_ALPHA + 15 / 16 * SIZE / FAR_BANDWIDTH)
    assert seconds("all_reduce", 16, in_node=1) == pytest.approx(expected, rel=1e-12)
    assert seconds("all_reduce", 4, in_node=1) > 3 * seconds("all_reduce", 4)


def test_the_slower_level_limits() -> None:
    fast = Network(FAR_ALPHA, 10 * BANDWIDTH)
    assert machine(across=fast).line("all_gather", 16).per_byte == pytest.approx(15 / 16 / BANDWIDTH)


def test_what_each_rank_tells_each_other_goes_through_its_own_card() -> None:
    assert machine().line("all_to_all", 16).per_byte == pytest.approx(15 / 16 / FAR_BANDWIDTH)


def test_a_broadcast_brings_all() -> None:
    assert seconds("broadcast", 4) == pytest.approx(3 * ALPHA + SIZE / BANDWIDTH)


@pytest.mark.parametrize("kind", ROUNDS)
def test_one_rank_has_nothing_to_do(kind: str) -> None:
    assert seconds(kind, 1) == 0


def test_overhead_is_paid_once() -> None:
    for size, level in ((4, "within"), (16, "across")):
        network = getattr(machine(), level)
        slower = seconds("all_reduce", size, **{level: replace(network, overhead=1e-3)})
        assert slower == pytest.approx(seconds("all_reduce", size) + 1e-3)


def test_a_kind_may_find_another_link() -> None:
    network = Network(ALPHA, BANDWIDTH, collectives=(("reduce_scatter", Link(2 * ALPHA, BANDWIDTH / 2)),))
    assert seconds("reduce_scatter", 4, within=network) == pytest.approx(2 * seconds("reduce_scatter", 4))
    assert seconds("all_gather", 4, within=network) == seconds("all_gather", 4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", ROUNDS)
def test_symbols_and_numbers_agree(kind: str, algorithm: str) -> None:
    network = Network(FAR_ALPHA, FAR_BANDWIDTH, overhead=1e-5, algorithm=algorithm)
    world = sympy.Symbol("world", integer=True, positive=True)
    for in_node in (None, 1, 3):
        each = machine(within=replace(network, latency=ALPHA), across=network)
        symbolic = each.line(kind, world, in_node)
        for size in (1, 2, 3, 4, 5, 8, 12, 64, 511, 4096):
            expected = each.line(kind, size, in_node)
            assert float(symbolic.fixed.subs(world, size)) == pytest.approx(expected.fixed, rel=1e-12)
            assert float(symbolic.per_byte.subs(world, size)) == pytest.approx(expected.per_byte, rel=1e-12)


def test_on_another_network_all_ranks_are_alike() -> None:
    moved = machine().on(Network(1e-4, 1e9))
    assert moved.line("all_gather", 2) == moved.line("all_gather", 2, in_node=1)
    assert moved.line("all_gather", 64).per_byte == pytest.approx(63 / 64 / 1e9)
    assert moved.flop_rate(torch.bfloat16) == machine().flop_rate(torch.bfloat16)


# -- profiles ---------------------------------------------------------------------------------------------------------


def test_shipped_profiles() -> None:
    assert sorted(path.stem for path in SHIPPED.iterdir()) == NAMES
    profiles = [profile(name) for name in NAMES]
    assert [each.name for each in profiles] == NAMES
    assert len({each.digest() for each in profiles}) == len(set(profiles)) == len(NAMES)


def test_shipped_profiles_are_in_the_package() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["fsdp_compile.passes"]
    assert set(SHIPPED.parent.glob(pattern)) == set(SHIPPED.iterdir())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cpu"])
def test_nodes_of_gpus(name: str) -> None:
    """Eight in a node, where links are faster than the network that all of them share with others."""
    node = profile(name)
    assert node.ranks_in_node == 8
    times = [node.line("all_gather", ranks).seconds(1e9) for ranks in (8, 16, 64, 512, 4096)]
    assert times == sorted(times) and times[0] < times[1]
    assert node.line("all_reduce", 8, in_node=1).seconds(1e9) > 5 * node.line("all_reduce", 8).seconds(1e9)


def test_generations_get_faster() -> None:
    a100, h100, b200 = (profile(name) for name in ("a100", "h100", "b200"))
    for faster, slower in ((b200, h100), (h100, a100)):
        assert faster.flop_rate(torch.bfloat16) > 2 * slower.flop_rate(torch.bfloat16)
        assert faster.byte_rate > 1.5 * slower.byte_rate
        assert faster.within.bandwidth > 1.5 * slower.within.bandwidth
    assert profile("h200") == replace(h100, name="h200", memory_bandwidth=4.8e12)


def test_rates_are_what_is_achievable() -> None:
    half = machine(achievable_flops=0.5, achievable_bandwidth=0.25)
    assert half.flop_rate(torch.bfloat16) == 2e14 and half.byte_rate == 5e11
    assert half.flop_rate(torch.int64) == half.flop_rate(torch.float32) == 5e13  # what is not listed


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_files_keep_everything(suffix: str, tmp_path: Path) -> None:
    links = (("all_reduce", Link(1e-5, 2e9)), ("reduce_scatter", Link(1e-6, 1e9, 1e-7)))
    original = machine(within=Network(1 / 3, 1e9, algorithm="tree", collectives=links), achievable_flops=2 / 3)
    path = tmp_path / f"mine.{suffix}"
    original.write(path)
    assert profile(str(path)) == HardwareProfile.read(path) == original
    assert HardwareProfile.read(path).digest() == original.digest()


def test_files_of_users_may_be_short(tmp_path: Path) -> None:
    text = """
name = "mine"
memory_bandwidth = 1_000_000_000_000
kernel_launch = 0
host_bandwidth = 1e10
ranks_in_node = 2
peak_flops = { float32 = 1e13 }
within = { latency = 1e-6, bandwidth = 1e11 }
across = { latency = 1e-5, bandwidth = 1e10, algorithm = "tree" }
"""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    mine = profile(str(path))
    assert (mine.achievable_flops, mine.within.algorithm, mine.across.algorithm) == (1.0, "ring", "tree")


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("h10", "unknown hardware profile 'h10'; known are a100, b200, cpu, h100, h200, and paths of .toml"),
        ("no/such.toml", "no such hardware profile: no/such.toml"),
    ],
)
def test_there_is_none(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        profile(name)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('name = "machine"', 'nam = "machine"', "unknown entry 'nam'; known are name, peak_flops"),
        ("kernel_launch = 1e-06", "", "missing entry 'kernel_launch'"),
        ("host_bandwidth = 50000000000.0", "host_bandwidth = 0", "host_bandwidth must be a finite number above 0, "),
        ("kernel_launch = 1e-06", "kernel_launch = -1", "kernel_launch must be a finite number 0 or more, not -1"),
        ("kernel_launch = 1e-06", "kernel_launch = nan", "kernel_launch must be a finite number 0 or more, not nan"),
        ("kernel_launch = 1e-06", 'kernel_launch = "1"', "kernel_launch must be a finite number 0 or more, not '1'"),
        ("achievable_flops = 1.0", "achievable_flops = 2", "must be a finite number above 0 and at most 1, "),
        ("ranks_in_node = 4", "ranks_in_node = 0", "ranks_in_node must be a whole number, 1 or more, not 0"),
        ("float32", "float31", "peak_flops has 'float31', which is no dtype of torch"),
        ("float32", "float64", "peak_flops lacks 'float32'"),
        ("float32 = 100000000000000.0", "float32 = -1", "peak_flops.float32 must be a finite number above 0, not -1"),
        ('algorithm = "ring"', 'algorithm = "star"', "within.algorithm must be one of ring, tree, direct, not 'star'"),
        ("latency = 3e-06", "lateny = 3e-06", "unknown entry 'lateny' in within; known are latency, bandwidth"),
        ("latency = 3e-06", "latency = -3e-06", "within.latency must be a finite number 0 or more, not -3e-06"),
        ("latency = 1.1e-05", "", "missing entry 'latency' in across"),
        ("[across]", "[across.collectives.gossip]\nlatency = 0\nbandwidth = 1\n[across]", "has 'gossip'; known are"),
        ("[across]", "[across.collectives.all_reduce]\nlatency = 0\n[across]", "missing entry 'bandwidth' in "),
        ("[across]", "[across.collectives]\nall_reduce = 1\n[across]", "across.collectives.all_reduce must be a table"),
        ('name = "machine"', "name = machine", "Invalid value (at line 1"),
    ],
)
def test_wrong_files(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    machine().write(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".*" + re.escape(complaint)):
        HardwareProfile.read(path)


def test_wrong_forms(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mine.yaml' is neither a .toml nor a .json file"):
        machine().write(tmp_path / "mine.yaml")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"list.json: the file must be a table, not \[\]"):
        HardwareProfile.read(tmp_path / "list.json")
