"""An exception leaves a forward, compiled or not: from then on modules show sharded parameters, and they train on."""

import pytest
import torch
from models import assert_same, local, shard
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from traced import SmallBlock, SmallNet, Training, assert_equal, gradients, reset

from fsdp_compile import explain, fully_shard, register_fsdp_forward_method
from fsdp_compile.torch_compat import dynamo_counts

NESTED = hasattr(torch._dynamo.config, "nested_graph_breaks")


class Fails:
    """What fails, after a graph break, when it is told to."""

    fails = False

    def between_graphs(self):
        torch._dynamo.graph_break()
        if self.fails:
            raise ValueError("between two graphs")


class FailingRoot(Fails, SmallNet):
    def forward(self, x):
        x = self.blocks[0](self.inp(x))
        self.between_graphs()
        return self.head(self.blocks[1](x))


class FailingBlock(Fails, SmallBlock):
    def forward(self, x):
        x = self.up(x)
        self.between_graphs()
        return self.down(x)


class NetOfFailingBlocks(SmallNet):
    block = FailingBlock


class Unbroken(SmallNet):
    pass


def build(case):
    torch.manual_seed(0)
    return shard(case(), fully_shard)


def whole(model):
    return torch.compile(model, backend="fsdp_eager")


def in_function(model):
    return torch.compile(lambda x: 1 * model(1 * x), backend="fsdp_eager")


def method(model):
    model.method = lambda x: type(model).forward(model, x)
    register_fsdp_forward_method(model, "method")
    return torch.compile(model.method, backend="fsdp_eager")


def eagerly(model):
    return model


@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.skipif(not NESTED, reason="torch"))])
@pytest.mark.parametrize("way", [whole, in_function, method, eagerly])
@pytest.mark.parametrize("case", [FailingRoot, NetOfFailingBlocks])
def test_parameters_after_an_error(ranks2, case, way, nested):
    ranks2.run(_after_an_error, case, way, nested)


def _after_an_error(case, way, nested):
    reset()
    eager, model = Training(build(case)), build(case)
    traced = Training(model, way(model))
    failing = model if case is FailingRoot else model.blocks[1]
    with torch._dynamo.config.patch({"nested_graph_breaks": True} if nested else {}):
        for step in range(2):
            failing.fails = True
            with pytest.raises(ValueError, match="between two graphs"):
                traced.forward(torch.ones(4, 12))
            failing.fails = False
            assert_shows_shards(model)
            if way is eagerly:
                model.reset_iter_state()
            assert_equal(eager.steps(step), traced.steps(step))


def assert_shows_shards(model):
    assert all(isinstance(param, DTensor) for param in model.parameters())
    groups = [group for state in model._fsdp_state.context.states for group in state.groups]
    assert not any(group.traced.is_open for group in groups)


def test_breaks_of_one_model_do_not_touch_another(ranks2):
    ranks2.run(_another)


def _another():
    """Dynamo gives up a function that it cannot resume after a break, for whoever calls it; ours are for all models."""
    reset()
    unbroken = build(Unbroken)
    training = Training(unbroken, torch.compile(unbroken, backend="fsdp_eager", fullgraph=True)).steps(0)
    for case in (FailingRoot, NetOfFailingBlocks):
        Training(broken := build(case), whole(broken)).steps(0)
        assert "in several graphs" in str(explain(broken))
    before = dynamo_counts()
    training.steps(1)
    assert dynamo_counts() == before
    assert {run.how for run in explain(unbroken).modules} == {"in a graph"}


def test_a_parameter_that_is_refused_stays(ranks2):
    ranks2.run(_refused)


def _refused():
    """What a user has put into a module is not taken away by the error about it."""
    model = build(Unbroken)
    model(torch.ones(4, 12)).sum().backward()
    wrong = model.head.weight = nn.Parameter(torch.ones(3, 12))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="head.weight was replaced by a Parameter"):
            model(torch.ones(4, 12))
        assert model.head.weight is wrong


def test_eager_after_a_function_that_failed_between_graphs(ranks2):
    ranks2.run(_error_in_a_function)


def _error_in_a_function():
    """No forward has ended in the error, so the next one sets all right."""
    reset()
    torch.manual_seed(0)
    expected, model = fully_shard(FailingRoot()), fully_shard(FailingRoot())
    model.load_state_dict(expected.state_dict())

    @torch.compile(backend="fsdp_eager")
    def unshard_and_fail(x):
        model.unshard()
        y = x @ model.head.weight.t()
        torch._dynamo.graph_break()
        if model.fails:
            raise ValueError("between two graphs")
        return y

    model.fails = True
    with pytest.raises(ValueError, match="between two graphs"):
        unshard_and_fail(torch.ones(4, 12))
    model.fails = False
    for each in (model, expected):
        each(torch.ones(4, 12)).sum().backward()
    assert_same([gradients(model)], [gradients(expected)])


class WatchesWeight(SmallBlock):
    def forward(self, x):
        y = self.up(x)
        y.register_hook(lambda _: self.watch())
        return self.down(torch.relu(y))

    def watch(self):
        self.shapes = self.up.weight.shape, local(self.up.weight).shape


def test_the_end_of_a_recomputation_is_no_error(ranks2):
    ranks2.run(_recomputation)


def _recomputation():
    """Activation checkpointing ends it by an exception, in the middle of the backward."""
    block = fully_shard(WatchesWeight(12))
    checkpoint(block, torch.ones(4, 12, requires_grad=True), use_reentrant=False).sum().backward()
    assert block.shapes == ((12, 12), (12, 12))
    assert_shows_shards(block)
