"""Ways to break a graph, each with the node that the verifier must name; ``None`` where a graph has nothing to break.

What breaks a rule of graphs takes a graph. What breaks one of passes takes a graph too, and is run as a pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from fsdp_compile.passes import RESIZE
from fsdp_compile.passes.graph_view import (
    GATHER_MANY,
    Collective,
    Tag,
    aliases_of,
    gathers,
    reductions,
    saved_for_backward,
    set_tag,
    tag_of,
)
from fsdp_compile.passes.torch_compat import copy_node, emit, is_alias, is_marked_regather

aten = torch.ops.aten
Break = Callable[[Graph], Node | None]


def first_gather(graph: Graph) -> Collective | None:
    """The first whose data are read by compute."""
    return next((each for each in gathers(graph) if all(wait.users for wait in each.waits)), None)


def first_reader(wait: Node) -> Node:
    """The first node that takes data of what ``wait`` brings."""
    readers = {user for alias in aliases_of(wait) for user in alias.users if not is_alias(user)}
    return min(reader for reader in readers if reader.target is not operator.getitem)


def copied(node: Node) -> Node:
    """A second ``node``, right behind it, with the same tag."""
    with node.graph.inserting_after(node):
        copy = copy_node(node.graph, node, {source: source for source in node.all_input_nodes})
    copy.meta["custom"] = node.meta["custom"]
    return copy


# -- order ------------------------------------------------------------------------------------------------------------


def reads_what_comes_later(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    if gather is None:
        return None
    gather.start.prepend(gather.waits[0])
    return gather.waits[0]


def input_behind(graph: Graph) -> Node | None:
    late = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_before(late):
        graph.call_function(aten.zeros.default, ([1],)).meta["val"] = late.meta["val"]
    return late


def node_behind_the_output(graph: Graph) -> Node | None:
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_after(output):
        graph.call_function(aten.zeros.default, ([1],))
    return output


# -- launches and waits -----------------------------------------------------------------------------------------------


def no_wait(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    if gather is None:
        return None
    (wait,) = gather.waits[:1]
    (output,) = wait.all_input_nodes
    wait.replace_all_uses_with(output)
    graph.erase_node(wait)
    return next(iter(output.users))


def second_wait(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    return copied(gather.waits[-1]) if gather else None


def second_wait_for_a_reduction(graph: Graph) -> Node | None:
    reduction = next(reductions(graph), None)
    return copied(reduction.waits[0]) if reduction else None


def read_before_the_wait(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    if gather is None:
        return None
    (output,) = gather.waits[0].all_input_nodes
    with graph.inserting_before(gather.waits[0]):
        return emit(graph, aten.clone.default, output)


def launch_for_nobody(graph: Graph) -> Node | None:
    reduction = next(reductions(graph), None)
    return copied(reduction.start) if reduction else None


def output_for_nobody(graph: Graph) -> Node | None:
    gather = next((each for each in gathers(graph) if each.start.target is GATHER_MANY), None)
    if gather is None:
        return None
    output = copied(gather.waits[0].all_input_nodes[0])
    copied(gather.waits[0]).replace_input_with(gather.waits[0].all_input_nodes[0], output)
    return gather.start


def wait_for_nothing(graph: Graph) -> Node | None:
    reduction = next(reductions(graph), None)
    if reduction is None:
        return None
    wait = copied(reduction.waits[0])
    wait.replace_input_with(reduction.start, reduction.inputs[0])
    return wait


# -- tags -------------------------------------------------------------------------------------------------------------


def untagged(node: Node) -> Node:
    node.meta = {**node.meta, "custom": {}}
    return node


def untagged_launch(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    return untagged(gather.start) if gather else None


def untagged_reduction(graph: Graph) -> Node | None:
    reduction = next(reductions(graph), None)
    return untagged(reduction.start) if reduction else None


def untagged_wait(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    return untagged(gather.waits[-1]) if gather else None


def untagged_output(graph: Graph) -> Node | None:
    gather = next((each for each in gathers(graph) if each.start.target is GATHER_MANY), None)
    return untagged(gather.waits[-1].all_input_nodes[0]) if gather else None


def untagged_between(graph: Graph) -> Node | None:
    """A cast of a gradient, a part of a packed one, or whatever else stands between nodes of a reduction."""
    for reduction in reductions(graph):
        for node in reduction.inputs:
            before = [tag_of(source) for source in node.all_input_nodes]
            if any(tag is not None and tag.phase == "reduce" for tag in before):
                return untagged(node)
    return None


def swapped_members(graph: Graph) -> Node | None:
    gather = next((each for each in gathers(graph) if len(each.tag.params) == len(each.waits) > 1), None)
    if gather is None:
        return None
    tag = gather.tag
    changed = replace(tag, params=tag.params[::-1], index=tag.index[::-1], groups=tag.groups[::-1])
    set_tag(gather.start, changed)
    return next(
        wait.all_input_nodes[0]
        for wait, parameter in zip(gather.waits, changed.parameters, strict=True)
        if tag_of(wait).parameters != [parameter]
    )


def member_twice(graph: Graph) -> Node | None:
    """As if a bucket gathered a shard twice."""
    gather = next((each for each in gathers(graph) if len(each.tag.params) > 1), None)
    if gather is None:
        return None
    members = [0, 0, *range(2, len(gather.tag.params))]
    set_tag(gather.start, gather.tag.only(members))
    return gather.start


def member_missing(graph: Graph) -> Node | None:
    gather = next((each for each in gathers(graph) if each.start.target is GATHER_MANY), None)
    if gather is None:
        return None
    set_tag(gather.start, gather.tag.only(range(len(gather.tag.params) - 1)))
    return gather.start


def no_position(graph: Graph) -> Node | None:
    reduction = next(reductions(graph), None)
    if reduction is None:
        return None
    set_tag(reduction.start, replace(reduction.tag, index=()))
    return reduction.start


def no_phase(graph: Graph) -> Node | None:
    reduction = next(reductions(graph), None)
    if reduction is None:
        return None
    set_tag(reduction.start, replace(reduction.tag, phase="gather"))
    return reduction.start


# -- memory -----------------------------------------------------------------------------------------------------------


def free_behind(node: Node, freed: Node, tag: Tag | None) -> Node:
    with node.graph.inserting_after(node):
        free = node.graph.call_function(RESIZE, (freed, 0))
    if tag is not None:
        set_tag(free, replace(tag, phase="reshard"))
    return free


def read_after_free(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    if gather is None:
        return None
    param = gather.waits[0]
    reader = first_reader(param)
    free_behind(reader.prev, param, tag_of(param))
    return reader


def read_after_free_of_a_view(graph: Graph) -> Node | None:
    """Freed is a view, read is another view, or the whole."""
    gather = first_gather(graph)
    if gather is None:
        return None
    param = gather.waits[0]
    reader = first_reader(param)
    with graph.inserting_before(reader):
        view = emit(graph, aten.reshape.default, param, [-1])
        again = emit(graph, aten.alias.default, param)
        free = graph.call_function(RESIZE, (view, 0))
        read = emit(graph, aten.clone.default, again)
    for node in (view, again, free):
        set_tag(node, tag_of(param))
    return read


def free_twice(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    if gather is None:
        return None
    (output,) = graph.find_nodes(op="output")
    param = gather.waits[0]
    if any(alias in output.all_input_nodes for alias in aliases_of(param)):
        return None
    first = free_behind(output.prev, param, tag_of(param))
    return free_behind(first, aliases_of(param)[-1], tag_of(param))


def returned_after_free(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    (output,) = graph.find_nodes(op="output")
    if gather is None or not any(alias in output.all_input_nodes for alias in aliases_of(gather.waits[0])):
        return None
    free_behind(output.prev, gather.waits[0], gather.tag)
    return output


def free_before_the_wait(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    if gather is None:
        return None
    (output,) = gather.waits[0].all_input_nodes
    # Of the other side: what is sent, which the transport still reads.
    return free_behind(output, gather.inputs[0], gather.tag)


def write_to_what_is_sent(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    if gather is None:
        return None
    with graph.inserting_before(min(gather.waits)):
        return emit(graph, aten.mul_.Scalar, gather.inputs[0], 2)


def read_while_it_is_reduced(graph: Graph) -> Node | None:
    """Gradients that are reduced where they lie, as on gloo."""
    start = next(
        iter(graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_reduce_.default)), None
    )
    if start is None:
        return None
    with graph.inserting_after(start):
        return emit(graph, aten.clone.default, start.args[0])


def untagged_free(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    (output,) = graph.find_nodes(op="output")
    return free_behind(output.prev, gather.waits[0], None) if gather else None


ORDER = (reads_what_comes_later, input_behind, node_behind_the_output)
WAITS = (
    *(no_wait, second_wait, second_wait_for_a_reduction, read_before_the_wait),
    *(launch_for_nobody, output_for_nobody, wait_for_nothing),
)
TAGS = (
    *(untagged_launch, untagged_reduction, untagged_wait, untagged_output, untagged_between, untagged_free),
    *(swapped_members, member_twice, member_missing, no_position, no_phase),
)
MEMORY = (
    *(read_after_free, read_after_free_of_a_view, free_twice, returned_after_free, free_before_the_wait),
    *(write_to_what_is_sent, read_while_it_is_reduced),
)
OF_GRAPHS: tuple[Break, ...] = (*ORDER, *WAITS, *TAGS, *MEMORY)


# -- what a pass may not do -------------------------------------------------------------------------------------------


def drops_a_reduction(graph: Graph) -> Node | None:
    reduction = next(reductions(graph), None)
    if reduction is None:
        return None
    (wait,) = reduction.waits
    with graph.inserting_before(wait):
        made = emit(graph, aten.zeros.default, list(wait.meta["val"].shape), result=wait.meta["val"])
    wait.replace_all_uses_with(made)
    graph.erase_node(wait)
    graph.erase_node(reduction.start)
    return reduction.start


def gathers_again(graph: Graph) -> Node | None:
    gather = next((each for each in gathers(graph) if len(each.waits) == 1), None)
    return _again(gather)


def reduces_again(graph: Graph) -> Node | None:
    return _again(next(reductions(graph), None))


def _again(collective: Collective | None) -> Node | None:
    if collective is None or collective.start.target is GATHER_MANY:
        return None
    start = copied(collective.start)
    copied(collective.waits[0]).replace_input_with(collective.start, start)
    return start


def moves_another(graph: Graph) -> Node | None:
    """All of a launch says that it is another parameter's."""
    reduction = next(reductions(graph), None)
    if reduction is None:
        return None
    tag = replace(reduction.tag, params=tuple(f"{name}.other" for name in reduction.tag.params))
    set_tag(reduction.start, tag)
    set_tag(reduction.waits[0], tag)
    return reduction.start


