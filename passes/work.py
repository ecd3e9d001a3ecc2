"""What each node of a graph has to do, whatever the machine: FLOPs, bytes through memory, bytes through the network.

FLOPs are those of torch's flop counter, which counts matrix products, convolutions and attention (all of it, also where
it is causal) and takes everything else for free. Bytes through memory are those of the tensors read and written, where
a kernel of fused operations reads what comes from outside once and writes only what is used outside; each of its nodes
answers for what it is the first to read, and for what it writes.

One trace serves many sizes of process groups. What a group has gathered is whole and has the same size for any number
of ranks; its shards do not, so what is done with them is noted as *sharded*, with the number of ranks in the trace.
Tags say what are shards. The padding of uneven shards counts like data, and as much as in the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from .data_flow import DataFlow, Size, data_flow, shape_of, tensors_of
from .fusion import is_free, kernels, moves_between_devices
from .graph_view import GATHERS, UNSHARD, gathers, known_kind, made_by, process_group_of, reductions
from .torch_compat import as_expression, is_mutating

aten = torch.ops.aten

# Attention on CPU, which torch's flop counter does not know, does what attention elsewhere does.
SAME_FLOPS: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def _grouped_product_flops(left: Any, right: Any, *_: Any, **__: Any) -> Size:
    """FLOPs of ``aten._grouped_mm``, which torch's flop counter does not know: each row, or column, is in one group."""
    (*groups, rows, inner), (*also, _, columns) = left.shape, right.shape
    return 2 * rows * inner * columns * (groups[0] if groups and also else 1)


OWN_FLOPS: dict[Any, Any] = {aten._grouped_mm: _grouped_product_flops}

# Read as much of their first input, a table, as they put out.
LOOKUPS = (aten.embedding, aten.index, aten.gather, aten.index_select)

Sharded = tuple[tuple[str, int], ...]  # process groups over whose ranks the data is sharded, each with its traced size


@dataclass(frozen=True)
class Compute:
    """A kernel, or a node's part of one.

    Attributes:
        dtype: that the FLOPs are done in.
        size: bytes read and written; if ``to_host``, bytes that move between host and device memory.
        launches: 1 for the first node of a kernel, 0 for the others.
    """

    flops: Size
    dtype: torch.dtype
    size: Size
    launches: int
    to_host: bool
    sharded: Sharded


@dataclass(frozen=True)
class Exchange:
    """A collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
        group: name of the process group in the graph.
        size: bytes of the whole: the output of a gather, the input of all others.
    """

    kind: str
    group: str
    size: Size
    sharded: Sharded


Work = Compute | Exchange


@dataclass(frozen=True)
class GraphWork:
    """The work in a graph.

    Attributes:
        nodes: of each node, by its name; ``None`` for one that is free.
        traced_sizes: of each dynamic dimension, where it is known.
    """

    nodes: dict[str, Work | None]
    traced_sizes: dict[sympy.Symbol, int]


def read_work(graph: Graph) -> GraphWork:
    """Read a whole graph; linear in its size. The order of nodes decides only who is the first to read something."""
    flow = data_flow(graph)
    traffic, sharded = _Traffic(graph, flow), _sharded(graph)
    work: dict[str, Work | None] = {}
    for node in graph.nodes:
        shards = sharded.get(node, ())
        kind = known_kind(node)
        if is_free(node, flow):
            work[node.name] = None
        elif kind is not None:
            work[node.name] = _exchange(node, kind, flow, shards)
        else:
            size, launches = traffic.of(node)
            flops, dtype = _flops(node, flow.traced_sizes)
            to_host = moves_between_devices(node)
            work[node.name] = Compute(flops, dtype, flow.size[node] if to_host else size, launches, to_host, shards)
    return GraphWork(work, flow.traced_sizes)


