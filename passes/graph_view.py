"""Reads from a graph's tags which collectives belong to which parameters.

        placeholder ─ [cast] ─ [pad] ─ START ─ WAIT ─ [slice] ─ uses ... RESIZE(0)         a gather and its free
        gradient ─ [cast] ─ [pad] ─ START ─ WAIT ─ [slice] ─ [cast] ─ output                   a reduction

The runtime tags the nodes of each transition: ``node.meta["custom"]["fsdp"]`` is a dict with the ``group`` (an int), its
``name``, the names ``params`` with their ``index`` in the group, and the ``phase``: unshard, reshard or reduce.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .torch_compat import RESIZE, c10d, is_alias

GATHERS = (c10d.all_gather_into_tensor.default, c10d.all_gather_into_tensor_coalesced.default)
REDUCTIONS = (c10d.reduce_scatter_tensor.default,)
WAIT = c10d.wait_tensor.default


@dataclass(frozen=True)
class Tag:
    """What the runtime says of a node. ``index`` holds the position of each of ``params`` in its group."""

    group: int
    name: str
    params: tuple[str, ...]
    index: tuple[int, ...]
    phase: str

    def as_meta(self) -> dict[str, Any]:
        return {**vars(self)}


def tag_of(node: Node) -> Tag | None:
    """The node's tag, or ``None`` if no transition made it."""
    meta = node.meta.get("custom", {}).get("fsdp")
    if meta is None:
        return None
    return Tag(meta["group"], meta["name"], tuple(meta["params"]), tuple(meta["index"]), meta["phase"])


def set_tag(node: Node, tag: Tag) -> None:
    """Tag a node that a pass made."""
    node.meta["custom"] = {**node.meta.get("custom", {}), "fsdp": tag.as_meta()}


@dataclass(frozen=True)
class Collective:
    """One launch with its waits: one wait, or one for each output of a coalesced gather."""

    tag: Tag
    start: Node

    @property
    def waits(self) -> list[Node]:
        """The wait of each output, in order of the outputs."""
        if self.start.target is c10d.all_gather_into_tensor_coalesced.default:
            items = sorted(self.start.users, key=lambda item: item.args[1])  # type: ignore[arg-type, return-value]
            return [user for item in items for user in item.users if user.target is WAIT]
        return [user for user in self.start.users if user.target is WAIT]

    @property
    def world_size(self) -> int:
        return int(self.start.args[-2])  # type: ignore[arg-type]

    @property
    def process_group(self) -> str:
        return str(self.start.args[-1])

    @property
    def inputs(self) -> list[Node]:
        source = self.start.args[0]
        return list(source) if isinstance(source, (list, tuple)) else [source]  # type: ignore[list-item, arg-type]

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [node.meta["val"].dtype for node in self.inputs]

    @property
    def input_bytes(self) -> int:
        """Bytes of this rank's inputs."""
        return sum(int(v.numel()) * v.itemsize for v in (node.meta["val"] for node in self.inputs))


def gathers(graph: Graph) -> Iterator[Collective]:
    """The tagged all-gathers, in graph order."""
    yield from _collectives(graph, GATHERS)


def reductions(graph: Graph) -> Iterator[Collective]:
    """The tagged reduce-scatters, in graph order."""
    yield from _collectives(graph, REDUCTIONS)


def _collectives(graph: Graph, targets: tuple[Any, ...]) -> Iterator[Collective]:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in targets:
            tag = tag_of(node)
            if tag is not None:
                yield Collective(tag, node)


def frees(graph: Graph) -> list[Node]:
    """The nodes after which an unsharded parameter holds no data."""
    return [node for node in graph.nodes if node.target is RESIZE and tag_of(node) is not None and node.args[1] == 0]


def alias_root(node: Node) -> Node:
    """Walk up views to the node that owns the memory."""
    while is_alias(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def aliases_of(root: Node) -> list[Node]:
    """``root`` and all views of its memory, in order of discovery."""
    found = {root: None}
    stack = [root]
    while stack:
        for user in stack.pop().users:
            if user not in found and is_alias(user):
                found[user] = None
                stack.append(user)
    return list(found)


def ancestors_made_by(node: Node, phase: str) -> list[Node]:
    """``node`` and the nodes it is computed from, as far as transitions of ``phase`` made them; inputs come first."""
    chain: dict[Node, None] = {}

    def visit(at: Node) -> None:
        tag = tag_of(at)
        if at in chain or at.op == "placeholder" or tag is None or tag.phase != phase:
            return
        for source in at.all_input_nodes:
            visit(source)
        chain[at] = None

    visit(node)
    return list(chain)
