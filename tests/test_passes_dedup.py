"""Which gathers are dropped because what they bring is there: in graphs by hand, in random ones, in real modules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
import torch.nn as nn
from fake_world import fake_world, graphs_of, skeletons_of
from graph_maker import GraphMaker, aten, launches, run_pass
from random_graphs import gather_again, random_pair
from simulated_ranks import same_bits
from snapshots import assert_snapshot
from torch.fx import Graph, Node

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.passes import MemoryProfile, PassConfig, PassContext, bucket, dedup, schedule
from fsdp_compile.passes.graph_view import UNSHARD, Tag, set_tag
from fsdp_compile.passes.torch_compat import emit

BF16 = torch.bfloat16


def deduplicated(make: GraphMaker, *outputs: Node) -> list[str]:
    """The launches after the pass, which must not change what the graph computes."""
    graph = make.finish(*outputs)
    before, after = run_pass(dedup, graph)
    assert same_bits(before, after)
    return launches(graph)


# -- what brings the same ---------------------------------------------------------------------------------------------


def test_two_runs_in_a_row() -> None:
    make = GraphMaker()
    shard = make.input()
    first = make.double(make.gather(shard, "a"))
    assert deduplicated(make, make.add(first, make.gather(shard, "a"))) == ["a"]


def test_three_runs_in_a_row() -> None:
    make = GraphMaker()
    shard, total = make.input(), make.input(size=(8, 3))
    for _ in range(3):
        total = make.add(total, make.gather(shard, "a"))
    assert deduplicated(make, total) == ["a"]


def test_another_module_in_between() -> None:
    make = GraphMaker()
    shard, other, total = make.input(), make.input(), make.input(size=(8, 3))
    for source, param in ((shard, "a"), (other, "b"), (shard, "a")):
        total = make.add(total, make.gather(source, param, group=ord(param)))
    assert deduplicated(make, total) == ["a", "b", "a"]


def test_another_module_in_between_of_data_that_are_saved() -> None:
    make = GraphMaker()
    shard, other = make.input(), make.input()
    whole = make.gather(shard, "a")
    total = make.add(make.double(whole), make.gather(other, "b", group=1))
    assert deduplicated(make, make.add(total, make.gather(shard, "a")), whole) == ["a", "b"]


def tagged(node: Node) -> Node:
    set_tag(node, Tag(0, "", ("a",), (0,), UNSHARD))
    return node


def cast(make: GraphMaker, shard: Node, dtype: torch.dtype = BF16) -> Node:
    return tagged(emit(make.graph, torch.ops.prims.convert_element_type.default, shard, dtype))


def rounded(make: GraphMaker, shard: Node, decimals: int) -> Node:
    node = make.graph.call_function(aten.round.decimals, (shard,), {"decimals": decimals})
    node.meta["val"] = shard.meta["val"]
    return tagged(node)


def test_the_same_cast() -> None:
    make = GraphMaker()
    shard = make.input()
    first = make.double(make.gather(cast(make, shard), "a"))
    graph = make.finish(make.add(first, make.gather(cast(make, shard), "a")))
    before, after = run_pass(dedup, graph)
    assert same_bits(before, after)
    assert launches(graph) == ["a"]
    assert len(list(graph.nodes)) == 7  # input, cast, launch, wait, double, sum, output


@pytest.mark.parametrize(
    "sources",
    [
        lambda make, shard: (cast(make, shard), cast(make, shard, torch.float64)),
        lambda make, shard: (cast(make, shard), shard),
        lambda make, shard: (rounded(make, shard, 0), rounded(make, shard, 1)),
        lambda make, shard: [tagged(emit(make.graph, each, shard)) for each in (aten.neg.default, aten.abs.default)],
        lambda make, shard: (shard, make.input()),
        lambda make, shard: (shard, make.double(shard)),
    ],
    ids=["another cast", "no cast", "another argument", "another operator", "another shard", "computed"],
)
def test_not_the_same(sources: Callable[..., Sequence[Node]]) -> None:
    make = GraphMaker()
    left, right = sources(make, make.input())
    outputs = make.double(make.gather(left, "a")), make.double(make.gather(right, "a"))
    assert deduplicated(make, *outputs) == ["a", "a"]


def test_other_ranks() -> None:
    make = GraphMaker()
    shard = make.input()
    outputs = [make.double(make.gather(shard, "a", name=name)) for name in ("0", "1")]
    assert deduplicated(make, *outputs) == ["a", "a"]


@pytest.mark.parametrize("written", ["base", "shard", "view", "other"])
def test_writes_in_between(written: str) -> None:
    make = GraphMaker()
    base, other = make.input(), make.input()
    shard = emit(make.graph, aten.slice.Tensor, base, 0, 0, 4)
    view = emit(make.graph, aten.slice.Tensor, shard, 0, 0, 2)
    first = make.double(make.gather(shard, "a"))
    emit(make.graph, aten.mul_.Tensor, {"base": base, "shard": shard, "view": view, "other": other}[written], 2)
    second = make.double(make.gather(shard, "a"))
    assert deduplicated(make, first, second) == (["a"] if written == "other" else ["a", "a"])


@pytest.mark.parametrize("written", [0, 1])
def test_writes_to_what_is_brought(written: int) -> None:
    make = GraphMaker()
    shard = make.input()
    wholes = [make.gather(shard, "a") for _ in range(2)]
    emit(make.graph, aten.mul_.Tensor, wholes[written], 2)
    assert deduplicated(make, *map(make.double, wholes)) == ["a", "a"]


def test_a_second_run_that_needs_less() -> None:
    """The backward of a run may need some parameters only."""
    make = GraphMaker()
    shards = {param: make.input() for param in "ab"}
    total = make.input(size=(8, 3))
    for params in ("ab", "a"):
        for whole in [make.gather(shards[param], param) for param in params]:
            total = make.add(total, whole)
    graph = make.finish(total)
    bucket(graph, PassContext())
    assert launches(graph) == ["ab", "a"]
    before, after = run_pass(dedup, graph)
    assert same_bits(before, after)
    assert launches(graph) == ["ab"]


def test_copies_are_shared() -> None:
    """What is sharded on another dimension is concatenated after the gather, once."""
    make = GraphMaker()
    shard = make.input()

    def whole() -> Node:
        halves = emit(make.graph, aten.split.Tensor, make.gather(shard, "a"), 4)
        items = [emit(make.graph, operator.getitem, halves, index) for index in range(2)]
        joined = emit(make.graph, aten.cat.default, items, 1)
        for node in (halves, *items):
            tagged(node)
        return tagged(joined)

    graph = make.finish(make.double(whole()), make.double(whole()))
    before, after = run_pass(dedup, graph)
    assert same_bits(before, after)
    assert launches(graph) == ["a"]
    assert len(graph.find_nodes(op="call_function", target=aten.cat.default)) == 1


# -- memory -----------------------------------------------------------------------------------------------------------


def random_plan(seed: int, config: PassConfig) -> tuple[Graph, Graph]:
    """A forward and a backward that gather some parameters twice, as ``schedule`` has them."""
    graphs = random_pair(seed, modules=6)
    for graph in graphs:
        gather_again(graph, Random(seed))
    if config.schedule:
        schedule(graphs, PassContext(config))
    return graphs


def in_room(room: int) -> Callable[[int], PassConfig]:
    """As much memory as the plan needs that takes the least, or so many times that."""
    return lambda seed: PassConfig(
        memory_budget=room * MemoryProfile.of(random_plan(seed, PassConfig(memory_budget=0))).peak
    )


@pytest.mark.parametrize(
    ("config_of", "at_least"),
    [(lambda _: PassConfig(), 41), (in_room(1), 41), (in_room(2), 41), (lambda _: PassConfig(schedule=False), 0)],
    ids=["no budget", "no room", "room", "unscheduled"],
)
def test_memory_of_random_graphs(config_of: Callable[[int], PassConfig], at_least: int) -> None:
    """What is dropped never adds to the bytes that are live at any node that stays."""
    dropped = 0
    for seed in range(40):
        config = config_of(seed)
        graphs = random_plan(seed, config)
        before = live_at(graphs)
        dropped += sum(dedup(graph, PassContext(config)).changes for graph in graphs)
        assert all(live <= before[name] for name, live in live_at(graphs).items()), seed
    assert dropped >= at_least


@pytest.mark.parametrize("saved", [False, True])
def test_without_a_schedule_nothing_stays_for_longer(saved: bool) -> None:
    """The second gather is launched after the last use of what the first has brought."""
    make = GraphMaker()
    shard = make.input()
    whole = make.gather(shard, "a")
    total = make.add(make.double(make.double(whole)), make.gather(shard, "a"))
    graph = make.finish(total, *([whole] if saved else []))
    assert dedup(graph, PassContext(PassConfig(schedule=False))).changes == saved


@pytest.mark.parametrize("size", ["1KB", "1MB"])
@pytest.mark.parametrize("runs", ["aa", "aaaa", "abab", "aabb"])
def test_buckets_across_modules_never_hold_a_parameter_twice(runs: str, size: str) -> None:
    make = GraphMaker()
    shards, x = {param: make.input() for param in "ab"}, make.input(size=(8, 3))
    for param in runs:
        x = make.add(x, make.gather(shards[param], param, group=ord(param)))
    graph = make.finish(x)
    before = run_pass(lambda graph, _: bucket(graph, PassContext(PassConfig(bucket=size))), graph)
    assert same_bits(*before)
    assert all(len(set(params)) == len(params) for params in launches(graph))
    assert same_bits(*run_pass(dedup, graph))
    assert launches(graph) == ["".join(sorted({*runs}))]


def live_at(graphs: Sequence[Graph]) -> dict[str, int]:
    profile = MemoryProfile.of(graphs)
    names = [f"{number} {node}" for number, graph in enumerate(graphs) for node in graph.nodes]
    return dict(zip(names, profile.live, strict=True))


def test_a_budget_decides_by_what_is_there() -> None:
    """With room, ``schedule`` launches the second gather while the first is there; without, after that."""
    for budget, dropped in ((0, 0), (10**6, 1)):
        make = GraphMaker()
        shard, other, x = make.input(), make.input(), make.input(size=(8, 3))
        for source, param in ((shard, "a"), (other, "b"), (shard, "a")):
            x = make.add(x, make.gather(source, param, group=ord(param)))
        graph = make.finish(x)
        context = PassContext(PassConfig(memory_budget=budget))
        schedule([graph], context)
        assert dedup(graph, context).changes == dropped


@pytest.mark.parametrize("early", [[], ["a"], ["a", "b"]], ids=len)
def test_a_budget_looks_at_each_parameter(early: list[str]) -> None:
    """Of those that the second gather brings, some may be read before its launch only."""
    make = GraphMaker()
    shards = {param: make.input() for param in "ab"}
    x = make.input(size=(8, 3))
    first = {param: make.gather(shard, param) for param, shard in shards.items()}
    for param in early:
        x = make.add(x, first[param])
    second = [make.gather(shard, param) for param, shard in shards.items()]
    for whole in (*(first[param] for param in "ab" if param not in early), *second):
        x = make.add(x, whole)
    graph = make.finish(x)
    bucket(graph, PassContext())
    assert launches(graph) == ["ab", "ab"]
    assert dedup(graph, PassContext(PassConfig(memory_budget=10**6))).changes == (not early)


# -- real modules -----------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Runs each of its modules twice in a row."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(torch.tanh(part(x))))
        return x


def test_modules_that_run_twice() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_world(2):
        model = Twice(nn.Linear(8, 8), nn.Linear(8, 8))
        for part in model.parts:
            fully_shard(part, mp_policy=policy)
        stages = graphs_of(fully_shard(model, mp_policy=policy), torch.ones(4, 8))
    shown = ("joint before", "forward after", "backward after")
    assert_snapshot("dedup_twice", skeletons_of([(stage, graph) for stage, graph in stages if stage in shown]))
