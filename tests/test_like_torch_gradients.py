"""Gradients are torch's own: accumulated, reduced, scaled, hooked, absent or zero alike."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import Net, shard
from side_by_side import LIBRARIES, assert_close, assert_same, build, loss_of, one_process, side_by_side, train
from torch.distributed.device_mesh import init_device_mesh

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


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


def sync_root_always(model, i, last):
    model.set_requires_gradient_sync(last)
    model.set_requires_gradient_sync(True, recurse=False)


def keep_unsharded(model, i, last):
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def sync_and_say_last(model, i, last):
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)


def say_last(model, i, last):
    model.set_is_last_backward(last)


def keep_one_block(model, i, last):
    model.blocks[0].set_reshard_after_backward(last, recurse=False)
    model.set_is_last_backward(last)


WAYS = [sync_last, sync_root_always, keep_unsharded, sync_and_say_last, say_last, keep_one_block]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
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


def hsdp():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def all_reduce_last(model, i, last):
    model.set_requires_all_reduce(last)


def shards_then_all(model, i, last):
    """Nothing at first, then over the shard ranks only, then over the replicas too."""
    model.set_requires_gradient_sync(i > 0)
    model.set_requires_all_reduce(last)


def sync_means_all_reduce(model, i, last):
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(last)


def all_reduce_of_one_block(model, i, last):
    model.set_requires_all_reduce(last)
    model.blocks[1].set_requires_all_reduce(True)



@pytest.mark.parametrize("mp_policy", [None, MIXED, {"reduce_dtype": torch.bfloat16}], ids=["fp32", "mixed", "bf16"])
@pytest.mark.parametrize(
    "way", [sync_last, all_reduce_last, shards_then_all, all_reduce_of_one_block, sync_and_say_last]
)
def test_accumulation_over_replicas(ranks4, way, mp_policy):
    ranks4.run(_over_replicas, way, mp_policy)


def _over_replicas(way, mp_policy):
    iterate = accumulate(way)
    history = side_by_side(iterate=iterate, mesh=hsdp(), mp_policy=mp_policy)
    if mp_policy is None:
        assert_close(history, one_process(iterate=iterate))


def test_gradient_sync_means_all_reduce(ranks4):
    ranks4.run(_over_replicas, sync_means_all_reduce, None)


def test_all_reduce_without_replicas(ranks2):
    ranks2.run(_without_replicas)


def _without_replicas():
    side_by_side(configure=lambda model: model.set_requires_all_reduce(False))


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


@pytest.mark.parametrize("name", SCALINGS)
def test_scaling(ranks2, name):
    ranks2.run(_scaling, name)


def _scaling(name):
    factor, force_sum, mp_policy = SCALINGS[name]
    configure = scale(factor, force_sum)
    history = side_by_side(configure=configure, mp_policy=mp_policy, iterate=accumulate(sync_last, 2))
    single = one_process(iterate=accumulate(sync_last, 2))
    if mp_policy is None:
        first = [{name: value for name, value in history[0].items() if "inp" in name or "blocks.0" in name}]
        kept = [{name: single[0][name] for name in first[0]}]
        assert_close(first, kept, scale=2 / (factor or 2))


@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "factor of the ranks"])
def test_scaling_over_replicas(ranks4, name):
    ranks4.run(_scaling_over_replicas, name)


def _scaling_over_replicas(name):
    factor, force_sum, mp_policy = SCALINGS[name]
    side_by_side(configure=scale(factor, force_sum), mp_policy=mp_policy, mesh=hsdp())


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


@pytest.mark.parametrize("mp_policy", [None, MIXED, {"reduce_dtype": torch.float16}], ids=["fp32", "mixed", "fp16"])
def test_all_reduce_hook_over_replicas(ranks4, mp_policy):
    ranks4.run(_hook_over_replicas, mp_policy)


def _hook_over_replicas(mp_policy):
    """After the all-reduce if there is one; or the hook makes it, on a 1-D mesh."""
    mesh = hsdp()
    group = mesh.get_group("replicate")

    def on_all(hook):
        return lambda model: [module.set_all_reduce_hook(hook) for module in (model, *model.blocks)]

    def average(reduced):
        dist.all_reduce(reduced, group=group)
        reduced.div_(2)

    doubled = on_all(lambda reduced: reduced.mul_(2))
    native = side_by_side(mesh=mesh, mp_policy=mp_policy)
    side_by_side(mesh=mesh, mp_policy=mp_policy, configure=doubled, iterate=accumulate(all_reduce_last))
    by_hook = side_by_side(mesh=mesh["shard"], mp_policy=mp_policy, configure=on_all(average))
    if mp_policy is not None and mp_policy["reduce_dtype"] is torch.float32:
        for mine, other in zip(native, by_hook, strict=True):
            assert all(torch.equal(mine[n].to_local(), other[n].to_local()) for n in mine if n.startswith("gradient"))


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
