"""Which nodes of a graph share which memory.

A storage is what one allocation gives. Views, waits and operators that write in place have the storage of their input;
a node with several results may have several. Told from operators' schemas and from the sizes and strides in
``meta["val"]``, so it holds for fake tensors of any device, also in nodes that passes have made or moved.

    forward:   shard ── gather ── wait ── view ── mm ── output (saved)        three storages: of shard,
                └1┘      └───────── 2 ──────┘     └─3───────┐                 of the gathered data, of the activation,
    backward:                                         saved ── mm             which the backward takes over
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .graph_view import has_backward, outputs_of, saved_for_backward
from .torch_compat import hint, shared_inputs

RESHAPE = torch.ops.aten.reshape.default  # a view where strides allow it, else a copy


@dataclass(frozen=True, eq=False)
class Storage:
    """One allocation.

    Attributes:
        maker: the node that made it, or the graph's input that it came with.
        bytes: its size, as far as the maker's result reaches into it.
    """

    maker: Node
    bytes: int

    def __repr__(self) -> str:
        return f"<{self.bytes} B of {self.maker}>"


@dataclass(frozen=True)
class Storages:
    """The storages of graphs that run one after another.

    Attributes:
        of: of each node, those of its results, in order; of an operator with one result, one.
        kept: those that live to the end because the caller has them: parameters, other inputs, results, gradients.
    """

    of: dict[Node, tuple[Storage, ...]]
    kept: frozenset[Storage]

    @classmethod
    def in_graphs(cls, graphs: Sequence[Graph]) -> Storages:
        """Follow storages through ``graphs``: forward and backward, or one graph.

        The caller keeps what goes into the first graph; but a backward graph alone owns what the forward saved for it,
        apart from parameters ("primals"). What a forward returns besides the saved tensors, and what the last graph
        returns, the caller keeps too.

        Raises:
            ValueError: a backward does not belong to the forward before it.
        """
        of: dict[Node, tuple[Storage, ...]] = {}
        kept = []
        for graph, before in zip(graphs, [None, *graphs], strict=False):
            saved = saved_for_backward(before, graph) if before else {}
            for node in graph.nodes:
                of[node] = of[saved[node]] if node in saved else _storages(node, of)
            kept += [] if before else _callers_inputs(graph)
            kept += graph.find_nodes(op="get_attr")
            kept += _results_of(before, len(saved)) if before else []
        kept += outputs_of(graphs[-1])
        return cls(of, frozenset(storage for node in kept for storage in of[node]))

    def read_by(self, node: Node) -> dict[Storage, Node]:
        """Those of the node's inputs, each with an input that is in it."""
        return {storage: source for source in node.all_input_nodes for storage in self.of[source]}


def _callers_inputs(graph: Graph) -> list[Node]:
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if "primals" in str(node.target)] if has_backward(graph) else inputs


def _results_of(forward: Graph, saved: int) -> list[Node]:
    """What a forward returns before the tensors that it saves."""
    tensors = [node for node in outputs_of(forward) if isinstance(node.meta.get("val"), torch.Tensor)]
    return tensors[: len(tensors) - saved]


def _storages(node: Node, of: dict[Node, tuple[Storage, ...]]) -> tuple[Storage, ...]:
    if node.op == "output":
        return ()
    if node.target is operator.getitem and isinstance(node.args[1], int):
        whole, index = of[node.args[0]], node.args[1]  # type: ignore[index]
        # What the partitioner has wrapped to keep the state of random numbers has no fake result, its parts have.
        return (whole[index],) if index < len(whole) else (Storage(node, _extent(node.meta.get("val"))),)
    results = _results(node)
    shared = [storage for source in shared_inputs(node) for storage in of[source]]
    if not shared or _copies(node):
        return tuple(Storage(node, _extent(result)) for result in results)
    return tuple(shared) if len(shared) == len(results) else (shared[0],) * len(results)


def _results(node: Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, (list, tuple)) else [value]


def _copies(node: Node) -> bool:
    """Whether a reshape could not be a view: no view of memory with gaps is contiguous, and every copy is."""
    if node.target is not RESHAPE:
        return False
    source, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(result.is_contiguous() and not source.is_contiguous())


def _extent(value: Any) -> int:
    """Bytes from a tensor's first to its last element; 0 for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = [hint(size) for size in value.shape]
    if 0 in sizes:
        return 0
    last = sum((size - 1) * hint(stride) for size, stride in zip(sizes, value.stride(), strict=True))
    return (last + 1) * value.itemsize
