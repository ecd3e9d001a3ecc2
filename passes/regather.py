"""Gathers freed parameters again in the backward.

In the joint graph of forward and backward a ``resize_(0)`` node says that the tensor holds no data from there on, yet
the backward still reads it. Every node between the shard and those reads (cast, pad, gather, wait, slice, views) is
marked for recomputation, so the partitioner computes it a second time in the backward instead of saving its result:

        shard ─ cast ─ gather ─ wait ─ slice ─ t ─ mm            forward
          └──── cast ─ gather ─ wait ─ slice ─ t ─ mm_backward   backward

The ``resize_`` nodes go: within one graph the compiler frees a tensor after its last use by itself.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .graph_view import aliases_of, alias_root, ancestors_made_by, frees
from .torch_compat import must_recompute

CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def regather(graph: Graph) -> int:
    """Mark what a free makes the backward recompute and remove the free.

    Args:
        graph: joint graph of forward and backward, or an inference graph, which has no backward and only loses its
            frees.

    Returns:
        The number of frees handled. A second run finds none.
    """
    found = frees(graph)
    for free in found:
        wait = alias_root(free.args[0])  # type: ignore[arg-type]
        for node in (*ancestors_made_by(wait, "unshard"), *_copies_of_value(wait)):
            must_recompute(node)
        graph.erase_node(free)
    graph.lint()
    return len(found)


def _copies_of_value(wait: Node) -> list[Node]:
    """All views of the gathered tensor and its casts (by autocast, say): saving any would keep a whole copy alive."""
    nodes = []
    for alias in aliases_of(wait):
        nodes.append(alias)
        nodes += [view for user in alias.users if user.target in CASTS for view in aliases_of(user)]
    return nodes
