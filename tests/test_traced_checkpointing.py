"""Activation checkpointing around, inside and between sharded modules: equal bits, and no gather more than eagerly."""

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from models import shard
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from traced import SmallBlock, SmallNet, Training, assert_equal, compiled, graphs, of_stage

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.passes.graph_view import gathers
from fsdp_compile.torch_compat import dynamo_counts


def save_matmuls(ctx, op, *args, **kwargs):
    is_matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


def save_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_SAVE


POLICIES = {"none": None, "save matmuls": save_matmuls, "recompute": recompute_all, "save": save_all}


def checkpointed(policy, function, *args):
    choice = POLICIES[policy]
    contexts = {} if choice is None else {"context_fn": partial(create_selective_checkpoint_contexts, choice)}
    return checkpoint(function, *args, use_reentrant=False, **contexts)


# -- where the checkpoints are ----------------------------------------------------------------------------------------


class CheckpointedBlock(SmallBlock):
    policy = "none"

    def forward(self, x):
        return checkpointed(self.policy, super().forward, x)


class Inside(SmallNet):
    block = CheckpointedBlock

    def __init__(self, policy):
        super().__init__(blocks=4)
        for block in self.blocks:
            block.policy = policy


class PartInside(SmallBlock):
    """Only the second half of a block is recomputed."""

    policy = "none"

    def forward(self, x):
        h = self.up(x)
        return x + checkpointed(self.policy, lambda h: self.down(torch.relu(h)), h)


class OfParts(Inside):
    block = PartInside


class Around(SmallNet):
    def __init__(self, policy):
        super().__init__(blocks=4)
        self.policy = policy

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpointed(self.policy, block, x)
        return self.head(x)


class AroundSeveral(Around):
    def forward(self, x):
        x = self.inp(x)
        for first in (0, 2):
            x = checkpointed(self.policy, self.run, x, first)
        return self.head(x)

    def run(self, x, first):
        for block in self.blocks[first : first + 2]:
            x = block(x)
        return x


class AroundEveryOther(Around):
    def forward(self, x):
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if index % 2 else checkpointed(self.policy, block, x)
        return self.head(x)


class AroundAll(Around):
    """The root's own layers are recomputed too."""

    def forward(self, x):
        return checkpointed(self.policy, self.run, x)

    def run(self, x):
        return SmallNet.forward(self, x)


class Nested(Around):
    def forward(self, x):
        return self.head(checkpointed(self.policy, self.outer, self.inp(x)))

    def outer(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def build(cls, *args, **kwargs):
    torch.manual_seed(0)
    return shard(cls(*args), fully_shard, **kwargs)


def plain(**kwargs):
    return build(partial(SmallNet, blocks=4), **kwargs)


def assert_gathered_once(stages):
    """Forward gathers each parameter once; the backward at most once, and none that is kept."""
    found = {}
    for stage in ("forward after", "backward after"):
        (graph,) = of_stage(stages, stage)
        found[stage] = Counter(name for gather in gathers(graph) for name in gather.tag.params)
        assert set(found[stage].values()) == {1}, (stage, found[stage])
    forward, backward = found.values()
    assert set(forward) == {name for name, _ in plain().named_parameters()}
    weights = {name for name in forward if name.startswith("blocks.") and name.endswith("weight")}
    assert weights <= set(backward) <= {name for name in forward if name.startswith("blocks.")}


CASES = [
    *product((Inside, Around), POLICIES),
    *product((OfParts, AroundSeveral, AroundEveryOther), ("none", "save matmuls")),
]


@pytest.mark.parametrize("cls, policy", CASES)
def test_checkpoints(ranks2, cls, policy):
    ranks2.run(_checkpoints, cls, policy)


def _checkpoints(cls, policy):
    reference, eager, model = Training(plain()), Training(build(cls, policy)), build(cls, policy)
    traced = Training(model, compiled(model))
    with graphs() as stages:
        assert_equal(reference.steps(0, 1), traced.steps(0, 1))
    assert_equal(reference, eager.steps(0, 1))
    assert_gathered_once(stages)
    assert dynamo_counts() == (1, 0, 0)


def test_saving_everything_around_several_blocks_eagerly(ranks2):
    ranks2.run(_saving_everything)


def _saving_everything():
    assert_equal(Training(plain()).steps(0, 1), Training(build(AroundSeveral, "save")).steps(0, 1))


def test_saving_everything_around_several_blocks(ranks2):
    ranks2.run(_saving_everything_compiled)


def _saving_everything_compiled():
    model = build(AroundSeveral, "save")
    with graphs() as stages:
        assert_equal(Training(plain()).steps(0, 1), Training(model, compiled(model)).steps(0, 1))
    assert_gathered_once(stages)


@pytest.mark.parametrize("cls", [AroundAll, Nested])
def test_checkpoints_of_everything_and_in_each_other(ranks2, cls):
    ranks2.run(_everything, cls)


def _everything(cls):
    reference, model = Training(plain()), build(cls, "none")
    traced = Training(model, compiled(model))
    with graphs() as stages:
        assert_equal(reference.steps(0, 1), traced.steps(0, 1))
    assert_gathered_once(stages)


@pytest.mark.parametrize("cls", [Inside, Around])
@pytest.mark.parametrize("reshard", [True, False])
def test_other_settings(ranks2, cls, reshard):
    ranks2.run(_settings, cls, reshard)


def _settings(cls, reshard):
    """What is kept after forward is not gathered again, not even to recompute with it."""
    kwargs = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "reshard_after_forward": reshard}
    reference, model = Training(plain(**kwargs)), build(cls, "none", **kwargs)
    traced = Training(model, compiled(model))
    with graphs() as stages:
        assert_equal(reference.steps(0, 1), traced.steps(0, 1))
    (backward,) = of_stage(stages, "backward after")
    gathered = Counter(name for gather in gathers(backward) for name in gather.tag.params)
    assert set(gathered.values()) == ({1} if reshard else set())


@pytest.mark.parametrize("sharded_first", [True, False])
def test_wrapped_blocks(ranks2, sharded_first):
    ranks2.run(_wrapped, sharded_first)


def _wrapped(sharded_first):
    """Torch's wrapper module for checkpoints, around a sharded block and as the module that is sharded."""

    def build_wrapped():
        torch.manual_seed(0)
        model = SmallNet(blocks=4)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = (
                checkpoint_wrapper(fully_shard(block)) if sharded_first else fully_shard(checkpoint_wrapper(block))
            )
        return fully_shard(model)

    reference, eager, model = Training(plain()), Training(build_wrapped()), build_wrapped()
    traced = Training(model, compiled(model))
    with graphs() as stages:
        assert_equal(reference.steps(0, 1), traced.steps(0, 1))
    assert_equal(reference, eager.steps(0, 1))
    for stage in ("forward after", "backward after"):
        (graph,) = of_stage(stages, stage)
        counts = Counter((gather.tag.group, name) for gather in gathers(graph) for name in gather.tag.params)
        assert set(counts.values()) == {1}, (stage, counts)


class DropoutBlock(SmallBlock):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


class DropoutAround(Around):
    block = DropoutBlock


def test_dropout_is_recomputed_alike(ranks2):
    ranks2.run(_dropout)


def _dropout():
    trainings = []
    for traced in (False, True):
        model = build(DropoutAround, "none")
        torch.manual_seed(1)
        trainings.append(Training(model, compiled(model) if traced else None).steps(0, 1))
    assert_equal(*trainings)
