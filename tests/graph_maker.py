"""Builds small graphs of tagged collectives by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from simulated_ranks import Parts, random_inputs, run_on_all_ranks
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from fsdp_compile.passes import PassContext
from fsdp_compile.passes.graph_view import WAIT, Tag, all_reduces, gathers, reductions, set_tag
from fsdp_compile.passes.torch_compat import c10d, emit
from fsdp_compile.set_aside import add_set_aside

WORLD = 2  # of gathers and reductions
ADD_SET_ASIDE = add_set_aside._opoverload
aten = torch.ops.aten


class GraphMaker:
    """Builds a graph of tagged collectives; a parameter is a letter, its place in the alphabet its index."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode()

    def input(self, dtype: torch.dtype = torch.float32, size: tuple[int, ...] = (4, 3), name: str = "") -> Node:
        """A placeholder, before all else."""
        count = len(self.graph.find_nodes(op="placeholder"))
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(first) if first else self.graph.inserting_after():
            node = self.graph.placeholder(name or f"x{count}")
        with self.mode:
            node.meta["val"] = torch.empty(size, dtype=dtype)
        return node

    def gather(self, source: Node, param: str, group: int = 0, name: str = "0") -> Node:
        start = emit(self.graph, c10d.all_gather_into_tensor.default, source, WORLD, name)
        return self._wait(start, Tag(group, "", (param,), (ord(param) - ord("a"),), "unshard"))

    def reduce(self, source: Node, param: str, group: int = 0, kind: str = "avg", name: str = "0") -> Node:
        start = emit(self.graph, c10d.reduce_scatter_tensor.default, source, kind, WORLD, name)
        return self._wait(start, Tag(group, "", (param,), (ord(param) - ord("a"),), "reduce"))

    def all_reduce(self, source: Node, param: str, group: int = 0, kind: str = "avg", name: str = "replicas") -> Node:
        start = emit(self.graph, c10d.all_reduce.default, source, kind, name)
        return self._wait(start, Tag(group, "", (param,), (ord(param) - ord("a"),), "reduce"))

    def _wait(self, start: Node, tag: Tag) -> Node:
        wait = emit(self.graph, WAIT, start)
        set_tag(start, tag)
        set_tag(wait, tag)
        return wait

    def double(self, source: Node) -> Node:
        return emit(self.graph, aten.add.Tensor, source, source)

    def stack(self, *sources: Node) -> Node:
        """Of ``WORLD`` shards, something of the size of the whole."""
        return emit(self.graph, aten.cat.default, list(sources))

    def cast(self, source: Node, dtype: torch.dtype, param: str, group: int = 0) -> Node:
        """A cast that a reduction makes."""
        node = emit(self.graph, torch.ops.prims.convert_element_type.default, source, dtype)
        return self._tagged(node, param, group)

    def add_set_aside(self, source: Node, place: Node, param: str, group: int = 0) -> Node:
        """What a reduction adds that earlier backwards have set aside."""
        return self._tagged(emit(self.graph, ADD_SET_ASIDE, source, place), param, group)

    def _tagged(self, node: Node, param: str, group: int) -> Node:
        set_tag(node, Tag(group, "", (param,), (ord(param) - ord("a"),), "reduce"))
        return node

    def made_up(self, name: str, size: tuple[int, ...], *sources: Node) -> Node:
        """Compute that is never run, so that it may make a result of any size of whatever it reads."""
        node = self.graph.create_node("call_function", aten.cat.default, (list(sources),), name=name)
        with self.mode:
            node.meta["val"] = torch.empty(size)
        return node

    def add(self, left: Node, right: Node) -> Node:
        return emit(self.graph, aten.add.Tensor, left, right)

    def finish(self, *outputs: Node) -> Graph:
        self.graph.output(outputs)
        return GraphModule(torch.nn.Module(), self.graph).graph


def launches(graph: Graph) -> list[str]:
    """The parameters of each launch, in order."""
    found = {each.start: each for each in (*gathers(graph), *reductions(graph), *all_reduces(graph))}
    return ["".join(found[node].tag.params) for node in graph.nodes if node in found]


def count(graph: Graph, target: object) -> int:
    """How many nodes call it."""
    return len(graph.find_nodes(op="call_function", target=target))


def run_pass(
    each: Callable[[Graph, PassContext], Any],
    graph: Graph,
    draw: Callable[[Graph, int], list[list[Any]]] = random_inputs,
    ranks: int = WORLD,
    parts: Parts | None = None,
) -> tuple[Any, Any]:
    """Run a pass, twice; returns what the graph computes before and after, on the same inputs."""
    before = run_on_all_ranks(graph, draw(graph, ranks), parts)
    each(graph, PassContext())
    graph.lint()
    assert each(graph, PassContext()).changes == 0
    return before, run_on_all_ranks(graph, draw(graph, ranks), parts)
