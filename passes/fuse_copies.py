"""Makes one kernel of the casts, divisions and copies on each side of a collective.

    gather      a ─ cast ─┐                           a ─┐        ┌─ part ─┐
                b ─ cast ─┴─ START              ->    b ─┴─ pack ─┴─ part ─┴─ START

    reduction   a ─ cast ─ divide ─┐                  a ─┐
                b ─ cast ─ divide ─┴─ cat ─ START ->  b ─┴─ pack ─ START

    result      WAIT ─┬─ part ─ cast ─ output         WAIT ─ cast ─┬─ part ─ output
                      └─ part ─ cast ─ output   ->                 └─ part ─ output

Bits stay: each element goes through the same operations. What is left is the cheapest in the cost model, whatever the
machine: a coalesced gather takes as long as one of a packed tensor (``alpha_beta``), so what needs no cast is sent from
where it is and brought to where it stays, without a copy on either side (*zero-copy*). A cast is a copy, so where there
are several to one dtype, one kernel does all and is launched once; what it makes is sent from where it lies in one
tensor, and still brought without a copy. The gradients of a reduction are packed anyhow, as only so sums are rounded
like in eager: one kernel casts, divides and packs; but a cast to a smaller dtype stays where it is, as gradients wait
for each other. What a reduction brings is cast as a whole, and each gradient is a view of that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .context import PassContext, Report, Traffic
from .graph_view import Collective, all_reduces, converts, copy_tag, gathers, reductions, set_tag, tag_of
from .operators import PACK
from .torch_compat import emit, update_result

aten = torch.ops.aten
DIVIDE = aten.div.Tensor
PAD = aten.constant_pad_nd.default


def fuse_copies(graph: Graph, context: PassContext) -> Report:
    """Cast, divide and pack at once what is sent together, and cast and divide at once what arrives together.

    Args:
        graph: forward or backward graph, or a graph without backward, after ``bucket``, and after ``dedup``, which
            compares what is sent of each parameter.
        context: shared by the passes.
    """
    before = Traffic.of(graph)
    made = sum(map(_pack_shards, gathers(graph))) + sum(map(_pack_gradients, reductions(graph)))
    made += sum(_convert_result(reduction) for kind in (reductions, all_reduces) for reduction in kind(graph))
    if made:
        graph.lint()
    return Report("fuse_copies", made, before, Traffic.of(graph))


def _is_cast(node: Any) -> bool:
    """Whether the node, of a transition, changes nothing but the dtype."""
    if not isinstance(node, Node) or not converts(node) or tag_of(node) is None:
        return False
    return bool(node.all_input_nodes[0].meta["val"].device == node.meta["val"].device)


def _is_division(node: Any) -> bool:
    """Whether the node, of a transition, divides by a number."""
    return isinstance(node, Node) and node.target is DIVIDE and tag_of(node) is not None and _divisor(node) is not None


def _divisor(node: Node) -> float | None:
    return float(node.args[1]) if isinstance(node.args[1], (int, float)) and node.args[1] > 0 else None


def _is_padding(node: Node) -> bool:
    """Whether the node, of a transition, adds zeros."""
    return node.target is PAD and tag_of(node) is not None and not any(node.args[2:])


def _size(node: Node) -> int:
    """Bytes of an element."""
    return int(node.meta["val"].itemsize)


# -- gathers ----------------------------------------------------------------------------------------------------------


def _pack_shards(gather: Collective) -> int:
    """Have the gather send several casts to one dtype as parts of one tensor; of how many dtypes."""
    casts: dict[torch.dtype, list[Node]] = {}
    for node in gather.inputs:
        if _is_cast(node) and len(node.users) == 1:
            casts.setdefault(node.meta["val"].dtype, []).append(node)
    several = [nodes for nodes in casts.values() if len(nodes) > 1]
    for nodes in several:
        _pack_casts(gather, nodes)
    return len(several)


def _pack_casts(gather: Collective, casts: list[Node]) -> None:
    graph, sizes = gather.start.graph, [list(node.meta["val"].shape) for node in casts]
    with graph.inserting_before(gather.start):
        sources = [node.args[0] for node in casts]
        packed = emit(graph, PACK, sources, 1, casts[0].meta["val"].dtype, 1.0)
        split = emit(graph, aten.split_with_sizes.default, packed, [node.meta["val"].numel() for node in casts])
        items = [emit(graph, operator.getitem, split, index) for index in range(len(casts))]
        parts = [emit(graph, aten.reshape.default, item, size) for item, size in zip(items, sizes, strict=True)]
    for node in (packed, split):
        set_tag(node, gather.tag)
    for cast, *made in zip(casts, items, parts, strict=True):
        copy_tag(cast, *made)
        cast.replace_all_uses_with(made[-1])
        graph.erase_node(cast)


# -- gradients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """What is done to one gradient before it is packed.

    Attributes:
        gradient: that it is done to.
        pads: in order; they may as well come before the cast and the division, which leave zeros alone.
        divisor: 1 if it is not divided.
        steps: all of it, the last first.
    """

    gradient: Node
    pads: list[Node]
    divisor: float
    steps: list[Node]

    @classmethod
    def of(cls, rows: Node) -> Prepared:
        """Walk back from a gradient's rows as far as nothing else reads what is there, at most over a cast.

        Not over a cast to a smaller dtype: until all gradients are there, that spares memory.
        """
        steps = [rows]
        pads: list[Node] = []
        divisor = 1.0
        while (node := steps[-1].args[0]) and isinstance(node, Node) and len(node.users) == 1:
            if _is_padding(node):
                pads.insert(0, node)
            elif _is_division(node) and divisor == 1.0:
                divisor = _divisor(node) or 1.0
            elif not _is_cast(node) or _size(node) < _size(node.all_input_nodes[0]):
                break
            steps.append(node)
            if _is_cast(node):
                break
        return cls(steps[-1].args[0], pads, divisor, steps)  # type: ignore[arg-type]


def _pack_gradients(reduction: Collective) -> bool:
    """Whether gradients were cast or divided before they were packed, which now happens at once."""
    flat = reduction.inputs[0]
    packed = flat.args[0] if flat.target is aten.reshape.default else None
    if not isinstance(packed, Node) or packed.target is not aten.cat.default:
        return False
    members = [Prepared.of(rows) for rows in packed.all_input_nodes]
    divisors = {member.divisor for member in members}
    if len(divisors) > 1 or not any(len(member.steps) > 1 + len(member.pads) for member in members):
        return False
    graph, rows, dtype = flat.graph, packed.meta["val"].shape[0], packed.meta["val"].dtype
    with graph.inserting_before(packed):
        sources = [_padded(graph, member) for member in members]
        at_once = emit(graph, PACK, sources, rows, dtype, *divisors)
    set_tag(at_once, reduction.tag)
    flat.replace_all_uses_with(at_once)
    for node in (flat, packed, *(step for member in members for step in member.steps)):
        graph.erase_node(node)
    return True


def _padded(graph: Graph, member: Prepared) -> Node:
    node = member.gradient
    for pad in member.pads:
        node = emit(graph, PAD, node, *pad.args[1:])
        copy_tag(pad, node)
    return node


# -- results ----------------------------------------------------------------------------------------------------------


def _convert_result(reduction: Collective) -> int:
    """Cast and divide what the reduction brings before it is split and not each part; how often."""
    readers = [user for wait in reduction.waits for user in wait.users]
    if len(readers) != 1 or readers[0].target is not aten.split_with_sizes.default:
        return 0
    return sum(1 for _ in _conversions(readers[0]))


def _conversions(split: Node) -> Iterator[Node]:
    while (steps := _done_to_all_parts(split)) is not None:
        first, graph = steps[0], split.graph
        with graph.inserting_before(split):
            whole = graph.call_function(first.target, (split.args[0], *first.args[1:]), first.kwargs)  # type: ignore[arg-type]
        update_result(whole)
        copy_tag(split, whole)
        split.replace_input_with(split.args[0], whole)  # type: ignore[arg-type]
        for step in steps:
            step.replace_all_uses_with(step.args[0])  # type: ignore[arg-type]
            graph.erase_node(step)
        for node in (split, *split.users, *(view for item in split.users for view in item.users)):
            update_result(node)
        yield whole


def _done_to_all_parts(split: Node) -> list[Node] | None:
    """The cast or division that is the only thing done to each part, if it is the same for all."""
    shards = [view for item in split.users for view in item.users]
    steps = [step for shard in shards for step in shard.users]
    if len(split.users) != len(split.meta["val"]) or len(shards) != len(split.users) or len(steps) != len(shards):
        return None
    if not all(view.target is aten.reshape.default for view in shards):
        return None
    alike = {(step.target, step.args[1:], tuple(step.kwargs.items())) for step in steps}
    return steps if len(alike) == 1 and all(_is_cast(step) or _is_division(step) for step in steps) else None
