"""Gradients are torch's own: accumulated, reduced, scaled, hooked, absent or zero alike."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import Net, shard
from side_by_side import LIBRARIES, assert_close, assert_same, build, loss_of, one_process, side_by_side, train
from side_by_side_cases import MIXED, SCALINGS, accumulate, scale, sync_and_say_last, sync_last


def sync_root_always(model, i, last):
    model.set_requires_gradient_sync(last)
    model.set_requires_gradient_sync(True, recurse=False)


def keep_unsharded(model, i, last):
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def say_last(model, i, last):
    model.set_is_last_backward(last)


def keep_one_block(model, i, last):
    model.blocks[0].set_reshard_after_backward(last, recurse=False)
    model.set_is_last_backward(last)


WAYS = [sync_last, sync_root_always, keep_unsharded, sync_and_say_last, say_last, keep_one_block]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_accumulation(ranks2, way, micro_batches):
    ranks2.run(_accumulation, way, micro_batches)


def _accumulation(way, micro_batches):
    iterate = accumulate(way, micro_batches)
    assert_close(side_by_side(iterate=iterate), one_process(iterate=iterate))


POLICIES = {
    "bf16, fp32": MIXED,
    "bf16": {"param_dtype": torch.bfloat16},
    "fp32, bf16": {"reduce_dtype": torch.bfloat16},
    "fp16": {"param_dtype": torch.float16},
    "bf16, fp16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_accumulation_in_the_reduce_dtype(ranks2, policy):
    ranks2.run(_accumulation_in_the_reduce_dtype, policy)


def _accumulation_in_the_reduce_dtype(policy):
    once = side_by_side(mp_policy=POLICIES[policy], iterate=accumulate(sync_last, 4))
    if policy == "bf16, fp32":  # sums of bf16 gradients in fp32 are not what sums in bf16 would be
        other = side_by_side(mp_policy={"param_dtype": torch.bfloat16}, iterate=accumulate(sync_last, 4))
        with pytest.raises(AssertionError):
            assert_same(once, other)


def test_all_reduce_without_replicas(ranks2):
    ranks2.run(_without_replicas)


def _without_replicas():
    side_by_side(configure=lambda model: model.set_requires_all_reduce(False))


@pytest.mark.parametrize("name", SCALINGS)
def test_scaling(ranks2, name):
    ranks2.run(_scaling, name)


def _scaling(name):
    factor, force_sum, mp_policy = SCALINGS[name]
    configure = scale(factor, force_sum)
    (first, *_) = side_by_side(configure=configure, mp_policy=mp_policy, iterate=accumulate(sync_last, 2))
    (single, *_) = one_process(iterate=accumulate(sync_last, 2))
    if mp_policy is None:
        scaled = {name: value for name, value in single.items() if "blocks.1" not in name}
        assert_close([first], [scaled], scale=2 / (factor or 2))
        others = {name: value for name, value in single.items() if "gradient of blocks.1" in name}
        assert_close([first], [others])


def test_factor_without_sums(ranks2):
    """Gloo lacks the reduction that torch needs for this, so one process tells what is right."""
    ranks2.run(_factor_without_sums)


def _factor_without_sums():
    model = build(LIBRARIES[0], apply=lambda model, fully_shard: fully_shard(model))
    model.set_gradient_divide_factor(5.0)
    assert_close(train(model, steps=1), one_process(steps=1), scale=2 / 5)


@pytest.mark.parametrize("buffers", [1, 2, 9])
def test_reduce_scatter_buffers(ranks2, buffers):
    ranks2.run(_buffers, buffers)


def _buffers(buffers):
    side_by_side(lambda: Net(blocks=5), lambda model: model.set_reduce_scatter_max_input_buffers(buffers))


def test_all_reduce_hook(ranks2):
    ranks2.run(_hook)


def _hook():
    for mp_policy in (None, {"reduce_dtype": torch.bfloat16}, {"reduce_dtype": torch.float16}):
        seen = []

        def hook(reduced, seen=seen):
            seen.append((reduced.dtype, reduced.shape, reduced.sum().item()))
            reduced.mul_(3.0)

        def configure(model, hook=hook):
            model.set_all_reduce_hook(hook)
            model.blocks[0].set_all_reduce_hook(hook)

        history = side_by_side(configure=configure, mp_policy=mp_policy, steps=2)
        assert len(seen) == 8 and seen[:4] == seen[4:]
        with pytest.raises(AssertionError, match="gradient of"):
            assert_same(history, side_by_side(mp_policy=mp_policy, steps=2))


class Branches(nn.Module):
    """Each rank, or each step, takes its own branch; one parameter is never used."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.never = nn.Parameter(torch.ones(5, 3))

    def forward(self, x, branch):
        return torch.relu(self.branches[branch](x))


