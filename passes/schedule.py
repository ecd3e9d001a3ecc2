"""Launches gathers early and waits for reductions late, as far as memory allows.

    before:  gather a ─ wait a ─ mm ─ gather b ─ wait b ─ mm ─ reduce b ─ wait b ─ mm ─ reduce a ─ wait a
    after:   gather a ─ gather b ─ wait a ─ mm ─ wait b ─ mm ─ reduce b ─ mm ─ reduce a ─ wait b ─ wait a

Compute keeps its order. A gather's wait stands right before the first node that reads what it brings, and gathers are
launched in the order of these waits. A reduction is launched where its gradients are ready. What is left to choose,
within the budget of memory; the last two steps for one graph after the other, as what the first takes the next lacks:

1. The order in which FSDP2 runs eagerly: each gather is launched when the one before it is waited for, each reduction
   waited for when the next is launched. If that takes too much memory, each reduction is waited for at once, and a
   gather is launched ahead where there is room.
2. Each reduction is waited for as late as there is room: before the first node that reads the result, at the end
   otherwise; where an all-reduce follows, before the next reduction is launched.
3. Each gather is launched as early as there is room, but not ahead of a reduction that is waited for sooner than it;
   without a budget in the configuration, not ahead of any collective that the eager order launches before it.

No step makes any graph slower, whatever it costs, as a process group takes collectives in the order of their launches:
an earlier launch or a later wait delays nothing by itself; a gather that overtakes a reduction delays it, but when that
is waited for, both had to be done anyway.

The budget is a peak of live bytes; by default that of the eager order in the same graphs, which is often reached at one
place only; everywhere else there is room to launch earlier. Where the graphs need more than the budget without any
overlap, nothing is launched early.

The room depends on the sizes of activations, and ranks may have traced different ones (sequences of other lengths).
So by default it decides where between two other collectives one is launched, never which comes first: the order is the
same on all ranks. A budget in the configuration, the user's or one that ``plan`` sets there for buckets that go by the
cost model anyway, is for ranks that trace equal sizes.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Graph

from .context import PassContext, Report, Traffic
from .graph_view import is_launch, resized_to
from .memory import live_bytes
from .order import Order, Reduction
from .torch_compat import real_tensors


def schedule(graphs: Sequence[Graph], context: PassContext, default_budget: int | None = None) -> list[Report]:
    """Order the collectives of a forward and its backward, or of one graph.

    Args:
        graphs: in the order in which they run, after ``bucket``.
        context: shared by the passes; its configuration may set the budget.
        default_budget: where it does not, at least so much; the peak of the eager order of the graphs' own buckets if
            that is more.

    Returns:
        A report for each graph; a change is a node that stands elsewhere than before.
    """
    before = [(Traffic.of(graph), list(graph.nodes)) for graph in graphs]
    orders = [Order.of(graph) for graph in graphs]
    with real_tensors():
        _choose(orders, graphs, context.config.memory_budget, default_budget)
    for order, graph in zip(orders, graphs, strict=True):
        order.write(graph)
        graph.lint()
    return [
        Report("schedule", sum(map(operator.is_not, nodes, graph.nodes)), traffic, Traffic.of(graph))
        for (traffic, nodes), graph in zip(before, graphs, strict=True)
    ]


def eager_order(graphs: Sequence[Graph]) -> None:
    """Put graphs in the order in which FSDP2 runs eagerly, for comparison; arguments as of ``schedule``."""
    for graph in graphs:
        order = Order.of(graph)
        order.like_eager()
        order.write(graph)


def eager_peak(graphs: Sequence[Graph]) -> int:
    """The peak of live bytes of FSDP2's eager order, for graphs with one bucket for each module; reorders them."""
    eager_order(graphs)
    return max(live_bytes(graphs))


def _choose(orders: Sequence[Order], graphs: Sequence[Graph], wanted: int | None, default: int | None) -> None:
    for order in orders:
        order.like_eager()
    live = _live_bytes(orders, graphs)
    budget = max(default or 0, *live) if wanted is None else wanted
    if max(live) > budget:
        for order in orders:
            order.wait_at_once()
        live = _live_bytes(orders, graphs)
    for room in _rooms(orders, graphs, live, budget):
        room.launch_early(room.order.one_ahead())
        room.wait_late()
        room.launch_early(_behind_launches(room.order) if wanted is None else _behind_reductions(room.order))


