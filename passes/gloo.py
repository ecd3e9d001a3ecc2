"""Writes collectives that go by gloo as it does them safely, and with fewer copies.

    gather      a ─┐                ┌─ getitem ─ WAIT      a ─┐                               ┌─ getitem
                b ─┴─ START (many) ─┴─ getitem ─ WAIT  ->  b ─┴─ pack ─ GATHER ─ WAIT ─ unpack ─┴─ getitem

    reduction   packed ─ START ─ WAIT                  ->  packed ─ all_reduce_ ─ WAIT ─ own_part

gloo cannot have several functional all-gathers under way; ``operators`` says why, and has a gather that it can. Large
tensors go alone, which saves copies; small ones of a dtype together, which saves launches. gloo reduces and scatters by
an all-reduce of a copy, of which each rank takes its part; packed gradients are reduced where they lie, to the same
bits. This comes last and moves nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .bucket import already_packed
from .context import PassContext, Report, Traffic
from .data_flow import tensors_of
from .graph_view import (
    ALL_REDUCE_INTO,
    GATHER_MANY,
    GATHER_ONE,
    REDUCE_SCATTER,
    WAIT,
    Tag,
    alias_root,
    aliases_of,
    copy_tag,
    data_bytes,
    note_planned,
    process_group_of,
    set_tag,
    tag_of,
    waits_of,
)
from .operators import GATHER, OWN_PART, PACK, UNPACK
from .torch_compat import emit, goes_by_gloo, is_alias

aten = torch.ops.aten
LARGE = 1 << 17  # bytes that a rank sends; copying so much takes longer than another launch


def for_gloo(graph: Graph, context: PassContext) -> Report:
    """Replace all gathers that go by gloo, and reductions of gradients that were packed for them.

    Args:
        graph: forward or backward graph, or a graph without backward, after all other passes. Collectives are changed
            whether tagged or not, but for those of dynamic sizes, and those that are not waited for once right here;
            none that move parameters are.
        context: shared by the passes; not read.
    """
    before = Traffic.of(graph)
    changed = [node for node in graph.nodes if node.target in CHANGES and _may_change(node)]
    for start in changed:
        CHANGES[start.target](start)
    if changed:
        graph.lint()
    return Report("for_gloo", len(changed), before, Traffic.of(graph))


def _may_change(start: Node) -> bool:
    results = tensors_of(start)
    static = all(isinstance(size, int) for result in results for size in result.shape)
    outputs = [*start.users] if start.target is GATHER_MANY else [start]
    waited = all([user.target for user in output.users] == [WAIT] for output in outputs)
    if not (static and waited and goes_by_gloo(process_group_of(start), results[0].device)):
        return False
    return start.target is not REDUCE_SCATTER or _is_made_for(start)


def _is_made_for(start: Node) -> bool:
    """Whether what a reduction takes was made for it alone, so that it may be written to."""
    made: Any = alias_root(start.args[0])  # type: ignore[arg-type]
    return made.target in (PACK, aten.cat.default) and all(
        is_alias(user) or user is start for alias in aliases_of(made) for user in alias.users
    )


def _set_tag(tag: Tag | None, *nodes: Node) -> None:
    if tag is not None:
        for node in nodes:
            set_tag(node, tag)


# -- gathers ----------------------------------------------------------------------------------------------------------


def _send_one(start: Node) -> None:
    with start.graph.inserting_before(start):
        launch = emit(start.graph, GATHER, *start.args)
    copy_tag(start, launch)
    note_planned(start, launch)
    start.replace_all_uses_with(launch)
    start.graph.erase_node(start)


def _send_many(start: Node) -> None:
    waits: dict[Any, Node] = {wait.args[0].args[1]: wait for wait in waits_of(start)}  # type: ignore[union-attr]
    for members in _together(start):
        read = [index for index in members if index in waits]
        brought = _send(start, members, min(waits[index] for index in read)) if read else {}
        for index in read:
            brought[index].meta["custom"] = waits[index].meta.get("custom", {})
            waits[index].replace_all_uses_with(brought[index])
    for node in [*waits.values(), *start.users, start]:
        start.graph.erase_node(node)


def _together(start: Node) -> list[list[int]]:
    """Positions of those that go in one tensor: small ones of one dtype, as gloo mixes up those of several."""
    found: dict[Hashable, list[int]] = {}
    for index, node in enumerate(start.args[0]):  # type: ignore[arg-type, union-attr]
        value = node.meta["val"]  # type: ignore[union-attr]
        alone = data_bytes(value) >= LARGE
        found.setdefault((value.dtype, index if alone else None), []).append(index)
    return list(found.values())


def _send(start: Node, members: list[int], before: Node) -> dict[int, Node]:
    """Gather ``members`` of what ``start`` gathers, and wait for it right ``before``; what is brought of each."""
    graph, shapes = start.graph, [list(tensors_of(start)[index].shape) for index in members]
    tag = tag_of(start)
    tag = tag and tag.only(members)
    inputs = [cast(list[Node], start.args[0])[index] for index in members]
    with graph.inserting_before(start):
        launch = emit(graph, GATHER, inputs[0] if len(members) == 1 else _packed(inputs, tag), *start.args[1:])
    note_planned(start, launch)
    with graph.inserting_before(before):
        wait = emit(graph, WAIT, launch, result=launch.meta["val"])
        _set_tag(tag, launch)
        if len(members) == 1:
            return {members[0]: wait}
        sizes = [size for shape in shapes for size in shape]
        parts = emit(graph, UNPACK, wait, start.args[1], sizes, [len(shape) for shape in shapes])
        _set_tag(tag, wait, parts)
        return {member: emit(graph, operator.getitem, parts, index) for index, member in enumerate(members)}


def _packed(inputs: list[Node], tag: Tag | None) -> Node:
    """The inputs in one tensor; there may be one already, as ``fuse_copies`` has made it."""
    packed = already_packed(inputs)
    if packed is None:
        packed = emit(inputs[0].graph, PACK, inputs, 1, inputs[0].meta["val"].dtype, 1.0)
        _set_tag(tag, packed)
    return packed


# -- reductions -------------------------------------------------------------------------------------------------------


def _reduce_in_place(start: Node) -> None:
    graph, (packed, how, ranks, group), (old,) = start.graph, start.args, waits_of(start)
    with graph.inserting_before(start):
        launch = emit(graph, ALL_REDUCE_INTO, packed, how, group, result=packed.meta["val"])  # type: ignore[union-attr]
    with graph.inserting_before(old):
        wait = emit(graph, WAIT, launch, result=launch.meta["val"])
        part = emit(graph, OWN_PART, wait, ranks, group, result=start.meta["val"])
    copy_tag(start, launch, wait, part)
    note_planned(start, launch)
    old.replace_all_uses_with(part)
    for node in (old, start):
        graph.erase_node(node)


CHANGES = {GATHER_ONE: _send_one, GATHER_MANY: _send_many, REDUCE_SCATTER: _reduce_in_place}
