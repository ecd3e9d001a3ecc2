"""What ``bucket`` merges and what it keeps apart, in small graphs made by hand, run on two simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_world import fake_world, text_of
from graph_maker import GraphMaker, launches, run_pass
from simulated_ranks import random_inputs, run_on_all_ranks, same_bits
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile import backend
from fsdp_compile.passes import PassConfig, PassContext, bucket, copy_graph, profile
from fsdp_compile.passes.graph_view import (
    ALL_REDUCES,
    GATHERS,
    REDUCTIONS,
    WAIT,
    Tag,
    all_reduces,
    gathers,
    reductions,
    set_tag,
)
from fsdp_compile.passes.torch_compat import c10d, emit

Function = Callable[..., tuple[torch.Tensor, ...]]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(size=2):
        yield


def gather(x: torch.Tensor, group: str = "0") -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group))


def reduce(x: torch.Tensor, kind: str = "avg", group: str = "0") -> torch.Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, kind, 2, group))


def all_reduce(x: torch.Tensor, kind: str = "avg", group: str = "0") -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, kind, group))


def trace(function: Function, *inputs: torch.Tensor, groups: tuple[int, ...] = (0, 0, 0, 0)) -> Graph:
    """The graph of ``function``; its i-th launch moves parameter "p<i>" of the group ``groups[i]``."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    launches = [node for node in graph.nodes if node.target in (*GATHERS, *REDUCTIONS, *ALL_REDUCES)]
    for index, start in enumerate(launches):
        phase = "unshard" if start.target in GATHERS else "reduce"
        tag = Tag(groups[index], f"module{groups[index]}", (f"p{index}",), (index,), phase)
        for node in (start, *(user for user in start.users if user.target is WAIT)):
            set_tag(node, tag)
    return graph


def bucketed(before: Graph) -> list[tuple[str, ...]]:
    """Run the pass, check what is always true, and return the parameters of each launch, in order."""
    after = copy_graph(before)
    report = bucket(after, PassContext())
    after.lint()
    inputs = random_inputs(before, 2)
    assert same_bits(run_on_all_ranks(before, inputs), run_on_all_ranks(after, inputs))
    again = copy_graph(after)
    assert bucket(again, PassContext()).changes == 0
    assert text_of(again) == text_of(after)
    assert (text_of(before) == text_of(after)) == (report.changes == 0)
    found = {each.start: each.tag.params for each in (*gathers(after), *reductions(after), *all_reduces(after))}
    return [found[node] for node in after.nodes if node in found]


A, B = torch.ones(4, 3), torch.ones(2, 5)


def test_merges_gathers_at_the_first() -> None:
    """The cast of the second moves up with it, the compute between does not."""
    graph = trace(lambda a, b: (gather(a).sum() * 2, gather(b.half().float())), A, B)
    assert bucketed(graph) == [("p0", "p1")]


def test_merges_gathers_of_several_dtypes() -> None:
    graph = trace(lambda a, b: (gather(a), gather(b.double())), A, B)
    assert bucketed(graph) == [("p0", "p1")]


def test_merges_reductions_at_the_last() -> None:
    """What is computed from the first one's result moves down behind it."""
    graph = trace(lambda a, b: (reduce(a) / 3, reduce(b.cos()).double()), A, B)
    assert bucketed(graph) == [("p0", "p1")]


def test_merges_all_reduces_at_the_last() -> None:
    graph = trace(lambda a, b: (all_reduce(a) / 3, all_reduce(b.cos()).double()), A, B)
    assert bucketed(graph) == [("p0", "p1")]


def test_order_is_that_of_the_group() -> None:
    graph = trace(lambda a, b: (reduce(a), reduce(b)), A, B)
    for each, index in zip(list(reductions(graph)), (1, 0), strict=True):
        for node in (each.start, *each.waits):
            set_tag(node, Tag(0, "module", (f"p{index}",), (index,), "reduce"))
    assert bucketed(graph) == [("p0", "p1")]


def test_one_alone_stays() -> None:
    assert bucketed(trace(lambda a, b: (gather(a), reduce(b)), A, B)) == [("p0",), ("p1",)]


def test_groups_stay_apart() -> None:
    graph = trace(lambda a, b: (gather(a), gather(b), gather(a.clone()), gather(b.clone())), A, B, groups=(0, 1, 0, 1))
    assert bucketed(graph) == [("p0", "p2"), ("p1", "p3")]


