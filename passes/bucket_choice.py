"""Which collectives travel together: lists of members for ``bucket`` to merge, by the user's choice."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from torch.fx import Graph

from .bucket_load import alike, clock, eager_room, is_bucket, load_of, sequences, shared_line
from .bucket_plan import by_size, fastest_gathers, fastest_reductions
from .context import PassConfig
from .graph_view import Collective, all_reduces, gathers, kind_of, reductions, whole_bytes
from .machine import cost_model
from .memory import MemoryProfile
from .torch_compat import real_tensors


def choose(graph: Graph, config: PassConfig) -> Iterator[list[Collective]]:
    """Lists of collectives of one kind, process group and dtype, in graph order.

    The caller merges each list before it asks for the next: all-reduces go as their reductions went.
    """
    if config.bucket == "none":
        return
    if config.bucket == "module":
        for kind in (gathers, reductions, all_reduces):
            yield from _by_module(kind(graph))
        return
    for members, buckets in _automatic(graph, config) if config.bucket == "auto" else _by_size(graph, config):
        for each in buckets:
            yield sorted((members[index] for index in each), key=lambda member: member.start)
    yield from _as_reduced(graph)


Chosen = Iterator[tuple[list[Collective], list[range]]]  # a sequence, and its buckets


def _by_module(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """Of one group, by occurrence: a module that runs k times has k gathers of each parameter, hence k buckets."""
    occurrences: dict[Hashable, int] = {}
    buckets: dict[Hashable, list[Collective]] = {}
    for collective in collectives:
        if is_bucket(collective):
            continue
        together = (collective.tag.group, *alike(collective))
        key = (together, collective.tag.params)
        occurrences[key] = occurrences.get(key, -1) + 1
        buckets.setdefault((together, occurrences[key]), []).append(collective)
    return list(buckets.values())


def _by_size(graph: Graph, config: PassConfig) -> Chosen:
    assert config.bucket_bytes is not None
    for members in sequences(graph):
        yield members, by_size([whole_bytes(member.start) for member in members], config.bucket_bytes)


def _automatic(graph: Graph, config: PassConfig) -> Chosen:
    """The fastest, each sequence by itself: ``bucket_plan`` has the model, ``shared_line`` what they share."""
    together = sequences(graph)
    if not together:
        return
    costs = cost_model((member for members in together for member in members), config.hardware)
    with real_tensors():
        times, end = clock(graph, costs)
        lines = [shared_line(members, together, costs) for members in together]
        more = _more_room(graph, config.memory_budget)
        plans = [
            fastest_gathers(load_of(members, times, end), line, eager_room(members) + more)
            if kind_of(members[0].start) == "all_gather"
            # They queue behind the gathers of a lane, which their plan knows nothing of: never late, hence never large.
            else fastest_reductions(load_of(members, times, end), line, eager_room(members))
            for members, line in zip(together, lines, strict=True)
        ]
    yield from zip(together, plans, strict=True)


def _more_room(graph: Graph, budget: int | None) -> int:
    """Bytes of the budget that the graph does not need for anything else; the default one is as much as eager has."""
    return max(0, budget - MemoryProfile.of([graph]).peak) if budget is not None else 0


def _as_reduced(graph: Graph) -> Iterator[list[Collective]]:
    """All-reduces of what one bucket of reductions brings; where there was no reduction, those of a module."""
    reduction_of = {each: reduction.start for reduction in reductions(graph) for each in reduction.tag.parameters}
    buckets: dict[Hashable, list[Collective]] = {}
    alone = []
    for collective in all_reduces(graph):
        reduction = reduction_of.get(collective.tag.parameters[0])
        if reduction is None:
            alone.append(collective)
        elif not is_bucket(collective):
            buckets.setdefault((reduction, *alike(collective)), []).append(collective)
    yield from buckets.values()
    yield from _by_module(alone)
