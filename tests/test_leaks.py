"""Nothing grows over many steps: bytes, tensors, objects and hooks, without a garbage collector either."""

import gc

import pytest
import torch
from models import Net, batch, live_bytes, my_part, shard
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard


def build(cls=Net, **kwargs):
    torch.manual_seed(0)
    model = shard(cls(dim=6, blocks=1), fully_shard, **kwargs)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def backward(model, step=0):
    model(my_part(batch(step, 6, 4))).square().mean().backward()


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()


# -- what a step may be -----------------------------------------------------------------------------------------------


def trains(model, optimizer):
    backward(model)
    update(optimizer)


def keeps_gradients(model, optimizer):
    backward(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def forward_without_backward(model, optimizer):
    model(my_part(batch(1, 6, 4)))
    trains(model, optimizer)
    model(my_part(batch(2, 6, 4)))


def only_forwards(model, optimizer):
    model(my_part(batch(0, 6, 4)))


def evaluates(model, optimizer):
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model(my_part(batch(0, 6, 4)))
    trains(model, optimizer)


def accumulates(model, optimizer):
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        backward(model)
    update(optimizer)


def accumulates_and_never_syncs(model, optimizer):
    model.set_requires_gradient_sync(False)
    backward(model)


def never_last(model, optimizer):
    model.set_is_last_backward(False)
    trains(model, optimizer)


def twice_through_one_graph(model, optimizer):
    loss = model(my_part(batch(0, 6, 4))).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    update(optimizer)


def gradient_of_the_input(model, optimizer):
    x = my_part(batch(0, 6, 4)).requires_grad_()
    torch.autograd.grad(model(x).sum(), [x])
    model(x).sum().backward()
    update(optimizer)


def checkpoints_activations(model, optimizer):
    for reentrant in (False, True):
        x = my_part(batch(0, 6, 4)).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    update(optimizer)


def fails_and_is_reset(model, optimizer):
    model.head.register_forward_pre_hook(fail) if not model.head._forward_pre_hooks else None
    try:
        backward(model)
    except KeyError:
        model.reset_iter_state()


def fail(*_):
    raise KeyError


def fails_in_backward(model, optimizer):
    output = model(my_part(batch(0, 6, 4)))
    model.blocks[0](my_part(batch(0, 6, 4)).requires_grad_()).register_hook(fail)
    output.register_hook(fail)
    try:
        output.sum().backward()
    except KeyError:
        model.reset_iter_state()
        optimizer.zero_grad()


def writes_checkpoints(model, optimizer):
    trains(model, optimizer)
    model.load_state_dict(model.state_dict())


def converts(model, optimizer):
    trains(model, optimizer)
    model.to(torch.float32)


def replaces_weights(model, optimizer):
    trains(model, optimizer)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def unshards_by_hand(model, optimizer):
    model.unshard(async_op=True)  # and does not wait
    for block in model.blocks:
        block.unshard()
        block.reshard()
    trains(model, optimizer)


def others(model, optimizer):
    """One step of each other kind; apart only if this fails, as counting takes longer than the steps."""
    for way in (
        keeps_gradients,
        never_last,
        twice_through_one_graph,
        gradient_of_the_input,
        fails_in_backward,
        writes_checkpoints,
        converts,
        replaces_weights,
        unshards_by_hand,
    ):
        way(model, optimizer)
    model.set_is_last_backward(True)


WAYS = {
    trains: 200,
    forward_without_backward: 200,
    evaluates: 200,
    accumulates: 200,
    only_forwards: 200,
    others: 100,
    accumulates_and_never_syncs: 40,
    checkpoints_activations: 40,
    fails_and_is_reset: 40,
}


# -- counting ---------------------------------------------------------------------------------------------------------


def census():
    """How many of each kind of object there are, nodes of autograd graphs among them."""
    counts = {}
    for thing in gc.get_objects():
        kind = "tensor" if issubclass(type(thing), torch.Tensor) else type(thing).__qualname__
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def growth(before, after, steps):
    """Of what there is more, by at least one in every other step, which is more than caches take that fill up."""
    grown = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    return {kind: by for kind, by in grown.items() if by >= steps // 2}


@pytest.mark.parametrize("way", WAYS)
def test_constant(ranks2, way):
    for left in ranks2.run(_constant, way, WAYS[way]):
        if way is checkpoints_activations:  # which makes cycles of its own, of no tensors
            left = {kind: by for kind, by in left.items() if kind not in ("cell", "function", "tuple", "GenericAlias")}
        assert not left, f"left to the garbage collector, for ever where that is turned off: {left}"


def test_constant_when_compiled(ranks2):
    for left in ranks2.run(_constant, forward_without_backward, 200, "fsdp_eager"):
        assert not left


def _constant(way, steps, backend=None):
    """Returns what only the garbage collector would find; when it has run, nothing may be left."""
    model, optimizer = build()
    if backend:
        model.compile(backend=backend, fullgraph=True)
    for _ in range(5):
        way(model, optimizer)
    before_bytes = live_bytes()
    gc.disable()
    try:
        before = census()
        for _ in range(steps):
            way(model, optimizer)
        left = growth(before, census(), steps)
    finally:
        gc.enable()
    assert live_bytes() == before_bytes  # collects
    collected = growth(before, census(), steps)
    assert not collected, collected
    return left
