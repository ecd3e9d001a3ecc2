"""What others do to a sharded model between its steps: other optimizers, new parameters, exceptions, handles, hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import Net, batch, my_part, shard
from side_by_side import Collectives, build, loss_of, one_batch
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils.rnn import pack_sequence

import fsdp_compile
from fsdp_compile import fully_shard, register_fsdp_forward_method
from fsdp_compile.nested import cast_floating_point, map_tensors

ONES = torch.ones(4, 12)


def gathers_of(function: Any) -> int:
    with Collectives() as counted:
        function()
    return sum(event[0] == "gather" for event in counted.issued)


def step_elsewhere_on_one_rank() -> None:
    """Whether a gather is due may not depend on what one rank does."""
    model, probe = build(fsdp_compile), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    loss = loss_of(model(ONES))
    if dist.get_rank() == 0:
        probe(torch.ones(2)).sum().backward()
        optimizer.step()
    assert gathers_of(loss.backward) == 2  # the blocks; the root is kept


def optimizers_in_backward() -> None:
    """Each steps as soon as its parameter has a gradient; gathers ahead of others' steps are not thrown away."""
    model = build(fsdp_compile, lambda: Net(blocks=6))
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    one_batch(model, 0, lambda step: ONES)
    loss = loss_of(model(ONES))
    assert gathers_of(loss.backward) == 6


def writes_that_no_version_shows() -> None:
    model = build(fsdp_compile)
    first = model(ONES).detach()  # with gradients, but without a backward
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2.0)
    doubled = model(ONES)
    model.reshard()
    assert torch.equal(doubled, model(ONES)) and not torch.equal(doubled, first)
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().mul_(0.5)
    assert torch.equal(model(ONES), first)


def exception_without_reset() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise ValueError("on purpose")

    model, other = build(fsdp_compile), build(fsdp_compile)
    hook = model.blocks[0].register_forward_hook(lambda module, args, output: Fails.apply(output))
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model(ONES)).backward()
    hook.remove()
    model.zero_grad()
    for each in (model, other):
        one_batch(each, 0, lambda step: ONES)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


def replace_parameters() -> None:
    model = build(fsdp_compile)
    new = torch.full((3, 12), 0.5)
    model.head.weight = nn.Parameter(
        distribute_tensor(new, model.head.weight.device_mesh, model.head.weight.placements)
    )
    model.unshard()
    assert torch.equal(model.head.weight, new)
    model.reshard()
    assert torch.equal(model.head.weight.full_tensor(), new)
    zeros = {name: torch.zeros(param.shape) for name, param in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"inp\.weight was replaced by a Tensor"):
        torch.func.functional_call(model, zeros, (ONES,))


def handle_of_a_gather() -> None:
    """A gather that the user has started is theirs, also if the forward goes another way than the last."""
    model = build(fsdp_compile, lambda: Skips())
    for skip in (False, True, False):
        model.skip = skip
        handle = model.extra.unshard(async_op=True)
        model(ONES)
        handle.wait()
        assert (type(model.extra.weight.data) is torch.Tensor) == skip  # else its forward has freed it
        model.extra.reshard()


class Skips(Net):
    skip = False

    def __init__(self) -> None:
        super().__init__()
        self.extra = fully_shard(nn.Linear(12, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.skip else self.extra(x))


def methods_of_an_instance() -> None:
    model = shard(Net(), fully_shard)
    model.own = lambda x, scale: scale * type(model).forward(model, x)
    register_fsdp_forward_method(model, "own")
    expected = model(ONES)
    assert torch.equal(model.own(ONES, scale=2), 2 * expected)


class WithComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 12))
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.never = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.t()).sum() + self.phase.abs().sum()


def complex_parameters() -> None:
    model = fully_shard(WithComplex())
    model(ONES).backward()
    assert model.never.grad is None and model.phase.grad is not None


def hook_on_absent() -> None:
    model = fully_shard(WithComplex())
    model.set_all_reduce_hook(lambda reduced: reduced.add_(1.0))
    model(ONES).backward()
    assert model.never.grad is None and model.phase.grad is not None


def strict_modules() -> None:
    class Strict(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            if "fsdp" in name:
                raise AttributeError(name)
            super().__setattr__(name, value)

    class Final(nn.Linear):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise TypeError("no subclasses")

    strict, final = fully_shard(Strict(12, 3)), Final(12, 3)
    loss_of(strict(my_part(batch(0)))).backward()
    weight = final.weight
    with pytest.raises(TypeError, match="no subclasses"):
        fully_shard(final)
    assert final.weight is weight and type(final) is Final


def no_grad_with_kept_parameters() -> None:
    model = build(fsdp_compile, reshard_after_forward=False)
    with torch.no_grad():
        model(ONES)
        assert gathers_of(lambda: model(ONES)) == 0


@pytest.mark.parametrize(
    "surprise",
    [
        step_elsewhere_on_one_rank,
        optimizers_in_backward,
        writes_that_no_version_shows,
        exception_without_reset,
        replace_parameters,
        handle_of_a_gather,
        methods_of_an_instance,
        complex_parameters,
        hook_on_absent,
        strict_modules,
        no_grad_with_kept_parameters,
    ],
)
def test_surprise(ranks2, surprise: Any) -> None:
    ranks2.run(surprise)


def test_packed_sequences() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    cast = cast_floating_point(torch.bfloat16, packed)
    assert cast.data.dtype == torch.bfloat16 and cast.batch_sizes is packed.batch_sizes
    moved = map_tensors(lambda tensor: tensor.to("meta"), packed)  # but for the sizes, which belong on the host
    assert moved.data.is_meta and moved.batch_sizes is packed.batch_sizes


class UsesWeightBesideTheCall(Net):
    def forward(self, x):
        first = self.blocks[0]
        first.unshard()
        beside = x @ first.up.weight.t()
        first.reshard()
        return self.head(first(self.inp(x))) + beside.sum()


def test_gradient_that_arrives_after_the_modules_backward(ranks2):
    ranks2.run(_late_gradient)


def _late_gradient():
    torch.manual_seed(0)
    model = shard(UsesWeightBesideTheCall(), fully_shard)
    torch.manual_seed(0)
    single, x = Net(), batch(0)
    model(my_part(x)).sum().backward()
    first = single.blocks[0]
    for part in x.chunk(2):
        out = single.head(first(single.inp(part))) + (part @ first.up.weight.t()).sum()
        (out.sum() / 2).backward()
    torch.testing.assert_close(model.blocks[0].up.weight.grad.full_tensor(), first.up.weight.grad)
