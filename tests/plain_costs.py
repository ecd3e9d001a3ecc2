"""Costs for tests: compute takes what a function says, a launch a latency and its bytes' time."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from torch.fx import Node

from fsdp_compile.passes.costs import COMPUTE, CheapestCosts, KindsApart
from fsdp_compile.passes.graph_view import WAIT, is_launch, kind_of, process_group_of, whole_bytes
from fsdp_compile.passes.torch_compat import RESIZE, is_alias

FREE = (operator.getitem, WAIT, RESIZE)


@dataclass(frozen=True)
class PlainCosts:
    """Seconds of nodes.

    Attributes:
        compute: seconds of a node that is neither free nor a launch.
        latency: seconds of any launch.
        rates: bytes a second by kind of collective; the others' rate is 1.
        waste: how much longer than ``cheapest_seconds`` a launch takes, at least 1.
    """

    compute: Callable[[Node], float] = lambda node: 1.0
    latency: float = 0.0
    rates: tuple[tuple[str, float], ...] = ()
    waste: Callable[[Node], float] = lambda node: 1.0

    def seconds(self, node: Node) -> float:
        if is_launch(node):
            return self.waste(node) * self.cheapest_seconds(kind_of(node), process_group_of(node), whole_bytes(node))
        return self.compute(node) if self.lane(node) == COMPUTE else 0.0

    def lane(self, node: Node) -> str | None:
        if is_launch(node):
            return process_group_of(node)
        if node.op != "call_function" or node.target in FREE or is_alias(node):
            return None
        return COMPUTE

    def least_copy_seconds(self, node: Node) -> float:
        return self.compute(node)

    def cheapest_seconds(self, kind: str, group: str, bytes: int) -> float:
        return self.latency + bytes / dict(self.rates).get(kind, 1.0)


def drawn(seed: int, node: Node) -> float:
    """Between 0 and 1, the same for nodes of one name."""
    return zlib.crc32(f"{seed} {node.name}".encode()) / 2**32


def random_costs(seed: int, chance: Random) -> CheapestCosts:
    """Compute of up to 10 s a node, and communication that takes less, as much, or more."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    wasteful = chance.random() < 0.3
    costs = PlainCosts(
        lambda node: 10 * drawn(seed, node),
        latency=chance.choice([0, 0.1, 3]),
        rates=tuple((kind, chance.choice([10, 100, 1000])) for kind in kinds),
        waste=lambda node: 1 + wasteful * drawn(seed, node),
    )
    return KindsApart(costs) if chance.random() < 0.3 else costs
