"""What may happen to a sharded module between its first and its last step: the values stay those of torch's own."""

import io
import pickle
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from models import Block, Net, assert_close_to_one_process, assert_same, batch, local, my_part, shard, train
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile import FSDPModule

APIS = (fsdp_compile, torch_fsdp)


def build(api, cls=Net, **kwargs):
    torch.manual_seed(0)
    return shard(cls(**kwargs), api.fully_shard)


def gradients(model):
    found = [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    return found


def loss_of(model, step=0):
    return model(my_part(batch(step))).square().mean()


def step_of(model, optimizer, step):
    loss = loss_of(model, step)
    loss.backward()
    found = gradients_kept(model)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), *found]


def gradients_kept(model):
    return [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def assert_shards(model):
    """Nothing unsharded is left, neither in the modules nor in memory."""
    assert all(isinstance(param, DTensor) for param in model.parameters())
    for state in model._fsdp_state.context.states:
        for param in (param for group in state.groups for param in group.params):
            assert param.unsharded_nbytes == 0, param


# -- forwards and backwards in other numbers and orders ---------------------------------------------------------------


def evaluates(model):
    """Evaluation in every way there is, between steps and before a backward."""
    optimizer = sgd(model)
    yield step_of(model, optimizer, 0)
    for context in (torch.no_grad, torch.inference_mode):
        model.eval()
        with context():
            yield [model(batch(1)).clone()]
        model.train()
        yield step_of(model, optimizer, 1)
    loss = loss_of(model, 2)
    with torch.no_grad():
        yield [model(batch(1)).clone()]
    loss.backward()
    yield gradients(model)


def forwards_without_backward(model):
    optimizer = sgd(model)
    for step in range(3):
        for other in range(step):
            yield [loss_of(model, other).detach()]
        yield step_of(model, optimizer, step)


def one_backward_of_three_forwards(model):
    for _ in range(2):
        (loss_of(model, 0) + loss_of(model, 1) * loss_of(model, 2)).backward()
        yield gradients(model)


def backwards_in_order_and_not(model):
    losses = [loss_of(model, step) for step in range(4)]
    for index in (0, 3, 1, 2):
        losses[index].backward()
        yield gradients_kept(model)
    yield gradients(model)


def output_is_an_input(model):
    """The root's own output, which requires a gradient, goes in again."""
    x = model(my_part(batch(0)))
    model(x).square().mean().backward()
    yield gradients(model)
    x = my_part(batch(0)).requires_grad_()
    model(model(x) + x).square().mean().backward()
    yield [x.grad, *gradients(model)]


def second_backward(model):
    loss = loss_of(model)
    for again in (True, True, False):
        loss.backward(retain_graph=again)
        yield gradients_kept(model)
    yield gradients(model)
    yield step_of(model, sgd(model), 1)


def gradient_of_chosen_inputs(model):
    """A backward that reaches some parameters only, then an ordinary one."""
    x = my_part(batch(0)).requires_grad_()
    model(x).square().mean().backward(inputs=[x])
    yield [x.grad, *gradients(model)]
    yield step_of(model, sgd(model), 0)


def parts_are_called(model):
    """A block on its own, after the root has run: its gradient alone."""
    yield step_of(model, sgd(model), 0)
    model.blocks[1](my_part(batch(1))).square().mean().backward()
    yield gradients(model)
    yield step_of(model, sgd(model), 0)


def all_frozen(model):
    """Only the input is trained, then everything."""
    model.requires_grad_(False)
    x = my_part(batch(0)).requires_grad_()
    model(x).square().mean().backward()
    yield [x.grad, *gradients(model)]
    model.requires_grad_(True)
    yield step_of(model, sgd(model), 0)


def autocasts(model):
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(my_part(batch(step))).float().square().mean()
        loss.backward()
        yield gradients_kept(model)


def weights_in_the_loss(model):
    """A regularization of the shards, in the same backward and in others."""
    penalty = sum(param.square().sum().full_tensor() for param in model.parameters())
    (penalty + loss_of(model)).backward()
    yield gradients(model)
    loss_of(model).backward()
    for param in model.parameters():
        param.square().sum().backward()
    yield gradients(model)


def hooks_of_the_user(model):
    first, second = model.blocks
    shapes = []
    handles = [
        first.register_forward_pre_hook(lambda _, args: (args[0] * 3,)),
        first.register_forward_hook(lambda _, args, output: output * 3),
        second.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,)),
        second.register_full_backward_hook(lambda _, inputs, outputs: shapes.append((inputs[0].shape, len(outputs)))),
    ]
    yield step_of(model, sgd(model), 0)
    assert shapes == [((4, 12), 1)]
    for handle in handles:
        handle.remove()
    yield step_of(model, sgd(model), 0)


