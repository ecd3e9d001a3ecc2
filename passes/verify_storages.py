"""Rules for memory: data are read while they are there, through whatever view, and freed once.

position    0 gather   1 wait   2 view   3 mm   4 resize_(0)   5 mm
storage     arriving   there    there    there  freed          a fault, if it reads the view
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch.fx import Graph, Node

from .fault import Fault
from .graph_view import (
    UNSHARD,
    WAIT,
    alias_root,
    is_launch,
    launch_of,
    resized_to,
    saved_for_backward,
    tag_of,
    waits_of,
)
from .storages import Storage, Storages
from .torch_compat import is_alias, is_marked_regather, is_mutating


def reads_what_is_there(graphs: Sequence[Graph]) -> Iterator[Fault]:
    """No node reads or frees what a collective has yet to bring, or what is freed; what is sent, nobody writes to.

    Graphs run one after another. In a joint graph the backward reads what the forward has freed, until ``regather`` has
    run: this is for all graphs after that.
    """
    storages = Storages.in_graphs(graphs)
    walk = _Walk(storages)
    for graph in graphs:
        for node in graph.nodes:
            yield from walk.step(node)


class _Walk:
    """Goes through graphs node by node, and knows what is under way and what is freed."""

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self.freed: dict[Storage, Node] = {}  # by what
        self.arriving: dict[Storage, Node] = {}  # with which launch
        self.sent: defaultdict[Storage, set[Node]] = defaultdict(set)  # by which launches

    def step(self, node: Node) -> Iterator[Fault]:
        if node.target is WAIT:
            self._wait(node)
        elif resized_to(node) is not None:
            yield from self._resize(node)
        elif not is_alias(node) and node.target is not operator.getitem:
            yield from self._read(node)
            if is_launch(node):
                self._launch(node)

    def _read(self, node: Node) -> Iterator[Fault]:
        writes = is_mutating(node.target) and not is_launch(node)
        for storage, source in self.storages.read_by(node).items():
            if storage in self.arriving:
                yield Fault(node, f"a wait for {self.arriving[storage]} before {source} is read", "none")
            if storage in self.freed:
                yield Fault(node, f"{source} to hold data", f"{self.freed[storage]} has freed it")
            if writes and self.sent[storage]:
                launches = sorted(self.sent[storage])
                yield Fault(node, f"a wait for {launches[0]}, which sends {source}, before that is written to", "none")

    def _resize(self, node: Node) -> Iterator[Fault]:
        for storage, source in self.storages.read_by(node).items():
            if storage in self.arriving or self.sent[storage]:
                yield Fault(node, f"no collective to be under way with {source}", "one that is not waited for")
            if not resized_to(node) and storage in self.freed:
                yield Fault(node, f"{source} to hold data to free", f"{self.freed[storage]} has freed it")
            self.freed.pop(storage, None)
            if not resized_to(node):
                self.freed[storage] = node

    def _launch(self, node: Node) -> None:
        self.arriving |= dict.fromkeys(self.storages.of[node], node)
        for storage in self.storages.read_by(node):
            self.sent[storage].add(node)

    def _wait(self, node: Node) -> None:
        for storage in self.storages.of[node]:
            self.arriving.pop(storage, None)
        start = launch_of(node)
        if start is not None and node is max(waits_of(start)):
            for storage in self.storages.read_by(start):
                self.sent[storage].discard(start)


# -- from forward to backward -----------------------------------------------------------------------------------------


def belong_together(forward: Graph, backward: Graph) -> Iterator[Fault]:
    """The backward takes what the forward saves."""
    try:
        saved_for_backward(forward, backward)
    except ValueError as error:
        yield Fault(next(iter(forward.find_nodes(op="output"))), "what the backward takes", str(error))


def saves_nothing_freed(forward: Graph, backward: Graph) -> Iterator[Fault]:
    """What the joint graph has freed is not saved for the backward, nor a view or a mere copy of it.

    Frees themselves are gone then: memory is given back after its last use, so this says that it is.
    """
    for node in saved_for_backward(forward, backward).values():
        if is_marked_regather(node):
            yield Fault(node, "shards to be saved, as the backward gathers again what was freed", "whole parameters")


def kept_unsharded(forward: Graph, backward: Graph) -> dict[tuple[int, str], Node]:
    """By group and name of each parameter whose unsharded data are saved for the backward, what is saved."""
    kept: dict[tuple[int, str], Node] = {}
    for node in saved_for_backward(forward, backward).values():
        tag = tag_of(alias_root(node))
        if tag is not None and tag.phase == UNSHARD:
            kept |= dict.fromkeys(tag.parameters, node)
    return kept
