"""Gathers freed parameters again in the backward.

In the joint graph of forward and backward a ``resize_(0)`` node says that the tensor holds no data from there on, yet
the backward still reads it. Every node between the sharded data and those reads (cast, gather, wait, slice, views) is
marked for recomputation, so the partitioner computes it a second time in the backward instead of saving its result:

        shard ─ cast ─ gather ─ wait ─ slice ─ t ─ mm            forward
          └──── cast ─ gather ─ wait ─ slice ─ t ─ mm_backward   backward

The ``resize_`` nodes go: within one graph the compiler frees a tensor after its last use by itself. A parameter that is
not freed is marked to be saved, also where activation checkpointing would gather it again; by the user's choice these
are some more than ``fully_shard`` was told to keep, see ``keep_unsharded``. So is one of which fewer
ranks keep a slice; once the graph is partitioned, ``keep_slices`` has the slice saved in its place.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, Node

from .context import PassContext, Report, Traffic
from .graph_view import (
    UNSHARD,
    GatheredParam,
    KeptSlice,
    alias_root,
    frees,
    gathers,
    has_backward,
    kept_slices,
    made_by,
    same_data_as,
    set_tag,
    tag_of,
)
from .keep_unsharded import frees_to_drop
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
    slices = list(kept_slices(graph))
    roots = dict.fromkeys(_root(free) for free in freed)
    if context.config.regather == "auto" and has_backward(graph):
        sliced = {kept.source for kept in slices}
        whole = [free for free in freed if _root(free) not in sliced]
        dropped = frees_to_drop(graph, context.config, whole)
        roots = dict.fromkeys(_root(free) for free in freed if free not in dropped)
    for kept in slices:
        _note_slice(kept)
    for node in (*freed, *(node for kept in slices for node in reversed(kept.nodes))):
        graph.erase_node(node)
    if has_backward(graph):
        _mark(graph, roots)
    graph.lint()
    return Report("regather", len(freed), before, Traffic.of(graph))


def _root(free: Node) -> Node:
    return alias_root(free.args[0])  # type: ignore[arg-type]


def _note_slice(kept: KeptSlice) -> None:
    """Tag the whole data with what is to be kept of it."""
    tag = tag_of(kept.source)
    assert tag is not None
    set_tag(kept.source, replace(tag, slice=(*kept.tag.slice, str(kept.index.target))))


def _mark(graph: Graph, freed: dict[Node, None]) -> None:
    recomputed: dict[Node, None] = {}
    to_slice: list[tuple[GatheredParam, Node]] = []
    for root in freed:  # first, as a parameter may be freed that was only cast and not gathered
        recomputed |= dict.fromkeys(made_by(root, UNSHARD))
    for gather in gathers(graph):
        for param in gather.params:
            sliced = next((node for node in param.made if _is_sliced(node)), None)
            if sliced is not None:
                to_slice.append((param, sliced))
            elif any(node in freed or is_marked_regather(node) for node in param.made):
                recomputed |= dict.fromkeys((*made_by(param.wait, UNSHARD), *param.made))
            else:
                _keep(param)
    _gather_again(list(recomputed))
    for param, sliced in to_slice:  # last, as the whole data are among what is freed
        _save_for_slicing(param, sliced)


def _is_sliced(node: Node) -> bool:
    tag = tag_of(node)
    return tag is not None and bool(tag.slice)


def _gather_again(nodes: list[Node]) -> None:
    """No view of the gathered data may be saved, and no copy: saving one keeps a whole parameter alive just the same.

    Copies are the casts that autocast makes, or a transposed weight made contiguous. What else was computed from the
    parameter, the partitioner weighs like any activation.
    """
    for node in nodes:
        for same in same_data_as(node):
            mark_regather(same)


def _keep(param: GatheredParam) -> None:
    for node in (*made_by(param.wait, UNSHARD), *param.made):
        unmark(node)
    for node in param.unsharded:
        mark_save(node)


def _save_for_slicing(param: GatheredParam, sliced: Node) -> None:
    """Save the node that is sliced, and compute its views again, so that nothing else of it is saved."""
    for node in made_by(sliced, UNSHARD):
        unmark(node)
    for node in param.made:
        if node not in made_by(sliced, UNSHARD):
            mark_regather(node)
    _gather_again([node for node in same_data_as(sliced) if node is not sliced])
    mark_save(sliced)
