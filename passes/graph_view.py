"""Reads from a graph's tags which collectives belong to which parameters.

    placeholder ─ [to device] ─ [cast] ─ START ─ WAIT ─ [slice] ─ uses ... RESIZE(0)         a gather and its free
    gradient ─ [cast] ─ [pad] ─ START ─ WAIT ─ [START ─ WAIT] ─ [cast] ─ [to host] ─ output  a reduction, an all-reduce

    placeholder ─ [cast] ─┐                ┌─ getitem ─ WAIT ─ [slice] ─ uses
    placeholder ─ [cast] ─┴─ START (many) ─┴─ getitem ─ WAIT ─ [slice] ─ uses           a bucket of gathers

The runtime tags the nodes of each transition: ``node.meta["custom"]["fsdp"]`` is a dict with the ``group`` (an int),
its ``name``, the names ``params`` with their ``index`` in the group, and the ``phase``: unshard, reshard or reduce. A
slice that a reshard to fewer ranks keeps also says to how many, and their process group. A pass tags the nodes that it
makes in the same way. Nothing here looks at the names or the shapes of nodes.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .operators import GATHER
from .torch_compat import RESIZE, c10d, hint, is_alias, is_functional_collective

GATHER_ONE = c10d.all_gather_into_tensor.default
GATHER_MANY = c10d.all_gather_into_tensor_coalesced.default
GATHERS = (GATHER_ONE, GATHER_MANY, GATHER)
REDUCE_SCATTER = c10d.reduce_scatter_tensor.default
REDUCTIONS = (REDUCE_SCATTER,)
ALL_REDUCE_INTO = c10d.all_reduce_.default  # what is reduced takes the result
ALL_REDUCES = (c10d.all_reduce.default, ALL_REDUCE_INTO)  # of gradients that are reduced over the shard ranks already
WAIT = c10d.wait_tensor.default
KINDS: dict[Any, str] = {  # of collectives
    c10d.all_gather_into_tensor: "all_gather",
    c10d.all_gather_into_tensor_out: "all_gather",
    c10d.all_gather_into_tensor_coalesced: "all_gather",
    GATHER.overloadpacket: "all_gather",
    c10d.reduce_scatter_tensor: "reduce_scatter",
    c10d.reduce_scatter_tensor_out: "reduce_scatter",
    c10d.reduce_scatter_tensor_coalesced: "reduce_scatter",
    c10d.all_reduce: "all_reduce",
    c10d.all_reduce_: "all_reduce",
    c10d.all_reduce_coalesced: "all_reduce",
    c10d.all_reduce_coalesced_: "all_reduce",
    c10d.all_to_all_single: "all_to_all",
    c10d.broadcast: "broadcast",
    c10d.broadcast_: "broadcast",
}

UNSHARD, RESHARD, REDUCE = "unshard", "reshard", "reduce"  # the phases

# Operations that copy all of their input's data and do nothing else.
COPIES = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.prims.device_put.default,
)


def converts(node: Node) -> bool:
    """Whether the node copies into another dtype or to another device."""
    if node.target not in COPIES:
        return False
    source, result = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(source.dtype != result.dtype or source.device != result.device)


@dataclass(frozen=True)
class Tag:
    """What the runtime says of a node.

    Attributes:
        index: position of each of ``params`` in the group.
        groups: of each of ``params``, in a bucket of several groups, where ``group`` is the first and ``name`` for
            people; else empty.
        slice: of a slice among fewer ranks: how many, and their process group. A pass adds the placeholder that says
            which slice is this rank's.
    """

    group: int
    name: str
    params: tuple[str, ...]
    index: tuple[int, ...]
    phase: str
    slice: tuple[Any, ...] = ()
    groups: tuple[int, ...] = ()

    @property
    def parameters(self) -> list[tuple[int, str]]:
        """Group and name of each parameter."""
        return list(zip(self.groups or (self.group,) * len(self.params), self.params, strict=True))

    def only(self, members: Sequence[int]) -> Tag:
        """That of some of the parameters, by their positions."""
        params, index = tuple(self.params[each] for each in members), tuple(self.index[each] for each in members)
        groups = tuple(self.groups[each] for each in members) if self.groups else ()
        first = groups[0] if groups else self.group
        groups = groups if len(set(groups)) > 1 else ()
        return replace(self, group=first, params=params, index=index, groups=groups)

    def as_meta(self) -> dict[str, Any]:
        """The form that is kept in ``node.meta``."""
        return {**vars(self)}


def tag_of(node: Node) -> Tag | None:
    """The node's tag, or ``None`` if no transition made it."""
    meta = node.meta.get("custom", {}).get("fsdp")
    if meta is None:
        return None
    lists = (tuple(meta["params"]), tuple(meta["index"]))
    more = (tuple(meta.get("slice", ())), tuple(meta.get("groups", ())))
    return Tag(meta["group"], meta["name"], *lists, meta["phase"], *more)


