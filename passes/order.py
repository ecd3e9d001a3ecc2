"""An order of a graph's nodes in which collectives can be moved.

    position    ...   7                                                8   ...
    spine             mm                                               mm
    before it         waits of reductions, launches, waits of gathers  ...

Compute and launches of reductions are the *spine*: they keep their order. A gather is launched before some position
between the one at which its inputs are there and the one that reads its result, where its wait stands. A reduction is
waited for before some position after its launch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Graph, Node

from .graph_view import (
    REDUCE,
    UNSHARD,
    WAIT,
    Collective,
    all_reduces,
    data_bytes,
    gathers,
    made_by,
    phase_of,
    reductions,
)
from .torch_compat import is_alias


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
    """

    spine: list[Node]
    gathers: list[Gather]
    reductions: list[Reduction]

    @classmethod
    def of(cls, graph: Graph) -> Order:
        """With every collective waited for at once: gathers right before their result is read."""
        starts = list(gathers(graph))
        launches, arrivals = [_launch(gather) for gather in starts], [_arrival(gather) for gather in starts]
        reduced = sorted([*reductions(graph), *all_reduces(graph)], key=lambda reduction: reduction.start)
        results = _results(reduced)
        moved = {node for nodes in (*launches, *arrivals, *results) for node in nodes}
        spine = [node for node in graph.nodes if node not in moved]
        places = _Places.on(spine, reduced)
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
        nodes = [node for at, after in enumerate(self.spine) for node in (*before.get(at, ()), after)]
        # What is made of two gathers arrives with both, and stands where the later does.
        _put_in_order(reversed(dict.fromkeys(reversed(nodes))))

    def wait_at_once(self) -> None:
        """Launch each gather where its result is read, and wait for each reduction when it is launched."""
        for gather in self.gathers:
            gather.at = gather.need
        for reduction in self.reductions:
            reduction.at = reduction.earliest

    def like_eager(self) -> None:
        """As FSDP2 runs eagerly: each gather one ahead, each reduction waited for when the next is launched.

        The first gather is launched at once: that of the root module, or the one that its hooks launch ahead.
        """
        self.wait_at_once()
        for gather, floor in zip(self.gathers, self.one_ahead(), strict=True):
            gather.at = min(max(gather.earliest, floor), gather.need)
        on_spine = [reduction for reduction in self.reductions if reduction.follows is None]
        for reduction, following in pairwise(on_spine):
            reduction.at = min(following.earliest, reduction.need)
        for reduction in self.reductions:
            if reduction.follows is not None:
                reduction.at = reduction.follows.at

    def one_ahead(self) -> list[int]:
        """For each gather the position that reads what the one before it brings; the first position for the first."""
        return [0, *(gather.need for gather in self.gathers)][: len(self.gathers)]


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
            if user not in found and (phase_of(user) == UNSHARD or (is_alias(user) and len(user.all_input_nodes) == 1)):
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
                stack.extend(user for user in node.users if user.target is not WAIT and phase_of(user) == REDUCE)
    results: list[list[Node]] = [[] for _ in reduced]
    for node in sorted(owner):
        results[owner[node]].append(node)
    return results


# -- where it can go --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """Positions on the spine.

    Attributes:
        of: of each node.
        inputs: the first behind the graph's inputs.
        launches: those that launch reductions, in order.
    """

    of: dict[Node, int]
    inputs: int
    launches: list[int]

    @classmethod
    def on(cls, spine: Sequence[Node], reduced: Sequence[Collective]) -> _Places:
        of = {node: index for index, node in enumerate(spine)}
        inputs = sum(node.op == "placeholder" for node in spine)
        return cls(of, inputs, sorted(of[reduction.start] for reduction in reduced if reduction.start in of))

    @property
    def end(self) -> int:
        return len(self.of) - 1

    def first_reader(self, nodes: list[Node]) -> int:
        """The first position that reads any of ``nodes``; the end if none does."""
        readers = [self.of[user] for node in nodes for user in node.users if user in self.of]
        return min(readers, default=self.end)

    def after_inputs(self, nodes: list[Node]) -> int:
        """The first position at which all is there that ``nodes`` are computed from."""
        sources = [self.of[source] + 1 for node in nodes for source in node.all_input_nodes if source in self.of]
        return max([self.inputs, *sources])

    def next_launch(self, at: int) -> int:
        """The first position from ``at`` on that launches a reduction; the end if none does."""
        index = bisect_left(self.launches, at)
        return self.launches[index] if index < len(self.launches) else self.end


def _gathers(launches: Iterable[list[Node]], arrivals: Iterable[list[Node]], places: _Places) -> list[Gather]:
    found = []
    for launch, arrival in zip(launches, arrivals, strict=True):
        need = places.first_reader(arrival)
        held = [*launch[:-1], *(node for node in arrival if node.target is WAIT)]
        taken = _bytes(node for node in held if not is_alias(node))
        found.append(Gather(launch, arrival, min(places.after_inputs(launch), need), need, taken, need))
    return sorted(found, key=lambda gather: gather.need)


def _reductions(reduced: Sequence[Collective], results: Sequence[list[Node]], places: _Places) -> list[Reduction]:
    found: list[Reduction] = []
    launched = {node: index for index, nodes in enumerate(results) for node in nodes}
    for reduction, arrival in zip(reduced, results, strict=True):
        follows = found[launched[reduction.start]] if reduction.start in launched else None
        earliest = max(places.after_inputs(arrival), follows.earliest if follows else 0)
        need = max(earliest, places.first_reader(arrival))
        held, made = _bytes(reduction.inputs), _bytes(node for node in arrival if not is_alias(node))
        found.append(Reduction(arrival, earliest, need, held, made, follows, earliest))
        if follows is not None:
            follows.need = min(follows.need, need, places.next_launch(follows.earliest))
    for index, nodes in enumerate(results):  # what is read together is waited for before the last is launched
        readers = {launched[user]: None for node in nodes for user in node.users if launched.get(user, index) != index}
        later = [found[reader].earliest for reader in readers if found[reader].follows is not found[index]]
        found[index].need = min([found[index].need, *later])
    return found


def _bytes(nodes: Iterable[Node]) -> int:
    return sum(data_bytes(node.meta["val"]) for node in nodes)


def _put_in_order(nodes: Iterable[Node]) -> None:
    for node, following in pairwise(nodes):
        if node.next is not following:
            node.append(following)
