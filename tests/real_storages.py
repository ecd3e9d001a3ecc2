"""Runs graphs with real tensors and counts the storages that are alive while each node runs.

The caller keeps what goes in and the results, a forward's saved tensors belong to the backward, and a collective holds
what it takes until the last of its waits. All else goes as references go.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from simulated_ranks import flat, random_inputs
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fsdp_compile.passes.graph_view import is_launch, waits_of


def real_live_bytes(*graphs: Graph) -> list[int]:
    """Bytes alive while each node runs, on random inputs.

    Args:
        graphs: one graph, or a forward and its backward. Their process groups must exist; what they bring is ignored.
    """
    live: list[int] = []
    callers: list[Any] = random_inputs(graphs[0], world=1)[0]
    outputs = _run(graphs[0], [*callers], callers, live)
    if len(graphs) > 1:
        (backward,) = graphs[1:]
        inputs = random_inputs(backward, world=1)[0]
        names = [str(node.target) for node in backward.find_nodes(op="placeholder")]
        count = sum("tangents" not in name for name in names)
        saved = outputs[len(outputs) - count :]
        callers += outputs[: len(outputs) - count]
        inputs = [each if "tangents" in name else saved.pop(0) for name, each in zip(names, inputs, strict=True)]
        del outputs, saved
        _run(backward, inputs, callers, live)
    return live


def _run(graph: Graph, inputs: list[Any], callers: list[Any], live: list[int]) -> list[Any]:
    """Run ``graph`` on ``inputs``, which it empties; append to ``live``."""
    values: dict[Node, Any] = {}
    in_flight: dict[Node | None, Any] = {}  # what collectives take, by the last of their waits
    dropped = _last_uses(graph)
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "placeholder":
            live.append(_bytes([values, inputs, callers]))
            values[node] = inputs.pop(0)
        elif node.op == "output":
            live.append(_bytes([values, callers]))
            return flat(map_arg(node.args[0], values.__getitem__))
        else:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            if is_launch(node):
                in_flight[max(waits_of(node), key=order.__getitem__)] = args
            live.append(_bytes([values, list(in_flight.values()), callers]))
            del args, kwargs
        in_flight.pop(node, None)
        for last in dropped[node]:
            del values[last]
    raise AssertionError("the graph has no output")


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """By node, what is not needed after it."""
    last = {}
    for node in graph.nodes:
        last |= dict.fromkeys([node, *node.all_input_nodes], node)
    dropped = defaultdict(list)
    for node, at in last.items():
        dropped[at].append(node)
    return dropped


def _bytes(alive: Any) -> int:
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in _tensors(alive)}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(alive: Any) -> list[torch.Tensor]:
    if isinstance(alive, dict):
        alive = list(alive.values())
    return [each for each in flat(alive) if isinstance(each, torch.Tensor)]
