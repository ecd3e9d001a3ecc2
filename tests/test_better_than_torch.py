"""Trainings that torch 2.13's own ``fully_shard`` gets wrong or refuses: here each is that of one process."""

import pytest
import torch
from models import Block, Net, assert_close_to_one_process, assert_same, batch, my_part, shard, train
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from fsdp_compile import MixedPrecisionPolicy, fully_shard


def build(cls=Net, **kwargs):
    torch.manual_seed(0)
    return shard(cls(), fully_shard, **kwargs)


def one_process(cls=Net):
    torch.manual_seed(0)
    return cls()


def compiled(model, backend, **kwargs):
    return torch.compile(model, backend=backend, **kwargs) if backend else model


def assert_all_sharded(model):
    assert all(isinstance(param, DTensor) for param in model.parameters())


def assert_gradients(model, single, **tolerance):
    for (name, param), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        assert (param.grad is None) == (theirs.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(
                param.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance
            )


# -- mixed precision --------------------------------------------------------------------------------------------------

ROUGH = {"rtol": 5e-2, "atol": 3e-3}  # of bfloat16, whose sums depend on where a batch is split


def backward_in_bf16(single, step):
    cast = {name: param.bfloat16() for name, param in single.named_parameters()}
    functional_call(single, cast, (batch(step).bfloat16(),)).float().square().mean().backward()


@pytest.mark.parametrize("reduce_dtype, backend", [(None, None), (torch.float32, None), (None, "fsdp_eager")])
def test_a_frozen_group_is_unfrozen(ranks2, reduce_dtype, backend):
    ranks2.run(_unfrozen, reduce_dtype, backend)


def _unfrozen(reduce_dtype, backend):
    """Torch settles a group's dtypes at the first forward, from what is trained then: the group has none."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, always, single = build(mp_policy=policy), build(mp_policy=policy), one_process()
    forward = compiled(model, backend, fullgraph=True)
    model.blocks[0].requires_grad_(False)
    forward(my_part(batch(0))).float().square().mean().backward()
    assert all(param.grad is None for param in model.blocks[0].parameters())
    model.zero_grad()
    model.blocks[0].requires_grad_(True)
    for call in (forward, always):
        call(my_part(batch(1))).float().square().mean().backward()
    assert_same(*([[param.grad.to_local() for param in each.parameters()]] for each in (model, always)))
    backward_in_bf16(single, 1)
    assert_gradients(model, single, **ROUGH)
    model.zero_grad()
    always.zero_grad()
    assert_same(train(model, forward), train(always))


class LateNet(Net):
    """Uses part of a block in the last micro-batch only."""

    late = False

    def forward(self, x):
        x = self.blocks[0](self.inp(x))
        x = self.blocks[1](x) if self.late else x + self.blocks[1](x, "up only")
        return self.head(x)


class LateBlock(Block):
    def forward(self, x, which="all"):
        return super().forward(x) if which == "all" else self.up(x)[..., : x.size(-1)]


LateNet.block = LateBlock


@pytest.mark.parametrize("param_dtype, backend", [(None, None), (torch.bfloat16, None), (torch.bfloat16, "fsdp_eager")])
def test_first_gradient_in_the_last_micro_batch(ranks2, param_dtype, backend):
    ranks2.run(_late, param_dtype, backend)


def _late(param_dtype, backend):
    """Accumulated gradients are float32 and new ones bfloat16: torch reduces them as if all were of one dtype."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model, single = build(LateNet, mp_policy=policy), one_process(LateNet)
    forward = compiled(model, backend)
    for _ in range(2):
        for step in range(3):
            model.late = single.late = step == 2
            model.set_requires_gradient_sync(step == 2)
            forward(my_part(batch(step))).float().square().mean().backward()
            if param_dtype is None:
                single(batch(step)).square().mean().backward()
            else:
                backward_in_bf16(single, step)
        assert_gradients(model, single, **(ROUGH if param_dtype else {}))
        model.zero_grad()
        single.zero_grad()


# -- what an optimizer holds, and what a forward leaves ---------------------------------------------------------------


def forwards(model, forward):
    forward(my_part(batch(7)))


def evaluates(model, forward):
    with torch.no_grad():
        forward(my_part(batch(7)))


def infers(model, forward):
    model.eval()
    with torch.inference_mode():
        forward(my_part(batch(7)))
    model.train()


def gathers_in_inference_mode(model, forward):
    with torch.inference_mode():
        for module in (model, *model.blocks):
            module.unshard()
            module.reshard()


BEFORE = [(before, None) for before in (forwards, evaluates, infers, gathers_in_inference_mode)]


@pytest.mark.parametrize("before, backend", [*BEFORE, (forwards, "fsdp_eager"), (infers, "fsdp_eager")])
def test_before_the_optimizer_is_built(ranks2, before, backend):
    ranks2.run(_before, before, backend)


def _before(before, backend):
    """After a forward torch shows the root's unsharded parameters: an optimizer that gets those trains nothing. After
    one in inference mode, its unsharded parameters are inference tensors for ever, and backward fails."""
    for choices in [{}] if backend else [{}, {"reshard_after_forward": False}, {"reshard_after_forward": True}]:
        model = build(**choices)
        forward = compiled(model, backend, fullgraph=True)
        before(model, forward)
        assert_all_sharded(model)
        start = [param.to_local().clone() for param in model.parameters()]
        train(model, forward)
        assert not any(map(torch.equal, start, (param.to_local() for param in model.parameters())))
        assert_close_to_one_process(model, one_process())


# -- views ------------------------------------------------------------------------------------------------------------


class Reshaped(Block):
    def forward(self, x):
        return super().forward(x).view(-1, 3, 4)


class Transposed(Block):
    def forward(self, x):
        return super().forward(x).t()


class Sliced(Block):
    def forward(self, x):
        return self.up(self.norm(x))[:, : x.size(-1)]  # leaves `down` without a gradient


class TwoViews(Block):
    """Two views of one tensor, one of which is changed."""

    def forward(self, x):
        y = super().forward(x)
        return y.view(-1, 3, 4), y.view(-1, 12)


class AddsInPlace(Net):
    """Adds in place to what its blocks return, a parameter of its own among it."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            outputs = block(x)
            out, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
            out += x.t() if isinstance(block, Transposed) else x.view(out.shape)
            out *= 0.5
            x = (out.t() if isinstance(block, Transposed) else out.reshape(-1, 12)) + sum(rest)
        return self.head(x)


def adds_in_place(block):
    return type(f"Adds{block.__name__}", (AddsInPlace,), {"block": block})


VIEWS = [(block, None) for block in (Reshaped, Transposed, Sliced, TwoViews)]


@pytest.mark.parametrize("block, backend", [*VIEWS, (Transposed, "fsdp_eager"), (TwoViews, "fsdp_eager")])
def test_in_place_on_a_view_that_a_block_returns(ranks2, block, backend):
    ranks2.run(_view, block, backend)


def _view(block, backend):
    """Autograd drops the hook on an output that is changed so: torch warns, and has no parameters in the backward."""
    model = build(adds_in_place(block))
    history = train(model, compiled(model, backend, fullgraph=True))
    assert not any(value is not None and value.isnan().any() for step in history for value in step)
    assert_close_to_one_process(model, one_process(adds_in_place(block)))
    assert_all_sharded(model)


# -- several modules as one group -------------------------------------------------------------------------------------


class Ordered(Net):
    order = ()

    def __init__(self):
        super().__init__(blocks=3)

    def forward(self, x):
        x = self.inp(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x).sin() + self.head(x * 2)  # as when a loss is computed in chunks


def grouped(order):
    torch.manual_seed(0)
    model = Ordered()
    model.order = order
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.blocks[2], model.head])
    return fully_shard(model)


ORDERS = [(0, 0, 1, 2), (0, 1, 0, 2), (1, 2, 0, 1), (0, 2), (2, 1, 1, 0, 0), (2, 0, 1, 2, 0, 1)]
CASES = [(order, None) for order in ORDERS] + [((0, 1, 0, 2), "fsdp_eager")]


@pytest.mark.parametrize("order, backend", CASES)
def test_members_of_a_group_called_twice_or_never(ranks2, order, backend):
    ranks2.run(_group, order, backend)


def _group(order, backend):
    model, single = grouped(order), one_process(Ordered)
    single.order = order
    train(model, compiled(model, backend, fullgraph=True))
    assert_close_to_one_process(model, single)
    assert_all_sharded(model)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("order", [(0, 0, 1, 2), (0, 2)])
def test_a_forward_leaves_no_member_unsharded(ranks2, order, grad):
    ranks2.run(_leaves, order, grad)


def _leaves(order, grad):
    model = grouped(order)
    with torch.set_grad_enabled(grad):
        model(my_part(batch(0)))
    assert_all_sharded(model)
