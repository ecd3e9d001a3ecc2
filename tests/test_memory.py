"""Live bytes: small graphs by hand, and random models beside the storages of real tensors."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

import pytest
import torch
from fake_world import fake_world, graphs_of
from graph_maker import GraphMaker, aten
from models import Net, shard
from random_models import Tree
from real_storages import real_live_bytes
from test_passes_properties import on_random_trees
from torch.fx import Graph, Node

from fsdp_compile import fully_shard
from fsdp_compile.passes import MemoryProfile, PassContext, bucket
from fsdp_compile.passes.memory import ACTIVATIONS, BUFFERS, CATEGORIES, GRADIENTS, INPUTS, UNSHARDED
from fsdp_compile.passes.storages import Storages
from fsdp_compile.passes.torch_compat import RESIZE, c10d, emit

UNIT = 4 * 3 * 4  # bytes of a GraphMaker's input; a gather over its two ranks brings twice as much


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(size=2):
        yield


def live(*graphs: Graph) -> list[float]:
    """Units alive while each node runs."""
    return [size / UNIT for size in MemoryProfile.of(graphs).live]


def composition(*graphs: Graph) -> dict[str, float]:
    """Units of each category at the peak, without those that are not there."""
    profile = MemoryProfile.of(graphs)
    parts = profile.composition(profile.peak_position)
    assert list(parts) == list(CATEGORIES) and sum(parts.values()) == profile.peak
    return {category: size / UNIT for category, size in parts.items() if size}


# -- one graph --------------------------------------------------------------------------------------------------------


#             x   sin  sin  output
# x           ──────────────────    the caller's
# sin             ────────
# sin of it            ─────────
def test_temporaries() -> None:
    make = GraphMaker()
    graph = make.finish(emit(make.graph, aten.sin.default, emit(make.graph, aten.sin.default, make.input())))
    assert live(graph) == [1, 2, 3, 2]


def test_what_nobody_reads_is_gone_at_once() -> None:
    make = GraphMaker()
    source = make.input()
    make.double(source)
    assert live(make.finish(make.double(source))) == [1, 2, 2, 2]


#             x    gather  wait  slice  t   sin  sin  output
# x           ──────────────────────────────────────────────
# gathered         ───────────────────────────
# sin                                       ────────────────
def test_views_keep_what_they_see() -> None:
    make = GraphMaker()
    part = emit(make.graph, aten.slice.Tensor, make.gather(make.input(), "a"), 0, 0, 2)
    turned = emit(make.graph, aten.t.default, part)
    made = emit(make.graph, aten.cat.default, [turned] * 4)  # as large as the gathered
    assert live(make.finish(make.double(make.double(made)))) == [1, 3, 3, 3, 3, 5, 5, 5, 3]


@pytest.mark.parametrize(("turned", "units"), [(False, 1), (True, 2)], ids=["view", "copy"])
def test_reshapes(turned: bool, units: int) -> None:
    """They copy where no view is possible."""
    make = GraphMaker()
    source = make.input()
    source = emit(make.graph, aten.t.default, source) if turned else source
    graph = make.finish(emit(make.graph, aten.reshape.default, source, [12]))
    assert live(graph)[-1] == units == real_live_bytes(graph)[-1] / UNIT


def test_several_results() -> None:
    """Each is its own memory, and all are there until the last is taken out; parts of a split are the whole."""
    make = GraphMaker()
    ones = emit(make.graph, aten.aminmax.default, make.input())
    least, most = (emit(make.graph, getitem, ones, index) for index in range(2))
    halves = emit(make.graph, aten.split.Tensor, make.double(most.args[0].args[0]), 2)  # type: ignore[union-attr]
    graph = make.finish(least, emit(make.graph, getitem, halves, 0))
    assert MemoryProfile.of([graph]).live == real_live_bytes(graph)
    storages = Storages.in_graphs([graph])
    assert len(set(storages.of[ones])) == 2 and len(set(storages.of[halves])) == 1


def test_written_in_place() -> None:
    make = GraphMaker()
    kept, new = make.input(), make.double(make.input())
    graph = make.finish(make.double(emit(make.graph, aten.copy_.default, kept, new)))
    assert live(graph) == [2, 2, 3, 3, 3, 3]
    assert MemoryProfile.of([graph]).live == real_live_bytes(graph)


def test_expanded_inputs_are_as_large_as_their_memory() -> None:
    make = GraphMaker()
    node = make.input()
    with make.mode:
        node.meta["val"] = torch.zeros(1).expand(4, 3)
    assert MemoryProfile.of([make.finish(node)]).peak == 4


#             x   gather  wait  sin  free  sin  output
# gathered        ────────────────
# sin                           ────────────
def test_frees(world: None) -> None:
    make = GraphMaker()
    whole = make.gather(make.input(), "a")
    made = make.double(whole)
    make.graph.call_function(RESIZE, (whole, 0))
    view = emit(make.graph, aten.view.default, whole, [-1])  # would keep it alive
    graph = make.finish(make.double(made))
    assert live(graph) == [1, 3, 3, 5, 3, 3, 5, 3]
    graph.erase_node(view)  # no real view is of memory that is not there
    assert MemoryProfile.of([graph]).live == real_live_bytes(graph)


def test_storage_that_grows_again(world: None) -> None:
    make = GraphMaker()
    whole = make.gather(make.input(), "a")
    for size in (0, 2 * UNIT):
        make.graph.call_function(RESIZE, (whole, size))
    graph = make.finish(make.double(whole))
    assert live(graph) == [1, 3, 3, 1, 3, 5, 3]
    assert MemoryProfile.of([graph]).live == real_live_bytes(graph)


#             x  y   cast  launch  sin  wait  output
# cast               ───────────────────
# reduced                  ──────────────────────
def test_a_collective_holds_what_it_takes(world: None) -> None:
    make = GraphMaker()
    source = make.double(make.input())
    wait = make.reduce(make.cast(source, torch.float64, "a"), "a")
    other = make.double(source)
    other.append(wait)
    graph = make.finish(wait)
    #                     x  sum cast launch  other wait output
    assert live(graph) == [1, 2, 4, 5, 6, 4, 2]
    assert MemoryProfile.of([graph]).live == real_live_bytes(graph)


def test_a_bucket_holds_what_it_takes_to_its_last_wait(world: None) -> None:
    make = GraphMaker()
    first, second = (make.gather(make.double(make.input()), param) for param in "ab")
    graph = make.finish(first)
    bucket(graph, PassContext())
    (*_, last) = [node for node in graph.nodes if node.op == "call_function"]
    assert last.target is second.target and live(graph)[-2:] == [2 + 2 + 4, 2 + 2]


def test_without_a_wait_it_is_held_to_the_end() -> None:
    make = GraphMaker()
    wait = make.gather(make.double(make.input()), "a")
    graph = make.finish(make.double(wait))
    (start,) = wait.all_input_nodes
    wait.replace_all_uses_with(start)
    graph.erase_node(wait)
    assert live(graph) == [1, 2, 4, 6, 4]


def test_constants_are_there_from_the_start() -> None:
    make = GraphMaker()
    made = make.double(make.input())
    constant = make.graph.get_attr("constant")
    constant.meta["val"] = made.meta["val"]
    make.graph.output(make.add(made, constant))
    assert live(make.graph) == [2, 3, 3, 4, 3]


# -- forward and backward ---------------------------------------------------------------------------------------------


def pair() -> tuple[Graph, Graph]:
    """A forward that saves an activation, a view of it and a shard, and returns something else."""
    forward, backward = GraphMaker(), GraphMaker()
    shard, batch = forward.input(name="primals_1"), forward.input(name="primals_2")
    saved = forward.double(batch)
    view = emit(forward.graph, aten.view.default, saved, [12])
    result = forward.add(forward.double(saved), shard)
    names = ("primals_1", "saved", "view", "tangents_1")
    again, taken, flat, gradient = (
        backward.input(name=name, size=(12,) if name == "view" else (4, 3)) for name in names
    )
    first = backward.add(gradient, taken)
    second = backward.add(first, emit(backward.graph, aten.view.default, flat, [4, 3]))
    third = backward.add(second, again)
    return forward.finish(result, shard, saved, view), backward.finish(third)


def test_a_pair() -> None:
    """The caller keeps shard, batch and result; what is saved goes with the last view of it."""
    assert live(*pair()) == [
        *(2, 2, 3, 3, 4, 5, 4),  # inputs, saved, view, temporary, result, output
        *(5, 5, 5, 5),  # with the gradient of the result
        *(6, 5, 6, 5, 4),  # first, view, second, third: each with the one before
    ]


def test_a_pair_as_real_tensors_have_it() -> None:
    graphs = pair()
    assert MemoryProfile.of(graphs).live == real_live_bytes(*graphs)


def test_a_backward_alone_owns_what_was_saved() -> None:
    _, backward = pair()
    # Nobody knows here that two of its inputs are one: shard, saved, its view, gradient.
    assert live(backward) == [4, 4, 4, 4, 5, 3, 4, 3, 2]


def test_graphs_that_do_not_belong_together() -> None:
    forward, backward = pair()
    (output,) = forward.find_nodes(op="output")
    output.args = (output.args[0][1:3],)  # type: ignore[index]
    with pytest.raises(ValueError, match="the backward graph takes .*primals_1.*but the forward graph ends with"):
        MemoryProfile.of((forward, backward))


def test_saved_under_another_name_and_with_sizes() -> None:
    """A pass may replace what is saved; sizes that are saved come last in a forward and first in a backward."""
    forward, backward = pair()
    (output,) = forward.find_nodes(op="output")
    size = forward.find_nodes(op="placeholder")[0]
    with forward.inserting_before(output):
        number = forward.call_function(aten.sym_size.int, (size, 0))
    number.meta["val"] = 4
    output.args = ((*output.args[0], number, None),)  # type: ignore[misc]
    first = next(iter(backward.nodes))
    with backward.inserting_before(first):
        backward.placeholder("number").meta["val"] = 4
    before = live(*pair())
    assert live(forward, backward) == [*before[:6], before[5] - 1, *before[6:7], before[7], *before[7:]]


# -- of what ----------------------------------------------------------------------------------------------------------


def test_categories_of_a_forward(world: None) -> None:
    make = GraphMaker()
    source = make.input()
    cast = make.cast(make.input(torch.float64), torch.float32, "a")
    make.double(source)
    assert composition(make.finish(make.gather(cast, "a"))) == {INPUTS: 3, UNSHARDED: 2, BUFFERS: 1}


def test_categories_of_a_backward(world: None) -> None:
    make = GraphMaker()
    saved = make.input(size=(8, 3), name="saved")
    gradient = make.double(make.input(size=(8, 3), name="tangents_1"))
    reduced = make.reduce(make.cast(gradient, torch.float64, "a"), "a")
    graph = make.finish(reduced, make.add(gradient, saved))
    # At the launch: the tensor that was saved; the gradient; its cast; its reduced half.
    assert composition(graph) == {ACTIVATIONS: 2, GRADIENTS: 2 + 2, BUFFERS: 4}


def test_categories_between_two_reductions(world: None) -> None:
    """What a replica group reduces again is a gradient; what is packed for it is not."""
    make = GraphMaker()
    reduced = [make.reduce(make.input(name=f"tangents_{param}"), param) for param in "ab"]
    graph = make.finish(*(make.all_reduce(make.double(each), param) for each, param in zip(reduced, "ab", strict=True)))
    bucket(graph, PassContext())
    made = [each for each in MemoryProfile.of([graph]).lifetimes if each.maker.op != "placeholder"]
    assert [(each.maker.target, each.category) for each in made] == [
        (aten.cat.default, BUFFERS),
        (c10d.reduce_scatter_tensor.default, GRADIENTS),
        (aten.add.Tensor, GRADIENTS),
        (aten.add.Tensor, GRADIENTS),
        (aten.cat.default, BUFFERS),
        (c10d.all_reduce.default, GRADIENTS),
    ]


# -- beside real tensors ----------------------------------------------------------------------------------------------


@on_random_trees(examples=14)
def test_as_real_tensors_have_it(tree: Tree) -> None:
    """To the byte, at every node, before and after the passes."""
    with fake_world(tree.world):
        stages = dict(graphs_of(tree.build(), tree.example()))
        for when in ("before", "after"):
            check(stages[f"forward {when}"], stages[f"backward {when}"])


@on_random_trees(examples=8)
def test_as_real_tensors_have_it_without_backward(tree: Tree) -> None:
    """Here graphs free what they have gathered."""
    with fake_world(tree.world), torch.no_grad():
        for _, graph in graphs_of(tree.build(), tree.example()):
            check(graph)


def check(*graphs: Graph) -> None:
    profile = MemoryProfile.of(graphs)
    real = real_live_bytes(*graphs)
    for node, model, measured in zip(profile.nodes, profile.live, real, strict=True):
        assert model == measured, f"{node.format_node()}: {model} instead of {measured}"


def test_dynamic_sizes_count_as_traced() -> None:
    """And are not made static by looking at them."""
    static, dynamic = compiled(dynamic=False), compiled(dynamic=True)
    guards = len(shape_guards(dynamic[0]))
    assert MemoryProfile.of(dynamic).peak == MemoryProfile.of(static).peak
    assert len(shape_guards(dynamic[0])) == guards


def compiled(dynamic: bool) -> list[Graph]:
    with fake_world(size=2):
        stages = dict(graphs_of(shard(Net(), fully_shard), torch.ones(6, 12), dynamic=dynamic))
    return [stages["forward after"], stages["backward after"]]


def sizes_of(node: Node) -> tuple[int | torch.SymInt, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def shape_guards(graph: Graph) -> list[object]:
    (size, *_) = [size for node in graph.nodes for size in sizes_of(node) if isinstance(size, torch.SymInt)]
    return size.node.shape_env.guards