def phase_of(node: Node) -> str | None:
    """The phase of its transition, or ``None``; quicker than ``tag_of``, as this is asked very often."""
    meta = node.meta.get("custom", {}).get("fsdp")
    return None if meta is None else meta["phase"]


def set_tag(node: Node, tag: Tag) -> None:
    """Tag a node that a pass made."""
    node.meta["custom"] = {**node.meta.get("custom", {}), "fsdp": tag.as_meta()}


def copy_tag(source: Node, *nodes: Node) -> None:
    """Tag nodes that a pass made like ``source``, if that is tagged."""
    tag = tag_of(source)
    if tag is not None:
        for node in nodes:
            set_tag(node, tag)


@dataclass(frozen=True)
class Collective:
    """One launch with its waits: one wait, or one for each output of a coalesced gather."""

    tag: Tag
    start: Node

    @property
    def inputs(self) -> list[Node]:
        """What this rank sends: one node, or one for each member of a coalesced gather."""
        source = self.start.args[0]
        return list(source) if isinstance(source, (list, tuple)) else [source]  # type: ignore[list-item, arg-type]

    @property
    def waits(self) -> list[Node]:
        """The wait of each output, in order of the outputs."""
        outputs = [self.start]
        if self.start.target is GATHER_MANY:
            outputs = sorted(self.start.users, key=lambda item: item.args[1])  # type: ignore[arg-type, return-value]
        return [user for output in outputs for user in output.users if user.target is WAIT]

    @property
    def operator(self) -> Callable[..., Any]:
        """What launches it."""
        return self.start.target  # type: ignore[return-value]

    @property
    def how(self) -> tuple[Any, ...]:
        """All but what is sent: the kind of reduction, the number of ranks, the process group, as far as given."""
        return self.start.args[1:]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of each input."""
        return [node.meta["val"].dtype for node in self.inputs]

    @property
    def input_bytes(self) -> int:
        """Bytes of this rank's inputs, padding included."""
        return sum(int(value.numel()) * value.itemsize for value in (node.meta["val"] for node in self.inputs))

    @property
    def params(self) -> list[GatheredParam]:
        """Of a gather: each parameter that it brings, in order of the outputs."""
        return [
            GatheredParam(Tag(group, self.tag.name, (name,), (index,), self.tag.phase), source, wait)
            for (group, name), index, source, wait in zip(
                self.tag.parameters, self.tag.index, self.inputs, self.waits, strict=True
            )
        ]


@dataclass(frozen=True)
class GatheredParam:
    """One parameter's way through a gather.

    Attributes:
        tag: names this parameter alone.
        input: what the collective takes of it.
        wait: its gathered data, padding included.
    """

    tag: Tag
    input: Node
    wait: Node

    @property
    def chain(self) -> list[Node]:
        """The cast and pad between the sharded data and the collective; may be empty."""
        return made_by(self.input, UNSHARD)

    @property
    def made(self) -> list[Node]:
        """The gathered data and all that the transition made of it: without padding, concatenated, decoded."""
        return _closure(self.wait, lambda user: phase_of(user) == UNSHARD)

    @property
    def unsharded(self) -> list[Node]:
        """What compute reads: the last that the transition made."""
        return [node for node in self.made if all(phase_of(user) != UNSHARD for user in node.users)]


def gathers(graph: Graph) -> Iterator[Collective]:
    """The tagged all-gathers, in graph order."""
    yield from _collectives(graph, GATHERS)


def reductions(graph: Graph) -> Iterator[Collective]:
    """The tagged reduce-scatters, in graph order."""
    yield from _collectives(graph, REDUCTIONS)


def all_reduces(graph: Graph) -> Iterator[Collective]:
    """The tagged all-reduces, in graph order."""
    yield from _collectives(graph, ALL_REDUCES)


