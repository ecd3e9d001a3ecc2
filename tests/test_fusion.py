"""Which operations share a kernel: legal on any graph, and as many kernels as Inductor makes."""

from __future__ import annotations

import operator
import random
import re

import pytest
import torch
from emitted_code import emitted
from fake_world import fake_world, unscheduled
from graph_maker import GraphMaker, aten
from torch.fx import Graph, Node

from fsdp_compile import backend
from fsdp_compile.models import SIZES, Llama, shard_llama
from fsdp_compile.passes import copy_graph
from fsdp_compile.passes.data_flow import data_flow
from fsdp_compile.passes.fusion import is_fusable, kernels
from fsdp_compile.passes.graph_view import REDUCE, Tag, set_tag
from fsdp_compile.passes.torch_compat import emit


def shared(graph: Graph) -> list[set[str]]:
    """The kernels of several operations, by the names of these."""
    members: dict[Node, set[str]] = {}
    for node, kernel in kernels(graph, data_flow(graph)).items():
        members.setdefault(kernel, set()).add(node.name)
    return [names for names in members.values() if len(names) > 1]


def mm(maker: GraphMaker, a: Node, b: Node) -> Node:
    return emit(maker.graph, aten.mm.default, a, b)


def relu(maker: GraphMaker, a: Node) -> Node:
    return emit(maker.graph, aten.relu.default, a)


def test_a_chain_is_one_kernel() -> None:
    maker = GraphMaker()
    x = maker.input()
    a = relu(maker, x)
    b = maker.double(a)
    c = emit(maker.graph, aten.sum.dim_IntList, b, [1], True)
    graph = maker.finish(maker.add(c, b))
    assert shared(graph) == [{"relu_default", "add_tensor", "sum_dim_int_list", "add_tensor_1"}]


def test_views_are_seen_through() -> None:
    maker = GraphMaker()
    a = emit(maker.graph, aten.t.default, relu(maker, maker.input()))
    part = emit(maker.graph, operator.getitem, emit(maker.graph, aten.split.Tensor, a, 1), 0)
    graph = maker.finish(maker.double(part))
    assert shared(graph) == [{"relu_default", "add_tensor"}]


def test_no_kernel_spans_a_barrier() -> None:
    """A residual: what is added at the end also went into the product."""
    maker = GraphMaker()
    x = relu(maker, maker.input(size=(4, 4)))
    y = mm(maker, x, x)
    graph = maker.finish(maker.add(x, y))
    assert shared(graph) == []


def test_a_barrier_beside_does_not_part() -> None:
    maker = GraphMaker()
    x = maker.input(size=(4, 4))
    a = relu(maker, x)
    product = mm(maker, x, x)
    graph = maker.finish(maker.add(maker.double(a), product))
    assert shared(graph) == [{"relu_default", "add_tensor", "add_tensor_1"}]


def test_packing_gradients_moves_no_compute() -> None:
    """The gradient of a scale shares its kernel with what else is computed there, however late it is reduced."""
    kept = []
    for late in (False, True):
        maker = GraphMaker()
        x = relu(maker, maker.input(size=(4, 4)))
        gradient = maker.double(x)
        product = mm(maker, x, x)
        packed = emit(maker.graph, aten.cat.default, [gradient, product] if late else [gradient])
        set_tag(packed, Tag(0, "", ("a", "b"), (0, 1), REDUCE))
        kept.append([names - {packed.name} for names in shared(maker.finish(packed, product))])
    assert kept == [[{"relu_default", "add_tensor"}]] * 2


def test_recomputation_joins_its_first_use() -> None:
    """From saved activations alone it could run at once, and its result would wait in memory."""
    maker = GraphMaker()
    saved = maker.input(size=(4, 4))
    again = relu(maker, saved)
    gradient = mm(maker, saved, saved)
    graph = maker.finish(maker.add(again, gradient))
    assert shared(graph) == [{"relu_default", "add_tensor"}]


def test_collectives_are_barriers() -> None:
    maker = GraphMaker()
    shard = maker.cast(maker.input(), torch.bfloat16, "a")
    whole = maker.gather(shard, "a")
    graph = maker.finish(relu(maker, whole), shard)
    assert shared(graph) == []


def test_a_copy_to_the_host_is_no_part_of_a_kernel() -> None:
    maker = GraphMaker()
    x = relu(maker, maker.input())
    away = maker.graph.call_function(aten._to_copy.default, (x,), {"device": torch.device("cuda")})
    with maker.mode:
        away.meta["val"] = torch.empty(4, 3, device="cuda")
    assert is_fusable(x) and not is_fusable(away)


@pytest.mark.parametrize("seed", range(60))
def test_kernels_never_wait_for_themselves(seed: int) -> None:
    """With each kernel drawn together to one node, a random graph still has no cycle."""
    graph = random_graph(random.Random(seed))
    flow = data_flow(graph)
    kernel = kernels(graph, flow)
    waits_for: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        place = kernel.get(node, node)
        sources = {kernel.get(flow.made_by[s], flow.made_by[s]) for s in node.all_input_nodes}
        waits_for.setdefault(place, set()).update(sources - {place})
    done: set[Node] = set()
    while waits_for:
        ready = [place for place, sources in waits_for.items() if sources <= done]
        assert ready, "kernels wait for each other in a circle"
        done.update(ready)
        for place in ready:
            del waits_for[place]


def random_graph(rng: random.Random) -> Graph:
    maker = GraphMaker()
    nodes = [maker.input(size=(4, 4)) for _ in range(3)]
    for _ in range(40):
        a, b = rng.choices(nodes[-12:], k=2)
        kind = rng.choice(["add", "add", "relu", "mm", "t", "sum"])
        if kind == "mm":
            nodes.append(mm(maker, a, b))
        elif kind == "add":
            nodes.append(maker.add(a, b))
        elif kind == "sum":
            nodes.append(maker.add(a, emit(maker.graph, aten.sum.dim_IntList, b, [1], True)))
        else:
            nodes.append(emit(maker.graph, aten.t.default if kind == "t" else aten.relu.default, a))
    return maker.finish(*rng.sample(nodes, 3))


def test_as_many_kernels_as_inductor() -> None:
    """Where dtypes do not mix: on CPU, Inductor also joins casts that have nothing to do with each other.

    And without a schedule.
    """
    graphs: dict[str, Graph] = {}

    def observe(stage: str, graph: Graph) -> None:
        graphs[stage] = copy_graph(graph)

    with fake_world(2), unscheduled(), backend.observed(observe):
        codes = emitted(shard_llama(Llama(SIZES["debug"])), torch.zeros(2, 16, dtype=torch.long))
    for stage, code in zip(("forward after", "backward after"), codes, strict=True):
        graph = graphs[stage]
        made = len(set(kernels(graph, data_flow(graph)).values()))
        made += sum("index_put" in str(node.target) for node in graph.nodes)  # of the embedding: a kernel of its own
        assert made == len(re.findall(r"^ +cpp_fused_\w+\(", code, re.MULTILINE))
