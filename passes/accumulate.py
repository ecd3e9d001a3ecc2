"""Adds up the gradients of a parameter whose module runs more than once, and reduces them once.

A module that runs k times gathers its parameters k times, and each gather brings its own reduction:

        g ─ cast ─ reduce ─ wait ─┐                  g ─┐
                                  + ─ output   ->       + ─ cast ─ reduce ─ wait ─ output
        h ─ cast ─ reduce ─ wait ─┘                  h ─┘

A reduction is linear, so this saves k - 1 of them; and the eager executor adds first, so bits are equal only like this,
also where a gradient is not reduced but only cast and set aside. The price, there as here, is a whole gradient that
lives from the last run's backward to the first run's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .context import PassContext, Report, Traffic
from .graph_view import REDUCE, Tag, tag_of
from .torch_compat import emit

ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class Path:
    """One gradient's way through a reduction: each step takes the one before, and nothing else does.

    Attributes:
        tag: names one parameter.
        gradient: what the first step takes.
        steps: cast, pad, launch, wait, cast and whatever else the transition did, in order.
    """

    tag: Tag
    gradient: Node
    steps: list[Node]

    @property
    def end(self) -> Node:
        return self.steps[-1]

    def does_the_same_as(self, other: Path) -> bool:
        """Whether both do the same to the gradients of one parameter."""
        mine, theirs = ([(step.target, step.args[1:], step.kwargs) for step in path.steps] for path in (self, other))
        return self.tag == other.tag and mine == theirs


def accumulate(graph: Graph, context: PassContext) -> Report:
    """Reduce the sum of a parameter's gradients instead of adding its reduced gradients.

    Args:
        graph: backward graph, before ``bucket``.
        context: shared by the passes.
    """
    before = Traffic.of(graph)
    made = 0
    for node in list(graph.nodes):
        if node.target is ADD and not node.kwargs and tag_of(node) is None:
            left, right = (_path_to(source) for source in node.args)
            if left is not None and right is not None and left.end is not right.end and left.does_the_same_as(right):
                _add_first(graph, left, right, node)
                made += 1
    if made:
        graph.lint()
    return Report("accumulate", made, before, Traffic.of(graph))


def _path_to(end: object) -> Path | None:
    """``None`` if no reduction of one parameter ends here, or where a step's result goes elsewhere too."""
    tag = tag_of(end) if isinstance(end, Node) else None
    if tag is None or tag.phase != REDUCE or len(tag.params) != 1:
        return None
    steps: list[Node] = []
    at = end
    while isinstance(at, Node) and tag_of(at) == tag:
        others = at.all_input_nodes[1:]
        if len(at.users) != 1 or any(other.op != "placeholder" for other in others):
            return None
        steps.insert(0, at)
        at = at.args[0]
    return Path(tag, at, steps) if isinstance(at, Node) else None


def _add_first(graph: Graph, left: Path, right: Path, add: Node) -> None:
    """Give the sum to the path that begins later, in place of ``add``; the other one goes."""
    earlier, later = sorted((left, right), key=lambda path: path.steps[0])
    with graph.inserting_before(later.steps[0]):
        total = emit(graph, ADD, left.gradient, right.gradient)
    later.steps[0].replace_input_with(later.gradient, total)
    add.replace_all_uses_with(later.end)
    for node in (add, *reversed(earlier.steps)):
        graph.erase_node(node)
