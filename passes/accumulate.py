"""Adds up the gradients of a parameter whose module runs more than once, and reduces them once.

A module that runs k times gathers its parameters k times, and each gather brings its own reduction:

        g ─ cast ─ reduce ─ wait ─┐                  g ─┐
                                  + ─ output   ->       + ─ cast ─ reduce ─ wait ─ output
        h ─ cast ─ reduce ─ wait ─┘                  h ─┘

A reduction is linear, so this saves k - 1 of them; and the eager executor adds first, so bits are equal only like this.
The price, there as here, is a whole gradient that lives from the last run's backward to the first run's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .context import PassContext, Report, Traffic
from .graph_view import REDUCE, Collective, Tag, made_by, reductions, tag_of
from .torch_compat import emit

ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class Path:
    """One gradient's way through a reduction: each step takes the one before, and nothing else does.

    Attributes:
        tag: names one parameter.
        gradient: what the first step takes.
        steps: cast, pad, launch, wait, cast and whatever else the transition did, in order.
        start: the step that launches.
    """

    tag: Tag
    gradient: Node
    steps: list[Node]
    start: Node

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
    paths = {path.end: path for path in map(_path, reductions(graph)) if path is not None}
    made = 0
    for node in list(graph.nodes):
        pair = _paths_added_by(node, paths)
        if pair is not None:
            joined = _add_first(graph, *pair, node)
            paths = {end: path for end, path in paths.items() if path not in pair} | {joined.end: joined}
            made += 1
    if made:
        graph.lint()
    return Report("accumulate", made, before, Traffic.of(graph))


def _path(reduction: Collective) -> Path | None:
    """``None`` for a bucket, and where a step has other inputs or other users than the steps beside it."""
    if len(reduction.tag.params) != 1 or len(reduction.waits) != 1:
        return None
    steps = [*made_by(reduction.start, REDUCE), reduction.waits[0]]
    while (after := _next_step(steps[-1])) is not None:
        steps.append(after)
    if any(len(step.all_input_nodes) != 1 for step in steps) or any(len(step.users) != 1 for step in steps):
        return None
    if any(step.all_input_nodes != [before] for before, step in zip(steps, steps[1:], strict=False)):
        return None
    return Path(reduction.tag, steps[0].all_input_nodes[0], steps, reduction.start)


def _next_step(step: Node) -> Node | None:
    users = list(step.users)
    tag = tag_of(users[0]) if len(users) == 1 else None
    return users[0] if tag is not None and tag == tag_of(step) else None


def _paths_added_by(node: Node, paths: dict[Node, Path]) -> tuple[Path, Path] | None:
    if node.target is not ADD or node.kwargs:
        return None
    left, right = (paths.get(source) if isinstance(source, Node) else None for source in node.args)
    if left is None or right is None or left is right or not left.does_the_same_as(right):
        return None
    return left, right


def _add_first(graph: Graph, left: Path, right: Path, add: Node) -> Path:
    """Give the sum to the path that launches later, in place of ``add``; the other one goes."""
    earlier, later = sorted((left, right), key=lambda path: path.start)
    before_launch = later.steps[: later.steps.index(later.start)]
    for step in before_launch:
        later.start.prepend(step)
    with graph.inserting_before(later.steps[0]):
        total = emit(graph, ADD, left.gradient, right.gradient)
    later.steps[0].replace_input_with(later.gradient, total)
    add.replace_all_uses_with(later.end)
    for node in (add, *reversed(earlier.steps)):
        graph.erase_node(node)
    return Path(later.tag, total, later.steps, later.start)
