"""Training loops that are not one forward, one backward, one step: traced as they are eagerly."""

import pytest
import torch
from models import Net, assert_same, batch, my_part, shard
from torch import nn
from traced import gradients, weights

from fsdp_compile import MixedPrecisionPolicy, fully_shard


def build(**kwargs):
    torch.manual_seed(0)
    return shard(Net(), fully_shard, **kwargs)


def loss_of(forward, step):
    return forward(my_part(batch(step))).float().square().mean()


def accumulates(model, forward, optimizer):
    """Several backwards into one gradient."""
    for step in range(3):
        loss_of(forward, step).backward()
        yield gradients(model)
    optimizer.step()


def two_forwards_before_two_backwards(model, forward, optimizer):
    first, second = loss_of(forward, 0), loss_of(forward, 1)
    second.backward()
    first.backward()
    yield gradients(model)
    optimizer.step()


def keeps_zeros(model, forward, optimizer):
    for step in range(3):
        loss_of(forward, step).backward()
        yield gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield gradients(model)


def evaluates(model, forward, optimizer):
    for step in range(2):
        loss_of(forward, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            yield [forward(batch(step))]
        with torch.inference_mode():
            yield [forward(batch(step)).clone()]
        model.train()


def steps_after_a_forward_without_backward(model, forward, optimizer):
    for step in range(3):
        loss_of(forward, step).backward()
        unused = loss_of(forward, step)
        optimizer.step()
        optimizer.zero_grad()
        yield [unused.detach(), loss_of(forward, step).detach()]


def keeps_the_graph(model, forward, optimizer):
    loss = loss_of(forward, 0)
    loss.backward(retain_graph=True)
    yield gradients(model)
    loss.backward()
    yield gradients(model)
    optimizer.step()


def clips(model, forward, optimizer):
    for step in range(2):
        loss_of(forward, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        yield [norm.full_tensor(), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()


def asks_for_gradients(model, forward, optimizer):
    x = my_part(batch(0)).requires_grad_()
    (grad,) = torch.autograd.grad(forward(x).square().mean(), [x])
    yield [grad, *gradients(model)]
    model.zero_grad()


def freezes_before_the_backward(model, forward, optimizer):
    """What is frozen then gets no gradient, neither now nor later from what was set aside."""
    for syncs in (False, True, True):
        model.set_requires_gradient_sync(syncs)
        loss = loss_of(forward, 0)
        for module in (model.blocks[0], model.head, model.blocks[1].up):
            module.requires_grad_(False)
        loss.backward()
        yield gradients(model)
        model.requires_grad_(True)
    loss_of(forward, 1).backward()
    yield gradients(model)
    optimizer.step()


def changes_batch_size(model, forward, optimizer):
    for rows in (8, 4, 12, 8):
        forward(my_part(batch(0, rows=rows))).square().mean().backward()
        optimizer.step()
        yield gradients(model)
        optimizer.zero_grad()


LOOPS = [
    accumulates,
    two_forwards_before_two_backwards,
    keeps_zeros,
    evaluates,
    clips,
    keeps_the_graph,
    steps_after_a_forward_without_backward,
    asks_for_gradients,
    freezes_before_the_backward,
    changes_batch_size,
]
BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def run(loop, model, forward):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [*loop(model, forward, optimizer), weights(model)]


@pytest.mark.parametrize("loop", LOOPS)
def test_loop(ranks2, loop):
    ranks2.run(_loop, loop)


def _loop(loop):
    for kwargs in ({}, {**BF16, "reshard_after_forward": False}):
        torch._dynamo.reset()
        eager, traced = build(**kwargs), build(**kwargs)
        expected = run(loop, eager, eager)
        assert_same(run(loop, traced, torch.compile(traced, backend="fsdp_eager", fullgraph=True)), expected)


def test_one_backward_of_two_forwards(ranks2):
    ranks2.run(_one_backward)


def _one_backward():
    eager, traced = build(), build()
    forward = torch.compile(traced, backend="fsdp_eager", fullgraph=True)
    torch.manual_seed(0)
    single = Net()
    (single(batch(0)).square().mean() + single(batch(1)).square().mean()).backward()
    for model, call in ((eager, eager), (traced, forward)):
        (loss_of(call, 0) + loss_of(call, 1)).backward()
        # Not bit for bit: eagerly the gradients of both forwards are summed before they are reduced.
        for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)


def test_eager_and_traced_steps_mix(ranks2):
    ranks2.run(_mix)


def _mix():
    """Each step either way, so that neither executor leaves anything that the other stumbles over."""
    expected, model = build(), build()
    forward = torch.compile(model, backend="fsdp_eager", fullgraph=True)
    histories = []
    for each, ways in ((expected, [expected]), (model, [model, forward, forward, model])):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        history = []
        for step in range(8):
            way = ways[step % len(ways)]
            loss = loss_of(way, step)
            with torch.no_grad():
                other = loss_of(ways[(step + 1) % len(ways)], step)
            loss.backward()
            history.append([loss.detach(), other, *gradients(each)])
            optimizer.step()
            optimizer.zero_grad()
        histories.append(history)
    assert_same(histories[1], histories[0])


def test_two_models_do_not_mix(ranks2):
    ranks2.run(_two_models)


def _two_models():
    """Two models of one class, of other weights, take turns."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(shard(Net(), fully_shard))
    traced = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        traced.append(shard(Net(), fully_shard))
    forwards = [torch.compile(model, backend="fsdp_eager", fullgraph=True) for model in traced]
    for step in range(2):
        for eager, model, forward in zip(models, traced, forwards, strict=True):
            loss_of(eager, step).backward()
            loss_of(forward, step).backward()
            assert_same([gradients(model)], [gradients(eager)])
