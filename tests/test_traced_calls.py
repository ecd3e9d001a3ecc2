"""How a model may be called, and what it may return: compiled as eagerly, in one graph for each way."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from models import assert_close_to_one_process, batch, my_part, shard, train
from torch import nn
from traced import SmallBlock, SmallNet, Training, assert_equal, compiled, graphs, loss_of, of_stage, reset

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.passes.graph_view import frees, gathers, reductions
from fsdp_compile.torch_compat import dynamo_counts

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)


def build(cls=SmallNet, *args, **kwargs):
    torch.manual_seed(0)
    return shard(cls(*args), fully_shard, **kwargs)


def both(cls=SmallNet, *args, **kwargs):
    """The same model twice: to train eagerly, and compiled."""
    reset()
    model = build(cls, *args, **kwargs)
    return Training(build(cls, *args, **kwargs)), Training(model, compiled(model))


def graph_count():
    return dynamo_counts()[0]


# -- what is returned -------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["y", "rest"])


@dataclass
class Record:
    y: torch.Tensor
    size: int
    note: str = "a note"
    rest: tuple | None = None


def model_output(x, y):
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=y, hidden_states=(x + 1, y * 2))


# What is made of an input and a result, and how a caller takes the result out of it.
OUTPUTS = {
    "tuple": (lambda x, y: (y, x + 1), lambda out: out[0]),
    "list": (lambda x, y: [y, x + 1], lambda out: out[0]),
    "dict": (lambda x, y: {"y": y, 3: x + 1}, lambda out: out["y"]),
    "nested": (lambda x, y: {"all": [(y, {"more": [x + 1]}), []], "rest": ()}, lambda out: out["all"][0][0]),
    "dataclass": (lambda x, y: Record(y, 3, rest=(x + 1, None)), lambda out: out.y),
    "dataclasses in a list": (lambda x, y: [Record(y, 3), Record(x + 1, 4, "other")], lambda out: out[0].y),
    "named tuple": (lambda x, y: Pair(y, Pair(x + 1, None)), lambda out: out.y),
    "model output": (model_output, lambda out: out.last_hidden_state),
    "None": (lambda x, y: (None, y, None), lambda out: out[1]),
    "beside numbers": (lambda x, y: (y, 3, 0.5, True, "text", torch.float32), lambda out: out[0] * out[2]),
    "sizes of the input": (lambda x, y: (y, x.size(0), x.shape[1] / 2), lambda out: out[0] / out[1]),
    "without gradient": (lambda x, y: (y, y.detach() + 1, (y > 0).long()), lambda out: out[0] * out[2]),
    "twice": (lambda x, y: (y, y), lambda out: out[0] + out[1]),
    "views of an output": (lambda x, y: (y, y[:, :2], y.t()), lambda out: out[0] + out[2].t()),
    "view of an input": (lambda x, y: (y, x[:, :2]), lambda out: out[0] + out[1].sum()),
    "an input": (lambda x, y: (x, y), lambda out: out[0] + out[1]),
    "only a view of an input": (lambda x, y: x.view(-1), lambda out: out.view(-1, 12)),
}


class OutputBlock(SmallBlock):
    def forward(self, x):
        return self.make(x, super().forward(x))


class OutputNet(SmallNet):
    """Blocks and root return the same kind of thing."""

    block = OutputBlock

    def __init__(self, kind):
        super().__init__(out=12)
        self.make, self.take = OUTPUTS[kind]
        for block in self.blocks:
            block.make = self.make

    def forward(self, x):
        y = self.inp(x)
        for block in self.blocks:
            y = self.take(block(y))
        return self.make(y, self.head(y))


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(ranks2, kind):
    ranks2.run(_outputs, kind)


def _outputs(kind):
    """Containers as the root's forward made them, and as blocks' are made anew with tensors of another dtype."""
    trainings = []
    for traced in (False, True):
        torch.manual_seed(0)
        model = OutputNet(kind)
        for block in model.blocks:
            fully_shard(block, mp_policy=BF16)
        fully_shard(model)
        trainings.append(Training(model, compiled(model) if traced else None).steps(0, 1))
    assert_equal(*trainings)
    assert graph_count() == 1


class PassesOnNet(SmallNet):
    """The root returns its very input, and a view of it."""

    def forward(self, x):
        return super().forward(x), x, x[0]


def test_inputs_of_the_root_are_passed_on(ranks2):
    ranks2.run(_passes_on)


def _passes_on():
    eager, traced = both(PassesOnNet)
    for training in (eager, traced):
        for needs_grad in (False, True):
            x = my_part(batch(0)).requires_grad_(needs_grad)
            y, same, view = training.call(x)
            assert same.data_ptr() == view.data_ptr() == x.data_ptr()
            training.backward(loss_of((y, same, view)))
            training.history.append([x.grad])
            training.update()
    assert_equal(eager, traced)


# -- what is passed ---------------------------------------------------------------------------------------------------


class ArgumentsBlock(SmallBlock):
    def forward(self, x, *more, scale=1.0, bias=None, named: dict | None = None, **rest):
        for each in more:
            x = x + each
        y = super().forward(x) * scale
        if bias is not None:
            y = y + bias
        for value in (*(named or {}).values(), *rest.values()):
            y = y + value
        return y


class ArgumentsNet(SmallNet):
    block = ArgumentsBlock

    def forward(self, x=None, *args, twice=False, **kwargs):
        x = self.inp(torch.ones(4, 12, dtype=self.inp.weight.dtype) if x is None else x)
        for block in self.blocks:
            x = block(x, *args, **kwargs)
            x = block(x) if twice else x
        return self.head(x.to(self.head.weight.dtype))


def x():
    return torch.linspace(0, 1, 48).view(4, 12)


WAYS = {
    "position": lambda: ((x(),), {}),
    "keyword": lambda: ((), {"x": x()}),
    "default": lambda: ((), {}),
    "more positions": lambda: ((x(), x() + 1, 2.0), {}),
    "tensor by keyword": lambda: ((x(),), {"bias": x(), "scale": 2}),
    "dict": lambda: ((x(),), {"named": {"a": x(), "b": 1.0}}),
    "any keyword": lambda: ((x(),), {"other": x(), "another": x()[0]}),
    "keyword of the root": lambda: ((x(),), {"twice": True}),
    "same tensor twice": lambda: ((same := x(), same), {"bias": same}),
    "of another dtype": lambda: ((x().double(), torch.arange(12)), {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_arguments(ranks2, way):
    ranks2.run(_arguments, way)


def _arguments(way):
    eager, traced = both(ArgumentsNet, mp_policy=BF16)
    args, kwargs = WAYS[way]()
    for training in (eager, traced):
        for _ in range(2):
            training.step(*args, **kwargs)
    assert_equal(eager, traced)
    assert graph_count() == 1


def test_ways_of_calling_alternate(ranks2):
    ranks2.run(_alternate)


def _alternate():
    """Each way has a graph of its own, which later calls of that way use again."""
    eager, traced = both(ArgumentsNet)
    calls = [WAYS[way]() for way in ("position", "tensor by keyword", "more positions")]
    for training in (eager, traced):
        for args, kwargs in calls * 2:
            training.step(*args, **kwargs)
    assert_equal(eager, traced)
    assert graph_count() == len(calls)


# -- how often modules run --------------------------------------------------------------------------------------------


class OrderNet(SmallNet):
    order = (0, 1)

    def forward(self, x):
        x = self.inp(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


class InARow(OrderNet):
    order = (0, 0, 1, 1)


class Apart(OrderNet):
    order = (0, 1, 0, 1)


class ThereAndBack(OrderNet):
    order = (0, 1, 0)


class FourTimes(OrderNet):
    order = (1, 1, 1, 1)


class TwoNames(SmallNet):
    """One block under two names."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = self.blocks[0]


