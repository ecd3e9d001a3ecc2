"""Chooses which groups stay unsharded from forward to backward, which then need no second gather.

What that buys, in this model: the collectives of the backward take turns on one lane, beside compute; the step gets
shorter by the time of the gathers that go, but by no more than the lane takes longer than compute.

What it takes: a group's bytes from where the forward frees it to where the backward reads it again. The group that the
forward frees first is read last, so these intervals lie in one another around the turn from forward to backward:

    live bytes        ▁▂▃▄▅▆▇█▇▆▅▄▃▂▁
    first group        ├───────────┤
    second group         ├───────┤
    third group            ├───┤

(one that does not is taken for as long as the next one outside of it). Between the start of one interval and that of
the next, and between their ends, the groups kept so far must fit into what is free. Hence this knapsack problem has an
exact solution by going from the outermost group to the innermost, with all sums of bytes and time that no other sum
beats in both: a Pareto front (Nemhauser and Ullmann, "Discrete Dynamic Programming and Capital Allocation", 1969). Of
the choices that buy most it takes the one with the fewest bytes. So that the front stays short, bytes are counted in
thousandths of the largest room, rounded up. What is kept then fits, and buys no less than the best for rooms that are
smaller by a thousandth for each group and one more.

Bytes are those of the joint graph, in which all that the backward reads is saved; a partitioner that computes some of
it again leaves more room than is used here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from .bucket_plan import PICO
from .context import PassConfig
from .cost_model import COMPUTE, CostModel
from .graph_view import (
    Collective,
    alias_root,
    aliases_of,
    data_bytes,
    gathers,
    is_tangent,
    kind_of,
    phase_of,
    process_group_of,
    reductions,
    whole_bytes,
)
from .machine import cost_model
from .memory import live_bytes

UNITS = 1000  # that the largest room is counted in


@dataclass(frozen=True)
class Item:
    """A group that may be kept: how many bytes it takes, and how many picoseconds its gather does.

    Attributes:
        room: bytes that may be taken by it and those before it together.
    """

    bytes: int
    seconds: int
    room: int


@dataclass(frozen=True)
class _Freed:
    """A parameter that the backward reads after its free; positions in the graph."""

    free: Node
    gather: Collective
    bytes: int
    at: int
    read: int
    last_read: int


def frees_to_drop(graph: Graph, config: PassConfig, frees: Collection[Node]) -> set[Node]:
    """Those of ``frees`` without which a step is fastest.

    Args:
        graph: joint graph of forward and backward.
        config: says how much memory may be in use, or ``None`` for no more than without keeping any.
        frees: of whole parameters.

    Raises:
        ValueError: the hardware profile of the configuration cannot be read any more.
    """
    groups: dict[int, list[_Freed]] = {}
    for freed in _freed(graph, frees):
        groups.setdefault(freed.gather.tag.group, []).append(freed)
    if not groups:
        return set()
    costs = cost_model([graph], config.hardware)
    outermost_first = sorted(groups.values(), key=lambda group: min(each.at for each in group))
    seconds = [_gather_seconds(group, costs) for group in outermost_first]
    spare = sum(seconds) + _reduction_seconds(graph, costs) - _backward_compute(graph, costs)
    rooms = _rooms(outermost_first, _free_bytes(graph, outermost_first, config.memory_budget))
    items = [
        Item(sum(each.bytes for each in group), int(PICO * time), room)
        for group, time, room in zip(outermost_first, seconds, rooms, strict=True)
    ]
    kept = best(items, int(PICO * spare))
    return {each.free for index in kept for each in outermost_first[index]}


def best(items: Sequence[Item], most_seconds: int) -> tuple[int, ...]:
    """Indices of those to keep: no others buy more time, counted up to ``most_seconds``, or as much in fewer bytes.

    Where a room is larger than ``UNITS`` bytes, that is so but for the rounding; see the head of this module.
    """
    unit = max(1, max((item.room for item in items), default=0) // UNITS)
    front: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]  # bytes rise, and so does the time
    for index, item in enumerate(items):
        with_it = [
            (taken + -(-item.bytes // unit), min(won + item.seconds, max(most_seconds, 0)), (*kept, index))
            for taken, won, kept in front
        ]
        fits = [each for each in (*front, *with_it) if each[0] <= max(item.room // unit, 0)]
        front = []
        for each in sorted(fits, key=lambda state: (state[0], -state[1])):
            if not front or each[1] > front[-1][1]:
                front.append(each)
    return front[-1][2]


# -- what the graph says ----------------------------------------------------------------------------------------------


def _freed(graph: Graph, frees: Collection[Node]) -> list[_Freed]:
    positions = {node: position for position, node in enumerate(graph.nodes)}
    gather_of = {
        alias_root(node): gather for gather in gathers(graph) for param in gather.params for node in param.made
    }
    found = []
    for free in frees:
        root = alias_root(free.args[0])  # type: ignore[arg-type]
        readers = [positions[user] for alias in aliases_of(root) for user in alias.users if user not in frees]
        later = [position for position in readers if position > positions[free]]
        if later and root in gather_of:
            size = data_bytes(root.meta["val"])
            found.append(_Freed(free, gather_of[root], size, positions[free], min(later), max(later)))
    return found


def _free_bytes(graph: Graph, groups: Sequence[Sequence[_Freed]], budget: int | None) -> list[int]:
    """While each node runs, if all groups are gathered again right before they are read."""
    live = live_bytes([graph])
    for each in (freed for group in groups for freed in group):
        for position in range(each.read, each.last_read + 1):
            live[position] += each.bytes
    most = max(live) if budget is None else budget
    return [most - size for size in live]


def _rooms(groups: Sequence[Sequence[_Freed]], free: Sequence[int]) -> list[int]:
    """For each group the least that is free where it is kept and the next is not."""
    starts = [min(each.at for each in group) for group in groups]
    ends = [max(each.read for each in group) for group in groups]
    for index in reversed(range(len(ends) - 1)):
        ends[index] = max(ends[index], ends[index + 1])
    inner = [*zip(starts[1:], ends[1:], strict=True), (ends[-1], ends[-1])]
    return [
        min([*free[start : begin + 1], *free[stop : end + 1]])
        for start, end, (begin, stop) in zip(starts, ends, inner, strict=True)
    ]


# -- what it takes ----------------------------------------------------------------------------------------------------


def _gather_seconds(group: Sequence[_Freed], costs: CostModel) -> float:
    """In one launch."""
    return _seconds([freed.gather for freed in group], costs)


def _reduction_seconds(graph: Graph, costs: CostModel) -> float:
    """In one launch for each group."""
    groups: dict[int, list[Collective]] = {}
    for reduction in reductions(graph):
        groups.setdefault(reduction.tag.group, []).append(reduction)
    return sum(_seconds(group, costs) for group in groups.values())


def _seconds(collectives: Sequence[Collective], costs: CostModel) -> float:
    start = collectives[0].start
    size = sum(whole_bytes(each.start) for each in collectives)
    return costs.cheapest_seconds(kind_of(start), process_group_of(start), size)


def _backward_compute(graph: Graph, costs: CostModel) -> float:
    """Of all that is computed from gradients of the outputs."""
    found: set[Node] = set()
    total = 0.0
    for node in graph.nodes:
        if is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
            if phase_of(node) is None and costs.lane(node) == COMPUTE:
                total += costs.seconds(node)
    return total
