"""Makes one collective of many that move parameters or gradients; ``bucket_choice`` says which.

Gathers become one coalesced gather straight into each parameter's own output, with no copy in or out:

        a ─ gather ─ wait             a ─┐            ┌─ wait
        b ─ gather ─ wait     ->      b ─┴─ gather ───┴─ wait

Reductions become one reduce-scatter of a flat tensor of shape (world size, padded shard numels), the layout of the
eager executor, so that each element is summed in the same order and the bits are equal:

        g ─ reduce ─ wait             g ─ view ─┐                         ┌─ view
        h ─ reduce ─ wait     ->      h ─ view ─┴─ cat ─ reduce ─ wait ───┴─ view

Both in the order of the groups, and of the parameters in their group. The graph is in topological order before and
after each merge, so "earlier in the graph" bounds every search for dependences: a merge costs no more than the stretch
that it spans.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .bucket_choice import choose
from .bucket_load import Free
from .context import PassContext, Report, Traffic
from .graph_view import COPIES, GATHER_MANY, UNSHARD, WAIT, Collective, Tag, kind_of, phase_of, set_tag
from .torch_compat import emit, is_alias

aten = torch.ops.aten


def bucket(graph: Graph, context: PassContext, free: Free | None = None) -> Report:
    """Merge collectives as the configuration says: for each group and each time its module runs, or across groups.

    Only collectives on one process group are merged, and reductions only if of one kind and dtype. Gathers of several
    dtypes need a transport that moves each tensor for itself, as NCCL does in one launch; gloo, which mixes them up
    without an error, gets them apart from ``for_gloo``. A bucket of gathers takes the place of its first member, a
    bucket of reductions that of its last. Members of which one is computed from another stay apart, and so do gathers
    of what compute must run for first, and those of one parameter.

    Args:
        graph: forward or backward graph, or a graph without backward; not a joint graph, whose gathers must stay apart
            because the backward may need other parameters than the forward.
        context: shared by the passes.
        free: for "auto", bytes that may be filled while each node runs, in order of the graph; ``None`` for no limit.

    Raises:
        ValueError: the hardware profile of the configuration cannot be read any more.
    """
    before = Traffic.of(graph)
    made = 0
    for candidates in choose(graph, context.config, free):
        for members in _independent(candidates):
            MERGES[kind_of(members[0].start)](graph, members)
            made += 1
    if made:
        graph.lint()
    return Report("bucket", made, before, Traffic.of(graph))


# -- which can be merged ----------------------------------------------------------------------------------------------


def _independent(candidates: list[Collective]) -> Iterator[list[Collective]]:
    """Parts of a bucket, of two or more members, none computed from another: merging those would make a cycle.

    The caller merges each part before it asks for the next, because merging makes new dependences.
    """
    while len(candidates) > 1:
        part, candidates = _split(candidates)
        if len(part) > 1:
            yield part


def _split(candidates: list[Collective]) -> tuple[list[Collective], list[Collective]]:
    """The first with all that can be merged with it, and the rest; reads the stretch of the graph once."""
    part: list[Collective] = []
    rest: list[Collective] = []
    starts = {candidate.start: candidate for candidate in candidates}
    first = node = candidates[0].start
    behind: set[Node] = set()  # members, and what is computed from them
    moved: set[tuple[int, str]] = set()  # a module that runs twice may be gathered twice, but not by one launch
    while len(part) + len(rest) < len(candidates):
        needs_a_member = not behind.isdisjoint(node.all_input_nodes)
        if node in starts:
            again = not moved.isdisjoint(starts[node].tag.parameters)
            joins = not (needs_a_member or again) and _can_be_launched_at(first, starts[node])
            (part if joins else rest).append(starts[node])
            needs_a_member |= joins
            moved.update(starts[node].tag.parameters if joins else ())
        if needs_a_member:
            behind.add(node)
        node = node.next
    return part, rest


def _can_be_launched_at(first: Node, candidate: Collective) -> bool:
    """Whether only casts, pads and the like must move up with a gather; a reduction is launched at the last member."""
    if kind_of(candidate.start) != "all_gather":
        return True
    return all(
        is_alias(node) or node.target in COPIES or phase_of(node) == UNSHARD
        for node in _ancestors(candidate.start, first)
    )


def _ancestors(node: Node, first: Node) -> dict[Node, None]:
    """What ``node`` is computed from, as far as it is not earlier in the graph than ``first``."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found and not source < first:
                found[source] = None
                stack.append(source)
    return found


def _in_group_order(members: list[Collective]) -> list[Collective]:
    return sorted(members, key=lambda member: (member.tag.group, member.tag.index))


def _joint_tag(members: list[Collective]) -> Tag:
    first, last = members[0].tag, members[-1].tag
    params = tuple(name for member in members for name in member.tag.params)
    index = tuple(i for member in members for i in member.tag.index)
    groups = tuple(group for member in members for group, _ in member.tag.parameters)
    if len(set(groups)) == 1:
        return Tag(first.group, first.name, params, index, first.phase)
    name = f"{first.name or 'root'} to {last.name or 'root'}"
    return Tag(first.group, name, params, index, first.phase, groups=groups)


