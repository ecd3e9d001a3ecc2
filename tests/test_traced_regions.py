"""Models of which only parts are compiled: blocks for themselves, subtrees, and all mixtures with eager modules."""

import pytest
import torch
from models import batch, my_part, shard
from torch import nn
from traced import SmallBlock, SmallNet, Training, assert_equal, gradients, graphs, of_stage, reset

from fsdp_compile import MixedPrecisionPolicy, explain, fully_shard
from fsdp_compile.passes.graph_view import gathers
from fsdp_compile.torch_compat import dynamo_counts

ARGUMENTS = {"backend": "fsdp_eager", "fullgraph": True}


def build(cls=SmallNet, *args, **kwargs):
    torch.manual_seed(0)
    return shard(cls(*args), fully_shard, **kwargs)


def in_place(owner, name):
    getattr(owner, name).compile(**ARGUMENTS)


def wrapped(owner, name):
    setattr(owner, name, torch.compile(getattr(owner, name), **ARGUMENTS))


HOW = {"block.compile()": in_place, "torch.compile(block)": wrapped}
how = pytest.mark.parametrize("how", HOW)
WHICH = {"all": (0, 1, 2, 3), "first": (0,), "last": (3,), "every other": (0, 2), "inner": (1, 2)}


def agree(eager, traced, steps=(0, 1, 2)):
    """Train both, with a forward without gradients in between."""
    for training in (eager, traced):
        for step in steps:
            training.steps(step)
            with torch.no_grad():
                training.call(batch(step))
    assert_equal(eager, traced)


@pytest.mark.parametrize("which", WHICH)
@how
def test_blocks(ranks2, which, how):
    ranks2.run(_blocks, which, how)


def _blocks(which, how):
    """Of equal blocks one graph serves all: one for training and one for evaluation."""
    for kwargs in ({}, {"reshard_after_forward": False}):
        reset()
        eager, model = Training(build(SmallNet, 12, 4, **kwargs)), build(SmallNet, 12, 4, **kwargs)
        traced = Training(model)
        for index in WHICH[which]:
            HOW[how](model.blocks, str(index))
        agree(eager, traced)
        assert dynamo_counts()[0] == 2


@pytest.mark.parametrize("count", [12])
@how
def test_many_blocks(ranks2, count, how):
    ranks2.run(_many, count, how)


def _many(count, how):
    eager, model = Training(build(SmallNet, 12, count)), build(SmallNet, 12, count)
    traced = Training(model)
    for index in range(count):
        HOW[how](model.blocks, str(index))
    with graphs() as stages:
        assert_equal(eager.steps(0, 1), traced.steps(0, 1))
    assert dynamo_counts() == (1, 0, 0)
    assert len(of_stage(stages, "forward after")) == 1


@how
def test_transitions_are_in_the_graph(ranks2, how):
    ranks2.run(_in_the_graph, how)


def _in_the_graph(how):
    model = build(SmallNet, 12, 2)
    for index in range(2):
        HOW[how](model.blocks, str(index))
    with graphs() as stages:
        Training(model).steps(0)
    assert all(gathers(graph) for graph in of_stage(stages, "forward after"))
    ran = {run.name: run.how for run in explain(model).modules}
    assert [ran[f"blocks.{index}"] for index in range(2)] == ["in a graph"] * 2
    assert ran[""] != "in a graph"


class Pairs(nn.Module):
    """A sharded parent of two sharded blocks."""

    def __init__(self, dim):
        super().__init__()
        self.a, self.b = SmallBlock(dim), SmallBlock(dim)
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.b(self.a(x)) * self.gain


class Tree(SmallNet):
    """The tail belongs to the root's group."""

    block = Pairs

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tail = SmallBlock(12)

    def forward(self, x):
        return super().forward(self.tail(x))


def tree(**kwargs):
    torch.manual_seed(0)
    model = Tree(blocks=3)
    for pair in model.blocks:
        fully_shard(pair.a, **kwargs)
        fully_shard(pair.b, **kwargs)
    return shard(model, fully_shard, **kwargs)


# What is compiled, and how many graphs that makes for training alone.
TREES = {
    "parents": (["blocks.0", "blocks.1", "blocks.2"], 1),
    "one parent": (["blocks.1"], 1),
    "leaves": (["blocks.0.a", "blocks.0.b", "blocks.2.b"], 1),
    "a parent and leaves of another": (["blocks.0", "blocks.1.a"], 2),
    "a leaf and its parent": (["blocks.0.a", "blocks.0"], 1),
    "an unsharded block": (["tail"], 1),
    "a leaf and an unsharded block": (["blocks.1.b", "tail"], 2),
}


@pytest.mark.parametrize("name", TREES)
@how
def test_mixed_trees(ranks2, name, how):
    ranks2.run(_trees, name, how)


def _trees(name, how):
    compiled, expected = TREES[name]
    for kwargs in ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}):
        reset()
        eager, model = Training(tree(**kwargs)), tree(**kwargs)
        traced = Training(model)
        for path in compiled:
            owner, _, child = path.rpartition(".")
            HOW[how](model.get_submodule(owner), child)
        assert_equal(eager.steps(0, 1), traced.steps(0, 1))
        assert dynamo_counts()[:2] == (expected, 0)


def test_part_of_the_root_is_a_compiled_function(ranks2):
    ranks2.run(_function)


class Function(SmallNet):
    """The blocks run in a function that is compiled, with nothing of the root's own."""

    def middle(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.middle(self.inp(x)))


def _function():
    eager, model = Training(build(Function)), build(Function)
    model.middle = torch.compile(model.middle, **ARGUMENTS)
    with graphs() as stages:
        assert_equal(eager.steps(0, 1, 2), Training(model).steps(0, 1, 2))
    assert dynamo_counts() == (1, 0, 0)
    (forward,) = of_stage(stages, "forward after")
    assert len(list(gathers(forward))) == 2


@how
def test_compiled_in_the_middle_of_a_training(ranks2, how):
    ranks2.run(_middle, how)


def _middle(how):
    """Eager, then some blocks, then more of them, then the root around all; with an unfinished accumulation."""
    eager, model = Training(build(SmallNet, 12, 4)), build(SmallNet, 12, 4)
    traced = Training(model)
    for training in (eager, traced):
        training.steps(0)
        for parts in ((0,), (1, 3)):
            training.call(my_part(batch(7))).square().mean().backward()
            if training is traced:
                for index in parts:
                    HOW[how](model.blocks, str(index))
            training.steps(1, 2)
        if training is traced:
            training.forward = torch.compile(model, **ARGUMENTS)
        training.steps(3, 4)
    assert_equal(eager, traced)


@how
def test_a_block_alone(ranks2, how):
    ranks2.run(_alone, how)


def _alone(how):
    """A compiled block is called by itself, outside of its root, between the root's steps."""
    histories = []
    for compiling in (False, True):
        training = Training(build())
        if compiling:
            HOW[how](training.model.blocks, "0")
        for step in range(2):
            training.steps(step)
            training.model.blocks[0](my_part(batch(step))).square().mean().backward()
            training.history.append(gradients(training.model))
            training.update()
        histories.append(training)
    assert_equal(*histories)