SCENARIOS = [
    evaluates,
    forwards_without_backward,
    one_backward_of_three_forwards,
    backwards_in_order_and_not,
    output_is_an_input,
    second_backward,
    gradient_of_chosen_inputs,
    parts_are_called,
    all_frozen,
    autocasts,
    weights_in_the_loss,
    hooks_of_the_user,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(ranks2, scenario):
    ranks2.run(_scenario, scenario)


def _scenario(scenario):
    models = [build(api, out=12) for api in APIS]
    ours, theirs = ([*scenario(model)] for model in models)
    assert_same(ours, theirs)
    assert_shards(models[0])


# -- outputs ----------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    x: torch.Tensor
    note: str = "note"
    size: int = field(init=False, default=3)


class ManyOutputs(Block):
    """Needs two inputs of which it uses one; what it returns requires a gradient, or not, or is no tensor."""

    def forward(self, x, unused, kind):
        y = super().forward(x)
        if kind == "two":
            return y, y * 2
        if kind == "record":
            return {"record": [Record(y)], "argmax": y.argmax(-1), "name": "x", "none": None}
        return {"detached": y.detach(), "argmax": y.argmax(-1), "none": None}  # none that requires a gradient


class ManyOutputsNet(Net):
    block = ManyOutputs

    def forward(self, x):
        x = self.inp(x)
        first, _ = self.blocks[0](x, x * 2, "two")  # one of the outputs is unused
        record = self.blocks[1](first, x * 3, "record")
        nothing = self.blocks[2](x, x, "nothing")
        y = self.head(record["record"][0].x + nothing["detached"])
        return {"loss": y.square().mean(), "aux": (y, record["argmax"], Record(y.detach())), "name": "out"}


def test_outputs(ranks2):
    ranks2.run(_outputs)


def _outputs():
    ours, theirs = (build(api, ManyOutputsNet, blocks=3) for api in APIS)
    for part in ("loss", "aux", "loss"):
        for model in (ours, theirs):
            output = model(my_part(batch(0)))
            assert output["name"] == "out" and output["aux"][2].note == "note"
            (output["loss"] if part == "loss" else output["aux"][0].sum()).backward()
        assert_same([gradients(ours)], [gradients(theirs)])
    assert_shards(ours)


class Recurrent(nn.Module):
    """Its LSTM keeps a list of its weights beside its parameters."""

    def __init__(self, dim):
        super().__init__()
        self.rnn, self.out = nn.LSTM(dim, dim, num_layers=2), nn.Linear(dim, dim)

    def forward(self, x):
        return self.out(self.rnn(x.expand(3, *x.shape))[0][-1])


class RecurrentNet(Net):
    block = Recurrent


@pytest.mark.parametrize("backend", [None, "fsdp_eager"])
def test_recurrent(ranks2, backend):
    """Dynamo does not trace LSTMs: it breaks the graph inside of the transitions."""
    ranks2.run(_recurrent, backend)


def _recurrent(backend):
    model, theirs = (build(api, RecurrentNet) for api in APIS)
    history = train(model, torch.compile(model, backend=backend) if backend else model)
    assert_same(history, train(theirs))
    torch.manual_seed(0)
    assert_close_to_one_process(model, RecurrentNet())


# -- containers and methods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [False, True])
def test_indexing_and_slicing_a_container(ranks2, inner):
    ranks2.run(_containers, inner)


def _containers(inner):
    """A piece of a sharded ``Sequential`` is a plain one of the same modules, which still work if they are sharded."""
    histories = []
    for api in APIS:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
        for layer in model if inner else ():
            api.fully_shard(layer)
        api.fully_shard(model)
        piece = model[1:3]
        assert type(piece) is nn.Sequential and not isinstance(piece, FSDPModule)
        assert model[-1] is model[3] and piece[0] is model[1] and len(model) == 4
        assert all(isinstance(param, DTensor) for param in piece.parameters())
        history = [step_of(model, sgd(model), 0)]
        if inner:
            piece(my_part(batch(1))).square().mean().backward()
            history += [gradients(model), step_of(model, sgd(model), 2)]
        histories.append(history)
    assert_same(*histories)


class Methods(Net):
    def loss(self, x, *, scale=1.0):
        return {"loss": self(x).square().mean() * scale, "scale": scale}  # calls itself, transitions and all

    def embed(self, x):
        return self.inp(x)


def test_methods_of_the_root(ranks2):
    ranks2.run(_methods)


def _methods():
    histories = []
    for api in APIS:
        model = build(api, Methods)
        model(my_part(batch(9)))  # torch needs the root to have run
        for name in ("loss", "embed"):
            api.register_fsdp_forward_method(model, name)
        history = []
        for step in range(2):
            model.loss(my_part(batch(step)), scale=0.5)["loss"].backward()
            history.append(gradients(model))
            with torch.no_grad():
                history.append([model.embed(batch(step))])
            model.embed(my_part(batch(step))).square().mean().backward()
            history.append(gradients(model))
            history.append(step_of(model, sgd(model), step))
        histories.append(history)
    assert_same(*histories)
    plain = Methods()
    fsdp_compile.register_fsdp_forward_method(plain, "no_such")  # nothing to do
    assert "embed" not in vars(plain)


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pickle.dumps", "torch.save"])
def test_pickling_tells_to_use_a_state_dict(ranks2, how):
    ranks2.run(_pickling, how)


def _pickling(how):
    model = build(fsdp_compile)
    for module in (model, model.blocks[0], nn.ModuleList([model])):
        with pytest.raises(RuntimeError, match="state dict"):
            pickle.dumps(module) if how == "pickle.dumps" else torch.save(module, io.BytesIO())


# -- exceptions -------------------------------------------------------------------------------------------------------


class Fails(Block):
    when = ""

    def forward(self, x):
        y = super().forward(x)
        if self.when == "forward":
            raise KeyError("forward")
        if self.when == "backward":
            y.register_hook(self._fail)
        return self.norm(y)

    def _fail(self, grad):
        raise KeyError("backward")


class FailingNet(Net):
    block = Fails


@pytest.mark.parametrize("when", ["forward", "backward", "recomputation"])
def test_goes_on_after_an_exception(ranks2, when):
    ranks2.run(_exceptions, when)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_goes_on_after_an_exception_compiled(ranks2, when):
    ranks2.run(_exceptions_compiled, when)


def _exceptions_compiled(when):
    unbroken, model = build(fsdp_compile, FailingNet), build(fsdp_compile, FailingNet)
    forward = torch.compile(model, backend="fsdp_eager")
    for _ in range(2):
        model.blocks[1].when = when if when == "forward" else ""
        with pytest.raises(KeyError):
            output = forward(my_part(batch(9)))
            output.register_hook(model.blocks[1]._fail)
            output.sum().backward()
        model.blocks[1].when = ""
        model.reset_iter_state()
        model.zero_grad()
        assert_same(train(model, forward), train(unbroken))
        assert_shards(model)


def _exceptions(when):
    """Inside each block, in the middle of a training, with and without gradient sync."""
    unbroken, model = build(fsdp_compile, FailingNet, blocks=3), build(fsdp_compile, FailingNet, blocks=3)
    optimizers = [sgd(unbroken), sgd(model)]
    for step, block in enumerate(model.blocks):
        model.set_requires_gradient_sync(step != 1)
        with pytest.raises(KeyError):
            if when == "recomputation":
                x = checkpoint(block, my_part(batch(step)).requires_grad_(), use_reentrant=False)
                block.when = "forward"
                x.sum().backward()
            else:
                block.when = when
                loss_of(model, step).backward()
        block.when = ""
        model.reset_iter_state()
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        assert_shards(model)
        assert_same([step_of(model, optimizers[1], step)], [step_of(unbroken, optimizers[0], step)])
        assert_shards(model)


# -- activation checkpointing -----------------------------------------------------------------------------------------


class PartlyCheckpointed(Block):
    reentrant = False

    def forward(self, x):
        h = checkpoint(lambda t: torch.relu(self.up(self.norm(t))), x, use_reentrant=self.reentrant)
        return x + self.down(h)


class PartlyNet(Net):
    block = PartlyCheckpointed


class TwoInOne(Net):
    """One region around all blocks, and another region around one of them."""

    reentrant = False

    def forward(self, x):
        def blocks(x):
            x = self.blocks[0](x)
            return checkpoint(self.blocks[1], x, use_reentrant=self.reentrant)

        return self.head(checkpoint(blocks, self.inp(x), use_reentrant=self.reentrant))


def wrapped(api, inside, implementation):
    torch.manual_seed(0)
    model = Net()
    for index, block in enumerate(model.blocks):
        if inside:
            model.blocks[index] = api.fully_shard(checkpoint_wrapper(block, checkpoint_impl=implementation))
        else:
            model.blocks[index] = checkpoint_wrapper(api.fully_shard(block), checkpoint_impl=implementation)
    return api.fully_shard(model)


def checkpointed(api, where, reentrant):
    if where.startswith("wrapper"):
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        return wrapped(api, where == "wrapper inside", kind)
    return build(api, PartlyNet if where == "part" else TwoInOne)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["wrapper inside", "wrapper around", "part", "two in one"])
