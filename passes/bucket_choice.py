"""Which collectives travel together: lists of members for ``bucket`` to merge, by the user's choice."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from torch.fx import Graph

from .bucket_load import Free, alike, clock, is_bucket, queue_of, sequences
from .bucket_plan import by_size
from .bucket_timeline import fastest
from .context import PassConfig
from .graph_view import Collective, all_reduces, gathers, reductions, whole_bytes
from .machine import cost_model


def choose(graph: Graph, config: PassConfig, free: Free | None = None) -> Iterator[list[Collective]]:
    """Lists of collectives that are ``alike``, in graph order; arguments as of ``bucket``.

    The caller merges each list before it asks for the next: all-reduces go as their reductions went.
    """
    if config.bucket == "none":
        return
    if config.bucket == "module":
        for kind in (gathers, reductions, all_reduces):
            yield from _by_module(kind(graph))
        return
    for members, buckets in _automatic(graph, config, free) if config.bucket == "auto" else _by_size(graph, config):
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


def _automatic(graph: Graph, config: PassConfig, free: Free | None) -> Chosen:
    """The fastest of those tried; sequences share what is free in equal parts."""
    together = sequences(graph)
    if not together:
        return
    costs = cost_model([graph], config.hardware)
    part = {node: size / len(together) for node, size in free.items()} if free is not None else None
    times, end = clock(graph, costs)
    queues = [queue_of(members, times, end, costs, part) for members in together]
    yield from zip(together, fastest(queues), strict=True)


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