APART = {
    "gathers": ["two groups"],
    "reductions": ["two groups", "two kinds", "two dtypes"],
    "all-reduces": ["two groups", "two kinds", "two dtypes"],
}


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (gather(a), gather(b, "other")),
        lambda a, b: (reduce(a), reduce(b, group="other")),
        lambda a, b: (reduce(a), reduce(b, kind="sum")),
        lambda a, b: (reduce(a), reduce(b.double())),
        lambda a, b: (all_reduce(a), all_reduce(b, group="other")),
        lambda a, b: (all_reduce(a), all_reduce(b, kind="sum")),
        lambda a, b: (all_reduce(a), all_reduce(b.double())),
    ],
    ids=[f"{what} of {of}" for of, whats in APART.items() for what in whats],
)
def test_what_cannot_travel_together_stays_apart(function: Function) -> None:
    assert bucketed(trace(function, A, B)) == [("p0",), ("p1",)]


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (gather(b), gather(gather(a) * 2)),
        lambda a, b: (reduce(b), reduce(reduce(a) * 2)),
        lambda a, b: (all_reduce(b), all_reduce(all_reduce(a) * 2)),
    ],
    ids=["gathers", "reductions", "all-reduces"],
)
def test_what_needs_the_other_is_not_merged_with_it(function: Function) -> None:
    """Parameter 2 is computed from parameter 1; 0 is independent of both, so it goes with the one before."""
    assert bucketed(trace(function, A, B)) == [("p0", "p1"), ("p2",)]


def test_dependent_reductions_are_merged_with_their_peers() -> None:
    graph = trace(lambda a, b: (reduce(a), reduce(reduce(b) * 2), reduce(a - 1)), A, torch.ones(4, 5))
    assert bucketed(graph) == [("p0", "p1", "p3"), ("p2",)]


def test_a_module_that_runs_twice_has_two_buckets() -> None:
    graph = trace(lambda a, b: (gather(a), gather(b), gather(a), gather(b)), A, B)
    for each, index in zip(list(gathers(graph)), (0, 1, 0, 1), strict=True):
        for node in (each.start, *each.waits):
            set_tag(node, Tag(0, "module", (f"p{index}",), (index,), "unshard"))
    assert bucketed(graph) == [("p0", "p1"), ("p0", "p1")]


HSDP = {"0": [[0, 1], [2, 3]], "replicas": [[0, 2], [1, 3]]}  # shard ranks, and those that hold the same shard


@pytest.mark.parametrize(
    ("between", "copies"),
    [
        (lambda make, reduced: reduced, 1),
        (lambda make, reduced: make.double(reduced), 2),
    ],
    ids=["packed already", "packed again"],
)
def test_reductions_over_shards_then_replicas(between: Callable[[GraphMaker, Node], Node], copies: int) -> None:
    """What comes packed out of one collective goes so into the next, unless something is done to it in between."""
    make = GraphMaker()
    results = [make.all_reduce(between(make, make.reduce(make.input(), param)), param) for param in "ba"]
    assert bucketed_over_replicas(make, *results) == (["ab", "ab"], copies)


def test_part_of_what_came_packed() -> None:
    make = GraphMaker()
    a, b, c = (make.reduce(make.input(), param) for param in "abc")
    assert bucketed_over_replicas(make, make.all_reduce(a, "a"), make.all_reduce(b, "b"), c) == (["abc", "ab"], 2)


def test_what_came_packed_in_another_bucket() -> None:
    """Two runs of a module: each all-reduce takes a part of both."""
    make = GraphMaker()
    (a, b), (c, d) = ([make.reduce(make.input(), param) for param in "ab"] for _ in range(2))
    results = [make.all_reduce(part, param) for part, param in ((a, "a"), (d, "b"), (c, "a"), (b, "b"))]
    assert bucketed_over_replicas(make, *results) == (["ab", "ab", "ab", "ab"], 4)


def bucketed_over_replicas(make: GraphMaker, *results: Node) -> tuple[list[str], int]:
    """Run the pass, check results, and return the parameters of each launch and how often something is packed."""
    graph = make.finish(*results)
    assert same_bits(*run_pass(bucket, graph, ranks=4, parts=HSDP))
    packings = graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    return launches(graph), len(packings)


# -- across modules ---------------------------------------------------------------------------------------------------


ACROSS = [PassConfig(bucket=200), PassConfig(bucket="1GB"), PassConfig(bucket="auto")]


def across(config: PassConfig) -> Callable[[Graph, PassContext], Any]:
    """The pass with another configuration."""
    return lambda graph, _: bucket(graph, PassContext(config))


def test_buckets_are_filled_to_a_size_in_order_of_use() -> None:
    """Gathered in order a, b, c and used in order c, a, b; each brings 96 bytes."""
    make = GraphMaker()
    a, b, c = (make.gather(make.input(), param, group) for group, param in enumerate("abc"))
    graph = make.finish(make.double(c), make.double(a), make.double(b))
    assert same_bits(*run_pass(across(PassConfig(bucket=2 * 96)), graph))
    assert launches(graph) == ["ac", "b"]
    (first, second) = gathers(graph)
    assert first.tag.parameters == [(0, "a"), (2, "c")] and second.tag.parameters == [(1, "b")]
    assert [param.tag.group for param in first.params] == [0, 2]


