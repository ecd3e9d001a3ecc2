"""What is found where a graph breaks a rule that all passes keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node


@dataclass(frozen=True)
class Fault:
    """A node that breaks a rule: what is expected of it, and what is found, both for people."""

    node: Node
    expected: str
    found: str


class InvalidGraph(AssertionError):
    """A pass has broken a rule: a fault of the pass, and not of the model or of its user.

    Attributes:
        after: name of the pass.
        part: name of the graph ("forward"), empty if the node is in none of those that were given.
        node: that breaks the rule; it may have been removed from its graph.
    """

    def __init__(self, after: str, parts: Mapping[str, Graph], fault: Fault) -> None:
        self.after, self.node = after, fault.node
        self.part = next((name for name, graph in parts.items() if graph is fault.node.graph), "")
        where = f" in the {self.part} graph" if self.part else ""
        super().__init__(f"after {after}, {fault.node}{where}: expected {fault.expected}; found {fault.found}")
