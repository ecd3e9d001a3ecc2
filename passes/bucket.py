"""Makes one collective of the many that move one group's parameters or gradients.

Gathers become one coalesced gather straight into each parameter's own output, with no copy in or out:

        a ─ gather ─ wait             a ─┐           ┌─ wait
        b ─ gather ─ wait     ->      b ─┴─ gather ──┴─ wait

Reductions become one reduce-scatter of a flat tensor of shape (world size, padded shard numels), the layout of the
eager executor, so that each element is summed in the same order and the bits are equal:

        g ─ reduce ─ wait             g ─ view ─┐                  ┌─ view
        h ─ reduce ─ wait     ->      h ─ view ─┴─ cat ─ reduce ─ wait ─ split ─┴─ view
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable

import torch
from torch.fx import Graph, Node

from .graph_view import WAIT, Collective, Tag, ancestors_made_by, gathers, reductions, set_tag
from .order import sort_stably
from .torch_compat import c10d, emit

aten = torch.ops.aten


def bucket(graph: Graph) -> int:
    """Merge the collectives of each group: one gather and one reduction for each time its module runs.

    Only collectives on one process group, and reductions of one kind and dtype, are merged. A module that runs k times
    has k gathers of each parameter; the i-th of each make up bucket i.

    Returns:
        The number of buckets made. A second run makes none.
    """
    made = 0
    for members in _buckets(gathers(graph), _gather_key):
        _merge_gathers(graph, members)
        made += 1
    dependents = _dependents(graph)
    for members in _buckets((r for r in reductions(graph) if r.start not in dependents), _reduction_key):
        _merge_reductions(graph, members)
        made += 1
    if made:
        sort_stably(graph)
        graph.lint()
    return made


def _gather_key(gather: Collective) -> tuple[Hashable, ...]:
    return gather.tag.group, gather.process_group, gather.world_size


def _reduction_key(reduction: Collective) -> tuple[Hashable, ...]:
    kind = reduction.start.args[1]
    where = (reduction.tag.group, reduction.process_group, reduction.world_size)
    return *where, kind, *reduction.dtypes  # type: ignore[return-value]


def _buckets(
    collectives: Iterable[Collective], key_of: Callable[[Collective], Hashable]
) -> list[list[Collective]]:
    """Group single-parameter collectives by key and occurrence; only groups worth merging, in graph order."""
    seen: dict[Hashable, int] = {}
    buckets: dict[Hashable, list[Collective]] = {}
    for collective in collectives:
        if len(collective.tag.params) != 1:
            continue  # a bucket already
        key = key_of(collective)
        occurrence = seen.setdefault((key, collective.tag.params), 0)
        seen[key, collective.tag.params] += 1
        buckets.setdefault((key, occurrence), []).append(collective)
    return [sorted(members, key=lambda c: c.tag.index) for members in buckets.values() if len(members) > 1]


def _joint_tag(members: list[Collective]) -> Tag:
    first = members[0].tag
    params = tuple(name for member in members for name in member.tag.params)
    return Tag(first.group, first.name, params, tuple(i for m in members for i in m.tag.index), first.phase)


# -- gathers ----------------------------------------------------------------------------------------------------------


def _merge_gathers(graph: Graph, members: list[Collective]) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    earliest = min((member.start for member in members), key=position.__getitem__)
    for member in members:
        for node in ancestors_made_by(member.inputs[0], "unshard"):  # casts and pads of shards: they can always move up
            if position[node] > position[earliest]:
                earliest.prepend(node)
    tag = _joint_tag(members)
    first = members[0]
    with graph.inserting_before(earliest):
        inputs = [member.inputs[0] for member in members]
        coalesced = c10d.all_gather_into_tensor_coalesced.default
        start = emit(graph, coalesced, inputs, first.world_size, first.process_group)
        set_tag(start, tag)
        outputs = [emit(graph, operator.getitem, start, i) for i in range(len(members))]
        waits = [emit(graph, WAIT, output) for output in outputs]
    for member, output, wait in zip(members, outputs, waits, strict=True):
        set_tag(output, member.tag)
        set_tag(wait, member.tag)
        _replace(graph, member, wait)


def _replace(graph: Graph, member: Collective, result: Node) -> None:
    """Use ``result`` in place of what ``member`` waited for, and remove ``member``."""
    (wait,) = member.waits
    for key in ("recompute", "ac_graph_id", "partitioner_tag"):
        if key in wait.meta:
            result.meta[key] = wait.meta[key]
    wait.replace_all_uses_with(result)
    graph.erase_node(wait)
    graph.erase_node(member.start)


# -- reductions -------------------------------------------------------------------------------------------------------


def _dependents(graph: Graph) -> set[Node]:
    """All nodes computed from the result of a reduction. Merging one of them with others could make a cycle."""
    found: set[Node] = set()
    stack = [user for reduction in reductions(graph) for user in reduction.start.users]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.users
    return found


def _merge_reductions(graph: Graph, members: list[Collective]) -> None:
    position = {node: i for i, node in enumerate(graph.nodes)}
    last = max((member.start for member in members), key=position.__getitem__)
    tag = _joint_tag(members)
    kind, world, process_group = members[0].start.args[1:]
    shapes = [list(member.start.meta["val"].shape) for member in members]
    with graph.inserting_before(last):
        rows = [emit(graph, aten.reshape.default, member.inputs[0], [world, -1]) for member in members]
        packed = emit(graph, aten.cat.default, rows, 1)
        flat = emit(graph, aten.reshape.default, packed, [-1])
        start = emit(graph, c10d.reduce_scatter_tensor.default, flat, kind, world, process_group)
        wait = emit(graph, WAIT, start)
        numels = [row.meta["val"].shape[1] for row in rows]
        parts = emit(graph, aten.split_with_sizes.default, wait, numels)
        pieces = [emit(graph, operator.getitem, parts, i) for i in range(len(members))]
        shards = [emit(graph, aten.reshape.default, piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]
    for node in (*rows, packed, flat, start, wait, parts):
        set_tag(node, tag)
    for member, piece, shard in zip(members, pieces, shards, strict=True):
        set_tag(piece, member.tag)
        set_tag(shard, member.tag)
        _replace(graph, member, shard)


