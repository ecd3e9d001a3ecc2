"""Models, ways of sharding and of training them, for the tests that compare this library with torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn as nn
from models import Net, TiedNet, shard
from side_by_side import assert_close, loss_of, one_process, side_by_side
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def replicas(shape: tuple[int, int] = (2, 2)) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


# -- models, and ways of sharding them --------------------------------------------------------------------------------


class Shapes(nn.Module):
    """Parameters of one element, of fewer rows than ranks, and of one to five dimensions."""

    def __init__(self):
        super().__init__()
        sizes = [(1,), (1, 1), (2, 1), (3, 7), (5,), (12, 1, 1, 2), (3, 2, 2, 1, 1), (7, 3, 2)]
        self.params = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, x):
        return x * sum(param.tanh().sum() for param in self.params)


class ShapesNet(Net):
    def __init__(self):
        super().__init__(dim=12, blocks=1, out=1)
        self.shapes = Shapes()

    def forward(self, x):
        return super().forward(self.shapes(x))


class Convolutions(nn.Sequential):
    """With buffers that forward writes, and a module without parameters."""

    def __init__(self):
        super().__init__(
            nn.Unflatten(1, (3, 2, 2)),
            nn.Conv2d(3, 5, 2, padding=1),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(45, 3),
        )


class TwiceTied(TiedNet):
    """One block under two names as well."""

    def __init__(self):
        super().__init__()
        self.blocks.append(self.blocks[0])


class Subset(Net):
    """Runs one block more in each step, and then all again."""

    runs = 0

    def __init__(self):
        super().__init__(blocks=3)

    def forward(self, x):
        self.runs += 1
        x = self.inp(x)
        for block in self.blocks[: 1 + self.runs % 3]:
            x = block(x)
        return self.head(x)


def root_only(model, fully_shard, **kwargs):
    return fully_shard(model, **kwargs)


def children(model, fully_shard, **kwargs):
    """No parameter is left for the root, and some children have none."""
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            fully_shard(child, **kwargs)
    return shard(model, fully_shard, **kwargs) if hasattr(model, "blocks") else fully_shard(model, **kwargs)


def layers(model, fully_shard, **kwargs):
    """Modules within modules, each with a group of its own, down to single layers."""
    for block in model.blocks:
        fully_shard(block.up, **kwargs)
        fully_shard(block.norm, **kwargs)
    return shard(model, fully_shard, **kwargs)


def lists(model, fully_shard, **kwargs):
    """Groups of several modules: the outer layers, which may be tied, and all blocks."""
    fully_shard([model.inp, model.head], **kwargs)
    fully_shard(list(dict.fromkeys(model.blocks)), **kwargs)
    return fully_shard(model, **kwargs)


def outer_layers(model, fully_shard, **kwargs):
    fully_shard([model.inp, model.head], **kwargs)
    return shard(model, fully_shard, **kwargs)


def unlike_blocks(model, fully_shard, **kwargs):
    fully_shard(model.blocks[0], reshard_after_forward=False, **kwargs)
    fully_shard(model.blocks[1].up, reshard_after_forward=True, **kwargs)
    return fully_shard(model, reshard_after_forward=True, **kwargs)


CASES = {
    "uneven": (lambda: Net(dim=13), shard),
    "one row": (lambda: Net(out=1), shard),
    "shapes": (ShapesNet, shard),
    "shapes in groups": (ShapesNet, children),
    "convolutions": (Convolutions, root_only),
    "convolutions in groups": (Convolutions, children),
    "one group": (Net, root_only),
    "nothing for the root": (Net, children),
    "nested": (Net, layers),
    "lists": (Net, lists),
    "unlike": (Net, unlike_blocks),
    "tied": (TiedNet, shard),
    "tied in a list": (TiedNet, outer_layers),
    "tied in lists": (TwiceTied, lists),
    "subset of the blocks": (Subset, shard),
    "subset of a list": (Subset, lists),
    "leaf": (lambda: nn.Linear(12, 5), root_only),
    "leaf of one row": (lambda: nn.Linear(12, 1, bias=False), root_only),
}
# Events not counted: where the next forward runs other modules, a gather started ahead of time was in vain.
NOT_COUNTED = ("subset of the blocks", "subset of a list")


def iterate_for(name):
    def iterate(model, step, data):
        x = data(step)
        loss = loss_of(model(torch.cat([x, x[:, :1]], 1) if name == "uneven" else x))
        loss.backward()
        return [loss, *(buffer for buffer in model.buffers() if buffer.is_floating_point())]

    return iterate


def agree(name: str, mesh_shape: tuple[int, int] | None = None) -> None:
    """Train a case under both libraries and in one process."""
    make, apply = CASES[name]
    kwargs: dict[str, Any] = {"apply": apply}
    if mesh_shape is not None:
        kwargs["mesh"] = replicas(mesh_shape)
    compare = None if name in NOT_COUNTED else Counter
    history = side_by_side(make, iterate=iterate_for(name), compare=compare, **kwargs)
    if make is not Convolutions:  # whose statistics are those of each rank's part
        assert_close(history, one_process(make, iterate_for(name)))


# -- iterations of several backwards, and scalings of gradients -------------------------------------------------------


def accumulate(before, micro_batches=3):
    """Iterations of several backwards; ``before(model, i, last)`` runs before each of a sharded model."""

    def iterate(model, step, data):
        losses = []
        for i in range(micro_batches):
            if hasattr(model, "set_requires_gradient_sync"):
                before(model, i, i == micro_batches - 1)
            losses.append(loss_of(model(data(micro_batches * step + i))))
            losses[-1].backward()
        return losses

    return iterate


def sync_last(model, i, last):
    model.set_requires_gradient_sync(last)


def sync_and_say_last(model, i, last):
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


SCALINGS = {
    "factor 3": (3.0, True, None),
    "factor 3 in fp16": (3.0, False, {"reduce_dtype": torch.float16}),
    "factor 8 in fp16": (8.0, False, {"reduce_dtype": torch.float16}),
    "factor 1.5 in bf16": (1.5, True, {"reduce_dtype": torch.bfloat16}),
    "factor of the ranks": (2.0, False, None),
    "sums": (None, True, None),
    "sums in bf16": (None, True, {"reduce_dtype": torch.bfloat16}),
    "sums in fp16": (None, True, {"reduce_dtype": torch.float16}),
}


def scale(factor, force_sum):
    def configure(model):
        for module in (model, model.blocks[0]):  # not the other block: the settings are of one module
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(force_sum)

    return configure
