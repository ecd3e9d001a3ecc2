"""Gradient accumulation in the graph: without sync nothing is reduced, with sync what was set aside is added first."""

import pytest
import torch
from models import Net, assert_same, batch, mesh_2d, my_part, shard
from traced import gradients, weights

from fsdp_compile import MixedPrecisionPolicy, backend, fully_shard
from fsdp_compile.torch_compat import dynamo_counts

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Twice(Net):
    """Each block runs twice."""

    def forward(self, x):
        return super().forward(self.blocks[1](self.blocks[0](x)))


def build(cls=Net, **kwargs):
    torch.manual_seed(0)
    return shard(cls(), fully_shard, **kwargs)


def loss_of(forward, step):
    return forward(my_part(batch(step))).float().square().mean()


def micro_batches(model, ways, set_sync, steps=3, count=3):
    """Steps of several backwards, of which only the last is synchronized; each micro-batch by the next of ``ways``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history, calls = [], 0
    for step in range(steps):
        for micro in range(count):
            set_sync(model, micro == count - 1)
            loss = loss_of(ways[calls % len(ways)], step * count + micro)
            calls += 1
            loss.backward()
            history.append([loss.detach(), *gradients(model)])
        optimizer.step()
        optimizer.zero_grad()
        history.append(weights(model))
    return history


def sync(model, last):
    model.set_requires_gradient_sync(last)


def all_reduce(model, last):
    model.set_is_last_backward(last)
    model.set_requires_all_reduce(last)


def first_neither_then_partial(model, last):
    """Nothing is reduced in the first micro-batch, nothing over the replicas in the second."""
    model.calls = getattr(model, "calls", -1) + 1
    model.set_requires_gradient_sync(model.calls % 3 != 0)
    model.set_requires_all_reduce(last)


CASES = [
    pytest.param(Net, {}, sync, id="sync"),
    pytest.param(Net, {"mp_policy": BF16, "reshard_after_forward": False}, sync, id="sync-bf16-kept"),
    pytest.param(Twice, {"mp_policy": BF16}, sync, id="twice"),
    pytest.param(Net, {"mesh": mesh_2d, "mp_policy": BF16}, sync, id="hsdp"),
    pytest.param(Twice, {"mesh": mesh_2d}, all_reduce, id="all-reduce"),
    pytest.param(Net, {"mesh": mesh_2d, "mp_policy": BF16}, first_neither_then_partial, id="both"),
]


@pytest.mark.parametrize(("cls", "kwargs", "set_sync"), CASES)
def test_like_eager(ranks2, cls, kwargs, set_sync):
    ranks2.run(_like_eager, cls, kwargs, set_sync)


@pytest.mark.parametrize(
    ("cls", "kwargs", "set_sync"),
    [*CASES[2:4], *(pytest.param(*case.values, marks=pytest.mark.slow, id=case.id) for case in CASES[4:])],
)
def test_like_eager_on_four_ranks(ranks4, cls, kwargs, set_sync):
    ranks4.run(_like_eager, cls, kwargs, set_sync)


def _like_eager(cls, kwargs, set_sync):
    kwargs = {name: value() if name == "mesh" else value for name, value in kwargs.items()}
    eager, model, mixed = (build(cls, **kwargs) for _ in range(3))
    expected = micro_batches(eager, [eager], set_sync)
    forward = torch.compile(model, backend="fsdp_eager", fullgraph=True)
    assert_same(micro_batches(model, [forward], set_sync), expected)
    torch._dynamo.reset()
    forward = torch.compile(mixed, backend="fsdp_eager", fullgraph=True)
    assert_same(micro_batches(mixed, [mixed, forward], set_sync), expected)


def test_two_graphs(ranks2):
    ranks2.run(_two_graphs)


def _two_graphs():
    model = build()
    reductions = []

    def count(stage, graph):
        if stage == "backward after":
            reductions.append(sum("reduce_scatter" in str(node.target) for node in graph.nodes))

    with backend.observed(count):
        micro_batches(model, [torch.compile(model, backend="fsdp_eager", fullgraph=True)], sync)
    assert dynamo_counts() == (2, 0, 1)
    assert reductions == [0, 3]


def test_settings_changed_before_the_backward(ranks2):
    ranks2.run(_changed)


def _changed():
    for first in (True, False):
        model = build()
        forward = torch.compile(model, backend="fsdp_eager", fullgraph=True)
        model.set_requires_gradient_sync(first)
        loss = loss_of(forward, 0)
        model.set_requires_gradient_sync(not first)
        with pytest.raises(RuntimeError, match="changed between a compiled forward and its backward"):
            loss.backward()


def test_two_forwards_before_two_backwards(ranks2):
    ranks2.run(_interleaved)


def _interleaved():
    """What is set aside is read when the backward runs, after other backwards have added to it."""

    def run(model, forward):
        model.set_requires_gradient_sync(False)
        first = loss_of(forward, 0)
        loss_of(forward, 1).backward()
        first.backward()
        model.set_requires_gradient_sync(True)
        second, third = loss_of(forward, 2), loss_of(forward, 3)
        second.backward()
        history = [gradients(model)]
        third.backward()
        return [*history, gradients(model)]

    eager, model = build(), build()
    assert_same(run(model, torch.compile(model, backend="fsdp_eager", fullgraph=True)), run(eager, eager))
