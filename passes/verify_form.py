"""Rules for the nodes of one graph: their order, what launches and waits go together, and tags.

Each function yields the faults that it finds; it reads the graph once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch.fx import Graph, Node

from .fault import Fault
from .graph_view import GATHER_MANY, REDUCE, RESHARD, UNSHARD, WAIT, Tag, alias_root, is_launch, launch_of, tag_of
from .torch_compat import RESIZE


def in_order(graph: Graph) -> Iterator[Fault]:
    """Inputs come first, each node behind all that it reads, the one output last; and ``torch.fx`` lint is content."""
    behind: set[Node] = set()
    for node in graph.nodes:
        missing = [source for source in node.all_input_nodes if source not in behind]
        if missing:
            yield Fault(node, f"{missing[0]}, which it reads, before it", f"it before {missing[0]}")
        if node.op == "placeholder" and behind and node.prev.op != "placeholder":
            yield Fault(node, "the graph's inputs before all else", f"it behind {node.prev}")
        if (node.op == "output") != (node.next.op == "root"):
            yield Fault(node, "one output, at the end", f"{node.op} before {node.next}")
        behind.add(node)
    try:
        graph.lint()
    except RuntimeError as error:
        yield Fault(node, "what torch.fx's lint accepts", str(error))


# -- launches and waits -----------------------------------------------------------------------------------------------


def waited_for_once(graph: Graph) -> Iterator[Fault]:
    """Each output of a tagged launch is read by one wait and by nothing else, and each tagged wait has its launch.

    Launches without a tag are the user's own, who may wait for them as he likes, also in the backward.
    """
    for node in graph.nodes:
        if node.target is WAIT and _is_of_ours(node) and launch_of(node) is None:
            yield Fault(node, "a wait for a launch in its graph", f"one for {node.all_input_nodes[0]}")
        if is_launch(node) and tag_of(node) is not None:
            yield from _items_of(node)
            for output in _outputs(node):
                yield from _read_by_one_wait(node, output)


def _is_of_ours(wait: Node) -> bool:
    """But not the one that keeps the slice of a reshard, see ``graph_view.kept_slices``."""
    tag = tag_of(wait)
    return tag is not None and tag.phase != RESHARD


def _outputs(start: Node) -> list[Node]:
    return list(start.users) if start.target is GATHER_MANY else [start]


def _items_of(start: Node) -> Iterator[Fault]:
    if start.target is not GATHER_MANY:
        return
    strangers = [user for user in start.users if user.target is not operator.getitem]
    if strangers:
        yield Fault(strangers[0], f"one output of {start}", "all of them")
        return
    taken = sorted(user.args[1] for user in start.users)  # type: ignore[type-var]
    count = len(start.args[0])  # type: ignore[arg-type]
    if taken != list(range(count)):
        yield Fault(start, f"each of its {count} outputs taken once", f"taken are {taken}")


def _read_by_one_wait(start: Node, output: Node) -> Iterator[Fault]:
    """One for each tag: torch merges launches that send the same gradient of several parameters, but not the waits."""
    waits: dict[Tag | None, Node] = {}
    for user in output.users:
        if user.target is not WAIT:
            yield Fault(user, f"a wait for {start} before what it brings is read", f"it reads {output}")
        elif tag_of(user) in waits:
            yield Fault(user, f"one wait for {output}", f"a second, after {waits[tag_of(user)]}")
        waits[tag_of(user)] = user
    if not output.users:
        yield Fault(output, "a wait for it", "none")


# -- tags -------------------------------------------------------------------------------------------------------------


def tagged(graph: Graph) -> Iterator[Fault]:
    """All nodes of a transition are tagged, and those of a collective with the parameters that it moves."""
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is None:
            yield from _gap(node)
        else:
            yield from _well_formed(node, tag)
            if is_launch(node):
                yield from _members(node, tag)


def _gap(node: Node) -> Iterator[Fault]:
    """A node without a tag that stands within a transition, or frees what one made."""
    if node.op != "call_function":
        return
    if node.target is RESIZE:
        freed = alias_root(node.args[0])  # type: ignore[arg-type]
        if tag_of(freed) is not None:
            yield Fault(node, f"a tag, as it frees {freed}", "none")
    before = [tag for tag in map(tag_of, node.all_input_nodes) if tag is not None]
    behind = [tag for tag in map(tag_of, node.users) if tag is not None]
    if is_launch(node):  # what a user launches is waited for by a user
        before = behind
    elif node.target is WAIT:
        behind = before
    if any(_overlap(source, user) for source in before for user in behind):
        yield Fault(node, "a tag, as nodes before or behind it of the same transition have", "none")


def _overlap(left: Tag, right: Tag) -> bool:
    return left.phase == right.phase and not set(left.parameters).isdisjoint(right.parameters)


def _well_formed(node: Node, tag: Tag) -> Iterator[Fault]:
    count = len(tag.params)
    if not count or len(tag.index) != count or len(tag.groups) not in (0, count):
        yield Fault(node, "a position, and a group, for each parameter of its tag", str(tag))
    elif len(set(tag.parameters)) != count:
        yield Fault(node, "each parameter once in its tag", str(list(tag.params)))
    elif tag.phase not in (UNSHARD, RESHARD, REDUCE):
        yield Fault(node, "a phase", tag.phase)


def _members(start: Node, tag: Tag) -> Iterator[Fault]:
    """What a launch brings has the tags of its parameters: of several outputs each has that of one, in order."""
    expected = [tag.parameters]
    if start.target is GATHER_MANY:
        expected = [[parameter] for parameter in tag.parameters]
    outputs = sorted(_outputs(start), key=lambda output: output.args[1])  # type: ignore[arg-type, return-value]
    if len(expected) != len(outputs):
        yield Fault(start, f"{len(outputs)} parameters, one for each of its outputs", str(tag))
    for parameters, output in zip(expected, outputs, strict=False):
        waits = [user for user in output.users if user.target is WAIT]
        for node in (output, *(waits if len(waits) == 1 else ())):
            found = tag_of(node)
            if found is None or found.parameters != parameters or found.phase != tag.phase:
                yield Fault(node, f"a tag of {[name for _, name in parameters]}", str(found))