def _collectives(graph: Graph, targets: tuple[Any, ...]) -> Iterator[Collective]:
    found = [node for target in targets for node in graph.find_nodes(op="call_function", target=target, sort=False)]
    for node in sorted(found):
        tag = tag_of(node)
        if tag is not None:
            yield Collective(tag, node)


# -- launches, tagged or not ------------------------------------------------------------------------------------------


def is_launch(node: Node) -> bool:
    """Whether the node launches a collective."""
    return (is_functional_collective(node) and node.target is not WAIT) or node.target is GATHER


def waits_of(start: Node) -> list[Node]:
    """What waits for the launch: a wait for each of its outputs."""
    outputs = [start, *(user for user in start.users if user.target is operator.getitem)]
    return [user for output in outputs for user in output.users if user.target is WAIT]


def launch_of(wait: Node) -> Node | None:
    """What is waited for, or ``None`` if this graph does not launch it."""
    (source,) = wait.all_input_nodes
    if source.target is operator.getitem:
        source = source.args[0]  # type: ignore[assignment]
    return source if is_launch(source) else None


def kind_of(start: Node) -> str:
    """ "all_gather", "reduce_scatter", "all_reduce" and the like, or the operator's name."""
    target: Any = start.target
    return known_kind(start) or target.__name__.split(".")[0]


MARKS = re.compile(r"[;\n]")  # part what ``announce`` lists, and so are in no title


def title_of(start: Node) -> str:
    """Kind and module, for people."""
    tag = tag_of(start)
    return title(kind_of(start), tag.name) if tag else kind_of(start)


def title(kind: str, name: str) -> str:
    """Of a collective of the module of that name, empty for the root."""
    return f"{kind} [{MARKS.sub('_', name) or 'root'}]"


def planned_of(start: Node) -> tuple[str, str]:
    """Name and title of the planned launch that this one is, or in whose place it is written."""
    known: tuple[str, str] = start.meta.get("planned", (start.name, title_of(start)))
    return known


def note_planned(start: Node, *launches: Node) -> None:
    """Note that ``launches`` are written in place of ``start``."""
    for launch in launches:
        launch.meta["planned"] = planned_of(start)


def known_kind(node: Node) -> str | None:
    """The kind of a collective that costs are known of; ``None`` for all else."""
    return KINDS.get(getattr(node.target, "overloadpacket", None))


def process_group_of(start: Node) -> str:
    """Name of the process group; all functional collectives take it as the last that is not optional."""
    return str(start.kwargs.get("group_name", start.args[-1]))


def whole_bytes(start: Node) -> int:
    """Bytes of the larger side, padding included: what a gather brings, what a reduction takes."""
    taken = [node.meta["val"] for node in start.all_input_nodes]
    given = start.meta["val"] if isinstance(start.meta["val"], (list, tuple)) else [start.meta["val"]]
    return max(sum(map(data_bytes, taken)), sum(map(data_bytes, given)))


def data_bytes(value: Any) -> int:
    """Bytes of a tensor's elements, those that repeat along a dimension (``expand``) once; 0 for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return 0
    dimensions = ((hint(size), hint(stride)) for size, stride in zip(value.shape, value.stride(), strict=True))
    return math.prod(size if stride else min(size, 1) for size, stride in dimensions) * value.itemsize


def copies(graph: Graph) -> list[Node]:
    """What transitions run beside collectives: casts, padding, packing, divisions, whatever reads and writes data."""
    moves = (WAIT, RESIZE, operator.getitem)
    made = [node for node in graph.nodes if node.op == "call_function" and phase_of(node) is not None]
    return [node for node in made if not (node.target in moves or is_launch(node) or is_alias(node))]


# -- memory -----------------------------------------------------------------------------------------------------------


def frees(graph: Graph) -> list[Node]:
    """The nodes after which an unsharded parameter holds no data."""
    return [node for node in graph.nodes if node.target is RESIZE and tag_of(node) is not None and node.args[1] == 0]


def resized_to(node: Node) -> int | None:
    """Bytes that the node's input has from there on, if it resizes storage."""
    return hint(node.args[1]) if node.target is RESIZE else None  # type: ignore[arg-type]


@dataclass(frozen=True)
class KeptSlice:
    """A slice of unsharded data that a reshard to fewer ranks keeps for the gather of the backward.

    Attributes:
        source: node whose data is sliced.
        index: placeholder that says which slice is this rank's.
        nodes: what makes it, and the wait that keeps it alive, in order.
    """

    tag: Tag
    source: Node
    index: Node
    nodes: list[Node]


