"""What no plan for the same graphs can beat.

A plan may order nodes as dependences allow and merge tagged collectives; ``time_bound`` and ``memory_bound`` derive
what then remains. Take the bounds of the graphs as they are before ``bucket``, and compare every plan with these:
collectives that are merged already count as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch.fx import Graph, Node

from .costs import CheapestCosts
from .graph_view import UNSHARD, gathers, has_backward, made_by
from .memory_bound import memory_bound
from .time_bound import time_bound


@dataclass(frozen=True)
class Bounds:
    """Least times in seconds, and the least peak in bytes; a graph that is not there takes no time.

    Attributes:
        time_step: forward and backward, one after the other.
        time_any_reshard: the same where the backward gathers nothing that the forward has gathered, so it also holds
            for plans that keep more parameters unsharded in between; those need more memory.
        memory: for plans that save the same tensors.
    """

    time_forward: float
    time_backward: float
    time_any_reshard: float
    memory: int

    @property
    def time_step(self) -> float:
        return self.time_forward + self.time_backward


def bounds(
    graphs: Sequence[Graph],
    costs: CheapestCosts,
    in_order: bool = False,
) -> Bounds:
    """The bounds of a forward and its backward, or of one graph.

    A graph starts when the one before it has ended, so their times add up.

    Args:
        graphs: in the order in which they run.
        costs: of their nodes.
        in_order: times are for plans that keep the order of compute; larger.

    Raises:
        ValueError: the backward does not belong to the forward.
    """
    least = partial(time_bound, costs=costs, in_order=in_order)
    forward = [graph for graph in graphs if not has_backward(graph)]
    backward = [graph for graph in graphs if has_backward(graph)]
    gathered = {param for graph in forward for gather in gathers(graph) for param in gather.tag.parameters}
    time_forward, time_backward = sum(map(least, forward)), sum(map(least, backward))
    time_less = sum(least(graph, without=_again(graph, gathered)) for graph in backward)
    return Bounds(time_forward, time_backward, time_forward + time_less, memory_bound(graphs))


def _again(graph: Graph, gathered: set[tuple[int, str]]) -> set[Node]:
    """The gathers of what is gathered already, and what is made for them."""
    again = [gather for gather in gathers(graph) if gathered.issuperset(gather.tag.parameters)]
    made = {node for gather in again for source in gather.inputs for node in made_by(source, UNSHARD)}
    return made.union(gather.start for gather in again)
