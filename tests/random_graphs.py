"""Random pairs of forward and backward graphs with tagged collectives, and random legal orders of them.

They are never run: results have sizes, which nothing checks, so that any node may read any other.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import pairwise
from random import Random

import torch
from graph_maker import WORLD, GraphMaker, aten
from torch.fx import Graph, Node

from fsdp_compile.passes.graph_view import (
    UNSHARD,
    WAIT,
    Tag,
    gathers,
    is_launch,
    kind_of,
    made_by,
    resized_to,
    set_tag,
    tag_of,
    waits_of,
)
from fsdp_compile.passes.storages import Storages
from fsdp_compile.passes.torch_compat import RESIZE, copy_node, emit


class RandomGraph:
    """A graph in the making.

    Args:
        chance: decides all.
        prefix: of the names of its nodes, which costs in tests depend on.
    """

    def __init__(self, chance: Random, prefix: str) -> None:
        self.chance, self.prefix = chance, prefix
        self.make = GraphMaker()
        self.readable: list[Node] = []

    def size(self) -> tuple[int, int]:
        """Rows that divide among the ranks."""
        return WORLD * self.chance.randint(1, 9), 3

    def compute(self, *more: Node) -> Node:
        """Reads ``more`` and some of what there is."""
        few = self.chance.sample(self.readable, k=min(len(self.readable), self.chance.randint(1, 2)))
        node = self.make.made_up(f"{self.prefix}_compute", self.size(), *few, *more)
        self.readable.append(node)
        return node

    def gathered(self, shard: Node, index: int) -> Node:
        """The whole of a parameter: a view of what a gather brings, without padding, sometimes of a cast."""
        param, group = chr(ord("a") + index), self.chance.randint(0, 2)
        source = self.make.cast(shard, torch.float64, param, group) if self.chance.random() < 0.3 else shard
        if source is not shard:
            self.tag(source, group, param)
        wait = self.make.gather(source, param, group, name=str(group % 2))
        whole = emit(self.make.graph, aten.slice.Tensor, wait, 0, 0, wait.meta["val"].shape[0] - index % 2)
        self.tag(whole, group, param)
        return whole

    def tag(self, node: Node, group: int, param: str) -> None:
        set_tag(node, Tag(group, "", (param,), (ord(param) - ord("a"),), UNSHARD))

    def reduced(self, index: int) -> Node:
        """The reduction of some gradient, sometimes of a cast of it; sometimes nothing else reads the gradient.

        Sometimes replicas reduce it again.
        """
        param, group = chr(ord("a") + index), self.chance.randint(0, 2)
        even = [node for node in self.readable if node.meta["val"].shape[0] % WORLD == 0]
        gradient = self.chance.choice(even) if self.chance.random() < 0.3 else self.compute()
        if self.chance.random() < 0.5:
            gradient = self.make.cast(gradient, torch.float64, param, group)
        reduced = self.make.reduce(gradient, param, group, name=str(group % 2))
        return self.make.all_reduce(reduced, param, group) if self.chance.random() < 0.3 else reduced

    def free(self) -> None:
        """Free what some gathers have brought, after the last node that reads it."""
        for start in [node for node in self.make.graph.nodes if is_launch(node) and kind_of(node) == "all_gather"]:
            (wait,) = waits_of(start)
            readers = [user for view in (wait, *wait.users) for user in view.users]
            if self.chance.random() < 0.3:
                with self.make.graph.inserting_after(max([wait, *wait.users, *readers])):
                    self.make.graph.call_function(RESIZE, (wait, 0))


def random_pair(seed: int, modules: int) -> tuple[Graph, Graph]:
    """A forward and the backward that takes what it saves, of ``modules`` parameters, at most 26."""
    forward, backward = RandomGraph(Random(seed), "forward"), RandomGraph(Random(seed + 1), "backward")
    shards = [forward.make.input(size=forward.size(), name=f"primals_{index}") for index in range(modules)]
    forward.readable.append(forward.make.input(size=forward.size(), name="primals_batch"))
    for index, shard in enumerate(shards):
        whole = forward.gathered(shard, index)
        for _ in range(forward.chance.randint(1, 3)):
            forward.compute(*forward.chance.choice(([whole], [])))
        forward.compute(whole)
    forward.free()
    results = forward.chance.sample(forward.readable, k=2)
    saved = forward.chance.sample(forward.readable, k=len(forward.readable) // 2)
    saved += [whole] if forward.chance.random() < 0.3 else []  # it is kept unsharded
    for node in saved:
        backward.readable.append(backward.make.input(size=node.meta["val"].shape, name=node.name))
    again = [backward.make.input(size=node.meta["val"].shape, name=node.name) for node in shards]
    for node in results:
        backward.readable.append(backward.make.input(size=node.meta["val"].shape, name=f"tangents_{node.name}"))
    reduced = []
    for index, shard in reversed(list(enumerate(again))):
        backward.compute(backward.gathered(shard, index))
        reduced.append(backward.reduced(index))
    backward.free()
    return forward.make.finish(*results, *saved, *shards), backward.make.finish(*reduced, backward.readable[-1])


def gather_again(graph: Graph, chance: Random) -> None:
    """Have the later readers of what some gathers bring read what a gather of their own brings."""
    for gather in list(gathers(graph)):
        (wait,) = gather.waits
        views = [wait, *(user for user in wait.users if tag_of(user))]
        readers = sorted({user for node in views for user in node.users if tag_of(user) is None})
        if len(readers) > 1 and chance.random() < 0.6:
            first = chance.randint(1, len(readers) - 1)
            copies: dict[Node, Node | None] = {}
            with graph.inserting_before(readers[first]):
                for node in [*made_by(gather.inputs[0], UNSHARD), gather.start, *views]:
                    taken = {source: copies.get(source, source) for source in node.all_input_nodes}
                    copies[node] = copy = copy_node(graph, node, taken)
                    copy.meta["custom"] = node.meta["custom"]
            for reader in readers[first:]:
                for node in views:
                    reader.replace_input_with(node, copies[node])  # type: ignore[arg-type]
    graph.lint()


# -- orders -----------------------------------------------------------------------------------------------------------


def reorder(graph: Graph, chance: Random, compute_stays: bool = False) -> None:
    """Bring ``graph`` into another order that computes the same; the order of compute may have to stay."""
    hurry = chance.choice([0.0, 1.0, 2.0])  # 0: launches and waits anywhere; else launches early and waits late
    keys = {node: chance.random() + hurry * (node.target is WAIT) - hurry * is_launch(node) for node in graph.nodes}
    missing = _needed(graph)
    for earlier, later in pairwise(node for node in missing if tag_of(node) is None) if compute_stays else ():
        missing[later].add(earlier)
    behind: defaultdict[Node, list[Node]] = defaultdict(list)
    for node, needed in missing.items():
        for each in needed:
            behind[each].append(node)
    positions = {node: position for position, node in enumerate(graph.nodes)}
    ready = [(keys[node], positions[node], node) for node, needed in missing.items() if not needed]
    heapq.heapify(ready)
    (output,) = graph.find_nodes(op="output")
    while ready:
        _, _, node = heapq.heappop(ready)
        output.prepend(node)
        for user in behind[node]:
            missing[user].remove(node)
            if not missing[user]:
                heapq.heappush(ready, (keys[user], positions[user], user))
    graph.lint()


def _needed(graph: Graph) -> dict[Node, set[Node]]:
    """By node that is neither input nor output, those that must stay before it: sources, and reads before a free."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    needed = {node: {source for source in node.all_input_nodes if source.op == "call_function"} for node in nodes}
    storages = Storages.in_graphs([graph])
    for free in nodes:
        if resized_to(free) is not None:
            shared = storages.read_by(free).keys()
            readers = [node for node in nodes if node is not free and shared & storages.read_by(node).keys()]
            for node in readers:
                earlier, later = (node, free) if node < free else (free, node)
                needed[later].add(earlier)
    return needed
