"""Reads from a graph which collectives may travel together, in which order they are used, and what can hide them.

gather a ─ gather b ─ wait a ─ mm ─ wait b ─ mm ─ mm ─ reduce b ─ mm ─ reduce a

gathers      a, b     compute  0 | mm | mm mm mm          before, between and after their first uses
reductions   b, a     compute  mm mm mm | mm | 0          before, between and after their gradients are there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from torch.fx import Graph, Node

from .alpha_beta import Line
from .bucket_plan import Load
from .cost_model import COMPUTE, CostModel
from .graph_view import Collective, aliases_of, gathers, kind_of, phase_of, process_group_of, reductions, whole_bytes

Clock = Mapping[Node, float]  # seconds of compute before each node, in order of the graph


def sequences(graph: Graph) -> list[list[Collective]]:
    """The gathers in order of first use and the reductions in graph order, each split into those that go alike.

    Alike are gathers, or reductions of one kind, on one process group and of one dtype. A sequence with a
    bucket in it is decided already, and left out.
    """
    used = sorted(gathers(graph), key=lambda gather: (first_use(gather), gather.start))
    found: dict[tuple[object, ...], list[Collective]] = {}
    for collective in (*used, *reductions(graph)):
        found.setdefault(alike(collective), []).append(collective)
    return [members for members in found.values() if not any(is_bucket(member) for member in members)]


def alike(collective: Collective) -> tuple[object, ...]:
    """Collectives for which this is equal may be merged."""
    return kind_of(collective.start), *collective.how, *dict.fromkeys(collective.dtypes)


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


def load_of(members: Sequence[Collective], clock: Clock, end: float) -> Load:
    """What a plan must know of a sequence of gathers or of reductions."""
    is_gather = kind_of(members[0].start) == "all_gather"
    times = [clock[first_use(member) if is_gather else member.start] for member in members]
    between = [later - earlier for earlier, later in pairwise([0.0, *times, end])]
    return Load([whole_bytes(member.start) for member in members], between)


def shared_line(members: Sequence[Collective], all_members: Iterable[Sequence[Collective]], costs: CostModel) -> Line:
    """Seconds of a launch of so many bytes on a lane that others use too.

    Sequences on one lane take turns, so each finds it as much slower as the bytes of the others keep it busy.
    """
    lane = costs.lane(members[0].start)
    busy: defaultdict[bool, float] = defaultdict(float)
    for others in all_members:
        if costs.lane(others[0].start) == lane:
            busy[others is members] += _line(others, costs).per_byte * _total(others)
    own = _line(members, costs)
    return replace(own, per_byte=own.per_byte * (1 + busy[False] / busy[True])) if busy[True] else own


def eager_room(members: Sequence[Collective]) -> int:
    """Bytes of the two groups, one after the other, that are largest together.

    So much is there at once if each group is gathered one ahead, or reduced while the next has its gradients computed,
    as FSDP2 does eagerly.
    """
    groups = [_total([*group]) for _, group in groupby(members, key=lambda member: member.tag.group)]
    return max((sum(pair) for pair in pairwise(groups)), default=groups[0])


def _line(members: Sequence[Collective], costs: CostModel) -> Line:
    start = members[0].start
    return costs.line(kind_of(start), process_group_of(start))


def _total(members: Sequence[Collective]) -> int:
    return sum(whole_bytes(member.start) for member in members)
