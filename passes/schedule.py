"""Launches gathers early and waits for reductions late, as far as memory allows.

    before:  gather a ─ wait a ─ mm ─ gather b ─ wait b ─ mm ─ reduce b ─ wait b ─ mm ─ reduce a ─ wait a
    after:   gather a ─ gather b ─ wait a ─ mm ─ wait b ─ mm ─ reduce b ─ mm ─ reduce a ─ wait b ─ wait a

Compute keeps its order. A gather's wait stands right before the first node that reads what it brings, and the gathers
are launched in the order of these waits, each as early as the budget allows: for a lane that takes collectives in
order, no other choice of positions is faster. A reduction is launched where its gradients are ready, and waited for as
late as the budget allows: before the first node that reads the result, at the end otherwise; where an all-reduce
follows, before the next reduction is launched.

The budget is a peak of live bytes. By default it is the peak of the order in which FSDP2 runs eagerly, in the same
graphs: every gather launched one ahead, every reduction waited for when the next is launched. That peak is often
reached at one place only; everywhere else there is room to launch earlier. Where the graphs need more than the budget
without any overlap, nothing is launched early.

Positions depend on the graphs and the budget alone, which are the same on all ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from .context import PassContext, Report, Traffic
from .graph_view import (
    REDUCE,
    UNSHARD,
    WAIT,
    Collective,
    all_reduces,
    data_bytes,
    gathers,
    made_by,
    reductions,
    resized_to,
    tag_of,
)
from .memory import MemoryProfile
from .torch_compat import is_alias, real_tensors


def schedule(graphs: Sequence[Graph], context: PassContext, default_budget: int | None = None) -> list[Report]:
    """Order the collectives of a forward and its backward, or of one graph.

    Args:
        graphs: in the order in which they run, after ``bucket``.
        context: shared by the passes; its configuration may set the budget.
        default_budget: where it does not; ``None``: the peak of the eager order of the buckets that the graphs have.

    Returns:
        A report for each graph; a change is a node that stands elsewhere than before.
    """
    before = [(Traffic.of(graph), list(graph.nodes)) for graph in graphs]
    orders = [Order.of(graph) for graph in graphs]
    with real_tensors():
        _measure(orders, graphs)
        given = (context.config.memory_budget, default_budget)
        budget = next((each for each in given if each is not None), None)
        _choose(orders, max(order.eager_peak() for order in orders) if budget is None else budget)
    for order, graph in zip(orders, graphs, strict=True):
        order.write(graph)
        graph.lint()
    return [
        Report("schedule", sum(map(operator.is_not, nodes, graph.nodes)), traffic, Traffic.of(graph))
        for (traffic, nodes), graph in zip(before, graphs, strict=True)
    ]


def eager_peak(graphs: Sequence[Graph]) -> int:
    """The peak of live bytes of FSDP2's eager order, for graphs with one bucket for each module; reorders them."""
    orders = [Order.of(graph) for graph in graphs]
    with real_tensors():
        _measure(orders, graphs)
        return max(order.eager_peak() for order in orders)


def _choose(orders: Sequence[Order], budget: int) -> None:
    for order in orders:
        order.launch_early(budget)
        order.wait_late(budget)


def _measure(orders: Sequence[Order], graphs: Sequence[Graph]) -> None:
    """Note live bytes with every collective waited for at once."""
    for order, graph in zip(orders, graphs, strict=True):
        order.write(graph)
    live = iter(MemoryProfile.of(graphs).live)
    for order, graph in zip(orders, graphs, strict=True):
        order.note_live_bytes(graph, live)


@dataclass(eq=False)
class Gather:
    """A gather that can be launched anywhere between two positions.

    Attributes:
        launch: what makes its inputs, and the start; in order.
        arrival: the waits, and what the transition and views make of the result; in order.
        earliest: the first position at which its inputs are there.
        need: the position that reads the result.
        bytes: of memory that is in use from the launch on.
        at: the position chosen.
    """

    launch: list[Node]
    arrival: list[Node]
    earliest: int
    need: int
    bytes: int
    at: int


@dataclass(eq=False)
class Reduction:
    """A reduction that can be waited for anywhere between two positions.

    Attributes:
        arrival: the waits, and what the transition makes of the result, perhaps the launch of an all-reduce; in order.
        earliest: the first position at which it may be waited for.
        need: the last such position.
        held: bytes that are in use until the wait.
        made: bytes that the arrival makes.
        follows: the reduction whose arrival launches it, if it is not launched on the spine.
        at: the position chosen.
    """

    arrival: list[Node]
    earliest: int
    need: int
    held: int
    made: int
    follows: Reduction | None
    at: int