class PartTwice(SmallNet):
    """A linear layer of the root, not a module of its own, runs twice."""

    def forward(self, x):
        return super().forward(self.inp(x).relu())


@pytest.mark.parametrize(
    "cls, reshard",
    [
        (InARow, True),
        (Apart, True),
        (Apart, False),
        (ThereAndBack, True),
        (FourTimes, True),
        (TwoNames, True),
        (TwoNames, False),
        (PartTwice, True),
    ],
)
def test_modules_run_several_times(ranks2, cls, reshard):
    ranks2.run(_several_times, cls, reshard)


def _several_times(cls, reshard):
    trainings = []
    for traced in (False, True):
        torch.manual_seed(0)
        model = cls()
        for block in dict.fromkeys(model.blocks):
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        trainings.append(Training(model, compiled(model) if traced else None).steps(0, 1, 2))
    assert_equal(*trainings)
    assert graph_count() == 1


@pytest.mark.parametrize("backwards, reshard", [((0, 1, 2), True), ((2, 1, 0), True), ((1, 2, 0), False), ((1,), True)])
def test_several_forwards_before_a_backward(ranks2, backwards, reshard):
    ranks2.run(_several_forwards, backwards, reshard)


def _several_forwards(backwards, reshard):
    eager, traced = both(reshard_after_forward=reshard)
    for training in (eager, traced):
        for step in range(2):
            losses = [loss_of(training.call(my_part(batch(step + i)))) for i in range(3)]
            for index in backwards:
                training.backward(losses[index])
            training.update()
    assert_equal(eager, traced)
    assert graph_count() == 1


class Unused(SmallNet):
    """A block, a layer and a parameter of a used block that no forward reads."""

    def __init__(self):
        super().__init__(blocks=3)
        self.layer = nn.Linear(5, 7)
        self.blocks[0].extra = nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks[:2]:
            x = block(x)
        return self.head(x)


class OnlyBias(SmallNet):
    """Of the last block only a bias has a gradient."""

    def forward(self, x):
        return self.head(self.blocks[0](self.inp(x))) + self.blocks[1](x * 0).detach().mean() + self.head.bias[0]


class LoseGradient(SmallNet):
    """What a block computes is dropped."""

    def forward(self, x):
        x = self.inp(x)
        self.blocks[0](x)
        return self.head(self.blocks[1](x))