def _exchange(node: Node, kind: str, flow: DataFlow, sharded: Sharded) -> Exchange:
    sources = [node] if kind == "all_gather" else node.all_input_nodes
    size = sum((flow.size[each] for each in sources), start=0)
    return Exchange(kind, process_group_of(node), size, sharded)


class _Traffic:
    """Bytes that go through memory, of one node after the other in order of the graph."""

    def __init__(self, graph: Graph, flow: DataFlow) -> None:
        self._flow = flow
        self._kernel = kernels(graph, flow)
        self._leaving = set(self._data_leaving_a_kernel(graph))
        self._read: set[tuple[Node, Node]] = set()
        self._launched: set[Node] = set()

    def of(self, node: Node) -> tuple[Size, int]:
        """Bytes that the node reads and writes, and the number of its launches, 0 or 1."""
        kernel = self._kernel.get(node, node)
        launches = int(kernel not in self._launched)
        self._launched.add(kernel)
        stays_inside = node in self._kernel and node not in self._leaving
        written = 0 if stays_inside or is_mutating(node.target) else self._flow.size[node]
        return sum(self._reads(node, kernel), start=written), launches

    def _reads(self, node: Node, kernel: Node) -> Iterator[Size]:
        """What an operation writes to is among its inputs, and counts once."""
        for position, given in enumerate(node.all_input_nodes):
            source = self._flow.source[given]
            inside = self._kernel.get(self._flow.made_by[source]) is kernel
            if not inside and (kernel, source) not in self._read:
                self._read.add((kernel, source))
                looked_up = position == 0 and getattr(node.target, "overloadpacket", None) in LOOKUPS
                yield self._flow.size[node if looked_up else source]

    def _data_leaving_a_kernel(self, graph: Graph) -> Iterator[Node]:
        for node in graph.nodes:
            if self._flow.made_by[node] is node:
                for source in node.all_input_nodes:
                    producer = self._flow.made_by[source]
                    if producer in self._kernel and self._kernel[producer] is not self._kernel.get(node):
                        yield producer


def _flops(node: Node, traced_sizes: dict[sympy.Symbol, int]) -> tuple[Size, torch.dtype]:
    """FLOPs, and the dtype of the first tensor that is given."""
    tensors = [tensor for each in (*node.all_input_nodes, node) for tensor in tensors_of(each)]
    dtype = tensors[0].dtype if tensors else torch.float32
    packet = getattr(node.target, "overloadpacket", node.target)
    packet = SAME_FLOPS.get(packet, packet)
    formula = OWN_FLOPS.get(packet) or flop_registry.get(packet)  # to which others add at any time
    if formula is None:
        return 0, dtype

    def shaped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = shape_of(value, traced_sizes)
            return _Shape(shape) if any(isinstance(size, sympy.Expr) for size in shape) else value
        return type(value)(map(shaped, value)) if isinstance(value, (list, tuple)) else as_expression(value)[0]

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: shaped(source.meta.get("val")))
    return formula(*args, **kwargs, out_val=shaped(node.meta["val"])), dtype


class _Shape(tuple[Size, ...]):
    """Stands for a tensor where its symbolic sizes would enter conditions, which would bind the graph to them."""

    @property
    def shape(self) -> _Shape:
        return self


def _sharded(graph: Graph) -> dict[Node, Sharded]:
    """What is done with shards: before a gather, by tags; after a reduction, all."""
    found: dict[Node, Sharded] = {}
    for gather in gathers(graph):
        ranks, group = gather.how
        for source in gather.inputs:
            found |= dict.fromkeys(made_by(source, UNSHARD), ((str(group), ranks),))
    for reduction in reductions(graph):
        _, ranks, group = reduction.how
        for wait in reduction.waits:
            for node in _computed_from(wait):
                found[node] = ((str(group), ranks),)
    return found


def _computed_from(node: Node) -> Iterable[Node]:
    """As far as that is still of shards: up to gathers."""
    found = dict.fromkeys([node])
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user not in found and user.target not in GATHERS:
                found[user] = None
                stack.append(user)
    return found
