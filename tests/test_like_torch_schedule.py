"""What is communicated when, and in which order, is torch's own, and it is the same on all ranks."""

from collections import Counter

import pytest
import torch.nn as nn
from side_by_side import LIBRARIES, Events, assert_same, build, side_by_side, train
from torch.distributed.tensor import DTensor


class Embedded(nn.Module):
    """An embedding and blocks, all of different sizes, so that a collective's size tells whose it is."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 3 + i), nn.Linear(3 + i, 12)) for i in range(4))
        self.head = nn.Linear(12, 10)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def each(model, fully_shard, **kwargs):
    for module in (model.embedding, *model.blocks):
        fully_shard(module, **kwargs)
    return fully_shard(model, **kwargs)


def on_tokens(model, step, data):
    ids = data(step).mul(100).long().remainder(10)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    return [loss]


ROOT = ("reduce-scatter", 130, 2)


def in_order(events):
    """All in order, but for the root's reduction: both libraries have it with others at the end of the backward."""
    return Counter(events), [event for event in events if event != ROOT]


def collectives_in_order(events):
    return in_order([event for event in events if event[0] != "product"])


def forward_prefetch(model):
    first, second, third, _ = model.blocks
    model.set_modules_to_forward_prefetch([model.embedding, first])
    first.set_modules_to_forward_prefetch([second, third])


def backward_prefetch(model):
    first, second, third, fourth = model.blocks
    model.set_modules_to_backward_prefetch([fourth, third])
    fourth.set_modules_to_backward_prefetch([third, second])
    second.set_modules_to_backward_prefetch([first])


def both(model):
    forward_prefetch(model)
    backward_prefetch(model)


def all_at_once(model):
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.set_modules_to_backward_prefetch(list(model.blocks)[::-1])


def in_the_wrong_order(model):
    first, second, third, fourth = model.blocks
    fourth.set_modules_to_forward_prefetch([first])
    first.set_modules_to_backward_prefetch([fourth, second])
    third.set_modules_to_backward_prefetch([first])


def embedding_not_in_backward(model):
    model.embedding.set_unshard_in_backward(False)


def embedding_prefetched_not_in_backward(model):
    """A module that backward does not need is not gathered there either if it is to be prefetched."""
    model.embedding.set_unshard_in_backward(False)
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0], model.embedding])


def keep_after_forward(model):
    model.set_reshard_after_forward(False)


def free_the_root(model):
    model.set_reshard_after_forward(True)


def keep_two(model):
    model.blocks[1].set_reshard_after_forward(False)
    model.blocks[2].set_reshard_after_forward(False, recurse=False)


def many_buffers(model):
    model.set_reduce_scatter_max_input_buffers(3)


SETTINGS = [
    forward_prefetch,
    backward_prefetch,
    both,
    all_at_once,
    embedding_not_in_backward,
    keep_after_forward,
    free_the_root,
    keep_two,
    many_buffers,
]
FAULTY = [
    embedding_prefetched_not_in_backward,
    in_the_wrong_order,
]


@pytest.mark.parametrize("setting", SETTINGS + FAULTY)
def test_settings(ranks2, setting):
    ranks2.run(_settings, setting)


def _settings(setting):
    """From the second step on, gathers are started ahead of time here, but in the same order as torch's."""
    side_by_side(Embedded, setting, on_tokens, steps=1, compare=in_order, apply=each)
    history = side_by_side(Embedded, setting, on_tokens, compare=collectives_in_order, apply=each)
    assert_same(history, side_by_side(Embedded, iterate=on_tokens, apply=each))  # nothing changes what is learned


FORWARD = ["gather root", "gather embedding", *(f"gather block {i}" for i in range(4))]
BACKWARD = [
    "gather block 3",
    "gather block 2",
    "reduce-scatter block 3",
    "gather block 1",
    "reduce-scatter block 2",
    "gather block 0",
    "reduce-scatter block 1",
    "gather embedding",
    "reduce-scatter block 0",
    "reduce-scatter embedding",
    "reduce-scatter root",
]


def test_order(ranks2):
    for order in ranks2.run(_order):
        assert order == FORWARD + BACKWARD


def _order():
    model = build(LIBRARIES[0], Embedded, each)
    modules = {"root": model.head, "embedding": model.embedding}
    modules |= {f"block {i}": block for i, block in enumerate(model.blocks)}
    rows = {name: [(param.size(0), param[0].numel()) for param in each.parameters()] for name, each in modules.items()}
    sizes = {sum((count + count % 2) * numel for count, numel in each): name for name, each in rows.items()}
    assert len(sizes) == len(modules)
    return [f"{kind} {sizes[elements]}" for kind, elements, _ in events_of(model) if kind != "product"]


def events_of(model):
    with Events() as recorder:
        train(model, on_tokens, steps=1)
    return recorder.issued


def test_settings_change_the_order(ranks2):
    """On all ranks alike; else the tests above would compare nothing."""
    first, second = ranks2.run(_orders)
    assert first == second
    assert len(set(map(tuple, first))) == len(first)


def _orders():
    found = []
    for setting in [setting for setting in SETTINGS if setting is not many_buffers]:
        model = build(LIBRARIES[0], Embedded, each)
        setting(model)
        found.append(events_of(model))
    return found


# -- by hand ----------------------------------------------------------------------------------------------------------


def handles(wait):
    """Gathers all blocks before the forward, asynchronously; waits for them itself, or has the forward wait."""

    def iterate(model, step, data):
        pending = [block.unshard(async_op=True) for block in model.blocks]
        for handle in pending if wait else ():
            handle.wait()
        assert not wait or not isinstance(model.blocks[0][0].weight, DTensor)
        return on_tokens(model, step, data)

    return iterate


def at_once(model, step, data):
    assert model.blocks[0].unshard() is None
    model.unshard()
    return on_tokens(model, step, data)


def between(model, step, data):
    """Frees the root, and gathers a block, between forward and backward."""
    ids = data(step).mul(100).long().remainder(10)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    model.reshard()
    model.blocks[2].unshard()
    loss.backward()
    return [loss]


def for_nothing(model, step, data):
    """Frees again what it has gathered, once waited for and once not."""
    model.blocks[0].unshard()
    model.blocks[0].reshard()
    model.blocks[1].unshard(async_op=True).wait()
    model.blocks[1].reshard()
    return on_tokens(model, step, data)


def settings_by_step(model, step, data):
    """The first step frees everything after forward, the second nothing, the third the inner modules."""
    model.set_reshard_after_forward(step != 1)
    model.set_reshard_after_forward(step == 0, recurse=False)
    return on_tokens(model, step, data)


BY_HAND = {
    "handles": handles(True),
    "handles not waited for": handles(False),
    "at once": at_once,
    "between": between,
    "for nothing": for_nothing,
    "settings": settings_by_step,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(ranks2, name):
    ranks2.run(_by_hand, name)


def _by_hand(name):
    side_by_side(Embedded, iterate=BY_HAND[name], steps=1, compare=in_order, apply=each)
    history = side_by_side(Embedded, iterate=BY_HAND[name], compare=collectives_in_order, apply=each)
    assert_same(history, side_by_side(Embedded, iterate=on_tokens, apply=each))
