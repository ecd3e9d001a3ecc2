"""What lies before and behind each node of a graph, and sums over it.

A set of marked nodes is the bits of one integer, so that a graph is read once in each direction. Few sets are distinct:
in a chain of modules, one for each mark. Sums are taken over the distinct ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch.fx import Graph, Node

Marks = Mapping[Node, int]  # bits of each marked node
Sets = dict[Node, int]  # bits of a set, by node
ROWS = 1024  # of a matrix of bits at a time, to bound memory


@dataclass(frozen=True)
class Way:
    """A graph's nodes in one direction, each after all of its ``near`` ones: its sources, or its users."""

    nodes: list[Node]
    near: dict[Node, list[Node]]

    def passed(self, marks: Marks) -> Sets:
        """Of each node, the marks of all that must come before it, its own not."""
        found: Sets = {}
        for node in self.nodes:
            found[node] = 0
            for each in self.near[node]:
                found[node] |= found[each] | marks.get(each, 0)
        return found

    def longest(self, lengths: Mapping[Node, float], least: Mapping[Node, float]) -> dict[Node, float]:
        """Of each node, the longest path to it, its own length not, where no node is earlier than its ``least``."""
        found: dict[Node, float] = {}
        for node in self.nodes:
            found[node] = max([least[node], *(found[each] + lengths.get(each, 0.0) for each in self.near[node])])
        return found


def ways(graph: Graph, in_order: Iterable[Node] = ()) -> tuple[Way, Way]:
    """From the graph's start to its end over sources, and from its end to its start over users.

    Args:
        graph: to be read.
        in_order: nodes that keep their order among each other, whatever they depend on.
    """
    sources = {node: [*node.all_input_nodes] for node in graph.nodes}
    users = {node: [*node.users] for node in graph.nodes}
    for earlier, later in pairwise(in_order):
        sources[later].append(earlier)
        users[earlier].append(later)
    return Way([*graph.nodes], sources), Way([*reversed(graph.nodes)], users)


def sums_of_marks(sets: Iterable[int], weights: NDArray[np.float64]) -> dict[int, NDArray[np.float64]]:
    """Of each set, the sum of its marks' weights.

    Args:
        sets: bits; need not be distinct.
        weights: (bits, columns); each column is summed apart.
    """
    found: dict[int, NDArray[np.float64]] = {}
    for chunk, rows in _matrices(list(dict.fromkeys(sets)), len(weights)):
        found.update(zip(chunk, rows @ weights, strict=True))
    return found


def sums_at_marks(sets: Sets, values: Mapping[Node, float], count: int) -> NDArray[np.float64]:
    """Of each of ``count`` bits, the sum of ``values`` of the nodes that have it in their set."""
    by_set: defaultdict[int, float] = defaultdict(float)
    for node, value in values.items():
        by_set[sets[node]] += value
    total = np.zeros(count)
    for chunk, rows in _matrices(list(by_set), count):
        total += np.array([by_set[each] for each in chunk]) @ rows
    return total


def _matrices(sets: Sequence[int], count: int) -> Iterator[tuple[Sequence[int], NDArray[np.float64]]]:
    """Parts of ``sets``, each with a matrix of 0 and 1 of shape (len(part), count)."""
    width = (count + 7) // 8
    for begin in range(0, len(sets), ROWS):
        part = sets[begin : begin + ROWS]
        packed = np.frombuffer(b"".join(each.to_bytes(width, "little") for each in part), np.uint8)
        rows = np.unpackbits(packed.reshape(len(part), width), axis=1, count=count, bitorder="little")
        yield part, rows.astype(np.float64)
