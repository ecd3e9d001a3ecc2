"""Has the backward gather from slices that fewer ranks have kept, instead of saving whole parameters.

        forward:   gather ─ wait ─┬─ uses                      forward:   gather ─ wait ─┬─ uses
                                  └─ saved            ->                                 └─ this rank's slice ─ saved
        backward:  saved ─ uses                                backward:  saved ─ gather among fewer ─ wait ─ uses

The partitioner knows only of saving and recomputing, so it was made to save the whole; what is saved is replaced after
partitioning. The number and the order of saved tensors stay as they were.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .context import PassContext, Report, Traffic
from .graph_view import UNSHARD, WAIT, Tag, aliases_of, set_tag, tag_of
from .torch_compat import c10d, emit

aten = torch.ops.aten


def keep_slices(forward: Graph, backward: Graph, context: PassContext) -> Report:
    """Replace saved unsharded data, where its tag says so, by slices.

    Args:
        forward, backward: parts of one joint graph, just partitioned.
        context: shared by the passes.
    """
    before = Traffic.of(backward)
    saved = {node.name: node for node in backward.nodes if node.op == "placeholder"}
    (output,) = forward.find_nodes(op="output")
    changes = 0
    for node in dict.fromkeys(output.all_input_nodes):
        tag = tag_of(node)
        if tag is not None and tag.slice and node.name in saved:
            _save_slice(forward, node, output, tag)
            _gather_from_slice(backward, saved[node.name], node, tag)
            changes += 1
    for graph in (forward, backward) if changes else ():
        graph.lint()
    return Report("keep_slices", changes, before, Traffic.of(backward))


def _save_slice(graph: Graph, whole: Node, output: Node, tag: Tag) -> None:
    ranks, _, index_name = tag.slice
    (index,) = [node for node in graph.nodes if node.op == "placeholder" and node.target == index_name]
    last_use = max(user for alias in aliases_of(whole) for user in (*alias.users, alias) if user is not output)
    with graph.inserting_after(max(last_use, index)):
        rows = emit(graph, aten.reshape.default, whole, [ranks, -1])
    with graph.inserting_after(rows):
        row = emit(graph, aten.index.Tensor, rows, [index])
    with graph.inserting_after(row):
        kept = emit(graph, aten.reshape.default, row, [-1])
    for node in (rows, row, kept):
        set_tag(node, Tag(tag.group, tag.name, tag.params, tag.index, "reshard"))
    output.replace_input_with(whole, kept)


def _gather_from_slice(graph: Graph, saved: Node, whole: Node, tag: Tag) -> None:
    """The launch stands before the first use; ``saved`` now stands for the slice."""
    ranks, group, _ = tag.slice
    value = whole.meta["val"]
    with graph.inserting_before(min(saved.users)):
        saved.meta = {**saved.meta, "val": value.new_empty(value.numel() // ranks)}
        saved.meta.pop("tensor_meta", None)
        start = emit(graph, c10d.all_gather_into_tensor.default, saved, ranks, group)
        wait = emit(graph, WAIT, start)
        again = emit(graph, aten.reshape.default, wait, list(value.shape))
    for node in (start, wait, again):
        set_tag(node, Tag(tag.group, tag.name, tag.params, tag.index, UNSHARD))
    saved.replace_all_uses_with(again, delete_user_cb=lambda user: user is not start)
