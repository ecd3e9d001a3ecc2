"""What simulation and bounds ask of a cost model; ``cost_model`` is one, and a test may have its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch.fx import Node

from .graph_view import kind_of

COMPUTE = "compute"  # the lane of kernels


class Costs(Protocol):
    """What a node costs, and where it runs."""

    def seconds(self, node: Node) -> float:
        """Seconds that the node keeps its stream busy; 0 for views and other nodes that launch nothing."""
        ...

    def lane(self, node: Node) -> str | None:
        """``COMPUTE``; for the launch of a collective, its communication stream; ``None`` for a node that is free."""
        ...


class CheapestCosts(Costs, Protocol):
    """Costs that also know the best case."""

    def least_copy_seconds(self, node: Node) -> float:
        """Seconds that a copy takes at least, whatever it is fused with: to read the data and to write it."""
        ...

    def cheapest_seconds(self, kind: str, group: str, bytes: int) -> float:
        """Seconds to move ``bytes`` in the cheapest way, in one launch; concave in ``bytes``, never above ``seconds``.

        Args:
            kind: "all_gather", "reduce_scatter" or "all_reduce".
            group: name of the process group.
            bytes: of the larger side, as ``graph_view.whole_bytes``: what a gather brings, what a reduction takes.
        """
        ...


@dataclass(frozen=True)
class KindsApart:
    """``costs``, but each kind of collective has a lane of its own on each process group.

    For transports that run gathers and reductions side by side, on communicators of their own. That both then share one
    wire is not modelled.
    """

    costs: CheapestCosts

    def seconds(self, node: Node) -> float:
        return self.costs.seconds(node)

    def lane(self, node: Node) -> str | None:
        lane = self.costs.lane(node)
        return lane if lane is None or lane == COMPUTE else f"{lane} {kind_of(node)}"

    def least_copy_seconds(self, node: Node) -> float:
        return self.costs.least_copy_seconds(node)

    def cheapest_seconds(self, kind: str, group: str, bytes: int) -> float:
        return self.costs.cheapest_seconds(kind, group, bytes)
