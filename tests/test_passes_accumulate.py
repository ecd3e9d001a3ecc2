"""Which gradients may be added before they are reduced, in small graphs made by hand."""

from __future__ import annotations

from typing import Any

import torch
from graph_maker import ADD_SET_ASIDE, GraphMaker, launches, run_pass
from simulated_ranks import random_inputs, same_bits
from torch.fx import Graph, Node

from fsdp_compile.passes import PassContext, accumulate
from fsdp_compile.set_aside import Place

aten = torch.ops.aten


def reduced(make: GraphMaker, param: str = "a", **kwargs: Any) -> Node:
    return make.reduce(make.input(), param, **kwargs)


def accumulated(make: GraphMaker, *outputs: Node, tolerance: float = 1e-5) -> Graph:
    """Run the pass; results may differ by rounding."""
    graph = make.finish(*outputs)
    before, after = run_pass(accumulate, graph)
    torch.testing.assert_close(before, after, rtol=tolerance, atol=tolerance)
    return graph


def test_two_runs_are_reduced_once() -> None:
    make = GraphMaker()
    assert launches(accumulated(make, make.add(reduced(make), reduced(make)))) == ["a"]


def test_three_runs_are_reduced_once_in_the_order_of_eager() -> None:
    make = GraphMaker()
    third, second = reduced(make), reduced(make)
    total = make.add(third, second)
    graph = accumulated(make, make.add(total, reduced(make)))
    assert launches(graph) == ["a"]
    inner, outer = (node for node in graph.nodes if node.target is aten.add.Tensor)
    assert inner in outer.args


def test_gradients_are_added_before_their_cast() -> None:
    make = GraphMaker()
    parts = [make.reduce(make.cast(make.input(torch.bfloat16), torch.float32, "a"), "a") for _ in range(2)]
    graph = accumulated(make, make.add(*parts), tolerance=0.05)
    (total,) = (node for node in graph.nodes if node.target is aten.add.Tensor)
    assert total.meta["val"].dtype is torch.bfloat16


def test_gradients_that_are_only_cast_are_cast_once() -> None:
    """Nothing is reduced: they are set aside."""
    make = GraphMaker()
    graph = accumulated(make, make.add(*(cast(make) for _ in range(2))), tolerance=0.05)
    (total,) = (node for node in graph.nodes if node.target is aten.add.Tensor)
    assert total.meta["val"].dtype is torch.bfloat16
    assert len(list(graph.nodes)) == 5  # two inputs, sum, cast, output


def cast(make: GraphMaker) -> Node:
    return make.cast(make.input(torch.bfloat16), torch.float32, "a")


class Aside:
    """A gradient that an earlier backward has set aside."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad: torch.Tensor | None = grad
        self.place = Place(grad.size(), grad.dtype, grad.device, self.put, self.take)

    def put(self, grad: torch.Tensor) -> None:
        raise AssertionError

    def take(self) -> torch.Tensor | None:
        grad, self.grad = self.grad, None
        return grad


def test_what_was_set_aside_is_added_once() -> None:
    make = GraphMaker()
    place = make.input()
    paths = [make.reduce(make.add_set_aside(cast(make), place, "a"), "a") for _ in range(2)]
    graph = make.finish(make.add(*paths))
    aside: list[Aside] = []

    def draw(graph: Graph, ranks: int) -> list[list[Any]]:
        inputs = random_inputs(graph, ranks)
        aside[:] = [Aside(of_rank[0]) for of_rank in inputs]
        return [[each.place.leaf.detach(), *of_rank[1:]] for each, of_rank in zip(aside, inputs, strict=True)]

    before, after = run_pass(accumulate, graph, draw)
    torch.testing.assert_close(before, after, rtol=0.05, atol=0.05)
    assert all(each.grad is None for each in aside)
    assert launches(graph) == ["a"]
    assert len(graph.find_nodes(op="call_function", target=ADD_SET_ASIDE)) == 1


def test_what_was_set_aside_elsewhere_is_left_alone() -> None:
    make = GraphMaker()
    paths = [make.add_set_aside(cast(make), make.input(), "a") for _ in range(2)]
    graph = make.finish(make.add(*paths))
    assert accumulate(graph, PassContext()).changes == 0


def unchanged(make: GraphMaker, *outputs: Node) -> bool:
    graph = make.finish(*outputs)
    count = len(launches(graph))
    return same_bits(*run_pass(accumulate, graph)) and len(launches(graph)) == count


def test_other_parameters_are_left_alone() -> None:
    make = GraphMaker()
    assert unchanged(make, make.add(reduced(make, "a"), reduced(make, "b")))


def test_other_groups_and_kinds_are_left_alone() -> None:
    make = GraphMaker()
    of_group = make.add(reduced(make, group=0), reduced(make, group=1))
    assert unchanged(make, of_group, make.add(reduced(make, kind="sum"), reduced(make, kind="avg")))


def test_a_reduced_gradient_that_something_else_uses_is_left_alone() -> None:
    make = GraphMaker()
    seen = reduced(make)
    assert unchanged(make, make.add(seen, reduced(make)), make.double(seen))


def test_adding_a_reduced_gradient_to_itself_is_left_alone() -> None:
    make = GraphMaker()
    assert unchanged(make, make.double(reduced(make)))


def test_a_gradient_computed_from_the_other_ones_reduction_is_left_alone() -> None:
    make = GraphMaker()
    first = reduced(make)
    second = make.reduce(make.stack(first, first), "a")
    assert unchanged(make, make.add(first, second))
