"""Where a node's data come from, and how many bytes that is."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from .graph_view import WAIT
from .torch_compat import as_expression, is_alias, shares_memory

aten = torch.ops.aten

Size = Any  # int or sympy.Expr, for a graph with dynamic dimensions

MAY_COPY = (aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints)  # views, if that is possible


@dataclass
class DataFlow:
    """Of each node of a graph.

    Attributes:
        made_by: the operation that computed its data, which it may be a view or one output of.
        source: the node with the memory that is read when it is read: itself, or what it is a view of all of. Of an
            ``expand``, what was expanded.
        size: bytes of its results together, as if none of them were a view.
        traced_sizes: of each dynamic dimension, where it is known.
    """

    made_by: dict[Node, Node] = field(default_factory=dict)
    source: dict[Node, Node] = field(default_factory=dict)
    size: dict[Node, Size] = field(default_factory=dict)
    traced_sizes: dict[sympy.Symbol, int] = field(default_factory=dict)


def data_flow(graph: Graph) -> DataFlow:
    """Read a whole graph; linear in its size."""
    flow = DataFlow()
    for node in graph.nodes:
        flow.size[node] = _size(node, flow.traced_sizes)
        flow.made_by[node] = flow.source[node] = node
        parent = node.args[0] if node.args else None
        if isinstance(parent, Node) and node.op == "call_function":
            if is_view(node) or node.target is WAIT:
                flow.made_by[node] = flow.made_by[parent]
                if node.target is aten.expand.default or flow.size[node] == flow.size[parent]:
                    flow.source[node] = flow.source[parent]
            elif node.target is operator.getitem:
                flow.made_by[node] = parent
    return flow


def is_view(node: Node) -> bool:
    """Whether the node computes nothing: it is another view of its first input's memory."""
    if node.target in MAY_COPY:
        return shares_memory(node, node.all_input_nodes[0])
    return is_alias(node)


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The results of a node."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [each for each in values if isinstance(each, torch.Tensor)]


def shape_of(tensor: torch.Tensor, traced_sizes: dict[sympy.Symbol, int]) -> tuple[Size, ...]:
    """A shape without the symbolic sizes of torch; what these were in the trace is added to ``traced_sizes``."""
    shape = []
    for size in tensor.shape:
        if isinstance(size, torch.SymInt):
            size, traced = as_expression(size)
            traced_sizes |= traced
        shape.append(size)
    return tuple(shape)


def _size(node: Node, traced_sizes: dict[sympy.Symbol, int]) -> Size:
    total: Size = 0
    for tensor in tensors_of(node):
        numel: Size = tensor.itemsize
        for size in shape_of(tensor, traced_sizes):
            numel = numel * size
        total = total + numel
    return total
