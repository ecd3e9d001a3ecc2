"""Gathers freed parameters again in the backward.

In the joint graph of forward and backward a ``resize_(0)`` node says that the tensor holds no data from there on, yet
the backward still reads it. Every node between the sharded data and those reads (cast, gather, wait, slice, views) is
marked for recomputation, so the partitioner computes it a second time in the backward instead of saving its result:

        shard ─ cast ─ gather ─ wait ─ slice ─ t ─ mm            forward
          └──── cast ─ gather ─ wait ─ slice ─ t ─ mm_backward   backward

The ``resize_`` nodes go: within one graph the compiler frees a tensor after its last use by itself. A parameter that is
not freed is marked to be saved, also where activation checkpointing would gather it again.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from .context import PassContext, Report, Traffic
from .graph_view import UNSHARD, GatheredParam, alias_root, frees, gathers, has_backward, made_by, same_data_as
from .torch_compat import is_marked_regather, mark_regather, mark_save, unmark


def regather(graph: Graph, context: PassContext) -> Report:
    """Mark what the backward must gather again, and what it must not; remove the frees.

    May run again on the same graph, and should after passes of others: these may have put unmarked views in the place
    of marked ones.

    Args:
        graph: joint graph of forward and backward, or a graph without backward, which only loses its frees.
        context: shared by the passes.
    """
    before = Traffic.of(graph)
    freed = frees(graph)
    roots = dict.fromkeys(alias_root(free.args[0]) for free in freed)  # type: ignore[arg-type]
    for free in freed:
        graph.erase_node(free)
    if has_backward(graph):
        _mark(graph, roots)
    graph.lint()
    return Report("regather", len(freed), before, Traffic.of(graph))


def _mark(graph: Graph, freed: dict[Node, None]) -> None:
    for gather in gathers(graph):
        for param in gather.params:
            if param.wait in freed or is_marked_regather(param.wait):
                _gather_again(param)
            else:
                _keep(param)


def _gather_again(param: GatheredParam) -> None:
    """No view of the gathered data may be saved, and no copy: saving one keeps a whole parameter alive just the same.

    Copies are the casts that autocast makes, or a transposed weight made contiguous. What else was computed from the
    parameter, the partitioner weighs like any activation.
    """
    for node in (*made_by(param.wait, UNSHARD), *same_data_as(param.wait)):
        mark_regather(node)


def _keep(param: GatheredParam) -> None:
    for node in made_by(param.wait, UNSHARD):
        unmark(node)
    mark_save(param.unsharded)
