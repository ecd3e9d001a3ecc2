"""Has a graph say which collectives it is about to launch: to a profiler, and to whoever listens.

    ... ─ START ─ START ─ ...   ->   ... ─ ANNOUNCE ─ START ─ START ─ ...

The one operator says all that the graph launches, in order: "fsdp_compile forward: all_gather [blocks.0]; ...". A
profiler that runs shows this text as a mark in its trace. As it is part of the graph, it is part of the code that a
compiler makes of it, also where that comes from a cache and no pass runs. Launches run in graph order, so the n-th
launch after the mark is the n-th in the text.

Listeners are told for each process group what is launched in it, a line each, with what ranks must agree on: kind,
dtype, bytes and members.

The names are those of the plan: where ``gloo`` has written several launches for a collective, it says "x 3" after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import groupby

import torch
from torch.fx import Graph, Node

from .context import PassContext, Report, Traffic
from .graph_view import Collective, has_backward, is_launch, planned_of, process_group_of, tag_of, title_of
from .torch_compat import emit, profiler_range

PREFIX = "fsdp_compile"

_library = torch.library.Library("fsdp_passes", "FRAGMENT")
# It takes what the first launch sends, so that a compiler knows where it belongs.
_library.define("announce(Tensor[] sent, str text, str[] groups, str[] skeletons) -> ()")

ANNOUNCE = torch.ops.fsdp_passes.announce.default
torch.fx.node.has_side_effect(ANNOUNCE)  # so that it is not taken for dead


Listener = Callable[[dict[str, str]], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Have a graph, whenever it runs, tell ``listener`` what is to be launched, by name of the process group."""
    _listeners.append(listener)


@torch.library.impl(_library, "announce", "CompositeExplicitAutograd")
def _announce(sent: list[torch.Tensor], text: str, groups: list[str], skeletons: list[str]) -> None:
    for listener in _listeners:
        listener(dict(zip(groups, skeletons, strict=True)))
    with profiler_range(text):
        pass


@torch.library.register_fake("fsdp_passes::announce", lib=_library)
def _(sent: list[torch.Tensor], text: str, groups: list[str], skeletons: list[str]) -> None:
    pass


def announce(graph: Graph, context: PassContext) -> Report:
    """Add the mark before the first launch, if there is a launch and no mark.

    Args:
        graph: forward or backward graph, or a graph without backward, after all other passes.
        context: shared by the passes; not read.
    """
    traffic = Traffic.of(graph)
    launches = [node for node in graph.nodes if is_launch(node)]
    announced = graph.find_nodes(op="call_function", target=ANNOUNCE)
    if not launches or announced:
        return Report("announce", 0, traffic, traffic)
    first = launches[0]
    skeletons = _skeletons(launches)
    text = announcement(_phase(graph), _counted(launches))
    with graph.inserting_before(first):
        emit(graph, ANNOUNCE, first.all_input_nodes[:1], text, [*skeletons], [*skeletons.values()])
    graph.lint()
    return Report("announce", 1, traffic, Traffic.of(graph))


def announcement(phase: str, launches: Iterable[tuple[str, int]]) -> str:
    """The text of a mark.

    Args:
        phase: "forward" or "backward".
        launches: titles of collectives, in order, and how many launches each takes.
    """
    listed = [title if count == 1 else f"{title} x {count}" for title, count in launches]
    return f"{PREFIX} {phase}: {'; '.join(listed)}"


def _phase(graph: Graph) -> str:
    return "backward" if has_backward(graph) else "forward"


def _counted(launches: list[Node]) -> Iterable[tuple[str, int]]:
    for (_, title), parts in groupby(map(planned_of, launches)):
        yield title, len([*parts])


def _skeletons(launches: list[Node]) -> dict[str, str]:
    """By process group what is launched in it, a line each."""
    found: dict[str, list[str]] = {}
    for node in launches:
        found.setdefault(process_group_of(node), []).append(line_of(node))
    return {group: "\n".join(lines) for group, lines in found.items()}


def line_of(start: Node) -> str:
    """Of one launch: if it is ours, with all that is the same on all ranks; sizes of activations need not be."""
    tag = tag_of(start)
    if tag is None:
        return title_of(start)
    sent = Collective(tag, start)
    members = hashlib.sha256("\n".join(tag.params).encode()).hexdigest()[:8]
    dtypes = "+".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(sent.dtypes))
    how = " ".join(str(each) for each in sent.how if isinstance(each, str) and each != process_group_of(start))
    size = f"{sent.input_bytes} B of {len(tag.params)} parameters ({members})"
    return " ".join(filter(None, [title_of(start), how, f"{dtypes},", size]))