@dataclass
class Order:
    """An order of a graph's nodes: a spine that keeps its order, and what stands before which position of it.

    Attributes:
        spine: compute, launches of reductions, everything but what is in the other two.
        gathers: in the order of their launches.
        reductions: in the order of their launches.
        live: for each position of the spine, the most bytes in use since the one before; an integer tensor.
        waiting: the same while reductions are waited for, which comes before the launches there.
    """

    spine: list[Node]
    gathers: list[Gather]
    reductions: list[Reduction]
    live: torch.Tensor = field(init=False)
    waiting: torch.Tensor = field(init=False)

    @classmethod
    def of(cls, graph: Graph) -> Order:
        """With every collective waited for at once: gathers right before their result is read."""
        starts = list(gathers(graph))
        launches, arrivals = [_launch(gather) for gather in starts], [_arrival(gather) for gather in starts]
        reduced = sorted([*reductions(graph), *all_reduces(graph)], key=lambda reduction: reduction.start)
        results = _results(reduced)
        moved = {node for nodes in (*launches, *arrivals, *results) for node in nodes}
        spine = [node for node in graph.nodes if node not in moved]
        places = {node: index for index, node in enumerate(spine)}
        return cls(spine, _gathers(launches, arrivals, places), _reductions(reduced, results, places))

    def write(self, graph: Graph) -> None:
        """Put the nodes of ``graph`` in this order."""
        before: dict[int, list[Node]] = {}
        for reduction in self.reductions:
            before.setdefault(reduction.at, []).extend(reduction.arrival)
        for gather in self.gathers:
            before.setdefault(gather.at, []).extend(gather.launch)
        for gather in self.gathers:
            before.setdefault(gather.need, []).extend(gather.arrival)
        _put_in_order(node for at, after in enumerate(self.spine) for node in (*before.get(at, ()), after))

    def note_live_bytes(self, graph: Graph, live: Iterator[int]) -> None:
        """Take the live bytes of the nodes of ``graph``, in its order, from ``live``."""
        most, waiting, spine = [0] * len(self.spine), [0] * len(self.spine), iter(self.spine)
        arriving = {node for reduction in self.reductions for node in reduction.arrival}
        at, expected = 0, next(spine)
        for node, size in zip(graph.nodes, live, strict=False):
            most[at] = max(most[at], size)
            if node in arriving:
                waiting[at] = max(waiting[at], size)
            if node is expected:
                if resized_to(node) is not None:  # what stands before it finds the memory as it was
                    most[at] = max(most[at - 1], most[at])
                at, expected = at + 1, next(spine, node)
        self.live = torch.tensor(most, dtype=torch.int64)
        self.waiting = torch.tensor(waiting, dtype=torch.int64)

    def eager_peak(self) -> int:
        """The peak with each gather launched one ahead, and each reduction waited for when the next is launched."""
        live = self.live.clone()
        for ahead, gather in pairwise(self.gathers):
            live[max(ahead.need, gather.earliest) : gather.need] += gather.bytes
        on_spine = [reduction for reduction in self.reductions if reduction.follows is None]
        for reduction, following in pairwise(on_spine):
            until = min(following.earliest, reduction.need)
            live[reduction.earliest : until + 1] += reduction.held
            live[until] += reduction.made
        return int(live.max())

    def launch_early(self, budget: int) -> None:
        """Move each launch as far ahead as the budget allows, but not ahead of the launch before it."""
        before = 0
        for gather in self.gathers:
            first = max(before, gather.earliest)
            if self.waiting[gather.need] + gather.bytes > budget:
                first = gather.need
            full = torch.nonzero(self.live[first : gather.need] + gather.bytes > budget)
            gather.at = before = first + int(full[-1]) + 1 if len(full) else min(first, gather.need)
            self._hold(gather.bytes, gather.at, gather.need)

    def _hold(self, bytes: int, first: int, need: int) -> None:
        """Note that a gather at ``first`` is launched before reductions are waited for up to ``need``."""
        if first < need:
            self.live[first:need] += bytes
            self.waiting[first : need + 1] += bytes
            self.live[need] = max(self.live[need], self.waiting[need])

    def wait_late(self, budget: int) -> None:
        """Move the wait of each reduction as far back as the budget allows; beyond it, wait for the oldest first."""
        flying = InFlight(self.live.tolist(), budget)
        launched: dict[int, list[Reduction]] = {}
        read: dict[int, list[Reduction]] = {}
        followers = {id(reduction.follows): reduction for reduction in self.reductions}
        for reduction in self.reductions:
            read.setdefault(reduction.need, []).append(reduction)
            if reduction.follows is None:
                launched.setdefault(reduction.earliest, []).append(reduction)
        for position in range(len(self.spine)):
            for reduction in launched.get(position, ()):
                flying.launch(reduction)
            due = [reduction for reduction in read.get(position, ()) if reduction in flying.reductions]
            while due or flying.too_much(position):
                reduction = due.pop(0) if due else next(iter(flying.reductions))
                flying.wait_for(reduction, position if reduction.need == position else position - 1)
                follower = followers.get(id(reduction))
                if follower is not None:
                    follower.earliest = follower.at = reduction.at
                    flying.launch(follower)
                    due += [follower] if follower.need == position else []


