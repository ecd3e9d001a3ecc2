"""Writes the transitions of a group, which AOTAutograd traced as one operator each, out into those of each parameter.

    shards ─ UNSHARD ─ getitem ─ uses          ->    shard ─ cast ─ gather ─ wait ─ uses             for each parameter
    gradients ─ REDUCE ─ getitem ─ output      ->    gradient ─ cast ─ reduce ─ wait ─ cast ─ output
    unsharded ─ FREE                           ->    unsharded ─ resize_

The nodes of the first two are those that tracing ``transitions`` of a parameter gives. That is done once for each kind
of parameter and not for each parameter: the layers of a model are alike, and tracing an operator costs a hundred times
what copying its node does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from . import passes, torch_compat, transitions
from .group_ops import FREE, REDUCE, UNSHARD
from .recipes import Recipe, read_recipes

Decompositions = Mapping[Any, Callable[..., Any]]

# What the meta of a group operator's node says of this operator alone; Inductor takes it for that of the node's own.
OF_OPERATOR = ("val", "tensor_meta", "eager_input_vals", "original_aten", "from_node")


def lower(graph: Graph, decompositions: Decompositions) -> None:
    """Write out all group operators of ``graph``.

    Args:
        graph: joint graph of forward and backward, or one without backward.
        decompositions: for operators that the compiler wants replaced; it has done so in the rest of the graph.
    """
    templates: dict[Hashable, GraphModule] = {}
    found = [node for node in graph.nodes if node.target in (UNSHARD, REDUCE)]
    for node in found:
        inputs = zip(*node.args[:-3], strict=True)  # type: ignore[arg-type]
        steps = [Step(node, position, list(each)) for position, each in enumerate(inputs)]
        results = [_paste(graph, _template(templates, step, decompositions), step) for step in steps]
        for item in list(node.users):
            _take_place(results[item.args[1]], item)  # type: ignore[index]
        graph.erase_node(node)
    freed = [node for node in graph.nodes if node.target is FREE]
    for node in freed:
        _write_frees(node)
    if found or freed:
        graph.lint()


def _write_frees(node: Node) -> None:
    made, tags = node.args
    with node.graph.inserting_before(node):
        for tensor, tag in zip(made, tags, strict=True):  # type: ignore[arg-type]
            resize = node.graph.call_function(passes.RESIZE, (tensor, 0))
            resize.meta.update(_meta(node, tag, passes.RESHARD))  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _meta(node: Node, tag: str, phase: str) -> dict[str, Any]:
    """What a node carries that is written for a parameter with this ``tag``, in place of the operator ``node``."""
    kept = {name: value for name, value in node.meta.items() if name not in OF_OPERATOR}
    return kept | {"custom": {**node.meta.get("custom", {}), "fsdp": {**json.loads(tag), "phase": phase}}}


def _take_place(result: Node, item: Node) -> None:
    assert _like(result.meta["val"]) == _like(item.meta["val"]), f"{item} was traced as something else"
    if not passes.is_alias(result):  # so that views, which are there already, share memory with what they view
        result.meta["val"] = item.meta["val"]
    item.replace_all_uses_with(result)
    item.graph.erase_node(item)


class Step:
    """One parameter's part of a group operator.

    Attributes:
        run: what is traced of it.
        recipe: what ``run`` takes first.
        inputs: nodes that it takes after that; ``None`` where there is none.
        meta: what its nodes carry.
    """

    def __init__(self, node: Node, position: int, inputs: list[Node | None]) -> None:
        recipes, tags, which = node.args[-3:]
        self.recipe = read_recipes(recipes)[which[position]]  # type: ignore[arg-type, index]
        self.inputs, self._operator = inputs, node
        gathers = node.target is UNSHARD
        self.run: Callable[..., torch.Tensor] = transitions.all_gather if gathers else transitions.reduce
        phase = passes.UNSHARD if gathers else passes.REDUCE
        self.meta = _meta(node, tags[which[position]], phase)  # type: ignore[arg-type, index]

    @property
    def before(self) -> Node:
        """Where its nodes go: a gather where the operator is; a reduction as soon as its gradient is there."""
        if self._operator.target is UNSHARD:
            return self._operator
        after = max(node for node in self.inputs if node is not None).next
        while after.op == "placeholder":
            after = after.next
        return after


def _template(known: dict[Hashable, GraphModule], step: Step, decompositions: Decompositions) -> GraphModule:
    """The graph of ``step``, shared by all that are alike."""
    values = [None if node is None else node.meta["val"] for node in step.inputs]
    key = (step.run, _without_positions(step.recipe), tuple(value is not None and _like(value) for value in values))
    if key not in known:
        known[key] = torch_compat.trace(lambda *tensors: step.run(step.recipe, *tensors), values, decompositions)
    return known[key]


def _without_positions(recipe: Recipe) -> Recipe:
    return replace(recipe, data=0, target=None, unsharded_place=None, partial_place=None, slice_index=None)


def _like(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.size()), tuple(value.stride()), value.dtype, value.device


def _paste(graph: Graph, template: GraphModule, step: Step) -> Node:
    """Copy the nodes of ``template`` into ``graph``; what they result in."""
    given = iter(step.inputs)
    copies: dict[Node, Node | None] = {}
    with graph.inserting_before(step.before):
        for node in template.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(given)
            elif node.op == "call_function":
                copy = passes.copy_node(graph, node, copies)
                copy.meta.update(step.meta, custom=dict(step.meta["custom"]))
                copies[node] = copy
            else:
                (result,) = node.args
    copied = copies[result]
    assert copied is not None
    return copied
