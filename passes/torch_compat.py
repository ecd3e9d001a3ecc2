"""Every private torch API that the passes touch, each with the reason; no other pass imports torch internals."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

# Dynamo records `untyped_storage().resize_(n)` as this operator; it has no public name.
RESIZE = torch.ops.inductor.resize_storage_bytes_.default

c10d = torch.ops._c10d_functional  # functional collectives: the public wrappers add nodes of their own


def is_alias(node: Node) -> bool:
    """Whether the node's result may share memory with an input that it does not write (views, `detach`, ...)."""
    if node.target is operator.getitem:
        return is_alias(node.args[0]) if isinstance(node.args[0], Node) else False
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and any(argument.alias_info is not None for argument in schema.arguments)


def must_recompute(node: Node) -> None:
    """Have the partitioner compute this node again in the backward, like an activation under checkpointing.

    The partitioner turns "recompute" into "save" where a later checkpointed region (by ``ac_graph_id``) uses the
    node. Gathered parameters are used by all regions and must not be saved by any, hence the highest id.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = 1 << 30


def emit(graph: Graph, target: Callable[..., Any], *args: Any) -> Node:
    """Add a call with its ``meta["val"]``: later passes and the compiler expect a fake result on every node."""
    node = graph.call_function(target, args)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    if target is operator.getitem:
        node.meta["val"] = values[0][values[1]]
        return node
    with fake_mode_of(values):
        node.meta["val"] = target(*values)
    return node


def fake_mode_of(values: Any) -> Any:
    """The fake mode that the graph's values were made in."""
    from torch._guards import detect_fake_mode
    from torch.utils._pytree import tree_leaves

    mode = detect_fake_mode(tree_leaves(values))
    assert mode is not None, "a graph node has no fake tensor in meta['val']"
    return mode