@pytest.mark.parametrize("cls", [Unused, OnlyBias, LoseGradient])
def test_unused_parameters(ranks2, cls):
    ranks2.run(_unused, cls)


def _unused(cls):
    eager, traced = both(cls)
    assert_equal(eager.steps(0, 1, 2), traced.steps(0, 1, 2))
    unused = [name for name, param in traced.model.named_parameters() if param not in traced.optimizer.state]
    assert unused and unused == [name for name, p in eager.model.named_parameters() if p not in eager.optimizer.state]
    assert graph_count() == 1


class Choosing(SmallNet):
    def forward(self, x, which):
        return self.head(self.blocks[which](self.inp(x)))


def test_parameters_used_in_some_steps(ranks2):
    ranks2.run(_some_steps)


def _some_steps():
    eager, traced = both(Choosing)
    for training in (eager, traced):
        for step, which in enumerate((0, 1, 1, 0)):
            training.step(my_part(batch(step)), which)
    assert_equal(eager, traced)
    assert graph_count() == 2


# -- without gradients ------------------------------------------------------------------------------------------------


def no_grad(training, x):
    with torch.no_grad():
        training.call(x)


def inference_mode(training, x):
    with torch.inference_mode():
        training.call(x)


def frozen(training, x):
    training.model.requires_grad_(False)
    training.call(x)
    training.model.requires_grad_(True)


@pytest.mark.parametrize(
    "evaluate, reshard",
    [(no_grad, True), (no_grad, False), (inference_mode, True), (inference_mode, False), (frozen, True)],
)
def test_a_graph_without_backward_gathers_once(ranks2, evaluate, reshard):
    ranks2.run(_without_backward, evaluate, reshard)


def _without_backward(evaluate, reshard):
    eager, traced = both(reshard_after_forward=reshard)
    for training in (eager, traced):
        with graphs() as stages:
            evaluate(training, batch(0))
        training.model.eval()
        evaluate(training, batch(0))
        training.model.train()
        training.steps(0)
        evaluate(training, batch(0))
    assert_equal(eager, traced)
    assert {stage for stage, _ in stages} == {"inference before", "inference after"}
    (graph,) = of_stage(stages, "inference after")
    gathered = [name for gather in gathers(graph) for name in gather.tag.params]
    assert sorted(gathered) == sorted(name for name, _ in traced.model.named_parameters())
    assert len(list(gathers(graph))) == 3
    assert not list(reductions(graph)) and not frees(graph)


class Asks(SmallNet):
    """As ``matmul`` does, to choose a kernel for views."""

    def forward(self, x):
        return self.head(x), self.head.weight.requires_grad, self.blocks[0].up.weight.requires_grad


@pytest.mark.parametrize("evaluate", [no_grad, inference_mode])
def test_parameters_require_gradients_without_grad_mode(ranks2, evaluate):
    ranks2.run(_asks, evaluate)


def _asks(evaluate):
    eager, traced = both(Asks)
    for training in (eager, traced):
        evaluate(training, batch(0))
    assert_equal(eager, traced)


def test_views_of_a_batch_without_gradients(ranks2):
    ranks2.run(_views)


def _views():
    """Not bit for bit yet: the same reason."""
    eager, traced = both()
    for training in (eager, traced):
        no_grad(training, batch(0, rows=24).view(2, 12, 12)[:, :-1])
    torch.testing.assert_close(traced.history, eager.history)


class Dropout(SmallNet):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_modes_alternate(ranks2):
    ranks2.run(_modes_alternate)


def _modes_alternate():
    """One graph each for training, evaluation with and without gradients, and inference, whatever the order."""
    eager, traced = both(Dropout)
    for training in (eager, traced):
        torch.manual_seed(0)
        for step in range(3):
            training.steps(step)
            training.model.eval()
            training.steps(step)
            no_grad(training, my_part(batch(step)))
            inference_mode(training, my_part(batch(step)))
            training.model.train()
    assert_equal(eager, traced)
    assert graph_count() == 4


def test_training_and_evaluation_share_no_graph(ranks2):
    ranks2.run(_train_evaluate)


def _train_evaluate():
    eager, traced = both()
    for training in (eager, traced):
        for step in range(4):
            training.steps(step)
            training.model.eval()
            no_grad(training, my_part(batch(step)))
            training.model.train()
    assert_equal(eager, traced)
    assert graph_count() == 2


class Mapped(SmallNet):
    def forward(self, x):
        return self.head(torch.vmap(self.blocks[0])(self.inp(x)))


class Differentiated(SmallNet):
    def forward(self, x):
        gradient = torch.func.grad(lambda y: self.blocks[0](y).sin().sum())
        return self.head(gradient(self.inp(x)))


@pytest.mark.parametrize("cls", [Mapped, Differentiated])
def test_transforms_around_a_block(ranks2, cls):
    ranks2.run(_transforms, cls)


def _transforms(cls):
    model = build(cls)
    train(model, compiled(model))
    torch.manual_seed(0)
    assert_close_to_one_process(model, cls())
