"""Graph breaks, wherever they are: results as eager; ``explain`` names the modules that did not run in one graph."""

import inspect
import re

import pytest
import torch
from models import shard
from torch import nn
from torch.distributed.tensor import DTensor
from traced import SmallBlock, SmallNet, Training, assert_equal, reset

from fsdp_compile import explain, fully_shard, set_strict

NESTED = hasattr(torch._dynamo.config, "nested_graph_breaks")


class InRoot(SmallNet):
    def forward(self, x):
        x = self.blocks[0](self.inp(x))
        torch._dynamo.graph_break()  # here: InRoot
        return self.head(self.blocks[1](x))


class Interrupted(SmallBlock):
    def forward(self, x):
        return x + self.down(torch.relu(self.interrupt(self.up(x))))


class InBlock(Interrupted):
    def interrupt(self, x):
        torch._dynamo.graph_break()  # here: InBlock
        return x


def breaking(x):
    torch._dynamo.graph_break()  # here: InFunction
    return x * 1


class InFunction(Interrupted):
    def interrupt(self, x):
        return breaking(x)


class Prints(Interrupted):
    def interrupt(self, x):
        print(end="")  # here: Prints
        return x


class DataDependent(Interrupted):
    def interrupt(self, x):
        if x.sum() > 0:  # here: DataDependent
            return x + 1
        return x - 1


class InHook(SmallBlock):
    def __init__(self, dim):
        super().__init__(dim)
        self.up.register_forward_hook(self.hook)

    def hook(self, module, args, output):
        torch._dynamo.graph_break()  # here: InHook


class DisabledForward(SmallBlock):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class UnshardThenReshard(SmallNet):
    again = False

    def read(self, weight):
        return weight.detach() if self.again else weight  # eagerly a gradient beside that of the call comes too late

    def forward(self, x):
        first = self.blocks[0]
        first.unshard()
        y = x @ self.read(first.up.weight)
        torch._dynamo.graph_break()  # here: UnshardThenReshard
        y = y + x @ self.read(first.down.weight)
        first.reshard()
        z = self.inp(x)
        return self.head(self.blocks[1]((first(z) if self.again else z) + y))


class UnshardThenReshardThenCall(UnshardThenReshard):
    again = True


def build(case):
    """Of two blocks, the first is the one that breaks."""
    torch.manual_seed(0)
    model = case() if issubclass(case, SmallNet) else SmallNet()
    if not issubclass(case, SmallNet):
        model.blocks[0] = case(12)
    return shard(model, fully_shard)


def both(case, change=lambda model: None):
    """The same model twice: to train eagerly, and compiled with graph breaks allowed."""
    reset()
    eager, model = build(case), build(case)
    change(eager)
    change(model)
    return Training(eager), Training(model, torch.compile(model, backend="fsdp_eager"))


def ran(model):
    return {run.name: run.how for run in explain(model).modules}


def where(case):
    """The file and line of this module that a comment marks as ``case``'s."""
    lines = inspect.getsource(inspect.getmodule(build)).splitlines()
    marks = tuple(f"# here: {cls.__name__}" for cls in case.__mro__)
    number = next(n for n, line in enumerate(lines, 1) if line.endswith(marks))
    return f"{inspect.getfile(build)}:{number}: "


SPLIT, WHOLE, EAGERLY = "in several graphs", "in a graph", "eagerly"
CASES = [
    (InRoot, {"": SPLIT, "blocks.0": WHOLE, "blocks.1": WHOLE}),
    *(
        (case, {"": SPLIT, "blocks.0": SPLIT, "blocks.1": WHOLE})
        for case in (InBlock, InFunction, Prints, DataDependent, InHook, UnshardThenReshard)
    ),
    (UnshardThenReshardThenCall, {"": SPLIT, "blocks.0": WHOLE, "blocks.1": WHOLE}),
]


@pytest.mark.parametrize("case, how", CASES)
@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=pytest.mark.skipif(not NESTED, reason="torch"))])
def test_breaks(ranks2, case, how, nested):
    ranks2.run(_breaks, case, how, nested)


def _breaks(case, how, nested):
    eager, traced = both(case)
    with torch._dynamo.config.patch({"nested_graph_breaks": True} if nested else {}):
        assert_equal(eager.steps(0, 1, 2), traced.steps(0, 1, 2))
    assert ran(traced.model) == how
    for run in explain(traced.model).modules:
        assert run.how == WHOLE or where(case) in run.why, run


def disable_block(model):
    model.blocks[0] = torch.compiler.disable(model.blocks[0])


