"""Verifies that a pass has kept the rules of all passes, and names the node that breaks one.

By ``PassConfig.verify`` it runs around every pass. In this order, as later rules rely on earlier ones:

    nodes in topological order, torch.fx's lint content                        ``verify_form``      every pass
    one wait for each output of a launch; nothing reads it before that                              every pass
    tags complete; each parameter once in a collective                                              every pass
    no read of data under way or freed, through any alias; freed once          ``verify_storages``  every pass
    what the joint graph has freed is not saved for the backward                                    from partitioning on
    no more parameters kept unsharded than before                                                   from partitioning on
    each shard gathered, each gradient reduced as before; as many bytes        ``verify_traffic``   see ``CHANGES``
    each gradient reduced once                                                                      from accumulate on
    no free left, none made                                                                         from regather on
    one order of launches for each process group                                                    see ``ORDERED_ANEW``
    peak of live bytes within the budget                                       ``Limits``           see ``LIMITED``

One rank cannot see the order of another; ``verify_ranks`` compares graphs of several. That a graph *means* the same is
for tests, which run it before and after on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from torch.fx import Graph, Node

from .context import Parts, PassConfig, PassContext
from .fault import Fault, InvalidGraph
from .graph_view import is_launch, process_group_of
from .memory import live_bytes
from .schedule import eager_order, schedule
from .torch_compat import copy_to_try
from .verify_form import in_order, tagged, waited_for_once
from .verify_storages import belong_together, kept_unsharded, reads_what_is_there, saves_nothing_freed
from .verify_traffic import (
    Moved,
    frees_none,
    frees_the_same,
    launches_in_order,
    moves_the_same,
    reduces_once,
    same_launches,
)

CHANGES = {  # how passes may change what is moved; others may not
    "keep_slices": {"more": True},  # the backward gathers from slices
    "accumulate": {"repeats": True},
    "dedup": {"repeats": True},
}
REDUCED_ONCE = ("accumulate", "bucket", "schedule", "dedup", "fuse_copies", "for_gloo", "announce")
ORDERED_ANEW = ("bucket", "schedule")
LIMITED = ("schedule", "dedup", "fuse_copies")


def verify(after: str, parts: Parts) -> None:
    """Check what holds of graphs whatever they were before.

    Args:
        after: name of what made them, for the error.
        parts: a forward and its backward, or one graph; a joint graph after ``regather``.

    Raises:
        InvalidGraph: a rule is broken.
    """
    _raise_first(after, parts, _of_graphs(parts))


@contextmanager
def verified(name: str, parts: Parts, config: PassConfig, default_budget: int | None = None) -> Iterator[None]:
    """Inside, run the pass of that name on ``parts``; afterwards check these, and what the pass may not change.

    Args:
        parts: as for ``verify``.
        config: the pass's, in which "auto" is settled.
        default_budget: of ``schedule``.

    Raises:
        InvalidGraph: a rule is broken.
    """
    graphs = [*parts.values()]
    before = {part: Moved.in_graph(graph) for part, graph in parts.items()}
    kept = _kept(graphs)
    limits = Limits.before(name, graphs, config, default_budget)
    yield
    verify(name, parts)
    after = {part: Moved.in_graph(graph) for part, graph in parts.items()}
    faults = (_of_pass(name, before[part], after[part]) for part in parts)
    _raise_first(name, parts, chain(*faults, _keeps_no_more(kept, _kept(graphs)), limits.check(graphs)))


def verify_ranks(after: str, ranks: Sequence[Parts]) -> None:
    """Check that the graphs of several ranks launch the same collectives in the same order.

    Args:
        after: name of what made them, for the error.
        ranks: of each rank its graphs, by the same names.

    Raises:
        InvalidGraph: they do not; the node is that of the later rank.
    """
    _raise_first(after, {name: graph for parts in ranks for name, graph in parts.items()}, same_launches(ranks))


def _raise_first(after: str, parts: Parts, faults: Iterable[Fault]) -> None:
    for fault in faults:
        raise InvalidGraph(after, parts, fault)


# -- rules ------------------------------------------------------------------------------------------------------------


def _of_graphs(parts: Parts) -> Iterator[Fault]:
    graphs = [*parts.values()]
    for rule in (in_order, waited_for_once, tagged):
        for graph in graphs:
            yield from rule(graph)
    if len(graphs) == 2:
        yield from belong_together(*graphs)
    yield from reads_what_is_there(graphs)
    if len(graphs) == 2:
        yield from saves_nothing_freed(*graphs)


def _of_pass(name: str, before: Moved, after: Moved) -> Iterator[Fault]:
    yield from moves_the_same(before, after, **CHANGES.get(name, {}))
    if name in REDUCED_ONCE:
        yield from reduces_once(after)
    yield from frees_none(after) if name == "regather" else frees_the_same(before, after)
    if name not in ORDERED_ANEW:
        yield from launches_in_order(before, after)


def _kept(graphs: Sequence[Graph]) -> Mapping[tuple[int, str], Node]:
    return kept_unsharded(*graphs) if len(graphs) == 2 else {}


def _keeps_no_more(before: Mapping[tuple[int, str], Node], after: Mapping[tuple[int, str], Node]) -> Iterator[Fault]:
    for (_, param), node in after.items():
        if (_, param) not in before:
            yield Fault(node, "what is saved for the backward to be what was", f"all of {param}")


@dataclass(frozen=True)
class Limits:
    """What the order in which graphs come out of a pass must keep to.

    Attributes:
        peak: of live bytes; ``None`` for no limit.
        launches: by process group the names of the launches, in order; ``None`` for any order.
    """

    peak: int | None
    launches: list[dict[str, list[str]]] | None

    @classmethod
    def before(cls, name: str, graphs: Sequence[Graph], config: PassConfig, default_budget: int | None) -> Limits:
        """Read off graphs that the pass has yet to change.

        Without a budget in the configuration ``schedule`` keeps to the order and to the peak of FSDP2's eager
        execution; with one, to that, unless the graphs need more without any overlap.
        """
        if name not in LIMITED:
            return cls(None, None)
        if name != "schedule":
            return cls(max(live_bytes(graphs)), None)
        tried = [copy_to_try(graph) for graph in graphs]
        if config.memory_budget is not None:
            schedule(tried, PassContext(PassConfig(memory_budget=0)))
            return cls(max(config.memory_budget, *live_bytes(tried)), None)
        eager_order(tried)
        return cls(max(default_budget or 0, *live_bytes(tried)), [*map(_launch_names, tried)])

    def check(self, graphs: Sequence[Graph]) -> Iterator[Fault]:
        """Compare with what the pass has made."""
        if self.peak is not None:
            live = live_bytes(graphs)
            if max(live) > self.peak:
                nodes = [node for graph in graphs for node in graph.nodes]
                yield Fault(nodes[live.index(max(live))], f"at most {self.peak} live bytes", f"{max(live)}")
        for graph, expected in zip(graphs, self.launches or (), strict=False):
            yield from _as_expected(graph, expected)


def _launch_names(graph: Graph) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node in filter(is_launch, graph.nodes):
        found.setdefault(process_group_of(node), []).append(node.name)
    return found


def _as_expected(graph: Graph, expected: Mapping[str, Sequence[str]]) -> Iterator[Fault]:
    named = {node.name: node for node in filter(is_launch, graph.nodes)}
    for process_group, found in _launch_names(graph).items():
        for name, wanted in zip(found, expected[process_group], strict=True):
            if name != wanted:
                order = f"{wanted} to be the next launch in process group {process_group}, as in the eager order"
                yield Fault(named[name], order, "it")