def sends_more(graph: Graph) -> Node | None:
    """Of another dtype."""
    gather = next((each for each in gathers(graph) if each.start.target is not GATHER_MANY), None)
    if gather is None:
        return None
    with graph.inserting_before(gather.start):
        cast = emit(graph, torch.ops.prims.convert_element_type.default, gather.inputs[0], torch.complex64)
    set_tag(cast, gather.tag)
    gather.start.replace_input_with(gather.inputs[0], cast)
    return gather.start


def frees_more(graph: Graph) -> Node | None:
    gather = first_gather(graph)
    (output,) = graph.find_nodes(op="output")
    if gather is None or any(alias in output.all_input_nodes for alias in aliases_of(gather.waits[0])):
        return None
    return free_behind(output.prev, gather.waits[0], tag_of(gather.waits[0]))


def launches_out_of_order(graph: Graph) -> Node | None:
    """The last gather first, with what is sent."""
    launches = [each for each in gathers(graph) if all(node.op == "placeholder" for node in each.inputs)]
    if len(launches) < 2:
        return None
    first, last = launches[0].start, launches[-1].start
    if first.args[-1] != last.args[-1]:
        return None
    first.prepend(last)
    return first


def saves_a_whole_parameter(forward: Graph, backward: Graph) -> Node | None:
    """Which the joint graph has freed."""
    made = [node for each in gathers(forward) for param in each.params for node in param.unsharded]
    freed = [node for node in made if is_marked_regather(node)]
    return save(freed[0], forward, backward) if freed else None


def save(whole: Node, forward: Graph, backward: Graph) -> Node:
    """Save ``whole`` for the backward, in place of what is saved first; the backward takes it."""
    taken, given = next(iter(saved_for_backward(forward, backward).items()))
    (output,) = forward.find_nodes(op="output")
    returned = list(output.args[0])
    returned[len(returned) - 1 - returned[::-1].index(given)] = whole
    output.args = (tuple(returned),)
    taken.meta = {**taken.meta, "val": whole.meta["val"]}
    return whole


OF_PASSES: tuple[Break, ...] = (
    *(drops_a_reduction, gathers_again, reduces_again, moves_another, sends_more),
    *(frees_more, launches_out_of_order),
)
