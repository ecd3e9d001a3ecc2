"""Ranks whose inputs differ in length: each recompiles when it must, and all communicate alike."""

import re

import pytest
import torch
import torch.distributed as dist
from fake_world import text_of
from models import shard
from traced import SmallNet, Training, assert_equal, compiled, graphs

from fsdp_compile import fully_shard
from fsdp_compile.passes import tag_digest
from fsdp_compile.passes.graph_view import gathers
from fsdp_compile.torch_compat import dynamo_counts

# Of each rank, step by step.
LENGTHS = {
    "at different steps": ((4, 4, 6, 6, 4, 8), (5, 7, 7, 5, 9, 9)),
    "on one rank only": ((4, 4, 4, 4), (4, 5, 6, 7)),
    "never the same": ((3, 4, 5, 6), (6, 5, 4, 3)),
    "of one": ((1, 4, 1), (4, 1, 4)),
}


def build(dim=12, **kwargs):
    torch.manual_seed(0)
    return shard(SmallNet(dim), fully_shard, **kwargs)


def sequences(lengths, dim=12):
    for step, length in enumerate(lengths[dist.get_rank()]):
        yield torch.randn(2, length, dim, generator=torch.Generator().manual_seed(step + 100 * dist.get_rank()))


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("dynamic", [False, None])
def test_lengths_differ(ranks2, kind, dynamic):
    ranks2.run(_lengths, LENGTHS[kind], dynamic)


def _lengths(lengths, dynamic):
    eager, model = Training(build()), build()
    traced = Training(model, compiled(model, dynamic=dynamic))
    for x in sequences(lengths):
        for training in (eager, traced):
            training.step(x)
    assert_equal(eager, traced)
    if dynamic is False:
        assert dynamo_counts()[0] == len(set(lengths[dist.get_rank()]))


def test_evaluation_of_different_lengths(ranks2):
    ranks2.run(_evaluation)


def _evaluation():
    """Each rank has recompiles of its own, of training here and of evaluation there."""
    eager, model = Training(build()), build()
    traced = Training(model, compiled(model, dynamic=False))
    for x in sequences(LENGTHS["at different steps"]):
        for training in (eager, traced):
            training.step(x)
            with torch.no_grad():
                training.call(x[:, :-1].contiguous())
    assert_equal(eager, traced)


def test_padded_and_accumulated(ranks2):
    ranks2.run(_accumulated)


def _accumulated():
    """Several micro-batches of different lengths make one step."""
    eager, model = Training(build()), build()
    traced = Training(model, compiled(model))
    for training in (eager, traced):
        for x in sequences(LENGTHS["never the same"]):
            training.backward(training.call(x).square().sum())
        training.update()
    assert_equal(eager, traced)


@pytest.mark.parametrize("dim, out", [(12, 4), (12, 3), (13, 1)], ids=["even", "uneven", "uneven and empty"])
def test_graphs_do_not_depend_on_the_rank(ranks2, dim, out):
    first, second = ranks2.run(_graphs, dim, out)
    assert first == second
    stages = [stage for stage, *_ in first]
    assert {"joint after", "forward after", "backward after", "inference after"} <= set(stages)


def _graphs(dim, out):
    """Names of stages, texts and tags of all graphs; a process group's name is the same on all of its ranks."""
    torch.manual_seed(0)
    model = shard(SmallNet(dim, out=out), fully_shard)
    forward = compiled(model)
    with graphs() as stages:
        for _ in range(2):
            loss = forward(torch.ones(2, 5, dim)).sum()
            loss.backward()
        with torch.no_grad():
            forward(torch.ones(2, 5, dim))
    assert all(any(gathers(graph)) for stage, graph in stages if stage in ("forward after", "backward after"))
    return [(stage, text_of(graph), tag_digest(graph.nodes), _shapes(graph)) for stage, graph in stages]


def _shapes(graph):
    values = [node.meta.get("val") for node in graph.nodes]
    return [(tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else None for value in values]


def test_graphs_of_different_lengths_launch_the_same_in_the_same_order(ranks2):
    """Waits may stand elsewhere, as what memory there is for overlap depends on the lengths."""
    first, second = ranks2.run(_graphs_of_lengths)
    assert first == second


def _graphs_of_lengths():
    """The text of the collectives, in order, of ranks that are given different lengths."""
    with graphs() as stages:
        model = build(13)
        forward = compiled(model, dynamic=False)
        for x in list(sequences(((4,), (6,)), 13)):
            forward(x).sum().backward()
    lines = [(stage, line) for stage, graph in stages for line in text_of(graph).splitlines()]
    return [
        (stage, re.sub(r";.*", "", line))
        for stage, line in lines
        if "_c10d_functional" in line and "wait_tensor" not in line
    ]
