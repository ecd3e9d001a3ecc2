"""How much memory graphs need at least, in whatever order and in whatever buckets.

In the model of ``memory``, and for every order that dependences allow, these are alive while a node runs:

- what the caller keeps: sharded parameters, inputs, results of the graphs before;
- saved tensors that the node, or one computed from it, reads: they are there from the graph's start;
- the graph's own results (saved tensors, gradients) that the node, or one it is computed from, makes: they stay;
- what the node itself reads and makes, unsharded parameters too.

The bound is the largest such sum over all nodes, over each graph's start, when all saved tensors are there, and over
its end, when all results are. It holds for all plans with the same saved tensors. What they may differ in counts with
its least size: of what transitions make, only the data that is read, without padding and copies; of a collective's
input and output only the larger, as one may be a part of the other.

In a chain of modules this is the largest module's unsharded parameters that one node reads, beside shards and the
activations saved up to there; a plan that hides communication holds the next module's parameters as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.fx import Graph, Node

from .graph_view import REDUCE, data_bytes, is_launch, outputs_of, resized_to, tag_of
from .reach import sums_of_marks, ways
from .storages import Storage, Storages
from .torch_compat import is_alias

INPUTS = ("placeholder", "get_attr")


def memory_bound(graphs: Sequence[Graph]) -> int:
    """Bytes at the peak at least.

    Args:
        graphs: a forward and its backward, or one graph.

    Raises:
        ValueError: the backward does not belong to the forward.
    """
    storages = Storages.in_graphs(graphs)
    nodes = [node for graph in graphs for node in graph.nodes]
    resized = {s: node for node in reversed(nodes) if resized_to(node) is not None for s in storages.read_by(node)}
    most = 0
    existing: dict[Storage, None] = {}
    for graph in graphs:
        existing |= dict.fromkeys(s for node in graph.nodes if node.op in INPUTS for s in storages.of[node])
        most = max(most, _Needs(graph, storages, existing, resized).most())
        existing |= dict.fromkeys(s for node in graph.nodes for s in storages.of[node])
    return most


class _Needs:
    """What nodes of one graph need at the same time.

    Args:
        existing: storages that the graph finds, and those that graphs before have made.
        resized: storages that have another size at other times, and the first node that changes it; they count only
            for nodes before it.
    """

    def __init__(
        self, graph: Graph, storages: Storages, existing: dict[Storage, None], resized: dict[Storage, Node]
    ) -> None:
        self._graph, self._storages, self._resized = graph, storages, resized
        found = [storage for storage in existing if storage not in resized]
        inputs, results = self._shown(graph.find_nodes(op="placeholder")), self._shown(outputs_of(graph))
        self._kept = {s: s.bytes for s in found if s in storages.kept}
        self._saved = {s: inputs[s] for s in found if s in inputs and s not in storages.kept}
        self._results = {s: size for s, size in results.items() if s not in existing and s not in resized}

    def most(self) -> int:
        """The largest need of a node, or of the graph's start or end."""
        saved, results, nodes = _marks(self._saved), _marks(self._results), self._graph.nodes
        reads = {node: _union(saved, self._storages.read_by(node)) for node in nodes}
        makes = {node: _union(results, self._storages.of[node]) for node in nodes}
        down, up = ways(self._graph)
        before, behind = down.passed(makes), up.passed(reads)
        still_read = {node: behind[node] | reads[node] for node in nodes}
        made = {node: before[node] | makes[node] for node in nodes}
        saved_bytes = sums_of_marks(still_read.values(), _column(self._saved))
        result_bytes = sums_of_marks(made.values(), _column(self._results))
        needs = (saved_bytes[still_read[n]][0] + result_bytes[made[n]][0] + self._own(n) for n in nodes)
        return sum(self._kept.values()) + max(sum(self._saved.values()), int(max(needs)))

    def _own(self, node: Node) -> int:
        """Bytes that the node reads and makes and that do not count for other reasons."""
        tag = tag_of(node)
        if node.op != "call_function" or is_alias(node) or (tag is not None and not is_launch(node)):
            return 0
        read = self._shown(node.all_input_nodes)
        taken = sum(size for storage, size in read.items() if self._counts(storage, node))
        made = [storage for storage in self._storages.of[node] if storage.maker is node]
        given = sum(storage.bytes for storage in made if self._counts(storage, node))
        if tag is None:
            return taken + given
        counted = sum(self._results.get(storage, 0) for storage in made)
        return max(0, max(taken, sum(storage.bytes for storage in made)) - counted)

    def _counts(self, storage: Storage, node: Node) -> bool:
        if storage in self._kept or storage in self._saved or storage in self._results:
            return False
        change = self._resized.get(storage)
        return change is None or (change.graph is node.graph and node < change)

    def _shown(self, nodes: Iterable[Node]) -> dict[Storage, int]:
        """The storages of ``nodes``, and the bytes in them that every plan has."""
        shown: defaultdict[Storage, list[int]] = defaultdict(list)
        for node in dict.fromkeys(nodes):
            for storage in self._storages.of[node]:
                shown[storage].append(data_bytes(node.meta["val"]))
        return {storage: _least_bytes(storage, sizes) for storage, sizes in shown.items()}


def _least_bytes(storage: Storage, shown: list[int]) -> int:
    """Of what transitions made, only what is shown: parts of gradients side by side, views of a parameter as one."""
    tag = tag_of(storage.maker)
    if tag is None:
        return storage.bytes
    return min(storage.bytes, sum(shown) if tag.phase == REDUCE else max(shown))


def _marks(storages: Iterable[Storage]) -> dict[Storage, int]:
    return {storage: 1 << index for index, storage in enumerate(storages)}


def _union(marks: dict[Storage, int], storages: Iterable[Storage]) -> int:
    union = 0
    for storage in storages:
        union |= marks.get(storage, 0)
    return union


def _column(sizes: dict[Storage, int]) -> NDArray[np.float64]:
    return np.array([*sizes.values()], dtype=np.float64).reshape(-1, 1)
