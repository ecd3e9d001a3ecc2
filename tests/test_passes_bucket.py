"""What ``bucket`` merges and what it keeps apart, in small graphs made by hand, run on two simulated ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fake_world import copy_graph, fake_world, text_of
from graph_maker import GraphMaker, launches, run_pass
from simulated_ranks import random_inputs, run_on_all_ranks, same_bits
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile.passes import PassContext, bucket
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
from fsdp_compile.passes.torch_compat import c10d

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
    "gathers": ["two groups", "two dtypes"],
    "reductions": ["two groups", "two kinds", "two dtypes"],
    "all-reduces": ["two groups", "two kinds", "two dtypes"],
}


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (gather(a), gather(b, "other")),
        lambda a, b: (gather(a), gather(b.double())),
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
