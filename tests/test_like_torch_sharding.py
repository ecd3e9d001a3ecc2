"""Sharding is torch's own, whatever the shapes, ties, groups, nesting, meshes, frozen and replaced parameters."""

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from models import Net, TiedNet, batch, my_part, shard
from side_by_side import (
    LIBRARIES,
    assert_close,
    assert_same,
    build,
    loss_of,
    one_batch,
    one_process,
    side_by_side,
    train,
)
from side_by_side_cases import CASES, agree, layers, lists, replicas, root_only


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(ranks2, name):
    ranks2.run(agree, name)


def test_parameter_without_elements(ranks2):
    """Torch's reduction takes none, so one process tells what is right."""
    ranks2.run(_without_elements)


class WithoutElements(Net):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        return super().forward(x) + self.empty.sum()


def _without_elements():
    assert_close(train(build(LIBRARIES[0], WithoutElements)), one_process(WithoutElements))


def test_mesh_of_one_rank(ranks2):
    ranks2.run(_one_rank)


def _one_rank():
    mesh = replicas((2, 1))
    for mp_policy in (None, {"param_dtype": torch.bfloat16}):
        side_by_side(mesh=mesh["shard"], mp_policy=mp_policy)


def test_cpu_offload(ranks2):
    ranks2.run(_offload)


def _offload():
    histories = []
    for library in LIBRARIES:
        policy = library.CPUOffloadPolicy(pin_memory=False)
        histories.append(train(build(library, offload_policy=policy)))
    assert_same(*histories)


# -- several roots ----------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Two models that are sharded on their own; the pair itself is not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.leaf = Net(out=12), Net(blocks=1), nn.Linear(12, 12)

    def forward(self, x):
        return self.second(torch.relu(self.leaf(self.first(x)))) + self.first(2 * x)[:, :3] + self.second(x)


def each_alone(model, fully_shard):
    shard(model.first, fully_shard)
    fully_shard(model.leaf)
    shard(model.second, fully_shard)
    return model


def in_turns(model, step, data):
    """One loss for both, then one for each, so that backwards of different roots follow each other."""
    losses = [loss_of(model(data(step))), loss_of(model.first(data(step + 1))), loss_of(model.second(data(step + 2)))]
    losses[2].backward()
    (losses[0] + losses[1]).backward()
    return losses


@pytest.mark.parametrize("iterate", [one_batch, in_turns])
def test_several_roots(ranks2, iterate):
    ranks2.run(_several_roots, iterate)


def _several_roots(iterate):
    assert_close(side_by_side(Pair, iterate=iterate, apply=each_alone), one_process(Pair, iterate))


def part_alone(model, step, data):
    """From the second step on, a sharded part is also called by itself."""
    losses = [loss_of(model(data(step)))]
    if step:
        losses.append(loss_of(model.blocks[1](data(step + 1))))
        if step == 1:
            losses[1].backward()
    (losses[0] if len(losses) == 1 or step == 1 else sum(losses)).backward()
    return losses


def evaluates(model, step, data):
    """Between training steps the whole, and a part, run without gradients."""
    loss = loss_of(model(data(step)))
    loss.backward()
    with torch.no_grad():
        return [loss, model.blocks[1](data(step + 1))]


@pytest.mark.parametrize("iterate", [part_alone, evaluates])
@pytest.mark.parametrize("apply", [shard, layers])
def test_part_alone(ranks2, iterate, apply):
    ranks2.run(_part_alone, iterate, apply)


def _part_alone(iterate, apply):
    assert_close(side_by_side(iterate=iterate, apply=apply), one_process(iterate=iterate))


# -- frozen and ignored parameters ------------------------------------------------------------------------------------


def freeze(model, step):
    """Another part in each step: some of a group, a whole group, all but one parameter, and so on."""
    parts = ["blocks.0.up", "blocks.0", "", "inp", "head.bias"]
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(parts[step]) or name == "head.weight")


def freezes(model, step, data):
    freeze(model, step)
    model.zero_grad()
    return one_batch(model, step, data)


def frozen(*names):
    def make():
        model = Net()
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(names))
        return model

    return make


FROZEN = {
    "one": "blocks.0.up.weight",
    "group": "blocks.0",
    "inner group": "blocks.1",
    "outer layers": ("inp", "head"),
    "biases": ("inp.bias", "blocks.0.up.bias", "blocks.1.down.bias"),
}


@pytest.mark.parametrize("unused_too", [False, True])
@pytest.mark.parametrize("name", FROZEN)
def test_frozen(ranks2, name, unused_too):
    ranks2.run(_frozen, name, unused_too)


def _frozen(name, unused_too):
    names = FROZEN[name] if isinstance(FROZEN[name], tuple) else (FROZEN[name],)
    history = side_by_side(frozen(*names), lambda model: model.set_reduce_scatter_unused_params(unused_too))
    assert_close(history, one_process(frozen(*names)))


@pytest.mark.parametrize("apply", [shard, root_only, lists])
def test_freezing_between_steps(ranks2, apply):
    ranks2.run(_freezing, apply)


def _freezing(apply):
    assert_close(side_by_side(iterate=freezes, steps=5, apply=apply), one_process(iterate=freezes, steps=5))


def test_ignored_parameters(ranks2):
    ranks2.run(_ignored)


def _ignored():
    def apply(model, fully_shard):
        ignored = {model.inp.weight, model.blocks[0].norm.bias, *model.blocks[1].parameters()}
        return shard(model, fully_shard, ignored_params=ignored)

    (first, *_) = side_by_side(apply=apply)
    assert type(first["gradient of inp.weight"]) is torch.Tensor
    assert type(first["gradient of inp.bias"]) is not torch.Tensor


def test_tied_over_groups(ranks2):
    ranks2.run(_tied_over_groups)


def _tied_over_groups():
    """Sharded in the group of each, it would be two parameters from then on; the call or the forward must refuse."""

    def apply(model, fully_shard):
        fully_shard(model.inp)
        return shard(model, fully_shard)

    for library in (torch_fsdp, LIBRARIES[0]):
        with pytest.raises(ValueError, match="weight"):
            build(library, TiedNet, apply)(my_part(batch(0)))


# -- parameters that others replace -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_conversion(ranks2, dtype, when):
    ranks2.run(_conversion, dtype, when)


def _conversion(dtype, when):
    """After construction, or after steps; torch notes dtypes at the first forward, so there only before it."""

    def iterate(model, step, data):
        loss = loss_of(model(data(step).to(dtype)))
        loss.backward()
        return [loss]

    histories = []
    for library in LIBRARIES:
        model = build(library, lambda: Net(dim=12, out=5))
        if when and library is LIBRARIES[0]:
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            train(model, steps=when)
            model.load_state_dict(weights)
        histories.append(train(model.to(dtype), iterate))
    assert_same(*histories)


@pytest.mark.parametrize("make", [Net, TiedNet])
@pytest.mark.parametrize("assign", [False, True])
def test_loading(ranks4, make, assign):
    ranks4.run(_loading, make, assign)


def _loading(make, assign):
    histories = []
    for library in LIBRARIES:
        torch.manual_seed(1)
        source = shard(make(), library.fully_shard)
        model = build(library, make)
        model.load_state_dict(source.state_dict(), assign=assign)
        histories.append(train(model))
        if not assign:  # which after the first forward torch does not follow
            model.load_state_dict(source.state_dict())
            histories[-1] += train(model, steps=2)
    assert_same(*histories)
