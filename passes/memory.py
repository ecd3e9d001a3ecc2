"""Live bytes while graphs run: how much, of what, and where they peak.

The model: nodes run in graph order, one by one. A result's memory is taken when its node runs and given back after the
last node that reads it or a view of it; what a node reads and what it makes are alive together. ``resize_(0)`` gives
memory back before it ends. What a collective takes is in use from its launch to the last of its waits. Fusion, which
saves temporaries, and in-place reuse are not modelled; both do the same for every order of the same graph.

    position    0 shard   1 gather   2 wait   3 mm   4 gather   5 wait   6 mm   7 output
    shard       ─────────────────────────────────────────────────────────────────────────   kept by the caller
    gathered              ────────────────────────
    activation                                ────────────────────────────────────────────   saved
    gathered                                         ─────────────────────────
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

from torch.fx import Graph, Node

from .graph_view import REDUCE, RESHARD, UNSHARD, has_backward, is_launch, outputs_of, phase_of, resized_to, waits_of
from .storages import Storage, Storages

INPUTS = "sharded parameters and inputs"
UNSHARDED = "unsharded parameters"
ACTIVATIONS = "activations"
GRADIENTS = "gradients"
BUFFERS = "communication buffers"  # casts, pads and packed copies that a collective takes
CATEGORIES = (INPUTS, UNSHARDED, ACTIVATIONS, GRADIENTS, BUFFERS)


@dataclass(frozen=True)
class Lifetime:
    """One allocation from the first to the last position at which it is there; a resized storage has several."""

    maker: Node
    category: str
    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class MemoryProfile:
    """Live bytes over the nodes of graphs that run one after another.

    Attributes:
        nodes: in the order in which they run; a position counts these.
        lifetimes: of all memory, in order of allocation.
    """

    nodes: list[Node]
    lifetimes: list[Lifetime]

    @classmethod
    def of(cls, graphs: Sequence[Graph]) -> MemoryProfile:
        """Profile a forward and its backward, or one graph; see ``Storages.in_graphs`` for who owns what.

        Raises:
            ValueError: the backward does not belong to the forward.
        """
        storages = Storages.in_graphs(graphs)
        categories = _categories(graphs, storages)
        lifetimes = [Lifetime(each.maker, categories[each], *span) for each, *span in _spans(graphs, storages)]
        return cls([node for graph in graphs for node in graph.nodes], lifetimes)

    @cached_property
    def live(self) -> list[int]:
        """Bytes while each node runs."""
        return _live(len(self.nodes), ((each.bytes, each.first, each.last) for each in self.lifetimes))

    @property
    def peak(self) -> int:
        """The most bytes at once."""
        return max(self.live)

    @property
    def peak_position(self) -> int:
        """The first position at which they peak."""
        return self.live.index(self.peak)

    @property
    def at_peak(self) -> Node:
        """The node that runs then."""
        return self.nodes[self.peak_position]

    @cached_property
    def live_of(self) -> dict[str, list[int]]:
        """Bytes of each category while each node runs."""
        spans: dict[str, list[tuple[int, int, int]]] = {category: [] for category in CATEGORIES}
        for each in self.lifetimes:
            spans[each.category].append((each.bytes, each.first, each.last))
        return {category: _live(len(self.nodes), of_category) for category, of_category in spans.items()}

    def composition(self, position: int) -> dict[str, int]:
        """Bytes of each category while the node at ``position`` runs."""
        return {category: live[position] for category, live in self.live_of.items()}


def live_bytes(graphs: Sequence[Graph]) -> list[int]:
    """Bytes while each node runs, as in the profile of ``graphs``, without finding out what they are of."""
    spans = _spans(graphs, Storages.in_graphs(graphs))
    return _live(sum(len(graph.nodes) for graph in graphs), (span for _, *span in spans))


def _live(count: int, spans: Iterable[Sequence[int]]) -> list[int]:
    steps = [0] * (count + 1)
    for size, first, last in spans:
        steps[first] += size
        steps[last + 1] -= size
    return list(accumulate(steps))[:-1]


# -- how long -------------------------------------------------------------------------------------------------------


def _spans(graphs: Sequence[Graph], storages: Storages) -> Iterator[tuple[Storage, int, int, int]]:
    """Bytes of a storage, the first position at which it has these, and the last; in order of allocation."""
    nodes = [node for graph in graphs for node in graph.nodes]
    first, last = _first_positions(graphs, storages), _last_positions(nodes, storages)
    sizes: dict[Storage, list[tuple[int, int]]] = {}  # a position, and the bytes from there on
    for position, node in enumerate(nodes):
        size = resized_to(node)
        if size is not None:
            for storage in storages.read_by(node):
                sizes.setdefault(storage, []).append((position, size))
    for storage, position in first.items():
        changes = [(position, storage.bytes), *sizes.get(storage, []), (last[storage] + 1, 0)]
        for (begin, size), (end, _) in pairwise(changes):
            if size and begin < end:
                yield storage, size, begin, end - 1


def _first_positions(graphs: Sequence[Graph], storages: Storages) -> dict[Storage, int]:
    """The position that makes each storage; inputs and constants are there when their graph starts."""
    first: dict[Storage, int] = {}
    position = 0
    for graph in graphs:
        start = position
        for position, node in enumerate(graph.nodes, start):
            for storage in storages.of[node]:
                first.setdefault(storage, start if node.op in ("placeholder", "get_attr") else position)
        position += 1
    return first


def _last_positions(nodes: list[Node], storages: Storages) -> dict[Storage, int]:
    """The last position at which each storage is needed."""
    last: dict[Storage, int] = {}
    positions = {node: position for position, node in enumerate(nodes)}
    for position, node in enumerate(nodes):
        last |= dict.fromkeys(chain(storages.of[node], storages.read_by(node)), position)
    end = len(nodes) - 1
    for start in filter(is_launch, nodes):
        waited = max((positions[wait] for wait in waits_of(start)), default=end)
        for storage in storages.read_by(start):
            last[storage] = max(last[storage], waited)
    return last | dict.fromkeys(storages.kept, end)


# -- of what --------------------------------------------------------------------------------------------------------


def _categories(graphs: Sequence[Graph], storages: Storages) -> dict[Storage, str]:
    """The category of each storage, by who made it and, of untagged ones, where it goes."""
    found: dict[Storage, str] = {}
    gradients = _gradients(graphs, storages)
    for graph in graphs:
        prepared = _prepared(graph)
        for node in graph.nodes:
            for storage in storages.of[node]:
                if storage not in found:
                    found[storage] = _category(node, storage, storages, node in prepared, storage in gradients)
    return found


def _category(node: Node, storage: Storage, storages: Storages, prepared: bool, gradient: bool) -> str:
    if node.op in ("placeholder", "get_attr"):
        return INPUTS if storage in storages.kept else ACTIVATIONS
    if prepared:
        return BUFFERS
    if phase_of(node) in (UNSHARD, RESHARD):
        return UNSHARDED
    return GRADIENTS if gradient else ACTIVATIONS


def _prepared(graph: Graph) -> set[Node]:
    """What transitions make for a launch."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if phase_of(node) is not None and not is_launch(node):
            if any((phase_of(user) is not None and is_launch(user)) or user in found for user in node.users):
                found.add(node)
    return found


def _gradients(graphs: Sequence[Graph], storages: Storages) -> set[Storage]:
    """What reductions take and bring, and what a backward returns."""
    found: set[Storage] = set()
    for graph in graphs:
        for node in graph.nodes:
            if phase_of(node) == REDUCE:
                found.update(storages.read_by(node))
    if has_backward(graphs[-1]):
        found.update(*(storages.of[node] for node in outputs_of(graphs[-1])))
    return found
