"""Reads from a graph which collectives may travel together, in which order they are used, and what can hide them.

gather a ─ gather b ─ wait a ─ mm ─ wait b ─ mm ─ mm ─ reduce b ─ mm ─ reduce a

gathers      a, b     compute  0 | mm | mm mm mm          before, between and after their first uses
reductions   b, a     compute  mm mm mm | mm | 0          before, between and after their gradients are there
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch.fx import Graph, Node

from .bucket_plan import Load
from .bucket_timeline import Queue
from .cost_model import COMPUTE, CostModel
from .graph_view import (
    REDUCE,
    Collective,
    aliases_of,
    data_bytes,
    gathers,
    kind_of,
    made_by,
    phase_of,
    process_group_of,
    reductions,
    whole_bytes,
)

Clock = Mapping[Node, float]  # seconds of compute before each node, in order of the graph
Free = Mapping[Node, float]  # bytes that may be filled while each node runs, in order of the graph


def sequences(graph: Graph) -> list[list[Collective]]:
    """The gathers in order of first use and the reductions in graph order, each split into those that go alike.

    A sequence with a bucket in it is decided already, and left out.
    """
    used = sorted(gathers(graph), key=lambda gather: (first_use(gather), gather.start))
    found: dict[tuple[object, ...], list[Collective]] = {}
    for collective in (*used, *reductions(graph)):
        found.setdefault(alike(collective), []).append(collective)
    return [members for members in found.values() if not any(is_bucket(member) for member in members)]


def alike(collective: Collective) -> tuple[object, ...]:
    """Collectives for which this is equal may be merged.

    Those are gathers, or reductions of one kind and of one dtype, as one tensor of them is made; on one process group.
    """
    kind = kind_of(collective.start)
    return kind, *collective.how, *(() if kind == "all_gather" else collective.dtypes)


def is_bucket(collective: Collective) -> bool:
    """Whether it moves several parameters."""
    return len(collective.tag.params) != 1 or len(collective.waits) != 1


def first_use(gather: Collective) -> Node:
    """The first node that reads what the gather brings, views and what the transition makes of it not counted."""
    data = {node for param in gather.params for made in param.made for node in aliases_of(made)}
    return min((user for node in data for user in node.users if user not in data), default=gather.start)


def clock(graph: Graph, costs: CostModel) -> tuple[Clock, float]:
    """Seconds of compute before each node, and of all; what transitions do is none, as passes fuse or move it."""
    found: dict[Node, float] = {}
    now = 0.0
    for node in graph.nodes:
        found[node] = now
        if phase_of(node) is None and costs.lane(node) == COMPUTE:
            now += costs.seconds(node)
    return found, now


def queue_of(members: Sequence[Collective], clock: Clock, end: float, costs: CostModel, free: Free | None) -> Queue:
    """What a plan must know of a sequence of gathers or of reductions.

    Args:
        members: the sequence, in order of first use or of gradients.
        clock: seconds of compute before each node; ``end``, of all.
        free: bytes that may be filled while each node runs; ``None`` for no limit.
    """
    start = members[0].start
    is_gather = kind_of(start) == "all_gather"
    marks = [first_use(member) if is_gather else member.start for member in members]
    between = [later - earlier for earlier, later in pairwise([0.0, *(clock[mark] for mark in marks), end])]
    sizes = [whole_bytes(member.start) for member in members]
    held = sizes if is_gather else [_gradient_bytes(member) for member in members]
    room = _least_between(marks, free) if free is not None else [math.inf] * len(between)
    line = costs.line(kind_of(start), process_group_of(start))
    return Queue(Load(sizes, between, room, held), costs.lane(start) or "", line, is_gather)


def _gradient_bytes(reduction: Collective) -> int:
    """What waits to be reduced in a bucket, and its place there: both are in memory when it is packed."""
    (taken,) = reduction.inputs
    sources = [source for node in made_by(taken, REDUCE) for source in node.all_input_nodes if phase_of(source) is None]
    return whole_bytes(reduction.start) + sum(data_bytes(source.meta["val"]) for source in sources)


def _least_between(marks: Sequence[Node], free: Free) -> list[float]:
    """The least of ``free`` before each of ``marks``, from the one before it on, and behind the last."""
    least = [math.inf] * (len(marks) + 1)
    passed = 0
    for node, size in free.items():
        while passed < len(marks) and marks[passed] is node:
            passed += 1
        least[passed] = min(least[passed], size)
    return least
