"""What no plan for the same graphs can beat.

A plan may order nodes as dependences allow and merge tagged collectives; ``time_bound`` and ``memory_bound`` derive
what then remains. Take the bounds of the graphs as they are before ``bucket``, and compare every plan with these:
collectives that are merged already count as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from .graph_view import Tag, gathers, has_backward
from .memory_bound import memory_bound
from .time_bound import CheapestCosts, time_bound


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


def bounds(graphs: Sequence[Graph], costs: CheapestCosts, in_order: bool = False) -> Bounds:
    """The bounds of a forward and its backward, or of one graph.

    A graph starts when the one before it has ended, so their times add up.

    Args:
        graphs: in the order in which they run.
        costs: of their nodes.
        in_order: times are for plans that keep the order of compute; larger.

    Raises:
        ValueError: the backward does not belong to the forward.
    """
    forward = [graph for graph in graphs if not has_backward(graph)]
    backward = [graph for graph in graphs if has_backward(graph)]
    gathered = {param for graph in forward for gather in gathers(graph) for param in _parameters(gather.tag)}
    time_forward = sum(time_bound(graph, costs, (), in_order) for graph in forward)
    time_backward = sum(time_bound(graph, costs, (), in_order) for graph in backward)
    time_less = sum(time_bound(graph, costs, _again(graph, gathered), in_order) for graph in backward)
    return Bounds(time_forward, time_backward, time_forward + time_less, memory_bound(graphs))


def _parameters(tag: Tag) -> list[tuple[int, str]]:
    return [(tag.group, name) for name in tag.params]


def _again(graph: Graph, gathered: set[tuple[int, str]]) -> list[Node]:
    """The gathers of what is gathered already."""
    return [gather.start for gather in gathers(graph) if gathered.issuperset(_parameters(gather.tag))]