def test_activation_checkpointing(ranks2, where, reentrant):
    ranks2.run(_checkpointing, where, reentrant)


def _checkpointing(where, reentrant):
    with ExitStack() as stack:
        for cls in (PartlyCheckpointed, TwoInOne):
            stack.callback(setattr, cls, "reentrant", False)
            cls.reentrant = reentrant
        plain, ours, theirs = build(fsdp_compile), *(checkpointed(api, where, reentrant) for api in APIS)
        histories = []
        for model in (plain, ours, theirs):
            optimizer = sgd(model)
            history = [step_of(model, optimizer, 0)]
            if model is ours and where in ("wrapper around", "two in one"):
                for block in model.blocks:  # what recomputes them gathers them; not so torch's own
                    getattr(block, "_checkpoint_wrapped_module", block).set_unshard_in_backward(False)
            history.append(step_of(model, optimizer, 1))
            loss_of(model, 0)  # no backward
            (loss_of(model, 1) + loss_of(model, 2)).backward()
            histories.append([*history, gradients(model)])
    # Two reentrant forwards in one backward: torch's root is then left unsharded.
    same = slice(2 if reentrant else None)
    assert_same(histories[1][same], histories[2][same])
    assert_same(histories[1][same], histories[0][same])
    for mine, expected in zip(histories[1][2], histories[0][2], strict=True):
        torch.testing.assert_close(mine, expected)  # nested backwards sum the two gradients in another order
    assert_shards(ours)
