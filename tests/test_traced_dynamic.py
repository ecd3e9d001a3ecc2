"""Batches and sequences of dynamic size, in one graph whose collectives have fixed sizes; Inductor's modes."""

import pytest
import torch
from models import shard
from traced import SmallNet, Training, assert_equal, compiled, graphs

from fsdp_compile import fully_shard
from fsdp_compile.passes.graph_view import gathers, reductions
from fsdp_compile.torch_compat import dynamo_counts


def build(**kwargs):
    torch.manual_seed(0)
    return shard(SmallNet(13), fully_shard, **kwargs)  # 13: uneven shards


def inputs(dims):
    """Five (batch, sequence, 13) of different sizes in ``dims``."""
    for step in range(5):
        sizes = [3 + 2 * step if 0 in dims else 4, 7 + step if 1 in dims else 5, 13]
        yield torch.randn(sizes, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("dims, reshard", [((0,), True), ((1,), True), ((0, 1), True), ((0, 1), False)], ids=str)
def test_marked_dynamic(ranks2, dims, reshard):
    ranks2.run(_marked, dims, reshard)


def _marked(dims, reshard):
    eager = Training(build(reshard_after_forward=reshard))
    model = build(reshard_after_forward=reshard)
    traced = Training(model, compiled(model))
    with graphs() as stages:
        for x in inputs(dims):
            eager.step(x.clone())
            for dim in dims:
                torch._dynamo.mark_dynamic(x, dim)
            traced.step(x)
    assert_equal(eager, traced)
    assert dynamo_counts() == (1, 0, 0)
    assert_static_collectives(stages)


@pytest.mark.parametrize("dynamic", [True, None])
def test_not_marked(ranks2, dynamic):
    ranks2.run(_not_marked, dynamic)


def _not_marked(dynamic):
    """At most one recompile, once the compiler has seen that a size changes."""
    eager, model = Training(build()), build()
    traced = Training(model, compiled(model, dynamic=dynamic))
    with graphs() as stages:
        for x in inputs((0, 1)):
            eager.step(x)
            traced.step(x)
            with torch.no_grad():
                eager.call(x)
                traced.call(x)
    assert_equal(eager, traced)
    assert dynamo_counts()[0] == (2 if dynamic else 4)  # with and without gradients
    assert_static_collectives(stages)


def assert_static_collectives(stages):
    """Numbers that do not depend on what a rank is given, as collectives of ranks with other inputs have to match."""
    for _, graph in stages:
        for collective in (*gathers(graph), *reductions(graph)):
            assert all(type(how) in (int, str) for how in collective.how)
            for node in (*collective.inputs, *collective.waits):
                assert all(type(size) is int for size in node.meta["val"].shape), node.meta["val"].shape
    collectives = {
        (stage, kind.__name__) for stage, graph in stages for kind in (gathers, reductions) if any(kind(graph))
    }
    assert {("forward after", "gathers"), ("backward after", "reductions")} <= collectives


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_inductor(ranks2, mode):
    ranks2.run(_inductor, mode)


def _inductor(mode):
    eager, model = Training(build()), build()
    traced = Training(model, compiled(model, backend="inductor", mode=mode))
    for x in [*inputs(())][:3]:
        eager.step(x)
        traced.step(x)
    for mine, theirs in zip(traced.history, eager.history, strict=True):
        for value, expected in zip(mine, theirs, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)
    assert dynamo_counts() == (1, 0, 0)