def kept_slices(graph: Graph) -> Iterator[KeptSlice]:
    """The slices that reshards keep, in graph order."""
    for node in list(graph.nodes):
        tag = tag_of(node) if node.target is WAIT else None
        if tag is not None and tag.slice and tag.phase == RESHARD:
            nodes = made_by(node, RESHARD)
            sources = [source for each in nodes for source in each.all_input_nodes if source not in nodes]
            (index,) = [source for source in sources if source.op == "placeholder"]
            (source,) = [source for source in sources if source is not index]
            yield KeptSlice(tag, alias_root(source), index, nodes)


def alias_root(node: Node) -> Node:
    """Walk up views to the node that owns the memory."""
    while is_alias(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def aliases_of(root: Node) -> list[Node]:
    """``root`` and all views of its memory, in order of discovery."""
    return _closure(root, is_alias)


def same_data_as(root: Node) -> list[Node]:
    """``root``, its views and its mere copies (casts, transposed copies), and theirs in turn."""
    return _closure(root, lambda user: is_alias(user) or user.target in COPIES)


def made_by(node: Node, phase: str) -> list[Node]:
    """``node`` and the nodes it is computed from, as far as transitions of ``phase`` made them; inputs come first."""
    chain: dict[Node, None] = {}

    def visit(at: Node) -> None:
        if at in chain or at.op == "placeholder" or phase_of(at) != phase:
            return
        for source in at.all_input_nodes:
            visit(source)
        chain[at] = None

    visit(node)
    return list(chain)


def has_backward(graph: Graph) -> bool:
    """Whether this is a joint graph of forward and backward, or a backward graph: it takes gradients of outputs."""
    return any(map(is_tangent, graph.nodes))


def is_tangent(node: Node) -> bool:
    """Whether a backward takes it as the gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def outputs_of(graph: Graph) -> list[Node]:
    """What the graph returns, without what is no node, in order; a node that is returned twice is there twice."""
    (output,) = graph.find_nodes(op="output")
    returned: list[Node] = []
    map_arg(output.args, returned.append)
    return returned


def saved_for_backward(forward: Graph, backward: Graph) -> dict[Node, Node]:
    """By tensor that ``backward`` takes from ``forward``, the node that ``forward`` returns for it.

    By position, as a pass may have something else saved under an old name: a forward returns its results, then what it
    saves; a backward takes what was saved, then gradients of the results ("tangents") and the state of random numbers.

    Raises:
        ValueError: the two are not parts of one joint graph.
    """
    taken = [node for node in backward.find_nodes(op="placeholder") if _is_tensor(node) and not _is_new(node)]
    returned = [node for node in outputs_of(forward) if _is_tensor(node)]
    given = returned[len(returned) - len(taken) :]
    shapes = [[[*map(hint, node.meta["val"].shape)] for node in nodes] for nodes in (taken, given)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the backward graph takes {taken}, but the forward graph ends with {given}")
    return dict(zip(taken, given, strict=True))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_new(placeholder: Node) -> bool:
    return any(name in str(placeholder.target) for name in ("tangents", "bwd_seed", "bwd_base_offset"))


def gathers_repeat(graph: Graph) -> bool:
    """Whether some parameter is gathered more than once, because its module runs more than once."""
    names = [parameter for gather in gathers(graph) for parameter in gather.tag.parameters]
    return len(names) > len(set(names))


def tag_digest(nodes: Iterable[Node]) -> bytes:
    """Hash of which nodes carry which tags, for keys of compile caches: a graph's text does not show its tags.

    Groups are numbered anew by first appearance, so that it does not matter what a process has built before.
    """
    numbers: dict[int, int] = {}
    digest = hashlib.sha256()
    for position, node in enumerate(nodes):
        tag = tag_of(node)
        if tag is not None:
            groups = [numbers.setdefault(group, len(numbers)) for group, _ in ((tag.group, ""), *tag.parameters)]
            digest.update(repr((position, groups, replace(tag, group=0, groups=()))).encode())
    return digest.digest()


def _closure(root: Node, belongs: Any) -> list[Node]:
    found = {root: None}
    stack = [root]
    while stack:
        for user in stack.pop().users:
            if user not in found and belongs(user):
                found[user] = None
                stack.append(user)
    return list(found)