@dataclass
class InFlight:
    """The reductions that are launched and not waited for, in the order of their launches.

    Attributes:
        live: at each position, bytes in use without them.
    """

    live: list[int]
    budget: int
    reductions: dict[Reduction, None] = field(default_factory=dict)
    held: int = 0

    def launch(self, reduction: Reduction) -> None:
        self.reductions[reduction] = None
        self.held += reduction.held

    def too_much(self, position: int) -> bool:
        """Whether some have to be waited for before the node at ``position`` runs."""
        return bool(self.reductions) and self.live[position] + self.held > self.budget

    def wait_for(self, reduction: Reduction, position: int) -> None:
        """Wait at ``position``, or earlier if what is made of the result has no room there."""
        while position > reduction.earliest and self.live[position] + self.held + reduction.made > self.budget:
            position -= 1
        reduction.at = max(position, reduction.earliest)
        self.held -= reduction.held
        del self.reductions[reduction]


# -- what moves -------------------------------------------------------------------------------------------------------


def _launch(gather: Collective) -> list[Node]:
    """The start, and what is computed for it alone."""
    own = {gather.start: None}
    for node in sorted({node for source in gather.inputs for node in made_by(source, UNSHARD)}, reverse=True):
        if all(user in own for user in node.users):
            own[node] = None
    return sorted(own)


def _arrival(gather: Collective) -> list[Node]:
    """What waits, what the transition makes of it, and views, which cost nothing and may stand anywhere."""
    found = dict.fromkeys(node for wait in gather.waits for node in (*wait.all_input_nodes, wait))
    found.pop(gather.start, None)
    stack = list(found)
    while stack:
        for user in stack.pop().users:
            if user not in found and (_made_in(user, UNSHARD) or (is_alias(user) and len(user.all_input_nodes) == 1)):
                found[user] = None
                stack.append(user)
    return sorted(found)


def _results(reduced: Sequence[Collective]) -> list[list[Node]]:
    """For each what waits, and what the transition makes of it, up to the waits of the next collective.

    What is made of several belongs to the last of them.
    """
    owner: dict[Node, int] = {}
    for index, reduction in enumerate(reduced):
        stack = list(reduction.waits)
        while stack:
            node = stack.pop()
            if owner.get(node) != index:
                owner[node] = index
                stack.extend(user for user in node.users if user.target is not WAIT and _made_in(user, REDUCE))
    results: list[list[Node]] = [[] for _ in reduced]
    for node in sorted(owner):
        results[owner[node]].append(node)
    return results


def _made_in(node: Node, phase: str) -> bool:
    tag = tag_of(node)
    return tag is not None and tag.phase == phase


# -- where it can go --------------------------------------------------------------------------------------------------


def _gathers(launches: Iterable[list[Node]], arrivals: Iterable[list[Node]], places: dict[Node, int]) -> list[Gather]:
    found = []
    for launch, arrival in zip(launches, arrivals, strict=True):
        need = _first_reader(arrival, places)
        held = [*launch[:-1], *(node for node in arrival if node.target is WAIT)]
        taken = _bytes(node for node in held if not is_alias(node))
        found.append(Gather(launch, arrival, min(_after_inputs(launch, places), need), need, taken, need))
    return sorted(found, key=lambda gather: gather.need)


def _reductions(
    reduced: Sequence[Collective], results: Sequence[list[Node]], places: dict[Node, int]
) -> list[Reduction]:
    found: list[Reduction] = []
    launched = {node: index for index, nodes in enumerate(results) for node in nodes}
    for reduction, arrival in zip(reduced, results, strict=True):
        follows = found[launched[reduction.start]] if reduction.start in launched else None
        earliest = max(_after_inputs(arrival, places), follows.earliest if follows else 0)
        need = max(earliest, _first_reader(arrival, places))
        held, made = _bytes(reduction.inputs), _bytes(node for node in arrival if not is_alias(node))
        found.append(Reduction(arrival, earliest, need, held, made, follows, earliest))
        if follows is not None:
            follows.need = min(follows.need, _next_launch(reduced, places, follows.earliest))
    for index, nodes in enumerate(results):  # what is read together is waited for before the last is launched
        for reader in {launched[user] for node in nodes for user in node.users if user in launched} - {index}:
            found[index].need = min(found[index].need, found[reader].earliest)
    return found


def _next_launch(reduced: Sequence[Collective], places: dict[Node, int], at: int) -> int:
    """The first position from ``at`` on that launches a reduction; the end if none does."""
    launches = [places[reduction.start] for reduction in reduced if reduction.start in places]
    return min((place for place in launches if place >= at), default=len(places) - 1)


def _bytes(nodes: Iterable[Node]) -> int:
    return sum(data_bytes(node.meta["val"]) for node in nodes)


def _first_reader(nodes: list[Node], places: dict[Node, int]) -> int:
    """The first position of the spine that reads any of ``nodes``; the end if none does."""
    readers = [places[user] for node in nodes for user in node.users if user in places]
    return min(readers, default=len(places) - 1)


def _after_inputs(nodes: list[Node], places: dict[Node, int]) -> int:
    """The first position of the spine at which all is there that ``nodes`` are computed from."""
    return max((places[source] + 1 for node in nodes for source in node.all_input_nodes if source in places), default=0)


def _put_in_order(nodes: Iterable[Node]) -> None:
    for node, following in pairwise(nodes):
        if node.next is not following:
            node.append(following)
