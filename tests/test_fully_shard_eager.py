"""The eager state machine: who sees which parameters, gradients, hooks, and nothing left behind."""

import pytest
import torch
import torch.nn as nn
from models import Net, assert_close_to_one_process, assert_same, batch, live_bytes, my_part, shard, train
from torch.distributed.tensor import DTensor

from fsdp_compile import ShardedState, fully_shard


def build(cls=Net, api=fully_shard, **kwargs):
    torch.manual_seed(0)
    return shard(cls(), api, **kwargs)


def test_nobody_gets_an_unsharded_parameter(ranks2):
    ranks2.run(_never_unsharded)


def _never_unsharded():
    model = build()
    with torch.no_grad():
        model(batch(0))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    output = model(batch(0))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert model._fsdp_state.groups[0].sharded_state is ShardedState.UNSHARDED  # the root keeps its data
    output.sum().backward()
    assert model._fsdp_state.groups[0].sharded_state is ShardedState.SHARDED
    handle = model.unshard(async_op=True)
    handle.wait()
    assert not isinstance(model.head.weight, DTensor)
    model.reshard()
    assert isinstance(model.head.weight, DTensor)


def test_a_kept_copy_is_never_stale(ranks2):
    ranks2.run(_stale)


def _stale():
    model, reference = build(), build()
    for each, extra_forward in ((model, True), (reference, False)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True)
        for step in range(3):
            each(my_part(batch(step))).sum().backward()
            if extra_forward:
                each(my_part(batch(step)))  # leaves the root's copy behind, as no backward follows
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model(batch(9)), reference(batch(9)))


def test_a_copy_kept_over_a_backward_is_never_stale(ranks2):
    ranks2.run(_stale_over_backward)


def _stale_over_backward():
    """Also if the optimizer writes in a way that no version counter shows."""
    model, reference = build(), build()
    model.set_reshard_after_backward(False)
    for each in (model, reference):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True)
        for step in range(3):
            each(my_part(batch(step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model(batch(9)), reference(batch(9)))


def test_an_unused_gather_ends_with_the_backward(ranks2):
    ranks2.run(_unused_gather)


def _unused_gather():
    model = build()
    first, last = model.blocks[0], model.blocks[-1]
    first.set_modules_to_backward_prefetch([last])  # whose backward is done by then
    model(my_part(batch(0))).sum().backward()
    for state in model._fsdp_state.context.states:
        for param in (param for group in state.groups for param in group.params):
            assert param.sharded_state is ShardedState.SHARDED
            assert param.unsharded_nbytes == 0, param


def test_accumulation_without_sync(ranks2):
    ranks2.run(_accumulation)


def _accumulation():
    model = build()
    torch.manual_seed(0)
    single = Net()
    for micro_batch in range(3):
        last = micro_batch == 2
        model.set_requires_gradient_sync(last)
        model(my_part(batch(micro_batch))).square().mean().backward()
        single(batch(micro_batch)).square().mean().backward()
        assert all((p.grad is not None) == last for p in model.parameters())
    for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


class Odd(nn.Module):
    """In-place change of the input, an unused and a frozen parameter, one input twice, a dict out."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight.requires_grad_(False)

    def forward(self, x, *, y):
        assert x is y
        x += 1
        return {"out": self.b(torch.relu(self.a(x))), "nothing": None, "count": 3}


class OddNet(Net):
    def __init__(self):
        super().__init__(blocks=0)
        self.odd = Odd()

    def forward(self, x):
        x = self.inp(x)
        return self.head(self.odd(x, y=x)["out"])


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_odd_module(ranks2, backend):
    ranks2.run(_odd, backend)


def _odd(backend):
    def sharded():
        torch.manual_seed(0)
        model = OddNet()
        fully_shard(model.odd)
        return fully_shard(model)

    model = sharded()
    history = train(model, torch.compile(model, backend=backend, fullgraph=True) if backend else model)
    torch.manual_seed(0)
    single = OddNet()
    assert_close_to_one_process(model, single)
    assert model.odd.unused.weight.grad is None
    assert_same(history, train(sharded()))


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_hooks_on_sharded_parameters(ranks2, backend):
    ranks2.run(_hooks, backend)


def _hooks(backend):
    model = build()
    seen = {"tensor": [], "post": []}
    weight = model.head.weight
    weight.register_hook(lambda grad: seen["tensor"].append(grad.full_tensor()))
    weight.register_post_accumulate_grad_hook(lambda p: seen["post"].append(p.grad.full_tensor()))
    train(model, torch.compile(model, backend=backend, fullgraph=True) if backend else model, steps=1)
    torch.manual_seed(0)
    single = Net()
    single(batch(0)).square().mean().backward()
    for kind in seen.values():
        assert len(kind) == 1
        torch.testing.assert_close(kind[0], single.head.weight.grad)


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_requires_grad_toggled(ranks2, backend):
    ranks2.run(_toggle, backend)


def _toggle(backend):
    def run(model, forward):
        history = []
        for trains in (True, False, True):
            model.blocks[0].up.weight.requires_grad_(trains)
            history += train(model, forward, steps=1)
            index = [name for name, _ in model.named_parameters()].index("blocks.0.up.weight")
            assert (history[-1][1 + index] is None) != trains
        return history

    eager, model = build(), build()
    assert_same(run(eager, eager), run(model, torch.compile(model, backend=backend) if backend else model))


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_no_leak(ranks2, backend):
    ranks2.run(_leak, backend)


def _leak(backend):
    model = build()
    forward = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    train(model, forward)
    before = live_bytes()
    for _ in range(10):
        train(model, forward)
    assert live_bytes() == before
