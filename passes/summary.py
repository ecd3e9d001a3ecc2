"""What a planned step moves, when, and at what price, in names and numbers alone: no graph is kept alive by it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from torch.fx import Graph, Node

from .context import Report, Traffic
from .graph_view import UNSHARD, WAIT, aliases_of, gathers, is_launch, kind_of, phase_of, tag_of, waits_of
from .machine import cost_model
from .memory import MemoryProfile
from .simulate import Transfer, simulate
from .torch_compat import is_alias

ROOT = "(root)"


@dataclass(frozen=True)
class Group:
    """Parameters of one ``fully_shard`` call that a graph takes; the name is that of the module, from the root."""

    name: str
    params: tuple[str, ...]


@dataclass(frozen=True)
class Move:
    """One collective: a bucket of parameters or of gradients, or one of the model's own.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce" or the like.
        name: of the module, or of the first and the last one; empty if it is the model's own.
        params: its members.
        bytes: of the whole: what a gather brings, what a reduction takes.
        launched: where in the compute; the module named is the last before it whose parameters were read.
        waited: where it is waited for first; empty if nowhere.
        seconds: how long it takes, by the cost model.
        exposed: seconds that compute stands still for it, in the simulation.
        reason: why; empty if it does not.
    """

    kind: str
    name: str
    params: tuple[str, ...]
    bytes: int
    launched: str
    waited: str
    seconds: float
    exposed: float
    reason: str


@dataclass(frozen=True)
class Part:
    """One graph: the forward, the backward, or an inference.

    Attributes:
        seconds: that it takes, in the simulation.
        compute: seconds of that in which compute is busy.
        moves: its collectives, in order of their launches.
    """

    name: str
    seconds: float
    compute: float
    traffic: Traffic
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Summary:
    """A forward and its backward, or an inference, as planned for any transport.

    Attributes:
        machine: the hardware profile that times are of.
        groups: what was captured, in order of first appearance.
        peak: of live bytes, in the simulation.
    """

    machine: str
    groups: tuple[Group, ...]
    parts: tuple[Part, ...]
    peak: int

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(part.seconds for part in self.parts)

    @property
    def exposed(self) -> float:
        """Seconds that compute stands still for collectives."""
        return sum(move.exposed for part in self.parts for move in part.moves)


def summarize(parts: Mapping[str, Graph], hardware: str | None) -> Summary:
    """Sum up graphs after the passes, before ``gloo``.

    Args:
        parts: by name, in the order in which they run.
        hardware: as of ``PassConfig``.

    Raises:
        ValueError: the cost of a node cannot be known, or the backward does not belong to the forward.
    """
    graphs = [*parts.values()]
    costs = cost_model(graphs, hardware)
    timeline = simulate(graphs, costs)
    found = []
    for (name, graph), phase in zip(parts.items(), timeline.phases, strict=True):
        where = _places(graph)
        moves = tuple(_move(each, where) for each in timeline.transfers if each.phase is phase)
        found.append(Part(name, phase.seconds, phase.compute, Traffic.of(graph), moves))
    return Summary(costs.profile.name, _groups(graphs), tuple(found), MemoryProfile.of(graphs).peak)


def merged(reports: Iterable[Report]) -> list[Report]:
    """One report for each pass: of the graphs of a step together."""
    found: dict[str, list[Report]] = {}
    for report in reports:
        found.setdefault(report.name, []).append(report)
    return [
        replace(
            each[0],
            changes=sum(report.changes for report in each),
            before=reduce(add, (report.before for report in each)),
            after=reduce(add, (report.after for report in each)),
        )
        for each in found.values()
    ]


def _move(transfer: Transfer, where: Callable[[Node], str]) -> Move:
    tag, waits = transfer.tag, waits_of(transfer.start)
    return Move(
        kind_of(transfer.start),
        (tag.name or ROOT) if tag else "",
        tag.params if tag else (),
        transfer.bytes,
        where(transfer.start),
        where(min(waits)) if waits else "",
        transfer.seconds,
        transfer.exposed,
        transfer.reason,
    )


def _groups(graphs: Iterable[Graph]) -> tuple[Group, ...]:
    """By the tags of single parameters: a bucket's tag names several modules at once."""
    names: dict[int, str] = {}
    params: dict[int, dict[str, None]] = {}
    for tag in filter(None, (tag_of(node) for graph in graphs for node in graph.nodes)):
        if not tag.groups:
            names[tag.group] = tag.name or ROOT
        for group, name in tag.parameters:
            # An extension may gather several tensors of one parameter, which are numbered.
            params.setdefault(group, {}).setdefault(re.sub(r":\d+$", "", name))
    return tuple(Group(names.get(group, ""), tuple(members)) for group, members in params.items())


# -- where ------------------------------------------------------------------------------------------------------------


def _places(graph: Graph) -> Callable[[Node], str]:
    """In words, where in the compute of a graph its launches and waits are."""
    readers = _readers(graph)
    nodes = list(graph.nodes)
    computes = [node for node in nodes if _computes(node)]
    before = _carried(nodes, readers)
    after = _carried(nodes[::-1], readers)

    def where(node: Node) -> str:
        if not computes or node < computes[0]:
            return "at the start"
        if computes[-1] < node:
            return "at the end"
        follows = after.get(node)
        if follows and (node.target is WAIT and follows == _brings(node) or node not in before):
            return f"before {follows}"
        return f"in {before[node]}" if node in before else "in between"

    return where


def _carried(nodes: Iterable[Node], readers: Mapping[Node, str]) -> dict[Node, str]:
    """For each launch and wait, whose parameters were read last, in this order of nodes."""
    found, now = {}, None
    for node in nodes:
        now = readers.get(node, now)
        if now is not None and (node.target is WAIT or is_launch(node)):
            found[node] = now
    return found


def _brings(wait: Node) -> str | None:
    """The module whose parameter a wait brings."""
    tag = tag_of(wait)
    return (tag.name or ROOT) if tag and tag.phase == UNSHARD else None


def _readers(graph: Graph) -> dict[Node, str]:
    """The compute that reads unsharded parameters, and of which module they are."""
    found = {}
    for gather in gathers(graph):
        for param in gather.params:
            tag = tag_of(param.wait) or param.tag
            data = {alias for made in param.made for alias in aliases_of(made)}
            readers = (user for node in data for user in node.users if user not in data and _computes(user))
            found.update(dict.fromkeys(readers, tag.name or ROOT))
    return found


def _computes(node: Node) -> bool:
    if node.op != "call_function" or phase_of(node) is not None or is_alias(node):
        return False
    return not is_launch(node) and node.target is not WAIT
