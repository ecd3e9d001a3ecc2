"""Rules for what is moved: each shard is gathered, each gradient reduced once, in an order that all ranks share.

A pass may merge, split and move collectives. What it may not change is noted before it runs, and compared afterwards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from .announce import line_of
from .fault import Fault
from .graph_view import (
    ALL_REDUCE_INTO,
    Collective,
    frees,
    is_launch,
    kind_of,
    process_group_of,
    tag_of,
    waits_of,
)
from .operators import OWN_PART

Sent = tuple[str, str, str]  # kind, process group, dtype

UNTAGGED = -1  # stands for the group of what a user launches


@dataclass(frozen=True, order=True)
class Transfer:
    """What one parameter takes part in, or one launch of a user's.

    Attributes:
        process_group: among whose ranks.
        group: of the parameter, or ``UNTAGGED``.
    """

    kind: str
    process_group: str
    group: int
    param: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.param or 'no parameter'} in process group {self.process_group}"


@dataclass(frozen=True)
class Moved:
    """The collectives of one graph.

    Attributes:
        launches: of each transfer, in order.
        bytes: that this rank sends, padding included, by kind, process group and dtype.
        senders: the launches that send these.
        order: by process group its launches, each with its transfers, in order.
        frees: by group and name of each parameter.
    """

    launches: defaultdict[Transfer, list[Node]] = field(default_factory=lambda: defaultdict(list))
    bytes: Counter[Sent] = field(default_factory=Counter)
    senders: defaultdict[Sent, list[Node]] = field(default_factory=lambda: defaultdict(list))
    order: defaultdict[str, list[tuple[Node, list[Transfer]]]] = field(default_factory=lambda: defaultdict(list))
    frees: defaultdict[tuple[int, str], list[Node]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def in_graph(cls, graph: Graph) -> Moved:
        """Read a graph, once."""
        moved = cls()
        for start in filter(is_launch, graph.nodes):
            moved._note(start)
        for free in frees(graph):
            for parameter in tag_of(free).parameters:  # type: ignore[union-attr]
                moved.frees[parameter].append(free)
        return moved

    def _note(self, start: Node) -> None:
        kind, process_group, tag = _kind(start), process_group_of(start), tag_of(start)
        transfers = [
            Transfer(kind, process_group, *parameter) for parameter in (tag.parameters if tag else [(UNTAGGED, "")])
        ]
        self.order[process_group].append((start, transfers))
        for transfer in transfers:
            self.launches[transfer].append(start)
        if tag is not None:
            for value in (node.meta["val"] for node in Collective(tag, start).inputs):
                sent = kind, process_group, str(value.dtype)
                self.bytes[sent] += value.numel() * value.itemsize
                self.senders[sent].append(start)


def _kind(start: Node) -> str:
    """An all-reduce of which each rank takes its part is a reduce-scatter."""
    takes_part = start.target is ALL_REDUCE_INTO and any(
        user.target is OWN_PART for wait in waits_of(start) for user in wait.users
    )
    return "reduce_scatter" if takes_part else kind_of(start)


# -- what a pass leaves -----------------------------------------------------------------------------------------------


def moves_the_same(before: Moved, after: Moved, repeats: bool = False, more: bool = False) -> Iterator[Fault]:
    """Nothing is moved less or more often, and as many bytes.

    Args:
        repeats: the pass may leave out what is moved again.
        more: the pass may gather more.
    """
    for transfer, launches in before.launches.items():
        found = len(after.launches.get(transfer, ()))
        if found < (1 if repeats else len(launches)):
            yield Fault(launches[-1], f"{transfer}: {len(launches)}, as before", f"{found}")
    for transfer, launches in after.launches.items():
        known = before.launches.get(transfer, [])
        may_be_more = transfer.group == UNTAGGED or (more and transfer.kind == "all_gather")  # gloo's may be split
        if len(launches) > len(known) and not may_be_more:
            new = [node for node in launches if node not in known]
            yield Fault(new[-1], f"{transfer}: {len(known)}, as before", f"{len(launches)}")
    if not (repeats or more):
        yield from _sends_the_same(before, after)


def _sends_the_same(before: Moved, after: Moved) -> Iterator[Fault]:
    """What is sent too much is named first, as what is missing may be among it."""
    keys = dict.fromkeys([*after.bytes, *before.bytes])
    for key in sorted(keys, key=lambda key: before.bytes[key] - after.bytes[key]):
        if before.bytes[key] != after.bytes[key]:
            senders = after.senders[key] or before.senders[key]
            sent = f"{before.bytes[key]} bytes of {key[2]} in each {key[0]} together"
            yield Fault(senders[-1], sent, f"{after.bytes[key]}")


def frees_the_same(before: Moved, after: Moved) -> Iterator[Fault]:
    """No free is lost or made."""
    for parameter in dict.fromkeys([*before.frees, *after.frees]):
        old, new = before.frees.get(parameter, []), after.frees.get(parameter, [])
        if len(old) != len(new):
            yield Fault((old or new)[-1], f"{len(old)} frees of {parameter[1]}, as before", f"{len(new)}")


def frees_none(after: Moved) -> Iterator[Fault]:
    """No free is there: memory is given back after its last use."""
    for parameter, nodes in after.frees.items():
        yield Fault(nodes[0], "no frees any more", f"one of {parameter[1]}")


def reduces_once(after: Moved) -> Iterator[Fault]:
    """The gradient of each parameter is reduced by one reduce-scatter."""
    for transfer, launches in after.launches.items():
        if transfer.kind == "reduce_scatter" and transfer.group != UNTAGGED and len(launches) > 1:
            yield Fault(launches[1], f"one {transfer}", f"{len(launches)}")


# -- order ------------------------------------------------------------------------------------------------------------


def launches_in_order(before: Moved, after: Moved) -> Iterator[Fault]:
    """Each process group still launches in the same order.

    A launch that a pass has made stands where one of the same parameters stood; if there were several, any that fits.
    """
    for process_group, launches in after.order.items():
        old = before.order[process_group]
        place = {start: position for position, (start, _) in enumerate(old)}
        places: defaultdict[Transfer, list[int]] = defaultdict(list)
        for position, (_, transfers) in enumerate(old):
            for transfer in transfers:
                places[transfer].append(position)
        last = 0
        for start, (transfer, *_) in launches:
            stood = [place[start]] if start in place else places[transfer]
            at = bisect_left(stood, last)
            if at < len(stood):
                last = stood[at]
            elif stood:
                yield Fault(start, f"it launched before {old[last][0]}, as before", "it launched after")


def same_launches(orders: Sequence[Mapping[str, Graph]]) -> Iterator[Fault]:
    """All ranks launch the same in each process group, in the same order, or wait for each other for ever."""
    first, *others = ([_launched(graph) for graph in graphs.values()] for graphs in orders)
    for rank, other in enumerate(others, start=1):
        for ours, theirs in zip(first, other, strict=True):
            for process_group in dict.fromkeys([*ours, *theirs]):
                yield from _differ(ours[process_group], theirs[process_group], rank)


Launched = defaultdict[str, list[tuple[Node, str]]]  # by process group


def _launched(graph: Graph) -> Launched:
    """Each launch, and what all ranks must agree on."""
    found: Launched = defaultdict(list)
    for start in filter(is_launch, graph.nodes):
        found[process_group_of(start)].append((start, line_of(start)))
    return found


def _differ(ours: list[tuple[Node, str]], theirs: list[tuple[Node, str]], rank: int) -> Iterator[Fault]:
    for (mine, my_launch), (node, launch) in zip(ours, theirs, strict=False):
        if my_launch != launch:
            yield Fault(node, f"{mine} as on rank 0, {my_launch}", f"{launch} on rank {rank}")
            return
    if len(ours) != len(theirs):
        longer = max(ours, theirs, key=len)
        node = longer[min(len(ours), len(theirs))][0]
        yield Fault(node, f"as many launches on rank {rank} as on rank 0, {len(ours)}", str(len(theirs)))
