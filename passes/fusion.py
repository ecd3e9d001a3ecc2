"""Which operations a compiler puts into one kernel, so that what passes between them never reaches memory.

A model of Inductor's choice. Pointwise operations, casts, reductions, concatenations and look-ups are *fusable*; all
others (matrix products, attention, collectives, custom operators) are *barriers*. Fusable operations share a kernel if
data flows from one to the other, unless some data also flows from one to the other through a barrier: the kernel would
have to run before and after it.

        x ─┬─ norm ─ mm ─ add ─ norm ─ ...        the second kernel, [add, norm], reads x again
           └───────────────┘

Hence *levels*: how many barriers must come before an operation, one after the other; a kernel lies within one level. An
operation that could as well run later, say one that recomputes something from saved activations, takes the level of its
first use; but compute does not run later for the sake of a transition, so it costs the same however gradients are
packed. All this is linear in the size of the graph. Inductor differs in that it may split a kernel in which
reductions go over different dimensions or very many tensors are concatenated, and may fuse kernels that only read the
same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from .data_flow import DataFlow, tensors_of
from .graph_view import WAIT, phase_of
from .operators import PACK
from .torch_compat import RESIZE, is_mutating

aten, prims = torch.ops.aten, torch.ops.prims

ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}

# Fusable, but neither tagged as pointwise nor as a reduction by torch.
OTHER_FUSABLE = {
    *(aten._to_copy, aten.copy, aten.fill, aten.lift_fresh_copy, aten.repeat, aten.flip, aten.roll),
    *(PACK.overloadpacket, aten.cat, aten.stack, aten.constant_pad_nd, aten.slice_scatter, aten.select_scatter),
    *(aten.slice_backward, aten.select_backward, aten.triu, aten.tril),
    *(aten.arange, aten.full, aten.full_like, aten.zeros, aten.zeros_like, aten.ones, aten.ones_like),
    *(aten.new_full, aten.new_zeros, aten.new_ones, aten.scalar_tensor, prims.iota),
    *(aten.rand, aten.randn, aten.rand_like, aten.randn_like, aten.bernoulli),
    *(aten.native_dropout, aten.native_dropout_backward),
    *(aten.embedding, aten.gather, aten.index, aten.index_select),
    *(aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data),
    *(aten.native_layer_norm, aten.native_layer_norm_backward, aten._fused_rms_norm, aten._fused_rms_norm_backward),
    *(aten.native_group_norm, aten.native_group_norm_backward),
    *(aten.nll_loss_forward, aten.nll_loss_backward, aten.mse_loss, aten.mse_loss_backward, aten.linalg_vector_norm),
}


def kernels(graph: Graph, flow: DataFlow) -> dict[Node, Node]:
    """The kernel that each fusable operation belongs to, named by one of its operations."""
    level = _levels(graph, flow)
    parent = {node: node for node in graph.nodes if is_fusable(node)}
    for node in parent:
        for source in node.all_input_nodes:
            producer = flow.made_by[source]
            if producer in parent and level[producer] == level[node]:
                parent[_root(producer, parent)] = _root(node, parent)
    return {node: _root(node, parent) for node in parent}


def is_free(node: Node, flow: DataFlow) -> bool:
    """Whether nothing is computed: inputs and outputs, views, waits, frees, allocations, arithmetic of sizes."""
    if node.op != "call_function" or node.target in (WAIT, RESIZE) or flow.made_by[node] is not node:
        return True
    if getattr(node.target, "overloadpacket", None) in ALLOCATIONS:
        return True
    return not tensors_of(node) and not is_mutating(node.target)


def is_fusable(node: Node) -> bool:
    """Whether a compiler generates the operation's code itself."""
    return node.op == "call_function" and _is_fusable(node.target) and not moves_between_devices(node)


def moves_between_devices(node: Node) -> bool:
    """Whether this is a copy between host and device."""
    if getattr(node.target, "overloadpacket", None) not in (aten._to_copy, aten.copy_, prims.device_put):
        return False
    places = {tensor.device.type for each in (node, *node.all_input_nodes) for tensor in tensors_of(each)}
    return len(places) > 1


@cache
def _is_fusable(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or is_mutating(target):
        return False
    tagged = torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags
    return tagged or target.overloadpacket in OTHER_FUSABLE


def _levels(graph: Graph, flow: DataFlow) -> dict[Node, int]:
    """As late as possible for what computes nothing or is fusable; as early as possible for barriers."""
    level: dict[Node, int] = {}
    after: dict[Node, int] = {}  # the earliest level of what uses a node's result
    movable: set[Node] = set()
    for node in graph.nodes:
        level[node] = after[node] = max((after[source] for source in node.all_input_nodes), default=0)
        if is_fusable(node) or is_free(node, flow):
            movable.add(node)
        else:
            after[node] += 1
    for node in reversed(graph.nodes):
        if node in movable:
            draws = (user for user in node.users if user.op != "output" and _may_draw(user, node))
            level[node] = min((level[user] for user in draws), default=level[node])
    return level


def _may_draw(user: Node, node: Node) -> bool:
    return phase_of(user) is None or phase_of(node) is not None


def _root(node: Node, parent: dict[Node, Node]) -> Node:
    while parent[node] is not node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node
