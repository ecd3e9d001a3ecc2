"""Sends gathers that go by gloo in flat tensors, as gloo cannot have several functional all-gathers under way.

    a ─ START ─ WAIT                      ->   a ─ gather ─ WAIT

    a ─┐                ┌─ getitem ─ WAIT      a ─┐                                ┌─ getitem
    b ─┴─ START (many) ─┴─ getitem ─ WAIT ->   b ─┴─ pack ─ gather ─ WAIT ─ unpack ─┴─ getitem

``operators`` says why. gloo copies the tensors of a coalesced gather into one and out of it too, so this does not copy
more; the eager executor gathers in the same way.

It comes last and moves nothing: what is waited for first has all of a bucket copied out.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .bucket import already_packed
from .context import PassContext, Report, Traffic
from .graph_view import GATHER_MANY, GATHER_ONE, WAIT, Tag, process_group_of, set_tag, tag_of, waits_of
from .operators import GATHER, PACK, UNPACK
from .torch_compat import emit, goes_by_gloo


def flat_gathers(graph: Graph, context: PassContext) -> Report:
    """Have each gather that goes by gloo be one of ours.

    Args:
        graph: forward or backward graph, or a graph without backward, after all other passes. Gathers are changed
            whether tagged or not, but for those of dynamic sizes, which none of parameters are.
        context: shared by the passes; not read.
    """
    before = Traffic.of(graph)
    changed = [node for node in graph.nodes if node.target in (GATHER_ONE, GATHER_MANY) and _can_be_flat(node)]
    for start in changed:
        (_send_many if start.target is GATHER_MANY else _send_one)(start)
    if changed:
        graph.lint()
    return Report("flat_gathers", len(changed), before, Traffic.of(graph))


def _results(start: Node) -> list[torch.Tensor]:
    result = start.meta["val"]
    return list(result) if isinstance(result, (list, tuple)) else [result]


def _can_be_flat(start: Node) -> bool:
    results = _results(start)
    static = all(isinstance(size, int) for result in results for size in result.shape)
    return static and goes_by_gloo(process_group_of(start), results[0].device)


def _set_tag(tag: Tag | None, *nodes: Node) -> None:
    if tag is not None:
        for node in nodes:
            set_tag(node, tag)


def _send_one(start: Node) -> None:
    with start.graph.inserting_before(start):
        launch = emit(start.graph, GATHER, *start.args)
    _set_tag(tag_of(start), launch)
    start.replace_all_uses_with(launch)
    start.graph.erase_node(start)


def _send_many(start: Node) -> None:
    """One gather for each dtype: gloo mixes up those that it moves together."""
    results, waits = _results(start), waits_of(start)
    first = min(waits)
    new: dict[int, Node] = {}
    for dtype in dict.fromkeys(result.dtype for result in results):
        members = [index for index, result in enumerate(results) if result.dtype == dtype]
        new.update(zip(members, _send_flat(start, members, first), strict=True))
    for old in waits:
        output: Any = old.args[0]
        item = new[output.args[1]]
        item.meta["custom"] = old.meta.get("custom", {})
        old.replace_all_uses_with(item)
        start.graph.erase_node(old)
        start.graph.erase_node(output)
    start.graph.erase_node(start)


def _send_flat(start: Node, members: list[int], first_wait: Node) -> list[Node]:
    """Gather those of what ``start`` gathers; what each brings."""
    graph, shapes = start.graph, [list(_results(start)[index].shape) for index in members]
    tag = tag_of(start)
    tag = tag and tag.only(members)
    with graph.inserting_before(start):
        packed = _packed([cast(list[Node], start.args[0])[index] for index in members], tag)
        launch = emit(graph, GATHER, packed, *start.args[1:])
    with graph.inserting_before(first_wait):
        wait = emit(graph, WAIT, launch, result=launch.meta["val"])
        sizes = [size for shape in shapes for size in shape]
        parts = emit(graph, UNPACK, wait, start.args[1], sizes, [len(shape) for shape in shapes])
        items = [emit(graph, operator.getitem, parts, index) for index in range(len(members))]
    _set_tag(tag, launch, wait, parts)
    return items


def _packed(inputs: list[Node], tag: Tag | None) -> Node:
    """The inputs in one tensor; there may be one already, as ``fuse_copies`` has made it."""
    packed = already_packed(inputs)
    if packed is None:
        packed = emit(inputs[0].graph, PACK, inputs, 1, inputs[0].meta["val"].dtype, 1.0)
        _set_tag(tag, packed)
    return packed
