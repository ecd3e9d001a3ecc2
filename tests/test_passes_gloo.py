"""What graphs do on gloo: it computes the same, and many gathers at once do not corrupt the heap."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fake_world import run_step
from graph_maker import WORLD, GraphMaker, aten, count, run_pass
from random_models import Tree
from ranks import Ranks
from simulated_ranks import same_bits
from snapshots import assert_snapshot
from test_backend import X, two_blocks
from test_passes_properties import compile_tree, on_random_trees
from torch.fx import Graph, Node

from fsdp_compile import backend
from fsdp_compile.passes import (
    GATHER,
    PassContext,
    bucket,
    for_gloo,
    fuse_copies,
    print_skeleton,
    teach_inductor,
)
from fsdp_compile.passes.gloo import LARGE
from fsdp_compile.passes.graph_view import ALL_REDUCE_INTO, GATHER_MANY, GATHER_ONE, REDUCE_SCATTER, WAIT, Tag, gathers
from fsdp_compile.passes.operators import OWN_PART, PACK, UNPACK
from fsdp_compile.passes.torch_compat import c10d, emit

F64 = torch.float64
SECONDS = 20  # with torch's functional all-gather in place of ours a rank died within 10


@contextmanager
def by_gloo() -> Iterator[None]:
    """Inside, so go process groups of graphs by hand, which do not exist."""
    with patch.object(sys.modules[for_gloo.__module__], "goes_by_gloo", lambda group, device: True):
        yield


@pytest.fixture
def on_gloo() -> Iterator[None]:
    with by_gloo():
        yield


def flattened(graph: Graph) -> Graph:
    """After the pass, which must not change what the graph computes."""
    before, after = run_pass(for_gloo, graph)
    assert same_bits(before, after)
    return graph


# -- the operators ----------------------------------------------------------------------------------------------------

SHAPES = [(4, 3), (8,), (2, 2, 5), (0, 3)]


def test_unpacking_is_packing_backwards() -> None:
    tensors = [torch.randn(shape) for shape in SHAPES]
    packed = PACK(tensors, 2, torch.float32, 1.0)
    unpacked = UNPACK(packed, 2, [size for shape in SHAPES for size in shape], [len(shape) for shape in SHAPES])
    assert same_bits(unpacked, tensors)
    assert len({tensor.untyped_storage()._cdata for tensor in (packed, *unpacked)}) == 1 + len(SHAPES)


def test_unpacking_is_a_proper_operator() -> None:
    torch.library.opcheck(UNPACK, (torch.randn(20), 4, [4, 3, 8], [2, 1]))


def test_unpacking_by_inductor() -> None:
    teach_inductor()
    compiled = torch.compile(lambda packed: [part + 1 for part in UNPACK(packed, 4, [4, 3, 8], [2, 1])], fullgraph=True)
    packed = torch.randn(20)
    assert same_bits(compiled(packed), [part + 1 for part in UNPACK(packed, 4, [4, 3, 8], [2, 1])])


# -- the pass ---------------------------------------------------------------------------------------------------------


def coalesced(make: GraphMaker, *shards: Node) -> list[Node]:
    """A gather of many, tagged like one of one parameter each, and its waits."""
    graph = make.graph
    waits = [make.gather(shard, "abc"[index]) for index, shard in enumerate(shards)]
    graph.output(waits)
    bucket(graph, PassContext())
    (output,) = graph.find_nodes(op="output")
    waits = [*output.args[0]]
    graph.erase_node(output)
    assert count(graph, GATHER_MANY) == 1
    return waits


def test_one(on_gloo: None) -> None:
    make = GraphMaker()
    graph = flattened(make.finish(make.double(make.gather(make.input(), "a"))))
    assert (count(graph, GATHER), count(graph, GATHER_ONE)) == (1, 0)
    assert [gather.tag.params for gather in gathers(graph)] == [("a",)]


def test_many(on_gloo: None) -> None:
    make = GraphMaker()
    waits = coalesced(make, make.input(), make.input(size=(1, 5)), make.input(size=(7,)))
    graph = flattened(make.finish(*map(make.double, waits)))
    assert (count(graph, GATHER), count(graph, GATHER_MANY), count(graph, WAIT)) == (1, 0, 1)
    assert [gather.tag.params for gather in gathers(graph)] == [("a", "b", "c")]


def test_what_is_packed_already_is_not_packed_again(on_gloo: None) -> None:
    make = GraphMaker()
    casts = [make.cast(make.input(), F64, param) for param in "ab"]
    graph = make.finish(*coalesced(make, *casts))
    fuse_copies(graph, PassContext())
    packs = count(graph, PACK)
    assert count(flattened(graph), PACK) == packs


def test_a_bucket_of_which_one_is_not_read(on_gloo: None) -> None:
    make = GraphMaker()
    first, second = coalesced(make, make.input(), make.input())
    dead = second.all_input_nodes[0]
    make.graph.erase_node(second)
    make.graph.erase_node(dead)
    assert count(flattened(make.finish(make.double(first))), GATHER) == 1


def test_each_dtype_goes_alone(on_gloo: None) -> None:
    make = GraphMaker()
    waits = coalesced(make, make.input(), make.input(F64), make.input(size=(2, 2)))
    graph = flattened(make.finish(*map(make.double, waits)))
    found = [(gather.dtypes, gather.tag.params) for gather in gathers(graph)]
    assert found == [([torch.float32], ("a", "c")), ([F64], ("b",))]


def packed_gradients(make: GraphMaker, *gradients: Node) -> tuple[Node, Node]:
    """Gradients of ``WORLD`` rows in a reduction, and what they are packed in."""
    rows = [emit(make.graph, aten.reshape.default, gradient, [WORLD, -1]) for gradient in gradients]
    packed = emit(make.graph, aten.cat.default, rows, 1)
    return make.reduce(emit(make.graph, aten.reshape.default, packed, [-1]), "a"), packed


def test_packed_gradients_are_reduced_where_they_lie(on_gloo: None) -> None:
    make = GraphMaker()
    reduced, _ = packed_gradients(make, make.input(), make.input(size=(2, 5)))
    graph = flattened(make.finish(make.double(reduced)))
    assert (count(graph, ALL_REDUCE_INTO), count(graph, OWN_PART), count(graph, REDUCE_SCATTER)) == (1, 1, 0)


def test_gradients_that_something_else_reads_are_left_alone(on_gloo: None) -> None:
    make = GraphMaker()
    reduced, packed = packed_gradients(make, make.input(), make.input())
    graph = flattened(make.finish(reduced, make.double(packed), make.reduce(make.input(), "b")))
    assert (count(graph, ALL_REDUCE_INTO), count(graph, REDUCE_SCATTER)) == (0, 2)


def test_what_is_waited_for_elsewhere_or_twice_is_left_alone(on_gloo: None) -> None:
    make = GraphMaker()
    shards = [make.input(), make.input()]
    twice, never = (emit(make.graph, GATHER_ONE, shard, WORLD, "0") for shard in shards)
    many = emit(make.graph, GATHER_MANY, shards, WORLD, "0")
    parts = [emit(make.graph, operator.getitem, many, index) for index in range(2)]
    waits = [emit(make.graph, WAIT, each) for each in (twice, twice, parts[0])]
    graph = make.finish(*waits, never, parts[1])
    assert for_gloo(graph, PassContext()).changes == 0


def test_columns_of_a_tensor_are_not_packed(on_gloo: None) -> None:
    make = GraphMaker()
    split = emit(make.graph, aten.split_with_sizes.default, make.input(size=(4, 5)), [2, 3], 1)
    columns = [emit(make.graph, operator.getitem, split, index) for index in range(2)]
    many = emit(make.graph, GATHER_MANY, columns, WORLD, "0")
    parts = [emit(make.graph, operator.getitem, many, index) for index in range(2)]
    graph = flattened(make.finish(*(emit(make.graph, WAIT, part) for part in parts)))
    assert count(graph, PACK) == count(graph, GATHER) == 1


def test_a_tag_of_some() -> None:
    tag = Tag(1, "a to b", ("x", "y", "z"), (0, 0, 1), "unshard", groups=(1, 2, 2))
    assert tag.only([0]).parameters == [(1, "x")] and tag.only([0]).group == 1
    assert tag.only([1, 2]) == Tag(2, "a to b", ("y", "z"), (0, 1), "unshard")
    assert tag.only([0, 2]).parameters == [(1, "x"), (2, "z")]


def test_other_transports_keep_their_gathers() -> None:
    make = GraphMaker()
    assert count(flattened(make.finish(make.gather(make.input(), "a"))), GATHER_ONE) == 1


@on_random_trees(examples=6)
def test_random_trees(tree: Tree) -> None:
    graphs = dict(compile_tree(tree))
    for stage in ("forward after", "backward after"):
        graph = graphs[stage]
        launched = [gather.tag.parameters for gather in gathers(graph)]
        with by_gloo():
            before, after = run_pass(for_gloo, graph, ranks=tree.world)
        assert same_bits(before, after)
        assert [gather.tag.parameters for gather in gathers(graph)] == launched
        assert (count(graph, GATHER) > 0) == bool(launched) and not count(graph, GATHER_ONE) + count(graph, GATHER_MANY)


def test_snapshot(on_gloo: None) -> None:
    make = GraphMaker()
    waits = coalesced(make, make.input(), make.input(size=(1, 5)), make.input(size=(LARGE // 4,)))
    reduced, _ = packed_gradients(make, make.input(), make.input(size=(2, 5)))
    graph = make.finish(*map(make.double, waits), reduced)
    before = print_skeleton(graph)
    for_gloo(graph, PassContext())
    assert_snapshot("gloo", f"== before ==\n\n{before}\n== after ==\n\n{print_skeleton(graph)}")


# -- real ranks -------------------------------------------------------------------------------------------------------


def collectives_of_a_step(backend_name: str) -> list[int]:
    """How often each collective is in the graphs of a step as they run: the pass changes them after they are shown."""
    graphs: dict[str, Graph] = {}
    with backend.observed(graphs.__setitem__):
        run_step(torch.compile(two_blocks(), backend=backend_name, fullgraph=True), X)
    ran = [graphs["forward after"], graphs["backward after"]]
    targets = (GATHER, GATHER_ONE, GATHER_MANY, ALL_REDUCE_INTO, REDUCE_SCATTER)
    return [sum(count(graph, target) for graph in ran) for target in targets]


@pytest.mark.parametrize("backend_name", ["fsdp_eager", "fsdp"])
def test_a_step_on_gloo(ranks2: Ranks, backend_name: str) -> None:
    for gather, one, many, reduce, scatter in ranks2.run(collectives_of_a_step, backend_name):
        assert gather > 0 and reduce > 0 and one == many == scatter == 0


def gathers_both_ways(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    shard = torch.arange(6).view(3, 2).to(dtype) + 10 * dist.get_rank()
    return tuple(c10d.wait_tensor(launch(shard, 2, name)) for launch in (GATHER, c10d.all_gather_into_tensor))  # type: ignore[return-value]


def reduces_both_ways(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    packed = torch.randn(ranks * 1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    scattered = c10d.wait_tensor(c10d.reduce_scatter_tensor(packed.clone(), "sum", ranks, name))
    return OWN_PART(c10d.wait_tensor(c10d.all_reduce_(packed, "sum", name)), ranks, name), scattered


def test_reduces_to_the_same_bits(ranks4: Ranks) -> None:
    for ours, functional in ranks4.run(reduces_both_ways, 4):
        assert same_bits(ours, functional)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_brings_what_the_functional_gather_brings(ranks2: Ranks, dtype: torch.dtype) -> None:
    for ours, functional in ranks2.run(gathers_both_ways, dtype):
        assert same_bits(ours, functional)


def gather_for(seconds: float) -> int:
    """Many gathers under way at once, again and again; how often."""
    assert dist.group.WORLD is not None
    name, rounds, going = dist.group.WORLD.group_name, 0, torch.ones(1)
    start = time.monotonic()
    while going.item():
        for size in (500, 300, 200, 100, 50, 20, 10, 4) * 50:
            shards = [torch.full((size + more,), float(dist.get_rank())) for more in range(8)]
            launched = [GATHER(shard, 2, name) for shard in shards]
            for wait, shard in zip(map(c10d.wait_tensor, launched), shards, strict=True):
                assert wait.sum() == len(shard)
            rounds += 1
        going = torch.tensor([float(time.monotonic() - start < seconds)])
        dist.broadcast(going, 0)
    return rounds


@pytest.mark.slow
def test_many_at_once_for_long(ranks2: Ranks) -> None:
    assert min(ranks2.run(gather_for, SECONDS)) > 100
