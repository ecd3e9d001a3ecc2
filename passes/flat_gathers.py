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
from typing import Any

import torch
from torch.fx import Graph, Node

from .bucket import already_packed
from .context import PassContext, Report, Traffic
from .graph_view import GATHER_MANY, GATHER_ONE, WAIT, process_group_of, set_tag, tag_of, waits_of
from .operators import GATHER, PACK, UNPACK
from .torch_compat import emit, goes_by_gloo


def flat_gathers(graph: Graph, context: PassContext) -> Report:
    """Have each gather that goes by gloo be one of ours.

    Args:
        graph: forward or backward graph, or a graph without backward, after all other passes. Gathers are changed
            whether tagged or not, but for those of dynamic sizes or of several dtypes, which none of parameters are.
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
    alike = len({result.dtype for result in results}) == 1
    return static and alike and goes_by_gloo(process_group_of(start), results[0].device)


def _launch(start: Node, source: Any) -> Node:
    launch = emit(start.graph, GATHER, source, *start.args[1:])
    _tag_like(start, launch)
    return launch


def _tag_like(start: Node, *nodes: Node) -> None:
    tag = tag_of(start)
    if tag is not None:
        for node in nodes:
            set_tag(node, tag)


def _send_one(start: Node) -> None:
    with start.graph.inserting_before(start):
        launch = _launch(start, start.args[0])
    start.replace_all_uses_with(launch)
    start.graph.erase_node(start)


def _send_many(start: Node) -> None:
    graph, shapes, waits = start.graph, [list(result.shape) for result in _results(start)], waits_of(start)
    with graph.inserting_before(start):
        launch = _launch(start, _packed(start))
    with graph.inserting_before(min(waits)):
        wait = emit(graph, WAIT, launch, result=launch.meta["val"])
        sizes = [size for shape in shapes for size in shape]
        parts = emit(graph, UNPACK, wait, start.args[1], sizes, [len(shape) for shape in shapes])
        items = [emit(graph, operator.getitem, parts, index) for index in range(len(shapes))]
    _tag_like(start, wait, parts)
    for old in waits:
        output: Any = old.args[0]
        item = items[output.args[1]]
        item.meta["custom"] = old.meta.get("custom", {})
        old.replace_all_uses_with(item)
        graph.erase_node(old)
        graph.erase_node(output)
    graph.erase_node(start)


def _packed(start: Node) -> Node:
    """The inputs in one tensor; there may be one already, as ``fuse_copies`` has made it."""
    inputs: Any = start.args[0]
    packed = already_packed(inputs)
    if packed is None:
        packed = emit(start.graph, PACK, inputs, 1, _results(start)[0].dtype, 1.0)
        _tag_like(start, packed)
    return packed