def disable_forward(model):
    model.blocks[0].forward = torch.compiler.disable(model.blocks[0].forward)


@pytest.mark.parametrize(
    "case, change, first",
    [
        (SmallBlock, disable_block, EAGERLY),
        (SmallBlock, disable_forward, SPLIT),
        (DisabledForward, lambda model: None, SPLIT),
    ],
    ids=["block", "forward of a block", "forward of a class"],
)
def test_disabled(ranks2, case, change, first):
    ranks2.run(_disabled, case, change.__name__, first)


def _disabled(case, change, first):
    change = {"disable_block": disable_block, "disable_forward": disable_forward}.get(change, lambda model: None)
    eager, traced = both(case, change)
    assert_equal(eager.steps(0, 1, 2), traced.steps(0, 1, 2))
    how = ran(traced.model)
    assert (how[""], how["blocks.0"]) == (SPLIT, first)
    whys = {run.name: run.why for run in explain(traced.model).modules}
    expected = f"{inspect.getfile(SmallNet.forward)}:" if first == EAGERLY else "`torch.compiler.disable()`d function"
    assert expected in whys["blocks.0"] and "torch/nn" not in str(whys)
    traced.forward = traced.model
    assert_equal(eager.steps(3), traced.steps(3))
    assert {run.why for run in explain(traced.model).modules} == {"no compiled function called it"}


def test_before_and_without_compiling(ranks2):
    ranks2.run(_before)


def _before():
    eager, traced = both(SmallBlock)
    assert set(ran(traced.model).values()) == {"not yet"} and not explain(traced.model).eager
    eager.steps(0)
    assert {str(run) for run in explain(eager.model).eager} == {"eagerly: no compiled function called it"}
    assert len(explain(eager.model).eager) == 3
    traced.steps(0)
    assert set(ran(traced.model).values()) == {WHOLE} and not explain(traced.model).eager
    assert [line.split()[0] for line in str(explain(traced.model)).splitlines()[:4]] == [
        "module",
        "(root)",
        "blocks.0",
        "blocks.1",
    ]
    with pytest.raises(ValueError, match="Linear"):
        explain(nn.Linear(2, 2))


def hooked(model):
    model.blocks[0].set_all_reduce_hook(lambda grad: None)


@pytest.mark.parametrize("reset_state", [True, False])
@pytest.mark.parametrize("change, why", [(disable_block, "graph break at .*py:"), (hooked, "set_all_reduce_hook")])
def test_strict(ranks2, change, why, reset_state):
    ranks2.run(_strict, change, why, reset_state)


def _strict(change, why, reset_state):
    """The error says which module and why, and the model trains on; then what is compiled runs under it."""
    eager, traced = both(SmallBlock, change)
    for _ in range(2):
        set_strict()
        with pytest.raises(RuntimeError, match=f"module 'blocks.0' runs eagerly.*{why}"):
            traced.forward(torch.ones(2, 12))
        set_strict(False)
        if reset_state:
            traced.model.reset_iter_state()
        assert_equal(eager.steps(0, 1), traced.steps(0, 1))
    eager, traced = both(SmallBlock)
    eager.steps(0, 1)
    set_strict()
    assert_equal(eager, traced.steps(0, 1))
    set_strict(False)


class WithoutParameters(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        torch._dynamo.graph_break()  # here: WithoutParameters
        return self[1](x)


def without_parameters():
    torch.manual_seed(0)
    model = WithoutParameters(nn.Linear(12, 12), nn.Linear(12, 12))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


STRICT_CASES = [
    (InRoot, "the root module"),
    *((case, "module 'blocks.0'") for case in (InBlock, Prints, DataDependent)),
    (WithoutParameters, "a module without parameters of its own, FSDPWithoutParameters,"),
]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("case, label", STRICT_CASES)
def test_strict_about_splits(ranks2, case, label, before):
    ranks2.run(_strict_about_splits, case, label, before)


def _strict_about_splits(case, label, before):
    """Whether it has been compiled before or not, it is an error, which says where the break is; and no other time."""
    reset()
    make = without_parameters if case is WithoutParameters else lambda: build(case)
    eager, model = Training(make()), make()
    traced = Training(model, torch.compile(model, backend="fsdp_eager"))
    steps = (0, 1) if before else ()
    assert_equal(eager.steps(*steps), traced.steps(*steps))
    set_strict()
    with pytest.raises(RuntimeError, match=f"{label} is split over several graphs.*{re.escape(where(case))}"):
        traced.forward(torch.ones(2, 12))
    set_strict(False)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_equal(eager.steps(2, 3), traced.steps(2, 3))