def _behind_launches(order: Order) -> list[int]:
    """For each gather the first position from which on no other collective is launched before it."""
    on_spine = [position + 1 for position, node in enumerate(order.spine) if is_launch(node)]
    floors = sorted([0, *on_spine, *(each.follows.at for each in order.reductions if each.follows is not None)])
    return [floors[bisect_right(floors, gather.at) - 1] for gather in order.gathers]


def _behind_reductions(order: Order) -> list[int]:
    """For each gather the first position that is behind the launch of each reduction that is waited for sooner."""
    reductions = sorted(order.reductions, key=lambda reduction: reduction.at)
    waited = [reduction.at for reduction in reductions]
    floors = [0, *accumulate((reduction.earliest for reduction in reductions), max)]
    return [floors[bisect_right(waited, gather.need)] for gather in order.gathers]


# -- memory -----------------------------------------------------------------------------------------------------------


def _live_bytes(orders: Sequence[Order], graphs: Sequence[Graph]) -> list[int]:
    """While each node of the graphs runs, in these orders, in which it puts them."""
    for order, graph in zip(orders, graphs, strict=True):
        order.write(graph)
    return live_bytes(graphs)


def _rooms(orders: Sequence[Order], graphs: Sequence[Graph], live: Sequence[int], budget: int) -> list[Room]:
    """What the orders leave of the budget."""
    sizes = iter(live)
    return [Room.of(order, graph, sizes, budget) for order, graph in zip(orders, graphs, strict=True)]


@dataclass
class Room:
    """Memory while a graph runs in an order, and what may still be moved in it.

    Attributes:
        live: for each position of the spine, the most bytes in use by it and what stands before it, but for the waits
            of reductions; an integer tensor.
        waiting: the same while reductions are waited for, which comes before all else there.
    """

    order: Order
    budget: int
    live: torch.Tensor
    waiting: torch.Tensor

    @classmethod
    def of(cls, order: Order, graph: Graph, live: Iterator[int], budget: int) -> Room:
        """Take the live bytes of the nodes of ``graph``, which is in that order, from ``live``."""
        most, waiting, spine = [0] * len(order.spine), [0] * len(order.spine), iter(order.spine)
        arriving = {node for reduction in order.reductions for node in reduction.arrival}
        at, expected = 0, next(spine)
        for node, size in zip(graph.nodes, live, strict=False):
            found = waiting if node in arriving else most
            found[at] = max(found[at], size)
            if node is expected:
                if resized_to(node) is not None:  # what stands before it finds the memory as it was
                    most[at] = max(most[at - 1], most[at])
                at, expected = at + 1, next(spine, node)
        return cls(order, budget, torch.tensor(most, dtype=torch.int64), torch.tensor(waiting, dtype=torch.int64))

    def launch_early(self, floors: Sequence[int]) -> None:
        """Move each launch ahead as far as there is room, but not ahead of its floor or of the launch before it."""
        before = 0
        for gather, floor in zip(self.order.gathers, floors, strict=True):
            first = max(before, gather.earliest, floor)
            if first < gather.at:
                used = torch.maximum(self.live[first : gather.at], self.waiting[first + 1 : gather.at + 1])
                full = torch.nonzero(used + gather.bytes > self.budget)
                first += int(full[-1]) + 1 if len(full) else 0
                self.live[first : gather.at] += gather.bytes
                self.waiting[first + 1 : gather.at + 1] += gather.bytes
                gather.at = first
            before = gather.at

    def wait_late(self) -> None:
        """Move each wait back as far as there is room, but not behind the wait for the reduction launched next.

        The last first, so that those who hold memory longest are waited for soonest.
        """
        after = len(self.live)
        launching = {reduction.follows for reduction in self.order.reductions}  # another, which stays where it is
        for reduction in reversed(self.order.reductions):
            last = min(after, reduction.need)
            if last > reduction.at and reduction not in launching:
                self._wait_by(reduction, last)
            after = reduction.at

    def _wait_by(self, reduction: Reduction, last: int) -> None:
        first, held = reduction.at, reduction.held
        used = torch.maximum(self.live[first:last], self.waiting[first + 1 : last + 1])
        full = torch.nonzero(used + held > self.budget)
        last = first + int(full[0]) if len(full) else last
        arrives = torch.nonzero(self.live[first + 1 : last + 1] + held + reduction.made <= self.budget)
        if len(arrives):
            reduction.at = at = first + 1 + int(arrives[-1])
            self.live[first:at] += held
            self.waiting[first + 1 : at + 1] += held
            self.waiting[at] = max(self.waiting[at], self.live[at] + held + reduction.made)
