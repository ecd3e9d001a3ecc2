"""What is saved and gathered where fewer ranks keep a slice, in a small graph made by hand, run on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_world import text_of
from graph_maker import WORLD, GraphMaker
from simulated_ranks import random_inputs, run_on_all_ranks, same_bits
from torch.fx import Graph, Node

from fsdp_compile.passes import PassContext, Report, keep_slices
from fsdp_compile.passes.graph_view import Tag, gathers, set_tag, tag_of
from fsdp_compile.passes.torch_compat import emit

AMONG = "fewer"  # the process group that keeps slices
aten = torch.ops.aten


def gathered(make: GraphMaker, sliced: bool) -> tuple[Node, Node]:
    """The whole of parameter "a" and, as a view, the same; ``regather`` has noted that a slice is kept."""
    shard, index = make.input(), make.input(torch.int64, (1,))
    whole = make.gather(shard, "a")
    tag = tag_of(whole)
    assert tag is not None
    if sliced:
        set_tag(whole, Tag(tag.group, tag.name, tag.params, tag.index, tag.phase, (WORLD, AMONG, index.name)))
    return whole, emit(make.graph, aten.t.default, whole)


def parts(sliced: bool = True, saved: str = "whole") -> tuple[Graph, Graph]:
    """A forward that reads the whole and saves it, or something else, and the backward that reads what is saved."""
    make = GraphMaker()
    whole, view = gathered(make, sliced)
    result, activation = make.double(view), make.double(whole)
    kept = {"whole": whole, "activation": activation}[saved]
    forward = make.finish(result, activation, kept)
    back = GraphMaker()
    again = back.input(size=tuple(kept.meta["val"].shape), name=kept.name)
    gradient = back.double(emit(back.graph, aten.t.default, again))
    return forward, back.finish(back.reduce(emit(back.graph, aten.t.default, gradient), "a"))


def run(forward: Graph, backward: Graph) -> tuple[Any, Any]:
    """What both compute, one after the other, without what is saved; rank r keeps slice r."""
    inputs = random_inputs(forward, WORLD)
    for rank, of_rank in enumerate(inputs):
        of_rank[1] = torch.tensor([rank])
    results = run_on_all_ranks(forward, inputs)
    return [of_rank[:-1] for of_rank in results], run_on_all_ranks(backward, [of_rank[-1:] for of_rank in results])


def applied(forward: Graph, backward: Graph) -> Report:
    report = keep_slices(forward, backward, PassContext())
    forward.lint()
    backward.lint()
    return report


def saved_size(forward: Graph) -> int:
    (output,) = forward.find_nodes(op="output")
    return int(output.args[0][-1].meta["val"].numel())


def test_the_slice_is_saved_and_the_whole_is_gathered_among_fewer() -> None:
    forward, backward = parts()
    before, size = run(forward, backward), saved_size(forward)
    assert applied(forward, backward).changes == 1
    assert saved_size(forward) == size // WORLD
    (gather,) = gathers(backward)
    assert gather.how == (WORLD, AMONG) and gather.tag.params == ("a",)
    assert same_bits(before, run(forward, backward))


def test_running_again_changes_nothing() -> None:
    forward, backward = parts()
    applied(forward, backward)
    once = text_of(forward), text_of(backward)
    assert applied(forward, backward).changes == 0
    assert once == (text_of(forward), text_of(backward))


@pytest.mark.parametrize("case", [{"sliced": False}, {"saved": "activation"}], ids=["not sliced", "not saved"])
def test_what_else_is_saved_is_left_alone(case: dict[str, Any]) -> None:
    forward, backward = parts(**case)
    before = text_of(forward), text_of(backward)
    assert applied(forward, backward).changes == 0
    assert before == (text_of(forward), text_of(backward))