# -- gathers ----------------------------------------------------------------------------------------------------------


def _merge_gathers(graph: Graph, members: list[Collective]) -> None:
    first = members[0].start
    needed = {node: None for member in members for node in _ancestors(member.start, first)}
    for node in sorted(needed):  # casts and pads of shards, so they can move up
        first.prepend(node)
    members = _in_group_order(members)
    tag = _joint_tag(members)
    with graph.inserting_before(first):
        inputs = [member.inputs[0] for member in members]
        brought = [member.start.meta["val"] for member in members]
        start = emit(graph, GATHER_MANY, inputs, *members[0].how, result=brought)
        outputs = [emit(graph, operator.getitem, start, i) for i in range(len(members))]
        waited = [member.waits[0].meta["val"] for member in members]
        waits = [emit(graph, WAIT, output, result=value) for output, value in zip(outputs, waited, strict=True)]
    set_tag(start, tag)
    for member, output, wait in zip(members, outputs, waits, strict=True):
        set_tag(output, member.tag)
        set_tag(wait, member.tag)
    _replace(graph, members, waits)


def _replace(graph: Graph, members: list[Collective], results: list[Node]) -> None:
    """Use ``results`` in place of what ``members`` waited for, one each, and remove ``members``.

    Each user is written once: a graph's output reads very many.
    """
    new = {wait: result for member, result in zip(members, results, strict=True) for wait in member.waits}
    for user in dict.fromkeys(user for wait in new for user in wait.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda node: new.get(node, node))
    for node in (*new, *(member.start for member in members)):
        graph.erase_node(node)


# -- reductions -------------------------------------------------------------------------------------------------------


def _merge_reductions(graph: Graph, members: list[Collective]) -> None:
    """Pack the gradients in rows, one for each shard rank, so that each rank gets its part of all."""
    world = members[0].how[1]
    last = members[-1].start
    _move_users_behind(members, last)
    members = _in_group_order(members)
    with graph.inserting_before(last):
        rows = [emit(graph, aten.reshape.default, member.inputs[0], [world, -1]) for member in members]
        packed = emit(graph, aten.cat.default, rows, 1)
        flat = emit(graph, aten.reshape.default, packed, [-1])
    _launch_packed(graph, members, last, flat, [*rows, packed])


def _merge_all_reduces(graph: Graph, members: list[Collective]) -> None:
    last = members[-1].start
    _move_users_behind(members, last)
    members = _in_group_order(members)
    packed = already_packed([member.inputs[0] for member in members])
    made: list[Node] = []
    if packed is None:
        with graph.inserting_before(last):
            made = [emit(graph, aten.reshape.default, member.inputs[0], [-1]) for member in members]
            packed = emit(graph, aten.cat.default, made)
    _launch_packed(graph, members, last, packed, made)


def already_packed(inputs: list[Node]) -> Node | None:
    """What ``inputs`` are all the parts of, in order: of what a reduction brought, or of what ``pack`` made."""
    parts = [_source(node) if node.target is aten.reshape.default else node for node in inputs]
    split = _source(parts[0])
    if split is None or split.target is not aten.split_with_sizes.default or len(split.meta["val"]) != len(parts):
        return None
    if split.all_input_nodes[0].meta["val"].dim() != 1:
        return None  # columns of it, say
    in_order = all(part is not None and part.args == (split, index) for index, part in enumerate(parts))
    return _source(split) if in_order else None


def _source(node: Node | None) -> Node | None:
    return next(iter(node.all_input_nodes), None) if node is not None else None


def _launch_packed(graph: Graph, members: list[Collective], last: Node, packed: Node, made: list[Node]) -> None:
    """One launch for all, before ``last``, and each member's part of its result."""
    tag = _joint_tag(members)
    outputs = [member.start.meta["val"] for member in members]
    with graph.inserting_before(last):
        start = emit(graph, members[0].operator, packed, *members[0].how)
        wait = emit(graph, WAIT, start)
        split = emit(graph, aten.split_with_sizes.default, wait, [output.numel() for output in outputs])
        parts = [emit(graph, operator.getitem, split, i) for i in range(len(members))]
        shards = [
            emit(graph, aten.reshape.default, part, list(output.shape))
            for part, output in zip(parts, outputs, strict=True)
        ]
    for node in (*made, packed, start, wait, split):
        set_tag(node, tag)
    for member, part, shard in zip(members, parts, shards, strict=True):
        set_tag(part, member.tag)
        set_tag(shard, member.tag)
    _replace(graph, members, shards)


def _move_users_behind(members: list[Collective], last: Node) -> None:
    """Move what is computed from the members' results, and comes before ``last``, behind it, in the same order."""
    waits = {wait for member in members for wait in member.waits}
    late: dict[Node, None] = {}
    node = members[0].start
    while node is not last:
        if any(source in waits or source in late for source in node.all_input_nodes):
            late[node] = None
        node = node.next
    for node in reversed(late):
        last.append(node)


MERGES = {"all_gather": _merge_gathers, "reduce_scatter": _merge_reductions, "all_reduce": _merge_all_reduces}