def test_none_merges_nothing() -> None:
    graph = trace(lambda a, b: (gather(a), gather(b), reduce(a), reduce(b)), A, B)
    assert bucket(graph, PassContext(PassConfig(bucket="none"))).changes == 0


@pytest.mark.parametrize("config", ACROSS, ids=repr)
def test_what_groups_need_of_each_other_makes_no_cycle(config: PassConfig) -> None:
    make = GraphMaker()
    a, d = make.reduce(make.input(), "a", 0), make.reduce(make.input(), "d", 1)
    c, b = make.reduce(make.stack(a, a), "c", 2), make.reduce(make.stack(d, d), "b", 3)
    graph = make.finish(a, b, c, d)
    assert same_bits(*run_pass(across(config), graph))
    assert sorted("".join(launches(graph))) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("config", [PassConfig(), *ACROSS], ids=repr)
def test_no_compute_is_pulled_before_a_launch(config: PassConfig) -> None:
    """The second gather takes a product that the first would have to wait for; the third goes with the first."""
    make = GraphMaker()
    x = make.input(size=(3, 3))
    a = make.gather(make.input(), "a")
    product = emit(make.graph, torch.ops.aten.mm.default, a, x)
    c = make.gather(product, "c")
    graph = make.finish(a, c, make.gather(make.input(), "b"))
    assert same_bits(*run_pass(across(config), graph))
    places = {node: place for place, node in enumerate(graph.nodes)}
    first = next(iter(gathers(graph)))
    assert "c" not in first.tag.params and places[first.start] < places[product]


@pytest.mark.parametrize("config", ACROSS, ids=repr)
def test_all_reduces_go_as_their_reductions(config: PassConfig) -> None:
    make = GraphMaker()
    reduced = [make.reduce(make.input(size=(2 + 2 * i, 3)), param, i) for i, param in enumerate("abcd")]
    results = [make.all_reduce(each, param, i) for i, (each, param) in enumerate(zip(reduced, "abcd", strict=True))]
    graph = make.finish(*results)
    assert same_bits(*run_pass(across(config), graph, ranks=4, parts=HSDP))
    shards, replicas = ([each.tag.params for each in kind(graph)] for kind in (reductions, all_reduces))
    assert shards == replicas


def test_names_of_buckets_across_modules() -> None:
    make = GraphMaker()
    graph = make.finish(*(make.reduce(make.input(), param, group) for group, param in enumerate("ab")))
    bucket(graph, PassContext(PassConfig(bucket="1GB")))
    (reduction,) = reductions(graph)
    assert (reduction.tag.name, reduction.tag.groups) == ("root to root", (0, 1))


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bucket", [True, False, None, 0, -5, 1.5, "", "25", "25mb", "-1MB", "0.1B", "group", "25 MBit"]
)
def test_a_choice_that_is_none(bucket: Any) -> None:
    with pytest.raises(ValueError, match="bucket must be 'module', 'none', 'auto', or a size in bytes"):
        backend.configure(bucket=bucket)


@pytest.mark.parametrize(
    "name, value", [("schedule", "no"), ("schedule", 0), *[("memory_budget", v) for v in ("8GB", -1, 0.5)]]
)
def test_other_choices_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        backend.configure(**{name: value})


def test_a_machine_that_is_unknown() -> None:
    with pytest.raises(ValueError, match="unknown hardware profile 'h101'"):
        backend.configure(hardware="h101")


def test_sizes_in_words() -> None:
    sizes = {"25MB": 25_000_000, "1.5 KiB": 1536, "2GB": 2 * 10**9, "7B": 7, "1GiB": 2**30, 12: 12}
    assert {size: PassConfig(bucket=size).bucket_bytes for size in sizes} == sizes
    assert [PassConfig(bucket=choice).bucket_bytes for choice in ("module", "none", "auto")] == [None] * 3


def test_choices_are_in_the_digest(tmp_path: Path) -> None:
    """So is what a profile's file holds."""
    path = tmp_path / "mine.toml"
    profile("h100").write(path)
    configs = [PassConfig(), PassConfig(bucket="auto"), PassConfig(bucket=5), PassConfig(hardware="a100")]
    digests = {config.digest() for config in (*configs, PassConfig(hardware=str(path)))}
    replace(profile("h100"), kernel_launch=1.0).write(path)
    digests.add(PassConfig(hardware=str(path)).digest())
    assert len(digests) == 6
