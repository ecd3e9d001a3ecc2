"""Nothing is gathered, reduced or kept that torch does not gather, reduce or keep."""

from collections import Counter

import torch
import torch.nn as nn
from models import Net, batch, my_part
from side_by_side import LIBRARIES, build, side_by_side
from torch.distributed.tensor import DTensor


class Wrapped(Net):
    """The root has no parameter of its own, and its output is that of the last inner module."""

    def __init__(self):
        super().__init__(blocks=3)


def layers(model, fully_shard):
    for module in (model.inp, *model.blocks, model.head):
        fully_shard(module)
    return fully_shard(model)


def test_prefetch_where_the_root_returns_an_output(ranks2):
    ranks2.run(_root_returns)


def _root_returns():
    side_by_side(Wrapped, steps=1, compare=list, apply=layers)


class PassesOn(nn.Module):
    """Returns its input next to its output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        return self.linear(x).tanh(), x


class PassesOnNet(Net):
    def __init__(self):
        super().__init__(blocks=0)
        self.blocks.extend(PassesOn() for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            y, x = block(x)
            x = x + y
        return self.head(x)


def test_input_passed_on(ranks2):
    ranks2.run(_passed_on)


def _passed_on():
    side_by_side(PassesOnNet, compare=Counter)


class SomeOfThree(Net):
    """Runs two of three blocks."""

    def __init__(self):
        super().__init__(blocks=3)

    def forward(self, x):
        return self.head(self.blocks[1](self.blocks[0](self.inp(x))))


def blocks_together(model, fully_shard):
    fully_shard(list(model.blocks))
    return fully_shard(model)


def test_some_of_a_list(ranks2):
    ranks2.run(_some_of_a_list)


def _some_of_a_list():
    """Gathers only: of parameters without gradients, torch reduces nothing, but this library, in case others have."""

    def gathers(events):
        return [event for event in events if event[0] == "gather"]

    side_by_side(SomeOfThree, compare=gathers, apply=blocks_together)


def test_some_of_a_list_without_gradients(ranks2):
    ranks2.run(_without_gradients)


def _without_gradients():
    for library in LIBRARIES[::-1]:
        model = build(library, SomeOfThree, blocks_together)
        with torch.no_grad():
            model(my_part(batch(0)))
        assert all(isinstance(param, DTensor) for block in model.blocks for param in block.parameters()), library


class Twice(Net):
    """Calls one module twice."""

    def forward(self, x):
        return self.head(self.blocks[0](self.blocks[1](self.blocks[0](self.inp(x)))))


def test_handle_of_a_module_that_does_not_run(ranks2):
    ranks2.run(_handle)


def _handle():
    for library in LIBRARIES[::-1]:
        model = build(library, SomeOfThree)
        handle = model.blocks[2].unshard(async_op=True)
        model(my_part(batch(0)))
        handle.wait()
        assert not isinstance(model.blocks[2].up.weight, DTensor), library


def test_called_twice(ranks2):
    """Autograd hands over its gradients when both backwards are done: there is nothing to reduce before."""
    ranks2.run(_called_twice)


def _called_twice():
    side_by_side(Twice, compare=Counter)