class BranchNet(Net):
    def __init__(self):
        super().__init__(blocks=2)
        self.fork = Branches()
        self.first_used_later = nn.Parameter(torch.ones(12))

    def forward(self, x, branch=0, blocks=2, late=False):
        x = self.inp(x)
        for block in self.blocks[:blocks]:
            x = block(x)
        x = self.fork(x, branch)
        return self.head(x * self.first_used_later if late else x)


def apply_to_fork(model, fully_shard, **kwargs):
    fully_shard(model.fork, **kwargs)
    return shard(model, fully_shard, **kwargs)


def same_branch(model, step, data):
    """Parameters come into use, and go out of it, from step to step."""
    loss = loss_of(model(data(step), step % 2, late=step >= 2))
    loss.backward()
    return [loss]


def same_modules(model, step, data):
    """So do whole modules."""
    loss = loss_of(model(data(step), step % 2, blocks=1 + step % 2))
    loss.backward()
    return [loss]


def own_branch(model, step, data):
    loss = loss_of(model(data(step), dist.get_rank() if step % 2 else 0))
    loss.backward()
    return [loss]


@pytest.mark.parametrize("iterate", [same_branch, same_modules])
def test_unused_parameters(ranks2, iterate):
    ranks2.run(_unused, iterate)


def _unused(iterate):
    history = side_by_side(BranchNet, iterate=iterate, steps=4, apply=apply_to_fork)
    assert history[0]["gradient of fork.branches.1.weight"] is None
    assert (history[0]["gradient of blocks.1.up.weight"] is None) == (iterate is same_modules)
    used = [record["gradient of first_used_later"] is not None for record in history]
    assert used == [False, False, iterate is same_branch, iterate is same_branch]
    assert_close(history, one_process(BranchNet, iterate, steps=4))


@pytest.mark.parametrize("iterate", [same_branch, own_branch])
@pytest.mark.parametrize("mp_policy", [None, MIXED], ids=["fp32", "mixed"])
def test_zeros_for_unused_parameters(ranks2, iterate, mp_policy):
    ranks2.run(_zeros, iterate, mp_policy)


def _zeros(iterate, mp_policy):
    def configure(model):
        model.set_reduce_scatter_unused_params(True)

    history = side_by_side(BranchNet, configure, iterate, steps=4, apply=apply_to_fork, mp_policy=mp_policy)
    assert not history[0]["gradient of fork.never"].to_local().any()
    assert history[0]["gradient of fork.branches.1.weight"] is not None


class Twice(Net):
    """Calls one module twice."""

    def forward(self, x):
        x = self.blocks[0](self.blocks[1](self.blocks[0](self.inp(x))))
        return self.head(x)


def two_forwards(model, step, data):
    """Two forwards, one backward for both."""
    loss = loss_of(model(data(2 * step))) + loss_of(model(data(2 * step + 1)))
    loss.backward()
    return [loss]


def two_backwards(model, step, data):
    """Two backwards through one forward."""
    output = model(data(step))
    losses = [loss_of(output), output.abs().mean()]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    return losses


def input_gradient(model, step, data):
    x = data(step).requires_grad_()
    loss = loss_of(model(x))
    loss.backward()
    return [loss, x.grad]


@pytest.mark.parametrize("make", [Net, Twice])
@pytest.mark.parametrize("iterate", [two_forwards, two_backwards, input_gradient])
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_several_passes(ranks2, make, iterate, reshard_after_forward):
    ranks2.run(_several_passes, make, iterate, reshard_after_forward)


def _several_passes(make, iterate, reshard_after_forward):
    history = side_by_side(make, iterate=iterate, reshard_after_forward=reshard_after_forward)
    assert_close(history, one_process(make, iterate))
