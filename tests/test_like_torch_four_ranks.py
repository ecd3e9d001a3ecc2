"""Over four ranks, and over shards and replicas, training is torch's own."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from models import Net, local
from side_by_side import LIBRARIES, assert_close, assert_same, build, one_process, side_by_side, train
from side_by_side_cases import (
    CASES,
    MIXED,
    NOT_COUNTED,
    SCALINGS,
    accumulate,
    agree,
    children,
    iterate_for,
    replicas,
    scale,
    sync_and_say_last,
    sync_last,
)

FP16 = {"reduce_dtype": torch.float16}


@pytest.mark.parametrize("name", ["uneven", "one row", "shapes in groups", "lists", "tied in lists", "leaf of one row"])
def test_shards(ranks4, name):
    ranks4.run(agree, name)


@pytest.mark.parametrize("name", ["shapes", "lists"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)], ids=str)
def test_replicas(ranks4, name, shape):
    ranks4.run(agree, name, shape)


@pytest.mark.parametrize("reshard_after_forward", [None, True, False, 1, 2, 4], ids=str)
@pytest.mark.parametrize("name", ["uneven", "subset of the blocks"])
def test_reshard_after_forward(ranks4, name, reshard_after_forward):
    ranks4.run(_reshard_after_forward, name, reshard_after_forward)


def _reshard_after_forward(name, reshard_after_forward):
    make, apply = CASES[name]
    compare = None if name in NOT_COUNTED else Counter
    iterate = iterate_for(name)
    side_by_side(make, iterate=iterate, compare=compare, apply=apply, reshard_after_forward=reshard_after_forward)


def test_order_over_replicas(ranks4):
    ranks4.run(_order_over_replicas)


def _order_over_replicas():
    """An all-reduce may overlap the next reduce-scatter, but each group of ranks has its own collectives in order."""
    mesh = replicas()

    def of_each_group(events):
        events = [event for event in events if event[0] != "product"]
        return [[event for event in events if (event[0] == "all-reduce") is replicas] for replicas in (True, False)]

    side_by_side(lambda: Net(blocks=4), mesh=mesh, compare=of_each_group)


@pytest.mark.parametrize("setting", [True, False])
def test_setting_after_fewer_ranks(ranks4, setting):
    """At runtime it is all ranks or none again, not fewer."""
    ranks4.run(_after_fewer, setting)


def _after_fewer(setting):
    side_by_side(
        configure=lambda model: model.set_reshard_after_forward(setting), compare=Counter, reshard_after_forward=2
    )


def test_meshes_of_modules(ranks4):
    ranks4.run(_meshes)


def _meshes():
    mesh = replicas()

    def apply(model, fully_shard):
        fully_shard(model.blocks[0], mesh=mesh)
        fully_shard(model.blocks[1])
        return fully_shard(model, mesh=mesh, reshard_after_forward=True)

    assert_close(side_by_side(apply=apply), one_process())


def test_late_initialization(ranks4):
    ranks4.run(_late)


def _late():
    histories = []
    for library in LIBRARIES:
        with torch.device("meta"):
            model = build(library, lambda: Net(dim=13), children)
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        histories.append(train(model, iterate_for("uneven")))
    assert_same(*histories)


# -- gradients over replicas ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("mp_policy", [None, MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize(
    "way", [sync_last, all_reduce_last, shards_then_all, all_reduce_of_one_block, sync_and_say_last]
)
def test_accumulation_over_replicas(ranks4, way, mp_policy):
    ranks4.run(_over_replicas, way, mp_policy)


def _over_replicas(way, mp_policy):
    iterate = accumulate(way)
    history = side_by_side(iterate=iterate, steps=2, mesh=replicas(), mp_policy=mp_policy)
    if mp_policy is None:
        assert_close(history, one_process(iterate=iterate, steps=2))


def test_gradient_sync_means_all_reduce(ranks4):
    ranks4.run(_over_replicas, sync_means_all_reduce, None)


@pytest.mark.parametrize("name", ["factor 3", "factor 3 in fp16", "sums", "sums in bf16"])
def test_scaling_over_replicas(ranks4, name):
    ranks4.run(_scaling_over_replicas, name)


def _scaling_over_replicas(name):
    factor, force_sum, mp_policy = SCALINGS[name]
    side_by_side(configure=scale(factor, force_sum), mp_policy=mp_policy, mesh=replicas())


@pytest.mark.parametrize("mp_policy", [None, MIXED, FP16], ids=["fp32", "mixed", "fp16"])
def test_all_reduce_hook_over_replicas(ranks4, mp_policy):
    ranks4.run(_hook_over_replicas, mp_policy)


def _hook_over_replicas(mp_policy):
    """After the all-reduce if there is one; or the hook makes it, on a 1-D mesh."""
    mesh = replicas()
    group = mesh.get_group("replicate")

    def on_all(hook):
        return lambda model: [module.set_all_reduce_hook(hook) for module in (model, *model.blocks)]

    def average(reduced):
        dist.all_reduce(reduced, group=group)
        reduced.div_(2)

    doubled = on_all(lambda reduced: reduced.mul_(2))
    native = side_by_side(mesh=mesh, mp_policy=mp_policy, steps=2)
    side_by_side(mesh=mesh, mp_policy=mp_policy, steps=2, configure=doubled, iterate=accumulate(all_reduce_last, 2))
    by_hook = side_by_side(mesh=mesh["shard"], mp_policy=mp_policy, steps=2, configure=on_all(average))
    for mine, other in zip(native, by_hook, strict=True):
        for name in mine if mp_policy is not FP16 else ():  # where divisions come at other places
            assert torch.equal(local(mine[name]), local(other[name])), name


BF16 = {"reduce_dtype": torch.bfloat16}
SMALL = [FP16, {"param_dtype": torch.float16}, {"param_dtype": torch.bfloat16, **FP16}, BF16]


@pytest.mark.parametrize("mp_policy", SMALL, ids=str)
def test_small_floats(ranks4, mp_policy):
    ranks4.run(_small_floats, mp_policy)


def _small_floats(mp_policy):
    """With gradients that overflow fp16 if they are summed before they are divided, and that vanish if after."""
    for factor in (3e3, 1e-6):

        def iterate(model, step, data, factor=factor):
            loss = model(data(step)).float().abs().mean() * factor
            loss.backward()
            return [loss]

        side_by_side(iterate=iterate, mp_policy=mp_policy, steps=2)
