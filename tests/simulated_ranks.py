"""Runs a graph for all ranks of a world at once, in one process, with collectives that really move data.

The ranks run in lockstep: each node is computed for every rank before the next one. A fake process group traces a graph
for any world, but its collectives leave garbage in their outputs; here they have their true results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

c10d = torch.ops._c10d_functional
Ranks = list[Any]  # one value for each rank


def run_on_all_ranks(graph: Graph, inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Run ``graph`` on ``len(inputs)`` ranks, rank r with ``inputs[r]``; returns the outputs of each rank.

    Frees leave data alone, so that a joint graph that reads freed tensors shows what it is meant to compute.
    """
    world = len(inputs)
    feeds = [iter(of_rank) for of_rank in inputs]
    values: dict[Node, Ranks] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = [next(feed) for feed in feeds]
            continue
        args = [map_arg(node.args, lambda at, r=rank: values[at][r]) for rank in range(world)]
        if node.op == "output":
            return [tuple(of_rank[0]) for of_rank in args]
        assert node.op == "call_function", f"cannot run {node.format_node()}"
        kwargs = [map_arg(node.kwargs, lambda at, r=rank: values[at][r]) for rank in range(world)]
        values[node] = _compute(node.target, args, kwargs)
    raise AssertionError("the graph has no output")


def _compute(target: Any, args: list[Any], kwargs: list[Any]) -> Ranks:
    if target in COLLECTIVES:
        assert len({of_rank[1:] for of_rank in args}) == 1, "ranks disagree on a collective"
        return COLLECTIVES[target](*zip(*args, strict=True))
    if target is c10d.wait_tensor.default:
        return [of_rank[0] for of_rank in args]
    if target is torch.ops.inductor.resize_storage_bytes_.default:
        return [None] * len(args)
    assert target is operator.getitem or target.namespace in ("aten", "prims"), f"cannot simulate {target}"
    return [target(*of_rank, **named) for of_rank, named in zip(args, kwargs, strict=True)]


def _all_gather(inputs: Sequence[torch.Tensor], sizes: Sequence[int], _: Any) -> Ranks:
    assert sizes[0] == len(inputs), "one process group of all ranks"
    return [torch.cat(list(inputs)) for _ in inputs]


def _all_gather_coalesced(inputs: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], names: Any) -> Ranks:
    gathered = [_all_gather(member, sizes, names) for member in zip(*inputs, strict=True)]
    return [[member[rank] for member in gathered] for rank in range(len(inputs))]


def _reduce_scatter(inputs: Sequence[torch.Tensor], kinds: Sequence[str], sizes: Sequence[int], _: Any) -> Ranks:
    assert sizes[0] == len(inputs), "one process group of all ranks"
    total = inputs[0].clone()
    for of_rank in inputs[1:]:  # element by element in the order of ranks, wherever in a bucket an element is
        total += of_rank
    return list((total / len(inputs) if kinds[0] == "avg" else total).chunk(len(inputs)))


COLLECTIVES: dict[Any, Callable[..., Ranks]] = {
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_gather_into_tensor_coalesced.default: _all_gather_coalesced,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
}
